"""``torch.utils.checkpoint``: values, gradients and effects as without it, and what is kept for the backward pass."""

from __future__ import annotations

import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, check, fresh, grads_of, inlined, jit, operator, plain_call, saved
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import thunder
import thunder.nested
import thunder.torch as ltorch
from thunder.tests import nanogpt_model
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


# Random numbers that are drawn once more, from a state

BIG = torch.randn(60, 50, generator=torch.Generator().manual_seed(3), dtype=torch.float64).requires_grad_()
DROPOUTS = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Softplus())


def between(a):
    """Random numbers that depend on values, between those that do not."""
    before = torch.rand_like(a)
    return (a * before * torch.poisson(a.detach().abs() * 9) * torch.randn(60, 50)).sin()


def without_gradients(a):
    with torch.no_grad():
        mask = F.dropout(torch.ones_like(a), 0.5)
    return (a.sin() * mask * torch.rand_like(a)).exp()


# the function, and what is kept
FROM_STATE = {
    "without gradients": (without_gradients, ["dropout", "advance_generator"]),
    "dropout": (lambda a: F.dropout(a.sin().exp(), 0.5).sin(), ["advance_generator"]),
    "dropouts": (DROPOUTS, ["advance_generator"]),
    "rand": (lambda a: (a.sin() * torch.rand(60, 50) * torch.rand_like(a)).sin(), ["advance_generator"]),
    "randn": (lambda a: (a.sin() * torch.randn(60, 50) * torch.randn_like(a)).sin(), ["advance_generator"]),
    "randint": (lambda a: (a.sin() * torch.randint(1, 100, (60, 50))).sin(), ["advance_generator"]),
    "bernoulli": (lambda a: (a * torch.bernoulli(torch.full_like(a, 0.5))).sin(), ["advance_generator"]),
    "attention": (
        lambda a: F.scaled_dot_product_attention(a[None].sin(), a[None].exp(), a[None], dropout_p=0.5).sin(),
        ["advance_generator"],
    ),
    "between": (between, ["advance_generator", "poisson", "advance_generator"]),
    "of other dtypes": (lambda a: (a * torch.rand(60, 200, dtype=torch.float32)[:, :50]).sin(), ["advance_generator"]),
    "twice the same": (lambda a: F.dropout(F.dropout(a, 0.5), 0.5).sin(), ["advance_generator"]),
    "in a checkpoint": (
        lambda a: checkpointed(lambda b: F.dropout(b.sin(), 0.5).exp(), a.cos()),
        ["advance_generator"],
    ),
}


@pytest.mark.parametrize("name", FROM_STATE)
def test_of_random_numbers_the_state_is_kept(name):
    fn, kept = FROM_STATE[name]
    program = jit(lambda a: checkpointed(lambda b: fn(b).sum(), a))
    assert saved(program, BIG) == kept
    assert_same(grads_of(program, BIG), grads_of(jit(lambda a: fn(a).sum()), BIG))


def test_the_same_numbers_in_two_checkpoints_are_others():
    program = jit(lambda a: [checkpointed(lambda b: torch.rand_like(b) * b.exp(), a) for _ in range(2)])
    (first, second), grads, state = grads_of(program, BIG)
    assert not torch.equal(first, second)
    assert_same(((first, second), grads, state), tuple(map(_as_tuple, grads_of(jit(_two_draws), BIG))))


def _two_draws(a):
    return [torch.rand_like(a) * a.exp() for _ in range(2)]


def _as_tuple(value):
    return tuple(value) if isinstance(value, list) and len(value) == 2 else value


def test_without_preserve_rng_state_no_state_is_stashed_and_the_numbers_are_kept():
    fn = FROM_STATE["dropout"][0]
    program = jit(lambda a: checkpointed(lambda b: fn(b).sum(), a, preserve_rng_state=False))
    assert saved(program, BIG) == ["uniform"]
    assert_same(grads_of(program, BIG), grads_of(jit(lambda a: fn(a).sum()), BIG))


def test_without_gradients_the_numbers_are_those_of_eager_pytorch():
    fn = FROM_STATE["dropout"][0]
    assert_same(grads_of(jit(lambda a: checkpointed(fn, a)), BIG.detach()), grads_of(fn, BIG.detach()))
    with torch.no_grad():
        assert_same(grads_of(jit(lambda a: checkpointed(fn, a)), BIG), grads_of(fn, BIG))


# Memory


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


# A model


class Drawing(torch.nn.Module):
    """A dropout that draws as thunder's does: uniform numbers. PyTorch's own draws from the generator otherwise."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * (torch.rand_like(x) < 1 - self.p) * (1 / (1 - self.p))


class Checkpointed(torch.nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpointed(self.block, x)


CONFIG = {"block_size": 32, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 32, "dropout": 0.1}


def gpt(wrap):
    """A nanoGPT of two blocks, each in ``wrap``, with the explicit attention: its dropout can be exchanged."""
    torch.manual_seed(0)
    model = nanogpt_model.GPT(nanogpt_model.GPTConfig(**CONFIG)).double()
    model.transformer.h = torch.nn.ModuleList(wrap(block) for block in model.transformer.h)
    for module in list(model.modules()):
        if isinstance(module, nanogpt_model.CausalSelfAttention):
            module.flash = False
    return model


def drawing(model):
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, Drawing(child.p))
    return model


def own_bytes(kept, model, inputs):
    """The memory of tensors, without that of the model and the inputs; what shares memory counts once."""
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *inputs)}
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in memory.items() if address not in given)


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 4, 32), generator=torch.Generator().manual_seed(5)).unbind()


def eager_run(wrap, tokens):
    """The model, its loss, the generator's state after the forward pass, and the bytes that are kept then."""
    kept, model = [], drawing(gpt(wrap))
    torch.manual_seed(6)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, loss = model(*tokens)
    return model, loss, torch.get_rng_state(), own_bytes(kept, model, tokens)


def thunder_run(wrap, tokens):
    model = gpt(wrap)
    torch.manual_seed(6)
    _, loss = jit(model)(*tokens)
    return model, loss, torch.get_rng_state(), own_bytes(loss.grad_fn.saved_tensors, model, tokens)


def test_nanogpt_with_each_block_checkpointed(tokens):
    runs = [run(Checkpointed, tokens) for run in (thunder_run, eager_run)]
    # what the blocks add: thunder's gradient of the last layer norm, which is in no checkpoint, keeps more than eager's
    rest = [run(lambda block: torch.nn.Identity(), tokens)[-1] for run in (thunder_run, eager_run)]
    ours, eager = (total - without for (*_, total), without in zip(runs, rest))
    # eager PyTorch holds the generator's state at each checkpoint, too, where no hook sees it
    assert 0 < ours <= eager + CONFIG["n_layer"] * torch.get_rng_state().nbytes
    torch.manual_seed(99)
    for _, loss, _, _ in runs:
        loss.backward()
    assert_same(*((loss.detach(), state, [p.grad for p in model.parameters()]) for model, loss, state, _ in runs))


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


def test_checkpoint_sequential_has_the_options_of_checkpoint():
    functions = [lambda a: F.dropout(a.sin(), 0.5).exp(), torch.cos, lambda a: (a @ torch.ones(50, 50).double()).sin()]

    def program(x, **options):
        return checkpoint_sequential(functions, 2, x, **options).sum()

    def plain(x):
        for fn in functions:
            x = fn(x)
        return x.sum()

    for options in ({"use_reentrant": False}, {"use_reentrant": False, "preserve_rng_state": False}):
        assert_same(grads_of(jit(lambda x: program(x, **options)), BIG), grads_of(jit(plain), BIG))
    with pytest.raises(HigherOrderError, match="Pass `use_reentrant=False`"):
        jit(lambda x: program(x, use_reentrant=True))(BIG)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: debug"):
        jit(lambda x: program(x, use_reentrant=False, debug=True))(BIG)


# What is around it


def autocast_inside(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        t = a.float() @ b.float().T
    return t.sin(), (t.float() @ b.float()).exp()


def both_autocasts(a, b):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        t = a.float() @ b.float().T
        with torch.autocast("cpu", enabled=False):
            return t.float() @ b.float(), t


@pytest.mark.parametrize("fn", (autocast_inside, both_autocasts))
@pytest.mark.parametrize("outside", (False, True))
def test_autocast_inside_and_outside(fn, outside):
    def program(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=outside):
            return checkpointed(fn, x, y)

    (result, grads, _), (expected, expected_grads, _) = grads_of(jit(program), X, Y), grads_of(program, X, Y)
    assert [t.dtype for t in result] == [t.dtype for t in expected]
    for actual, value in zip((*result, *grads), (*expected, *expected_grads)):
        torch.testing.assert_close(actual, value, rtol=0.05, atol=0.05)


def test_the_caller_has_autocast_or_no_gradients():
    program = lambda x, y: checkpointed(lambda a, b: (a.float() @ b.float().T).sin(), x, y)  # noqa: E731
    for context in (torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), torch.enable_grad()):
        with context:
            actual, expected = jit(program)(X, Y), program(X, Y)
        assert (actual.dtype, actual.requires_grad) == (expected.dtype, expected.requires_grad)
        torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)


def test_regions_in_and_around_it():
    @torch.compiler.nested_compile_region
    def around(x):
        return checkpointed(lambda a: F.dropout(a.sin().exp(), 0.5).cos(), x) + x

    @torch.compiler.nested_compile_region
    def block(x):
        return F.dropout(x.sin().exp(), 0.5).cos()

    for program, depth in ((lambda x: around(around(x)).sum(), 0), (lambda x: inside(inside(x)).sum(), 1)):
        inside = functools.partial(checkpointed, block)
        jitted = jit(program)
        assert saved(jitted, BIG).count("advance_generator") == 2
        (report,) = thunder.nested.report(jitted)
        assert (report.traced, report.reused, report.depth) == (1, 1, depth)
        plain = (lambda x: block(x) + x) if depth == 0 else block
        assert_same(grads_of(jitted, BIG), grads_of(jit(lambda x: plain(plain(x)).sum()), BIG))


def test_blocks_as_regions_of_a_model():
    model = torch.nn.Sequential(
        *(Checkpointed(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())) for _ in "abc")
    )
    model.double()
    jitted = jit(model, nested_regions=[Checkpointed])
    assert_same(grads_of(jitted, X), grads_of(model, X))
    assert [(r.traced, r.reused) for r in thunder.nested.report(jitted)] == [(1, 2)]


def test_partial_and_callable_module():
    scaled = functools.partial(torch.mul, WEIGHT.detach()[:3])
    module = Checkpointed(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())).double()

    def program(x):
        return checkpointed(functools.partial(F.softmax, dim=0), x).sin(), checkpointed(scaled, x), module(x)

    assert_same(grads_of(jit(program), X), grads_of(program, X))


def test_the_function_is_not_called_again():
    """Eager PyTorch calls it again in the backward pass, where it would raise; a trace has its operations."""
    calls = []

    def fn(a):
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("called again")
        return a.sin().exp().cos()

    assert_same(grads_of(jit(lambda x: checkpointed(fn, x)), X)[1], grads_of(lambda x: x.sin().exp().cos(), X)[1])
    calls.clear()
    with pytest.raises(ValueError, match="called again"):
        grads_of(lambda x: checkpointed(fn, x), X)


# What Dynamo makes of it


def graph(fn):
    return torch.fx.symbolic_trace(fn)


def test_tag_activation_checkpoint():
    module = graph(lambda a, b: ((a.sin() @ b.t()).exp().sum(), a.cos()))

    def program(x, y):
        return torch.ops.higher_order.tag_activation_checkpoint(module, x, y, use_reentrant=False)

    assert saved(jit(program), X, Y) == []
    assert_same(grads_of(jit(program), X, Y), grads_of(module, X, Y))
    module.meta["_checkpoint_context_fn"] = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    assert saved(jit(program), X, Y) == ["matmul"]


@pytest.mark.parametrize("options", ({}, {"preserve_rng_state": False}, {"context_fn": None}), ids=str)
def test_through_dynamo(options):
    if "context_fn" in options:
        options = {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.mm.default])}
    jitted = []

    def backend(module, inputs):
        _LazyGraphModule.force_recompile(module)
        jitted.append(jit(module))
        return jitted[0]

    def fn(a):
        return (F.dropout(a @ a.t(), 0.5).sin().exp() @ a).sin().sum()

    program = torch.compile(lambda x: checkpointed(fn, x, **options), backend=backend)
    assert_same(grads_of(program, BIG), grads_of(jit(fn), BIG))
    kept = ["uniform"] if "preserve_rng_state" in options else ["advance_generator"]
    # the second product is not needed for the gradient of its sine's sum, but for the sine's
    assert sorted(saved(jitted[0], BIG)) == sorted(kept + ["matmul"] * 2 * ("context_fn" in options))


def test_thunders_own_checkpoint_is_as_it_was():
    def program(x):
        return ltorch.checkpoint(lambda a: ltorch.exp(ltorch.sin(a)).cos(), x) * 2

    jitted = jit(program)
    assert_same(grads_of(jitted, X)[:2], grads_of(lambda x: x.sin().exp().cos() * 2, X)[:2])
    assert "checkpoint" in [b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols]
    assert saved(jitted, X) == []


# Options and misuse


def test_ignored_options_are_named_in_one_warning():
    def program(x):
        return checkpoint(chain, x, use_reentrant=False, early_stop=False, determinism_check="none", debug=True)

    with pytest.warns(UserWarning, match="ignores `determinism_check`, `debug`, `early_stop`") as record:
        result = jit(program)(X)
    (warning,) = [w for w in record if "ignores" in str(w.message)]
    assert re.search(r"`chain` \(.*test_checkpoint\.py:\d+\)", str(warning.message))
    assert_same(result, chain(X))


@pytest.mark.parametrize("name, value", (("set_checkpoint_early_stop", False), ("set_checkpoint_debug_enabled", True)))
def test_under_the_context_managers_of_pytorch(name, value):
    def program(x):
        with getattr(torch.utils.checkpoint, name)(value):
            return checkpointed(chain, x).sum()

    assert_same(grads_of(jit(program), X), grads_of(program, X))


def test_a_determinism_check_that_pytorch_does_not_know():
    def program(x):
        return checkpointed(chain, x, determinism_check="all")

    with pytest.raises(ValueError) as expected:
        program(X)
    with pytest.raises(ValueError, match=f"^{re.escape(str(expected.value))}$"):
        jit(program)(X)


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
