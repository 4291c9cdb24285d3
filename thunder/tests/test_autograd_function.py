"""``torch.autograd.Function`` against eager PyTorch: values, gradients, captures, guards, replays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from autograd_functions import IN_PLACE_PROGRAMS, PROGRAMS, Scaled, tensor
from nested_helpers import check, inlined, jit, operator, plain_call, twice_deep
from torch.autograd import Function

import thunder

CALLS = (plain_call, inlined, operator, twice_deep)


def _can_hold(call: Callable, name: str) -> bool:
    return call is not operator or name != "local in-place"  # an operator holds no in-place changes


@pytest.mark.parametrize(
    "name, call", [(n, c) for c in (plain_call, inlined, operator) for n in PROGRAMS if _can_hold(c, n)]
)
def test_program(name, call):
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
