"""Gradient rules of operations that thunder's own gradient rules are made of, so that gradients have gradients.

Each of them is linear in the gradient that it gets, and the rule is the transposed map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import thunder.torch as ltorch
from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import Symbol
from thunder.core.transforms import get_grad, put_grad, register_grad


def _flip(a: TensorProxy, dims: Sequence[int]) -> TensorProxy:
    result = prims.flip(a, dims)
    put_grad(a, prims.flip(get_grad(result), dims))
    return result


def _nll_loss_backward(
    g: TensorProxy,
    a: TensorProxy,
    target: TensorProxy,
    weight: TensorProxy | None,
    reduction: str,
    ignore_index: int,
    total_weight: TensorProxy,
) -> TensorProxy:
    # the loss is linear in `a`, which therefore has no gradient here
    result = ltorch.nll_loss_backward(g, a, target, weight, reduction, ignore_index, total_weight)
    put_grad(g, ltorch.nll_loss(get_grad(result), target, weight, ignore_index, reduction))
    return result


def _embedding_backward(
    grad: TensorProxy,
    indices: TensorProxy,
    num_weights: int,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> TensorProxy:
    if scale_grad_by_freq:
        raise NotImplementedError("an embedding with scale_grad_by_freq=True has no second derivative in thunder")
    result = prims.embedding_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq, sparse)
    pushed = ltorch.embedding(indices, get_grad(result))
    if padding_idx is not None and padding_idx >= 0:
        pushed = ltorch.where(ltorch.unsqueeze(indices == padding_idx, -1), 0.0, pushed)
    put_grad(grad, pushed)
    return result


def _detaching(symbol: Symbol) -> Callable:
    def rule(a: TensorProxy) -> TensorProxy:
        return symbol(a)

    return rule


# The installed thunder computes their gradient, which is zero, by an operation of torch that has no gradient itself.
for _fn in (torch.detach, torch.Tensor.detach, torch.detach_copy):
    _symbol = ltorch._torch_to_thunder_function_map[_fn]
    register_grad(_symbol, _detaching(_symbol))

register_grad(prims.flip, _flip)
register_grad(ltorch.nll_loss_backward, _nll_loss_backward)
register_grad(prims.embedding_backward, _embedding_backward)
