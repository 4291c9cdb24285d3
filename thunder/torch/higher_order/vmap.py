"""``torch.vmap``: a function of one example, for a batch of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.vmap import _process_batched_inputs, vmap_impl
from torch.utils._pytree import _broadcast_to_and_flatten, tree_flatten, tree_unflatten

import thunder.nested
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import Proxy, TensorProxy
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.inner_function import InnerFunction, check_known_shapes, described, read_leaves, spelled
from thunder.torch.higher_order.loop import placeholder
from thunder.torch.higher_order.operator import RunTimeOperator, Values, differentiable
from thunder.torch.higher_order.program import Program


@thunder.nested.lookaside(vmap_impl)
def vmap(
    func: WrappedValue,
    in_dims: WrappedValue,
    out_dims: WrappedValue,
    randomness: WrappedValue,
    chunk_size: WrappedValue,
    *args: WrappedValue,
    **kwargs: WrappedValue,
) -> Any:
    """Calls a function for each example of a batch, in one go::

        def vmap(func, in_dims=0, out_dims=0):
            def batched(*args, **kwargs):
                results = [func(*tree_map(lambda x, d: x if d is None else x.select(d, i), args, in_dims), **kwargs)
                           for i in range(batch_size)]
                return tree_map(lambda d, *r: torch.stack(r, d), out_dims, *results)
            return batched

    The function is traced for one example; when the program runs, ``torch.vmap`` batches the operations of its trace,
    as torch executes them, so no other executor takes part in it. So it does with the gradient: what a captured
    tensor, or an argument with ``in_dim`` None, gets is computed for each example and summed.

    Raises:
        HigherOrderError: the function has effects; its gradient
            needs what cannot be batched (``cond`` or a loop in it); shapes are symbolic.
        ValueError: as ``torch.vmap``.
    """
    check_known_shapes("vmap", unwrap(func))
    leaves = [read_leaves(a) for a in args]
    flat, spec = tree_flatten(tuple(tree_unflatten([unwrap(x) for _, x in found], s) for found, s in leaves))
    size, dims = _batch(unwrap(in_dims), tree_unflatten(flat, spec), unwrap(func))
    examples = [x if d is None else placeholder(x, _without(x.shape, d)) for x, d in zip(flat, dims)]
    keywords = {name: unwrap(value) for name, value in kwargs.items()}
    function = InnerFunction("vmap", "func", func, tree_unflatten(examples, spec), keywords, runs=True)
    for path, leaf in function.leaves:
        if not isinstance(leaf, TensorProxy):
            raise ValueError(
                f"vmap({function.name}): must only return Tensors, but returns {described(leaf)} at {spelled(path)}"
            )
    outs = _broadcast_to_and_flatten(unwrap(out_dims), function.spec)
    if outs is None:
        raise ValueError(f"vmap({function.name}): out_dims {unwrap(out_dims)} does not fit its result")
    passed = [(p, x, d) for p, x, d in zip(examples, flat, dims) if d is not None]
    options = {"randomness": unwrap(randomness), "chunk_size": unwrap(chunk_size)}
    return tree_unflatten(Vmap(function, passed, outs, size, options).record(), function.spec)


def _batch(in_dims: Any, args: tuple, func: Any) -> tuple[int, list[int | None]]:
    """The batch size, and the dimension for each leaf, by torch's own rules and with its errors."""

    def real(x: Any) -> Any:
        if isinstance(x, TensorProxy):
            return torch.empty(tuple(x.shape), dtype=dtypes.to_torch_dtype(x.dtype), device="meta")
        return x

    flat, spec = tree_flatten(args)
    size, dims, *_ = _process_batched_inputs(in_dims, tree_unflatten(list(map(real, flat)), spec), func)
    return size, dims


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    dim = dim % (len(shape) + 1)
    return (*shape[:dim], size, *shape[dim:])


class Vmap(RunTimeOperator):
    """``results = vmap(*batched, *captured)``.

    Args:
        function: the function, traced for one example.
        batched: for each argument that is batched its placeholder, its value and its dimension.
        out_dims: the dimension for each result, None for one that is the same for all examples.
        size: the batch size.
        options: further options of ``torch.vmap``.
    """

    def __init__(
        self,
        function: InnerFunction,
        batched: Sequence[tuple[TensorProxy, TensorProxy, int]],
        out_dims: Sequence[int | None],
        size: int,
        options: Mapping[str, Any],
    ):
        numbering = Values([p for p, _, _ in batched])
        self._positions = numbering.positions(function.nested)
        self._values = [*(x for _, x, _ in batched), *numbering.captured]
        self._dims = [*(d for _, _, d in batched), *(None for _ in numbering.captured)]
        self._out_dims, self._size, self._options = list(out_dims), size, options
        flags = differentiable(self._values)
        self._program = Program(function.nested, function.tensors, [flags[p] for p in self._positions])
        results = [
            placeholder(r, r.shape if d is None else _with(r.shape, d, size))
            for r, d in zip(function.tensors, out_dims)
        ]
        super().__init__("vmap", f"the `vmap` of {function.name}", results, {"func": self._program})
        # torch.vmap knows torch's operations, and not those of a fusion
        self._executors = [e for e in self.executors if e.name in ("torch", "python")]
        self._forward = self._program.forward(self._executors)

    def record(self) -> list[TensorProxy]:
        """Records the call in the current trace; returns the results."""
        values, self._values = self._values, []  # the enclosing level's, which shall not live as long as this
        return self(values)

    def run(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        return self._batched(self._forward, self._in_dims(), tuple(self._out_dims))(*self._inputs(values))

    def _inputs(self, values: Sequence[Any]) -> list[Any]:
        return [values[p] for p in self._positions]

    def _in_dims(self) -> tuple[int | None, ...]:
        return tuple(self._dims[p] for p in self._positions)

    def _batched(self, fn: Any, in_dims: tuple, out_dims: Any) -> Any:
        return torch.vmap(fn, in_dims, out_dims, **self._options)

    #
    # The gradient
    #

    def prepare_gradient(self) -> Iterable[int]:
        self._pair = self._program.forward_and_backward(self._executors)
        if self._pair.others:
            raise HigherOrderError(
                f"The gradient of {self._where} needs values that are no tensors, which cannot be batched. "
                f"Call `cond`, `while_loop`, `scan` and `map` outside of `vmap`, or under `torch.no_grad`."
            )
        inputs = {proxy.name: i for i, proxy in enumerate(self._program.inputs)}
        # for each residual the input that it is, or None
        self._kept = [inputs.get(t.name) for t in self._pair.tensors]
        return [p for p, has in zip(self._positions, self._pair.has_gradient) if has]

    def record_meta(self, values: Sequence[Any]) -> tuple[Proxy, ...]:
        inputs = self._inputs(values)
        return tuple(
            TensorProxy(like=t, shape=_with(t.shape, 0, self._size), requires_grad=False)
            if i is None
            else TensorProxy(like=inputs[i], requires_grad=False)
            for t, i in zip(self._pair.tensors, self._kept)
        )

    def run_forward(self, values: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        def forward(*inputs: Any) -> tuple[tuple, tuple]:
            outputs, tensors, _ = self._pair.forward(*inputs)
            return tuple(outputs), tuple(t for t, i in zip(tensors, self._kept) if i is None)

        inputs = self._inputs(values)
        made = self._kept.count(None)
        batched = self._batched(forward, self._in_dims(), (tuple(self._out_dims), (0,) * made))
        outputs, residuals = batched(*inputs)
        residuals = iter(residuals)
        return outputs, [next(residuals) if i is None else inputs[i].detach() for i in self._kept]

    def run_backward(
        self, record: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Mapping[int, torch.Tensor | None]:
        wanted = [k for k, has in enumerate(self._pair.has_gradient) if has]
        in_dims = self._in_dims()
        given = [k for k, g in enumerate(gradients) if g is not None]

        def backward(record: Sequence[Any], some: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            all_gradients = [None] * len(gradients)
            for k, g in zip(given, some):
                all_gradients[k] = g
            found = self._pair.backward(record, (), all_gradients)
            return tuple(found[k] for k in wanted)

        kept_dims = [0 if i is None else in_dims[i] for i in self._kept]
        out_dims = tuple(in_dims[k] or 0 for k in wanted)
        batched = self._batched(backward, (kept_dims, [self._out_dims[k] for k in given]), out_dims)
        found = batched(list(record), [gradients[k] for k in given])
        return {self._positions[k]: g if in_dims[k] is not None else g.sum(0) for k, g in zip(wanted, found)}
