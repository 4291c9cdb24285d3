"""How long a deep model takes to trace and to compile: stock lightning-thunder, with regions, and torch.compile.

    python benchmarks/trace_time.py [--layers 1,2,4,8,16,32] [--models nanogpt,llama] [--kinds stock,regions]
        [--limit 600] [--most stock=16] [--json trace_time.json] [--plot trace_time.png]

Each measurement is a process of its own: the seconds of tracing, of the whole first call (forward and backward), and
the peak memory; outputs and gradients are compared with eager PyTorch. The processes of one model and depth then stay
alive and run steps in turn, round by round, so that what disturbs the machine disturbs all: a step's ratio to stock's
is the median over rounds of the ratio of the fastest steps of the round. Measurements are written to the JSON file one
by one, and are not made again if they are there already; table and plot are drawn from it. The models are
lightning-thunder's own test models: nanoGPT at width 64, and a small Llama. The plot needs the ``benchmark`` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KINDS = ("stock", "patched", "regions", "inductor", "inductor regions")
ROUNDS, STEPS = 10, 5
Results = dict[str, dict[str, Any]]  # of each "model, layers, kind"


def build(model: str, layers: int, marked: bool) -> tuple[Any, Any, type]:
    """The model, its input, and the class of its blocks; with ``marked``, blocks are nested compile regions."""
    import torch

    torch.manual_seed(0)
    if model == "nanogpt":
        from thunder.tests.nanogpt_model import GPT, Block, GPTConfig

        config = GPTConfig(n_layer=layers, n_embd=64, n_head=4, block_size=64, dropout=0.0, vocab_size=128)
        built, block = GPT(config), Block
    else:
        from thunder.tests.llama2_model import ModelArgs, Transformer, TransformerBlock

        arguments = ModelArgs(dim=64, n_layers=layers, n_heads=4, vocab_size=128, max_seq_len=64)
        built, block = Transformer(arguments), TransformerBlock
    if marked:
        block.forward = torch.compiler.nested_compile_region(block.forward)
    return built, torch.randint(0, 128, (2, 64)), block


def worker(kind: str, model: str, layers: int) -> None:
    """Measures one combination, prints it as JSON, and then the seconds of the fastest of some steps for each line."""
    if kind == "stock":
        import absent_torch_names  # noqa: F401
    import torch

    import thunder

    torch.set_num_threads(1)  # idle threads of one process would spin while the next makes its steps
    built, x, block = build(model, layers, marked=kind == "inductor regions")
    reference, _, _ = build(model, layers, marked=False)
    if kind.startswith("inductor"):
        compiled = torch.compile(built)
    else:
        compiled = thunder.jit(built, **({"nested_regions": [block]} if kind == "regions" else {}))

    def step(fn: Callable = compiled) -> Any:
        result = fn(x)
        result = result[0] if isinstance(result, tuple) else result
        result.sum().backward()
        return result

    start = time.perf_counter()
    result = step()
    found = {"first call": time.perf_counter() - start, "tracing": None}
    try:
        torch.testing.assert_close(result, step(reference), rtol=1e-3, atol=1e-4)
        for p, expected in zip(built.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p.grad, expected.grad, rtol=1e-3, atol=1e-4)
    except AssertionError:
        if not kind.startswith("inductor"):
            raise
        found["differs"] = True  # a peer is measured all the same
    if not kind.startswith("inductor"):
        stats = thunder.compile_stats(compiled)
        found["tracing"] = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        print(min(seconds), flush=True)


class Worker:
    """The process of one measurement.

    Attributes:
        found: what it has measured; ``{"not measured": why}`` if it failed or took longer than ``limit`` seconds.
    """

    def __init__(self, kind: str, model: str, layers: int, limit: float):
        environment = os.environ | {
            "PYTHONPATH": str(TOOLS),
            "PYTHONWARNINGS": "ignore",
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "THUNDER_NESTED_JIT": "0" if kind == "stock" else "1",
        }
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", kind, model, str(layers)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        timer = threading.Timer(limit, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        too_long = not timer.is_alive()
        timer.cancel()
        self.found = json.loads(line) if line else {"not measured": f"> {limit:.0f} s" if too_long else self._error()}

    def _error(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}"

    def step(self) -> float:
        """Seconds of the fastest of some steps."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()


def key(model: str, layers: int, kind: str) -> str:
    """Of a measurement in the results."""
    return f"{model}, {layers}, {kind}"


def measure(results: Results, model: str, layers: int, kinds: list[str], limit: float, save: Callable) -> None:
    """Measures the kinds at one depth, each in its process; then their steps, in turn."""
    workers = {}
    for kind in kinds:
        workers[kind] = Worker(kind, model, layers, limit)
        results[key(model, layers, kind)] = workers[kind].found
        save()
    alive = {kind: worker for kind, worker in workers.items() if "first call" in worker.found}
    rounds = [{kind: worker.step() for kind, worker in alive.items()} for _ in range(ROUNDS)]
    for kind, worker in alive.items():
        worker.found["step"] = min(r[kind] for r in rounds)
        if "stock" in alive:
            worker.found["ratio"] = statistics.median(r[kind] / r["stock"] for r in rounds)
    for worker in workers.values():
        worker.close()
    save()


def table(results: Results, models: list[str], layers: list[int], kinds: list[str]) -> None:
    """Prints all measurements; what was not measured is said."""
    for model in models:
        header = ("tracing", "first call", "step", "of stock's", "memory")
        print(f"\n{model:<18}{'layers':>7}" + "".join(f"{h:>12}" for h in header))
        for n in layers:
            for kind in kinds:
                found = results.get(key(model, n, kind), {"not measured": "not measured"})
                print(f"{kind:<18}{n:>7}" + (_cells(found) if "first call" in found else f"  {found['not measured']}"))
        _comparison(results, model, layers)


def _cells(found: dict[str, Any]) -> str:
    formats = (("tracing", "{:.1f} s", 1), ("first call", "{:.1f} s", 1), ("step", "{:.1f} ms", 1e3))
    formats += (("ratio", "{:.2f}", 1), ("memory", "{:.0f} MB", 1))
    cells = "".join(f"{'-' if found.get(n) is None else f.format(found[n] * scale):>12}" for n, f, scale in formats)
    return cells + ("  differs from eager PyTorch" if "differs" in found else "")


def _comparison(results: Results, model: str, layers: list[int]) -> None:
    """Regions against stock thunder at the largest depth of both, and against torch.compile at that of both."""

    def at(kind: str, n: int) -> dict[str, Any] | None:
        found = results.get(key(model, n, kind))
        return found if found is not None and "first call" in found else None

    both = [n for n in layers if at("stock", n) and at("regions", n)]
    if len(both) > 1:
        few, many = both[0], both[-1]
        stock, ours = at("stock", many), at("regions", many)
        slopes = [(at(k, many)["tracing"] - at(k, few)["tracing"]) / (many - few) for k in ("stock", "regions")]
        print(f"regions against stock at {many} layers: tracing 1/{stock['tracing'] / ours['tracing']:.1f}", end=", ")
        print(f"tracing a further layer 1/{slopes[0] / max(slopes[1], 1e-9):.0f}", end=", ")
        print(f"first call 1/{stock['first call'] / ours['first call']:.1f}", end=", ")
        print(f"step {ours['ratio']:.2f}" if "ratio" in ours else "step not measured in the same run")
    both = [n for n in layers if at("inductor regions", n) and at("regions", n)]
    if both:
        ratio = at("regions", both[-1])["first call"] / at("inductor regions", both[-1])["first call"]
        print(f"regions against torch.compile with nested_compile_region at {both[-1]} layers: first call {ratio:.2f}")


def plot(file: str, results: Results, models: list[str], layers: list[int], kinds: list[str]) -> None:
    """Draws tracing time, first call, memory and the step's ratio over the number of layers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    quantities = (("tracing", "s"), ("first call", "s"), ("memory", "MB"), ("ratio", "of stock's step"))
    figure, axes = pyplot.subplots(len(models), 4, figsize=(18, 4 * len(models)), squeeze=False)
    for row, model in zip(axes, models):
        for axis, (quantity, unit) in zip(row, quantities):
            for kind in kinds:
                points = [(n, results.get(key(model, n, kind), {}).get(quantity)) for n in layers]
                points = [(n, value) for n, value in points if value is not None]
                if points:
                    axis.plot(*zip(*points), marker="o", label=kind)
                    axis.legend()
            scale = "linear" if quantity == "ratio" else "log"
            axis.set(xlabel="layers", ylabel=unit, title=f"{model}: {quantity}", yscale=scale)
            axis.set_xscale("log", base=2)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")


def main() -> None:
    """Measures what the JSON file does not have yet, prints and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="1,2,4,8,16,32")
    parser.add_argument("--models", default="nanogpt,llama")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--limit", type=float, default=900, help="seconds for one process to make its first call")
    parser.add_argument("--most", default="", help="most layers of a kind: stock=16,patched=16")
    parser.add_argument("--json", type=Path, default=Path("trace_time.json"))
    parser.add_argument("--plot")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, model, n = arguments.worker
        return worker(kind, model, int(n))
    layers, models = [int(n) for n in arguments.layers.split(",")], arguments.models.split(",")
    kinds, most = arguments.kinds.split(","), dict(m.split("=") for m in arguments.most.split(",") if m)
    results: Results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}

    def save() -> None:
        arguments.json.write_text(json.dumps(results, indent=1))

    for model in models:
        for n in layers:
            wanted = [k for k in kinds if n <= int(most.get(k, n))]
            if not all({"step", "not measured"} & results.get(key(model, n, k), {}).keys() for k in wanted):
                measure(results, model, n, wanted, arguments.limit, save)
    table(results, models, layers, kinds)
    if arguments.plot:
        plot(arguments.plot, results, models, layers, kinds)


if __name__ == "__main__":
    main()
