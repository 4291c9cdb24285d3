"""Nested tracing against eager PyTorch: callables, captures, arguments, results, effects, caching, errors, levels."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import sys
import threading

import pytest
import torch
from nested_helpers import CALLS, assert_same, check, guards, inlined, jit, plain_call

import thunder
import thunder.nested
import thunder.nested.levels as levels
from thunder.core.interpreter import InterpreterError
from thunder.core.jit_ext import (
    SHARP_EDGES_OPTIONS,
    CompileData,
    compile_data_and_stats,
    get_compile_data,
    interpreter_needs_wrap,
    register_general_jit_lookaside,
    thunder_general_jit,
    unwrap,
    wrap_const,
)

SCALE = 2.0
PARAMETER = torch.nn.Parameter(torch.ones(4))
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


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: torch.Tensor
    items: tuple


class Color(enum.Enum):
    RED = 1
    BLUE = 2


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


def decorated_with_arguments_and_by_a_class(call, x):
    def scaled(scale):
        def decorate(fn):
            @functools.wraps(fn)
            def wrapper(*args, **kwargs):
                return fn(*args, **kwargs) * scale

            return wrapper

        return decorate

    class Shifted:
        def __init__(self, fn):
            self.fn = fn

        def __call__(self, a):
            return self.fn(a) + 1

    @Shifted
    @scaled(3.0)
    @scaled(scale=2.0)
    def body(a):
        return a.sin()

    return call(body, x)


def generator_function(call, x):
    def yields(a):
        yield a
        yield a.sin()
        yield a * x

    return call(lambda a: sum(yields(a)) + torch.stack([a * i for i in range(3) if i]).sum(0), x)


def generator_made_outside(call, x):
    made = (x * i for i in range(3))
    passed = (x.sin() * i for i in range(3))
    return call(lambda a, g: sum(made, a) + sum(g), x, passed)


def generator_resumed_in_three_levels(call, x):
    made = (x.sin() * i * SCALE for i in range(1, 5))

    def body(a):
        with torch.no_grad():
            b = next(made)
        return call(lambda d: next(made) + d, a) + next(made) + b

    return call(body, x * 5) + next(made)


def mutual_recursion(call, x):
    def even(a, n):
        return a if n == 0 else odd(a * 2, n - 1)

    def odd(a, n):
        return a.sin() if n == 0 else even(a + 1, n - 1)

    return call(even, x, 3)


def recursion_through_the_call(call, x):
    def down(a, n):
        return a.sin() if n == 0 else call(down, a * 2, n - 1)

    return call(down, x, 2)


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
    "generator function": generator_function,
    "generator made outside": generator_made_outside,
    "generator resumed in three levels": generator_resumed_in_three_levels,
    "decorated": decorated,
    "decorated with arguments, by a class": decorated_with_arguments_and_by_a_class,
    "mutual recursion": mutual_recursion,
    "recursion through the call": recursion_through_the_call,
    "partial of partial": lambda c, x: c(
        functools.partial(functools.partial(lambda s, a, *, k: a * s + k, 2.0), k=3.0), x
    ),
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
    "dtype compared": lambda c, x: c(lambda a, d: a.double().to(d) * (2 if a.dtype is d else 3), x, x.dtype),
    "device": lambda c, x: c(
        lambda a, d: a + torch.ones(4, device=d) if d == a.device and d.type == "cpu" else a, x, torch.device("cpu")
    ),
    "slices, ellipsis, range": lambda c, x: c(
        lambda a, s, e, r: (a[s] * s[0].start)[e, 0] + sum(r), x, (slice(1, 3), slice(None)), ..., range(3)
    ),
    "size": lambda c, x: c(lambda a, s: a.reshape(s) * 2, x, torch.Size((4, 3))),
    "bool, float, set, enum": lambda c, x: c(
        lambda a, b, f, s, e: a * f if b and "k" in s and e is Color.RED else a, x, True, 2.5, {"k", "l"}, Color.RED
    ),
    "frozen dataclass": lambda c, x: c(lambda b: b.value * b.items[0] * b.items[1], Frozen(x, (x.sin(), 2))),
    "ordered dict in a named tuple": lambda c, x: c(
        lambda p: p.first["k"][0] * p.second.first, Pair(collections.OrderedDict(k=[x]), Pair(x.sin(), None))
    ),
    "positional-only and keyword-only": lambda c, x: c(
        lambda a, b, /, d, *, k=2, m: a * b + d * k * m, x, x.sin(), d=x.cos(), m=3
    ),
    "unpacked": lambda c, x: c(lambda *a, **k: a[0] * k["k"] * k["z"] * len(a) * len(k), *[x, x], **{"k": x, "z": 2}),
    "requires_grad mixed": lambda c, x: c(lambda a, p, d: a * p + d, x, PARAMETER, x.detach()),
    "nested structure": lambda c, x: c(
        lambda d: d["a"] * d["b"][0] + d["b"][1][0], {"a": x, "b": [x.sin(), (x.cos(), 1)]}
    ),
    "named tuple": lambda c, x: c(lambda p: p.first * p.second, Pair(x, x.sin())),
    "dataclass": lambda c, x: c(lambda b: b.value.sin(), Box(x.exp(), "t")),
    "constant tensor made outside": lambda c, x: c(lambda a, b: a + b, x, torch.ones(4)),
    "view": lambda c, x: c(lambda a: a * 2, x.t()),
    "not contiguous": lambda c, x: c(lambda a: (a.reshape(-1) * 2, a.is_contiguous(), a.contiguous()), x.t()),
    "0-dim": lambda c, x: c(lambda a: a * 2, x[0, 0]),
    "0-dim computed": lambda c, x: c(lambda a: (a.reshape(1) * 2, a.ndim), x.sum()),
    "empty": lambda c, x: c(lambda a: a * 2, x[:0]),
    "empty, used": lambda c, x: c(lambda a, b: (torch.cat([a, b]), a.numel(), a.sum(0) + b), x[:0], x),
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
    "device, shape, slice, bool": lambda c, x: (
        lambda d, s, i, b: (x + torch.ones(4, device=d)).reshape(s)[i] * (2 if b else 3)
    )(*c(lambda a: (a.device, a.shape[::-1], slice(0, 2), a.ndim == 2), x)),
    "closure": lambda c, x: (lambda f: f(x) + c(f, x))(c(lambda a: (lambda s: lambda b: b * s)(a.sin()), x)),
    "closure that nests": lambda c, x: c(lambda a: lambda b: c(lambda d: d * a.sin(), b), x)(x),
    "bound method": lambda c, x: c(lambda a: Callable_(a.sin()).method, x)(x),
    "object": lambda c, x: c(lambda a: Callable_(a.sin()), x).scale * 2,
    "argument structure": lambda c, x: c(lambda a, s: s, x, {"k": [x.sin(), 2]})["k"][0] * 2,
}


def table(*cases):
    return pytest.mark.parametrize("program", [pytest.param(p, id=name) for t in cases for name, p in t.items()])


@pytest.mark.parametrize("call", (plain_call, *CALLS))
@table(CALLABLES, CAPTURES, ARGUMENTS, RESULTS)
def test_agrees_with_eager(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)


class Hooked(torch.nn.Module):
    """Hooks before and after, also of the module that is called through the higher-order function."""

    def __init__(self, call):
        super().__init__()
        self.block, self.call = Block(), call
        self.block.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        self.block.linear.register_forward_hook(lambda module, args, output: output * 2 + args[0])

    def forward(self, x):
        return self.call(self.block, x) + self.call(lambda a: self.block.linear(a), x)


def changes_in_place(y, a):
    y.mul_(2)
    return a


def draws(y, a):
    return a + torch.rand(4)


@pytest.mark.parametrize("before", (changes_in_place, draws))
def test_a_generator_made_outside_is_refused_where_the_order_matters(before):
    def program(x):
        y = x * 1
        made = (y * i for i in range(3))
        return inlined(lambda a: before(y, a) + next(made), x)

    with pytest.raises(thunder.nested.CaptureError, match="resumes a generator that was made outside .*Make a list"):
        jit(program)(X)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("module", (Model, Hooked))
def test_module(module, call):
    check(module, (X,), call)


@pytest.mark.parametrize("program", [pytest.param(p, id=n) for t in (CALLABLES, CAPTURES) for n, p in t.items()])
def test_outer_prologue_guards_what_the_inlined_program_guards(program):
    nested, inline = (jit(functools.partial(program, c)) for c in (inlined, plain_call))
    nested(X), inline(X)
    assert guards(nested) == guards(inline)


def test_outer_prologue_of_a_module_guards_what_the_inlined_module_guards():
    nested, inline = jit(Model(inlined)), jit(Model(plain_call))
    nested(X), inline(X)
    assert guards(nested) == guards(inline)


# The shape of the reported script: a lookaside that runs thunder_general_jit itself


def reported(fn, *args, **kwargs):
    return fn(*args, **kwargs)


def register_reported(run):
    """Registers the reported lookaside; ``run(fn, args, kwargs)`` is what it does with the plain function."""

    @register_general_jit_lookaside(reported)
    def _reported(fn, *args, **kwargs):
        def interpreted(*args, **kwargs):
            ufn = unwrap(fn)
            data = CompileData(
                fn=ufn, disable_preprocessing=True, executor_lookasides=get_compile_data().executor_lookasides
            )
            with compile_data_and_stats(data, None):
                return run(ufn, args, kwargs)

        return interpreter_needs_wrap(reported)(wrap_const(interpreted), *args, **kwargs)


def traced(fn, args, kwargs):
    return thunder_general_jit(fn, args, kwargs, sharp_edges=SHARP_EDGES_OPTIONS.ALLOW)


def with_arguments(fn, args, kwargs):
    return traced(fn, args, kwargs).computation_trace.python_callable()(*args)


def with_prologue(fn, args, kwargs):
    results = traced(fn, args, kwargs)
    inputs, to_epilogue = results.prologue_trace.python_callable()(*args, **kwargs)
    assert to_epilogue == ()
    return results.computation_trace.python_callable()(*inputs)


def with_jit(fn, args, kwargs):
    return thunder.jit(fn)(*args, **kwargs)


def with_computation_and_inputs(fn, args, kwargs):
    jitted = thunder.jit(fn)
    entry, inputs, to_epilogue = thunder.compile_data(jitted).get_computation_and_inputs(*args, **kwargs)
    return entry.epilogue_fn(*to_epilogue, *entry.computation_fn(*inputs))


@pytest.mark.parametrize("run", (with_arguments, with_prologue, with_jit, with_computation_and_inputs))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("requires_grad", (True, False))
def test_reported_lookaside(run, dtype, requires_grad):
    register_reported(run)
    jitted = check(
        lambda c: lambda x: (reported if c is not plain_call else c)(lambda a: torch.sin(torch.cos(a)), x),
        (tensor(3, 4, dtype=dtype, requires_grad=requires_grad),),
        reported,
    )
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)
    jitted(tensor(2, 4, dtype=dtype))
    assert thunder.cache_misses(jitted) == 2


@pytest.mark.parametrize("run", (with_prologue, with_jit, with_computation_and_inputs))
def test_reported_lookaside_with_captures(run):
    register_reported(run)

    class Module(torch.nn.Module):
        def __init__(self, call):
            super().__init__()
            self.block = Block()
            self.call = call

        def forward(self, x):
            y = x.exp()
            return self.call(self.block, y) + self.call(lambda a: a @ WEIGHT * y * SCALE, x)

    check(Module, (X,), reported)


@pytest.mark.parametrize("run", (with_prologue, with_jit, with_computation_and_inputs))
def test_what_a_reported_lookaside_read_is_guarded(run, monkeypatch):
    register_reported(run)
    jitted = jit(lambda x: reported(lambda a: a * SCALE + WEIGHT, x))
    x = tensor(4, 4)
    assert_same(jitted(x), x * SCALE + WEIGHT)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert_same(jitted(x), x * 5.0 + WEIGHT)
    monkeypatch.setitem(globals(), "WEIGHT", torch.ones(4))
    assert_same(jitted(x), x * 5.0 + torch.ones(4))


def test_old_form_gives_the_result_itself_and_no_epilogue():
    seen = []

    def run(fn, args, kwargs):
        seen.append(traced(fn, args, kwargs))
        return seen[-1].computation_trace.python_callable()(*args)

    register_reported(run)
    jitted = jit(lambda x: reported(lambda a: {"s": [a.sin(), 2], "c": a}, x))
    result = jitted(X)
    assert_same(result, {"s": [X.sin(), 2], "c": X})
    (results,) = seen
    assert results.epilogue_trace is None
    assert "return {'s': [t0, 2], 'c': a}" in str(results.computation_trace)


def test_new_form_gives_what_the_epilogue_unpacks():
    seen = []

    @register_general_jit_lookaside(reported)
    def _reported(fn, *args, **kwargs):
        executor = levels.current_level().ctx.ad_hoc_executor
        seen.append(
            thunder_general_jit(
                unwrap(fn),
                tuple(unwrap(a) for a in args),
                {},
                sharp_edges=SHARP_EDGES_OPTIONS.ALLOW,
                ad_hoc_executor=executor,
            )
        )
        return args[0]

    jit(lambda x: reported(lambda a: {"s": a.sin()}, x))(X)
    (results,) = seen
    assert "return (t0,)" in str(results.computation_trace)
    assert "return {'s': t0}" in str(results.epilogue_trace)


# Caching


def call_twice(make_program, x, change):
    """Calls a nested program, changes something that it read, calls it again, and compares both with eager."""
    nested, eager = jit(make_program(inlined)), make_program(plain_call)
    assert_same(nested(x), eager(x))
    assert_same(nested(x), eager(x))
    assert (thunder.cache_misses(nested), thunder.cache_hits(nested)) == (1, 1)
    change()
    assert_same(nested(x), eager(x))
    assert thunder.cache_misses(nested) == 2


@pytest.mark.parametrize(
    "name, value", [("factor", 4), ("bias", torch.zeros(1, 4)), ("nested", {"key": [2.0, torch.ones(4)]})]
)
def test_changed_attribute(name, value, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "CONFIG", Config())

    def make(c):
        return lambda x: c(lambda a: a * CONFIG.factor + CONFIG.bias + CONFIG.nested["key"][0], x)

    call_twice(make, tensor(3, 4), lambda: setattr(CONFIG, name, value))


def test_changed_global(monkeypatch):
    call_twice(lambda c: lambda x: c(lambda a: a * SCALE, x), X, lambda: monkeypatch.setitem(globals(), "SCALE", 5.0))


def test_changed_global_tensor_shape(monkeypatch):
    call_twice(
        lambda c: lambda x: c(lambda a: a + WEIGHT[0], x),
        X,
        lambda: monkeypatch.setitem(globals(), "WEIGHT", torch.ones(2, 1)),
    )


def test_changed_closure_cell():
    factor = 2.0

    def change():
        nonlocal factor
        factor = 3.0

    call_twice(lambda c: lambda x: c(lambda a: a * factor, x), X, change)


def test_changed_closure_cell_two_levels_down():
    factor = 2.0

    def change():
        nonlocal factor
        factor = 3.0

    call_twice(lambda c: lambda x: c(lambda a: c(lambda b: b * factor, a), x), X, change)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m.second, "power", 3),
        lambda m: m.second.eval(),
        lambda m: setattr(m.second.linear, "bias", None),
        lambda m: setattr(m.second, "offset", torch.zeros(1)),
    ],
    ids=("attribute", "mode", "parameter", "buffer shape"),
)
def test_changed_module(change):
    """The module is a global, so that the jitted function reads it anew at each call."""
    model = Model(None)
    call_twice(lambda c: lambda x: c(lambda a: model.second(a) * 2, x), X, lambda: change(model))


def test_changed_shape_is_a_miss_and_agrees():
    nested = jit(lambda x: inlined(lambda a: a.sin() * a.shape[0], x))
    for x in (tensor(3, 4), tensor(2, 4), tensor(3, 4)):
        assert_same(nested(x), x.sin() * x.shape[0])
    assert (thunder.cache_misses(nested), thunder.cache_hits(nested)) == (2, 1)


# Depth


@pytest.mark.parametrize("depth", (1, 2, 3, 10))
def test_depth(depth):
    def make(c):
        def down(x, n):
            return x.sin() * WEIGHT[0] if n == 0 else c(lambda a: down(a, n - 1) * n + x, x.cos())

        return lambda x: down(x, depth)

    check(make, (X,), inlined)


def test_lookaside_that_traces_the_function_it_is_registered_for():
    def own(x, n):
        return x.sin() * n

    @thunder.nested.lookaside(own)
    def _own(x, n):
        return thunder.nested.trace(own, x, n).inline()

    assert_same(jit(lambda x: own(x, 3) + own(x.cos(), 2))(X), X.sin() * 3 + X.cos().sin() * 2)


def test_lookaside_that_traces_the_method_it_is_registered_for():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).sin()

    @thunder.nested.lookaside(Layer.forward)
    def _forward(self, x):
        return thunder.nested.trace(Layer.forward, self, x).inline()

    model = torch.nn.Sequential(Layer(), Layer())
    assert_same(jit(model)(X), model(X))


# Exceptions


class UserError(Exception):
    pass


def raises_after_work(a):
    b = a.sin()
    raise UserError(f"shape {tuple(b.shape)}")


def caught(c, x):
    try:
        y = c(raises_after_work, x)
    except UserError as error:
        y = x * len(str(error))
    return y + c(lambda a: a.cos(), x)


def caught_two_levels_up(c, x):
    try:
        y = c(lambda a: c(raises_after_work, a * 2) + 1, x)
    except UserError:
        y = x.exp()
    return y * c(lambda a: a * y, x)


def caught_with_effects(c, x):
    seen = [x]

    def body(a):
        seen.append(a)
        raise UserError("late")

    try:
        c(body, x)
    except UserError:
        pass
    return c(lambda a: a * len(seen), x), seen


def tensor_in_the_exception(c, x):
    def body(a):
        raise UserError("late", a.sin())

    try:
        c(body, x)
    except UserError as error:
        return error.args[1] * 2


def wrong_shape_caught(c, x):
    try:
        y = c(lambda a: a @ a, x)
    except RuntimeError:
        y = x * 2
    return y.sin()


def finally_and_else(c, x):
    trail = []
    for fn in (raises_after_work, lambda a: a.sin()):
        try:
            x = c(fn, x)
        except UserError:
            trail.append("except")
        else:
            trail.append("else")
        finally:
            trail.append("finally")
    return x, trail


def uncaught(c, x):
    return c(raises_after_work, x)


EXCEPTIONS = (
    caught,
    caught_two_levels_up,
    caught_with_effects,
    tensor_in_the_exception,
    wrong_shape_caught,
    finally_and_else,
    uncaught,
)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("program", EXCEPTIONS, ids=lambda f: f.__name__)
def test_exceptions(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)


def test_an_error_of_the_interpreter_is_wrapped_once():
    """Each level would wrap it once more; the program cannot catch it, nested or not."""

    def unsupported(a):
        raise_in_the_interpreter(a)

    def raise_in_the_interpreter(a):
        return a

    @register_general_jit_lookaside(raise_in_the_interpreter)
    def _raise(a):
        raise AssertionError("in the interpreter itself")

    def catching(c):
        def run(x):
            try:
                return c(lambda a: c(unsupported, a), x)
            except AssertionError:
                return x

        return run

    with pytest.raises(InterpreterError) as error:
        jit(catching(inlined))(X)
    assert isinstance(error.value.__cause__, AssertionError | InterpreterError)
    causes = []
    cause = error.value
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__
    assert causes.count(InterpreterError) <= 2 and causes[-1] is AssertionError


# Threads


def test_two_threads_trace_nested_programs_at_once():
    def program(x):
        y = x.exp()
        return inlined(lambda a: inlined(lambda b: b * a + y, a.sin()) * CONFIG.factor, x)

    inputs = [tensor(3, 4, seed=i) for i in range(2)]
    results, barrier = [None, None], threading.Barrier(2)

    def work(i):
        barrier.wait()
        results[i] = [jit(program)(inputs[i]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, found in zip(inputs, results):
        y = x.exp()
        for result in found:
            assert_same(result, (x.sin() * x + y) * CONFIG.factor)
