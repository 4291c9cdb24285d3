"""``associative_scan``: a scan in a logarithmic number of steps, each of which combines many pairs at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import associative_scan as torch_associative_scan
from torch.utils._pytree import tree_leaves, tree_unflatten

import thunder.nested
import thunder.torch as ltorch
from thunder.core import utils
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import TensorProxy
from thunder.nested.lookasides import call_interpreted
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.inner_function import InnerFunction, checked_call, described, read_flat, spelled
from thunder.torch.higher_order.scan import check_lengths, tensor_leaves


@thunder.nested.lookaside(torch_associative_scan)
def associative_scan(
    combine_fn: WrappedValue,
    xs: WrappedValue,
    dim: WrappedValue | int,
    reverse: WrappedValue | bool = False,
    combine_mode: WrappedValue | str = "pointwise",
) -> Any:
    """Combines each slice with all slices before it::

        def associative_scan(combine_fn, xs, dim, reverse=False):
            results = []
            for i in reversed(range(length)) if reverse else range(length):
                x = tree_map(lambda x: x.select(dim, i), xs)
                results.append(combine_fn(results[-1], x) if results else x)
            return tree_map(stack, *(reversed(results) if reverse else results))

    ``combine_fn`` must be associative: the order of its calls is another one, and so is rounding. With
    ``combine_mode="pointwise"`` it works element by element, and gets many slices at once, with dimension ``dim``
    first; torch allows that on accelerators only, here it works on all devices. With ``"generic"`` it gets single
    slices, by ``torch.vmap``.

    All of it is recorded as ordinary operations, with ordinary gradients.

    Raises:
        HigherOrderError: ``combine_fn`` is not callable or has effects, or returns something else than it
            gets; ``xs`` holds something else than tensors, or of different lengths, or of length 0; shapes are
            symbolic.
    """
    where = checked_call("associative_scan", "combine_fn", combine_fn)
    mode = unwrap(combine_mode)
    if mode not in ("pointwise", "generic"):
        raise HigherOrderError(f"`combine_mode` of {where} is {mode!r}. Pass 'pointwise' or 'generic'.")
    leaves, spec = tensor_leaves(where, "xs", xs)
    if not leaves:
        raise HigherOrderError(f"`xs` of {where} holds no tensor.")
    axis = utils.canonicalize_dim(leaves[0][1].ndim, unwrap(dim))
    check_lengths(where, leaves, axis)
    if mode == "generic":
        combine_fn = call_interpreted(torch.vmap, combine_fn)

    def combine(a: list[TensorProxy], b: list[TensorProxy]) -> list[TensorProxy]:
        return _combined(combine_fn, (tree_unflatten(a, spec), tree_unflatten(b, spec)), b)

    elements = [ltorch.movedim(x, axis, 0) if axis else x for _, x in leaves]
    if unwrap(reverse):
        elements = [ltorch.flip(x, 0) for x in elements]
    results = _scan(combine, elements)
    if unwrap(reverse):
        results = [ltorch.flip(x, 0) for x in results]
    return tree_unflatten([ltorch.movedim(r, 0, axis) if axis else r for r in results], spec)


@thunder.nested.lookaside(torch.ops.higher_order.associative_scan)
def _associative_scan_operator(
    combine_fn: WrappedValue, xs: WrappedValue, additional_inputs: WrappedValue | None = None
) -> list[TensorProxy]:
    """Flat: ``combine_fn(*a, *b, *additional_inputs)`` gets many slices at once, along the first dimension."""
    where = checked_call("associative_scan", "combine_fn", combine_fn)
    leaves, _ = tensor_leaves(where, "xs", xs)
    check_lengths(where, leaves, 0)
    additional = [] if additional_inputs is None else read_flat(additional_inputs)
    return _scan(lambda a, b: _combined(combine_fn, [*a, *b, *additional], b), [x for _, x in leaves])


def _combined(combine_fn: WrappedValue, arguments: Sequence[Any], like: list[TensorProxy]) -> list[TensorProxy]:
    """The leaves of a call of the function, which must be like those of its second argument."""
    function = InnerFunction("associative_scan", "combine_fn", combine_fn, arguments, runs=True)
    for (path, result), x in zip(function.leaves, like):
        if described(result) != described(x):
            raise HigherOrderError(
                f"{function.name} of `associative_scan` gets {described(x)} and returns {described(result)} at "
                f"{spelled(path)}. It must return what it gets: convert the result with `.to(...)` or `.reshape(...)`."
            )
    if len(function.leaves) != len(like):
        raise HigherOrderError(
            f"{function.name} of `associative_scan` returns {len(function.leaves)} leaves for {len(like)} of each "
            f"argument. It must return the structure that it gets."
        )
    return tree_leaves(unwrap(function.nested.inline()))


def _scan(combine: Callable, xs: list[TensorProxy]) -> list[TensorProxy]:
    """The recursion of Blelloch, Prefix Sums and Their Applications (1990): pairs, and then what lies between them."""
    length = xs[0].shape[0]
    if length == 1:
        return xs
    pairs = combine([x[0 : length - 1 : 2] for x in xs], [x[1::2] for x in xs])
    odd = _scan(combine, pairs)
    even = [x[:1] for x in xs]
    if length > 2:
        between = combine([x[: (length - 1) // 2] for x in odd], [x[2::2] for x in xs])
        even = [ltorch.cat([first, rest]) for first, rest in zip(even, between)]
    return [_interleaved(e, o) for e, o in zip(even, odd)]


def _interleaved(even: TensorProxy, odd: TensorProxy) -> TensorProxy:
    both = odd.shape[0]
    rows = ltorch.reshape(ltorch.stack([even[:both], odd], 1), (2 * both, *odd.shape[1:]))
    return rows if even.shape[0] == both else ltorch.cat([rows, even[both:]])
