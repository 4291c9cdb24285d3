"""``scan``: one function for each slice of some tensors, with a carry from slice to slice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

import thunder.nested
import thunder.torch as ltorch
from thunder.core import utils
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import TensorProxy
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.inner_function import (
    InnerFunction,
    checked_call,
    described,
    read_flat,
    read_leaves,
    spelled,
    structure,
)
from thunder.torch.higher_order.loop import Loop, Step, check_carry, like, placeholder
from thunder.torch.higher_order.operator import Record, Values
from thunder.torch.higher_order.program import Residuals


@thunder.nested.lookaside(torch_scan)
def scan(
    combine_fn: WrappedValue,
    init: WrappedValue,
    xs: WrappedValue,
    *,
    dim: WrappedValue | int = 0,
    reverse: WrappedValue | bool = False,
) -> tuple[Any, Any]:
    """Calls a function for each slice of ``xs``, with what it returned for the slice before::

        def scan(combine_fn, init, xs, *, dim=0, reverse=False):
            carry, results = init, []
            for i in reversed(range(length)) if reverse else range(length):
                carry, result = combine_fn(carry, tree_map(lambda x: x.select(dim, i), xs))
                results.append(result)
            return carry, tree_map(stack, *(reversed(results) if reverse else results))

    ``init`` and ``xs`` are tensors, or structures of them; ``length`` is the size of each leaf of ``xs`` in dimension
    ``dim``. The results are stacked in dimension ``dim``, or in the first one where they have no such dimension.

    The forward pass keeps, of each slice, what its gradient needs besides ``xs`` and captures: as eager PyTorch does.

    Raises:
        HigherOrderError: ``combine_fn`` is not callable, has effects, or does not return a pair of a carry
            like ``init`` and tensors; ``init`` or ``xs`` hold something else than tensors; the leaves of ``xs`` have
            different lengths, or length 0; shapes are symbolic.
    """
    where = checked_call("scan", "combine_fn", combine_fn)
    starts, spec = tensor_leaves(where, "init", init)
    leaves, xs_spec = tensor_leaves(where, "xs", xs)
    if not leaves:
        return unwrap(init), []
    if not starts:
        raise HigherOrderError(f"`init` of {where} holds no tensor. Use `map` for a function without a carry.")
    if not isinstance(unwrap(reverse), bool):
        raise HigherOrderError(f"`reverse` of {where} is {unwrap(reverse)!r}. Pass a bool.")
    axis = utils.canonicalize_dim(leaves[0][1].ndim, unwrap(dim))
    check_lengths(where, leaves, axis)
    carry, elements = [placeholder(i) for _, i in starts], [_element(x, axis) for _, x in leaves]
    arguments = tree_unflatten(carry, spec), tree_unflatten(elements, xs_spec)
    function = InnerFunction("scan", "combine_fn", combine_fn, arguments, runs=True)
    after, results = _pair(function)
    check_carry(function, starts, spec, *tree_flatten_with_path(after))
    results, results_spec = tree_flatten_with_path(results)
    xs_first = [ltorch.movedim(x, axis, 0) if axis else x for _, x in leaves]
    step = Step(function, [*tree_leaves(after), *tensor_results(function, results)])
    made = Scan(step, [i for _, i in starts], xs_first, [*carry, *elements], reverse=unwrap(reverse)).record()
    stacked = [ltorch.movedim(y, 0, axis) if 0 < axis < y.ndim else y for y in made[len(carry) :]]
    return tree_unflatten(made[: len(carry)], spec), tree_unflatten(stacked, results_spec)


@thunder.nested.lookaside(torch.ops.higher_order.scan)
def _scan_operator(
    combine_fn: WrappedValue, init: WrappedValue, xs: WrappedValue, additional_inputs: WrappedValue
) -> tuple[TensorProxy, ...]:
    """Flat: ``combine_fn(*carry, *elements, *additional_inputs)`` returns the next carry and the results in a row."""
    where = checked_call("scan", "combine_fn", combine_fn)
    (starts, _), (leaves, _) = tensor_leaves(where, "init", init), tensor_leaves(where, "xs", xs)
    check_lengths(where, leaves, 0)
    carry, elements = [placeholder(i) for _, i in starts], [_element(x, 0) for _, x in leaves]
    additional = read_flat(additional_inputs)
    function = InnerFunction("scan", "combine_fn", combine_fn, [*carry, *elements, *additional], runs=True)
    after, results = function.leaves[: len(carry)], function.leaves[len(carry) :]
    row = [()] * len(carry)
    check_carry(function, starts, row, after, row[: len(after)])
    step = Step(function, [leaf for _, leaf in after] + tensor_results(function, results))
    return tuple(Scan(step, [i for _, i in starts], [x for _, x in leaves], [*carry, *elements]).record())


def tensor_leaves(where: str, parameter: str, tree: WrappedValue) -> tuple[list[tuple[Any, TensorProxy]], Any]:
    """Path and proxy for each leaf of a wrapped structure of tensors, and the structure."""
    leaves, spec = read_leaves(tree)
    for path, leaf in leaves:
        if not isinstance(unwrap(leaf), TensorProxy):
            raise HigherOrderError(
                f"`{parameter}` of {where} holds at {spelled(path)} {described(unwrap(leaf))}. It may hold tensors; "
                f"let the function capture anything else."
            )
    return [(path, unwrap(leaf)) for path, leaf in leaves], spec


def tensor_results(function: InnerFunction, leaves: Sequence[tuple[Any, Any]]) -> list[TensorProxy]:
    """The leaves of a result that is stacked."""
    for path, leaf in leaves:
        if not isinstance(leaf, TensorProxy):
            raise HigherOrderError(
                f"{function.name} of `{function.operator}` returns at {spelled(path)} {described(leaf)}, which cannot "
                f"be stacked. Return tensors."
            )
    return [leaf for _, leaf in leaves]


def check_lengths(where: str, leaves: Sequence[tuple[Any, TensorProxy]], axis: int) -> None:
    """Raises if there are no slices of all leaves, along a dimension, for one number of trips, at least one."""
    if not leaves:
        raise HigherOrderError(f"`xs` of {where} holds no tensor, so there is no number of calls.")
    (first_path, first), *_ = leaves
    for path, x in leaves:
        found = f"`xs` of {where} holds at {spelled(path)} {described(x)}"
        if x.ndim <= axis or x.shape[axis] == 0:
            raise HigherOrderError(f"{found}. It needs a dimension {axis} whose size is not 0.")
        if x.shape[axis] != first.shape[axis]:
            raise HigherOrderError(
                f"{found}, and at {spelled(first_path)} {described(first)}. All need one size in dimension {axis}."
            )


def _element(x: TensorProxy, axis: int) -> TensorProxy:
    return placeholder(x, (*x.shape[:axis], *x.shape[axis + 1 :]))


def _pair(function: InnerFunction) -> tuple[Any, Any]:
    result = function.nested.result
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise HigherOrderError(
            f"{function.name} of `scan` returns {structure(function.leaves, function.spec)} (`*` is a leaf). It must "
            f"return a pair: the next carry, and the result of the slice."
        )
    return tuple(result)


class Scan(Loop):
    """``*carry, *stacked = scan(*init, *xs, *captured)``, along the first dimension; ``map`` where there is no carry.

    Args:
        step: the function.
        init: the carry before the first trip.
        xs: what the elements are slices of.
        passed: the placeholders that the function was traced with.
        reverse: whether the last elements come first.
    """

    def __init__(
        self,
        step: Step,
        init: Sequence[TensorProxy],
        xs: Sequence[TensorProxy],
        passed: Sequence[TensorProxy],
        *,
        reverse: bool = False,
    ):
        self._length = xs[0].shape[0]
        indices = range(self._length)
        self._indices = indices[::-1] if reverse else indices
        stacked = [placeholder(y, (self._length, *y.shape)) for y in step.outputs[len(init) :]]
        self._stacked_like = [like(y) for y in stacked]
        operator = step.function.operator
        super().__init__(
            operator, f"the `{operator}` with {step.function.name}", step, init, xs, stacked, Values(passed)
        )

    def run(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        return self._run_with(self.step, values)

    def run_forward(self, values: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        kept = []

        def step(*inputs: Any) -> Sequence[torch.Tensor]:
            outputs, residuals = self.step_forward(*inputs)
            kept.append(residuals)
            return outputs

        return self._run_with(step, values), [Record(kept)]

    def _run_with(self, step: Callable, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        carry, stacks = values[: self.carries], [torch.empty(**y) for y in self._stacked_like]
        for at in self._indices:
            outputs = step(*self.inputs(self.positions, carry, at, values))
            carry = outputs[: self.carries]
            for stack, y in zip(stacks, outputs[self.carries :]):
                stack[at] = y
        return *carry, *stacks

    def backward_trips(self, steps: list) -> Iterator[tuple[int, Residuals]]:
        return ((at, steps.pop()) for at in reversed(self._indices))
