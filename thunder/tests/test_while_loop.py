"""``while_loop``: values and gradients as of a Python ``while``, one program for all trip counts, and its errors."""

from __future__ import annotations

import gc
import re

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
    Layer,
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
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.while_loop import MAX_KEPT, Tape

H, Y = random_tensor(3, seed=0), random_tensor(3, seed=3)
INPUTS = (torch.tensor(3), H, Y)


def counted(while_loop):
    return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, (c @ WEIGHT).tanh() * y), (0, h))


def data_dependent(while_loop):
    return lambda n, h, y: while_loop(lambda c: c.abs().sum() > 0.1, lambda c: (c * y.sin() * 0.5,), (h,))


def captures(while_loop):
    def program(n, h, y):
        z, bound = y.exp(), n * 2

        def body(i, c):
            return i + 1, (c * z).sin() @ WEIGHT + LAYER(z)

        i, c = while_loop(lambda i, c: (i < bound) & (z.sum() > 0), body, (torch.tensor(0), h.cos()))
        return c * z, i

    return program


def captured_by_both(while_loop):
    return lambda n, h, y: while_loop(lambda c: (c * y).sum().abs() < 9, lambda c: (c * 2 + y.exp(),), (h,))


def structures(while_loop):
    def body(n, table, pair):
        (a, (b,)) = pair
        return n + 1, {"k": table["k"] * a, "j": table["j"] + 1}, (a + b.sin(), [b * table["k"]])

    def program(n, h, y):
        n, table, (a, [b]) = while_loop(
            lambda n, table, pair: table["j"] < 3, body, (n, {"k": h, "j": 0}, (y, [h * y]))
        )
        return n, table, a, b

    return program


def no_trips(while_loop):
    return lambda n, h, y: while_loop(lambda i, c: i < 0, lambda i, c: (i + 1, c * y), (n, h))


def no_trips_of_an_input(while_loop):
    """The result is a new tensor even then."""

    def program(n, h, y):
        z = h * 2
        (c,) = while_loop(lambda c: c.sum() != c.sum(), lambda c: (c * y,), (z,))
        c.add_(1)
        return c, z * 1

    return program


def results_are_numbers(while_loop):
    def program(n, h, y):
        i, flag, c = while_loop(lambda i, flag, c: i < n, lambda i, f, c: (i + 2, f & (i < 1), c * y), (1, True, h))
        return i, flag, c, n * i

    return program


def a_number_from_an_attribute(while_loop):
    return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * y), (STATE["start"], h))


STATE = {"start": 1}


def numbers_from_a_body(while_loop):
    """A carry that is a constant after the first trip."""
    return lambda n, h, y: while_loop(lambda i, c: i > 1, lambda i, c: (1, c * y), (3, h))


def init_is_captured(while_loop):
    return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * h.sin() + y), (0, h))


def passed_twice(while_loop):
    return lambda n, h, y: while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a * b, b + a.sin()), (0, h, h))


def requires_grad_later(while_loop):
    def body(i, a, b, c):
        return i + 1, b * 2, c.sin(), c + y_of(a)

    def y_of(a):
        return a.detach() * WEIGHT[0]

    def program(n, h, y):
        one = torch.ones(3).double()
        return while_loop(lambda i, *_: i < n, body, (0, one, one * 2, one * 3))

    return program


def carries_are_swapped(while_loop):
    return lambda n, h, y: while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, b, a), (0, h, y))


def aliases(while_loop):
    def body(i, a, b, c):
        new = a * y_of(b)
        return i + 1, new, new.view(3), b

    def y_of(b):
        return b.sin()

    return lambda n, h, y: while_loop(lambda i, *_: i < n, body, (0, h, y, h))


def carry_is_replaced(while_loop):
    return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, y * 2), (0, h))


def unused_results(while_loop):
    def program(n, h, y):
        _, a, b = while_loop(lambda i, *_: i < n, lambda i, a, b: (i + 1, a * b, b.sin()), (0, h, y))
        return a

    return program


def scalars(while_loop):
    return lambda n, h, y: while_loop(lambda c: c.abs() > 0.1, lambda c: (c * 0.5,), (h[0] * y[0],))


def non_contiguous(while_loop):
    return lambda n, h, y: while_loop(
        lambda i, c: i < n, lambda i, c: (i + 1, (c @ c).t().tanh()), (0, torch.outer(y, h).t())
    )


def mixed_requires_grad(while_loop):
    return lambda n, h, y: while_loop(lambda i, a, b: i < n, lambda i, a, b: (i + 1, a * b, b * 2), (0, h.detach(), y))


def called_twice(while_loop):
    def program(n, h, y):
        loop = counted(while_loop)
        i, c = loop(n, h, y)
        return loop(n + i, c, y)

    return program


def loop_in_loop(while_loop):
    def body(i, c):
        j, d = while_loop(lambda j, d: j < i + 1, lambda j, d: (j + 1, (d * c).tanh()), (0, c))
        return i + 1, d @ WEIGHT

    return lambda n, h, y: while_loop(lambda i, c: i < n, body, (0, h))


def number_of_an_inner_loop(while_loop):
    def body(i, c):
        j, c = while_loop(lambda j, d: j < 2, lambda j, d: (j + 1, d * 2), (0, c))
        return i + j, c.sin()

    return lambda n, h, y: while_loop(lambda i, c: i < n, body, (0, h))


def a_number_carried_by_both(while_loop):
    def body(i, c):
        return while_loop(lambda j, d: j < 2, lambda j, d: (j + 1, d * 2), (i, c))

    return lambda n, h, y: while_loop(lambda i, c: i < 2, body, (0, h))


def inside_checkpoint(while_loop):
    return lambda n, h, y: checkpoint(
        lambda a: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c.sin() * y), (0, a.exp()))[1].sin(),
        h,
        use_reentrant=False,
    )


def under_no_grad(while_loop):
    def program(n, h, y):
        with torch.no_grad():
            i, c = counted(while_loop)(n, h, y)
        return c * y

    return program


PROGRAMS = (
    counted,
    data_dependent,
    captures,
    captured_by_both,
    structures,
    no_trips,
    no_trips_of_an_input,
    results_are_numbers,
    a_number_from_an_attribute,
    numbers_from_a_body,
    init_is_captured,
    passed_twice,
    requires_grad_later,
    carries_are_swapped,
    aliases,
    carry_is_replaced,
    unused_results,
    scalars,
    non_contiguous,
    mixed_requires_grad,
    called_twice,
    loop_in_loop,
    number_of_an_inner_loop,
    a_number_carried_by_both,
    inside_checkpoint,
    under_no_grad,
)


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_as_a_python_loop(make):
    program = jit(make(TORCH.while_loop))
    for n in (3, 0):
        compare(program, make(PYTHON.while_loop), (torch.tensor(n), H, Y), (WEIGHT, *LAYER.parameters()))
    assert thunder.cache_misses(program) == 1


@functions
def test_functions(function):
    def make(ops):
        def program(n, h, y):
            f = function(ops, y.cos())
            return ops.while_loop(lambda i, c: i < n, lambda i, c: (i + 1, f(c * h)), (0, h.exp()))

        return program

    program = jit(make(TORCH))
    for n in (2, 1):
        compare(program, make(PYTHON), (torch.tensor(n), H, Y), (WEIGHT, *LAYER.parameters()))
    assert thunder.cache_misses(program) == 1


@places
def test_inside(place):
    def make(ops):
        def program(n, h, y):
            f = lambda a: ops.while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, (c @ WEIGHT).tanh() * y), (0, a))[1]  # noqa: E731
            return place(ops, f, h.sin()) * y

        return program

    compare(jit(make(TORCH)), make(PYTHON), INPUTS)


def test_names():
    loops = [torch_while_loop] + ([torch.while_loop] if hasattr(torch, "while_loop") else [])
    for loop in loops:
        compare(jit(counted(loop)), counted(PYTHON.while_loop), INPUTS)


def test_the_operator():
    """The flat form, with additional inputs."""

    def cond_fn(i, a, b, y, n):
        return i < n

    def body_fn(i, a, b, y, n):
        return i + 1, a * y + n, b.sin() * a

    def program(n, h, y):
        return torch.ops.higher_order.while_loop(cond_fn, body_fn, (0, h, h.cos()), (y.exp(), 3))

    def expected(n, h, y):
        more = (y.exp(), 3)
        return PYTHON.while_loop(lambda *c: cond_fn(*c, *more), lambda *c: body_fn(*c, *more), (0, h, h.cos()))

    compare(jit(program), expected, INPUTS)


def test_a_list_as_the_carry():
    program = jit(lambda n, h: torch_while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * 2), [0, h]))
    assert_same(program(torch.tensor(3), H.detach()), (3, H.detach() * 8))


@pytest.mark.parametrize("make", (counted, captures), ids=lambda f: f.__name__)
def test_as_eager_pytorch(make):
    inputs = (torch.tensor(3), H.detach(), Y.detach())
    with torch.no_grad():
        assert_same(jit(make(TORCH.while_loop))(*inputs), make(TORCH.while_loop)(*inputs))


class Model(torch.nn.Module):
    def __init__(self, while_loop):
        super().__init__()
        torch.manual_seed(1)
        self.while_loop, self.layer, self.out = while_loop, Layer(), torch.nn.Linear(3, 2).double()

    def forward(self, n, h, y):
        _, h = self.while_loop(self.goes_on, self.step, (n * 0, h))
        return self.out(h) * y.sum(0, keepdim=True)

    def goes_on(self, i, h):
        return (i < 3) & (self.layer.shift.sum() > 0)

    def step(self, i, h):
        return i + 1, self.layer(h)


def test_in_a_module():
    module, expected = Model(TORCH.while_loop), Model(PYTHON.while_loop)
    program = jit(module)
    for _ in range(2):
        compare(program, expected, INPUTS, ())
        assert_same([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])
    assert thunder.cache_misses(program) == 1


def test_compilations():
    """None for another trip count, data or number that is a tensor; one for another shape, or another int."""
    program = jit(lambda i, n, h: torch_while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * 2), (i, h)))
    for start, n, shape, misses in ((0, 3, 3, 1), (0, 100, 3, 1), (0, 0, 3, 1), (0, 3, 4, 2), (1, 3, 3, 3)):
        h = torch.randn(shape)
        assert_same(program(start, torch.tensor(n), h), (max(n, start), h * 2.0 ** max(n - start, 0)))
        assert thunder.cache_misses(program) == misses


def test_the_guard_of_a_number():
    make = a_number_from_an_attribute
    program, expected = jit(make(TORCH.while_loop)), make(PYTHON.while_loop)
    try:
        for start, misses in ((1, 1), (2, 2), (2, 2)):
            STATE["start"] = start
            compare(program, expected, INPUTS)
            assert thunder.cache_misses(program) == misses
    finally:
        STATE["start"] = 1


def test_numbers_that_are_read_from_tensors():
    def make(while_loop):
        def program(n, h, y):
            k = n.item()
            return while_loop(lambda i, c: i < 9, lambda i, c: (i + k, c * y), (k, h))

        return program

    program = jit(make(TORCH.while_loop))
    for n in (3, 2, 1):
        compare(program, make(PYTHON.while_loop), (torch.tensor(n), H, Y))
    assert thunder.cache_misses(program) == 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.complex128), ids=str)
def test_dtypes(dtype):
    def make(while_loop):
        return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c * h + y), (0, h))

    inputs = (torch.tensor(3), *(t.detach().to(dtype).requires_grad_() for t in (H, Y)))
    compare(jit(make(TORCH.while_loop)), make(PYTHON.while_loop), inputs, ())


def test_modes():
    check_modes(jit(counted(TORCH.while_loop)), counted(PYTHON.while_loop), INPUTS)


# Long loops


def bounded(ops):
    return lambda n, h, y: ops.while_loop(lambda i, c: i < n, lambda i, c: (i + 1, (c * y).sin() + h), (0, h))


LENGTHS = (1, MAX_KEPT, MAX_KEPT + 1, 2 * MAX_KEPT, 2 * MAX_KEPT + 1, 1000)


def test_gradients_of_long_loops():
    program = jit(bounded(TORCH))
    for n in LENGTHS:
        compare(program, bounded(PYTHON), (torch.tensor(n), H, Y))
    assert thunder.cache_misses(program) == 1


def test_what_is_kept():
    """The residuals of at most 64 trips, or at most 64 carries: here one tensor for each, and the counter."""
    h = torch.rand(1000, requires_grad=True)
    program = jit(lambda n, h: torch_while_loop(lambda i, c: i < n, lambda i, c: (i + 1, c.sin()), (0, h))[1])
    before = kept_bytes(h)
    for n, stride in ((MAX_KEPT, 1), (MAX_KEPT + 1, 2), (1000, 16)):
        result = program(torch.tensor(n), h)
        assert kept_bytes(h, result) - before <= MAX_KEPT * (h.nbytes + 8)
        (tape,) = (o for o in gc.get_objects() if type(o) is Tape)
        assert tape._stride == stride
        assert len(tape._residuals) == (n if stride == 1 else 0)
        assert len(tape._marks) == (0 if stride == 1 else -(-n // stride))
        del tape
        backward(result)
        assert kept_bytes(h) == before, "after the backward pass"


@pytest.mark.parametrize("random_condition", (False, True))
def test_random_numbers(random_condition):
    """Those of the eager loop, and the gradient has those of the forward pass, also where trips are recomputed."""

    def make(while_loop):
        def body_fn(i, c):
            return i + 1, F.dropout(c * (1 + torch.rand_like(c) / 100), 0.01)

        def program(n, h, y):
            def cond_fn(i, c):
                return (i < n) & (torch.rand(()) < 2) if random_condition else i < n

            return while_loop(cond_fn, body_fn, (0, h))

        return program

    program = jit(make(TORCH.while_loop))
    for n in (3, MAX_KEPT, MAX_KEPT + 1, 200):
        compare(program, make(PYTHON.while_loop), (torch.tensor(n), random_tensor(50, seed=6), Y))


BODIES_OF_RANDOM_LOOPS = {"random": lambda c: F.dropout(c, 0.1), "not_random": torch.sin}


@pytest.mark.parametrize("fn", BODIES_OF_RANDOM_LOOPS.values(), ids=BODIES_OF_RANDOM_LOOPS)
def test_the_backward_pass_leaves_the_random_numbers_alone(fn):
    def cond_fn(i, c):
        return (i < 70) & (torch.rand(()) < 2)

    result = jit(lambda h: torch_while_loop(cond_fn, lambda i, c: (i + 1, fn(c)), (0, h))[1])(H)
    before = torch.get_rng_state()
    backward(result)
    assert torch.equal(torch.get_rng_state(), before)


def test_second_backward():
    def nested(n, h, y):
        f, g = FUNCTIONS["while_loop"](TORCH, y), FUNCTIONS["cond"](TORCH, y)
        return torch_while_loop(lambda i, c: i < n, lambda i, c: (i + 1, g(f(c * h))), (0, h))

    program = jit(nested)
    for n in (3, 100):
        check_second_backward(program, (torch.tensor(n), H, Y))


@pytest.mark.parametrize("index", (1, 2), ids=("init", "capture"))
def test_changed_in_place_before_the_backward_pass(index):
    def make(while_loop):
        return lambda n, h, y: while_loop(lambda i, c: i < n, lambda i, c: (i + 1, (c * y).sin()), (0, h))

    program = jit(make(TORCH.while_loop))
    for n in (3, 100):
        check_changed_in_place(program, make(PYTHON.while_loop), (torch.tensor(n), H, Y), index)


def test_what_the_gradient_does_not_need_may_be_changed():
    program, expected = jit(bounded(TORCH)), bounded(PYTHON)
    for n in (3, 100):
        limit, h, y = fresh((torch.tensor(n), H, Y))
        result = program(limit, h, y)
        limit.add_(1)
        grads = torch.autograd.grad(result[1].sum(), (h, y))
        assert_same(grads, torch.autograd.grad(expected(torch.tensor(n), h, y)[1].sum(), (h, y)))


def test_the_trace(tmp_path):
    program = jit(counted(TORCH.while_loop))
    program(*INPUTS)
    lines = ("cond_fn:", "= ltorch.lt", "body_fn:", "= ltorch.matmul", "return ")
    check_trace(program, "while_loop", lines, tmp_path / "trace.py")


# Misuse: each raise


def goes_on(i, c):
    return i < 3


def body(i, c):
    return i + 1, c * 2


def raises(i, c):
    raise ValueError("no such trip")


def changes_in_place(i, c):
    return i + 1, c.mul_(2)


def sets_an_attribute(i, c):
    HOLDER.factor = c
    return i + 1, c


def appends(i, c):
    SEEN.append(c)
    return i + 1, c


def leaves_no_grad(i, c):
    torch._C._set_grad_enabled(False)
    return i + 1, c


def condition_appends(i, c):
    SEEN.append(c)
    return i < 3


H_PLAIN, SEEN, HOLDER = H.detach().clone(), [], Holder(2.0)
PLACE = r"`[\w.<>]+` \(.*test_while_loop\.py:\d+\)"
FN, COND = rf"`body_fn` {PLACE} of `while_loop`", rf"`cond_fn` {PLACE} of `while_loop`"
WITH = rf"`carried_inputs` of the `while_loop` with {PLACE}"
CARRY = (0, H_PLAIN)
BODIES = {
    "dtype": (
        lambda i, c: (i + 1, c.float()),
        r"gets a torch.float64 tensor of shape \(3,\) on cpu at `\[1\]` of the carry and returns a torch.float32 "
        r"tensor .* there.*convert the result, or the initial value, with `.to",
    ),
    "shape": (lambda i, c: (i + 1, c[:2]), r"gets .*\(3,\).* `\[1\]` .*\(2,\) on cpu there"),
    "an int becomes a float": (lambda i, c: (i * 0.5, c), r"gets a torch.int64 .* returns a torch.float32"),
    "a number": (lambda i, c: (i + 1, 3), r"gets .*\(3,\).* returns the int 3 there"),
    "a bool for an int": (lambda i, c: (True, c), r"gets a torch.int64 .* returns the bool True there"),
    "structure": (
        lambda i, c: (i + 1, [c]),
        r"gets the carry \('\*', '\*'\) and returns \('\*', \['\*'\]\) \(`\*` is a leaf\). Let it return",
    ),
    "no tuple": (lambda i, c: c, r"gets the carry \('\*', '\*'\) and returns \*"),
    "raises": (raises, "raises ValueError: no such trip. It is traced"),
    "in place": (changes_in_place, r"changes a tensor in place \(`mul_`, .*test_while_loop.py:\d+\)"),
    "attribute": (sets_an_attribute, "sets `factor` on an object outside of it"),
    "container": (appends, "changes `SEEN`, which is outside of it.*Return the new value"),
    "grad mode": (leaves_no_grad, "leaves grad mode or autocast changed"),
}
CONDITIONS = {
    "shape": (lambda i, c: c < 3, r"returns a torch.bool tensor of shape \(3,\).*compare, or use `.any\(\)`"),
    "dtype": (lambda i, c: i, "returns a torch.int64 .* must return a bool, or a bool tensor"),
    "number": (lambda i, c: 1, "returns the int 1. It must return a bool"),
    "two": (lambda i, c: (i < 3, i < 2), "returns 2 values. It must return a bool"),
    "nothing": (lambda i, c: (), "returns 0 values. It must return a bool"),
    "effect": (condition_appends, "changes `SEEN`, which is outside of it"),
}
CARRIES = {
    "float": ((2.0, H_PLAIN), rf"{WITH} holds at `\[0\]` the float 2.0. It may hold tensors, ints"),
    "string": ((0, {"k": "a"}), rf"{WITH} holds at `\[1\]\['k'\]` the str 'a'"),
    "tensor": (H_PLAIN, rf"{WITH} is a Tensor.*. Pass a tuple"),
}
MISUSES = {
    **{name: (goes_on, fn, CARRY, f"{FN} {message}") for name, (fn, message) in BODIES.items()},
    **{f"condition: {name}": (fn, body, CARRY, f"{COND} {message}") for name, (fn, message) in CONDITIONS.items()},
    **{f"carry: {name}": (goes_on, body, carry, message) for name, (carry, message) in CARRIES.items()},
    "an int for an int32": (
        goes_on,
        lambda i, c: (0, c),
        (torch.tensor(0, dtype=torch.int32), H_PLAIN),
        rf"{FN} gets a torch.int32 tensor .* returns the int 0 there",
    ),
    "not callable": (goes_on, 3, CARRY, "`while_loop` needs a callable for `body_fn`, but got 3"),
    "condition: not callable": (3, body, CARRY, "`while_loop` needs a callable for `cond_fn`, but got 3"),
}


@pytest.mark.parametrize("cond_fn, body_fn, carry, message", MISUSES.values(), ids=MISUSES)
def test_loops_that_cannot_be(cond_fn, body_fn, carry, message):
    text = error_of(lambda carry: torch_while_loop(cond_fn, body_fn, carry), carry)
    assert re.search(message, text), text


def test_symbolic_values():
    with pytest.raises(HigherOrderError, match="Compile without `cache='symbolic values'`"):
        jit(lambda h: torch_while_loop(goes_on, body, (0, h)), cache="symbolic values")(H_PLAIN)


def test_what_the_condition_raises_is_raised():
    with pytest.raises(ValueError, match="no such trip"):
        jit(lambda i, c: torch_while_loop(raises, lambda i, c: (i + 1, c), (i, c)))(*CARRY)
