"""lightning-thunder's ``thunder.core.transforms``, with right gradients of CPU tensors without dimensions.

Thunder does not broadcast such a tensor (``w * x.sum()``), so its gradient comes in the shape of the result, and what
follows fails or is silently wrong. Inner functions, which get one element or one example, are full of such tensors.
"""

from thunder_overlay import execute_installed

execute_installed(globals())

_installed_put_grad = put_grad


def put_grad(a, grad):
    if isinstance(a, TensorProxy) and isinstance(grad, TensorProxy) and a.ndim < grad.ndim:
        grad = sum_to(grad, a.shape)
    return _installed_put_grad(a, grad)
