"""A program that nests nothing has the traces that stock thunder gives it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

import thunder
from thunder.core.jit_ext import JitCtx

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

def lists(x):
    parts = torch.split(torch.dropout(x, 0.5, True), [1, 2])
    changed = x.clone()
    changed.mul_(2)
    return [p.sin() for p in parts], {"mean": torch.var_mean(x, 0), "all": torch.cat(parts) + changed, "none": None}

torch.manual_seed(0)
for cache in ("constant values", "symbolic values"):
    for fn, x in (
        (lambda a: torch.nn.functional.softmax(a @ a.t() * a.shape[0], -1), torch.randn(3, 4, requires_grad=True)),
        (Norm(), torch.randn(3, 4, requires_grad=True)),
        (lists, torch.randn(3, 4, requires_grad=True)),
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
    environment["PYTHONHASHSEED"] = "0"  # thunder writes sets of proxies into traces
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, kind]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(took \d+ milliseconds\)", "", printed)


def test_traces_are_those_of_stock_thunder():
    stock, patched = traces("stock"), traces("patched")
    assert patched == stock
    assert stock.count("def computation") > 20 and stock.count("def prologue") >= 4


def test_a_copied_bound_symbol_is_flattened_anew_if_its_arguments_were_replaced():
    jitted = thunder.jit(lambda a, b: (a * b).sin())
    jitted(torch.ones(2), torch.ones(2))
    bsym = next(b for b in thunder.last_traces(jitted)[0].bound_symbols if len(b.flat_proxy_args) == 2)
    first, second = bsym.flat_proxy_args
    copied = bsym.from_bsym()
    assert copied.flat_args_and_spec is bsym.flat_args_and_spec
    copied = bsym.from_bsym()
    copied.args = (second, second)
    assert [p.name for p in copied.flat_proxy_args] == [second.name, second.name]
    assert [p.name for p in bsym.from_bsym(output=first).flat_proxy_outs] == [first.name]


def test_equal_constraints_are_recorded_once():
    added = []

    class Recording(list):
        def append(self, constraint):
            added.append(constraint)
            super().append(constraint)

    ctx = object.__new__(JitCtx)
    ctx._constraints, ctx._known_constraints = Recording(), set()
    for value in (1, 1, 2, [1], [1], [2]):
        ctx.add_constraint((len, value))
    assert [value for _, value in added] == [1, 2, [1], [2]]
