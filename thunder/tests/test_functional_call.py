"""``torch.func.functional_call``: as eager PyTorch, and as its meaning in plain Python; the module stays as it was."""

from __future__ import annotations

import functools
import re
import warnings
from types import MappingProxyType

import pytest
import torch
from nested_helpers import assert_same, backward, fresh, inlined, jit, tensors
from torch.func import functional_call
from torch.nn.utils import stateless

import thunder
from thunder.torch.higher_order.common import HigherOrderError

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def meaning(module, dicts, args=(), kwargs=MappingProxyType({}), *, tie_weights=True, strict=False):
    """The meaning of ``functional_call``, without ties and checks."""
    given = {k: v for d in dicts for k, v in d.items()} if isinstance(dicts, (tuple, list)) else dicts
    own = {}
    try:
        for name, tensor in given.items():
            own[name] = exchange(module, name, tensor)
        return module(*args, **kwargs) if isinstance(args, tuple) else module(args, **kwargs)
    finally:
        for name in own:
            given[name] = exchange(module, name, own[name])


def exchange(module, name, tensor):
    *path, last = name.split(".")
    owner = module.get_submodule(".".join(path))
    members = owner._parameters if last in owner._parameters else owner._buffers
    members[last], old = tensor, members[last]
    return old


class Net(torch.nn.Module):
    def __init__(self, device=None):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(4, 4, device=device)
        self.norm = torch.nn.BatchNorm1d(4, device=device)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, device=device) for _ in range(2))
        self.scale = torch.nn.Parameter(torch.ones(4, device=device))
        self.register_buffer("shift", torch.full((4,), 0.5, device=device))
        self.double()

    def forward(self, x, power=1):
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x**power + self.shift


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (torch.nn.Linear(4, 4) for _ in range(3))
        self.b.weight = self.a.weight
        self.register_buffer("s", torch.ones(4))
        self.double()
        self.register_buffer("t", self.s)

    def forward(self, x):
        return self.b(self.a(x).sin()) * self.s + self.c(x) * self.t


def given(module, seed=1):
    """Other parameters and buffers for the module, on the CPU."""
    generator = torch.Generator().manual_seed(seed)

    def other(t):
        if not t.is_floating_point():
            return torch.full(t.shape, 7)
        return torch.rand(t.shape, generator=generator).to(t.dtype)

    parameters = {k: other(p).requires_grad_() for k, p in module.named_parameters(remove_duplicate=False)}
    return parameters, {k: other(b) for k, b in module.named_buffers(remove_duplicate=False)}


NET, TIED = given(Net("meta")), given(Tied())


def both(call, m):
    return lambda p, b, x: call(m, (p, b), (x,))


def list_of_dicts(call, m):
    return lambda p, b, x: call(m, [p, b], x.exp(), {"power": 2})


def parameters_only(call, m):
    return lambda p, b, x: call(m, p, (x,), None)


def some(call, m):
    """The others are the module's own."""
    return lambda p, b, x: call(m, {k: p[k] for k in ("first.weight", "blocks.1.bias", "scale")}, (x,)).sin()


def none(call, m):
    return lambda p, b, x: call(m, {}, (x,))


def no_parameters_at_all(call, m):
    relu = torch.nn.ReLU()
    return lambda p, b, x: call(relu, {}, (x,)) + call(relu, (), x)


def intermediates(call, m):
    def program(p, b, x):
        scaled = {k: v.sin() + x.mean() for k, v in p.items()}
        return call(m, (scaled, {k: v.clone() for k, v in b.items()}), (x,)) * scaled["scale"]

    return program


def one_step(call, m):
    """Before and after, with the module's own parameters in between."""

    def program(p, b, x):
        first = call(m, p, x)
        return first + m(x) + call(m, {k: v * 2 for k, v in p.items()}, first) + m.scale

    return program


def of_own(call, m):
    """The module's own tensors, seen through another call."""

    def program(p, b, x):
        own = dict(m.named_parameters())
        return call(m, {k: v * 2 for k, v in own.items()}, x) + own["scale"] + call(m, own, x)

    return program


def submodule(call, m):
    return lambda p, b, x: call(m.blocks[0], {"weight": p["blocks.0.weight"]}, x) + call(m.norm, {}, x)


def as_argument(call, m):
    def inner(module, p, x):
        return call(module, p, x)

    return lambda p, b, x: inner(m, p, x)


def in_no_grad(call, m):
    def program(p, b, x):
        with torch.no_grad():
            y = call(m, (p, b), x)
        return y * p["scale"]

    return program


def strict(call, m):
    return lambda p, b, x: call(m, (p, b), x, strict=True)


def nested(call, m):
    """A module whose forward calls another by ``functional_call``."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.factor = m, torch.nn.Parameter(torch.ones(4))

        def forward(self, x):
            return call(self.net, {"scale": self.factor * self.net.scale}, x) + self.net(x)

    outer = Outer()
    return lambda p, b, x: call(outer, {"factor": p["scale"], "net.first.weight": p["first.weight"]}, x)


def two_levels(call, m):
    return lambda p, b, x: inlined(lambda d: call(m, (d, b), x), p)


def returned(call, m):
    """``forward`` returns what was given, and what is the module's own."""

    class Returns(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = m

        def forward(self):
            return {"given": self.net.scale, "own": [self.net.shift], "all": dict(self.named_parameters())}

    module = Returns()
    return lambda p, b, x: call(module, {"net.scale": p["scale"], "net.norm.bias": p["norm.bias"]})


def other_shape(call, m):
    def program(p, b, x):
        wide = {"first.weight": p["first.weight"].repeat(3, 1)[:, :2], "first.bias": p["first.bias"].repeat(3)}
        return call(m.first, {k.removeprefix("first."): v for k, v in wide.items()}, x[:, :2])

    return program


def hooks(call, m):
    m.first.register_forward_pre_hook(lambda module, args: (args[0] * module.weight[0],))
    m.register_forward_hook(lambda module, args, output: output + module.scale)
    return lambda p, b, x: call(m, p, x)


def attribute(call, m):
    """A tensor that is no parameter and no buffer, and one that the module does not have."""
    m.blocks[0].plain = torch.ones(4)
    m.register_forward_hook(lambda module, args, output: output + module.blocks[0].plain * module.new)
    return lambda p, b, x: call(m, {"blocks.0.plain": p["scale"], "new": b["shift"]}, x)


def absent(call, m):
    """None takes the place of a bias."""
    return lambda p, b, x: call(m, {k: None if k == "first.bias" else v for k, v in p.items()}, x)


def exception_caught(call, m):
    def fails(module, args, output):
        raise ValueError("no")

    m.norm.register_forward_hook(fails)

    def program(p, b, x):
        try:
            return call(m, p, x)
        except ValueError:
            return m.first(x) + m.scale

    return program


CASES = (
    *(both, list_of_dicts, parameters_only, some, none, no_parameters_at_all, intermediates, one_step, of_own),
    *(submodule, as_argument, in_no_grad, strict, nested, two_levels, returned, other_shape, hooks),
    *(attribute, absent, exception_caught),
)


def run(program, module, inputs, calls):
    """Results, gradients of what was given and of the module's own, what became of both."""
    outcomes = []
    for _ in range(calls):
        inputs = fresh(inputs)
        try:
            result = program(*inputs)
        except Exception as error:
            result = (type(error), str(error))
        backward(result)
        grads = [t.grad for t in (*tensors(inputs), *module.parameters())]
        state = [(k, t.detach().clone()) for k, t in (*module.named_parameters(), *module.named_buffers())]
        outcomes.append((result, grads, state, inputs))
    return outcomes


def check(make, module, inputs, *, calls=2, oracle=functional_call, call=functional_call, **options):
    """Compares a program of ``functional_call`` under ``thunder.jit`` with the same program without it."""
    eager, jitted = module(), module()
    expected = run(make(oracle, eager), eager, inputs, calls)
    program = jit(make(call, jitted), **options)
    for a, e in zip(run(program, jitted, inputs, calls), expected):
        assert_same(a, e)
    return program


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_as_eager(make):
    check(make, Net, (*NET, X))


@pytest.mark.parametrize("make", (both, some, one_step), ids=lambda make: make.__name__)
def test_meaning(make):
    check(make, Net, (*NET, X), oracle=meaning)


def test_other_dtype():
    """The module's own tensors are of another dtype."""
    inputs = [{k: v.float() if v.is_floating_point() else v for k, v in fresh(d).items()} for d in NET]
    check(both, Net, (*[{k: v.detach() for k, v in d.items()} for d in inputs], X.float()))


def tied_once(call, m):
    return lambda p, b, x: call(m, {"a.weight": p["a.weight"], "s": b["s"]}, x)


def tied_by_second_name(call, m):
    return lambda p, b, x: call(m, {"b.weight": p["a.weight"].sin(), "c.bias": p["c.bias"]}, x)


def untied(call, m):
    return lambda p, b, x: call(m, {"a.weight": p["a.weight"], "t": b["s"]}, x, tie_weights=False)


def untied_both(call, m):
    return lambda p, b, x: call(m, (p, b), x, tie_weights=False)


def tied_both_same(call, m):
    def program(p, b, x):
        w = p["a.weight"] * 2
        return call(m, {"a.weight": w, "b.weight": w}, x)

    return program


def tied_both_same_input(call, m):
    """Two keys of a dict from outside have the same tensor."""
    return lambda p, b, x: call(m, {k: p["a.weight"] if k == "b.weight" else v for k, v in p.items()}, x)


def tied_different(call, m):
    return lambda p, b, x: call(m, (p, b), x)


def tied_own(call, m):
    return lambda p, b, x: call(m, dict(m.named_parameters(remove_duplicate=False)), x)


def tied_own_two_levels(call, m):
    return lambda p, b, x: inlined(lambda d: call(m, d, x), dict(m.named_parameters(remove_duplicate=False)))


def tied_by_the_outer_call(call, m):
    """What is tied is seen as the running call has it."""

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = m

        def forward(self, x, w):
            return call(self.inner, {"c.weight": w}, x)

    outer = Outer()

    def program(p, b, x):
        same = {"inner.a.weight": p["a.weight"], "inner.c.weight": p["a.weight"]}
        return call(outer, same, (x, p["c.weight"]))

    return program


TIES = (
    *(tied_once, tied_by_second_name, untied, untied_both, tied_both_same, tied_both_same_input, tied_different),
    *(tied_own, tied_own_two_levels, tied_by_the_outer_call),
)


@pytest.mark.parametrize("make", TIES, ids=lambda make: make.__name__)
def test_ties(make):
    check(make, Tied, (*TIED, X))


def the_same_tensor_twice(p):
    return {**p, "b.weight": p["a.weight"]}


def test_ties_of_an_input():
    p = the_same_tensor_twice(TIED[0])
    eager, module = Tied(), Tied()
    expected = functional_call(eager, p, X)
    assert_same(jit(lambda p, x: functional_call(module, p, x))(p, X), expected)
    assert_same(jit(lambda p, x: inlined(lambda: functional_call(module, p, x)))(p, X), expected)


ERRORS = {
    "unexpected": lambda call, m: lambda p, b, x: call(m, ({**p, "y": x, "z": x}, b), x, strict=True),
    "missing": lambda call, m: lambda p, b, x: call(m, p, x, strict=True),
    "unexpected and missing": lambda call, m: lambda p, b, x: call(m, {"scale": x, "y": x}, x, strict=True),
    "no submodule": lambda call, m: lambda p, b, x: call(m, {"blocks.7.weight": x}, x),
    "through a parameter": lambda call, m: lambda p, b, x: call(m, {"scale.weight": x}, x),
    "not a tensor": lambda call, m: lambda p, b, x: call(m, {"scale": 3}, x),
    "in place of no tensor": lambda call, m: lambda p, b, x: call(m, {"norm.eps": x}, x),
    "repeated": lambda call, m: lambda p, b, x: call(m, (p, {"scale": x}), x),
    "no dicts": lambda call, m: lambda p, b, x: call(m, (p, 3), x),
    "no dict": lambda call, m: lambda p, b, x: call(m, 3, x),
}


@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
def test_errors(make):
    check(make, Net, (*NET, X), calls=1)


class Counts(torch.nn.Module):
    """Changes a buffer in place and another by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.double()

    def forward(self, x):
        self.total.add_(x.sum(0))
        self.last = self.last + x.mean(0)
        return x * self.last + self.total


def assigned_copy(m, b, x):
    d = dict(b)
    return functional_call(m, d, x), d


def assigned_tuple(m, b, x):
    return functional_call(m, (b,), x)


def assigned_own(m, b, x):
    """Only one is given; the other is set on the module."""
    return functional_call(m, {"total": b["total"]}, x)


COUNTS = {"total": torch.ones(4).double(), "last": torch.full((4,), 2.0).double()}


@pytest.mark.parametrize("program", (assigned_copy, assigned_tuple, assigned_own), ids=lambda program: program.__name__)
def test_assigned_buffers(program):
    class Outer(torch.nn.Module):
        """The installed thunder sets buffers of submodules only."""

        def __init__(self):
            super().__init__()
            self.counts = Counts()

        def forward(self, b, x):
            return program(self.counts, b, x)

    eager, jitted = Outer(), jit(Outer())
    for _ in range(2):
        inputs = fresh((COUNTS, X))
        others = fresh((COUNTS, X))
        assert_same(jitted(*inputs), eager(*others))
        assert_same(inputs, others)
        assert_same(dict(jitted.named_buffers()), dict(eager.named_buffers()))


def test_assigned_buffer_in_a_dict_from_outside():
    module, given = Counts(), fresh(COUNTS)
    with pytest.raises(HigherOrderError, match="Counts.*from outside of the compiled program"):
        jit(lambda b, x: functional_call(module, b, x))(given, X)
    assert_same(given, COUNTS)


def test_own_tensors_are_not_read():
    """They are on the meta device, and the program has no guard of them."""
    jitted = check(both, functools.partial(Net, "meta"), (*NET, X), calls=1)
    assert "get_parameter" not in str(thunder.last_prologue_traces(jitted)[0])
    assert "'meta'" not in str(thunder.last_prologue_traces(jitted)[0])


class Model(torch.nn.Module):
    """The outermost module itself is called with other parameters."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, p, x, depth=1):
        if depth:
            return functional_call(self, {f"net.{k}": v for k, v in p.items()}, (p, x, depth - 1)) + self.net(x)
        return self.net(x) * self.net.scale


def test_outermost_module():
    eager, module = Model(), Model()
    jitted = jit(module)
    for p in (NET[0], {"scale": NET[0]["scale"]}):
        inputs, others = fresh((p, X)), fresh((p, X))
        result, expected = jitted(*inputs), eager(*others)
        assert_same(result, expected)
        backward(result), backward(expected)
        assert_same([t.grad for t in tensors(inputs)], [t.grad for t in tensors(others)])
        assert_same([t.grad for t in module.parameters()], [t.grad for t in eager.parameters()])
        assert_same(dict(jitted.named_buffers()), dict(eager.named_buffers()))


def test_regions():
    """Blocks inside are traced once; a region that calls ``functional_call`` itself is traced for each call."""
    module, eager = Net(), Net()
    p, q = given(module), given(module)
    jitted = jit(lambda p, x: functional_call(module, p, x), nested_regions=[torch.nn.Linear])
    assert_same(jitted(p[0], X), functional_call(eager, q[0], X))
    (report,) = thunder.nested.report(jitted)
    assert (report.traced, report.reused) == (1, 2)

    region = torch.compiler.nested_compile_region(lambda p, x: functional_call(module, p, x))
    twice = jit(lambda p, x: region(p, region({k: v * 2 for k, v in p.items()}, x)))
    expected = functional_call(eager, q[0], functional_call(eager, {k: v * 2 for k, v in q[0].items()}, X))
    assert_same(twice(p[0], X), expected)
    assert "functional_call" in str(thunder.nested.report(twice))


def test_jitted_module():
    module = thunder.jit(Net())
    p, b = fresh(NET)
    assert_same(jit(lambda p, x: functional_call(module, p, x))(p, X), functional_call(Net(), p, X))


def test_of_a_class_that_computes_it():
    module = torch.nn.Linear(4, 4).double()
    torch.nn.utils.parametrize.register_parametrization(module, "weight", torch.nn.Tanh())
    key = "parametrizations.weight.original"
    jitted = jit(lambda w, x: functional_call(module, {key: w}, x))
    w = torch.randn(4, 4).double()
    assert_same(jitted(w, X), functional_call(module, {key: w}, X))
    with pytest.raises(HigherOrderError, match=re.escape("given `weight`, which is computed by its class")):
        jit(lambda w, x: functional_call(module, {"weight": w}, x))(w, X)


def test_stateless():
    with pytest.warns(FutureWarning, match="functional_call.*deprecated"):
        check(parameters_only, Net, (*NET, X), calls=1, oracle=functional_call, call=stateless.functional_call)


def test_changed_between_calls():
    """Metadata of what is given, and which of the module's own are used, are guarded."""
    module, eager = Net(), Net()
    jitted = jit(lambda p, x: functional_call(module, {"first.weight": p}, x))
    for w in (torch.ones(4, 4).double(), torch.ones(4, 4).double().requires_grad_(), torch.eye(4).double()):
        assert_same(jitted(w, X), functional_call(eager, {"first.weight": w}, X))
    assert thunder.cache_misses(jitted) == 2
    with torch.no_grad():
        for m in (module, eager):
            m.scale.fill_(3)
    assert_same(jitted(w, X), functional_call(eager, {"first.weight": w}, X))


def test_names_of_keys():
    """Keys that are no identifiers, and that would be spelled alike, have names of their own."""
    jitted = jit(lambda d: d["a.b"] - 2 * d["a_b"] + d["a b"])
    d = {"a.b": X, "a_b": X + 1, "a b": X + 2}
    assert_same(jitted(d), d["a.b"] - 2 * d["a_b"] + d["a b"])


@pytest.fixture(autouse=True)
def _no_other_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=FutureWarning, message="(?!.*functional_call)")
        yield
