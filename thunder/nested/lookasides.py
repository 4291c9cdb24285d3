"""How a lookaside is registered, and how exceptions pass between it and the interpreter, both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thunder.core.interpreter import (
    INTERPRETER_SIGNALS,
    InterpreterError,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    _interpret_call,
    do_raise,
    get_interpreterruntimectx,
    wrap,
    wrap_const,
)
from thunder.nested.errors import NestedTracingError


def lookaside(diverted_fn: Callable) -> Callable[[Callable], Callable]:
    """Registers a lookaside for ``diverted_fn`` whose exceptions are those of the program that is traced.

    A lookaside registered so gets wrapped values and returns one, like one of ``register_general_jit_lookaside``. In
    addition, what it raises, or what the function that it traces raises, can be caught by the traced program.

    Args:
        diverted_fn: the function that the lookaside replaces during tracing.
    """
    from thunder.core.jit_ext import register_general_jit_lookaside

    def register(fn: Callable) -> Callable:
        @register_general_jit_lookaside(diverted_fn)
        def _nested_lookaside(*args: WrappedValue, **kwargs: WrappedValue) -> Any:
            return as_lookaside(lambda: fn(*args, **kwargs))

        _nested_lookaside.__wrapped__ = fn
        return fn

    return register


def as_lookaside(run: Callable[[], Any]) -> Any:
    """Runs a lookaside; gives its wrapped result, or the interpreter's signal for an exception of the program."""
    try:
        result = run()
    except (InterpreterError, NestedTracingError):
        raise  # no exception of the program, which must not catch it: the program cannot be traced
    except Exception as error:
        return do_raise(error)
    return wrap(result, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))


def call_interpreted(fn: Any, *args: WrappedValue) -> WrappedValue:
    """Calls ``fn``, wrapped or not, in the current level's interpreter, on wrapped values; gives the wrapped result.

    Raises:
        Exception: what ``fn`` raised.
    """
    result = _interpret_call(fn, *args)
    if result is INTERPRETER_SIGNALS.EXCEPTION_RAISED:
        runtime = get_interpreterruntimectx()
        error, runtime.curexc = runtime.curexc, None
        raise error
    return result


def read_attribute(obj: WrappedValue, name: str) -> WrappedValue:
    """The attribute of a wrapped object, read by the interpreter, which guards it. Raises what the read raised."""
    return call_interpreted(getattr, obj, wrap_const(name))


def read_item(obj: WrappedValue, key: Any) -> WrappedValue:
    """The item of a wrapped object, read by the interpreter, which guards it. Raises what the read raised."""
    from thunder.core.jit_ext import interpreted_getitem

    return call_interpreted(interpreted_getitem, obj, wrap_const(key))
