"""What the tests share: higher-order functions with lookasides, and the comparison with eager PyTorch."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

import thunder
import thunder.nested
from thunder.core.interpreter import unwrap
from thunder.core.options import DebugOptions
from thunder.core.prims import PrimIDs

jit = functools.partial(thunder.jit, debug_options=DebugOptions(check_traces=2))


def plain_call(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the function. It has no lookaside, so thunder inlines it."""
    return fn(*args, **kwargs)


def inlined(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the function; its lookaside replays the function's trace with ``inline``."""
    return fn(*args, **kwargs)


def operator(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the function; its lookaside replays the function's trace with ``as_operator``."""
    return fn(*args, **kwargs)


def twice_deep(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """Calls the function; its lookaside traces a call of :func:`inlined`, so the function is two levels down."""
    return inlined(fn, *args, **kwargs)


@thunder.nested.lookaside(inlined)
def _inlined(fn, *args, **kwargs):
    return thunder.nested.trace(fn, *args, **kwargs).inline()


@thunder.nested.lookaside(operator)
def _operator(fn, *args, **kwargs):
    return thunder.nested.trace(fn, *args, **kwargs).as_operator("test_operator")


@thunder.nested.lookaside(twice_deep)
def _twice_deep(fn, *args, **kwargs):
    return thunder.nested.trace(inlined, fn, *args, **kwargs).inline()


def with_lookaside(lookaside: Callable) -> Callable:
    """A new function that calls its first argument, with ``lookaside`` as its lookaside."""

    def call(fn, *args, **kwargs):
        return fn(*args, **kwargs)

    thunder.nested.lookaside(call)(lookaside)
    return call


CALLS = (inlined, operator, twice_deep)


def fresh(values: Any) -> Any:
    """A copy of the inputs, with leaf tensors that require gradients as before."""

    def leaf(x: Any) -> Any:
        return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else copy.copy(x)

    return tree_map(leaf, values)


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in a structure."""
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def assert_same(actual: Any, expected: Any) -> None:
    """Values, structure, dtypes and ``requires_grad``."""
    actual_leaves, actual_spec = tree_flatten(actual)
    expected_leaves, expected_spec = tree_flatten(expected)
    assert actual_spec == expected_spec
    for a, e in zip(actual_leaves, expected_leaves):
        if isinstance(e, torch.Tensor):
            torch.testing.assert_close(a, e)
            assert a.requires_grad == e.requires_grad
        else:
            assert type(a) is type(e) and a == e


def backward(result: Any) -> None:
    """A gradient for each floating result that wants one."""
    losses = [t.sum() for t in tensors(result) if t.requires_grad]
    if losses:
        torch.stack([loss.real.double() for loss in losses]).sum().backward()


def outcome(fn: Callable, inputs: tuple, state: Callable[[], Any], catch: type = Exception) -> tuple[Any, Any, Any]:
    """What a call gives: its result or exception, the inputs' gradients, and the state that it leaves."""
    inputs = fresh(inputs)
    try:
        result = fn(*inputs)
    except catch as error:
        return error, None, state()
    backward(result)
    return result, [t.grad for t in tensors(inputs)], state()


def check(make: Callable, inputs: tuple, call: Callable, *, calls: int = 2) -> Callable:
    """Compares ``make(call)`` under ``thunder.jit`` with ``make(plain_call)`` in eager PyTorch, call for call.

    Args:
        make: gets the higher-order function and returns the program, or the program and a function that reads the
            state which the program changes.
        inputs: the program's arguments.
        call: the higher-order function under test.
        calls: how often the program is called.

    Returns:
        The jitted program.
    """
    eager, eager_state = _program(make(plain_call))
    program, state = _program(make(call))
    jitted = jit(program)
    for _ in range(calls):
        torch.manual_seed(0)
        expected = outcome(eager, inputs, eager_state)
        torch.manual_seed(0)
        if isinstance(expected[0], Exception):
            actual = outcome(jitted, inputs, state, type(expected[0]))
            assert (type(actual[0]), str(actual[0])) == (type(expected[0]), str(expected[0]))
            assert_same(actual[2], expected[2])
            continue
        for a, e in zip(outcome(jitted, inputs, state, ()), expected):
            assert_same(a, e)
        if isinstance(eager, torch.nn.Module):
            assert_same([p.grad for p in program.parameters()], [p.grad for p in eager.parameters()])
            # the jitted module keeps buffers of its own
            assert_same(dict(jitted.named_buffers()), dict(eager.named_buffers()))
    return jitted


def _program(made: Any) -> tuple[Callable, Callable]:
    return made if isinstance(made, tuple) else (made, lambda: None)


def guards(jitted: Callable) -> set[str]:
    """What the prologue unpacks and checks, without the numbers of the names that it makes up on the way."""
    lines = str(thunder.last_prologue_traces(jitted)[0]).splitlines()
    text = [line.strip() for line in lines if "=" in line or "check" in line]
    return {re.sub(r"\b(i|m|obj|subscr|f|s|module)\d+\b", r"\1", line) for line in text if "sys" not in line}


def plain(*values: Any) -> list[Any]:
    """Unwrapped values."""
    return [unwrap(v) for v in values]


def saved(program: Callable, *inputs: Any) -> list[str]:
    """The operations that made what the program keeps for the backward pass and is no input of it."""
    program(*inputs)
    trace = thunder.last_traces(program)[-1]
    returned = trace.bound_symbols[-1]
    assert returned.sym.id is PrimIDs.RETURN
    given = {p.name for p in trace.args}
    kept = {p.name for p in returned.args[1][0]} - given
    return [b.sym.name for b in trace.bound_symbols if {o.name for o in b.flat_proxy_outs} & kept]


def grads_of(program: Callable, *inputs: Any) -> tuple[Any, list, torch.Tensor]:
    """Results and gradients from a fixed seed, and the generator's state after the forward pass."""
    inputs = fresh(inputs)
    torch.manual_seed(7)
    result = program(*inputs)
    state = torch.get_rng_state()
    torch.manual_seed(99)  # the recomputation must not depend on it
    backward(result)
    return result, [t.grad for t in tensors(inputs)], state
