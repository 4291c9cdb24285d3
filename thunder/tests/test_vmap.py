"""``torch.vmap``: values and gradients as in eager PyTorch, whose errors it has, too."""

from __future__ import annotations

import functools

import pytest
import torch
from nested_helpers import assert_same, backward, fresh, inlined, jit, tensors

import thunder
from thunder.torch.higher_order.common import HigherOrderError


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


W = tensor(4, 4, seed=1)
X, Y = tensor(5, 4, seed=2), tensor(4, seed=3)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3).double()

    def forward(self, x, y):
        return torch.vmap(self.linear)(x) * torch.vmap(lambda a: self.linear(a).tanh() * y.sum())(x)


PROGRAMS = {
    "one argument": lambda x, y: torch.vmap(lambda a: a.sin() * 2)(x),
    "captures": lambda x, y: torch.vmap(lambda a: (a @ W).tanh() * y)(x.exp()),
    "in_dims": lambda x, y: torch.vmap(lambda a, b: a * b.sum(), in_dims=(1, None))(x, y),
    "negative dims": lambda x, y: torch.vmap(lambda a: torch.outer(a, a), in_dims=-1, out_dims=-1)(x),
    "out_dims": lambda x, y: torch.vmap(lambda a: (a * y, a.sum()), out_dims=(1, 0))(x),
    "structures": lambda x, y: torch.vmap(
        lambda p, c: {"r": p["a"] * p["b"][0], "s": [c.sin()]}, in_dims=({"a": 0, "b": (1,)}, None)
    )({"a": x, "b": (x.t(),)}, y),
    "keyword": lambda x, y: torch.vmap(lambda a, scale: a * scale)(x, scale=y),
    "dot products": lambda x, y: torch.vmap(torch.vmap(_dot, (None, 0)), (0, None))(x, x.cos()),
    "nested": lambda x, y: torch.vmap(torch.vmap(lambda a: a * a.exp() * y.sum()))(x),
    "chunks": lambda x, y: torch.vmap(lambda a: (a @ W).cos(), chunk_size=2)(x),
    "made outside": lambda x, y: _made_outside(x),
    "partial": lambda x, y: torch.vmap(_leaky)(x),
    "integers": lambda x, y: torch.vmap(lambda a: (a.argmax(), a))(x),
    "an unused result": lambda x, y: torch.vmap(lambda a: (a * y, a.sum() * y))(x)[0],
    "softmax": lambda x, y: torch.vmap(lambda a: torch.nn.functional.softmax(a @ W, -1))(x),
    "the same tensor twice": lambda x, y: torch.vmap(lambda a, b: a * b + x.sum())(x, x),
    "in a nested function": lambda x, y: inlined(lambda a: torch.vmap(lambda b: b * y)(a), x.sin()),
    "no_grad inside": lambda x, y: torch.vmap(_no_grad_inside)(x),
    "an argument that is no tensor": lambda x, y: torch.vmap(lambda a, n, s: a * n, in_dims=(0, None, None))(x, 3, "s"),
}
_leaky = functools.partial(torch.nn.functional.leaky_relu, negative_slope=0.3)
_made_outside = torch.vmap(lambda a: a.sin() + a.sum())


def _dot(a, b):
    return (a * b).sum()


def _no_grad_inside(a):
    with torch.no_grad():
        s = a.exp()
    return a * s


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_values_and_gradients(program):
    jitted = jit(program)
    for _ in range(2):
        found = []
        for fn in (jitted, program):
            inputs = fresh((X, Y))
            W.grad = None
            result = fn(*inputs)
            backward(result)
            found.append((result, [t.grad for t in inputs], W.grad))
        assert_same(*found)
    assert thunder.cache_misses(jitted) == 1


def test_a_module():
    eager, compiled = Model(), Model()
    jitted = jit(compiled)
    for model in (eager, jitted):
        backward(model(X.detach(), Y.detach()))
    assert_same([p.grad for p in compiled.parameters()], [p.grad for p in eager.parameters()])


def test_randomness_is_as_asked_for():
    def program(x, randomness):
        return torch.vmap(lambda a: torch.nn.functional.dropout(a, 0.5), randomness=randomness)(x)

    x = torch.ones(6, 50)
    same, different = jit(program)(x, "same"), jit(program)(x, "different")
    assert (same == same[0]).all() and not (different == different[0]).all()
    with pytest.raises(RuntimeError, match="randomness"):
        jit(program)(x, "error")


MISUSES = {
    "no inputs": (lambda x: torch.vmap(lambda: x)(), "got no inputs"),
    "in_dims": (lambda x: torch.vmap(lambda a: a, in_dims=(0, 1))(x), "not compatible with the structure"),
    "dimension": (lambda x: torch.vmap(lambda a: a, in_dims=3)(x), "expected in_dim to satisfy"),
    "sizes": (lambda x: torch.vmap(_dot)(x, x[:2]), "same size in the mapped dimension"),
    "no tensor": (lambda x: torch.vmap(lambda a: 3.0)(x), "must only return Tensors"),
    "over a number": (lambda x: torch.vmap(lambda a, n: a * n)(x, 3), "cannot vmap over non-Tensor"),
}


@pytest.mark.parametrize("program, message", MISUSES.values(), ids=MISUSES)
def test_torchs_own_errors(program, message):
    for fn in (program, jit(program)):
        with pytest.raises(ValueError, match=message):
            fn(X.detach())


def test_effects_are_refused():
    seen = []

    def changes(a):
        seen.append(a)
        return a

    with pytest.raises(HigherOrderError, match=r"changes` \(.*test_vmap.py:\d+\) of `vmap` changes `seen`"):
        jit(lambda x: torch.vmap(changes)(x))(X)


def test_what_the_function_raises_is_raised():
    def raises(a):
        raise ValueError(f"no {tuple(a.shape)}")

    def program(x):
        try:
            return torch.vmap(raises)(x)
        except ValueError as error:
            return x * 2, str(error)

    assert_same(jit(program)(X.detach()), program(X.detach()))


def test_an_operator_in_it():
    def program(p, x):
        return torch.vmap(lambda a: torch.cond(p, lambda b: b.sin(), lambda b: b.cos(), (a,)))(x)

    p, x = torch.tensor(True), X.detach()
    assert_same(jit(program)(p, x), x.sin())
    with pytest.raises(HigherOrderError, match="Call `cond`, `while_loop`, `scan` and `map` outside of `vmap`"):
        jit(program)(p, X)


def test_the_trace_shows_the_function():
    jitted = jit(PROGRAMS["captures"])
    jitted(X, Y)
    assert "vmap_0(" in str(thunder.last_traces(jitted)[0])
    assert "ltorch.tanh(" in str(thunder.last_traces(jitted)[0])


def test_the_gradient_sees_changes_in_place():
    jitted = jit(lambda x, y: torch.vmap(lambda a: a * y)(x))
    x, y = X.detach(), Y.detach().clone().requires_grad_()
    z = (y * 1).detach().requires_grad_()
    out = jitted(x.requires_grad_(), z)
    with torch.no_grad():
        z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert tensors(out)
