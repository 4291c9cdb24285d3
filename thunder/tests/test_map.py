"""``map``: values and gradients as of a Python loop that stacks, and its errors."""

from __future__ import annotations

import re

import functorch.experimental.control_flow
import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, jit
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
from torch._higher_order_ops.map import map as torch_map
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.torch.higher_order.common import HigherOrderError

X, Y = random_tensor(4, 3, seed=1), random_tensor(3, seed=3)
INPUTS = (X, Y)


def simple(map):
    def program(x, y):
        z = y.exp()
        return map(lambda e: (e @ WEIGHT).tanh() * z, x)

    return program


def arguments(map):
    """Further arguments: a tensor, a structure, numbers and others; the same for all slices."""

    def f(e, y, table, n, kind):
        return (e * y * n + table["k"][0]).sin() if kind == "sin" else e

    return lambda x, y: map(f, x, y, {"k": [y.cos(), None]}, 3, "sin")


def structures(map):
    def f(e, z):
        a, (b, c) = e["a"], e["b"]
        return {"r": [a * b[0], (c.sum(0) * z,)], "s": a[0]}

    return lambda x, y: map(f, {"a": x, "b": [x[..., None] * y, x.reshape(4, 1, 3)]}, y)


def xs_are_captured(map):
    return lambda x, y: map(lambda e: e * x[0] + x.sum(0), x)


def xs_are_arguments(map):
    return lambda x, y: map(lambda e, all: e * all[0] + all.sum(0), x, x)


def passed_twice(map):
    return lambda x, y: map(lambda e: e[0] * e[1].sin(), (x, x))


def aliases(map):
    """Results that are an input, a capture, a view, and one tensor more than once."""

    def f(e):
        new = e * Y
        return new, new, e, Y, e.view(3, 1)

    return lambda x, y: map(f, x)


def integers(map):
    def f(e, i):
        return i * 2, e.argmax(), e * i, i

    return lambda x, y: map(lambda t: f(*t), (x, torch.arange(4)))


def scalars(map):
    return lambda x, y: map(lambda e: e.sin() * y[0], x[:, 1])


def non_contiguous(map):
    return lambda x, y: map(lambda e: (e @ e.t()).t(), (x[..., None] * y).permute(2, 1, 0))


def one_element(map):
    return lambda x, y: map(lambda e: e * y, x[:1])


def unused_results(map):
    return lambda x, y: map(lambda e: (e.sin(), (e * y).sum()), x)[0]


def nothing_is_read(map):
    return lambda x, y: map(lambda e: torch.ones(3).double(), x) * y


def called_twice(map):
    def f(e):
        return (e @ WEIGHT).sin()

    return lambda x, y: map(f, map(f, x * y))


def inside_checkpoint(map):
    return lambda x, y: checkpoint(lambda a: map(lambda e: (e * y).sin(), a.exp()).cos(), x, use_reentrant=False)


def under_no_grad(map):
    def program(x, y):
        with torch.no_grad():
            r = map(lambda e: e * y, x)
        return r * y

    return program


def changed_before(map):
    def program(x, y):
        z = x * 3
        z.add_(1)
        return map(lambda e: e.sin() * z[0], z)

    return program


def result_is_changed(map):
    def program(x, y):
        r = map(lambda e: e, x)
        r.add_(1)
        return r * y, x * 1

    return program


PROGRAMS = (
    simple,
    arguments,
    structures,
    xs_are_captured,
    xs_are_arguments,
    passed_twice,
    aliases,
    integers,
    scalars,
    non_contiguous,
    one_element,
    unused_results,
    nothing_is_read,
    called_twice,
    inside_checkpoint,
    under_no_grad,
    changed_before,
    result_is_changed,
)


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_as_a_python_loop(make):
    compare(jit(make(TORCH.map)), make(PYTHON.map), INPUTS, (WEIGHT, Y))


@functions
def test_functions(function):
    def make(ops):
        def program(x, y):
            f = function(ops, y.cos())
            return ops.map(lambda e: f(e * y), x)

        return program

    compare(jit(make(TORCH)), make(PYTHON), INPUTS, (WEIGHT, *LAYER.parameters()))


@places
def test_inside(place):
    def make(ops):
        def program(x, y):
            f = lambda a: ops.map(lambda e: (e @ WEIGHT).tanh() * a, x).sum(0)  # noqa: E731
            return place(ops, f, y.sin())

        return program

    compare(jit(make(TORCH)), make(PYTHON), INPUTS)


MAPS = {"functorch": functorch.experimental.control_flow.map, "torch": torch._higher_order_ops.map}


@pytest.mark.parametrize("map", MAPS.values(), ids=MAPS)
def test_other_names(map):
    compare(jit(arguments(map)), arguments(PYTHON.map), INPUTS)


def test_the_operator():
    """The flat form gives the structure that the function returns."""

    def f(e, z, y, n):
        return e * y + z, (e * n).sin()

    def program(x, y):
        return torch.ops.higher_order.map_impl(f, [x, x.cos()], [y, 3])

    compare(jit(program), lambda x, y: PYTHON.map(lambda e: f(*e, y, 3), (x, x.cos())), INPUTS)


@pytest.mark.parametrize("make", (simple, called_twice), ids=lambda f: f.__name__)
def test_as_eager_pytorch(make):
    compare(jit(make(TORCH.map)), make(TORCH.map), INPUTS)


class Model(torch.nn.Module):
    def __init__(self, map):
        super().__init__()
        torch.manual_seed(1)
        self.map, self.layers = map, torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        self.double()

    def forward(self, x, y):
        return self.map(self.layers, x * y).sin()


def test_in_a_module():
    module, expected = Model(TORCH.map), Model(PYTHON.map)
    program = jit(module)
    for _ in range(2):
        compare(program, expected, INPUTS, ())
        assert_same([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])
    assert thunder.cache_misses(program) == 1


def test_compilations():
    program = jit(simple(TORCH.map))
    for length, misses in ((4, 1), (4, 1), (2, 2)):
        compare(program, simple(PYTHON.map), (random_tensor(length, 3, seed=length), Y))
        assert thunder.cache_misses(program) == misses


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.complex128), ids=str)
def test_dtypes(dtype):
    def make(map):
        return lambda x, y: map(lambda e: (e * y, e + y), x)

    compare(jit(make(TORCH.map)), make(PYTHON.map), tuple(t.detach().to(dtype).requires_grad_() for t in INPUTS), ())


@pytest.mark.parametrize("wanted", ((), (0,), (1,)), ids=str)
def test_mixed_requires_grad(wanted):
    inputs = tuple(t if i in wanted else t.detach() for i, t in enumerate(INPUTS))
    compare(jit(simple(TORCH.map)), simple(PYTHON.map), inputs)


def test_modes():
    check_modes(jit(simple(TORCH.map)), simple(PYTHON.map), INPUTS)


def test_second_backward():
    check_second_backward(jit(simple(TORCH.map)), INPUTS)
    check_second_backward(jit(lambda x, y: torch_map(FUNCTIONS["map"](TORCH, y), x)), INPUTS)


@pytest.mark.parametrize("index", (0, 1), ids=("xs", "capture"))
def test_changed_in_place_before_the_backward_pass(index):
    def make(map):
        return lambda x, y: map(lambda e: e * y, x)

    check_changed_in_place(jit(make(TORCH.map)), make(PYTHON.map), INPUTS, index)


def test_random_numbers():
    def make(map):
        return lambda x, y: map(lambda e: F.dropout(e * y, 0.3) * torch.rand_like(e), x)

    compare(jit(make(TORCH.map)), make(PYTHON.map), INPUTS)


def test_what_is_kept():
    """Slices of ``xs`` and captures are not copied; nothing is kept of a function that needs no more."""
    x, y = X.detach(), Y.detach().requires_grad_()
    program = jit(lambda x, y: torch_map(lambda e: e * y, x))
    before = kept_bytes(x, y)
    result = program(x, y)
    assert kept_bytes(x, y) == before
    del result
    exp = jit(lambda x, y: torch_map(lambda e: (e * y).exp(), x))(x, y)
    assert kept_bytes(x, y) == before + exp.nbytes


def test_the_trace(tmp_path):
    program = jit(simple(TORCH.map))
    program(*INPUTS)
    check_trace(program, "map", ("f:", "= ltorch.matmul", "return "), tmp_path / "trace.py")


# Misuse: each raise


def f(e):
    return e * 2


def raises(e):
    raise ValueError("no such slice")


def changes_in_place(e):
    return e.mul_(2)


def sets_an_attribute(e):
    HOLDER.factor = e
    return e


def appends(e):
    SEEN.append(e)
    return e


def leaves_no_grad(e):
    torch._C._set_grad_enabled(False)
    return e


X_PLAIN, SEEN, HOLDER, NORM = X.detach().clone(), [], Holder(2.0), torch.nn.BatchNorm1d(3).double()
FN = r"`f` `[\w.<>]+` \(.*test_map\.py:\d+\) of `map`"
WITH = r"the `map` with `f` \(.*test_map\.py:\d+\)"
FUNCTION_MISUSES = {
    "number": (lambda e: {"k": [3]}, rf"{FN} returns at `\['k'\]\[0\]` the int 3, which cannot be stacked"),
    "in place": (changes_in_place, rf"{FN} changes a tensor in place \(`mul_`, .*test_map.py:\d+\)"),
    "attribute": (sets_an_attribute, rf"{FN} sets `factor` on an object outside of it"),
    "buffer": (lambda e: NORM(e.expand(2, 3)), r"`f` .* of `map` changes a tensor in place \(`add_`"),
    "container": (appends, rf"{FN} changes `SEEN`, which is outside of it.*Return the new value"),
    "grad mode": (leaves_no_grad, rf"{FN} leaves grad mode or autocast changed"),
    "not callable": (3, "`map` needs a callable for `f`, but got 3"),
}
XS_MISUSES = {
    "number": ((X_PLAIN, {"k": 3}), rf"`xs` of {WITH} holds at `\[1\]\['k'\]` the int 3. It may hold tensors"),
    "nothing": ((), rf"`xs` of {WITH} holds no tensor"),
    "length 0": (X_PLAIN[:0], rf"`xs` of {WITH} holds at the top .*\(0, 3\).*dimension 0 whose size is not 0"),
    "no dimension": ([X_PLAIN, X_PLAIN[0, 0]], rf"`xs` of {WITH} holds at `\[1\]` .*\(\) .* needs a dimension 0"),
    "lengths": (
        [X_PLAIN, X_PLAIN[1:]],
        rf"`xs` of {WITH} holds at `\[1\]` .*\(3, 3\) .* at `\[0\]` .*\(4, 3\) .*one size in dimension 0",
    ),
}


@pytest.mark.parametrize("fn, message", FUNCTION_MISUSES.values(), ids=FUNCTION_MISUSES)
def test_functions_that_cannot_be_called(fn, message):
    text = error_of(lambda x: torch_map(fn, x), X_PLAIN)
    assert re.search(message, text), text


@pytest.mark.parametrize("xs, message", XS_MISUSES.values(), ids=XS_MISUSES)
def test_xs_that_cannot_be_mapped(xs, message):
    text = error_of(lambda xs: torch_map(f, xs), xs)
    assert re.search(message, text), text


def test_errors_of_eager_pytorch():
    for fn in (torch_map, jit(lambda f, x: torch_map(f, x))):
        with pytest.raises(RuntimeError):
            fn(f, X_PLAIN[:0])


def test_symbolic_values():
    with pytest.raises(HigherOrderError, match="Compile without `cache='symbolic values'`"):
        jit(lambda x: torch_map(f, x), cache="symbolic values")(X_PLAIN)


def test_what_the_function_raises_is_raised():
    def program(x):
        try:
            return TORCH.map(raises, x)
        except ValueError as error:
            return x + 1, str(error)

    x = torch.ones(2, 3)
    assert_same(jit(program)(x), (x + 1, "no such slice"))
