"""``torch.func``: values and gradients of ``grad``, ``vjp`` and ``jvp`` as of eager PyTorch, and their errors."""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from nested_helpers import assert_same, backward, fresh, inlined, jit, tensors
from operator_cases import Square
from torch.func import functional_call, grad, grad_and_value, jvp, vjp
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

import thunder
from thunder.nested import NestedTracingError
from thunder.torch.higher_order.common import HigherOrderError


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, W = random(3, 4, seed=0).requires_grad_(), random(4, seed=1).requires_grad_(), random(4, 4, seed=2)
INDICES = torch.tensor([0, 2, 2])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.register_buffer("s", torch.full((4,), 2.0))
        self.double()

    def forward(self, x):
        return self.b(F.gelu(self.a(x))) * self.s


NET = Net()
PARAMETERS = {k: p.detach().clone() for k, p in NET.named_parameters()}
CONV = torch.nn.Conv1d(3, 2, 2).double()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class State:
    last = None


def net_loss(p, x):
    return functional_call(NET, p, x).square().mean()


def partly_constant(a):
    with torch.no_grad():
        c = a**2
    return (a - c).sum()


MADE_OUTSIDE = grad(lambda a: (a.cos() * Y.detach()).sum())
LOSS_GRADIENT = grad(net_loss)


def outer_no_grad(x, y):
    with torch.no_grad():
        g = grad(partly_constant)(x)
    return g * y


def raises(x, y):
    def f(a):
        raise ValueError("no")

    try:
        return grad(f)(x)
    except ValueError:
        return x * 2


def step(x, y):
    """One step of gradient descent, whose result is differentiated."""
    parameters = dict(NET.named_parameters())
    gradients = LOSS_GRADIENT(parameters, x)
    return functional_call(NET, {k: p - 0.1 * gradients[k] for k, p in parameters.items()}, x)


def vjp_of_structures(x, y):
    def f(d):
        return {"o": d["a"] * d["b"], "p": [d["a"] + 1, d["a"] + 1]}, d["a"].exp()

    out, pull, aux = vjp(f, {"a": x, "b": y}, has_aux=True)
    return out, pull({"o": x, "p": [x.sin(), x]}), aux


def vjp_twice(x, y):
    out, pull = vjp(lambda a, b: (a * b).sin(), x, y)
    return out, pull(out * 2), pull(out)


def vjp_of_one_output_twice(x, y):
    out, pull = vjp(lambda a: (a, a, a * 2), x)
    return out, pull((x.sin(), x.cos(), x))


def vjp_draws_once(x, y):
    out, pull = vjp(lambda a: F.dropout(a, 0.5), x)
    return out, pull(x), pull(y.expand(3, 4))


def nested(x, y):
    return grad(lambda a: a * grad(lambda b: b * b * a * y[2])(a))(y[1])


def inner_function(x, y):
    return inlined(lambda a: grad(lambda b: (b * a * y).sum().sin())(a), x.sin())


def in_a_region(x, y):
    region = torch.compiler.nested_compile_region(lambda a, b: grad(lambda c: (c.sin() * b).sum())(a) * b)
    return region(region(x, y), y)


def of_a_region(x, y):
    region = torch.compiler.nested_compile_region(lambda a: a.sin() * y)
    return grad(lambda a: region(region(a)).sum())(x)


CASES = {
    "grad": lambda x, y: grad(lambda a: (a.sin() * y).sum())(x),
    "of a function of torch": lambda x, y: grad(torch.sin)(y[0]),
    "intermediate": lambda x, y: grad(lambda a: (a.sin() * y.exp()).sum())(x.cos() * y),
    "captures what it is given": lambda x, y: grad(lambda a: (a * x).sum())(x),
    "gets what it is given": lambda x, y: grad(lambda a, b: (a * b).sum())(x, x),
    "both get the same": lambda x, y: grad(lambda a, b: (a * b.sin()).sum(), argnums=(0, 1))(x, x),
    "grad of grad": lambda x, y: grad(grad(lambda a: a.sin() * y[1]))(y[0]),
    "third": lambda x, y: grad(grad(grad(lambda a: a**4)))(y[1]),
    "nested": nested,
    "argnums": lambda x, y: grad(lambda a, b: (a.sin() * b).sum().tanh(), argnums=(1, 0))(x, y),
    "last argnum": lambda x, y: grad(lambda a, b: (a * b).sum(), argnums=-1)(x, y),
    "keyword": lambda x, y: grad(lambda a, k=None: (a * k).sum())(x, k=y),
    "default": lambda x, y: grad(lambda a, k=y: (a * k).sum())(x),
    "partial": lambda x, y: grad(functools.partial(net_loss, PARAMETERS))(x),
    "made outside": lambda x, y: MADE_OUTSIDE(x[0]),
    "aux": lambda x, y: grad(lambda a: ((a**3).sum(), a.exp()), has_aux=True)(x * 2),
    "aux of structures": lambda x, y: grad_and_value(
        lambda a: ((a**3).sum(), {"k": [a.exp(), a, y], "p": (a, x)}), has_aux=True
    )(x * 2),
    "aux that is the value": lambda x, y: grad(lambda a: (lambda s: (s, s))((a**3).sum()), has_aux=True)(x),
    "structure": lambda x, y: grad(lambda d: (d["a"][0] * d["b"]).sum().sin())({"a": [x], "b": y}),
    "named tuple": lambda x, y: tuple(grad(lambda p: (p.first * p.second).sum())(Pair(x, y))),
    "unused": lambda x, y: grad(lambda a, b: (a * 2).sum(), argnums=(0, 1))(x.detach(), y.detach()),
    "constant": lambda x, y: grad(lambda a: y.sum())(x),
    "without gradient": lambda x, y: grad(lambda a: a.argmax())(x),
    "identity": lambda x, y: grad(lambda a: a)(y[0]),
    "asks for requires_grad": lambda x, y: grad(lambda a: (a * 2).sum() if a.requires_grad else a.sum())(x.detach()),
    "no_grad inside": lambda x, y: grad(partly_constant)(x),
    "no_grad outside": outer_no_grad,
    "module": lambda x, y: grad(lambda a: NET(a).pow(2).sum())(x),
    "module as an argument": lambda x, y: grad(lambda a, m: m(a).pow(2).sum())(x, NET),
    "parameters": lambda x, y: grad(lambda p: functional_call(NET, p, x).square().mean())(dict(NET.named_parameters())),
    "parameters from outside": lambda x, y: LOSS_GRADIENT(PARAMETERS, x),
    "step": step,
    "exception": raises,
    "dropout": lambda x, y: grad_and_value(lambda a: F.dropout(a, 0.5).sin().sum())(x),
    "maximum": lambda x, y: grad(lambda a: a.amax(-1).sum())(x),
    "softmax": lambda x, y: grad(lambda a: (a.softmax(-1) * y).sum())(x),
    "layer norm": lambda x, y: grad(lambda a: F.layer_norm(a, (4,), y).square().sum())(x),
    "convolution": lambda x, y: grad(lambda a: CONV(a[None]).square().sum())(x),
    "cross entropy": lambda x, y: grad(lambda a: F.cross_entropy(a, INDICES))(x),
    "cross entropy, sum": lambda x, y: grad(lambda a: F.cross_entropy(a * y, INDICES, reduction="sum", ignore_index=0))(
        x
    ),
    "embedding": lambda x, y: grad(lambda a: F.embedding(INDICES, a).square().sum())(x),
    "embedding with padding": lambda x, y: grad(lambda a: F.embedding(INDICES, a, padding_idx=0).square().sum())(x),
    "detach": lambda x, y: grad(lambda a: (a * a.detach().sin() * y.detach()).sum())(x),
    "next to an autograd.Function": lambda x, y: grad(lambda a: (a * y).square().sum())(x) * Square.apply(x),
    "inner function": inner_function,
    "in a region": in_a_region,
    "of a region": of_a_region,
    "vjp": vjp_twice,
    "vjp of structures": vjp_of_structures,
    "vjp of one output twice": vjp_of_one_output_twice,
    "vjp draws once": vjp_draws_once,
    "vjp with another dtype": lambda x, y: vjp(torch.sin, x)[1](x.float()),
    "jvp": lambda x, y: jvp(lambda a, b: (a * b).sin(), (x, y), (x.exp(), y.cos())),
    "jvp of structures": lambda x, y: jvp(
        lambda d, b: {"r": [d["k"] @ b, d["k"].sum()], "c": b}, ({"k": x}, y), ({"k": x.exp()}, y.cos())
    ),
    "jvp with aux": lambda x, y: jvp(lambda a: (a.sin(), a.cos()), (x,), (x.exp(),), has_aux=True),
    "jvp of a constant": lambda x, y: jvp(lambda a: W * 1.0, (x.detach(),), (x.detach(),)),
    "jvp of a module": lambda x, y: jvp(NET, (x,), (x.exp(),)),
    "jvp with another dtype": lambda x, y: jvp(torch.sin, (x,), (x.float(),)),
    "jvp of grad": lambda x, y: jvp(grad(lambda a: (a**3 * y).sum()), (x,), (x.exp(),)),
    "vjp of grad": lambda x, y: vjp(grad(lambda a: (a**3 * y).sum().exp()), x)[1](x.exp()),
    "grad of jvp": lambda x, y: grad(lambda a: jvp(torch.sin, (a,), (y.expand(3, 4),))[1].sum())(x),
    "grad of vjp": lambda x, y: grad(lambda a: vjp(torch.sin, a)[1](y.expand(3, 4))[0].sum())(x),
}


def run(program, inputs):
    """The result, and the gradients of the inputs and of the module's parameters."""
    NET.zero_grad()
    torch.manual_seed(0)
    inputs = fresh(inputs)
    result = program(*inputs)
    backward(result)
    return (
        result,
        [t.grad for t in tensors(inputs)],
        [None if p.grad is None else p.grad.clone() for p in NET.parameters()],
    )


def assert_as_eager(program, inputs, **options):
    jitted = jit(program, **options)
    for _ in range(2):
        for actual, expected in zip(run(jitted, inputs), run(program, inputs)):
            assert_same(actual, expected)
    return jitted


@pytest.mark.parametrize("program", CASES.values(), ids=CASES)
def test_as_eager(program):
    """Also the gradients of the results, which are second derivatives."""
    assert_as_eager(program, (X, Y))


FIRST = {
    **{name: CASES[name] for name in ("grad", "grad of grad", "parameters", "vjp", "jvp", "step", "dropout")},
    "aux whose gradient is not finite": lambda x, y: grad(lambda a: (a.sum(), (a * 0).sqrt()), has_aux=True)(x),
}


@pytest.mark.parametrize("program", FIRST.values(), ids=FIRST)
def test_inputs_without_gradients(program):
    assert_as_eager(program, (X.detach(), Y.detach()))


def test_of_checkpoint():
    """Eager PyTorch cannot do this; the recomputation changes nothing."""

    def program(x, y):
        return grad(lambda a: checkpoint(lambda b: F.dropout(b.sin().exp(), 0.5) * y, a, use_reentrant=False).sum())(x)

    def without(x, y):
        return grad(lambda a: (F.dropout(a.sin().exp(), 0.5) * y).sum())(x)

    for actual, expected in zip(run(jit(program), (X, Y)), run(without, (X, Y))):
        assert_same(actual, expected)


@pytest.mark.parametrize("sign", (1, -1))
def test_of_cond(sign):
    """Eager PyTorch compiles ``torch.cond`` and cannot do this."""

    def program(x, y):
        return grad(lambda a: torch.cond(y.sum() > 0, lambda b: b.sin(), lambda b: b.cos() * y, (a,)).sum())(x)

    x, y = X.detach(), Y.detach().abs() * sign
    assert_same(jit(program)(x, y), x.cos() if sign > 0 else -x.sin() * y)


def test_of_autograd_function():
    """Eager PyTorch demands a ``setup_context``; the program's own backward is the first derivative."""
    x = X.detach()
    assert_same(jit(lambda x: grad(lambda a: Square.apply(a).sin().sum())(x))(x), 2 * x * (x * x).cos())


#
# The meaning in plain Python
#


def leaves_of(values):
    flat, spec = tree_flatten(values)
    flat = [t.detach().requires_grad_() for t in flat]
    return flat, tree_unflatten(flat, spec), spec


def python_grad_and_value(func):
    """The meaning of ``grad_and_value``, for results that are not differentiated."""

    def wrapper(arg, *args, **kwargs):
        flat, arg, spec = leaves_of(arg)
        value = func(arg, *args, **kwargs)
        return tree_unflatten(torch.autograd.grad(value, flat), spec), value.detach()

    return wrapper


def python_vjp(func, *primals):
    """The meaning of ``vjp``, likewise."""
    flat, primals, spec = leaves_of(primals)
    output = func(*primals)
    return output.detach(), lambda v: tree_unflatten(torch.autograd.grad(output, flat, v, retain_graph=True), spec)


def python_jvp(func, primals, tangents):
    """The meaning of ``jvp``, likewise, for tensors."""
    flat, primals, _ = leaves_of(primals)
    output = func(*primals)
    zeros = torch.zeros_like(output).requires_grad_()
    pulled = torch.autograd.grad(output, flat, zeros, create_graph=True)
    return output.detach(), torch.autograd.grad(pulled, zeros, tangents)[0]


MEANINGS = {
    "grad_and_value": (grad_and_value, python_grad_and_value, lambda g: lambda x, y: g(net_loss)(PARAMETERS, x)),
    "vjp": (vjp, python_vjp, lambda v: lambda x, y: v(lambda a, b: a.sin() * b, x, y)[1](x)),
    "jvp": (jvp, python_jvp, lambda j: lambda x, y: j(lambda a, b: a.sin() * b, (x, y), (x.exp(), y))),
}


@pytest.mark.parametrize("operator, meaning, make", MEANINGS.values(), ids=MEANINGS)
def test_meaning(operator, meaning, make):
    inputs = X.detach(), Y.detach()
    assert_same(jit(make(operator))(*inputs), make(meaning)(*inputs))


#
# Errors
#

ERRORS = {
    "no scalar": lambda x, y: grad(lambda a: a.sin())(x),
    "no tensor": lambda x, y: grad(lambda a: 3.0)(x),
    "a tuple": lambda x, y: grad(lambda a: (a.sum(), a))(x),
    "no aux": lambda x, y: grad(lambda a: a.sum(), has_aux=True)(x),
    "aux that is no tensor": lambda x, y: grad(lambda a: (a.sum(), 3), has_aux=True)(x),
    "argnum": lambda x, y: grad(lambda a: a.sum(), argnums=3)(x),
    "argnum that is no int": lambda x, y: grad(lambda a: a.sum(), argnums="a")(x),
    "no argnum": lambda x, y: grad(lambda a: a.sum(), argnums=())(x),
    "argnum twice": lambda x, y: grad(lambda a: a.sum(), argnums=(0, 0))(x),
    "no argument": lambda x, y: grad(lambda: x.sum())(),
    "argument that is no tensor": lambda x, y: grad(lambda a: a.sum())(3.0),
    "argument that holds a number": lambda x, y: grad(lambda a: a[0].sum())([x, 3.0]),
    "integer argument": lambda x, y: grad(lambda a: a.sum())(x.long()),
    "vjp of None": lambda x, y: vjp(lambda a: None, x),
    "vjp of a number": lambda x, y: vjp(lambda a: (a, 3.0), x),
    "vjp of an integer": lambda x, y: vjp(lambda a: a.long(), x),
    "vjp, no aux": lambda x, y: vjp(lambda a: a, x, has_aux=True),
    "vjp, other structure": lambda x, y: vjp(lambda a: (a, a), x)[1](x),
    "vjp, other shape": lambda x, y: vjp(lambda a: a.sin(), x)[1](y),
    "jvp, other structure": lambda x, y: jvp(lambda a: a.sin(), (x,), x),
    "jvp, no tuple": lambda x, y: jvp(lambda a: a.sin(), x, x),
    "jvp, a number": lambda x, y: jvp(lambda a: a.sin(), (x, 3.0), (x, 3.0)),
    "jvp, nothing": lambda x, y: jvp(lambda: x.sin(), (), ()),
    "jvp, other shape": lambda x, y: jvp(lambda a: a.sin(), (x,), (y,)),
}


@pytest.mark.parametrize("program", ERRORS.values(), ids=ERRORS)
def test_errors_of_eager(program):
    with pytest.raises(Exception) as expected:
        program(X, Y)
    with pytest.raises(Exception) as actual:
        jit(program)(X, Y)
    assert (type(actual.value), str(actual.value)) == (type(expected.value), str(expected.value))


def sets_an_attribute(x, y):
    state = STATE

    def f(a):
        state.last = a.detach()
        return a.sum()

    return grad(f)(x)


def sets_a_cell(x, y):
    last = None

    def f(a):
        nonlocal last
        last = a
        return a.sum()

    return grad(f)(x), last


def appends(x, y):
    seen = []

    def f(a):
        seen.append(a)
        return a.sum()

    return vjp(f, x)[0]


def in_place(x, y):
    return jvp(lambda a: a.clone().mul_(2), (x,), (x,))


def batch_norm(x, y):
    return grad(lambda a: NORM(a).square().sum())(x)


STATE = State()
NORM = torch.nn.BatchNorm1d(4).double()
FORBIDDEN = {
    sets_an_attribute: "sets `last` on an object outside of it",
    sets_a_cell: "changes `last`, which is outside of it",
    appends: "changes `seen`, which is outside of it",
    in_place: r"changes a tensor in place \(`mul_`",
    batch_norm: "changes a tensor in place",
}


@pytest.mark.parametrize("program, message", FORBIDDEN.items(), ids=lambda p: getattr(p, "__name__", ""))
def test_effects_are_forbidden(program, message):
    with pytest.raises(HigherOrderError, match=rf"{program.__name__}.*test_func.py:\d+.*{message}.*has_aux=True"):
        jit(program)(X.detach(), Y)
    assert STATE.last is None
    assert NORM.num_batches_tracked == 0


def test_no_callable():
    with pytest.raises(HigherOrderError, match=r"`torch.func.grad` needs a callable for `func`, but got 3"):
        jit(lambda x: grad(3)(x))(X)


def test_no_gradient_rule():
    """An operation whose gradient thunder does not know raises; it is not taken for a constant."""
    with pytest.raises(HigherOrderError, match=r"<lambda>.*test_func.py.* cannot be differentiated: .*cummax"):
        jit(lambda x: grad(lambda a: grad(lambda b: torch.cummax(b, 0)[0].sum())(a).sum())(x))(X[:, 0].detach())


def test_vjp_in_another_level():
    def program(x):
        out, pull = vjp(torch.sin, x)
        return inlined(lambda v: pull(v), out)

    with pytest.raises(HigherOrderError, match=r"`torch.func.vjp` of `.*sin`.*Call it in the function that has called"):
        jit(program)(X)


MISSING = ("jacrev", "jacfwd", "hessian", "linearize", "functionalize", "rearrange", "debug_unwrap")
OF_MODULES = ("stack_module_state", "replace_all_batch_norm_modules_")


@pytest.mark.parametrize("name", (*MISSING, *OF_MODULES))
def test_what_is_missing(name):
    transform = getattr(torch.func, name)
    argument = {"rearrange": X, "debug_unwrap": X, "stack_module_state": [NET]}.get(name)
    if argument is None:
        argument = NET if name in OF_MODULES else torch.sin
    with pytest.raises(NestedTracingError, match=f"`torch.func.{name}`.* is not possible under `thunder.jit`"):
        jit(lambda x: (transform(argument, x), x))(X)


def test_every_public_name():
    """Those of torch.func that are not listed as missing work, or are the work of another module."""
    others = {"grad", "grad_and_value", "vjp", "jvp", "functional_call", "vmap"}
    assert set(torch.func.__all__) <= {*MISSING, *OF_MODULES, *others}


def test_guards():
    """What the function reads is guarded; a call with the same is no new program."""
    settings = types.SimpleNamespace(scale=2.0)
    program = lambda x: grad(lambda a: (a.sin() * settings.scale).sum())(x)  # noqa: E731
    jitted = jit(program)
    for scale in (2.0, 2.0, 3.0):
        settings.scale = scale
        assert_same(jitted(X), program(X))
    assert thunder.cache_misses(jitted) == 2


def test_is_one_program():
    """The gradient's operations are in the program's trace, without what is not needed."""
    trace = str(thunder.last_traces(assert_as_eager(CASES["grad"], (X.detach(), Y.detach())))[-1])
    assert "cos" in trace and "torch.sum" not in trace
