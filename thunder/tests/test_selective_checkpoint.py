"""Selective checkpointing: the policy is asked what eager PyTorch asks it, and what it names is kept, nothing else."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, grads_of, inlined, jit, operator, plain_call, saved
from operator_cases import Square
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import thunder
import thunder.nested

aten = torch.ops.aten


def randn(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


X, IMAGE, WEIGHT = randn(3, 4), randn(2, 1, 6, 6), randn(4, 4)
LINEAR, CONV = torch.nn.Linear(4, 4).double(), torch.nn.Conv2d(1, 2, 3).double()
NORM, BATCH_NORM = torch.nn.LayerNorm(4).double(), torch.nn.BatchNorm2d(2).double()
TARGET = torch.tensor([0, 1, 2])


def selective(fn, *args, policy, **kwargs):
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(fn, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def chain(a):
    for _ in range(3):
        a = (a @ WEIGHT).sin().exp()
    return a


def attention(a):
    return F.scaled_dot_product_attention(a[None].sin(), a[None], a[None].cos(), is_causal=True, dropout_p=1e-9).sin()


def loss_and_sine(a):
    return F.cross_entropy(a.sin(), TARGET).sin()


def attention_bmm():
    """The first product in the attention, not the second."""
    seen = []

    def policy(ctx, op, *args, **kwargs):
        seen.append(op)
        return op is aten.bmm.default and seen.count(op) == 1

    return policy


# the function, its input, what the policy names, and what is kept
KEPT = {
    "nothing": (chain, X, [], []),
    "product": (chain, X, [aten.mm.default], ["matmul"] * 3),
    "two": (chain, X, [aten.mm.default, aten.exp.default], ["matmul", "exp"] * 3),
    "linear": (lambda a: LINEAR(a).sin().exp(), X, [aten.addmm.default], ["linear"]),
    "its_view": (lambda a: LINEAR(a).sin().exp(), X, [aten.t.default], []),
    "softmax": (lambda a: F.softmax(a.sin(), -1).exp(), X, [aten._softmax.default], ["softmax"]),
    "layer_norm": (lambda a: NORM(a.sin()).sin().exp(), X, [aten.native_layer_norm.default], ["shallow_copy"]),
    "within_rms_norm": (lambda a: F.rms_norm(a.sin(), (4,)).exp(), X, [aten.rsqrt.default], ["rsqrt"]),
    "within_loss": (lambda a: F.cross_entropy(a.sin(), TARGET), X, [aten._log_softmax.default], ["log_softmax"]),
    "within_attention": (attention, X, attention_bmm(), ["matmul"]),
    "loss_alone": (
        lambda a: F.cross_entropy(a.sin(), TARGET).sin(),
        X,
        [aten.nll_loss_forward.default],
        ["shallow_copy"],
    ),
    "convolution": (lambda a: CONV(a).exp().sin(), IMAGE, [aten.convolution.default], ["convolution"]),
    "several": (lambda a: a.sin().topk(2)[0].exp(), X, [aten.topk.default], ["topk"]),
    "view": (lambda a: a.exp().transpose(0, 1).sin(), X, [aten.transpose.int], ["permute"]),
    "cast": (lambda a: a.sin().float().exp().double(), X, [aten._to_copy.default], ["to"]),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_the_policy_names_is_kept_and_nothing_else(name):
    fn, x, policy, expected = KEPT[name]

    def program(x):
        return selective(lambda a: fn(a).sum(), x, policy=policy)

    drawn = ["uniform"] if fn is attention else []
    assert sorted(saved(jit(program), x)) == sorted(expected + drawn)
    if not drawn:
        assert_same(grads_of(jit(program), x), grads_of(program, x))


# What the policy is asked


def casts(a):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = a.float()[:, :3].sin()
        return (y @ y).float().exp()


ASKED = {
    "chain": (chain, X),
    "linear_3d": (lambda a: LINEAR(a[None].expand(2, -1, -1)).sin(), X),
    "autocast": (casts, X),
    "attention": (lambda a: F.scaled_dot_product_attention(a[None], a[None], a[None], is_causal=True), X),
    "attention_by_parts": (lambda a: attention(a)[0], X),
    "batch_norm": (lambda a: F.silu(BATCH_NORM(CONV(a))), IMAGE),
    "einsum": (lambda a: torch.einsum("abcd,abed->ce", a.sin(), a), IMAGE),
    "numbers": (lambda a: 1 - a / 2 + 2**a - a**2 + (-a).abs() + 1 / a, X),
    "shapes": (lambda a: torch.cat([a, a.t().reshape(3, 4)]).split(2)[0].unsqueeze(0).permute(1, 0, 2)[:, :, 1:3], X),
    "losses": (lambda a: F.mse_loss(a, a.sin()) + F.cross_entropy(a, TARGET), X),
    "reductions": (lambda a: a.sum() + a.mean(-1).sum() + a.var() + torch.sum(a, 0).norm(), X),
    "activations": (lambda a: F.gelu(a, approximate="tanh") + F.leaky_relu(a) + F.elu(a) + F.softplus(a), X),
    "constants": (lambda a: a + torch.arange(4) + torch.zeros(4) + torch.ones_like(a) + torch.full((4,), 2.0), X),
    "indices": (lambda a: F.embedding(TARGET, a).gather(-1, a.argmax(-1, keepdim=True)), X),
    "no_grad": (lambda a: a.sin() * no_grad_sin(a), X),
}


def no_grad_sin(a):
    with torch.no_grad():
        return a.sin()


@pytest.mark.parametrize("name", ASKED)
def test_the_policy_is_asked_what_eager_pytorch_asks_it(name):
    fn, x = ASKED[name]
    asked = []

    def policy(ctx, op, *args, **kwargs):
        shapes = [(tuple(a.shape), a.dtype) for a in args if isinstance(a, torch.Tensor)]
        result = getattr(ctx, "op_output", None)
        output = (tuple(result.shape), result.dtype) if isinstance(result, torch.Tensor) else type(result)
        asked.append((op, shapes, sorted(kwargs), ctx.is_recompute, output))
        return False

    program = functools.partial(selective, fn, policy=policy)
    program(x)
    expected = asked.copy()
    asked.clear()
    jit(lambda x: program(x))(x)
    assert asked == expected and asked


ANSWERS = [(True, True), (False, False)] + [(answer, "_SAVE" in answer.name) for answer in CheckpointPolicy]


@pytest.mark.parametrize("answer, is_kept", ANSWERS)
def test_answers(answer, is_kept):
    program = jit(lambda x: selective(lambda a: chain(a).sum(), x, policy=lambda *args, **kwargs: answer))
    # the last result of `exp` is kept as well, the results of `sin` are not needed
    assert saved(program, X) == (["matmul", "exp"] * 3 if is_kept else [])


def test_a_policy_that_counts():
    def program(x):
        seen = []

        def policy(ctx, op, *args, **kwargs):
            seen.append(op)
            return op is aten.mm.default and seen.count(op) == 2

        return selective(lambda a: chain(a).sum(), x, policy=policy)

    assert saved(jit(program), X) == ["matmul"]


def test_the_policy_is_not_asked_where_no_gradients_are_recorded():
    def policy(*args, **kwargs):
        raise AssertionError("is not asked")

    def program(x):
        with torch.no_grad():
            return selective(chain, x, policy=policy)

    assert_same(jit(program)(X).detach(), chain(X).detach())
    with torch.no_grad():
        result = jit(lambda x: selective(chain, x, policy=policy))(X)
    assert not result.requires_grad


# Ways to give it

OPERATORS = [aten.mm.default]
PARTIAL = functools.partial(create_selective_checkpoint_contexts, OPERATORS)


class Policies:
    def __init__(self, operator):
        self.operator = operator

    def policy(self, ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is self.operator else CheckpointPolicy.MUST_RECOMPUTE

    def contexts(self):
        return create_selective_checkpoint_contexts(self.policy)


def with_local_policy(x):
    operators, rows = [aten.mm.default], x.shape[0]

    def policy(ctx, op, *args, **kwargs):
        return op in operators and rows == 3

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(
    "contexts",
    (
        lambda x: PARTIAL,
        lambda x: functools.partial(create_selective_checkpoint_contexts, OPERATORS),
        lambda x: lambda: create_selective_checkpoint_contexts(OPERATORS, allow_cache_entry_mutation=True),
        lambda x: lambda: with_local_policy(x),
        lambda x: Policies(aten.mm.default).contexts,
    ),
)
def test_context_fn(contexts):
    program = jit(lambda x: checkpoint(chain, x, use_reentrant=False, context_fn=contexts(x)).sum())
    assert saved(program, X) == ["matmul"] * 3 + ["exp"]


@pytest.mark.parametrize("call", (plain_call, inlined, operator), ids=lambda f: f.__name__)
def test_around_and_in_inner_levels(call):
    def fn(a):
        return call(lambda b: (b.sin() @ WEIGHT).exp(), a).cos().sum()

    outside = jit(lambda x: selective(fn, x, policy=OPERATORS))
    inside = jit(lambda x: call(functools.partial(selective, policy=OPERATORS), fn, x))
    assert saved(outside, X) == saved(inside, X) == ["matmul"]
    for program in (outside, inside):
        assert_same(grads_of(program, X), grads_of(fn, X))


@pytest.mark.parametrize(
    "outer, inner, expected",
    (
        ([], [], []),
        ([aten.mm.default], [], ["matmul"]),
        ([], [aten.mm.default], ["matmul"]),
        ([aten.tanh.default], [aten.mm.default], ["tanh", "matmul"]),
    ),
)
def test_nested_checkpoints_keep_what_either_policy_names(outer, inner, expected):
    def fn(a):
        return selective(lambda b: (b.sin() @ WEIGHT).sin().exp(), a.tanh(), policy=inner).sin().sum()

    program = jit(lambda x: selective(fn, x, policy=outer))
    assert saved(program, X) == expected
    assert_same(grads_of(program, X), grads_of(lambda x: (x.tanh().sin() @ WEIGHT).sin().exp().sin().sum(), X))


def test_in_regions():
    @torch.compiler.nested_compile_region
    def block(x):
        return selective(lambda a: (a @ WEIGHT).sin().exp(), x, policy=OPERATORS) + x

    def program(x):
        return block(block(x)).sum()

    jitted = jit(program)
    assert saved(jitted, X).count("matmul") == 2
    (report,) = thunder.nested.report(jitted)
    assert (report.traced, report.reused) == (1, 1)
    assert_same(grads_of(jitted, X), grads_of(program, X))


def test_random_numbers():
    fn, policy = lambda a: F.dropout((a @ WEIGHT).sin(), 0.5).exp(), [aten.mm.default, aten.bernoulli_.float]
    program = jit(lambda x: selective(fn, x, policy=policy))
    with pytest.warns(UserWarning, match=r"thunder's `dropout` has no part that is PyTorch's `aten.bernoulli_.float`"):
        result = grads_of(program, X)
    assert_same(result, grads_of(jit(fn), X))


def test_symbolic_values():
    program = thunder.jit(lambda x: selective(lambda a: chain(a).sum(-1), x, policy=OPERATORS), cache="symbolic values")
    assert saved(program, X) == ["matmul"] * 3


# Misuse


@pytest.mark.parametrize(
    "contexts, options",
    (
        (lambda: create_selective_checkpoint_contexts([aten.mm]), {}),
        (lambda: create_selective_checkpoint_contexts(3), {}),
        (PARTIAL, {"debug": True}),
        (PARTIAL, {"determinism_check": "all"}),
        (lambda: create_selective_checkpoint_contexts(lambda ctx, op, *args, **kwargs: int(str(op))), {}),
    ),
)
def test_exceptions_are_those_of_pytorch(contexts, options):
    def program(x):
        return checkpoint(chain, x, use_reentrant=False, context_fn=contexts, **options)

    with pytest.raises(Exception) as expected:
        program(X)
    with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
        jit(program)(X)

    def catches(x):
        try:
            return program(x)
        except (TypeError, ValueError) as error:
            return x.sin(), str(error)

    assert_same(jit(catches)(X), (X.sin(), str(expected.value)))


def test_other_context_managers_are_named_in_one_warning():
    @contextlib.contextmanager
    def context():
        raise AssertionError("is not entered")
        yield

    program = jit(lambda x: checkpoint(chain, x, use_reentrant=False, context_fn=lambda: (context(), context())))
    with pytest.warns(UserWarning, match="ignores the _GeneratorContextManager") as record:
        assert_same(program(X), chain(X))
    (message,) = [str(w.message) for w in record if "context managers" in str(w.message)]
    assert re.search(r"`chain` \(.*test_selective_checkpoint\.py:\d+\)", message)


def test_what_the_policy_cannot_be_asked_about_is_named_in_one_warning():
    def fn(a):
        for _ in range(2):
            a = torch.cond(a.sum() > 0, lambda b: b.sin(), lambda b: b.cos(), (a.exp(),))
        return a.sum()

    program = jit(lambda x: selective(fn, x, policy=[aten.exp.default]))
    with pytest.warns(UserWarning, match=r"followed everywhere, because `torch_cond\S*` cannot be run") as record:
        assert saved(program, X) == ["exp", "exp"]
    assert len([w for w in record if "cannot be followed" in str(w.message)]) == 1
    assert_same(grads_of(program, X), grads_of(fn, X))


def test_no_warning_where_the_policy_is_followed():
    def fn(a):
        inner = checkpoint(lambda b: F.dropout(b.sin(), 0.0), Square.apply(a.sin()), use_reentrant=False)
        return (inner @ WEIGHT).sin().sum()

    nothing = contextlib.nullcontext
    program = jit(lambda x: selective(fn, x, policy=OPERATORS))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert saved(program, X) == ["matmul"]
        jit(lambda x: checkpoint(fn, x, use_reentrant=False, context_fn=lambda: (nothing(), nothing())))(X)
    assert_same(grads_of(program, X), grads_of(fn, X))
