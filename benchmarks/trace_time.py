"""How long a deep model takes to trace and to compile: stock lightning-thunder, with regions, and torch.compile.

    python benchmarks/trace_time.py --layers 1,2,4,8,16 [--models nanogpt,llama] [--plot trace_time.png]

Each measurement is a process of its own: the seconds of tracing, of the whole first call (forward and backward), of a
further step (the best of several), and the peak memory. The last lines compare with stock thunder in the same run.
The models are lightning-thunder's own test models: nanoGPT at width 64, and a small Llama. The plot needs the
``benchmark`` extra.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent.parent / "tools"
KINDS = ("stock", "patched", "regions", "inductor", "inductor regions")


def build(model: str, layers: int, marked: bool) -> tuple[Any, Any, type]:
    """The model, its input, and the class of its blocks; with ``marked``, blocks are nested compile regions."""
    import torch

    torch.manual_seed(0)
    if model == "nanogpt":
        from thunder.tests.nanogpt_model import GPT, Block, GPTConfig

        config = GPTConfig(n_layer=layers, n_embd=64, n_head=4, block_size=64, dropout=0.0, vocab_size=128)
        built, block = GPT(config), Block
        blocks = built.transformer.h
    else:
        from thunder.tests.llama2_model import ModelArgs, Transformer, TransformerBlock

        arguments = ModelArgs(dim=64, n_layers=layers, n_heads=4, vocab_size=128, max_seq_len=64)
        built, block = Transformer(arguments), TransformerBlock
        blocks = built.layers
    if marked:
        for b in blocks:
            b.forward = torch.compiler.nested_compile_region(_plain(b.forward))
    return built, torch.randint(0, 128, (2, 64)), block


def _plain(method: Any) -> Any:
    """A function that calls the bound method, because torch sets attributes on what it marks."""
    return lambda *args: method(*args)


def worker(kind: str, model: str, layers: int) -> None:
    """Measures one combination and prints it as JSON."""
    if kind == "stock":
        import absent_torch_names  # noqa: F401
    import torch

    import thunder

    built, x, block = build(model, layers, marked=kind == "inductor regions")
    if kind.startswith("inductor"):
        compiled = torch.compile(built)
    else:
        compiled = thunder.jit(built, **({"nested_regions": [block]} if kind == "regions" else {}))

    def step() -> float:
        start = time.perf_counter()
        result = compiled(x)
        (result[0] if isinstance(result, tuple) else result).sum().backward()
        return time.perf_counter() - start

    found = {"first call": step(), "tracing": None}
    if not kind.startswith("inductor"):
        stats = thunder.compile_stats(compiled)
        found["tracing"] = (stats.last_trace_tracing_stop - stats.last_trace_tracing_start) / 1e9
    found["step"] = min(step() for _ in range(20))
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(json.dumps(found))


def measure(kind: str, model: str, layers: int) -> dict[str, float | None] | None:
    """Runs a worker; None if it fails, which is said."""
    environment = os.environ | {
        "PYTHONPATH": str(TOOLS),
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }
    environment["THUNDER_NESTED_JIT"] = "0" if kind == "stock" else "1"
    command = [sys.executable, __file__, "--worker", kind, model, str(layers)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        print(f"{kind}, {model}, {layers} layers failed: {run.stderr.strip().splitlines()[-1]}")
        return None
    return json.loads(run.stdout.strip().splitlines()[-1])


def table(model: str, results: dict[tuple[str, int], dict[str, Any]], layers: list[int]) -> None:
    """Prints all measurements of a model, and the comparison with stock thunder."""
    print(f"\n{model:<18}{'layers':>7}{'tracing':>10}{'first call':>12}{'step':>10}{'memory':>10}")
    for (kind, n), found in results.items():
        tracing = "" if found["tracing"] is None else f"{found['tracing']:.1f} s"
        call, step = f"{found['first call']:.1f} s", f"{found['step'] * 1e3:.1f} ms"
        print(f"{kind:<18}{n:>7}{tracing:>10}{call:>12}{step:>10}{found['memory']:>7.0f} MB")
    few, many = layers[0], layers[-1]
    ends = [results.get((kind, n)) for kind in ("stock", "regions") for n in (few, many)]
    if None in ends or few == many:
        return
    stock, ours = ends[1], ends[3]
    slopes = [(b["tracing"] - a["tracing"]) / (many - few) for a, b in (ends[:2], ends[2:])]
    print(f"regions against stock at {many} layers: tracing 1/{stock['tracing'] / ours['tracing']:.1f}", end=", ")
    print(f"tracing a further layer 1/{slopes[0] / max(slopes[1], 1e-9):.0f}", end=", ")
    print(f"first call 1/{stock['first call'] / ours['first call']:.1f}, step {ours['step'] / stock['step']:.2f}")


def plot(file: str, results: dict[str, dict[tuple[str, int], dict[str, Any]]], layers: list[int]) -> None:
    """Draws tracing time and first call over the number of layers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(results), 2, figsize=(11, 4 * len(results)), squeeze=False)
    for row, (model, found) in zip(axes, results.items()):
        for axis, quantity in zip(row, ("tracing", "first call")):
            for kind in KINDS:
                points = [(n, found[kind, n][quantity]) for n in layers if (kind, n) in found]
                points = [(n, value) for n, value in points if value is not None]
                if points:
                    axis.plot(*zip(*points), marker="o", label=kind)
            axis.set(xlabel="layers", ylabel="seconds", title=f"{model}: {quantity}", xscale="log", yscale="log")
            axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")


def main() -> None:
    """Measures, prints and plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="1,2,4,8,16,32")
    parser.add_argument("--models", default="nanogpt,llama")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--plot")
    parser.add_argument("--worker", nargs=3)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, model, n = arguments.worker
        return worker(kind, model, int(n))
    layers = [int(n) for n in arguments.layers.split(",")]
    results: dict[str, dict[tuple[str, int], dict[str, Any]]] = {}
    for model in arguments.models.split(","):
        results[model] = {}
        for n in layers:
            for kind in arguments.kinds.split(","):
                found = measure(kind, model, n)
                if found is not None:
                    results[model][kind, n] = found
        table(model, results[model], layers)
    if arguments.plot:
        plot(arguments.plot, results, layers)


if __name__ == "__main__":
    main()
