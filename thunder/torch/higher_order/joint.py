"""A program together with its gradient, as operations of the enclosing trace: what ``torch.func`` is made of.

NOTE [joint computations]: ``grad_transform_on_trace`` makes, of a trace by itself, one that computes outputs and
gradients. In it ``get_grad(output)`` stands for the gradient that is given to an output. What depends on one of these
is the *backward part*. A :class:`Joint` replays the rest at once, and the backward part, with values in the place of
``get_grad``, as often as gradients are asked for. All of it are ordinary operations of the enclosing trace, which are
fused, and differentiated again, like any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.codeutils import SigInfo
from thunder.core.compile_data import get_compile_data
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.core.transform_common import dce, wrap_return_value_together_with_arguments
from thunder.nested.ambient import grad_mode
from thunder.nested.replay import Substitution
from thunder.nested.stand_ins import like
from thunder.torch.higher_order.common import HigherOrderError, names
from thunder.transforms.autodiff import grad_transform_on_trace

_NOT_REPLAYED = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN)
_TAGS = {BoundSymbolTag.BACKWARD, BoundSymbolTag.RECOMPUTE_IN_BACKWARD}


def constant(value: float, like: TensorProxy) -> TensorProxy:
    """A tensor of one value. It does not depend on the other tensor, as what ``zeros_like`` gives would."""
    return ltorch.full(like.shape, value, device=like.device, dtype=like.dtype)


class Joint:
    """The computation of a program's outputs, and of gradients, see NOTE [joint computations].

    Args:
        trace: the program; it returns a flat tuple of distinct tensors, and differentiates arguments that say that
            they require a gradient.
        where: how messages name it.
        differentiated: how many of its outputs, from the first on, are differentiated; None for all.

    Attributes:
        args: the program's arguments.
        outputs: those outputs that are differentiated.
        others: what stands for the others.
        gradients: for each argument its gradient, or None.
        forward, backward: what does not depend on the outputs' gradients, and what does.
    """

    def __init__(self, trace: TraceCtx, where: str, differentiated: int | None = None):
        self.args = tuple(trace.args)
        n = _set_others_apart(trace, differentiated)
        try:
            with grad_mode(True, autocast=False):
                joint = dce(grad_transform_on_trace(dce(wrap_return_value_together_with_arguments(trace))))
        except Exception as error:
            raise HigherOrderError(
                f"{where} cannot be differentiated: {error}. Thunder has no gradient rule for an operation in it, as "
                f"for many operations that are gradients themselves. Compose it of other operations."
            ) from error
        (returned,) = joint.bound_symbols[-1].args
        outputs = tuple(returned["fw_flat_out"])
        self.gradients: tuple[TensorProxy | None, ...] = tuple(returned["output"])
        self.forward, self.backward = _parts(joint)
        apart = {b.output.name: b.args[0] for b in self.forward if b.sym is prims.shallow_copy}
        self.outputs: tuple[TensorProxy, ...] = outputs[:n]
        self.others: tuple[TensorProxy, ...] = tuple(apart[o.name] for o in outputs[n:])
        set_apart = names(outputs[n:])
        self.forward = [b for b in self.forward if not names(b.flat_proxy_outs) & set_apart]


def _set_others_apart(trace: TraceCtx, differentiated: int | None) -> int:
    """Outputs that are not differentiated get names of their own, to which no gradient is given.

    Returns:
        How many are differentiated.
    """
    (outputs,) = trace.bound_symbols[-1].args
    if differentiated is None:
        return len(outputs)
    trace.bound_symbols.pop()
    trace.scopes = [trace.bound_symbols]
    with tracectx(trace):
        others = []
        for output in outputs[differentiated:]:
            others.append(like(output, trace.make_name(prefix="t")))
            others[-1].tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
            trace.bound_symbols.append(prims.shallow_copy.bind(output, output=others[-1]))
        prims.python_return((*outputs[:differentiated], *others))
    return differentiated


def _parts(joint: TraceCtx) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
    """What does not depend on the outputs' gradients, and what does."""
    forward, backward = [], []
    dependent: set[str] = set()
    for bsym in joint.bound_symbols:
        if bsym.sym.id in _NOT_REPLAYED:
            continue
        if bsym.sym is prims.get_grad or names(bsym.flat_proxy_args) & dependent:
            dependent |= names(bsym.flat_proxy_outs)
            backward.append(bsym)
        else:
            forward.append(bsym)
    return forward, backward


class Run:
    """A joint computation in the current trace: what does not depend on gradients is recorded.

    Args:
        joint: the computation.
        inputs: the values of its arguments.
    """

    def __init__(self, joint: Joint, inputs: Sequence[Any]):
        self._joint = joint
        self.values = Substitution(zip((a.name for a in joint.args), inputs, strict=True), get_tracectx())
        _record(joint.forward, self.values)

    def value(self, proxy: Proxy) -> Any:
        """The value of a proxy of the joint computation."""
        return self.values.value(proxy)

    def gradients(self, given: Sequence[TensorProxy]) -> list[TensorProxy | None]:
        """Records the backward part.

        Args:
            given: a gradient for each of the joint computation's outputs.

        Returns:
            For each argument its gradient, or None if it has none.
        """
        values = Substitution(self.values, get_tracectx())
        by_output = {o.name: g for o, g in zip(self._joint.outputs, given)}
        for bsym in self._joint.backward:
            if bsym.sym is prims.get_grad:
                values[bsym.output.name] = by_output[bsym.args[0].name]
        _record([b for b in self._joint.backward if b.sym is not prims.get_grad], values)
        return [None if g is None else values.value(g) for g in self._joint.gradients]

    def pushed(self, tangents: Sequence[TensorProxy | None], where: str) -> list[TensorProxy]:
        """The derivative of each output in the direction of the tangents of the arguments, None for zero.

        The map from the outputs' gradients to those of the arguments is linear; this is its transposed one.
        """
        trace, residuals, wanted = _backward_as_program(self._joint)
        zeros = [constant(0.0, self.value(o)) for o in self._joint.outputs]
        if not wanted:
            return zeros
        run = Run(Joint(trace, where), [*zeros, *map(self.value, residuals)])
        found = run.gradients([tangents[i] for i in wanted])[: len(zeros)]
        return [z if f is None else f for z, f in zip(zeros, found)]


def _record(bsyms: Sequence[BoundSymbol], values: Substitution) -> None:
    scope = get_tracectx().peek_scope()
    detached = not get_compile_data().is_grad_enabled
    for bsym in bsyms:
        values.define(bsym)
        new = _plain(values.bound_symbol(bsym))
        if detached:
            inputs = names(new.flat_proxy_args)
            for out in new.flat_proxy_outs:
                if isinstance(out, TensorProxy) and out.name not in inputs:
                    out.tags.add(ProxyTag.DETACHED_AUTOGRAD_GRAPH)
        scope.append(new)


def _plain(bsym: BoundSymbol) -> BoundSymbol:
    """Without what the gradient transform has noted on it, which would mislead the transform of the whole program."""
    bsym.tags = bsym.tags - _TAGS
    for sub in bsym.subsymbols:
        _plain(sub)
    return bsym


def _backward_as_program(joint: Joint) -> tuple[TraceCtx, list[Proxy], list[int]]:
    """The backward part as a program by itself.

    Returns:
        The program ``gradients = program(*gradients_of_outputs, *residuals)``; the residuals; and for which of the
        joint computation's arguments it gives a gradient.
    """
    given = {o.name: like(o, f"{o.name}_cotangent") for o in joint.outputs}
    made = {name for b in joint.backward for name in names(b.flat_proxy_outs)}
    wanted = [i for i, g in enumerate(joint.gradients) if g is not None and g.name in made]
    residuals = {p.name: p for b in joint.backward for p in b.flat_proxy_args if p.name not in made}
    trace = TraceCtx()
    trace.names = {*given, *made, *residuals}
    with tracectx(trace):
        cotangents = [TensorProxy(g.name, like=g, requires_grad=True) for g in given.values()]
        arguments = [*cotangents, *residuals.values()]
        for argument in arguments:
            prims.unpack_trivial(argument, name=argument.name)
        by_output = dict(zip(given, cotangents))
        values = Substitution(((a.name, a) for a in arguments), trace)
        for bsym in joint.backward:
            if bsym.sym is prims.get_grad:
                values[bsym.output.name] = by_output[bsym.args[0].name]
        _record([b for b in joint.backward if b.sym is not prims.get_grad], values)
        prims.python_return(tuple(_distinct([values.value(joint.gradients[i]) for i in wanted], arguments)))
    signature = SigInfo("computation")
    signature.args = [(a.name, None) for a in arguments]
    trace._siginfo, trace.args = signature, tuple(arguments)
    return trace, list(residuals.values()), wanted


def _distinct(values: Sequence[TensorProxy], inputs: Sequence[Proxy]) -> Iterator[TensorProxy]:
    """As two names for one tensor they would share one gradient."""
    seen = names(inputs)
    for value in values:
        value = prims.clone(value) if value.name in seen else value
        seen.add(value.name)
        yield value
