"""``torch.autograd.Function``, and the operator ``autograd_function_apply`` that TorchDynamo makes of it.

What ``Function.apply(*inputs)`` means, for the traced program::

    with no_grad():                               # recorded in the enclosing trace, without gradients
        outputs = forward(ctx, *inputs)
    return connect(*inputs, *outputs, *operands)  # gives the outputs; its gradient is ``backward``

``connect`` (``gradient_rule.py``) is there if gradients are on and an input may require one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.nested.errors import name_of
from thunder.nested.lookasides import lookaside, read_attribute, read_item
from thunder.torch.higher_order.custom_gradient import Definition, apply

_Function = torch.autograd.Function


@lookaside(_Function.apply.__func__)
def _function_apply(cls: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> WrappedValue:
    """``forward`` in both of its styles; ``backward``, or the ``vjp`` that a Function may have instead."""
    ucls = unwrap(cls)
    forward, backward = read_attribute(cls, "forward"), read_attribute(cls, "backward")
    has_setup = ucls.setup_context != _Function.setup_context
    inputs = _bound(forward, args, kwargs, has_setup=has_setup)
    both = False
    if ucls.vjp is not _Function.vjp:
        both = ucls.backward is not _Function.backward
        backward = read_attribute(cls, "vjp")

    def run_forward(ctx, *inputs):
        return forward(ctx, *inputs)

    def run_forward_and_setup(ctx, *inputs):
        output = forward(*inputs)
        setup_context(ctx, inputs, output)
        return output

    def run_backward(ctx, *grads):
        if both:
            raise RuntimeError(
                "Implementing both 'backward' and 'vjp' for a custom Function is not allowed. You should only "
                "implement one of them."
            )
        return backward(ctx, [*grads]) if boxed else backward(ctx, *grads)

    boxed = getattr(ucls, "boxed_grads_call", False)
    if has_setup:
        setup_context = read_attribute(cls, "setup_context")
        run_forward = run_forward_and_setup
    where = f"{ucls.__qualname__}, whose forward is {name_of(unwrap(forward))}"
    return apply(Definition(ucls.__name__, where, run_forward, run_backward, ucls.__name__), inputs)


@lookaside(torch.ops.higher_order.autograd_function_apply)
def _autograd_function_apply(
    fwd: WrappedValue, bwd: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue
) -> WrappedValue:
    """``fwd(*args)`` gives the outputs and what it saves; ``bwd(*grads, *saved)`` gives a gradient for each argument.

    In older releases of torch, which pass ``args_tensor_mask``, both get None as ``ctx`` in addition, and only the
    first arguments have a gradient, as many as the mask counts tensors.
    """
    mask = kwargs.get("args_tensor_mask")
    first = () if mask is None else (None,)
    differentiable = len(args) if mask is None else sum(unwrap(mask))
    non_differentiable = tuple(unwrap(kwargs.get("non_differentiable_idx", wrap_const(()))) or ())
    dirty = tuple(unwrap(kwargs.get("dirty_idx", wrap_const(()))) or ())

    def run_forward(ctx, *inputs):
        output, ctx.saved = fwd(*first, *inputs)
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        ctx.mark_dirty(*[outputs[i] for i in dirty])
        ctx.mark_non_differentiable(*[outputs[i] for i in non_differentiable])
        return output

    def run_backward(ctx, *grads):
        return bwd(*first, *grads, *ctx.saved)

    where = f"autograd_function_apply of {name_of(unwrap(fwd))}"
    symbol = "higher_order_autograd_function_apply"
    return apply(Definition("ApplyTemplate", where, run_forward, run_backward, symbol, differentiable), args)


def _bound(
    forward: WrappedValue, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue], *, has_setup: bool
) -> Sequence[WrappedValue]:
    """The inputs by position: keywords are bound, and, if there is a ``setup_context`` to see them, defaults too."""
    if not has_setup and not kwargs:
        return args
    signature = inspect.signature(unwrap(forward))
    bound = signature.bind(*(() if has_setup else (None,)), *args, **kwargs)
    given = set(bound.arguments)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"forward() got an unexpected keyword argument {next(iter(bound.kwargs))!r}")
    defaults = [p.name for p in signature.parameters.values() if p.default is not p.empty]
    for i, name in enumerate(defaults):
        if name not in given:
            bound.arguments[name] = read_item(read_attribute(forward, "__defaults__"), i)
    return bound.args if has_setup else bound.args[1:]
