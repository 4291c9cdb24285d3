"""A program that nests nothing has the traces that stock thunder gives it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
if sys.argv[1] == "stock":
    import absent_torch_names
import torch
import thunder
from thunder.tests.nanogpt_model import Block, GPTConfig

WEIGHT, FACTOR = torch.ones(4), 3

class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        seen = [x * FACTOR]
        for i in range(2):
            seen.append(self.norm(seen[-1]) + len(seen))
        with torch.no_grad():
            y = seen[0].sin()
        try:
            raise ValueError("text")
        except ValueError as error:
            return {"sum": sum(seen) + y + WEIGHT, "size": len(str(error))}

torch.manual_seed(0)
for cache in ("constant values", "symbolic values"):
    for fn, x in (
        (lambda a: torch.nn.functional.softmax(a @ a.t() * a.shape[0], -1), torch.randn(3, 4, requires_grad=True)),
        (Norm(), torch.randn(3, 4, requires_grad=True)),
        (Block(GPTConfig(n_embd=16, n_head=2, block_size=8, dropout=0.0)), torch.randn(2, 8, 16)),
    ):
        if cache == "symbolic values" and isinstance(fn, Block):
            continue
        jitted = thunder.jit(fn, cache=cache)
        try:
            jitted(x)
        except Exception as error:
            print(type(error).__name__)
            continue
        for traces in (thunder.last_prologue_traces(jitted), thunder.last_traces(jitted)):
            print(*traces, sep="\\n")
"""


def traces(kind: str) -> str:
    """All traces of the script's programs."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tools"), "THUNDER_NESTED_JIT": str(int(kind != "stock"))}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, kind]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(took \d+ milliseconds\)", "", printed)


def test_traces_are_those_of_stock_thunder():
    stock, patched = traces("stock"), traces("patched")
    assert patched == stock
    assert stock.count("def computation") > 20 and stock.count("def prologue") >= 4
