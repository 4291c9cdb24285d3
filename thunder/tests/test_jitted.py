"""``thunder.jit``-ed callables inside compiled code and inside lookasides, made outside or on the spot."""

from __future__ import annotations

import warnings

import pytest
import torch
from nested_helpers import CALLS, assert_same, check, inlined, jit, plain_call, with_lookaside

import thunder
import thunder.nested
from thunder.core.interpreter import unwrap

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
WEIGHT = torch.ones(4)
FACTOR = 2.0


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 4)


@pytest.mark.parametrize("call", (plain_call, *CALLS))
def test_function_made_outside(call):
    def body(a):
        return a.sin() * WEIGHT * FACTOR

    check(
        lambda c: (lambda f: lambda x: f(x) + c(f, x.cos()))(body if c is plain_call else thunder.jit(body)), (X,), call
    )


@pytest.mark.parametrize("call", CALLS)
def test_module_made_outside(call):
    class Model(torch.nn.Module):
        def __init__(self, c):
            super().__init__()
            self.linear = linear()
            self.jitted = (self.linear,) if c is plain_call else (thunder.jit(self.linear),)
            self.call = c

        def forward(self, x):
            return self.jitted[0](x) + self.call(self.jitted[0], x.sin())

    check(Model, (X,), call)


def test_function_made_on_the_spot():
    def make(c):
        def program(x):
            y = x.exp()

            def body(a):
                return a * y + WEIGHT

            return (body if c is plain_call else thunder.jit(body))(x)

        return program

    check(make, (X,), inlined)


def test_module_made_on_the_spot():
    class Model(torch.nn.Module):
        def __init__(self, c):
            super().__init__()
            self.linear = linear()
            self.c = c

        def forward(self, x):
            return (self.linear if self.c is plain_call else thunder.jit(self.linear))(x)

    check(Model, (X,), inlined)


def test_jitted_in_jitted_in_jitted():
    first = thunder.jit(lambda a: a.sin() * FACTOR)
    second = thunder.jit(lambda a: first(a) + first(a.cos()))
    third = jit(lambda x: second(x) * x)
    assert_same(third(X), ((X.sin() * 2) + (X.cos().sin() * 2)) * X)


def test_what_the_inner_function_read_is_guarded(monkeypatch):
    inner = thunder.jit(lambda a: a * FACTOR)
    outer = jit(lambda x: inner(x) + 1)
    assert_same(outer(X), X * 2.0 + 1)
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert_same(outer(X), X * 3.0 + 1)
    assert thunder.cache_misses(outer) == 2


def test_statistics_tell_what_happened():
    inner = thunder.jit(lambda a: a.sin())
    outer = jit(lambda x: inner(x) * inner(x))
    outer(X), outer(X)
    assert (thunder.compile_stats(inner).calls, thunder.cache_misses(inner), thunder.cache_hits(inner)) == (2, 1, 1)
    assert "ltorch.sin" in str(thunder.last_traces(inner)[0])
    assert "check_tensor" in str(thunder.last_prologue_traces(inner)[0])
    assert_same(inner(X), X.sin())  # and by itself it is as before
    assert thunder.compile_stats(inner).calls == 3


def test_executor_of_the_inner_function_is_used_for_its_part():
    executor = thunder.extend.OperatorExecutor("doubles_my_op")
    ran = []

    def implementation(a):
        ran.append(1)
        return a * 2

    def my_op(a):
        return a * 2

    executor.register_operator("double", meta=lambda a: thunder.TensorProxy(like=a), fn=implementation, replaces=my_op)
    inner = thunder.jit(lambda a: my_op(a) + 1, executors=[executor])
    x = X.detach()
    outer = thunder.jit(lambda x: inner(x) + my_op(x))
    assert_same(outer(x), x * 4 + 1)
    assert ran == [1]


def test_no_warning():
    inner = thunder.jit(lambda a: a.sin())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        jit(lambda x: inner(x))(X)


def test_exception_of_the_inner_function():
    def raises(a):
        raise KeyError("inner")

    inner = thunder.jit(raises)

    def program(x):
        try:
            return inner(x)
        except KeyError as error:
            return x * len(error.args[0])

    assert_same(jit(program)(X), X * 5)


def test_wrong_options_are_reported_to_the_program():
    def program(x):
        try:
            return thunder.jit(lambda a: a, cache="no such option")(x)
        except ValueError:
            return x * 3

    assert_same(jit(program)(X), X * 3)


def test_a_lookaside_may_call_a_jitted_function_for_itself():
    """On real tensors it runs; it is no part of the traced program."""
    table = thunder.jit(lambda a: a.cumsum(0))
    seen = []

    def lookaside(fn, x):
        seen.append(table(torch.ones(3)))
        return thunder.nested.trace(fn, x).inline()

    call = with_lookaside(lookaside)
    assert_same(jit(lambda x: call(torch.sin, x))(X), X.sin())
    assert_same(seen[0], torch.tensor([1.0, 2.0, 3.0]))


def test_a_lookaside_may_call_a_jitted_module_with_proxies():
    module = linear()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = module

        def forward(self, x):
            return call(self.linear, x)

    call = with_lookaside(lambda fn, x: thunder.jit(unwrap(fn))(unwrap(x)))
    assert_same(jit(Model())(X), module(X))


def test_a_dropped_jitted_function_is_freed():
    import weakref

    def make():
        fn = thunder.jit(lambda x: x.sin())
        fn(X)
        return weakref.ref(fn), weakref.ref(thunder.compile_data(fn))

    assert [reference() for reference in make()] == [None, None]
