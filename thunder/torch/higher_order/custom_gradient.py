"""A call of a function that has a gradient of its own: its ``forward`` is recorded, and what ``ctx`` was told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import thunder.torch as ltorch
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    unwrap,
    wrap,
    wrapped_build_tuple,
)
from thunder.core.prims import OpTags
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import has_tags
from thunder.core.trace import get_tracectx
from thunder.nested.ambient import grad_mode
from thunder.nested.levels import current_level
from thunder.nested.lookasides import lookaside, read_item
from thunder.nested.trace import trace
from thunder.torch.higher_order.gradient_rule import (
    AutogradFunctionError,
    Target,
    anchor,
    connect,
    view_of,
)
from thunder.torch.higher_order.requires_grad import (
    Aliases,
    is_differentiable,
    is_in_place,
    is_or_has_view,
    is_program_input,
    may_require_grad,
    may_require_grad_in_another_call,
    note_requires_grad_read,
)


class Context(torch.autograd.function.FunctionCtx):
    """What ``forward`` and ``backward`` get as ``ctx``. Its methods record, in attributes, what they are told.

    Args:
        needs: for each input whether it may require a gradient.
        settled: whether that is so in each replay of the trace.
    """

    def __init__(self, needs: tuple[bool, ...], *, settled: bool):
        self._needs, self._settled = needs, settled
        self.materialize_grads = self._materialize_non_diff_grads = True
        self.to_save = self.dirty_tensors = self.non_differentiable = ()

    @property
    def saved_tensors(self) -> tuple:
        """What ``save_for_backward`` was given."""
        return self.to_save

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each input whether it may require a gradient."""
        if not self._settled:
            _note_read()
        return self._needs


def _note_read() -> None:
    """Has a lookaside: where it is interpreted, the level notes the read."""


@lookaside(_note_read)
def _note_read_lookaside() -> None:
    note_requires_grad_read(current_level())


@dataclasses.dataclass(frozen=True)
class Definition:
    """A function with a gradient of its own.

    Attributes:
        name: as autograd names it in messages.
        where: as messages of this module name it, with file and line.
        forward: a function of the lookaside's own, of ``ctx`` and the inputs.
        backward: likewise, of ``ctx`` and a gradient (or None) for each output.
        symbol: how the name of its operator begins.
        differentiable: how many of the inputs, from the first on, may have a gradient; None for all.
    """

    name: str
    where: str
    forward: Callable
    backward: Callable
    symbol: str
    differentiable: int | None = None


def apply(definition: Definition, inputs: Sequence[WrappedValue]) -> WrappedValue:
    """Records a call of the function in the enclosing trace.

    Raises:
        AutogradFunctionError: the function's effects, or its in-place changes, cannot be traced.
        Exception: what ``forward`` raised.
    """
    level = current_level()
    differentiable = [unwrap(i) for i in inputs][: definition.differentiable]
    needs = tuple(may_require_grad(level, d) for d in differentiable)
    could_need = tuple(n or may_require_grad_in_another_call(level, d) for n, d in zip(needs, differentiable))
    ctx = wrap(Context(needs, settled=needs == could_need), provenance=ProvenanceRecord(PseudoInst.NEW, inputs=[]))
    connected = get_compile_data().is_grad_enabled and any(could_need)
    with grad_mode(False):
        nested = trace(definition.forward, ctx, *inputs)
    viewed = {d.name for d in differentiable if is_or_has_view(level, d)}
    if connected and any(map(is_in_place, nested.computation_trace.bound_symbols)):
        differentiable = [anchor(d) if could else d for d, could in zip(differentiable, could_need)]
    targets = [Target(d, could) for d, could in zip(differentiable, could_need)]
    scope = get_tracectx().peek_scope()
    start = len(scope)
    with grad_mode(False):
        result = nested.inline()
    # the values that forward made know the mode that they were made in; the program goes on in another one
    scope[start:] = [bsym for bsym in scope[start:] if not has_tags(bsym, {OpTags.CTX_MANAGER_ENTER_EXIT_OP})]
    call = Call(definition, unwrap(ctx), Aliases(scope[start:]), inputs, viewed)
    call.check_in_place([i.value for i in nested.inputs], connected)
    outputs = [read_item(result, i) for i in range(len(result.value))] if isinstance(result.value, tuple) else [result]
    values = _outputs(call, ctx, targets, [unwrap(o) for o in outputs], connected, any(needs))
    wrapped = [o if v is unwrap(o) else _computed(v) for o, v in zip(outputs, values)]
    return wrapped_build_tuple(wrapped) if isinstance(result.value, tuple) else wrapped[0]


def _outputs(
    call: Call, ctx: WrappedValue, targets: list[Target], values: list[Any], connected: bool, needed: bool
) -> list[Any]:
    """The function's outputs for the program, with a gradient function if ``connected``."""
    if not connected:
        return call.outputs(values, connected=False)
    if needed:
        call.check_marks(values)
    try:
        return call.connect(ctx, targets, call.outputs(values, connected=True))
    except AutogradFunctionError:
        if needed:
            raise
    note_requires_grad_read(current_level())  # a replay may not do without the gradient that this call does without
    return call.outputs(values, connected=False)


def _computed(value: Any) -> WrappedValue:
    return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of the function: ``forward`` is in the trace already, ``ctx`` holds what it recorded.

    Attributes:
        aliases: what ``forward`` makes and changes.
        viewed: inputs that are views, or have them.
    """

    definition: Definition
    ctx: Context
    aliases: Aliases
    inputs: Sequence[WrappedValue]
    viewed: set[str]

    @property
    def dirty(self) -> set[str]:
        """The tensors that the function says it has changed in place."""
        return self._tensors(self.ctx.dirty_tensors)

    @property
    def non_differentiable(self) -> set[str]:
        """The outputs that the function says have no gradient."""
        return self._tensors(self.ctx.non_differentiable)

    def _tensors(self, values: Sequence[Any]) -> set[str]:
        return {self.aliases.tensor(v) for v in values if isinstance(v, TensorProxy)}

    def is_dirty(self, value: Any) -> bool:
        """Whether the value is a tensor that the function says it has changed in place."""
        return isinstance(value, TensorProxy) and self.aliases.tensor(value) in self.dirty

    def has_gradient(self, value: Any) -> bool:
        """Whether the output is one that autograd would give a gradient function."""
        return is_differentiable(value) and self.aliases.tensor(value) not in self.non_differentiable

    def outputs(self, values: list[Any], connected: bool) -> list[Any]:
        """The outputs; what only passes through becomes a tensor of its own, without a history, as in autograd."""
        with grad_mode(False):
            return [self._detached(v, connected) for v in values]

    def _detached(self, value: Any, connected: bool) -> Any:
        if not isinstance(value, TensorProxy) or self.is_dirty(value):
            return value
        passes = self.aliases.outside(value)
        ends = not (connected and self.has_gradient(value))
        has_history = ends and is_differentiable(value) and ProxyTag.DETACHED_AUTOGRAD_GRAPH not in value.tags
        return view_of(value) if passes or has_history else value

    def check_in_place(self, read: list[Any], connected: bool) -> None:
        """A tensor that has a history may be changed only if autograd is told."""
        if not torch.is_grad_enabled():
            return  # the program is compiled for a caller that records no gradients
        told = self.dirty if connected else set()
        level = current_level()
        for value in read:
            if not isinstance(value, Proxy) or value.name not in self.aliases.changed - told:
                continue
            if may_require_grad(level, value):
                remedy = "Call `ctx.mark_dirty`" if connected else "Call it where gradients are on"
                raise AutogradFunctionError(
                    f"{self.definition.where}, changes the tensor {value.name} in place, which may require a gradient, "
                    f"and autograd is not told. {remedy}, or change a clone."
                )
            if may_require_grad_in_another_call(level, value):
                note_requires_grad_read(level)

    def check_marks(self, outputs: list[Any]) -> None:
        """What autograd checks of ``mark_dirty`` and ``save_for_backward``, when ``forward`` has ended."""
        for i, value in enumerate(self.ctx.to_save):
            if value is not None and not isinstance(value, TensorProxy):
                raise TypeError(
                    f"save_for_backward can only save variables, but argument {i} is of type {type(value).__name__}"
                )
        if not self.dirty <= self._tensors(outputs):
            raise RuntimeError(
                "Some elements marked as dirty during the forward method were not returned as output. The inputs that "
                "are modified inplace must all be outputs of the Function."
            )
        arguments = {v.name: v for v in map(unwrap, self.inputs) if isinstance(v, TensorProxy)}
        for name in self.dirty:
            if name not in arguments:
                what = "no input of the function"
            elif is_program_input(current_level(), arguments[name]):
                what = "an input of the compiled program"
            elif name in self.viewed:
                what = "a view, or has one"
            else:
                continue
            raise AutogradFunctionError(
                f"{self.definition.where}, marks {name} as dirty, which is {what}: its new history cannot be recorded. "
                f"Change a clone of it."
            )

    def connect(self, ctx: WrappedValue, targets: list[Target], outputs: list[Any]) -> list[Any]:
        """The outputs, with the gradient function of those that have one."""
        # an output that is returned twice is one tensor, which autograd knows by its last position
        last = {self.aliases.tensor(v): i for i, v in enumerate(outputs) if self.has_gradient(v)}
        if not last:
            return outputs
        made = connect(self.definition, ctx, targets, outputs, list(last.values()))
        connected = dict(zip(last, map(self._changed, map(outputs.__getitem__, last.values()), made)))
        return [connected[self.aliases.tensor(v)] if self.has_gradient(v) else v for v in outputs]

    def _changed(self, output: TensorProxy, connected: TensorProxy) -> TensorProxy:
        """The program knows a dirty input by its own name, too: that becomes the output which has a history."""
        if not self.is_dirty(output):
            return connected
        name = self.aliases.tensor(output)
        argument = next((v for v in map(unwrap, self.inputs) if getattr(v, "name", "") == name), None)
        return connected if argument is None else ltorch.copy_(argument, connected)
