"""Runs the tests that ship inside the installed lightning-thunder, with the patch and without it, and compares.

    python tools/upstream_tests.py                                  # the eight files that the patch concerns
    python tools/upstream_tests.py test_jit_general test_interpreter

Without the patch (``THUNDER_NESTED_JIT=0``) bare stand-ins are set for the five names that torch removed, because
stock thunder cannot be imported else. The exit code is 1 if a test passes without the patch and does not with it.
Needs the ``test`` extra.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
FILES = (
    "test_jit_general",
    "test_interpreter",
    "test_core",
    "test_transforms",
    "test_update_aliases",
    "test_inplace_copy",
    "test_extend",
    "test_autocast",
)


def start(files: list[str], patched: bool, report: Path) -> subprocess.Popen:
    """Starts pytest on the installed test files."""
    tests = Path(find_spec("thunder").origin).parent / "tests"
    plugins = [] if patched else ["-p", "absent_torch_names"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "-p", "no:cacheprovider", f"--junitxml={report}"]
    environment = os.environ | {"THUNDER_NESTED_JIT": "1" if patched else "0", "PYTHONPATH": str(TOOLS)}
    return subprocess.Popen(
        [*command, *(str(tests / f"{file}.py") for file in files)],
        env=environment,
        cwd=report.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def outcomes(report: Path) -> dict[str, str]:
    """Test name to ``passed``, ``skipped``, ``failed`` or ``error``."""
    names = {"failure": "failed"}
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kind = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = names.get(kind, kind)
    return found


def main(files: list[str]) -> int:
    """Prints the comparison and returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        reports = {patched: Path(folder) / f"{patched}.xml" for patched in (True, False)}
        for process in [start(files, patched, report) for patched, report in reports.items()]:
            process.wait()
        patched, stock = outcomes(reports[True]), outcomes(reports[False])
    for name, found in (("with the patch", patched), ("without it", stock)):
        counts = {kind: list(found.values()).count(kind) for kind in sorted(set(found.values()))}
        print(f"{name}: {len(found)} tests, {counts}")
    worse = [name for name, kind in stock.items() if kind == "passed" and patched.get(name) != "passed"]
    better = [name for name, kind in patched.items() if kind == "passed" and stock.get(name) != "passed"]
    for title, tests in (("passes only without the patch", worse), ("passes only with the patch", better)):
        for name in tests:
            print(f"{title}: {name} (patched: {patched.get(name)}, stock: {stock.get(name)})")
    if not any(kind == "passed" for kind in stock.values()):
        print("no test passed without the patch, so nothing was compared")
        return 1
    print(f"{len(worse)} tests are worse, {len(better)} better")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FILES)))
