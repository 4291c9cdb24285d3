"""What nesting costs: the time to trace one nanoGPT block, nested and inlined by stock lightning-thunder.

    python benchmarks/nesting_overhead.py [--runs 7] [--width 64]

Three processes measure in turn, so that all see the same machine: *stock* has the patch off and calls the block; *off
the path* has the patch on and calls the block (a program that nests nothing); *nested* calls it through a lookaside
with ``thunder.nested.trace(...).inline()``. Printed are the medians, and ratios to stock within the same round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KINDS = {"stock": "0", "off the path": "1", "nested": "1"}


def worker(kind: str, width: int) -> None:
    """Traces the block once for each line of standard input, and prints the seconds."""
    if kind == "stock":
        import absent_torch_names  # noqa: F401
    import time

    import torch

    import thunder
    from thunder.tests.nanogpt_model import Block, GPTConfig

    def call(fn, x):
        return fn(x)

    if kind == "nested":
        import thunder.nested

        @thunder.nested.lookaside(call)
        def _call(fn, x):
            return thunder.nested.trace(fn, x).inline()

    block = Block(GPTConfig(n_embd=width, n_head=4, block_size=64, dropout=0.0))
    x = torch.randn(2, 64, width)
    for _ in sys.stdin:
        jitted = thunder.jit((lambda x: call(block, x)) if kind == "nested" else (lambda x: block(x)))
        start = time.perf_counter()
        jitted(x)
        elapsed = time.perf_counter() - start
        stats = thunder.compile_stats(jitted)
        tracing = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
        assert 0 < tracing <= elapsed
        print(tracing, flush=True)


def measure(runs: int, width: int) -> dict[str, list[float]]:
    """Seconds by kind, one for each round; the first round warms up and is dropped."""
    processes = {}
    for kind, patch in KINDS.items():
        environment = os.environ | {"THUNDER_NESTED_JIT": patch, "PYTHONPATH": str(TOOLS), "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, __file__, "--worker", kind, "--width", str(width)]
        processes[kind] = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(runs + 1):
        for kind, process in processes.items():
            process.stdin.write("\n")
            process.stdin.flush()
            seconds[kind].append(float(process.stdout.readline()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return {kind: values[1:] for kind, values in seconds.items()}


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--worker", choices=KINDS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker, arguments.width)
    seconds = measure(arguments.runs, arguments.width)
    print(f"{'tracing one block':<20}{'median':>10}{'ratio to stock':>18}{'(min to max)':>18}")
    for kind, values in seconds.items():
        ratios = [v / s for v, s in zip(values, seconds["stock"])]
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{kind:<20}{statistics.median(values):>9.2f}s{statistics.median(ratios):>18.2f}{spread:>18}")


if __name__ == "__main__":
    main()
