"""Grad mode and autocast: what operations that are traced next see of the program's ambient state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from thunder.core.compile_data import get_compile_data

if TYPE_CHECKING:
    from thunder.common import CompileData
    from thunder.nested.levels import Level


def ambient_state(data: CompileData) -> tuple[bool, tuple]:
    """Grad mode and autocast stack, as the operations that are traced next will see them."""
    return data.is_grad_enabled, tuple(data.autocast_stack.stack)


def set_ambient_state(data: CompileData, state: tuple[bool, tuple]) -> None:
    """Puts back what :func:`ambient_state` returned."""
    data.is_grad_enabled, autocast = state
    data.autocast_stack.stack.clear()
    data.autocast_stack.stack.extend(autocast)


@contextlib.contextmanager
def grad_mode(enabled: bool, *, autocast: bool = True) -> Iterator[None]:
    """The body is traced with gradients on or off, and outside of ``torch.autocast`` if ``autocast`` is False."""
    data = get_compile_data()
    state = ambient_state(data)
    set_ambient_state(data, (enabled, state[1] if autocast else ()))
    try:
        yield
    finally:
        set_ambient_state(data, state)


@contextlib.contextmanager
def inherited_state(level: Level) -> Iterator[None]:
    """An inner level begins with the enclosing grad mode and autocast, and its changes end with it."""
    data, enclosing = get_compile_data(), level.enclosing.ctx.compile_data
    before = [(d, ambient_state(d)) for d in (data, enclosing)]
    set_ambient_state(data, ambient_state(enclosing))
    try:
        yield
        level.final_state = ambient_state(data)
    finally:
        for d, state in before:
            set_ambient_state(d, state)
