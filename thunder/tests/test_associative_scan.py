"""``associative_scan`` against its meaning as plain Python, and against eager PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from nested_helpers import assert_same, backward, fresh, jit
from torch._higher_order_ops import associative_scan
from torch.utils._pytree import tree_map

import thunder
from thunder.torch.higher_order.common import HigherOrderError


def plain_scan(combine_fn, xs, dim, reverse=False, combine_mode="pointwise"):
    """The meaning of ``associative_scan``."""
    leaf = xs
    while not isinstance(leaf, torch.Tensor):
        leaf = next(iter(leaf.values() if isinstance(leaf, dict) else leaf))
    results = []
    for i in reversed(range(leaf.shape[dim])) if reverse else range(leaf.shape[dim]):
        x = tree_map(lambda t: t.select(dim, i), xs)
        results.append(combine_fn(results[-1], x) if results else x)
    return tree_map(lambda *r: torch.stack(r, dim), *(results[::-1] if reverse else results))


W = torch.linspace(0.5, 1.5, 9, dtype=torch.float64).reshape(3, 3).requires_grad_()


def values(length: int, dim: int = 0) -> torch.Tensor:
    x = torch.rand(length, 3, 3, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    return x.movedim(0, dim).contiguous().requires_grad_()


def check(program, *inputs, calls=1):
    jitted = jit(lambda *i: program(associative_scan, *i))
    found = []
    for fn in (jitted, lambda *i: program(plain_scan, *i)):
        given = fresh(inputs)
        W.grad = None
        result = fn(*given)
        backward(result)
        found.append((result, [g.grad for g in given], W.grad))
    assert_same(*found)
    return jitted


@pytest.mark.parametrize("length", (1, 2, 3, 4, 7))
@pytest.mark.parametrize("reverse", (False, True), ids=("forward", "reverse"))
def test_lengths(length, reverse):
    def program(scan, x):
        return scan(lambda a, b: [a[0] * b[0], a[1] * b[0] + b[1]], [x, x.sin()], 0, reverse)

    check(program, values(length))


def generic(scan, x):
    return scan(lambda a, b: a @ b, x * 0.5, 0, combine_mode="generic")


def generic_captures(scan, x):
    return scan(lambda a, b: {"k": a["k"] @ W @ b["k"]}, {"k": x}, -3, True, combine_mode="generic")


def pointwise_captures(scan, x):
    return scan(lambda a, b: a * b * W, x, 1, reverse=True)


def results_that_alias(scan, x):
    return scan(lambda a, b: (b[0], a[1]), (x, x + 1), 0)


def nested_structures(scan, x):
    return scan(lambda a, b: ({"p": a[0]["p"] + b[0]["p"]}, [a[1][0] * b[1][0]]), ({"p": x}, [x.cos()]), 2)


PROGRAMS = {p.__name__: p for p in (generic, pointwise_captures, results_that_alias, nested_structures)}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_values_and_gradients(program):
    check(program, values(3))


def test_a_function_that_multiplies_by_a_capture_in_between():
    # W is the identity, so that the function is associative
    global W
    before, W = W, torch.eye(3, dtype=torch.float64, requires_grad=True)
    try:
        check(generic_captures, values(4))
    finally:
        W = before


def test_eager_torch_agrees():
    x = values(5).detach()
    add = lambda a, b: a + b  # noqa: E731
    expected = associative_scan(add, x, 0, combine_mode="generic")
    assert_same(jit(lambda x: associative_scan(add, x, 0, combine_mode="generic"))(x), expected)


def test_the_operator_that_dynamo_emits():
    def combine(a, b, scale):
        return [a * b * scale]

    x, one = values(5), torch.ones(3, 3, dtype=torch.float64)
    jitted = jit(lambda x, one: torch.ops.higher_order.associative_scan(combine, [x], (one,)))
    assert_same(list(jitted(x, one)), [plain_scan(lambda a, b: a * b, x, 0)])


def test_only_another_shape_recompiles():
    jitted = jit(lambda x: associative_scan(torch.add, x, 0))
    for x in (values(3), values(3) + 1, values(4)):
        assert_same(jitted(x.detach()), x.detach().cumsum(0))
    assert thunder.cache_misses(jitted) == 2


MISUSES = {
    "length": (lambda x: associative_scan(torch.add, x[:0], 0), "dimension 0 whose size is not 0"),
    "no tensor": (lambda x: associative_scan(torch.add, [], 0), "holds no tensor"),
    "mode": (lambda x: associative_scan(torch.add, x, 0, combine_mode="fast"), "'pointwise' or 'generic'"),
    "a number": (lambda x: associative_scan(torch.add, [x, 1], 0), r"holds at `\[1\]` the int 1"),
    "dtype": (
        lambda x: associative_scan(lambda a, b: (a + b).float(), x, 0),
        r"<lambda>` \(.*test_associative_scan.py:\d+\) .*gets a torch.float64 tensor.*returns a torch.float32",
    ),
    "structure": (lambda x: associative_scan(lambda a, b: (a, b), x, 0), "returns 2 leaves for 1"),
    "in place": (lambda x: associative_scan(lambda a, b: a.add_(b), x, 0), "changes a tensor in place"),
}


@pytest.mark.parametrize("program, message", MISUSES.values(), ids=MISUSES)
def test_errors(program, message):
    with pytest.raises(HigherOrderError, match=message):
        jit(program)(values(4).detach())
