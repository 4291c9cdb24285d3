"""``torch.utils.checkpoint``: values, gradients and effects as without it, and what is kept for the backward pass."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, backward, check, fresh, inlined, jit, operator, plain_call, tensors
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import thunder
from thunder.core.prims import PrimIDs
from thunder.torch.higher_order.common import HigherOrderError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()


def checkpointed(fn, *args, **kwargs):
    return checkpoint(fn, *args, use_reentrant=False, **kwargs)


def checkpointed_inside(fn, *args, **kwargs):
    return inlined(checkpointed, fn, *args, **kwargs)


def checkpointed_operator(fn, *args, **kwargs):
    return operator(checkpointed, fn, *args, **kwargs)


def checkpoint_of_nested(fn, *args, **kwargs):
    return checkpointed(inlined, fn, *args, **kwargs)


CALLS = (checkpointed, checkpointed_inside, checkpointed_operator, checkpoint_of_nested)


class Doubling:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, a):
        return (a @ self.weight).sin() * 2

    def method(self, a):
        return (a @ self.weight).exp().cos()


class Block(torch.nn.Module):
    """A module that calls ``call`` on a submodule with state."""

    def __init__(self, call, inner):
        super().__init__()
        torch.manual_seed(0)
        self.call, self.inner = call, inner()
        self.double()

    def forward(self, x):
        return self.call(self.inner, x.sin()) + x


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.count.add_(1)
        self.seen = self.seen + 2
        return self.linear(x).exp().cos() * self.count


def keyword(call):
    return lambda x, y: call(lambda a, *, b, power=2: (a.sin() * b.exp()) ** power, x, b=y)


def structures(call):
    def fn(pair, table, flag, *, other):
        a, (b,) = pair
        return {"sum": (a.sin() * b.cos(), [table["k"].exp().sin()]), "flag": flag, "same": a, "n": other}

    return lambda x, y: call(fn, (x, [y]), {"k": x * 2}, True, other=3)


def captures(call):
    def program(x, y):
        z = y.exp()
        return call(lambda a: (a @ WEIGHT).sin().exp() * z, x).cos()

    return program


def partial_and_method(call):
    def program(x, y):
        doubling = Doubling(WEIGHT)
        return call(doubling, x) + call(doubling.method, y) + call(torch.sin, x)

    return program


def nested_twice(call):
    def outer(a, b):
        return call(lambda c: (c.sin() * b).exp().cos(), a.tanh()).sin() * b.exp()

    return lambda x, y: call(outer, x, y) * 2


def without_gradient(call):
    def fn(a, b):
        return a.sin().exp() * b, (a > 0).sum(), a.argmax(-1), None

    return lambda x, y: call(fn, x, y)


def no_grad_inside(call):
    def fn(a, b):
        with torch.no_grad():
            scale = a.exp().sin()
        return (b * scale).sin().exp()

    return lambda x, y: call(fn, x, y)


def same_outside(call):
    """What the function computes is a result of the program, too."""

    def program(x, y):
        before = x.sin()
        return call(lambda a: a.sin().cos().exp(), x), before, x.sin(), x.sin().cos()

    return program


def passed_through(call):
    return lambda x, y: call(lambda a, b: (a, b, a.sin(), a.sin()), x, y)


def integers(call):
    def fn(a):
        index = a.argmax(-1).to(torch.int64).to(torch.int64)
        return a.contiguous().to(torch.float64).gather(1, index[:, None]).sin().exp() * a.contiguous()

    return lambda x, y: call(fn, x) + y


def numbers(call):
    def program(x, y):
        n = y.sum().item()
        return call(lambda a: (a.sin() * n).exp() * a.sum().item(), x) * y

    return program


def in_place_intermediate(call):
    def fn(a, b):
        t = (a * b).sin()
        t.mul_(2)
        t.exp_()
        return t.sin() * b.sin()

    return lambda x, y: call(fn, x, y)


def in_place_relu(call):
    return lambda x, y: call(lambda a: F.relu(a.sin(), inplace=True).exp().sin() * y, x)


def effects(call):
    def program(x, y):
        seen, holder, last = [], Doubling(None), None

        def fn(a, b):
            nonlocal last
            t = a.sin().exp()
            seen.append(t)
            holder.weight = t.cos()
            last = t.cos().sin()
            return last.cos() * b

        out = call(fn, x, y)
        return out, seen, holder.weight, last

    return program


def raises(call):
    def fn(a):
        t = a.sin()
        raise ValueError(f"the shape is {tuple(t.shape)}")

    return lambda x, y: call(fn, x)


def raises_and_goes_on(call):
    def program(x, y):
        try:
            call(lambda a: a.sin() @ WEIGHT[:2], x)
        except RuntimeError:
            return call(lambda a: a.sin().exp(), y)

    return program


def autocast(call):
    def program(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(lambda a, b: (a.float() @ b.float().T).sin().exp(), x, y)

    return program


PROGRAMS = (
    keyword,
    structures,
    captures,
    partial_and_method,
    nested_twice,
    without_gradient,
    no_grad_inside,
    same_outside,
    passed_through,
    integers,
    numbers,
    in_place_intermediate,
    in_place_relu,
    effects,
    raises,
    raises_and_goes_on,
)


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_as_without_it(make):
    check(make, (X, Y), checkpointed)


@pytest.mark.parametrize("call", CALLS[1:], ids=lambda f: f.__name__)
@pytest.mark.parametrize("make", (structures, captures, nested_twice, effects), ids=lambda f: f.__name__)
def test_in_inner_levels_as_without_it(make, call):
    check(make, (X, Y), call)


def test_autocast():
    assert_same(grads_of(jit(autocast(checkpointed)), X, Y), grads_of(jit(autocast(plain_call)), X, Y))


@pytest.mark.parametrize("inner", (lambda: torch.nn.Linear(4, 4), lambda: torch.nn.BatchNorm1d(4), Counting))
@pytest.mark.parametrize("call", (checkpointed, checkpointed_inside), ids=lambda f: f.__name__)
def test_modules_and_their_state(inner, call):
    check(lambda call: Block(call, inner), (X,), call, calls=3)


# Random numbers


def grads_of(program, *inputs):
    """Results and gradients, from a fixed seed."""
    inputs = fresh(inputs)
    torch.manual_seed(7)
    result = program(*inputs)
    state = torch.get_rng_state()
    torch.manual_seed(99)  # the recomputation must not depend on it
    backward(result)
    return result, [t.grad for t in tensors(inputs)], state


RANDOM = {
    "dropout": lambda a: F.dropout(a.sin().exp(), 0.5).sin(),
    "rand_like": lambda a: (a.sin().exp() * torch.rand_like(a)).sin(),
    "randn_like": lambda a: (a.sin().exp() * torch.randn_like(a)).sin(),
    "randn": lambda a: (a.sin().exp() * torch.randn(3, 4)).sin(),
    "rand": lambda a: (a.sin().exp() * torch.rand(3, 4)).sin(),
    "randint": lambda a: (a.sin().exp() * torch.randint(1, 100, (3, 4))).sin(),
    "bernoulli": lambda a: (a.sin().exp() * torch.bernoulli(torch.full_like(a, 0.5))).sin(),
    "exponential": lambda a: (a.sin().exp() * torch.empty_like(a).exponential_()).sin(),
    "alpha_dropout": lambda a: F.alpha_dropout(a.sin().exp(), 0.5, training=True).sin(),
    "dropout1d": lambda a: F.dropout1d(a.sin().exp(), 0.5).sin(),
    "feature_dropout": lambda a: torch.feature_dropout(a.sin().exp(), 0.5, True).sin(),
    "gumbel_softmax": lambda a: F.gumbel_softmax(a.sin().exp()).sin(),
    "poisson": lambda a: (a.sin() * torch.poisson(a.detach().abs() * 9)).exp().sin(),
    "randint_like": lambda a: (a.sin().exp() * torch.randint_like(a, 1, 100)).sin(),
    "attention": lambda a: F.scaled_dot_product_attention(a[None].sin(), a[None].exp(), a[None], dropout_p=0.5).sin(),
    "module": torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Softplus()),
}


@pytest.mark.parametrize("name, options", [*((n, {}) for n in RANDOM), ("dropout", {"preserve_rng_state": False})])
def test_the_recomputation_has_the_random_numbers_of_the_forward_pass(name, options):
    fn = RANDOM[name]
    program = jit(lambda a, b: checkpointed(fn, a, **options) * b)
    expected = jit(lambda a, b: fn(a) * b)
    assert_same(grads_of(program, X, Y), grads_of(expected, X, Y))


def test_random_numbers_in_nested_checkpoints():
    drop = RANDOM["dropout"]

    def make(call):
        return lambda a: call(lambda b: drop(call(drop, b.sin()).exp()) + b, a.cos())

    assert_same(grads_of(jit(make(checkpointed)), X), grads_of(jit(make(plain_call)), X))


# Memory


def saved(program, *inputs):
    """The operations that made what is kept for the backward pass and is no input."""
    program(*inputs)
    trace = thunder.last_traces(program)[-1]
    returned = trace.bound_symbols[-1]
    assert returned.sym.id is PrimIDs.RETURN
    given = {p.name for p in trace.args}
    kept = {p.name for p in returned.args[1][0]} - given
    return [b.sym.name for b in trace.bound_symbols if {o.name for o in b.flat_proxy_outs} & kept]


def chain(a):
    for _ in range(5):
        a = (a @ WEIGHT).sin().exp()
    return a


@pytest.mark.parametrize("call", CALLS, ids=lambda f: f.__name__)
def test_what_lies_inside_is_not_kept(call):
    assert len(saved(jit(lambda x: plain_call(chain, x).cos()), X)) >= 10
    assert saved(jit(lambda x: call(chain, x).cos()), X) == ["exp"]  # the result
    assert set(saved(jit(lambda x: call(lambda a: F.dropout(chain(a), 0.5) * 2, x).sum()), X)) <= {"uniform", "lt"}


def test_what_lies_inside_is_not_kept_in_modules_and_nested_checkpoints():
    mlp = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    mlp.double()
    assert saved(jit(lambda x: x + checkpointed(mlp, x)), X) == []
    assert saved(jit(lambda x: checkpointed(lambda a: checkpointed(mlp, mlp(a)).sum(), x)), X) == []
    target = torch.tensor([1, 2, 3])
    for last in (
        lambda a: F.softmax(mlp(a), -1),
        lambda a: F.cross_entropy(mlp(a), target),
        lambda a: F.layer_norm(mlp(a), (4,)),
        lambda a: F.scaled_dot_product_attention(mlp(a)[None], a[None], a[None]),
    ):
        assert saved(jit(lambda x: checkpointed(last, x).sum()), X) == []
        assert_same(grads_of(jit(lambda x: checkpointed(last, x)), X), grads_of(jit(last), X))


def test_the_recomputation_is_in_the_backward_pass_only():
    program = jit(lambda x: checkpointed(chain, x).cos())
    program(X)
    counts = [
        str(t[-1]).count(" = torch.exp(") for t in (thunder.last_traces(program), thunder.last_backward_traces(program))
    ]
    assert counts[0] == 5 and counts[1] >= 4


# checkpoint_sequential


@pytest.mark.parametrize("segments", (1, 2, 3))
def test_checkpoint_sequential(segments):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(4))
    ).double()
    program = jit(lambda x: checkpoint_sequential(model, segments, x, use_reentrant=False))
    x, expected_x = fresh((X, X))
    program(x).sum().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(expected_x).sum().backward()
    assert_same((x.grad, grads), (expected_x.grad, [p.grad for p in model.parameters()]))
    functions = list(model)
    assert_same(jit(lambda x: checkpoint_sequential(functions, segments, x, use_reentrant=False))(X), model(X))


# Options and misuse


def test_ignored_options_are_named_in_one_warning():
    def program(x):
        return checkpoint(chain, x, use_reentrant=False, context_fn=contexts, determinism_check="none", debug=True)

    def contexts():
        raise AssertionError("is not called")

    with pytest.warns(UserWarning, match="ignores `context_fn`, `determinism_check`, `debug`") as record:
        result = jit(program)(X)
    (warning,) = [w for w in record if "ignores" in str(w.message)]
    assert re.search(r"`chain` \(.*test_checkpoint\.py:\d+\)", str(warning.message))
    assert_same(result, chain(X))


def test_no_warning_for_the_default_options():
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        jit(lambda x: checkpoint(chain, x, use_reentrant=False, determinism_check="default", debug=False))(X)
    assert not [w for w in record if "ignores" in str(w.message)]


def test_without_use_reentrant_it_is_not_reentrant():
    assert_same(jit(lambda x: checkpoint(chain, x))(X), chain(X))


def test_reentrant_and_not_callable():
    with pytest.raises(HigherOrderError, match=r"`chain` \(.*test_checkpoint\.py:\d+\).*Pass `use_reentrant=False`"):
        jit(lambda x: checkpoint(chain, x, use_reentrant=True))(X)
    with pytest.raises(HigherOrderError, match="needs a callable for `function`, but got 3"):
        jit(lambda x: checkpoint(3, x, use_reentrant=False))(X)


def test_recompiles_for_another_guard_only():
    scale = [2.0]
    program = jit(lambda x: checkpointed(lambda a: a.sin() * scale[0], x))
    program(X)
    program(X)
    assert thunder.cache_misses(program) == 1
    scale[0] = 3.0
    assert_same(program(X), X.sin() * 3.0)
    assert thunder.cache_misses(program) == 2
