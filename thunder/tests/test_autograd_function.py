"""``torch.autograd.Function`` and ``autograd_function_apply``, against eager PyTorch: values, gradients, exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_helpers import check, inlined, jit, operator, plain_call, twice_deep
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.torch.higher_order.gradient_rule import AutogradFunctionError

CALLS = (plain_call, inlined, operator, twice_deep)


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


@pytest.mark.parametrize("call", (plain_call, inlined, operator), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name, call):
    if name == "local in-place" and call is operator:
        pytest.skip("an operator holds no in-place changes")
    check(lambda call: lambda x, y: call(PROGRAMS[name], x, y), (tensor(4), tensor(4, seed=1)), call)


@pytest.mark.parametrize("call", (plain_call, inlined, twice_deep), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", IN_PLACE_PROGRAMS)
def test_in_place(name, call):
    check(lambda call: lambda x, y: call(IN_PLACE_PROGRAMS[name], x, y), (tensor(4), tensor(4, seed=1)), call)


#
# Modules, parameters, globals, and their guards
#

SCALE, OFFSET = 2.0, torch.ones(4)


class Reads(Function):
    """Reads a module that ``ctx`` holds, globals and an attribute of its own class."""

    factor = 3.0

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return x * module.weight + OFFSET

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.module.weight * ctx.module.scale * SCALE * Reads.factor + OFFSET, None


class Module(torch.nn.Module):
    def __init__(self, call: Callable):
        super().__init__()
        self.weight = torch.nn.Parameter(tensor(4, seed=3, requires_grad=False))
        self.register_buffer("bias", torch.ones(4))
        self.scale = 5.0
        self.call = call

    def forward(self, x):
        return self.call(lambda x: Reads.apply(x * 2, self) * self.weight + self.bias, x)


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_module(call):
    jitted = check(Module, (tensor(4),), call)
    assert thunder.cache_misses(jitted) == 1


def _change_attribute(module):
    module.scale = 7.0


def _change_global(module):
    global SCALE
    SCALE += 1.0


def _change_class(module):
    Reads.factor += 1.0


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("change", (_change_attribute, _change_global, _change_class), ids=lambda f: f.__name__)
def test_what_backward_reads_is_guarded(change, call):
    x, module = tensor(4), Module(call)
    jitted = jit(module)
    for misses in (1, 1, 2):
        if misses == 2:
            change(module)
        (actual,) = torch.autograd.grad(jitted(x).sum(), x)
        (expected,) = torch.autograd.grad(module(x).sum(), x)
        torch.testing.assert_close(actual, expected)
        assert thunder.cache_misses(jitted) == misses


@pytest.mark.parametrize("call", CALLS, ids=lambda c: c.__name__)
def test_captures_of_forward_get_no_gradient(call):
    weight = tensor(4, seed=5)

    def make(call):
        def run(x, y):
            between = y * 2

            class Captures(Function):
                @staticmethod
                def forward(ctx, a):
                    return a * weight * between

                @staticmethod
                def backward(ctx, grad):
                    return grad * weight * between

            return Captures.apply(x) + y

        return lambda x, y: call(run, x, y)

    check(make, (tensor(4), tensor(4, seed=1)), call)
    assert weight.grad is None


#
# Exceptions
#


def twice(x, factor):
    return x * 2


BACKWARDS: dict[str, Callable] = {
    "too few": lambda ctx, g: (g,),
    "too many": lambda ctx, g: (g, None, g),
    "for a number": lambda ctx, g: (g, g),
    "a number": lambda ctx, g: (1, None),
    "a list": lambda ctx, g: [g, None],
    "shape": lambda ctx, g: (torch.ones(7), None),
    "raises": lambda ctx, g: {}["missing"],
    "accepted, trailing None": lambda ctx, g: (g * 3, None, None),
}
FUNCTIONS = {name: function(lambda ctx, x, factor: x * factor, backward) for name, backward in BACKWARDS.items()} | {
    "not implemented": type("Custom", (Function,), {"forward": staticmethod(lambda ctx, x, factor: x * factor)}),
    "both": function(lambda ctx, x, factor: x * 2, lambda ctx, g: g, vjp=staticmethod(lambda ctx, g: g)),
}


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exceptions_of_backward_are_raised_by_backward(name, call):
    custom = FUNCTIONS[name]

    def outcome(run):
        x = tensor(4)
        result = run(x)
        try:
            result.sum().backward()
        except Exception as error:
            return type(error), str(error)
        return x.grad.tolist()

    expected = outcome(lambda x: custom.apply(x, 3.0))
    assert outcome(jit(lambda x: call(lambda a: custom.apply(a, 3.0), x))) == expected


def _saves_a_number(ctx, x):
    ctx.save_for_backward(x, 3)
    return x * 2


def _dirty_not_returned(ctx, x):
    ctx.mark_dirty(x)
    x.add_(1)
    return x * 2


FORWARDS = {
    "no forward": type("Custom", (Function,), {}),
    "saves a number": function(_saves_a_number, lambda ctx, g: g),
    "dirty, not returned": function(_dirty_not_returned, lambda ctx, g: g),
    "setup, too many arguments": function(lambda: 1, lambda ctx, g: g, lambda ctx, inputs, output: None),
}


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", FORWARDS)
def test_exceptions_of_forward(name, call):
    custom = FORWARDS[name]

    def program(x):
        try:
            return custom.apply(x * 2)
        except (NotImplementedError, TypeError, RuntimeError) as error:
            return x * 3, type(error).__name__, str(error)

    check(lambda call: lambda x: call(program, x), (tensor(4),), call)


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
def test_unknown_keyword(call):
    def program(x):
        return Scaled.apply(x, factor=2.0, other=3)

    with pytest.raises(TypeError, match="other"):
        jit(lambda x: call(program, x))(tensor(4))
    keyword_only = function(lambda x, *, k=1: x, lambda ctx, g: g, lambda ctx, inputs, output: None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'k'"):
        jit(lambda x: call(keyword_only.apply, x))(tensor(4))


#
# What cannot be traced
#


def _appends_in_backward(x):
    seen = []

    class Appends(Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(grad)
            return grad

    return Appends.apply(x)


def _changes_saved(x):
    class ChangesSaved(Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            a.mul_(2)
            return grad * a

    return ChangesSaved.apply(x * 1)


def _changes_view_of_gradient(x):
    class ChangesGradient(Function):
        @staticmethod
        def forward(ctx, a):
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            grad.view(-1).mul_(2)
            return grad

    return ChangesGradient.apply(x * 1)


def _changes_unmarked(x):
    class Unmarked(Function):
        @staticmethod
        def forward(ctx, a):
            a.mul_(2)
            return a * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    return Unmarked.apply(x * 1)


def _changes_under_no_grad(x):
    z = x * 2
    with torch.no_grad():
        Increment.apply(z)
    return z * 3


def _dirty_program_input(x):
    return Increment.apply(x)


def _dirty_local(x):
    class DirtyLocal(Function):
        @staticmethod
        def forward(ctx, a):
            b = a * 2
            ctx.mark_dirty(b)
            return b

        @staticmethod
        def backward(ctx, grad):
            return grad

    return DirtyLocal.apply(x * 1)


def _dirty_view(x):
    z = x * 2
    return Increment.apply(z.view(2, 2)), z


def _dirty_with_view(x):
    z = x * 2
    v = z.view(2, 2)
    return Increment.apply(z), v


class Holder:
    changed = False


HOLDER = Holder()


def _sets_attribute(x):
    return SetsAttribute.apply(x)


def _sets_global(x):
    return SetsGlobal.apply(x)


class SetsAttribute(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.holder = HOLDER
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.holder.changed = True
        return grad


class SetsGlobal(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        global SCALE
        SCALE = 100.0
        return grad


UNTRACEABLE = {
    _dirty_view: "a view, or has one",
    _dirty_with_view: "a view, or has one",
    _sets_attribute: "changes `ctx.holder` in its backward",
    _sets_global: "changes a global in its backward",
    _appends_in_backward: "changes `seen` in its backward",
    _changes_saved: "changes in place, in its backward",
    _changes_view_of_gradient: "changes in place, in its backward",
    _changes_unmarked: "Call `ctx.mark_dirty`",
    _changes_under_no_grad: "where gradients are on",
    _dirty_program_input: "an input of the compiled program",
    _dirty_local: "no input of the function",
}


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
@pytest.mark.parametrize("program", UNTRACEABLE, ids=lambda f: f.__name__)
def test_untraceable(program, call):
    with pytest.raises(AutogradFunctionError, match=UNTRACEABLE[program]) as caught:
        jit(lambda x: call(program, x))(tensor(4))
    assert "test_autograd_function.py:" in str(caught.value)


#
# The operator that TorchDynamo makes
#


def captured(program: Callable, inputs: tuple) -> torch.fx.GraphModule:
    """The graph that TorchDynamo makes of the program."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


CAPTURED = (
    *("ctx", "input", "setup", "setup keywords", "two results", "partly used", "identity", "identity returned"),
    *("inner", "kinds of results", "unmaterialized", "needs", "local in-place", "enable_grad", "broadcast"),
    *("in sequence", "dirty gets a history"),
)


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", CAPTURED)
def test_operator_of_dynamo(name, call):
    x, y = tensor(4), tensor(4, seed=1)
    graph = captured((PROGRAMS | IN_PLACE_PROGRAMS)[name], (x, y))
    assert "autograd_function_apply" in graph.code
    inputs = tuple(x if "_x_" in node.target else y for node in graph.graph.find_nodes(op="placeholder"))
    check(lambda call: lambda *inputs: call(graph, *inputs), inputs, call)


def test_operator_of_older_dynamo():
    """Which gave ``ctx`` to both functions, and counted the arguments that have a gradient."""

    def forward(ctx, x, y, captured):
        return (x * y + captured, x > 0), (x, y)

    def backward(ctx, grad, mask, x, y):
        return grad * y * 2, grad * x * 3

    def program(x, y, captured):
        result, mask = torch.ops.higher_order.autograd_function_apply(
            forward, backward, x, y, captured, args_tensor_mask=[True, True], non_differentiable_idx=[1]
        )
        return result * mask

    x, y, captured = inputs = tensor(4), tensor(4, seed=1), tensor(4, seed=2)
    result = jit(program)(*inputs)
    torch.testing.assert_close(result, (x * y + captured) * (x > 0))
    result.sum().backward()
    grad = (x.detach() > 0).float()
    torch.testing.assert_close([x.grad, y.grad], [grad * y * 2, grad * x * 3])
    assert captured.grad is None


def test_operator_of_dynamo_names_its_function():
    def forward(x):
        x.mul_(2)
        return x * 2, ()

    def program(x):
        return torch.ops.higher_order.autograd_function_apply(
            forward, lambda grad: grad, x * 1, non_differentiable_idx=[], saved_for_backward_idx=[]
        )

    with pytest.raises(AutogradFunctionError, match=r"forward` \(.*test_autograd_function.py:"):
        jit(program)(tensor(4))


#
# Traces that are replayed again, on tensors that need a gradient where the first had none
#


def for_both(fn, x, y):
    return fn(x), fn(y)


@thunder.nested.lookaside(for_both)
def _for_both(fn, x, y):
    body = thunder.nested.trace(fn, x).thunder_callable()
    return body(x.value), body(y.value)


def test_replay_where_a_gradient_is_needed():
    def program(x, y):
        return sum(for_both(lambda a: Scaled.apply(a, 2.0), (x > 0) * 2.0, x * y))

    check(lambda _: program, (tensor(4), tensor(4, seed=1)), plain_call)


class AsksForNeeds(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 if ctx.needs_input_grad[0] else None


@pytest.mark.parametrize("depth", (1, 2))
def test_replay_where_another_answer_was_relied_on(depth):
    """The backward was traced for an input that needs no gradient, and would lose the one that the other needs."""

    def run(a):
        return AsksForNeeds.apply(a)

    def program(x, y):
        fn = run if depth == 1 else lambda a: inlined(run, a)
        return sum(for_both(fn, (x > 0) * 2.0, x * y))

    with pytest.raises(thunder.nested.ArgumentError, match="without a gradient for `args.0.`.* with a gradient"):
        jit(program)(tensor(4), tensor(4, seed=1))
    check(lambda _: lambda x, y: sum(for_both(run, x + y, x * y)), (tensor(4), tensor(4, seed=1)), plain_call)


class Unwilling(Function):
    """A backward that cannot be traced."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].mul_(2)


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
def test_backward_that_is_not_needed_may_be_untraceable(call):
    check(lambda call: lambda x: call(Unwilling.apply, x), (tensor(4, requires_grad=False),), call)
    check(lambda call: lambda x: call(lambda x: Unwilling.apply(x * 3), x), (tensor(4, requires_grad=False),), call)


def test_operator_with_a_detached_result():
    def detached_too(x):
        with torch.no_grad():
            y = x * 3
        return x * 2, y

    check(lambda call: lambda x: (lambda a, b: a * b)(*call(detached_too, x)), (tensor(4),), operator)
