"""Runs random nested programs and compares them with eager PyTorch and with the same programs inlined.

    python tools/random_programs.py --count 2000 --seed 1 [--processes 2]

The exit code is 1 if a nested program differs; its source is printed. Needs the ``test`` extra.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "thunder" / "tests"))

warnings.simplefilter("ignore")

from random_programs import compare, sample  # noqa: E402


def outcome(source: str) -> tuple[str, str]:
    """How a program fared, and its source."""
    try:
        return compare(source), source
    except Exception as error:
        return f"DIFFERS: {type(error).__name__}: {error}", source


def main() -> int:
    """Prints the counts, and the programs that differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    programs = sample(arguments.count, arguments.seed)
    counts: collections.Counter[str] = collections.Counter()
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for kind, source in pool.imap_unordered(outcome, programs):
            counts[kind.split(":")[0]] += 1
            if kind.startswith("DIFFERS"):
                print(kind, source, sep="\n", flush=True)
            if (done := sum(counts.values())) % 100 == 0:
                print(f"{done} of {len(programs)}: {dict(counts)}", flush=True)
    print(f"{len(programs)} programs, seed {arguments.seed}, {time.perf_counter() - start:.0f} s: {dict(counts)}")
    return 1 if counts["DIFFERS"] else 0


if __name__ == "__main__":
    sys.exit(main())
