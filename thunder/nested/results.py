"""How the traces of an inner level are finished: its inputs' order, its prologue, and the older releases' form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import thunder
import thunder.core.devices as devices
import thunder.core.dtypes as dtypes
import thunder.core.prims as prims
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.trace import TraceCtx, TraceResults, from_trace, tracectx
from thunder.nested.captures import Lift, wrap_call
from thunder.nested.levels import Level, current_level


def _print_enclosing(bsym: Any, out: Any, args: Any, kwargs: Any) -> str:
    (name,) = bsym._call_ctx
    return f"{bsym.output.name} = {name}  # a value of the enclosing level"


# Takes a value of the enclosing level that no path leads to (a default argument, say) from the prologue's own context.
unpack_enclosing = Symbol(
    name="unpack_enclosing",
    meta=lambda p: p,
    id="nested.unpack_enclosing",
    is_prim=True,
    python_printer=_print_enclosing,
)


def unpack_enclosing_values(
    unpack_inputs: Callable,
    ctx: Any,
    prologue: TraceCtx,
    to_computation: tuple,
    to_epilogue: tuple,
    args: tuple,
    kwargs: dict,
) -> tuple[tuple[Proxy, ...], tuple[Proxy, ...]]:
    """The installed ``unpack_inputs`` for what paths lead to, and :data:`unpack_enclosing` for what none leads to."""
    level = ctx.level
    if level.enclosing is None:
        return unpack_inputs(ctx, prologue, to_computation, to_epilogue, args, kwargs)
    for v in to_computation:
        if level.is_foreign(v.proxy):  # an opaque function has worked on a container of the enclosing level's values
            level.stand_ins[v.proxy.name] = v.proxy
    _forget_owners(ctx)
    pathless = [v for v in to_computation if v.proxy.name in level.stand_ins and level.path_to(v.proxy) is None]
    rest = tuple(v for v in to_computation if v not in pathless)
    token = thunder._cache_info_ctx.set({})  # level 0 checks the ambient state
    try:
        computation, epilogue = unpack_inputs(ctx, prologue, rest, to_epilogue, args, kwargs)
    finally:
        thunder._cache_info_ctx.reset(token)
    if not pathless:
        return computation, epilogue
    returned = prologue.bound_symbols.pop()
    assert returned.sym.id is prims.PrimIDs.RETURN
    for variable in pathless:
        own = variable.proxy
        prologue.add_name(own.name)
        bsym = unpack_enclosing.bind(own, output=own, _call_ctx={f"enclosing_{own.name}": level.stand_ins[own.name]})
        prologue.bound_symbols.append(bsym)
    computation = (*computation, *(v.proxy for v in pathless))
    prologue.scopes = [prologue.bound_symbols]
    with tracectx(prologue):
        prims.python_return((computation, epilogue))
    return computation, epilogue


def _forget_owners(ctx: Any) -> None:
    """Objects whose attributes are set have a proxy noted on their provenance, which no unpacking has made yet.

    What is unpacked from such an object, a buffer of a module say, must unpack the object first.
    """
    for owner in ctx._additional_outputs:
        for provenance in owner.provenance.inputs:
            provenance.proxy = None


def finish(level: Level, results: TraceResults, *, unpacked: bool) -> TraceResults:
    """Orders an inner level's inputs and makes its prologue callable with the enclosing level's proxies.

    Args:
        level: the level, still running.
        results: what ``thunder_general_jit`` made.
        unpacked: whether the computation shall return the function's result itself, if the epilogue only repackages.
    """
    order = _input_order(level, results.computation_trace)
    _reorder_computation(results.computation_trace, order)
    prologue = _reorder_prologue(results.prologue_trace, order)
    if unpacked and _only_repackages(results.epilogue_trace, results.computation_trace):
        _return_result_itself(results)
    results.prologue_trace = InnerPrologue.of(prologue, level)
    results.computation_trace = InnerTrace.of(results.computation_trace, level)
    return results


def own_inputs(level: Level) -> tuple[Proxy, ...]:
    """The level's inputs before they were renamed, in the order that ``unpack_inputs`` gave them."""
    return level.ctx.computation_trace.args


def _input_order(level: Level, computation: TraceCtx) -> list[int]:
    """Arguments first, in their order, then captures in the order of their first use."""
    paths = [level.path_to(p) for p in own_inputs(level)]
    arguments = [i for i, path in enumerate(paths) if path is not None and not path.is_capture]
    first_use: dict[str, int] = {}
    for bsym in computation.bound_symbols[len(paths) :]:
        for p in bsym.flat_proxy_args:
            first_use.setdefault(p.name, len(first_use))
    captures = [i for i in range(len(paths)) if i not in arguments]
    captures.sort(key=lambda i: first_use.get(computation.args[i].name, len(first_use)))
    return arguments + captures


def _reorder_computation(computation: TraceCtx, order: list[int]) -> None:
    unpacks, body = computation.bound_symbols[: len(order)], computation.bound_symbols[len(order) :]
    computation.bound_symbols = [unpacks[i] for i in order] + body
    computation.args = tuple(computation.args[i] for i in order)
    computation._siginfo.args = [computation._siginfo.args[i] for i in order]


def _reorder_prologue(prologue: TraceCtx, order: list[int]) -> TraceCtx:
    ((inputs, to_epilogue),) = prologue.bound_symbols[-1].args
    prologue.bound_symbols.pop()
    prologue.scopes = [prologue.bound_symbols]
    with tracectx(prologue):
        prims.python_return((tuple(inputs[i] for i in order), to_epilogue))
    return prologue


def _only_repackages(epilogue: TraceCtx, computation: TraceCtx) -> bool:
    available = {p.name for p in computation.bound_symbols[-1].flat_proxy_args}
    inputs = {p.name for p in epilogue.args}
    ids = {bsym.sym.id for bsym in epilogue.bound_symbols}
    return ids <= {prims.PrimIDs.UNPACK_TRIVIAL, prims.PrimIDs.RETURN} and inputs <= available


def _return_result_itself(results: TraceResults) -> None:
    computation = results.computation_trace
    computation.bound_symbols.pop()
    computation.scopes = [computation.bound_symbols]
    with tracectx(computation):
        prims.python_return(*results.epilogue_trace.bound_symbols[-1].args)
    results.epilogue_trace = None


class InnerTrace(TraceCtx):
    """A trace of an inner level. Its callable takes the enclosing level's values, and guards there what was read."""

    @classmethod
    def of(cls, trace: TraceCtx, level: Level) -> InnerTrace:
        """``trace`` as a trace of ``level``."""
        new = from_trace(trace)
        new.__class__ = cls
        new.bound_symbols = trace.bound_symbols
        new.level = level
        return new

    def python_callable(self, **kwargs: Any) -> Callable:
        """A callable that executes the trace or, while the enclosing level is traced, records it there."""
        run = super().python_callable(**kwargs)

        def computation(*args: Any) -> Any:
            self._lift()
            return run(*args)

        return computation

    def _lift(self) -> Lift | None:
        """Guards, in the enclosing level, what the inner function read, if that level goes on just now."""
        if current_level() is not self.level.enclosing:
            return None
        lift = Lift(*wrap_call(self.level.fn, *self.level.arguments))
        self.level.guard(lift)
        return lift


class InnerPrologue(InnerTrace):
    """The prologue of an inner level."""

    def python_callable(self, **kwargs: Any) -> Callable:
        """A callable that unpacks and checks the inner function's inputs, and records nothing in any trace.

        It takes what the inner function takes, real tensors or proxies. A real tensor that the function captured is
        returned as the enclosing level's proxy for it.
        """
        from thunder.common import transform_for_execution
        from thunder.executors.pythonex import ex as pythonex

        executable = transform_for_execution(_plain_copy(self), executors_list=(pythonex,), use_del_last_used=False)
        run = executable[-1].python_callable(include_decorators=False)
        check = run.__globals__.get("check_tensor_metadata")
        if check is not None:
            run.__globals__["check_tensor_metadata"] = _checks_proxies(check)
        paths = {self.level.final_name(p): self.level.path_to(p) for p in own_inputs(self.level)}
        outputs = [paths[p.name] for p in self.bound_symbols[-1].args[0][0]]

        def prologue(*args: Any, **kwargs: Any) -> tuple[tuple, tuple]:
            inputs, to_epilogue = run(*args, **kwargs)
            lift = self._lift()
            if lift is not None:
                inputs = tuple(
                    lift(path).value if isinstance(value, torch.Tensor) and path is not None else value
                    for path, value in zip(outputs, inputs)
                )
            return inputs, to_epilogue

        return prologue


def _plain_copy(trace: TraceCtx) -> TraceCtx:
    copy = from_trace(trace)
    copy.bound_symbols = list(trace.bound_symbols)
    return copy


def _checks_proxies(check: Callable) -> Callable:
    """The executor's check of a tensor's metadata, extended to proxies, which are no ``torch.Tensor``."""

    def check_tensor_metadata(t: Any, shape: tuple, device: str, dtype: torch.dtype, requires_grad: bool) -> None:
        if not isinstance(t, TensorProxy):
            return check(t, shape, device, dtype, requires_grad)
        found = (
            tuple(t._shape),
            str(devices.to_torch_device(t.device)),
            dtypes.to_torch_dtype(t.dtype),
            t.requires_grad,
        )
        expected = (tuple(shape), str(device), dtype, requires_grad)
        if found != expected:
            raise AssertionError(f"expected tensor with {expected}, got the proxy {t.name} with {found}")

    return check_tensor_metadata
