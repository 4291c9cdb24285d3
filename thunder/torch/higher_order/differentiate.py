"""One call of a function that ``torch.func`` differentiates: traced, checked, replayed with its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

import thunder.clang as clang
import thunder.nested
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import TensorProxy
from thunder.core.trace import get_tracectx
from thunder.nested.ambient import grad_mode
from thunder.nested.errors import name_of
from thunder.nested.rewrap import reachable_proxies
from thunder.nested.stand_ins import like
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.inner_function import effect_of
from thunder.torch.higher_order.joint import Joint, Run, constant
from thunder.torch.higher_order.program import stand_alone


class Call:
    """A call of a function some of whose arguments are differentiated.

    Attributes:
        name: how messages name the function.
        output: what it returned, without ``aux``, with the proxies of the inner computation.
    """

    def __init__(self, nested: NestedTrace, args: Sequence[WrappedValue], kwargs: dict, leaves: list, name: str):
        self.nested, self.name, self.output = nested, name, nested.result
        self._aux: Any = ()
        self._differentiable: list[TensorProxy] = []
        self._lift = nested._lift.with_arguments(tuple(args), kwargs)
        # for each leaf that is differentiated what it was traced with, and what it is
        self._leaves: list[tuple[TensorProxy, TensorProxy]] = leaves
        self._spec: TreeSpec | None = None
        self._run: Run | None = None
        self._inputs: list[int | None] = []
        self._positions: list[int] = []

    @classmethod
    def trace(
        cls,
        func: WrappedValue,
        args: Sequence[WrappedValue],
        kwargs: dict[str, WrappedValue],
        positions: int | tuple[int, ...],
        api: str,
        *,
        has_aux: bool,
    ) -> Call:
        """Traces the function, and checks what it does.

        Args:
            positions: the positional arguments that are differentiated.
            api: how the messages of eager PyTorch begin.
            has_aux: whether it returns a pair, of which only the first is differentiated.
        """
        name = name_of(unwrap(func))
        wanted = positions
        flat, spec = tree_flatten(
            plain_of(args[wanted]) if isinstance(wanted, int) else tuple(plain_of(args[i]) for i in wanted)
        )
        leaves = [_leaf(value) for value in flat]
        stand_ins = tree_unflatten([stand_in for stand_in, _ in leaves], spec)
        by_position = {wanted: stand_ins} if isinstance(wanted, int) else dict(zip(wanted, stand_ins))
        traced = [by_position.get(i, a) for i, a in enumerate(args)]
        with grad_mode(True):
            nested = thunder.nested.trace(func, *traced, **kwargs)
        if nested.exception is not None:
            nested.inline()  # raises it
        _check_effects(nested, name)
        call = cls(nested, args, kwargs, leaves, name)
        call._spec = spec
        if has_aux:
            if not (isinstance(nested.result, tuple) and len(nested.result) == 2):
                raise RuntimeError(f"{api}: output of function f should be a tuple: (output, aux) if has_aux is True")
            call.output, call._aux = nested.result
        return call

    def replay(self, outputs: Sequence[TensorProxy]) -> WrappedValue:
        """Records the function in the enclosing trace.

        Args:
            outputs: the proxies of the inner computation that are differentiated.

        Returns:
            What the function returned.
        """
        level, nested = self.nested._level, self.nested
        for leaf in tree_flatten(self._aux)[0]:
            if not isinstance(leaf, TensorProxy):
                raise RuntimeError(f"Expected tensors, got unsupported type {type_of(leaf)}")
        first = list(dict.fromkeys(level.final_name(o) for o in outputs))
        leaving = [level.final_name(p) for p in reachable_proxies(level, [nested.result]) if isinstance(p, TensorProxy)]
        others = [n for n in dict.fromkeys(leaving) if n not in first]
        placeholders = {stand_in.name: i for i, (stand_in, _) in enumerate(self._leaves)}
        self._inputs = [placeholders.get(getattr(i.value, "name", None)) for i in nested.inputs]
        trace = stand_alone(nested, [*first, *others], [i is not None for i in self._inputs])
        joint = Joint(trace, self.name, len(first))
        values = [i.value if leaf is None else self._leaves[leaf][1] for i, leaf in zip(nested.inputs, self._inputs)]
        self._run = run = Run(joint, values)
        by_name = dict(zip((*first, *others), map(run.value, (*joint.outputs, *joint.others))))
        self._differentiable = [by_name[n] for n in first]
        self._positions = [first.index(level.final_name(o)) for o in outputs]
        return nested._finish_replay(by_name, self._lift)

    @property
    def outputs(self) -> list[TensorProxy]:
        """The differentiated outputs in the enclosing trace; one that is returned twice is in it twice."""
        return [self._differentiable[p] for p in self._positions]

    def gradients(self, given: Sequence[TensorProxy]) -> Any:
        """The gradients of the differentiated arguments, for a gradient of each output, in the arguments' structure."""
        assert self._run is not None
        total: list[TensorProxy | None] = [None] * len(self._differentiable)
        for position, g in zip(self._positions, given):
            g = clang.maybe_convert_to_dtype(g, self._differentiable[position].dtype)
            known = total[position]
            total[position] = g if known is None else known + g
        found = self._run.gradients(total)
        by_leaf = {leaf: g for leaf, g in zip(self._inputs, found) if leaf is not None and g is not None}
        flat = [by_leaf.get(i, None) for i in range(len(self._leaves))]
        flat = [constant(0.0, real) if g is None else g for g, (_, real) in zip(flat, self._leaves)]
        return tree_unflatten(flat, self._spec)

    def pushed(self, tangents: Sequence[TensorProxy]) -> list[TensorProxy]:
        """The derivative of each output in the direction of tangents of the arguments' leaves."""
        assert self._run is not None
        tangents = [clang.maybe_convert_to_dtype(t, real.dtype) for t, (_, real) in zip(tangents, self._leaves)]
        found = self._run.pushed([None if leaf is None else tangents[leaf] for leaf in self._inputs], self.name)
        return [found[p] for p in self._positions]


def _leaf(value: Any) -> tuple[TensorProxy, TensorProxy]:
    """A tensor of its own to trace the function with, and the tensor."""
    if not isinstance(value, TensorProxy):
        raise ValueError(f"Thing passed to transform API must be Tensor, got {type_of(value)}")
    if not dtypes.is_inexact_dtype(value.dtype):
        raise RuntimeError("only Tensors of floating point dtype can require gradients")
    stand_in = like(value, get_tracectx().make_name(prefix="t"))
    stand_in._requires_grad = True
    stand_in._tags = set()
    return stand_in, value


def _check_effects(nested: NestedTrace, name: str) -> None:
    effect = effect_of(nested, nested.fn)
    if effect is not None:
        raise HigherOrderError(
            f"{name} {effect}, but it is differentiated by `torch.func`, which takes it for a function of its "
            f"arguments. Return the new value, with `has_aux=True`, and make the change after the call."
        )


def type_of(value: Any) -> type:
    return torch.Tensor if isinstance(value, TensorProxy) else getattr(value, "python_type", type(value))


def plain_of(value: WrappedValue) -> Any:
    """The value, with proxies for the tensors in tuples, lists and dicts."""
    plain = unwrap(value)
    if not isinstance(plain, (tuple, list, dict)):
        return plain
    value.track_items()
    if isinstance(plain, dict):
        return type(plain)((k, plain_of(value.item_wrappers[k])) for k in plain)
    items = [plain_of(item) for item in value.item_wrappers]
    return type(plain)._make(items) if hasattr(plain, "_make") else type(plain)(items)
