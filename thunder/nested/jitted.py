"""``thunder.jit``-ed callables inside a program that is traced, called by it or by a lookaside.

Stock thunder interprets them as a part of the caller, with a warning, or, where a lookaside calls one, runs the plain
function, which cannot work with proxies. Here such a call is an inner level, and a region: it is traced once and
replayed into the caller's trace for every call that reads the same (``regions.py``).
Of the settings of its own ``thunder.jit`` an inner level has its executors' lookasides, ``sharp_edges`` and options;
how it is cached, differentiated, transformed and executed is for the caller's to say, because it is one program
(``overrides.py`` warns of it).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import thunder
from thunder.common import CompileStats
from thunder.core.compile_data import compile_data_and_stats, get_cache_option
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    unwrap,
    wrap,
    wrap_attribute,
    wrap_const,
)
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import get_tracectx
from thunder.core.utils import AutocastStack
from thunder.nested.effects import has_effects
from thunder.nested.errors import ReplayError, name_of
from thunder.nested.levels import current_level
from thunder.nested.lookasides import as_lookaside
from thunder.nested.overrides import check_members, model_of, warn_of_overridden
from thunder.nested.replay import replay
from thunder.nested.trace import NestedTrace


def make_reentrant(jitted: Callable, options: Mapping[str, Any]) -> Callable:
    """What ``thunder.jit`` returns: ``jitted``, which may be called while another program is traced.

    Args:
        jitted: a function or ``ThunderModule`` that the installed ``thunder.jit`` made.
        options: what ``thunder.jit`` was given.
    """
    data = jitted._lc_cd
    inner = _Inner(jitted, options)
    data.get_computation_and_inputs = _unless_nested(data.get_computation_and_inputs, inner.computation_and_inputs)
    data._get_computation_and_inputs = data.get_computation_and_inputs
    if isinstance(jitted, thunder.ThunderModule):
        jitted._forward_fn = _unless_nested(jitted._forward_fn, inner.call)
        inner.callable = weakref.ref(jitted)
    else:
        jitted = _unless_nested(jitted, inner.call)
        inner.callable = weakref.ref(jitted)
    jitted.__dict__["_nested_inner"] = inner
    return jitted


def _unless_nested(plain: Callable, nested: Callable) -> Callable:
    @functools.wraps(plain)
    def reentrant(*args: Any, **kwargs: Any) -> Any:
        # without a proxy it is a call that a lookaside makes for itself, not one of the program that is traced
        if current_level() is None or not any(isinstance(leaf, Proxy) for leaf in tree_iter((args, kwargs))):
            return plain(*args, **kwargs)
        return nested(*args, **kwargs)

    return reentrant


def jitted_lookaside(fn: Any) -> Callable | None:
    """The lookaside for a jitted callable that interpreted code calls, or None for any other callable."""
    if isinstance(fn, FunctionType | thunder.ThunderModule) and "_nested_inner" in fn.__dict__:
        return fn.__dict__["_nested_inner"].interpreted
    return None


def jit_lookaside(fn: WrappedValue, **options: Any) -> WrappedValue:
    """``thunder.jit`` called by interpreted code: it runs as it is, and its result remembers the wrapped function."""
    try:
        jitted = thunder.jit(unwrap(fn), **{name: unwrap(value) for name, value in options.items()})
    except Exception as error:
        return do_raise(error)
    wrapped = wrap(jitted, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[fn.provenance]))
    wrapped.jitted_fn = fn
    return wrapped


class _Inner:
    """A jitted callable as an inner level. Holds it and its compile data as the installed code does: weakly."""

    def __init__(self, jitted: Callable, options: Mapping[str, Any]):
        self._options: Mapping[str, Any] | None = options  # None once their part was played
        self._data, self._stats = weakref.ref(jitted._lc_cd), weakref.ref(jitted._lc_cs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Called by a lookaside with proxies: traces the function and replays the trace."""
        return unwrap(self._trace(self._plain_fn(), args, kwargs).inline())

    def interpreted(self, *args: WrappedValue, **kwargs: WrappedValue) -> Any:
        """Called by interpreted code."""
        return as_lookaside(lambda: self._trace(self._wrapped_fn(), args, kwargs).inline())

    def computation_and_inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple, tuple]:
        """What ``get_computation_and_inputs`` returns, with callables that work with proxies, while tracing."""
        nested = self._trace(self._plain_fn(), args, kwargs)
        if has_effects(nested._level):
            raise ReplayError(
                f"{name_of(nested.fn)} changes objects outside of it, and its parts are asked for with proxies. An "
                f"epilogue would change them while tracing; call the jitted function itself instead."
            )
        if nested.exception is not None:
            raise nested.exception
        results = nested.results
        prologue = results.prologue_trace.python_callable()

        def computation(*inputs: Any) -> Any:
            replayed = replay(results.computation_trace, inputs, get_tracectx())
            return replayed.value(results.computation_trace.bound_symbols[-1].args[0])

        entry = thunder.CacheEntry(
            prologue_fn=prologue,
            prologue_traces=[results.prologue_trace],
            computation_fn=computation,
            computation_traces=[results.computation_trace],
            epilogue_fn=results.epilogue_trace.python_callable(include_decorators=False),
            epilogue_traces=[results.epilogue_trace],
            backward_fn=None,
            backward_traces=[],
            return_none_instead_of_grads=False,
        )
        return entry, *prologue(*args, **kwargs)

    def _plain_fn(self) -> Callable:
        """The function or module itself, whose parameters are those of the jitted one."""
        jitted = self.callable()
        if isinstance(jitted, thunder.ThunderModule):
            check_members(jitted)
        return self._data().fn

    def _wrapped_fn(self) -> WrappedValue:
        """The function or module itself, reached from the jitted one, so that what it captures can be unpacked."""
        jitted = self.callable()
        wrapped = wrap_const(jitted)  # what the interpreter has wrapped before keeps its wrapper
        if hasattr(wrapped, "jitted_fn"):
            self._plain_fn()  # for the check
            return wrapped.jitted_fn
        if isinstance(jitted, thunder.ThunderModule):
            return model_of(wrapped)
        # the callable wraps the installed one, which wraps the function
        for fn in (jitted.__wrapped__, jitted.__wrapped__.__wrapped__):
            wrapped = wrap_attribute(fn, wrapped, wrap_const("__wrapped__"))
        return wrapped

    def _trace(self, fn: Any, args: tuple, kwargs: dict) -> NestedTrace:
        data = self._data()
        assert data is not None, "the jitted function has been dropped; keep it while its parts are in use"
        stats = self._stats() or CompileStats()  # nobody can ask for those of a jitted function that was dropped
        stats.calls += 1
        self._warn_of_overridden(data)
        own = copy.copy(data)
        own.cache_option = get_cache_option()
        own.autocast_stack = AutocastStack()
        with compile_data_and_stats(own, stats):
            nested, reused = current_level().regions.trace(fn, args, kwargs)
        stats.cache_hits += reused
        stats.cache_misses += not reused
        stats.last_prologue_traces = [nested.results.prologue_trace]
        stats.last_traces = [nested.results.computation_trace]
        stats.last_epilogue_traces = [nested.results.epilogue_trace]
        return nested

    def _warn_of_overridden(self, data: Any) -> None:
        if self._options is not None:
            options, self._options = self._options, None  # once is enough
            warn_of_overridden(data.fn, options, data, current_level().outermost.ctx.compile_data)
