"""``map``: one function for each slice of some tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._higher_order_ops.map import map as torch_map
from torch.utils._pytree import tree_unflatten

import thunder.nested
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import TensorProxy
from thunder.torch.higher_order.inner_function import InnerFunction, checked_call, read_flat
from thunder.torch.higher_order.loop import Step, placeholder
from thunder.torch.higher_order.scan import Scan, check_lengths, tensor_leaves, tensor_results


@thunder.nested.lookaside(torch_map)
def map_slices(f: WrappedValue, xs: WrappedValue, *args: WrappedValue) -> Any:
    """Calls a function for each slice of ``xs``::

        def map(f, xs, *args):
            return tree_map(stack, *(f(tree_map(lambda x: x[i], xs), *args) for i in range(length)))

    ``xs`` is a tensor or a structure of tensors, all of one ``length`` in the first dimension, in which the results
    are stacked.

    The forward pass keeps, of each slice, what its gradient needs besides ``xs``, ``args`` and captures.

    Raises:
        HigherOrderError: ``f`` is not callable, has effects, or returns something else than tensors; ``xs``
            holds something else than tensors, or of different lengths, or of length 0; shapes are symbolic.
    """
    leaves, spec, elements = _elements(f, xs)
    function = InnerFunction("map", "f", f, [tree_unflatten(elements, spec), *map(unwrap, args)], runs=True)
    return tree_unflatten(_mapped(function, leaves, elements), function.spec)


@thunder.nested.lookaside(torch.ops.higher_order.map_impl)
def _map_operator(f: WrappedValue, xs: WrappedValue, pos_args: WrappedValue) -> list[TensorProxy]:
    """Flat: ``f(*elements, *pos_args)`` returns the results in a row."""
    leaves, _, elements = _elements(f, xs)
    additional = read_flat(pos_args)
    function = InnerFunction("map", "f", f, [*elements, *additional], runs=True)
    return tree_unflatten(_mapped(function, leaves, elements), function.spec)


def _elements(f: WrappedValue, xs: WrappedValue) -> tuple[list[tuple[Any, TensorProxy]], Any, list[TensorProxy]]:
    """Path and proxy for each leaf of ``xs``, its structure, and what the function is traced with."""
    where = checked_call("map", "f", f)
    leaves, spec = tensor_leaves(where, "xs", xs)
    check_lengths(where, leaves, 0)
    return leaves, spec, [placeholder(x, x.shape[1:]) for _, x in leaves]


def _mapped(
    function: InnerFunction, leaves: Sequence[tuple[Any, TensorProxy]], elements: Sequence[TensorProxy]
) -> list[TensorProxy]:
    step = Step(function, tensor_results(function, function.leaves))
    return Scan(step, (), [x for _, x in leaves], elements).record()
