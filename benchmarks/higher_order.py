"""What the operators cost when they run: against eager PyTorch with Python's control flow, and torch.compile.

    python benchmarks/higher_order.py [--rounds 15] [--operators cond,scan,while_loop,checkpoint]

For each operator three processes take turns, forward and backward, so that all see the same machine: *thunder* has the
operator compiled with the torch executor, *eager* has the same program with ``if`` and ``for``, *inductor* has the
operator under ``torch.compile``. Printed are the medians, the median of the ratios to eager within a round, and how far
the peak memory of a process rose in its steps. Results and gradients are compared with eager's first.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

KINDS = ("eager", "thunder", "inductor")
OPERATORS = ("cond", "scan", "while_loop", "checkpoint")
SIZE, STEPS = 512, 64  # one step is a product of 256 x 512 and 512 x 512 numbers, a few milliseconds


def python_cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: tuple) -> Any:
    """``torch.cond`` in Python."""
    return true_fn(*operands) if pred else false_fn(*operands)


def python_scan(combine_fn: Callable, init: Any, xs: Any) -> tuple[Any, Any]:
    """``scan`` in Python."""
    import torch

    results = []
    for x in xs:
        init, result = combine_fn(init, x)
        results.append(result)
    return init, torch.stack(results)


def python_while_loop(cond_fn: Callable, body_fn: Callable, carry: tuple) -> tuple:
    """``while_loop`` in Python."""
    while cond_fn(*carry):
        carry = body_fn(*carry)
    return carry


def program(operator: str, *, python: bool) -> Callable:
    """A program that uses the operator, or Python's control flow: of ``x`` (256 x 512) and ``w`` (512 x 512)."""
    import torch
    from torch._higher_order_ops import scan, while_loop
    from torch.utils.checkpoint import checkpoint

    cond, scan, while_loop = (python_cond, python_scan, python_while_loop) if python else (torch.cond, scan, while_loop)

    def block(x: Any, w: Any) -> Any:
        return torch.tanh(x @ w) + 0.5 * x

    def cond_program(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = cond(x.sum() > 0, lambda a: block(a, w), lambda a: block(-a, w), (x,))
        return x

    def scan_program(x: Any, w: Any) -> Any:
        xs = (torch.arange(STEPS) / STEPS + 0.5)[:, None, None]
        return scan(lambda carry, s: (block(carry * s, w), carry.mean(0)), x, xs)[1]

    def while_program(x: Any, w: Any) -> Any:
        return while_loop(lambda i, a: i < STEPS // 2, lambda i, a: (i + 1, block(a, w)), (torch.tensor(0), x))[1]

    def checkpoint_program(x: Any, w: Any) -> Any:
        for _ in range(4):
            x = checkpoint(lambda a: block(block(a, w), w), x, use_reentrant=False)
        return x

    return {
        "cond": cond_program,
        "scan": scan_program,
        "while_loop": while_program,
        "checkpoint": checkpoint_program,
    }[operator]


def worker(kind: str, operator: str) -> None:
    """Makes one step for each line of standard input, and prints the seconds and the rise of the peak memory."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    fn = program(operator, python=kind == "eager")
    if kind == "thunder":
        import thunder

        fn = thunder.jit(fn, executors=[thunder.pytorch_executor])
    elif kind == "inductor":
        fn = torch.compile(fn)
    x, w = torch.randn(SIZE // 2, SIZE), torch.randn(SIZE, SIZE) / SIZE**0.5

    def step(fn: Callable) -> list[torch.Tensor]:
        inputs = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        out = fn(*inputs)
        out.square().mean().backward()
        return [out.detach(), *(i.grad for i in inputs)]

    start = peak()
    for _ in sys.stdin:
        begin = time.perf_counter()
        found = step(fn)
        print(json.dumps({"seconds": time.perf_counter() - begin, "megabytes": peak() - start}), flush=True)
    if kind != "eager":
        torch.testing.assert_close(found, step(program(operator, python=True)), rtol=1e-3, atol=1e-5)
    print("equal", flush=True)


def peak() -> float:
    """The peak memory of this process until now, in megabytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(operator: str, rounds: int) -> dict[str, list[dict[str, float]]]:
    """What each kind printed, round for round; the first two, which compile, are dropped. Empty for one that fails."""
    processes = {
        kind: subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", kind, "--operators", operator],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if kind == "inductor" else None,
            text=True,
        )
        for kind in KINDS
    }
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 2):
        for kind, process in processes.items():
            answer = ask(process)
            if answer:
                found[kind].append(json.loads(answer))
    for kind, process in processes.items():
        rest, _ = process.communicate()
        if rest.strip() != "equal":
            if kind != "inductor":
                raise SystemExit(f"{operator}: {kind} failed")
            found[kind] = []
    return {kind: answers[2:] for kind, answers in found.items()}


def ask(process: subprocess.Popen) -> str:
    """What the process prints for one step; nothing if it has failed."""
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return process.stdout.readline()


def rows(operator: str, found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The table's rows for one operator."""
    lines = []
    eager = [answer["seconds"] for answer in found["eager"]]
    for kind, answers in found.items():
        if not answers:
            lines.append(f"{operator:12} {kind:10} fails")
            continue
        seconds = [answer["seconds"] for answer in answers]
        ratio = statistics.median(s / e for s, e in zip(seconds, eager))
        lines.append(
            f"{operator:12} {kind:10} {1000 * statistics.median(seconds):9.1f} ms {ratio:8.2f} "
            f"{answers[-1]['megabytes']:9.0f} MB"
        )
    return lines


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--operators", default=",".join(OPERATORS))
    parser.add_argument("--worker", choices=KINDS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.worker, arguments.operators)
        return
    show = functools.partial(print, flush=True)
    show(f"{'operator':12} {'':10} {'step':>12} {'/ eager':>8} {'memory':>12}")
    for operator in arguments.operators.split(","):
        for line in rows(operator, measure(operator, arguments.rounds)):
            show(line)


if __name__ == "__main__":
    main()
