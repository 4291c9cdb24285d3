"""``torch.cond``: values and gradients as of a Python ``if``, one compilation for both branches, and its errors."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, backward, fresh, inlined, jit, tensors
from operator_cases import error_of, python_if
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.torch.higher_order.common import HigherOrderError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
Y = torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()
PREDS = (torch.tensor(True), torch.tensor(False))


def inlined_cond(*args):
    return inlined(torch.cond, *args)


CONDS = (torch.cond, torch.ops.higher_order.cond, inlined_cond)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Experts(torch.nn.Module):
    def __init__(self, cond):
        super().__init__()
        torch.manual_seed(0)
        self.cond, self.a, self.b = cond, torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.double()

    def forward(self, pred, x, y):
        return self.cond(pred, self.a, lambda t: self.b(t).tanh() * self.scale, (x.sin(),)) * y


def operands(cond):
    return lambda p, x, y: cond(p, lambda a, b: a.sin() * b, lambda a, b: (a + b).cos(), (x, y))


def intermediates(cond):
    def program(p, x, y):
        z, w = x.exp(), y.tanh()
        return cond(p, lambda a: (a @ WEIGHT) * z, lambda a: a.sin() * w * z, (x.cos(),)).sin() + z

    return program


def captures_only(cond):
    return lambda p, x, y: cond(p, lambda: x.sin() * y, lambda: x.cos()) * 2


def structures(cond):
    def true_fn(pair, table):
        (a, (b,)) = pair
        return {"r": [a * b, Pair(a.sin(), table["k"])], "n": 3, "none": None}

    def false_fn(pair, table):
        (a, (b,)) = pair
        return {"r": [a - b, Pair(table["k"].cos(), a.exp())], "n": 3, "none": None}

    def program(p, x, y):
        result = cond(p, true_fn, false_fn, ((x, [y]), {"k": x * y}))
        product, (first, second) = result["r"]
        return [product, result["r"][1].first + first], {"second": second}, result["n"], result["none"]

    return program


def passes_through(cond):
    return lambda p, x, y: cond(p, lambda a, b: (a, a, b.sin()), lambda a, b: (b, a.view(12).view(3, 4), a), (x, y))


def different_use(cond):
    """A branch that uses nothing, and one that uses all; results that the program does not use."""
    return lambda p, x, y: cond(
        p, lambda a: (a * y, a.sum()), lambda a: (torch.ones(3, 4).double(), a.sin().sum()), (x,)
    )[0]


def integer_results(cond):
    def program(p, x, y):
        value, index = cond(p, lambda a: (a.sin(), a.argmax(-1)), lambda a: (a.cos(), a.argmax(-1) // 2), (x * y,))
        return value.gather(1, index[:, None])

    return program


def numbers(cond):
    def program(p, x, y):
        n = x.detach().sum().item()
        return cond(p, lambda a: a.sin() * n, lambda a, n=n: a * n * y, (x,))

    return program


def no_grad_inside(cond):
    def true_fn(a, b):
        with torch.no_grad():
            s = a.exp()
        return b * s

    return lambda p, x, y: cond(p, true_fn, lambda a, b: a * b, (x, y))


def objects_of_its_own(cond):
    def true_fn(a, b):
        box, items = Box(a), []
        box.other = b
        for i in range(3):
            items.append(box.t * i)
        with torch.no_grad(), torch.enable_grad():
            return sum(items) * box.other

    return lambda p, x, y: cond(p, true_fn, lambda a, b: a * b, (x, y))


def computed_pred(cond):
    def program(p, x, y):
        q = p & (x.abs().sum() > 0)
        return cond(q.reshape(1), torch.sin, torch.cos, (x,)) * cond(~q, torch.exp, torch.tanh, (y,))

    return program


def nested(cond):
    def program(p, x, y):
        z = x.exp()

        def true_fn(a):
            return cond(~p, lambda b: b * z, lambda b: b.sin() * y, (a.cos(),)) * z

        return cond(p, true_fn, lambda a: cond(p, torch.sin, lambda b: b.exp() * a, (a * y,)), (x,))

    return program


def in_checkpoint(cond):
    def program(p, x, y):
        def body(a):
            return cond(p, lambda b: (b @ WEIGHT).sin(), lambda b: b.cos() * y, (a.exp(),)).sin().exp()

        return checkpoint(body, x.sin(), use_reentrant=False) * y

    return program


def checkpoint_inside(cond):
    def true_fn(a):
        return checkpoint(lambda b: (b @ WEIGHT).sin().exp(), a.sin(), use_reentrant=False)

    return lambda p, x, y: cond(p, true_fn, lambda a: a * y, (x,)).cos()


def changed_in_place_before(cond):
    def program(p, x, y):
        z = x * 3
        z.mul_(2)
        return cond(p, lambda: z * y, lambda: z.sin())

    return program


def result_changed_in_place(cond):
    def program(p, x, y):
        z = x * 2
        out = cond(p, lambda a: a.sin(), lambda a: a * y, (z,))
        out.add_(1)
        return out * 3, z

    return program


PROGRAMS = (
    operands,
    intermediates,
    captures_only,
    structures,
    passes_through,
    different_use,
    integer_results,
    numbers,
    no_grad_inside,
    objects_of_its_own,
    computed_pred,
    nested,
    in_checkpoint,
    checkpoint_inside,
    changed_in_place_before,
    result_changed_in_place,
)


def compare(program, expected, preds=PREDS):
    """Results and gradients for each ``pred``, of ``x``, ``y`` and the captured weight; zeros count as no gradient."""
    for pred in preds:
        outcomes = []
        for fn in (program, expected):
            x, y = fresh((X, Y))
            WEIGHT.grad = None
            result = fn(pred, x, y)
            backward(result)
            grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in (x, y, WEIGHT)]
            outcomes.append((result, grads))
        torch.testing.assert_close(outcomes[0], outcomes[1])
        assert [t.dtype for t in tensors(outcomes[0])] == [t.dtype for t in tensors(outcomes[1])]


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_as_a_python_if(make):
    program = jit(make(torch.cond))
    compare(program, make(python_if))
    assert thunder.cache_misses(program) == 1


@pytest.mark.parametrize("cond", CONDS[1:], ids=("higher_order.cond", "inlined"))
@pytest.mark.parametrize("make", (intermediates, structures, nested), ids=lambda f: f.__name__)
def test_in_other_forms(make, cond):
    compare(jit(make(cond)), make(python_if))


@pytest.mark.parametrize("cond", (torch.cond, inlined_cond), ids=("cond", "inlined"))
def test_in_a_module(cond):
    module, expected = Experts(cond), Experts(python_if)
    program = jit(module)
    for pred in PREDS:
        compare(program, expected, (pred,))
        grads = [
            [p.grad if p.grad is not None else torch.zeros_like(p) for p in m.parameters()] for m in (module, expected)
        ]
        assert_same(*grads)
    assert thunder.cache_misses(program) == 1


def test_without_gradients():
    program = jit(operands(torch.cond))
    with torch.no_grad():
        for pred in PREDS:
            result = program(pred, X, Y)
            assert not result.requires_grad
            torch.testing.assert_close(result, operands(python_if)(pred, X, Y))
    x, y = X.detach(), Y.detach()
    assert_same(program(PREDS[0], x, y), operands(python_if)(PREDS[0], x, y))


def test_only_the_taken_branch_runs():
    def fails(a):
        return a[a.new_full((1,), 99, dtype=torch.int64)]

    program = jit(lambda p, x: torch.cond(p, fails, lambda a: a[:1] * 1, (x,)))
    assert_same(program(torch.tensor(False), X.detach()), X.detach()[:1])
    with pytest.raises(IndexError):
        program(torch.tensor(True), X.detach())


@pytest.mark.parametrize("pred", (True, False, 1, 0, 2.5, 0.0))
def test_a_python_pred_is_known_while_tracing(pred):
    program = jit(intermediates(torch.cond))
    compare(program, intermediates(python_if), (pred,))
    assert "cond" not in re.sub(r"#.*", "", str(thunder.last_traces(program)[-1]))
    compare(program, intermediates(python_if), (not pred, pred))


def test_a_pred_from_a_shape():
    program = jit(lambda x: torch.cond(x.shape[0] > 2, torch.sin, torch.cos, (x,)))
    assert_same(program(X), X.sin())
    assert_same(program(X[:2]), X[:2].cos())


def test_results_are_new_tensors():
    program = jit(lambda p, x: torch.cond(p, lambda a: a, lambda a: a.view(-1).view(3, 4), (x,)).add_(1))
    for pred in PREDS:
        x = X.detach().clone()
        assert_same(program(pred, x), X.detach() + 1)
        assert_same(x, X.detach())


def test_guards_of_both_branches():
    state = {"a": 2.0, "b": 3.0}
    program = jit(lambda p, x: torch.cond(p, lambda a: a * state["a"], lambda a: a * state["b"], (x,)))
    for change in ({}, {"a": 5.0}, {"b": 7.0}):
        state.update(change)
        for pred, key in zip(PREDS, "ab"):
            assert_same(program(pred, X), X * state[key])
    assert thunder.cache_misses(program) == 3


# Random numbers


def random_gradients(program, pred, x=X):
    x = fresh(x)
    torch.manual_seed(3)
    result = program(pred, x)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    result.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    return result, x.grad


RANDOM = {
    "plain": lambda p, x, c: c(p, lambda a: F.dropout(a.sin(), 0.5) * a, lambda a: a * torch.rand_like(a), (x.cos(),)),
    "nested": lambda p, x, c: c(
        p, lambda a: c(p, F.dropout, torch.sin, (a,)) * a, lambda a: a * torch.rand_like(a), (x,)
    ),
    "in_checkpoint": lambda p, x, c: checkpoint(
        lambda b: c(p, lambda a: F.dropout(a.sin()) * a, lambda a: a * torch.rand_like(a), (b.cos(),)).sin().exp(),
        x.sin(),
        use_reentrant=False,
    ),
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM)
def test_the_gradient_has_the_random_numbers_of_the_forward_pass(make):
    program = jit(lambda p, x: make(p, x, torch.cond))
    for pred in PREDS:
        flag = bool(pred)
        taken = jit(lambda x: make(flag, x, torch.cond))
        assert_same(random_gradients(program, pred), random_gradients(lambda p, x: taken(x), pred))


# Misuse: each raise


def true_fn(a):
    return a.sin()


def tell(a):
    SEEN.append(a)
    return a.cos()


SEEN = []


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, a):
        self.count = self.count + 1
        return a.cos()


def raises(a):
    raise ValueError("no such branch")


def make_counter():
    n = 0

    def count(a):
        nonlocal n
        n += 1
        return a.cos()

    return count


def leaves_no_grad(a):
    torch._C._set_grad_enabled(False)
    return a.cos()


class Box:
    def __init__(self, t):
        self.t = t


TRUE = r"`true_fn` `true_fn` \(.*test_cond\.py:\d+\)"
FALSE = r"`false_fn` .*test_cond\.py:\d+\)"
MISUSES = {
    "dtype": (
        lambda a: a.sin().float(),
        rf"at the top {TRUE} returns a torch.float64 tensor of shape \(3, 4\) on cpu "
        rf"and {FALSE} returns a torch.float32 tensor .*Convert one with `.to",
    ),
    "shape": (
        lambda a: a.sum(),
        rf"at the top {TRUE} returns .*\(3, 4\) on cpu and {FALSE} returns .*shape \(\) on cpu",
    ),
    "structure": (lambda a: (a, a), rf"one structure, but {TRUE} returns \* and {FALSE} returns \('\*', '\*'\)"),
    "constant": (lambda a: 3, rf"at the top {TRUE} returns a .*tensor.* and {FALSE} returns the int 3. Return tensors"),
    "raises": (raises, rf"{FALSE} of `torch.cond` raises ValueError: no such branch. It is traced"),
    "in place": (
        lambda a: a.mul_(2),
        rf"{FALSE} of `torch.cond` changes a tensor in place \(`mul_`, .*test_cond.py:\d+",
    ),
    "container": (tell, rf"{FALSE} of `torch.cond` changes `SEEN`, which is outside of it.*Return the new value"),
    "cell": (make_counter(), rf"{FALSE} of `torch.cond` changes `n`, which is outside of it"),
    "buffer": (Holder(), r"of `torch.cond` sets `count` on an object outside of it"),
    "grad mode": (leaves_no_grad, rf"{FALSE} of `torch.cond` leaves grad mode or autocast changed"),
    "object": (lambda a: Box(a), rf"{FALSE} of `torch.cond` returns at the top a Box, which depends on tensors"),
    "not callable": (3, "`torch.cond` needs a callable for `false_fn`, but got 3"),
}


@pytest.mark.parametrize("false_fn, message", MISUSES.values(), ids=MISUSES)
def test_branches_that_cannot_be_chosen_from(false_fn, message):
    text = error_of(lambda p, x: torch.cond(p, true_fn, false_fn, (x,)), PREDS[0], X.detach().clone())
    assert re.search(message, text), text


def test_the_path_to_the_leaf():
    def branch(shape):
        return lambda a: {"k": [a, a.new_zeros(shape)]}

    text = error_of(lambda p, x: torch.cond(p, branch((2,)), branch((3,)), (x,)), PREDS[0], X)
    assert re.search(r"at `\['k'\]\[1\]` .*shape \(2,\).*shape \(3,\)", text), text


@pytest.mark.parametrize(
    "pred, message",
    (
        (torch.ones(3, 4, dtype=torch.bool), r"is a torch.bool tensor of shape \(3, 4\).*`.any\(\)`"),
        (torch.ones(()), r"is a torch.float32 tensor of shape \(\) on cpu"),
        ("yes", "is str. Pass a bool tensor"),
    ),
)
def test_a_pred_that_is_none(pred, message):
    text = error_of(lambda p, x: torch.cond(p, true_fn, torch.cos, (x,)), pred, X)
    assert re.search(rf"`true_fn` \(.*test_cond\.py:\d+\) {message}", text), text


def test_a_pred_whose_value_is_not_known():
    text = error_of(lambda p, x: torch.cond(p.item(), true_fn, torch.cos, (x,)), PREDS[0], X)
    assert "not the result of `.item()`" in text


def test_a_value_that_is_changed_after_the_call_has_no_gradient():
    def program(p, x):
        y = x.exp()
        z = torch.cond(p, lambda: y.sin(), lambda: y.cos())
        y.mul_(2)
        return z

    result = jit(program)(PREDS[0], fresh(X))
    with pytest.raises(RuntimeError, match="was changed in place after the call.*Change a clone"):
        result.sum().backward()


def test_symbolic_values():
    program = operands(torch.cond)
    with pytest.raises(HigherOrderError, match="Compile without `cache='symbolic values'`"):
        jit(program, cache="symbolic values")(PREDS[0], X, Y)
    symbolic = jit(lambda x, y: program(True, x, y), cache="symbolic values")
    assert_same(symbolic(X, Y), program(True, X, Y))


class CountOf(TorchDispatchMode):
    """Counts how often torch runs an operation."""

    def __init__(self, operation):
        super().__init__()
        self.operation, self.count = operation, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.operation
        return func(*args, **(kwargs or {}))


def test_the_backward_pass_does_not_compute_the_branch_again():
    jitted = jit(lambda p, x: torch.cond(p, lambda a: (a @ WEIGHT).exp().sum(), lambda a: a.sum(), (x,)))
    (x,) = fresh((X,))
    with CountOf(torch.ops.aten.exp.default) as counter:
        out = jitted(PREDS[0], x)
        assert counter.count == 1
        out.backward()
    assert counter.count == 1
    torch.testing.assert_close(x.grad, (X @ WEIGHT).exp() @ WEIGHT.T)


def test_the_residuals_live_as_long_as_autograd_needs_them():
    jitted = jit(lambda p, x: torch.cond(p, lambda a: a.exp(), lambda a: a.sin(), (x,)))
    (x,) = fresh((X,))
    out = jitted(PREDS[0], x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2 * X.exp())
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        out.sum().backward()


def test_the_trace_shows_the_branches():
    jitted = jit(lambda p, x: torch.cond(p, lambda a: a.exp(), lambda a: a.sin(), (x,)))
    jitted(*fresh((PREDS[0], X)))
    for trace in (thunder.last_traces(jitted)[0], thunder.last_traces(jitted)[-1]):
        text = str(trace)
        assert re.search(r"torch_cond(_forward)?_\d+\(p", text)
        assert re.search(r"# true_fn:.*ltorch.exp.*# false_fn:.*ltorch.sin", text, re.DOTALL)


class Block(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(4, 4).double()

    def forward(self, p, x):
        return torch.cond(p, lambda a: self.linear(a).tanh(), lambda a: self.linear(a), (x,))


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(Block, range(3)))

    def forward(self, p, x):
        for block in self.blocks:
            x = block(p, x)
        return x


def test_in_a_region_that_is_reused():
    model, eager = Blocks(), Blocks()
    jitted = jit(model, nested_regions=[Block])
    for p in PREDS:
        assert_same(jitted(p, X), eager(p, X))
        for m in (jitted, eager):
            backward(m(p, X.detach()))
        assert_same([q.grad for q in model.parameters()], [q.grad for q in eager.parameters()])
    (report,) = thunder.nested.report(jitted)
    assert (report.traced, report.reused) == (1, 2)
