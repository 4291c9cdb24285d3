"""Regions: functions that are traced once and replayed many times. When a trace is reused, and what is told of it.

NOTE [regions]. The table of traces belongs to the outermost level, so it lives as long as one tracing and keeps no
model alive. A trace is reused for a call with the same code, grad mode, autocast, default dtype and device, from any
level, if everything that its tracing read is found again (``reads.py``). Its inputs are then looked up by their
paths from the new function and arguments, and its guards are raised to the enclosing level for the new objects. The
replayed computation has the operations that tracing would have recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue, get_interpreterruntimectx, unwrap
from thunder.core.trace import TraceResults
from thunder.nested.ambient import ambient_state
from thunder.nested.captures import Lift, wrap_call
from thunder.nested.errors import ArgumentError, OutsideTraceError, name_of
from thunder.nested.levels import Level, current_level
from thunder.nested.lookasides import as_lookaside
from thunder.nested.reads import Reads, Resolve
from thunder.nested.rewrap import is_rebuilt_from_parts
from thunder.nested.trace import NestedTrace, trace_with

MAX_TRACES = 8  # for each region and outer compilation, as torch.compile has


@dataclasses.dataclass
class RegionReport:
    """What happened to one region in the last compilation.

    Attributes:
        name: the function or module class, with file and line.
        depth: of the level that called it.
        traced, reused: how often.
        seconds: spent in tracing it, and in reusing it.
        reasons: why it was traced again, in order.
    """

    name: str
    depth: int
    traced: int = 0
    reused: int = 0
    seconds: tuple[float, float] = (0.0, 0.0)
    reasons: list[str] = dataclasses.field(default_factory=list)


class Report(list):
    """The reports of all regions of a compilation; prints as a table."""

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("region", "traced", "reused", "tracing", "reusing", "traced again, because")
        for r in self:
            name = "  " * r.depth + r.name
            tracing, reusing = (f"{s:.2f} s" for s in r.seconds)
            table.add_row(name, str(r.traced), str(r.reused), tracing, reusing, "\n".join(r.reasons))
        console = Console(width=160)
        with console.capture() as capture:
            console.print(table)
        return capture.get()


@dataclasses.dataclass
class _Entry:
    level: Level
    results: TraceResults
    reads: Reads
    ambient: tuple
    shape: tuple


class Regions:
    """The traces of the regions of one compilation."""

    def __init__(self) -> None:
        self.report = Report()
        self._entries: dict[Any, list[_Entry]] = {}
        self._reports: dict[Any, RegionReport] = {}

    def trace(self, fn: Any, args: tuple, kwargs: dict) -> tuple[NestedTrace, bool]:
        """The trace of a region for a call of it, to be replayed once, and whether it was reused.

        Args:
            fn, args, kwargs: the function and its arguments, wrapped or plain, as :func:`thunder.nested.trace` takes.
        """
        fn, args, kwargs = wrap_call(fn, args, kwargs)
        level, key = current_level(), _code(unwrap(fn))
        report = self._report(key, unwrap(fn), level)
        start = time.perf_counter()
        found, reasons = self._find(self._entries.setdefault(key, []), level, fn, args, kwargs)
        if found is not None:
            nested = NestedTrace(found.level, found.results, Lift(fn, args, kwargs, direct=True))
            report.reused += 1
            report.seconds = (report.seconds[0], report.seconds[1] + time.perf_counter() - start)
        else:
            report.reasons += reasons
            nested = trace_with(fn, args, kwargs, _as_region)
            self._keep(self._entries[key], nested, args, kwargs, report)
            report.traced += 1
            report.seconds = (report.seconds[0] + time.perf_counter() - start, report.seconds[1])
        return nested, found is not None

    def _report(self, key: Any, fn: Callable, level: Level) -> RegionReport:
        if key not in self._reports:
            self._reports[key] = RegionReport(name_of(fn), level.depth)
            self.report.append(self._reports[key])
        return self._reports[key]

    def _find(
        self, entries: list[_Entry], level: Level, fn: WrappedValue, args: tuple, kwargs: dict
    ) -> tuple[_Entry | None, list[str]]:
        ambient, shape = _ambient(), (len(args), tuple(kwargs))
        reasons = []
        resolve = Resolve(fn, args, kwargs, (get_interpreterruntimectx(), *level.runtimes))
        for entry in reversed(entries):
            if entry.ambient != ambient or entry.shape != shape:
                reasons.append("grad mode, autocast, defaults or the number of arguments differ")
                continue
            difference = entry.reads.difference(resolve)
            if difference is None:
                return entry, []
            reasons.append(difference)
        return None, reasons[:1]

    def _keep(
        self, entries: list[_Entry], nested: NestedTrace, args: tuple, kwargs: dict, report: RegionReport
    ) -> None:
        level = nested._level
        reason = level.reads.reason or _not_replayable(nested)
        if reason is not None:
            report.reasons.append(f"not reusable: {reason}")
        elif len(entries) >= MAX_TRACES:
            warnings.warn(
                f"The region {report.name} was traced {MAX_TRACES} times in one compilation; further traces of it are "
                f"not kept. `thunder.nested.report` tells why it was traced again.",
                stacklevel=2,
            )
        else:
            entries.append(_Entry(level, nested.results, level.reads, level.ambient, (len(args), tuple(kwargs))))


def _as_region(level: Level) -> None:
    level.is_traced_as_region, level.reads, level.ambient = True, Reads(), _ambient()


def _not_replayable(nested: NestedTrace) -> str | None:
    level = nested._level
    if nested.exception is not None:
        return f"it raised {type(nested.exception).__name__}"
    if any(i.path is None for i in nested.inputs):
        return "it uses a value of the enclosing level that no path leads to"
    members = [m[3] for modifications in level.ctx._additional_outputs.values() for m in modifications]
    if len(level.writes) or not all(is_rebuilt_from_parts(level, v) for v in (level.result, *members)):
        return "it changes containers or cells, or returns objects that it made"
    if level.reads_requires_grad:
        return "it asks a tensor for `requires_grad`"
    return None


def _ambient() -> tuple:
    data = get_compile_data()
    return (ambient_state(data), torch.get_default_dtype(), torch.get_default_device(), data.sharp_edges, id(data.fn))


def _code(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "__code__", None) or type(fn)


def region_lookaside(fn: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
    """The lookaside of what ``torch.compiler.nested_compile_region`` makes of ``fn``."""
    return as_lookaside(lambda: current_level().regions.trace(fn, args, kwargs)[0].inline())


def module_region(fn: Any) -> Callable | None:
    """The lookaside for a module that ``thunder.jit(..., nested_regions=...)`` names, or None for anything else."""
    if not isinstance(fn, torch.nn.Module) or not current_level().is_region(fn):
        return None
    return lambda *args, **kwargs: region_lookaside(fn, *args, **kwargs)


def named_regions(data: Any) -> tuple[tuple[type, ...], frozenset[int]]:
    """The module classes, and the identities of the modules, that the option ``nested_regions`` names.

    Raises:
        ArgumentError: an entry is neither a module class nor the qualified name of a submodule.
    """
    classes, modules = [], set()
    for region in data.compile_options.get("nested_regions") or ():
        if isinstance(region, type) and issubclass(region, torch.nn.Module):
            classes.append(region)
        elif isinstance(region, str) and isinstance(data.fn, torch.nn.Module):
            try:
                modules.add(id(data.fn.get_submodule(region)))
            except AttributeError as error:
                raise ArgumentError(f"nested_regions names {region!r}, but {error}") from None
        else:
            raise ArgumentError(
                f"nested_regions takes module classes and, if a module is jitted, qualified names of its submodules, "
                f"but one of it is {region!r}."
            )
    return tuple(classes), frozenset(modules)


def report(jitted: Callable) -> Report:
    """What happened to the regions in the last compilation of a jitted function or module.

    Args:
        jitted: what ``thunder.jit`` returned.

    Returns:
        A list of :class:`RegionReport` that prints as a table.

    Raises:
        OutsideTraceError: the function has not been compiled yet.
    """
    stats = getattr(jitted, "_lc_cs", None)
    found = getattr(stats, "nested_regions", None)
    if found is None:
        raise OutsideTraceError(f"{name_of(jitted)} has not been compiled yet by `thunder.jit`; call it first.")
    return found


__all__ = [
    "MAX_TRACES",
    "RegionReport",
    "Regions",
    "Report",
    "module_region",
    "named_regions",
    "region_lookaside",
    "report",
]
