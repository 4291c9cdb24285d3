"""``scan``: values and gradients as of a Python loop, one program whatever the length, and its errors."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, backward, fresh, jit
from operator_cases import (
    FUNCTIONS,
    LAYER,
    PYTHON,
    TORCH,
    WEIGHT,
    Holder,
    check_changed_in_place,
    check_modes,
    check_second_backward,
    check_trace,
    compare,
    error_of,
    functions,
    kept_bytes,
    places,
    random_tensor,
)
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.torch.higher_order.common import HigherOrderError

H, X, Y = random_tensor(3, seed=0), random_tensor(4, 3, seed=1), random_tensor(3, seed=3)
INPUTS = (H, X, Y)


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def rnn(scan, **options):
    def step(c, e):
        c = torch.tanh(c @ WEIGHT + e)
        return c, c * 2

    return lambda h, x, y: scan(step, h, x, **options)


def captures(scan):
    def program(h, x, y):
        z, w = y.exp(), x.sum(0)

        def step(c, e):
            return (c * z + e).sin() @ WEIGHT, c * w * e

        c, r = scan(step, h.sin(), x.cos())
        return c * z, r.exp()

    return program


def structures(scan):
    def step(carry, element):
        a, (b,) = carry["a"], carry["b"]
        new = {"a": a * element.first, "b": (b + element.second[0][0] * element.second[1].exp(),)}
        return new, [Pair(a.sin(), b), {"k": a * b}]

    def program(h, x, y):
        carry, [pair, table] = scan(step, {"a": h, "b": (y,)}, Pair(x, [x.unsqueeze(-1) * y, x[:, :1]]))
        return carry, pair.first, pair[1], table

    return program


def along(dim, reverse):
    def make(scan):
        def step(c, e):
            c = torch.tanh(c + e.flatten()[:3])
            return c, (e.sin(), c * 2, c[0].sin())

        return lambda h, x, y: scan(step, h, (x[..., None] * y)[:, None], dim=dim, reverse=reverse)

    return make


def one_element(scan):
    return lambda h, x, y: rnn(scan)(h, x[:1], y)


def init_is_captured(scan):
    return lambda h, x, y: scan(lambda c, e: (c * h + e, c * h.sin()), h, x)


def xs_are_captured(scan):
    return lambda h, x, y: scan(lambda c, e: (c * x[0] + e, c * x.sum(0)), h, x)


def passed_twice(scan):
    def step(c, e):
        return (c[0] * e[0], c[1] + e[1] * c[0]), c[0] * c[1]

    return lambda h, x, y: scan(step, (h, h), (x, x))


def init_is_a_slice_of_xs(scan):
    return lambda h, x, y: scan(lambda c, e: (c * e, c + e), x[0], x)


def requires_grad_later(scan):
    """The first carry does not require a gradient; by way of another one it depends on ``y`` in the third trip."""
    return lambda h, x, y: scan(
        lambda c, e: ((c[1] * e.detach(), c[0] + y), c[0] * 2), (torch.ones(3).double(), torch.zeros(3).double()), x
    )


def carry_is_replaced(scan):
    """The initial carry has a gradient by the first trip alone."""
    return lambda h, x, y: scan(lambda c, e: (e * 2, c.sin()), h, x)


def integers(scan):
    def step(carry, e):
        n, c, flag = carry
        return (n + 1, c * e + n, ~flag), (n * 2, c.argmax(), c * n, flag)

    return lambda h, x, y: scan(step, (torch.tensor(0), h, torch.tensor(True)), x)


def integer_xs(scan):
    def program(h, x, y):
        index = torch.arange(3)

        def step(c, i):
            return c * i + y, (y.index_select(0, i.reshape(1)), i)

        return scan(step, h, index)

    return program


def aliases(scan):
    """Results that are an input, a capture, a view, and one tensor more than once."""

    def program(h, x, y):
        def step(c, e):
            new = c[0] * e
            return (new, new), (new, e, y, e.view(3, 1), c[0], c[1].T)

        return scan(step, (h, h), x)

    return program


def carry_passes_through(scan):
    return lambda h, x, y: scan(lambda c, e: (c, c * e), h, x)


def carries_are_swapped(scan):
    return lambda h, x, y: scan(lambda c, e: ((c[1], c[0]), c[0] * e), (h, y), x)


def carry_is_an_element(scan):
    return lambda h, x, y: scan(lambda c, e: (e, c), h, x)


def carry_is_a_capture(scan):
    return lambda h, x, y: scan(lambda c, e: (y, c * e), h, x)


def no_results(scan):
    return lambda h, x, y: scan(lambda c, e: (c * e, ()), h, x)


def unused_results(scan):
    def program(h, x, y):
        c, (a, b) = scan(lambda c, e: (c * e, (c.sin(), (c * y).sum())), h, x)
        return a

    return program


def unused_carry(scan):
    return lambda h, x, y: scan(lambda c, e: (c * e, (c + e) * y), h, x)[1]


def nothing_is_read(scan):
    return lambda h, x, y: scan(lambda c, e: (torch.ones(3).double(), torch.zeros(2).double()), h, x)


def scalars(scan):
    return lambda h, x, y: scan(lambda c, e: (c * e + y.sum(), c.sin()), h[0], x[:, 1])


def non_contiguous(scan):
    return lambda h, x, y: scan(
        lambda c, e: (c.t() @ e, e.t()), torch.outer(y, h).t(), torch.stack([x.t() @ x] * 2, -1).permute(2, 1, 0)
    )


def called_twice(scan):
    def program(h, x, y):
        def step(c, e):
            return (c @ WEIGHT + e).sin() * y, c

        c, r = scan(step, h, x)
        return scan(step, c, r * x, reverse=True)

    return program


def inside_checkpoint(scan):
    return lambda h, x, y: checkpoint(
        lambda a: scan(lambda c, e: ((c @ WEIGHT).sin() * e, c * y), a.exp(), x)[1].sin(), h, use_reentrant=False
    )


def under_no_grad(scan):
    def program(h, x, y):
        with torch.no_grad():
            c, r = scan(lambda c, e: (c * e, c + e), h, x)
        return c * y, r

    return program


def changed_before(scan):
    def program(h, x, y):
        z, xs = h * 2, x * 3
        z.mul_(2)
        xs.add_(1)
        return scan(lambda c, e: (c * e, c * z), z, xs)

    return program


def results_are_changed(scan):
    def program(h, x, y):
        c, r = scan(lambda c, e: (c * e, c), h, x)
        r.add_(1)
        c.mul_(2)
        return c * y, r, h * 1

    return program


PROGRAMS = (
    captures,
    structures,
    one_element,
    init_is_captured,
    xs_are_captured,
    passed_twice,
    init_is_a_slice_of_xs,
    requires_grad_later,
    carry_is_replaced,
    integers,
    integer_xs,
    aliases,
    carry_passes_through,
    carries_are_swapped,
    carry_is_an_element,
    carry_is_a_capture,
    no_results,
    unused_results,
    unused_carry,
    nothing_is_read,
    scalars,
    non_contiguous,
    called_twice,
    inside_checkpoint,
    under_no_grad,
    changed_before,
    results_are_changed,
)


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_as_a_python_loop(make):
    compare(jit(make(TORCH.scan)), make(PYTHON.scan), INPUTS)


@pytest.mark.parametrize("reverse", (False, True))
@pytest.mark.parametrize("dim", (0, 2, -1, -4))
def test_dimensions(dim, reverse):
    make = along(dim, reverse)
    compare(jit(make(TORCH.scan)), make(PYTHON.scan), INPUTS)


@functions
def test_functions(function):
    def make(ops):
        def program(h, x, y):
            f = function(ops, y.cos())
            return ops.scan(lambda c, e: (f(c * e), f(c) + e), h.exp(), x)

        return program

    leaves = (WEIGHT, *LAYER.parameters())
    compare(jit(make(TORCH)), make(PYTHON), INPUTS, leaves)


@places
def test_inside(place):
    def make(ops):
        def program(h, x, y):
            f = lambda a: sum(ops.scan(lambda c, e: ((c @ WEIGHT).tanh() * y, c * e), a, x)[1])  # noqa: E731
            return place(ops, f, h.sin()) * y

        return program

    compare(jit(make(TORCH)), make(PYTHON), INPUTS)


def simple(scan):
    def program(h, x, y):
        z = y.exp()
        return scan(lambda c, e: ((c @ WEIGHT).tanh() * e + z, c * z), h, x)

    return program


def test_the_operator():
    """The flat form, with additional inputs; it gives a tuple."""

    def step(c, d, e, f, z, n):
        return (c * e).sin() + z, d * f, c * n, d

    def program(h, x, y):
        return torch.ops.higher_order.scan(step, [h, y], [x, x.cos()], (y.exp(), 3))

    def expected(h, x, y):
        carry, results = PYTHON.scan(
            lambda c, e: (lambda r: (r[:2], r[2:]))(step(*c, *e, y.exp(), 3)), (h, y), (x, x.cos())
        )
        return *carry, *results

    compare(jit(program), expected, INPUTS)


EAGER = {"simple": simple, "captures": captures, "along": along(1, True)}


@pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)
def test_as_eager_pytorch(make):
    compare(jit(make(TORCH.scan)), make(TORCH.scan), INPUTS)


class Model(torch.nn.Module):
    def __init__(self, scan):
        super().__init__()
        torch.manual_seed(1)
        self.scan, self.cell, self.out = scan, torch.nn.GRUCell(3, 3), torch.nn.Linear(3, 2)
        self.cell.double(), self.out.double()
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, h, x, y):
        h, rows = self.scan(self.step, h.reshape(1, 3), x.reshape(-1, 1, 3))
        return h * y, self.out(rows)

    def step(self, h, e):
        h = self.cell(e, h)
        return h, h * self.scale


def test_in_a_module():
    module, expected = Model(TORCH.scan), Model(PYTHON.scan)
    program = jit(module)
    for _ in range(2):
        compare(program, expected, INPUTS, ())
        assert_same([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])
    assert thunder.cache_misses(program) == 1


def test_compilations():
    options = {"dim": 0, "reverse": False}
    program = jit(lambda h, x: TORCH.scan(lambda c, e: (c * e, c + e), h, x, **options))
    for length, misses in ((4, 1), (4, 1), (2, 2)):
        x = torch.randn(length, 3)
        assert_same(program(H.detach().float(), x), PYTHON.scan(lambda c, e: (c * e, c + e), H.detach().float(), x))
        assert thunder.cache_misses(program) == misses
    square = torch.randn(3, 3)
    for change, misses in (({}, 3), ({"reverse": True}, 4), ({"dim": 1}, 5), ({"dim": -1}, 6)):
        options.update(change)
        expected = PYTHON.scan(lambda c, e: (c * e, c + e), H.detach().float(), square, **options)
        assert_same(program(H.detach().float(), square), expected)
        assert thunder.cache_misses(program) == misses


DTYPES = (torch.float32, torch.bfloat16, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    def make(scan):
        return lambda h, x, y: scan(lambda c, e: ((c * e + y), c * y), h, x)

    inputs = tuple(t.detach().to(dtype).requires_grad_() for t in INPUTS)
    compare(jit(make(TORCH.scan)), make(PYTHON.scan), inputs, ())


@pytest.mark.parametrize("wanted", ((), (0,), (1,), (2,)), ids=str)
def test_mixed_requires_grad(wanted):
    inputs = tuple(t if i in wanted else t.detach() for i, t in enumerate(INPUTS))
    compare(jit(simple(TORCH.scan)), simple(PYTHON.scan), inputs)


def test_modes():
    check_modes(jit(simple(TORCH.scan)), simple(PYTHON.scan), INPUTS)


def nested_scans(ops):
    return lambda h, x, y: ops.scan(lambda c, e: (FUNCTIONS["scan"](ops, y)(c * e), FUNCTIONS["cond"](ops, y)(c)), h, x)


def test_second_backward():
    check_second_backward(jit(simple(TORCH.scan)), INPUTS)
    check_second_backward(jit(nested_scans(TORCH)), INPUTS)


@pytest.mark.parametrize("index", (0, 1, 2), ids=("init", "xs", "capture"))
def test_changed_in_place_before_the_backward_pass(index):
    def make(scan):
        return lambda h, x, y: scan(lambda c, e: (c * e * y, c * e.sin()), h, x)

    check_changed_in_place(jit(make(TORCH.scan)), make(PYTHON.scan), INPUTS, index)


def test_a_value_that_is_changed_after_the_call_has_no_gradient():
    def program(h, x, y):
        z = y.exp()
        c, r = torch_scan(lambda c, e: (c * e * z, c), h, x)
        z.mul_(2)
        return r

    result = jit(program)(*fresh(INPUTS))
    with pytest.raises(RuntimeError, match="the `scan` with .* was changed in place after the call.*Change a clone"):
        backward(result)


def test_autocast_around():
    def make(scan):
        def program(h, x, y):
            with torch.autocast("cpu", torch.bfloat16):
                return scan(lambda c, e: ((e.reshape(1, 3) @ y.diag()).reshape(3).float() + c, c), h, x)

        return program

    inputs = tuple(t.detach().float().requires_grad_() for t in INPUTS)
    compare(jit(make(TORCH.scan)), make(PYTHON.scan), inputs, ())


def test_random_numbers():
    """Those of the eager loop, and the gradient has the mask of the forward pass."""

    def make(scan):
        def step(c, e):
            c = F.dropout(c * e, 0.3) + torch.rand_like(e)
            return c, F.dropout(c.sin(), 0.5)

        return lambda h, x, y: scan(step, h, x)

    compare(jit(make(TORCH.scan)), make(PYTHON.scan), INPUTS)


def test_what_is_kept():
    """Of each step its intermediate values, once; nothing of captures and xs is copied, or kept for each step."""
    h, x, big = torch.rand(8), torch.rand(100, 8), torch.rand(8, 8, requires_grad=True)
    x.requires_grad_()

    def step(c, e):
        c = torch.tanh(c @ big + e)  # its gradient needs the result, and the carry, which is the result before
        return c, c * 2

    program = jit(lambda h, x: torch_scan(step, h, x))
    before = kept_bytes(h, x, big)
    result = program(h, x)
    assert kept_bytes(h, x, big) - before == 100 * h.nbytes
    del result
    assert kept_bytes(h, x, big) == before
    result = program(h, x)
    backward(result)
    assert kept_bytes(h, x, big) == before, "after the backward pass"


def test_the_trace(tmp_path):
    program = jit(simple(TORCH.scan))
    program(*INPUTS)
    check_trace(program, "scan", ("combine_fn:", "= ltorch.matmul", "return "), tmp_path / "trace.py")


# Misuse: each raise


def step(c, e):
    return c * e, c


def raises(c, e):
    raise ValueError("no such step")


def changes_in_place(c, e):
    return c.mul_(e), e


def changes_a_capture(c, e):
    H_PLAIN.add_(1)
    return c, e


def sets_an_attribute(c, e):
    HOLDER.factor = c
    return c, e


def appends(c, e):
    SEEN.append(c)
    return c, e


def leaves_no_grad(c, e):
    torch._C._set_grad_enabled(False)
    return c, e


H_PLAIN, X_PLAIN, SEEN, HOLDER = H.detach().clone(), X.detach().clone(), [], Holder(2.0)
FN = r"`combine_fn` `[\w.<>]+` \(.*test_scan\.py:\d+\) of `scan`"
WITH = r"the `scan` with `step` \(.*test_scan\.py:\d+\)"
FUNCTION_MISUSES = {
    "dtype": (
        lambda c, e: (c.float(), e),
        rf"{FN} gets a torch.float64 tensor of shape \(3,\) on cpu at the top of the carry and returns a torch.float32 "
        r"tensor .* there.*convert the result, or the initial value, with `.to",
    ),
    "shape": (lambda c, e: (c.sum(), e), rf"{FN} gets .*shape \(3,\).* returns .*shape \(\) on cpu there"),
    "structure": (lambda c, e: ((c, c), e), rf"{FN} gets the carry \* and returns \('\*', '\*'\) \(`\*` is a leaf"),
    "no pair": (lambda c, e: c, rf"{FN} returns \* .*must return a pair"),
    "a triple": (lambda c, e: (c, e, e), rf"{FN} returns \('\*', '\*', '\*'\) .*must return a pair"),
    "number": (lambda c, e: (c, {"k": [3]}), rf"{FN} returns at `\['k'\]\[0\]` the int 3, which cannot be stacked"),
    "none": (lambda c, e: (c, None), rf"{FN} returns at the top the NoneType None, which cannot be stacked"),
    "in place": (changes_in_place, rf"{FN} changes a tensor in place \(`mul_`, .*test_scan.py:\d+\)"),
    "capture in place": (changes_a_capture, rf"{FN} changes a tensor in place \(`add_`, .*test_scan.py:\d+\)"),
    "attribute": (sets_an_attribute, rf"{FN} sets `factor` on an object outside of it"),
    "container": (appends, rf"{FN} changes `SEEN`, which is outside of it.*Return the new value"),
    "grad mode": (leaves_no_grad, rf"{FN} leaves grad mode or autocast changed"),
    "not callable": (3, "`scan` needs a callable for `combine_fn`, but got 3"),
}
ARGUMENT_MISUSES = {
    "number in xs": ((H_PLAIN, (X_PLAIN, {"k": 3})), {}, rf"`xs` of {WITH} holds at `\[1\]\['k'\]` the int 3"),
    "number in init": (([H_PLAIN, 2.0], X_PLAIN), {}, rf"`init` of {WITH} holds at `\[1\]` the float 2.0"),
    "no init": (((), X_PLAIN), {}, rf"`init` of {WITH} holds no tensor. Use `map`"),
    "length 0": (
        (H_PLAIN, X_PLAIN[:0]),
        {},
        rf"`xs` of {WITH} holds at the top .*\(0, 3\).*dimension 0 whose size is not 0",
    ),
    "no dimension": (
        (H_PLAIN, (X_PLAIN, H_PLAIN)),
        {"dim": 1},
        rf"`xs` of {WITH} holds at `\[1\]` .*\(3,\) .* needs a dimension 1",
    ),
    "lengths": (
        (H_PLAIN, [X_PLAIN, X_PLAIN[1:]]),
        {},
        rf"`xs` of {WITH} holds at `\[1\]` .*\(3, 3\) .* at `\[0\]` .*\(4, 3\) .*one size in dimension 0",
    ),
    "reverse": ((H_PLAIN, X_PLAIN), {"reverse": 1}, rf"`reverse` of {WITH} is 1. Pass a bool"),
}


@pytest.mark.parametrize("fn, message", FUNCTION_MISUSES.values(), ids=FUNCTION_MISUSES)
def test_functions_that_cannot_be_called(fn, message):
    text = error_of(lambda h, x: torch_scan(fn, h, x), H_PLAIN, X_PLAIN)
    assert re.search(message, text), text


@pytest.mark.parametrize("args, kwargs, message", ARGUMENT_MISUSES.values(), ids=ARGUMENT_MISUSES)
def test_arguments_that_cannot_be_scanned(args, kwargs, message):
    text = error_of(lambda *args: torch_scan(step, *args, **kwargs), *args)
    assert re.search(message, text), text


def test_errors_of_eager_pytorch():
    for args, kwargs, error in (
        ((H_PLAIN, X_PLAIN[:0]), {}, RuntimeError),
        (((), X_PLAIN), {}, RuntimeError),
        ((H_PLAIN, X_PLAIN), {"dim": 2}, IndexError),
        ((H_PLAIN, X_PLAIN), {"reverse": 1}, RuntimeError),
    ):
        program = lambda *args: torch_scan(step, *args, **kwargs)  # noqa: E731
        for fn in (program, jit(program)):
            with pytest.raises(error):
                fn(*args)


def test_no_xs():
    program = jit(lambda h: torch_scan(step, h, ()))
    assert_same(program(H_PLAIN), torch_scan(step, H_PLAIN, ()))


def test_the_path_to_the_leaf():
    def other(c, e):
        return {"k": [c["k"][0], c["k"][1].int()]}, e

    text = error_of(lambda h, x: torch_scan(other, {"k": [h, h]}, x), H_PLAIN, X_PLAIN)
    assert re.search(rf"{FN} gets .*float64.* at `\['k'\]\[1\]` of the carry and returns a torch.int32", text), text


def test_symbolic_values():
    with pytest.raises(HigherOrderError, match="Compile without `cache='symbolic values'`"):
        jit(lambda h, x: torch_scan(step, h, x), cache="symbolic values")(H_PLAIN, X_PLAIN)


def test_what_the_function_raises_is_raised():
    def program(x):
        try:
            return TORCH.scan(raises, x[0], x)
        except ValueError as error:
            return x + 1, str(error)

    x = torch.ones(2, 3)
    assert_same(jit(program)(x), (x + 1, "no such step"))
