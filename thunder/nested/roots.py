"""Whether the root function of an inner level is interpreted: its lookaside may be what has begun the level."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable


def runs_lookaside_of(fn: Callable) -> bool:
    """Whether the innermost level is being begun by the very lookaside that ``fn``, its root function, has.

    Then the root function is interpreted: to look it aside once more would never end.
    """
    from thunder.core.jit_ext import _general_jit_lookaside_map, trace_level

    try:
        lookaside = _general_jit_lookaside_map.get(plain_function(fn))
    except TypeError:  # unhashable
        return False
    code = getattr(inspect.unwrap(lookaside), "__code__", None) if lookaside is not None else None
    frame = sys._getframe() if code is not None else None
    levels = 0  # a lookaside that runs in an enclosing level has begun that level's inner level, not this one
    while frame is not None and levels < 2:
        if frame.f_code is code:
            return True
        levels += frame.f_code is trace_level.__code__
        frame = frame.f_back
    return False


def plain_function(fn: Callable) -> Callable:
    """The function of a bound method; any other callable itself."""
    return getattr(fn, "__func__", fn)
