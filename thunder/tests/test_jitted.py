"""``thunder.jit``-ed callables inside compiled code and inside lookasides, made outside or on the spot."""

from __future__ import annotations

import warnings

import pytest
import torch
from nested_helpers import CALLS, assert_same, check, inlined, jit, plain_call, with_lookaside

import thunder
import thunder.core.transform_common
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


# Settings, and parameters and buffers of its own


class Doubles(thunder.core.transform_common.Transform):
    """Marks what it has transformed; the results are the same."""

    ran = 0

    def transform_traces_pre_prologue(self, prologue, computation, epilogue, **kwargs):
        self.ran += 1
        return prologue, computation, epilogue


def claiming_executor():
    executor = thunder.extend.OperatorExecutor("claims_sin")
    sin = executor.register_operator("claimed_sin", like=thunder.torch.sin, fn=torch.sin)
    executor.register_implementation(thunder.torch.sin, sin)
    return executor


@pytest.mark.parametrize(
    "options, named",
    [
        ({"transforms": [Doubles()]}, r"transforms=\['Doubles'\]"),
        ({"cache": "no caching"}, "cache='no caching'"),
        ({"executors": [claiming_executor()]}, r"executors=\['claims_sin'\]"),
        ({"disable_torch_autograd": True}, "disable_torch_autograd=True"),
        ({"transforms": [Doubles()], "cache": "no caching"}, r"transforms=.* and cache="),
    ],
)
@pytest.mark.parametrize("call", (plain_call, inlined))
def test_settings_that_do_not_count_are_named_once_at_the_call(options, named, call):
    inner = thunder.jit(lambda a: a.sin(), **options)
    x = X.detach().requires_grad_()
    with pytest.warns(UserWarning, match=named) as caught:
        result = jit(lambda x: call(lambda a: inner(a) * inner(a), x))(x)
    (warning,) = [w for w in caught if "has no effect" in str(w.message)]
    text = str(warning.message)
    assert "test_jitted.py:" in text and "Give it to the `thunder.jit` of that program" in text
    assert warning.filename == __file__
    assert_same(result, x.sin() * x.sin())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(thunder.jit(lambda x: inner(x) + 1)(x), x.sin() + 1)


def test_settings_that_are_the_callers_are_not_warned_of():
    executor = claiming_executor()
    inner = thunder.jit(lambda a: a.sin(), cache="no caching", executors=[executor], transforms=[])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert_same(thunder.jit(lambda x: inner(x), cache="no caching", executors=[executor])(X), X.sin())


def test_the_remedy_that_the_warning_names():
    transform = Doubles()
    jit(lambda x: thunder.jit(lambda a: a.sin())(x), transforms=[transform])(X)
    assert transform.ran == 1


class Exchanges(thunder.core.transform_common.Transform):
    """Stores a weight in another way, as quantisation does."""

    def __init__(self, make):
        self.make = make

    def transform_module(self, module):
        module._overrides_parameters["weight"] = torch.nn.Parameter(self.make(module.get_parameter("weight").detach()))


@pytest.mark.parametrize("as_submodule", (False, True))
@pytest.mark.parametrize("make", (lambda w: w.double(), lambda w: w.reshape(-1)), ids=("dtype", "shape"))
def test_a_parameter_that_a_transform_has_exchanged_is_not_read_wrongly(make, as_submodule):
    inner = thunder.jit(linear(), transforms=[Exchanges(make)])
    outer = torch.nn.Sequential(inner) if as_submodule else lambda x: inner(x)
    with pytest.raises(thunder.nested.CaptureError, match="`weight` of the jitted module .* transform Exchanges"):
        thunder.jit(outer)(X)


@pytest.mark.parametrize("in_lookaside", (False, True))
def test_a_parameter_that_a_transform_of_a_module_made_on_the_spot_has_exchanged(in_lookaside):
    module, double = linear(), Exchanges(lambda w: w.double())
    call = with_lookaside(lambda fn, x: thunder.jit(unwrap(fn), transforms=[double])(unwrap(x)))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = module

        def forward(self, x):
            return call(self.linear, x) if in_lookaside else thunder.jit(self.linear, transforms=[double])(x)

    with pytest.raises(thunder.nested.CaptureError, match="`weight` of the jitted module .* transform Exchanges"):
        jit(Model())(X)


@pytest.mark.parametrize("call", (plain_call, *CALLS))
def test_parameters_that_were_loaded_into_the_jitted_module(call):
    inner, other = thunder.jit(linear()), torch.nn.Linear(4, 4)
    inner.load_state_dict(other.state_dict(), assign=True)
    x, y = (X.detach().requires_grad_() for _ in range(2))
    result = jit(lambda x: call(inner, x))(x)
    assert_same(result, other(y))
    result.sum().backward()
    other(y).sum().backward()
    assert_same([x.grad, inner.get_parameter("weight").grad], [y.grad, other.weight.grad])


def test_loaded_parameters_of_a_jitted_submodule_are_not_read_wrongly():
    """The outer module has parameters of its own for all of its submodules."""
    inner = thunder.jit(linear())
    inner.load_state_dict(torch.nn.Linear(4, 4).state_dict(), assign=True)
    with pytest.raises(thunder.nested.CaptureError, match="`weight` of the jitted module"):
        jit(torch.nn.Sequential(inner))(X)


class Norm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x) * 2


@pytest.mark.parametrize("make", (Norm, lambda: torch.nn.BatchNorm1d(4)), ids=("in a module", "itself"))
@pytest.mark.parametrize("call", (plain_call, inlined))
def test_buffers_of_the_jitted_module_go_on_from_one_call_to_the_next(make, call):
    expected, inner = make(), thunder.jit(make())
    outer = jit(lambda x: call(inner, x.sin()) + call(inner, x))
    for _ in range(2):
        assert_same(inner(X), expected(X))  # by itself
        assert_same(outer(X), expected(X.sin()) + expected(X))
        assert_same(dict(inner.named_buffers()), dict(expected.named_buffers()))


def test_buffers_of_a_jitted_submodule_are_in_the_state_of_the_outer_module():
    def make(wrap):
        return torch.nn.Sequential(torch.nn.Tanh(), wrap(Norm()))

    expected, outer = make(lambda m: m), jit(make(thunder.jit))
    for _ in range(2):
        assert_same(outer(X), expected(X))
    found = {name.replace("_model.", ""): value for name, value in outer.state_dict().items()}
    assert_same(found, dict(expected.state_dict()))


class OuterExchanges(thunder.core.transform_common.Transform):
    def transform_module(self, module):
        with torch.no_grad():
            module._overrides_parameters["0._model.weight"] = torch.nn.Parameter(torch.eye(4))


def test_an_outer_transform_reaches_the_parameters_of_a_jitted_submodule():
    inner = linear()
    outer = jit(torch.nn.Sequential(thunder.jit(inner)), transforms=[OuterExchanges()])
    assert_same(outer(X), X @ torch.eye(4) + inner.bias)
