"""The record that a lookaside's author holds: inputs, results, the three ways to replay it, and misuse."""

from __future__ import annotations

import pytest
import torch
from nested_helpers import assert_same, inlined, jit, plain, with_lookaside

import thunder
import thunder.nested
from thunder.core.interpreter import unwrap
from thunder.core.proxies import TensorProxy

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
WEIGHT = torch.ones(4)
FACTOR = 3


def trace_in(program, x=X):
    """Runs a program whose calls of ``call(fn, ...)`` are traced and inlined; returns its result and the traces."""
    traces = []

    def lookaside(fn, *args, **kwargs):
        traces.append(thunder.nested.trace(fn, *args, **kwargs))
        return traces[-1].inline()

    call = with_lookaside(lookaside)
    return jit(lambda x: program(call, x))(x), traces


def test_inputs_are_arguments_then_captures_in_first_use_order():
    module = torch.nn.Linear(4, 4)

    def program(call, x):
        y = x.exp()

        def body(a, b, *, k):
            return module(a) * y + WEIGHT * b + k

        return call(body, x, x.cos(), k=x.sin())

    result, (nested,) = trace_in(program)
    assert_same(result, module(X) * X.exp() + WEIGHT * X.cos() + X.sin())
    paths = [str(i.path) for i in nested.inputs]
    assert paths[:3] == ["args[0]", "args[1]", "kwargs['k']"]
    assert [p.rpartition(".")[2] for p in paths[3:]] == [
        "_parameters['weight']",
        "_parameters['bias']",
        "cell_contents",
        "__globals__['WEIGHT']",
    ]
    names = ["module.weight", "module.bias", "y", "WEIGHT"]
    assert [i.name for i in nested.inputs] == [*paths[:3], *names]
    assert [i.is_capture for i in nested.inputs] == [False] * 3 + [True] * 4
    assert [i.proxy.name for i in nested.inputs] == [p.name for p in nested.computation_trace.args]
    assert all(isinstance(i.value, TensorProxy) and i.value.shape == i.proxy.shape for i in nested.inputs)


def test_a_default_argument_has_no_path():
    def program(call, x):
        y = x.exp()
        return call(lambda a, b=y: a * b, x)

    _, (nested,) = trace_in(program)
    assert [(str(i.path), i.is_capture) for i in nested.inputs] == [("args[0]", False), ("None", True)]
    assert "a value of the enclosing level" in str(nested.results.prologue_trace)


def test_traces_print_and_the_inner_prologue_checks_what_was_read():
    def program(call, x):
        return call(lambda a: a * WEIGHT + FACTOR, x)

    _, (nested,) = trace_in(program)
    prologue = str(nested.results.prologue_trace)
    assert "args[0]" in prologue and "['WEIGHT']" in prologue and "check_number_type_and_value" in prologue
    assert "cache_info" not in prologue
    assert "ltorch.mul(a, WEIGHT)" in str(nested.computation_trace)
    assert "test_trace.py" in repr(nested) and "2 inputs" in repr(nested)


def test_result():
    _, (nested,) = trace_in(lambda call, x: call(lambda a: {"s": a.sin(), "n": 3}, x)["s"])
    assert nested.result["n"] == 3 and isinstance(nested.result["s"], TensorProxy)


def test_the_inner_prologue_runs_on_the_real_inputs_too():
    _, (nested,) = trace_in(lambda call, x: call(lambda a: a * WEIGHT, x))
    prologue = nested.results.prologue_trace.python_callable()
    (a, weight), _ = prologue(X)
    assert a is X and weight is WEIGHT
    with pytest.raises(AssertionError, match="expected tensor with"):
        prologue(X[:2])


# Replays


def test_inline_more_than_once():
    def lookaside(fn, x):
        nested = thunder.nested.trace(fn, x)
        first, second = nested.inline(), nested.inline()
        return thunder.nested.trace(torch.add, first, second).inline()

    call = with_lookaside(lookaside)
    assert_same(jit(lambda x: call(lambda a: torch.sin(a) * WEIGHT, x))(X), 2 * X.sin() * WEIGHT)


def test_random_operations_draw_anew_on_each_replay():
    def lookaside(fn, x):
        nested = thunder.nested.trace(fn, x)
        return thunder.nested.trace(torch.stack, [unwrap(nested.inline()) for _ in range(2)]).inline()

    call = with_lookaside(lookaside)
    torch.manual_seed(0)
    first, second = jit(lambda x: call(lambda a: torch.rand(a.shape), x))(X)
    torch.manual_seed(0)
    assert_same([first, second], [torch.rand(3, 4), torch.rand(3, 4)])


def test_thunder_callable():
    def lookaside(fn, x, n):
        body = thunder.nested.trace(fn, x).thunder_callable()
        value = unwrap(x)
        for _ in range(unwrap(n)):
            value = body(value)
        return value

    call = with_lookaside(lookaside)

    def body(a):
        return a.sin() * WEIGHT + FACTOR

    x = X.detach().requires_grad_()
    result = jit(lambda x: call(body, x, 3))(x)
    expected = body(body(body(X)))
    assert_same(result, expected)
    result.sum().backward()
    assert_same(x.grad, torch.autograd.grad(expected.sum(), X)[0])


def test_thunder_callable_in_a_trace_of_its_own():
    """What the reporter wanted: a PyTorch function as a Thunder function, for instance to transform it."""
    from thunder.common import trace as thunder_trace

    texts = []

    def lookaside(fn, x):
        body = thunder.nested.trace(fn, x).thunder_callable()
        texts.append(str(thunder_trace(inline_trace=False)(body, unwrap(x))))
        return body(unwrap(x))

    call = with_lookaside(lookaside)
    assert_same(jit(lambda x: call(lambda a: a.sin().cos(), x))(X), X.sin().cos())
    assert "ltorch.sin" in texts[0] and "return t" in texts[0]


def test_operator_is_one_bound_symbol():
    call = with_lookaside(lambda fn, *args: thunder.nested.trace(fn, *args).as_operator("scaled_sin"))
    jitted = jit(lambda x: call(lambda a: a.sin() * WEIGHT, x) + 1)
    assert_same(jitted(X), X.sin() * WEIGHT + 1)
    (bsym,) = [b for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.name == "scaled_sin"]
    assert [sub.sym.name for sub in bsym.subsymbols] == ["sin", "mul"]
    assert [p.name for p in bsym.flat_proxy_args] == ["x", "WEIGHT"]


def test_an_executor_may_claim_an_operator():
    executor = thunder.extend.OperatorExecutor("claims_scaled_sin")
    ran = []

    def implementation(a, weight):
        ran.append(tuple(a.shape))
        return (torch.sin(a) * weight,)

    def meta(a, weight):
        return (TensorProxy(like=a),)

    claimed = executor.register_operator("claimed_scaled_sin", meta=meta, fn=implementation)
    executor.register_implementation("scaled_sin", claimed)
    call = with_lookaside(lambda fn, *args: thunder.nested.trace(fn, *args).as_operator("scaled_sin"))
    x = X.detach()
    jitted = thunder.jit(lambda x: call(lambda a: a.sin() * WEIGHT, x), executors=[executor])
    assert_same(jitted(x), x.sin() * WEIGHT)
    assert ran == [(3, 4)]


def test_operators_of_one_name_are_not_taken_for_each_other():
    call = with_lookaside(lambda fn, *args: thunder.nested.trace(fn, *args).as_operator("op"))
    jitted = jit(lambda x: call(torch.sin, x) - call(torch.cos, x))
    assert_same(jitted(X), X.sin() - X.cos())
    first, second = (b for b in thunder.last_traces(jitted)[0].bound_symbols if b.sym.name == "op")
    assert first.sym != second.sym and first.sym == first.sym


# Misuse. Each raise of thunder.nested is provoked, and the enclosing level is usable afterwards.


def misuse(use, fn=lambda a: a.sin(), x=X):
    """Runs ``use(fn, x)`` in a lookaside that catches what it raises and goes on; returns the exception."""
    raised = []

    def lookaside(fn, x):
        try:
            use(fn, x)
        except thunder.nested.NestedTracingError as error:
            raised.append(error)
        return thunder.nested.trace(torch.cos, x).inline()

    call = with_lookaside(lookaside)
    assert_same(jit(lambda x: call(fn, x) * 2)(x), x.cos() * 2)
    assert raised, "nothing was raised"
    return raised[0]


class Unhashable:
    __hash__ = None

    def __call__(self, a):
        return a


def test_outside_of_any_trace():
    with pytest.raises(thunder.nested.OutsideTraceError, match="`thunder.nested.trace` was called while nothing"):
        thunder.nested.trace(torch.sin, X)


def test_used_after_its_level_has_ended():
    _, (nested,) = trace_in(lambda call, x: call(torch.sin, x))
    for method in (nested.inline, nested.thunder_callable, lambda: nested.as_operator("op")):
        with pytest.raises(thunder.nested.OutsideTraceError, match="while nothing is traced"):
            method()
    error = misuse(lambda fn, x: nested.inline())
    assert isinstance(error, thunder.nested.LevelError)
    assert "Trace the function anew" in str(error) and "test_trace.py" in str(error)


def test_used_in_an_inner_level():
    kept = []

    def outer(fn, x):
        kept.append(thunder.nested.trace(fn, x))
        return thunder.nested.trace(lambda a: use(fn, a), x).inline()

    def inner(fn, x):
        with pytest.raises(thunder.nested.LevelError, match="was made while"):
            kept[0].inline()
        return thunder.nested.trace(fn, x).inline()

    use = with_lookaside(inner)
    call = with_lookaside(outer)
    assert_same(jit(lambda x: call(torch.sin, x))(X), X.sin())


@pytest.mark.parametrize("fn", (3, None, "name"))
def test_not_callable(fn):
    error = misuse(lambda _, x: thunder.nested.trace(fn, x))
    assert isinstance(error, thunder.nested.UntraceableCallableError) and "not callable" in str(error)


def test_not_hashable():
    error = misuse(lambda fn, x: thunder.nested.trace(fn, x), Unhashable())
    assert isinstance(error, thunder.nested.UntraceableCallableError)
    assert "Unhashable" in str(error) and "test_trace.py" in str(error) and "Define `__hash__`" in str(error)


def test_returns_what_cannot_be_represented():
    def body(a):
        return (b for b in (a.sin(),))

    error = misuse(lambda fn, x: thunder.nested.trace(fn, x).inline(), body)
    assert isinstance(error, thunder.nested.ResultError)
    assert "body" in str(error) and "test_trace.py" in str(error) and "Return the values" in str(error)


@pytest.mark.parametrize("arguments", ([], [0, 0]), ids=("too few", "too many"))
def test_wrong_number_of_arguments(arguments):
    def use(fn, x):
        thunder.nested.trace(fn, x).thunder_callable()(*(unwrap(x) for _ in arguments))

    error = misuse(use)
    assert isinstance(error, thunder.nested.ArgumentError)
    assert "1 positional arguments" in str(error) and "test_trace.py" in str(error)


def test_arguments_of_another_shape():
    def use(fn, x):
        half = unwrap(thunder.nested.trace(lambda a: a[:1], x).inline())
        thunder.nested.trace(fn, x).thunder_callable()(half)

    error = misuse(use)
    assert isinstance(error, thunder.nested.ArgumentError)
    assert "shape (3, 4)" in str(error) and "shape (1, 4)" in str(error) and "`args[0]`" in str(error)


def test_arguments_of_another_value():
    def use(fn, x):
        two = thunder.nested.trace(lambda a, n: a * n, x, 2).thunder_callable()
        two(unwrap(x), 3)

    error = misuse(use)
    assert isinstance(error, thunder.nested.ArgumentError) and "with 2 for `args[1]`" in str(error)


def test_requires_grad_counts_where_it_was_read():
    def use(fn, x):
        body = thunder.nested.trace(lambda a: a * 2 if a.requires_grad else a, x).thunder_callable()
        body(body(unwrap(x)))

    error = misuse(use)
    assert isinstance(error, thunder.nested.ArgumentError) and "requires_grad=True" in str(error)


def test_operator_name():
    error = misuse(lambda fn, x: thunder.nested.trace(fn, x).as_operator("not a name"))
    assert isinstance(error, thunder.nested.ArgumentError) and "'not a name'" in str(error)


def test_capture_that_the_lookaside_brought_along():
    weight = torch.ones(4)

    def brought(a):
        return a * weight

    error = misuse(lambda fn, x: thunder.nested.trace(brought, x).inline())
    assert isinstance(error, thunder.nested.CaptureError)
    assert "reads the tensor `weight`" in str(error) and "Pass the tensor as an argument" in str(error)


def test_effects_are_made_once():
    seen = []

    def lookaside(fn, items, x):
        nested = thunder.nested.trace(fn, items, x)
        result = nested.inline()
        try:
            nested.inline()
        except thunder.nested.ReplayError as error:
            seen.append(str(error))
        return result

    call = with_lookaside(lookaside)

    def program(x):
        items = [x]
        y = call(lambda items, a: (items.append(a), a.sin())[1], items, x)
        return y * len(items)

    assert_same(jit(program)(X), X.sin() * 2)
    assert len(seen) == 1 and "Trace it anew" in seen[0] and "test_trace.py" in seen[0]


def test_parts_of_a_jitted_function_with_effects():
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total = self.total + 1
            return x + self.total

    counter = Counter()

    def use(fn, x):
        jitted = thunder.jit(unwrap(fn))
        thunder.compile_data(jitted).get_computation_and_inputs(unwrap(x))

    error = misuse(use, counter)
    assert isinstance(error, thunder.nested.ReplayError) and "call the jitted function itself" in str(error)


def test_an_exception_of_a_registered_lookaside_reaches_the_program():
    def lookaside(fn, x):
        raise ValueError("from the lookaside")

    call = with_lookaside(lookaside)

    def program(x):
        try:
            return call(torch.sin, x)
        except ValueError as error:
            return x * len(str(error))

    assert_same(jit(program)(X), X * len("from the lookaside"))


def test_plain_values_may_be_passed_to_trace():
    def lookaside(fn, x):
        doubled = unwrap(x) + unwrap(x)
        return thunder.nested.trace(fn, doubled, scale=3).inline()

    call = with_lookaside(lookaside)
    result = jit(lambda x: call(lambda a, scale=1: a.sin() * scale, x))(X)
    assert_same(result, (X + X).sin() * 3)
    assert plain(1) == [1] and inlined(torch.sin, X).equal(X.sin())
