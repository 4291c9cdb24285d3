"""What can go wrong with nested tracing. Messages say which function, where in the user's source, and the remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

from thunder.core.interpreter import get_interpreterruntimectx


class NestedTracingError(RuntimeError):
    """The base of all errors that nested tracing raises by itself (the user's own exceptions pass unchanged)."""


class OutsideTraceError(NestedTracingError):
    """``thunder.nested`` was called where nothing is being traced."""


class LevelError(NestedTracingError):
    """A :class:`thunder.nested.NestedTrace` was used in a level other than the one it was made in."""


class EscapedProxyError(NestedTracingError):
    """A proxy was used after the level that made it had ended."""


class UntraceableCallableError(NestedTracingError, TypeError):
    """What should be traced is no callable, or one that cannot be hashed."""


class ArgumentError(NestedTracingError, TypeError):
    """Arguments do not fit those that the trace was made with."""


class CaptureError(NestedTracingError):
    """A value that the inner function read cannot be found from the enclosing level."""


class ResultError(NestedTracingError):
    """The inner function returns something that a trace cannot represent."""


class ReplayError(NestedTracingError):
    """A trace with side effects was asked to be replayed more than once."""


class InPlaceError(NestedTracingError):
    """A function that changes a tensor in place was asked to become one operator."""


def name_of(fn: Callable) -> str:
    """``fn`` as messages name it: its qualified name, file and first line, as far as it has them."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(getattr(inner, "__func__", inner)) if callable(inner) else inner
    # of a module its `forward`, of another object its `__call__`
    candidates = (inner, getattr(type(inner), "forward", None), vars(type(inner)).get("__call__"))
    code = next((c.__code__ for c in candidates if hasattr(c, "__code__")), None)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"`{name}`" if code is None else f"`{name}` ({code.co_filename}:{code.co_firstlineno})"


def user_location() -> tuple[str, int] | None:
    """File and line of the program that is being interpreted, or None where no code of the user's is."""
    filename, positions = get_interpreterruntimectx().get_current_user_source_location()
    if filename is None or positions is None or positions.lineno is None:
        return None
    return filename, positions.lineno
