"""``torch.autograd.Function``: the exceptions of autograd, and what a trace cannot do as autograd would."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from autograd_functions import Increment, Scaled, function, tensor
from nested_helpers import check, inlined, jit, plain_call
from torch.autograd import Function

from thunder.torch.higher_order.gradient_rule import AutogradFunctionError

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
SCALE = 2.0  # set by a backward
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
    assert re.search(r"autograd_functions?(_errors)?\.py:\d+", str(caught.value))
