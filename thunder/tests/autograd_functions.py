"""Subclasses of ``torch.autograd.Function``, and programs that use them, which several test files share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint


def tensor(*shape: int, seed: int = 0, **options: Any) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(
        options.get("requires_grad", True)
    )


def function(forward: Callable, backward: Callable, setup_context: Callable | None = None, **members: Any) -> type:
    """A new ``torch.autograd.Function``."""
    members |= {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    if setup_context is not None:
        members["setup_context"] = staticmethod(setup_context)
    return type("Custom", (Function,), members)


class Scaled(Function):
    """A gradient that is not that of the forward, so that it shows whether backward was used."""

    @staticmethod
    def forward(ctx, x, factor):
        y = x.sin()
        ctx.save_for_backward(x, None, y)
        ctx.factor = factor
        return y * factor

    @staticmethod
    def backward(ctx, grad):
        x, nothing, y = ctx.saved_tensors
        return grad * x.cos() * ctx.factor * (7 if nothing is None else 1) + y, None


class WithSetup(Function):
    @staticmethod
    def forward(x, y, factor=2.0):
        return x * y * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y, output)

    @staticmethod
    def backward(ctx, grad):
        x, y, output = ctx.saved_tensors
        return grad * y * ctx.factor + output, grad * x * 3, None


class Two(Function):
    """Two results, two arguments."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx, g, h):
        x, y = ctx.saved_tensors
        return g * y + 2 * h, g * x + 3 * h


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class Inner(Function):
    """Calls another Function in its forward and in its backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Scaled.apply(x, 2.0) + x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return Scaled.apply(grad * x, 3.0)


class MostlyNone(Function):
    """Every kind of result."""

    @staticmethod
    def forward(ctx, x, structure):
        marked = x * 3
        ctx.mark_non_differentiable(marked)
        ctx.save_for_backward(x)
        return x * structure["scale"], marked, (x > 0), "text", [x * 2], None, x.long()

    @staticmethod
    def backward(ctx, g, marked, mask, text, items, nothing, integers):
        without = sum(value is None for value in (text, items, nothing))
        return g * 2 * without + marked.sum() + mask + integers, None


class Unmaterialized(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        marked = x * 3
        ctx.mark_non_differentiable(marked)
        return x * 2, marked, x > 0

    @staticmethod
    def backward(ctx, g, marked, mask):
        return g * 2 if marked is None and mask is None else g * 100


class Needs(Function):
    """A gradient that tells what the function was told."""

    @staticmethod
    def forward(ctx, x, y, z, number):
        ctx.in_forward = ctx.needs_input_grad
        return x + y + z

    @staticmethod
    def backward(ctx, grad):
        scale = sum(2**i for i, needed in enumerate(ctx.needs_input_grad + ctx.in_forward) if needed)
        return grad * scale, grad * scale, grad * scale, None


class LocalInPlace(Function):
    """Changes tensors of its own."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y.mul_(3)
        ctx.save_for_backward(y)
        return y + 1

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        result = torch.zeros_like(y)
        result += grad * 2
        result.add_(y)
        return result


class Increment(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class IncrementReturned(Function):
    @staticmethod
    def forward(ctx, x, y):
        x.mul_(y)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y)
        return x, y * 2

    @staticmethod
    def backward(ctx, grad, other):
        (y,) = ctx.saved_tensors
        return grad * y, grad * 3 + other


class SameTwice(Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        return y, y, x

    @staticmethod
    def backward(ctx, first, second, third):
        return first * 100 + second * 3 + third * 7


class EnableGrad(Function):
    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            y = x * x
        with torch.no_grad():
            z = y * 2
        ctx.save_for_backward(y)
        return z, y

    @staticmethod
    def backward(ctx, g, h):
        (y,) = ctx.saved_tensors
        return g * 3 + h * y


class OnlyVjp(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def vjp(ctx, grad):
        return grad * 9


class Boxed(Function):
    boxed_grads_call = True

    @staticmethod
    def forward(ctx, x):
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, grads):
        return grads.pop() * 9 + grads.pop()


class Broadcast(Function):
    """Gradients that autograd reduces and casts."""

    @staticmethod
    def forward(ctx, x, y):
        return x * 2 + y.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones(2, 3, *grad.shape) * grad, torch.ones(1, dtype=torch.float64).expand(1, 3) * grad.sum()


class Decorated(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.kept = [x * 2, {"deep": x * 3}]
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx, grad):
        if hasattr(ctx, "missing"):
            return None
        with torch.no_grad():
            return grad * ctx.kept[0] + ctx.kept[1]["deep"]


class OwnApply(Scaled):
    @classmethod
    def apply(cls, x, factor=2.0):
        return super().apply(x, factor) * 2


aliased = Scaled.apply


def checkpointed(x, y):
    return checkpoint(lambda a: Two.apply(a.sin(), y)[0].exp(), x * 2, use_reentrant=False)


def no_grad_around(x, y):
    with torch.no_grad():
        z = Scaled.apply(x, 2.0)
    return z * x + y


def no_grad_identity(x, y):
    with torch.no_grad():
        z = Identity.apply(x * 2)
    return z * y


def closes_over_intermediate(x, y):
    scale = y.exp()

    class Closing(Function):
        @staticmethod
        def forward(ctx, a):
            return a * scale

        @staticmethod
        def backward(ctx, grad):
            return grad * scale * 2

    return Closing.apply(x) + scale


def dirty(x, y):
    z = x * 2
    w = Increment.apply(z)
    return z * 3 + w, w * y


def dirty_other_name(x, y):
    z = x * 2
    Increment.apply(z)
    return z * y


def dirty_gets_history(x, y):
    z = x.detach() * 2
    _, w = IncrementReturned.apply(z, y)
    return z * 3 + w


def partly_used(x, y):
    product, _ = Two.apply(x * 1, y)
    return product


def attribute_caught(x, y):
    class Raising(Function):
        @staticmethod
        def forward(ctx, a):
            raise ValueError("no", a.shape[0])

    try:
        return Raising.apply(x)
    except ValueError as error:
        return x * error.args[1] + y


def raise_value_error(ctx, a):
    raise ValueError("not caught")


Raising = function(raise_value_error, raise_value_error)


def as_argument(x, y):
    values = {"scale": 2.0, "tensors": [x, y]}
    result, marked, mask, text, items, nothing, integers = MostlyNone.apply(x * 1, values)
    # thunder says of all floating results of a program that they require a gradient
    return result * marked * items[0], mask, text, nothing, integers + y


def effect(x, y):
    seen = []

    class Seeing(Function):
        @staticmethod
        def forward(ctx, a):
            seen.append(a * 2)
            return a * 3

        @staticmethod
        def backward(ctx, grad):
            ctx.note = grad
            return ctx.note * 4

    z = Seeing.apply(x)
    return z, seen[0] + y


PROGRAMS: dict[str, Callable] = {
    "ctx": lambda x, y: Scaled.apply(x * y, 3.0) * y,
    "input": lambda x, y: Scaled.apply(x, 3.0),
    "setup": lambda x, y: WithSetup.apply(x, y, 4.0),
    "setup defaults": lambda x, y: WithSetup.apply(x + 1, y),
    "setup keywords": lambda x, y: WithSetup.apply(x, factor=3.0, y=y * 2),
    "keywords": lambda x, y: Scaled.apply(x, factor=3.0),
    "two results": lambda x, y: Two.apply(x, y * 2),
    "partly used": partly_used,
    "same tensor twice": lambda x, y: Two.apply(x, x),
    "same intermediate twice": lambda x, y: (lambda z: Two.apply(z, z))(x * y),
    "identity": lambda x, y: Identity.apply(x) * y,
    "identity of intermediate": lambda x, y: Identity.apply(x * y),
    "identity returned": lambda x, y: Identity.apply(x),
    "inner": lambda x, y: Inner.apply(x * y),
    "kinds of results": as_argument,
    "unmaterialized": lambda x, y: (lambda a, b, c: a * b * c)(*Unmaterialized.apply(x * 2)),
    "needs": lambda x, y: Needs.apply(x * 2, y.detach(), y, 3),
    "needs some": lambda x, y: Needs.apply((x > 0) * 2.0, x, (y * 2).detach(), 3) * y,
    "needs none": lambda x, y: Needs.apply((x > 0) * 2.0, x.detach(), x.detach() * 2, 3) * y,
    "local in-place": lambda x, y: LocalInPlace.apply(x * y),
    "result twice": lambda x, y: SameTwice.apply(x * y),
    "enable_grad": lambda x, y: EnableGrad.apply(x * y),
    "vjp": lambda x, y: OnlyVjp.apply(x),
    "boxed": lambda x, y: Boxed.apply(x * y),
    "broadcast": lambda x, y: Broadcast.apply(x, y[:1]),
    "no_grad around": no_grad_around,
    "no_grad identity": no_grad_identity,
    "closure": closes_over_intermediate,
    "exception caught": attribute_caught,
    "result of no gradient": lambda x, y: Unmaterialized.apply(x)[1] * y,
    "exception": lambda x, y: Raising.apply(x) + y,
    "effect": effect,
    "decorated": lambda x, y: Decorated.apply(x * y),
    "apply of its own": lambda x, y: OwnApply.apply(x * y),
    "apply by another name": lambda x, y: aliased(x * y, 3.0),
    "checkpointed": checkpointed,
    "in sequence": lambda x, y: Scaled.apply(Two.apply(Scaled.apply(x, 1.0), y)[0], 2.0),
}
IN_PLACE_PROGRAMS: dict[str, Callable] = {
    "dirty": dirty,
    "dirty, other name": dirty_other_name,
    "dirty gets a history": dirty_gets_history,
}
