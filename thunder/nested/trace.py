"""The record that the author of a higher-order lookaside holds: :class:`NestedTrace`, made by :func:`trace`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    WrappedValue,
    unwrap,
)
from thunder.core.proxies import Proxy, is_proxy_name_available, variableify
from thunder.core.trace import TraceCtx, TraceResults, get_tracectx
from thunder.nested.ambient import grad_mode, set_ambient_state
from thunder.nested.captures import Lift, Path, plain_closure, wrap_call
from thunder.nested.checks import (
    ArgumentChecks,
    check_callable,
    check_level,
    check_no_in_place,
    check_replayable,
    enclosing_level,
)
from thunder.nested.effects import replay_effects, written_values
from thunder.nested.errors import ArgumentError, name_of
from thunder.nested.levels import Level, current_level
from thunder.nested.operators import Operator, all_or_none_detached
from thunder.nested.replay import Substitution, replay
from thunder.nested.results import own_inputs
from thunder.nested.rewrap import Rewrap, reachable_proxies


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of an inner computation.

    Attributes:
        proxy: the proxy that stands for it in ``computation_trace.args``.
        path: how the inner function reached it, or None if no path leads there (a default argument, say).
        name: the path as the function's source spells it (``self.linear.weight``), or the proxy's name without one.
        value: the enclosing level's value, mostly a proxy, that it stands for.
    """

    proxy: Proxy
    path: Path | None
    name: str
    value: Any

    @property
    def is_capture(self) -> bool:
        """Whether it is not an argument: a closure cell, global, parameter, buffer, attribute or default."""
        return self.path is None or self.path.is_capture


def trace(fn: WrappedValue | Callable, /, *args: Any, **kwargs: Any) -> NestedTrace:
    """Traces a function, inside a lookaside, on the arguments that the lookaside received.

    The enclosing level is left as it was, but for the guards of what the function read and the captures that it
    needs, which are lifted into it. Nothing is computed until the trace is replayed.

    Args:
        fn: the wrapped function or module that the lookaside received. A function of the lookaside's own is taken as
            a constant; it may close over wrapped values.
        args, kwargs: the wrapped arguments that it received. Proxies that the lookaside computed and constants may
            be given as they are.

    Returns:
        The :class:`NestedTrace`.

    Raises:
        OutsideTraceError: nothing is being traced.
        UntraceableCallableError: ``fn`` is not callable, or not hashable.

    What ``fn`` raises is raised when the trace is replayed, after the effects that it had until then.
    """
    return trace_with(fn, args, kwargs)


def trace_with(fn: Any, args: tuple, kwargs: dict, prepare: Callable[[Level], None] | None = None) -> NestedTrace:
    """:func:`trace`; ``prepare`` gets the level before the function is interpreted."""
    enclosing_level("trace")
    check_callable(unwrap(fn))
    fn, closed_over = plain_closure(fn)
    wrapped_fn, wrapped_args, wrapped_kwargs = wrap_call(fn, args, kwargs)
    ufn = unwrap(wrapped_fn)
    uargs = tuple(unwrap(a) for a in wrapped_args)
    ukwargs = {k: unwrap(v) for k, v in wrapped_kwargs.items()}
    from thunder.core.jit_ext import trace_level

    results, level = trace_level(
        ufn, uargs, ukwargs, sharp_edges=get_compile_data().sharp_edges, lenient=True, prepare=prepare
    )
    return NestedTrace(level, results, Lift(wrapped_fn, wrapped_args, wrapped_kwargs, closed_over))


class NestedTrace:
    """The Thunder program of a function that was traced inside a lookaside.

    Attributes:
        results: the inner level's ``TraceResults``: prologue, computation and epilogue.
        inputs: the inputs of the computation, arguments first, then captures in the order of their first use.
        result: the inner function's result, with the proxies of the inner computation in the place of tensors.
    """

    def __init__(self, level: Level, results: TraceResults, lift: Lift):
        self.results = results
        # of a reused trace another one than the level was made in
        self._enclosing = current_level()
        self._level, self._lift = level, lift
        self._replayed = False
        level.guard(lift)
        self._check_arguments = ArgumentChecks(level, lift)
        self.inputs = self._inputs()
        self._rename()

    @property
    def result(self) -> Any:
        """What the inner function returned, in terms of the inner computation's proxies."""
        return unwrap(self._level.result)

    @property
    def fn(self) -> Callable:
        """The function that was traced."""
        return self._level.fn

    @property
    def computation_trace(self) -> TraceCtx:
        """The inner computation; shorthand for ``results.computation_trace``."""
        return self.results.computation_trace

    @property
    def exception(self) -> Exception | None:
        """What the inner function raised. A replay has the function's effects up to there, and then raises it."""
        return self._level.exception

    def __repr__(self) -> str:
        return f"<NestedTrace of {name_of(self.fn)} with {len(self.inputs)} inputs>"

    def inline(self) -> WrappedValue:
        """Replays the computation into the enclosing trace, with the function's effects on what is outside of it.

        Returns:
            The wrapped result, as if the function had been called by the traced program itself.

        Raises:
            LevelError: this is not the level in which the trace was made, or that level has ended.
            ReplayError: the function has effects, which were made by an earlier replay.
            ResultError: the function returns what the enclosing level cannot represent.
            Exception: what the function raised.
        """
        check_replayable(self, "inline")
        replayed = replay(self.computation_trace, [i.value for i in self.inputs], get_tracectx())
        return self._finish_replay(replayed)

    def as_operator(self, name: str) -> WrappedValue:
        """Like :meth:`inline`, but as one bound symbol whose subsymbols are the inner computation.

        An executor that registers an implementation for the id ``name`` may claim the whole; where none does, the
        subsymbols are executed. The operator's arguments are the values of :attr:`inputs`; its outputs are the tensors
        that the function made and returned, or put into what is outside of it, each once.

        Args:
            name: the operator's name and id, a Python identifier.

        Raises:
            ArgumentError: ``name`` is no identifier.
            InPlaceError: the function changes a tensor in place, which thunder's aliasing rules do not see in there.
            LevelError, ReplayError, ResultError: as for :meth:`inline`.
        """
        check_replayable(self, "as_operator")
        if not name.isidentifier():
            raise ArgumentError(f"The operator's name must be a Python identifier, but it is {name!r}.")
        check_no_in_place(self)
        raised = [] if self.exception is None else [self.exception.args, vars(self.exception)]
        values = [self.result, *written_values(self._level), *raised]
        names = [self._level.final_name(p) for p in reachable_proxies(self._level, values)]
        produced = {p.name for bsym in self.computation_trace.bound_symbols for p in bsym.flat_proxy_outs}
        produced -= {i.proxy.name for i in self.inputs}
        made = [name for name in names if name in produced]
        operator = Operator(name=name, id=name, meta=self._operator_meta(made), _bind_postprocess=self._bind_operator)
        with grad_mode(True):  # each output has the grad mode that it was computed in
            outputs = operator(*(i.value for i in self.inputs))
        replayed = Substitution(zip(made, outputs), get_tracectx())
        return self._finish_replay(replayed)

    def thunder_callable(self) -> Callable:
        """The function as a plain Thunder callable, to be called with proxies, any number of times, while tracing.

        Returns:
            A callable that takes what the function took, with other proxies of the same shape, dtype and device, and
            returns what it returned, as plain values (not wrapped). Captures are those of this trace.

        Raises (when called):
            ArgumentError: the arguments do not fit those that the trace was made with.
            LevelError, ReplayError: as for :meth:`inline`.
        """
        check_level(self, "thunder_callable")

        def thunder_callable(*args: Any, **kwargs: Any) -> Any:
            check_replayable(self, "thunder_callable")
            _, wrapped_args, wrapped_kwargs = wrap_call(self.fn, args, kwargs)
            lift = self._lift.with_arguments(wrapped_args, wrapped_kwargs)
            self._check_arguments(wrapped_args, wrapped_kwargs, lift)
            values = [i.value if i.is_capture else lift(i.path).value for i in self.inputs]
            replayed = replay(self.computation_trace, values, get_tracectx())
            return unwrap(self._finish_replay(replayed, lift))

        return thunder_callable

    #
    # Into the enclosing level
    #

    def _inputs(self) -> tuple[Input, ...]:
        level = self._level
        own = {level.final_name(p): p for p in own_inputs(level)}
        found = []
        for proxy in self.computation_trace.args:
            path = level.path_to(own[proxy.name])
            foreign = level.stand_ins.get(own[proxy.name].name)
            name = proxy.name if path is None else path.spoken(self.fn)
            found.append(Input(proxy, path, name, self._lift.value_of(foreign, path)))
        return tuple(found)

    def _rename(self) -> None:
        """The enclosing level names its values after the inner function's variables, as it would inline."""
        swapmap = self._enclosing.ctx._proxy_swapmap
        own = {self._level.final_name(p): p for p in own_inputs(self._level)}
        for i in self.inputs:
            renamed = own[i.proxy.name].name != i.proxy.name
            if renamed and isinstance(i.value, Proxy) and variableify(i.value) not in swapmap:
                if is_proxy_name_available(i.proxy.name):
                    swapmap[variableify(i.value)] = i.value.replace_name(i.proxy.name)

    def _finish_replay(self, replayed: Substitution, lift: Lift | None = None) -> WrappedValue:
        lift = lift or self._lift
        self._replayed = True
        rewrap = Rewrap(self._level, lift, replayed)
        replay_effects(self._level, self._enclosing, lift, rewrap)
        set_ambient_state(get_compile_data(), self._level.final_state)
        if self.exception is not None:
            raise rewrap.exception(self.exception)
        return rewrap(self._level.result)

    def _operator_meta(self, made: list[str]) -> Callable:
        def meta(*inputs: Any) -> tuple[Any, ...]:
            replayed = replay(self.computation_trace, inputs, get_tracectx())
            return all_or_none_detached([replayed[name] for name in made])

        return meta

    @staticmethod
    def _bind_operator(bsym: Any) -> None:
        bsym._call_ctx = {bsym.sym.name: bsym.sym}
