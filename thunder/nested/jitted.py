"""``thunder.jit``-ed callables that are called by a lookaside, with the proxies of the level that is being traced.

Stock thunder calls the plain function then, which cannot work with proxies. Here the function is traced as an inner
level, with the compile data of its own ``thunder.jit``, and replayed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import thunder
from thunder.common import CompileStats
from thunder.core.compile_data import compile_data_and_stats
from thunder.core.interpreter import unwrap
from thunder.core.proxies import Proxy
from thunder.core.pytree import tree_iter
from thunder.core.trace import get_tracectx
from thunder.nested.effects import has_effects
from thunder.nested.errors import ReplayError, name_of
from thunder.nested.levels import current_level
from thunder.nested.replay import replay
from thunder.nested.trace import NestedTrace, trace


def make_reentrant(jitted: Callable) -> Callable:
    """What ``thunder.jit`` returns: ``jitted``, which a lookaside may call with proxies.

    Args:
        jitted: a function or ``ThunderModule`` that the installed ``thunder.jit`` made.
    """
    data = jitted._lc_cd
    inner = _Inner(jitted)
    data.get_computation_and_inputs = _unless_nested(data.get_computation_and_inputs, inner.computation_and_inputs)
    data._get_computation_and_inputs = data.get_computation_and_inputs
    if isinstance(jitted, thunder.ThunderModule):
        jitted._forward_fn = _unless_nested(jitted._forward_fn, inner.call)
        return jitted
    return _unless_nested(jitted, inner.call)


def _unless_nested(plain: Callable, nested: Callable) -> Callable:
    @functools.wraps(plain)
    def reentrant(*args: Any, **kwargs: Any) -> Any:
        # without a proxy it is a call that a lookaside makes for itself, not one of the program that is traced
        if current_level() is None or not any(isinstance(leaf, Proxy) for leaf in tree_iter((args, kwargs))):
            return plain(*args, **kwargs)
        return nested(*args, **kwargs)

    # interpreted code goes on to see what the installed `thunder.jit` made
    reentrant.__thunder_interpreter_orig_fn = plain
    return reentrant


class _Inner:
    """A jitted callable as an inner level. Holds its compile data as the installed code does: weakly."""

    def __init__(self, jitted: Callable):
        self._data, self._stats = weakref.ref(jitted._lc_cd), weakref.ref(jitted._lc_cs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Traces the function and replays the trace into the level that is being traced."""
        return unwrap(self._trace(args, kwargs).inline())

    def computation_and_inputs(self, *args: Any, **kwargs: Any) -> tuple[Any, tuple, tuple]:
        """What ``get_computation_and_inputs`` returns, with callables that work with proxies, while tracing."""
        nested = self._trace(args, kwargs)
        if has_effects(nested._level):
            raise ReplayError(
                f"{name_of(nested.fn)} changes objects outside of it, and its parts are asked for with proxies. An "
                f"epilogue would change them while tracing; call the jitted function itself instead."
            )
        results = nested.results
        prologue = results.prologue_trace.python_callable()

        def computation(*inputs: Any) -> Any:
            replayed = replay(results.computation_trace, inputs, get_tracectx())
            return replayed.value(results.computation_trace.bound_symbols[-1].args[0])

        traces = [results.prologue_trace], [results.computation_trace], [results.epilogue_trace]
        entry = thunder.CacheEntry(
            prologue_fn=prologue,
            prologue_traces=traces[0],
            computation_fn=computation,
            computation_traces=traces[1],
            epilogue_fn=results.epilogue_trace.python_callable(include_decorators=False),
            epilogue_traces=traces[2],
            backward_fn=None,
            backward_traces=[],
            return_none_instead_of_grads=False,
        )
        return entry, *prologue(*args, **kwargs)

    def _trace(self, args: tuple, kwargs: dict) -> NestedTrace:
        data = self._data()
        assert data is not None, "the jitted function has been dropped; keep it while its parts are in use"
        stats = self._stats() or CompileStats()  # nobody can ask for those of a jitted function that was dropped
        stats.calls += 1
        stats.cache_misses += 1
        with compile_data_and_stats(data, stats):
            nested = trace(data.fn, *args, **kwargs)
        stats.last_prologue_traces = [nested.results.prologue_trace]
        stats.last_traces = [nested.results.computation_trace]
        stats.last_epilogue_traces = [nested.results.epilogue_trace]
        return nested
