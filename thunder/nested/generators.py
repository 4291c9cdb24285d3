"""Generators that an inner level resumes, but an enclosing level has made: their code is the enclosing level's.

The generator's frame holds wrapped values of the level that has made it, which no other level may use. So it is
resumed in its own level: what it computes is recorded there, at once, and the inner level gets a foreign proxy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from thunder.core.compile_data import _compile_data, compile_data_and_stats, get_compile_data
from thunder.core.trace import tracectx
from thunder.nested.ambient import ambient_state, set_ambient_state
from thunder.nested.errors import CaptureError, name_of
from thunder.nested.levels import Level, current_level, running

if TYPE_CHECKING:
    from thunder.core.symbol import BoundSymbol


def in_its_level(generator: Generator, level: Level) -> Generator:
    """The generator, whose code runs as that of ``level``, which has made it, wherever it is resumed."""
    sent = None
    while True:
        with _resumed(level):
            try:
                value = generator.send(sent)
            except StopIteration as stop:
                return stop.value
        sent = yield value


@contextlib.contextmanager
def _resumed(level: Level) -> Iterator[None]:
    inner = current_level()
    if inner is level or inner is None or level.ctx is None:
        yield
        return
    from thunder.core.jit_ext import reset_jit_ctx, set_jit_ctx

    data, trace = level.ctx.compile_data, level.ctx.computation_trace
    stats, inner_data = _compile_data.get()[1], get_compile_data()
    state, start = ambient_state(data), len(trace.peek_scope())
    set_ambient_state(data, ambient_state(inner_data))
    token = set_jit_ctx(level.ctx)
    try:
        with _fresh_names(inner, level), running(level), compile_data_and_stats(data, stats), tracectx(trace):
            yield
        set_ambient_state(inner_data, ambient_state(data))
    finally:
        reset_jit_ctx(token)
        set_ambient_state(data, state)
    _check_order(inner, level, trace.peek_scope()[start:])


@contextlib.contextmanager
def _fresh_names(inner: Level, level: Level) -> Iterator[None]:
    """The names that ``level`` makes are none of the inner levels', and foreign there."""
    names, theirs = level.ctx.computation_trace.names, inner.ctx.computation_trace.names
    before, hidden = set(names), theirs - names
    names |= hidden
    try:
        yield
    finally:
        names -= hidden
        for between in _levels_inside(inner, level):
            between.reserve(names - before)


def _levels_inside(inner: Level, level: Level) -> Iterator[Level]:
    between: Level | None = inner
    while between is not None and between is not level:
        yield between
        between = between.enclosing


def _check_order(inner: Level, level: Level, recorded: list[BoundSymbol]) -> None:
    """What the generator has recorded comes before all of the inner levels' operations, which must not matter."""
    from thunder.torch.higher_order.common import is_random
    from thunder.torch.higher_order.requires_grad import is_in_place

    traces = [between.ctx.computation_trace for between in _levels_inside(inner, level)]
    before = [bsym for trace in traces for scope in trace.scopes for bsym in scope or ()]
    if not recorded or not any(is_in_place(b) or is_random(b) for b in (*before, *recorded)):
        return
    raise CaptureError(
        f"{name_of(inner.fn)} resumes a generator that was made outside of it, and operations that change tensors in "
        f"place or draw random numbers cannot be recorded in that order. Make a list of what the generator yields "
        f"before the call, or make the generator inside of {name_of(inner.fn)}."
    )
