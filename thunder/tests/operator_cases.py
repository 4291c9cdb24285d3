"""PyTorch's operators that take functions, their meaning in plain Python, and functions for them to call."""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nested_helpers import assert_same, backward, fresh, inlined, jit, tensors
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

import thunder
import thunder.nested
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.program import Residuals


def python_if(pred: Any, true_fn: Callable, false_fn: Callable, operands: Any = ()) -> Any:
    """The meaning of ``torch.cond``."""
    return true_fn(*operands) if pred else false_fn(*operands)


def python_while(cond_fn: Callable, body_fn: Callable, carried_inputs: tuple) -> tuple:
    """The meaning of ``while_loop``, which gives new tensors even without a trip."""
    carry = carried_inputs
    while cond_fn(*carry):
        carry = body_fn(*carry)
    if carry is carried_inputs:
        carry = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, carry)
    return carry


def python_scan(combine_fn: Callable, init: Any, xs: Any, *, dim: int = 0, reverse: bool = False) -> tuple[Any, Any]:
    """The meaning of ``scan``."""
    leaves = tree_flatten(xs)[0]
    dim = dim % leaves[0].ndim
    carry, results = init, []
    indices = range(leaves[0].shape[dim])
    for i in reversed(indices) if reverse else indices:
        carry, result = combine_fn(carry, tree_map(lambda x: x.select(dim, i), xs))
        results.append(result)
    return carry, _stacked(results[::-1] if reverse else results, dim)


def python_map(f: Callable, xs: Any, *args: Any) -> Any:
    """The meaning of ``map``."""
    length = tree_flatten(xs)[0][0].shape[0]
    return _stacked([f(tree_map(lambda x: x[i], xs), *args) for i in range(length)], 0)


def _stacked(results: list, dim: int) -> Any:
    spec = tree_flatten(results[0])[1]
    rows = zip(*[tree_flatten(result)[0] for result in results])
    return tree_unflatten([torch.stack(row, dim if dim <= row[0].ndim else 0) for row in rows], spec)


PYTHON = SimpleNamespace(cond=python_if, while_loop=python_while, scan=python_scan, map=python_map)
TORCH = SimpleNamespace(cond=torch.cond, while_loop=torch_while_loop, scan=torch_scan, map=torch_map)


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A leaf that requires a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


WEIGHT = random_tensor(3, 3, seed=2)  # what functions capture as a global


def compare(program: Callable, expected: Callable, inputs: tuple, leaves: Sequence[torch.Tensor] = (WEIGHT,)) -> None:
    """Compares the results of two programs, and the gradients of their inputs and of other leaves that they capture.

    Zeros count as no gradient: thunder says of every floating result that it requires one.
    """
    outcomes = []
    for fn in (program, expected):
        args = fresh(inputs)
        for leaf in leaves:
            leaf.grad = None
        torch.manual_seed(0)
        result = fn(*args)
        backward(result)
        wanted = [t for t in (*tensors(args), *leaves) if t.requires_grad]
        outcomes.append((result, [torch.zeros_like(t) if t.grad is None else t.grad for t in wanted]))
    (result, grads), (expected_result, expected_grads) = outcomes
    assert_same(_detached(result), _detached(expected_result))
    torch.testing.assert_close(grads, expected_grads)


def _detached(tree: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


class Square(torch.autograd.Function):
    """A custom gradient, which is the derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * 2 * x


class Cube(torch.autograd.Function):
    """A custom gradient, which is not the derivative."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a**3

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return grad * a * 5


class Layer(torch.nn.Module):
    """A module with a parameter, a submodule and a buffer, of width 3."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.linear = torch.nn.Linear(3, 3)
        self.scale = torch.nn.Parameter(torch.rand(3))
        self.register_buffer("shift", torch.rand(3))
        self.double()

    def forward(self, a):
        return (self.linear(a) * self.scale + self.shift).tanh()


LAYER = Layer()
JITTED = thunder.jit(lambda a: (a @ WEIGHT).sin())


@torch.compiler.nested_compile_region
def region(a):
    return (a @ WEIGHT).sin()


class Holder:
    """An object with a method."""

    def __init__(self, factor: float):
        self.factor = factor

    def method(self, a):
        return (a * self.factor).sin()


def no_grad_inside(ops, y):
    def body(a):
        with torch.no_grad():
            s = a.tanh()
            with torch.enable_grad():
                t = y.sin()
        return a.cos() * s * t

    return body


def autocast_inside(ops, y):
    def body(a):
        with torch.autocast("cpu", torch.bfloat16):
            s = a.float().reshape(1, 3) @ WEIGHT.float()
        return s.reshape(3).double() * y

    return body


def checkpoint_inside(ops, y):
    return lambda a: checkpoint(lambda b: ((b @ WEIGHT).sin() * y).exp(), a.sin(), use_reentrant=False)


def function_inside(ops, y):
    return lambda a: Cube.apply(a.sin()) * y


def item_inside(ops, y):
    n = y.detach().sum().item()
    return lambda a: a.sin() * n


def own_objects(ops, y):
    def body(a):
        items, table = [], {}
        for i in range(3):
            items.append(a * i)
        table["y"] = y
        return sum(items).sin() * table["y"]

    return body


def cond_inside(ops, y):
    return lambda a: ops.cond(a.sum() > 0, lambda b: (b @ WEIGHT).sin(), lambda b: b.cos() * y, (a,)) * a


def while_loop_inside(ops, y):
    def body(a):
        z = a.sin()
        return ops.while_loop(lambda i, b: i < 2, lambda i, b: (i + 1, (b @ WEIGHT).tanh() * z * y), (0, a))[1]

    return body


def scan_inside(ops, y):
    def body(a):
        z = a.sin()
        c, rows = ops.scan(lambda c, e: ((c * e).tanh() * z, (c + y) * e.sum(-1, keepdim=True)), a, WEIGHT)
        return c + rows.sum(0)

    return body


def map_inside(ops, y):
    return lambda a: ops.map(lambda e, b: (e * b).sin() * y * a, WEIGHT, a.cos()).sum(0)


# Each gets the operators and a tensor of shape (3,) to capture, and returns a function from such a tensor to another.
FUNCTIONS = {
    "capture": lambda ops, y: lambda a: (a @ WEIGHT).tanh() * y,
    "no_grad": no_grad_inside,
    "autocast": autocast_inside,
    "checkpoint": checkpoint_inside,
    "autograd_function": function_inside,
    "item": item_inside,
    "own_objects": own_objects,
    "module": lambda ops, y: LAYER,
    "module_call": lambda ops, y: lambda a: LAYER(a) * LAYER.scale * y,
    "partial": lambda ops, y: functools.partial(torch.add, 0.5, alpha=2),
    "bound_method": lambda ops, y: Holder(0.5).method,
    "thunder_jit": lambda ops, y: lambda a: JITTED(a) * y,
    "region": lambda ops, y: lambda a: region(a) * region(a * y),
    "cond": cond_inside,
    "while_loop": while_loop_inside,
    "scan": scan_inside,
    "map": map_inside,
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


class Apply(torch.autograd.Function):
    """Calls a function in its forward, and gives another gradient than that of the function."""

    @staticmethod
    def forward(ctx, f, a):
        ctx.save_for_backward(a)
        return f(a)

    @staticmethod
    def backward(ctx, grad):
        (a,) = ctx.saved_tensors
        return None, grad * a * 5


# Each gets the operators, a function from a tensor to one like it, and such a tensor, and calls the function there.
PLACES = {
    "cond": lambda ops, f, a: ops.cond(a.sum() < 100, lambda b: f(b) * a, torch.sin, (a,)),
    "autograd_function": lambda ops, f, a: Apply.apply(f, a),
    "thunder_jit": lambda ops, f, a: (thunder.jit(f) if ops is TORCH else f)(a),
    "region": lambda ops, f, a: torch.compiler.nested_compile_region(f)(a) if ops is TORCH else f(a),
    "inlined": lambda ops, f, a: inlined(f, a),
}
places = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


def check_modes(program: Callable, expected: Callable, inputs: tuple) -> None:
    """Compares a jitted program where no gradient is wanted: by the caller's grad mode, and by the inputs."""
    reference = _detached(expected(*inputs))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same(program(*inputs), reference)
    assert_same(_detached(program(*_detached(inputs))), reference)


def check_second_backward(program: Callable, inputs: tuple) -> None:
    """A jitted program's gradients twice, and the error where the graph is not retained."""
    inputs = fresh(inputs)
    loss = sum(t.sum() for t in tensors(program(*inputs)) if t.requires_grad)
    wanted = [t for t in tensors(inputs) if t.requires_grad]
    first = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
    assert_same(torch.autograd.grad(loss, wanted, allow_unused=True), first)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(loss, wanted, allow_unused=True)


def check_changed_in_place(program: Callable, expected: Callable, inputs: tuple, index: int) -> None:
    """Where an input is changed between the forward and the backward pass both raise."""
    for fn, message in ((expected, "modified by an inplace operation"), (program, "changed in place after the call")):
        own = fresh(inputs)
        result = fn(*own)
        with torch.no_grad():
            own[index].add_(1)
        with pytest.raises(RuntimeError, match=message):
            backward(result)


def check_trace(program: Callable, name: str, lines: Sequence[str], path: Any) -> None:
    """The traces of a jitted program have one operator, print its inner programs, and can be saved."""
    for trace in thunder.last_traces(program):
        trace.save_trace(path)
        text = path.read_text()
        assert len(re.findall(rf"^ *\(?\w.* = {name}(_forward)?_\d+\(", text, re.MULTILINE)) == 1, text
        for line in lines:
            assert re.search(rf"^ *# .*{line}", text, re.MULTILINE), text
    assert f"{name}_gradient" in str(thunder.last_backward_traces(program)[-1])


def kept_tensors() -> list[torch.Tensor]:
    """The tensors that operators keep for a backward pass, of all programs that are alive."""
    gc.collect()
    residuals = [o for o in gc.get_objects() if type(o) is Residuals]
    return [t for r in residuals for t in r.lists()[0] if isinstance(t, torch.Tensor)]


def kept_bytes(*without: torch.Tensor) -> int:
    """The size of the storages that operators keep for a backward pass, without those of the given tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept_tensors()}
    known = {t.untyped_storage().data_ptr() for t in without}
    return sum(size for at, size in storages.items() if at not in known)


def error_of(program: Callable, *args: Any) -> str:
    """The message of the error that compiling the program raises."""
    with pytest.raises(HigherOrderError) as info:
        jit(program)(*args)
    return str(info.value)
