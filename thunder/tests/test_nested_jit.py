"""Nested tracing against eager PyTorch: callables, captures, arguments, results, effects, caching, errors, levels."""

from __future__ import annotations

import collections
import dataclasses
import functools

import pytest
import torch
from nested_helpers import CALLS, check, guards, inlined, jit, plain_call

SCALE = 2.0
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


class Config:
    def __init__(self):
        self.factor = 3
        self.bias = torch.full((4,), 0.5)
        self.nested = {"key": [1.0, torch.full((4,), 2.0)]}


CONFIG = Config()
Pair = collections.namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Box:
    value: torch.Tensor
    tag: str


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.power = 2
        self.absent = None

    def forward(self, x, *, shift=0):
        y = self.linear(x) ** self.power + self.offset + shift
        return y if self.absent is None else y * self.absent


class Model(torch.nn.Module):
    """Blocks called through the higher-order function, one of them shared between the levels."""

    def __init__(self, call):
        super().__init__()
        self.first, self.second = Block(), Block()
        self.call = call

    def forward(self, x):
        y = x.exp()
        z = self.call(self.first, y, shift=1)
        w = self.call(lambda a: self.second(a) * y + self.first.linear.weight.sum(0), z.tanh())
        return w + self.first(x)


class Callable_:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def method(self, x):
        return x + self.scale

    @staticmethod
    def static(x):
        return x.cos()

    @classmethod
    def of_class(cls, x):
        return x.sin()


def tensor(*shape, seed=0, dtype=torch.float32, requires_grad=True):
    t = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return t.requires_grad_(requires_grad)


def recursive(x, n):
    return x if n == 0 else recursive(x.sin() * 2, n - 1)


def closure_over_closure(call, x):
    y = x.exp()

    def outer(a):
        z = a * y

        def inner(b):
            return b + z * y

        return call(inner, a)

    return call(outer, x)


def generator_consumed(call, x):
    def body(a):
        return sum(a * i for i in range(3)) + sum(t for t in (a, a.cos()))

    return call(body, x)


def decorated(call, x):
    def twice(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return fn(*args) * 2

        return wrapper

    @twice
    def body(a):
        return a.sin()

    return call(body, x)


def default_arguments(call, x):
    y = x.exp()
    return call(lambda a, b=y, *, c=3: a * b + c, x)


X = tensor(3, 4)

CALLABLES = {
    "lambda": lambda c, x: c(lambda a: torch.sin(torch.cos(a)), x),
    "torch function": lambda c, x: c(torch.nn.functional.softmax, x, dim=-1),
    "opaque torch function": lambda c, x: c(torch.sin, x),
    "tensor method": lambda c, x: c(torch.Tensor.cos, x),
    "bound tensor method": lambda c, x: c(x.mul, x.exp()),
    "twice in a row": lambda c, x: c(torch.sin, c(torch.sin, x)),
    "same function twice": lambda c, x: (lambda f: c(f, x) + c(f, x.cos()))(lambda a: a.exp() * WEIGHT[0]),
    "callable object": lambda c, x: c(Callable_(3.0), x),
    "bound method": lambda c, x: c(Callable_(3.0).method, x),
    "static method": lambda c, x: c(Callable_.static, x),
    "class method": lambda c, x: c(Callable_.of_class, x),
    "partial": lambda c, x: c(functools.partial(lambda s, a: a * s, 3.0), x),
    "recursion": lambda c, x: c(recursive, x, 3),
    "closure over closure": closure_over_closure,
    "generator": generator_consumed,
    "decorated": decorated,
    "nested call": lambda c, x: c(lambda a: c(lambda b: c(lambda d: d * a + x, b).cos(), a.sin()), x),
}

CAPTURES = {
    "global tensor": lambda c, x: c(lambda a: a @ WEIGHT, x),
    "global number": lambda c, x: c(lambda a: a * SCALE, x),
    "attribute": lambda c, x: c(lambda a: a * CONFIG.factor + CONFIG.bias, x),
    "attribute of attribute": lambda c, x: c(lambda a: a * CONFIG.nested["key"][0] + CONFIG.nested["key"][1], x),
    "outer intermediate": lambda c, x: (lambda y: c(lambda a: a * y, x))(x.exp()),
    "outer input": lambda c, x: c(lambda a: a * x, x.sin()),
    "default argument": default_arguments,
    "list of intermediates": lambda c, x: (lambda ys: c(lambda a: torch.cat([a, *ys]), x))([x.sin(), x.cos()]),
    "dict of intermediates": lambda c, x: (lambda d: c(lambda a: sum(d.values(), a), x))({"s": x.sin(), "c": x.cos()}),
    "attribute of a local object": lambda c, x: (lambda o: c(lambda a: a * o.value, x))(Box(x.sin(), "t")),
    "shape of an intermediate": lambda c, x: (lambda y: c(lambda a: a * y.shape[0] + y.ndim, x))(x.sum(0)),
}

ARGUMENTS = {
    "keyword": lambda c, x: c(lambda a, *, k, s=2: a * k + s, x, k=x.sin()),
    "star": lambda c, x: c(lambda *a, **k: a[0] * a[1] + k["z"], x, x.sin(), z=x.cos()),
    "same tensor twice": lambda c, x: c(lambda a, b: a * b + (1 if a is b else 2), x, x),
    "number, string, None": lambda c, x: c(
        lambda a, n, s, o: a * n if s == "mul" and o is None else a, x, 3, "mul", None
    ),
    "dtype": lambda c, x: c(lambda a, d: a.to(d), x, torch.float64),
    "slice": lambda c, x: c(lambda a, s: a[s] * 2, x, slice(1, 3)),
    "nested structure": lambda c, x: c(
        lambda d: d["a"] * d["b"][0] + d["b"][1][0], {"a": x, "b": [x.sin(), (x.cos(), 1)]}
    ),
    "named tuple": lambda c, x: c(lambda p: p.first * p.second, Pair(x, x.sin())),
    "dataclass": lambda c, x: c(lambda b: b.value.sin(), Box(x.exp(), "t")),
    "constant tensor made outside": lambda c, x: c(lambda a, b: a + b, x, torch.ones(4)),
    "view": lambda c, x: c(lambda a: a * 2, x.t()),
    "0-dim": lambda c, x: c(lambda a: a * 2, x[0, 0]),
    "empty": lambda c, x: c(lambda a: a * 2, x[:0]),
}

RESULTS = {
    "tuple": lambda c, x: c(lambda a: (a.sin(), a.cos()), x),
    "list": lambda c, x: c(lambda a: [a.sin(), [a.cos(), 1]], x),
    "dict": lambda c, x: c(lambda a: {"s": a.sin(), "n": 2, "t": ("x", None)}, x),
    "input": lambda c, x: c(lambda a: a, x) * 2,
    "capture": lambda c, x: c(lambda a: WEIGHT, x) @ x.t(),
    "intermediate capture": lambda c, x: (lambda y: c(lambda a: (y, a, y), x)[2])(x.exp()),
    "number": lambda c, x: x * c(lambda a: a.shape[0] + 1, x),
    "no tensor": lambda c, x: (c(lambda a: None, x), x.sin())[1],
    "string": lambda c, x: (c(lambda a: "name", x), x.sin()),
    "named tuple": lambda c, x: (lambda p: p.first * p.second)(c(lambda a: Pair(a.sin(), a), x)),
    "dataclass": lambda c, x: (lambda b: b.value if b.tag == "t" else x)(c(lambda a: Box(a.sin(), "t"), x)),
    "same tensor twice": lambda c, x: (lambda r: r[0] * (2 if r[0] is r[1] else 3))(c(lambda a: [a.sin()] * 2, x)),
    "dtype": lambda c, x: x.to(c(lambda a: torch.float64, x)),
}


def table(*cases):
    return pytest.mark.parametrize("program", [pytest.param(p, id=name) for t in cases for name, p in t.items()])


@pytest.mark.parametrize("call", (plain_call, *CALLS))
@table(CALLABLES, CAPTURES, ARGUMENTS, RESULTS)
def test_agrees_with_eager(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)


@pytest.mark.parametrize("call", CALLS)
def test_module(call):
    check(Model, (X,), call)


@pytest.mark.parametrize("program", [pytest.param(p, id=n) for t in (CALLABLES, CAPTURES) for n, p in t.items()])
def test_outer_prologue_guards_what_the_inlined_program_guards(program):
    nested, inline = (jit(functools.partial(program, c)) for c in (inlined, plain_call))
    nested(X), inline(X)
    assert guards(nested) == guards(inline)


def test_outer_prologue_of_a_module_guards_what_the_inlined_module_guards():
    nested, inline = jit(Model(inlined)), jit(Model(plain_call))
    nested(X), inline(X)
    assert guards(nested) == guards(inline)
