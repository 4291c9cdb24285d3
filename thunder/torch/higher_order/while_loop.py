"""``while_loop``: one function again and again, while another one says so when the program runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop
from torch.utils._pytree import tree_structure, tree_unflatten

import thunder.nested
import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.nested.lookasides import call_interpreted
from thunder.torch.higher_order.common import HigherOrderError, checked_callable, rng, rng_states
from thunder.torch.higher_order.inner_function import (
    InnerFunction,
    checked_call,
    described,
    read_flat,
    read_leaves,
    spelled,
)
from thunder.torch.higher_order.loop import Loop, Step, check_carry, placeholder
from thunder.torch.higher_order.operator import Record, Values
from thunder.torch.higher_order.program import Program, Residuals

MAX_KEPT = 64  # trips whose residuals are kept, and carries that are kept of a longer loop


@thunder.nested.lookaside(torch_while_loop)
def while_loop(cond_fn: WrappedValue, body_fn: WrappedValue, carried_inputs: WrappedValue) -> tuple:
    """Calls a function while a condition holds::

        def while_loop(cond_fn, body_fn, carried_inputs):
            carry = carried_inputs
            while cond_fn(*carry):
                carry = body_fn(*carry)
            return carry

    The carry is a tuple of tensors, ints and bools, also in containers. Both functions get ints and bools as tensors
    without dimensions, because their values are not known while tracing; the result has numbers again. The number of
    trips is found when the program runs.

    Reverse mode: up to 64 trips, the residuals of all of them are kept for the backward pass. Of a longer loop at most
    64 carries are kept, of every second, fourth, ... trip; the backward pass computes the trips between two of them
    once more, one stretch after the other.

    Raises:
        HigherOrderError: a function is not callable, raises or has effects; ``cond_fn`` gives no bool tensor without
            dimensions; ``body_fn`` returns another carry than it gets; shapes are symbolic.
    """
    return _traced(cond_fn, body_fn, carried_inputs, ())


@thunder.nested.lookaside(torch.ops.higher_order.while_loop)
def _while_loop_operator(
    cond_fn: WrappedValue, body_fn: WrappedValue, carried_inputs: WrappedValue, additional_inputs: WrappedValue
) -> tuple:
    """``additional_inputs`` are further arguments of both functions, the same in all trips."""
    return _traced(cond_fn, body_fn, carried_inputs, read_flat(additional_inputs))


def _traced(
    cond_fn: WrappedValue, body_fn: WrappedValue, carried_inputs: WrappedValue, additional: Sequence[Any]
) -> tuple:
    checked_callable(cond_fn, "while_loop", "cond_fn")
    where = checked_call("while_loop", "body_fn", body_fn)
    if not isinstance(unwrap(carried_inputs), (tuple, list)):
        raise HigherOrderError(
            f"`carried_inputs` of {where} is a {type(unwrap(carried_inputs)).__name__}. Pass a tuple."
        )
    leaves, spec = read_leaves(carried_inputs)
    spec = tree_structure(tuple(tree_unflatten(["*"] * len(leaves), spec)))  # `body_fn` returns a tuple, not a list
    init = [_tensor(where, path, leaf) for path, leaf in leaves]
    carry = [placeholder(i) for i in init]
    arguments = [*tree_unflatten(carry, spec), *additional]
    condition = InnerFunction("while_loop", "cond_fn", cond_fn, arguments, runs=True)
    body = InnerFunction("while_loop", "body_fn", body_fn, arguments, runs=False)
    before = [(path, i) for (path, _), i in zip(leaves, init)]
    check_carry(body, before, spec, body.leaves, body.spec)
    values = Values(carry)
    loop = WhileLoop(condition, Step(body, [leaf for _, leaf in body.leaves]), init, values)
    numbers = [isinstance(unwrap(leaf), (int, NumberProxy)) for _, leaf in leaves]
    results = [ltorch.item(r) if number else r for r, number in zip(loop.record(), numbers)]
    return tuple(tree_unflatten(results, spec))


def _tensor(where: str, path: Any, leaf: WrappedValue) -> TensorProxy:
    value = unwrap(leaf)
    if isinstance(value, TensorProxy):
        return value
    kind = value.python_type if isinstance(value, NumberProxy) else type(value)
    if not issubclass(kind, int):
        raise HigherOrderError(
            f"`carried_inputs` of {where} holds at {spelled(path)} {described(value)}. It may hold tensors, ints "
            f"and bools; let the functions capture anything else."
        )
    if isinstance(value, NumberProxy) and value.value is not None:
        value = unwrap(call_interpreted(kind, leaf))  # by the interpreter, which guards it
        value = value.value if isinstance(value, NumberProxy) else value
    return ltorch.full((), value, device="cpu", dtype=torch.bool if kind is bool else torch.int64)


class Condition:
    """The condition, as a callable of real values."""

    def __init__(self, function: InnerFunction, values: Values):
        (_, result), *others = function.leaves or [((), None)]
        is_bool = isinstance(result, TensorProxy) and not result.shape and result.dtype is dtypes.bool8
        if others or not (is_bool or isinstance(result, bool)):
            found = described(result) if len(function.leaves) == 1 else f"{len(function.leaves)} values"
            raise HigherOrderError(
                f"{function.name} of `while_loop` returns {found}. It must return a bool, or a bool tensor without "
                f"dimensions: compare, or use `.any()` or `.all()`."
            )
        self.positions = values.positions(function.nested)
        self.program = Program(function.nested, [result], [False] * len(self.positions))


class WhileLoop(Loop):
    """``*carry = while_loop(*init, *captured)``."""

    def __init__(self, condition: InnerFunction, step: Step, init: Sequence[TensorProxy], values: Values):
        self._condition = Condition(condition, values)
        where = f"the `while_loop` with {condition.name} and {step.function.name}"
        programs = {condition.parameter: self._condition.program}
        super().__init__("while_loop", where, step, init, (), (), values, programs)
        self._holds = self._condition.program.forward(self.executors)
        # of trips that are computed once more: whether the condition draws numbers between them, what they capture
        self.condition_again = self.step_is_random and self._condition.program.is_random
        again = [*self.positions, *(self._condition.positions if self.condition_again else ())]
        self.captured_again = {p for p in again if p >= self.carries}

    def holds(self, carry: Sequence[Any], values: Sequence[Any]) -> bool:
        """Whether there is another trip."""
        return bool(self._holds(*self.inputs(self._condition.positions, carry, 0, values))[0])

    def run(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        carry = values[: self.carries]
        while self.holds(carry, values):
            carry = self.step(*self.inputs(self.positions, carry, 0, values))
        return carry

    def run_forward(self, values: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        carry, tape = values[: self.carries], Tape(self, values)
        while self.holds(carry, values):
            carry = tape.step(carry)
        tape.close()
        return carry, [Record([tape])]

    def backward_trips(self, steps: list) -> Iterator[tuple[int, Residuals]]:
        return ((0, residuals) for residuals in steps.pop().backward())


class Tape:
    """What a ``while_loop`` keeps for its backward pass, see the limits at :func:`while_loop`.

    A *mark* is the carry, and the state of the random number generators, before a trip.
    """

    def __init__(self, loop: WhileLoop, values: Sequence[Any]):
        self._loop, self._values = loop, values
        self._trips, self._stride = 0, 1  # how many there were, and how many there are from mark to mark
        self._residuals: list[Residuals] = []  # of all trips, while the stride is 1
        self._marks: list[tuple[Residuals, list[torch.Tensor]]] = []

    def step(self, carry: Sequence[Any]) -> Sequence[Any]:
        """Makes a trip; returns the next carry."""
        if len(self._marks) == MAX_KEPT and self._trips % self._stride == 0:
            del self._marks[1::2]
            self._stride *= 2
            self._residuals.clear()
        if self._trips % self._stride == 0:
            self._marks.append((Residuals(carry, ()), rng_states() if self._loop.step_is_random else []))
        self._trips += 1
        inputs = self._loop.inputs(self._loop.positions, carry, 0, self._values)
        if self._stride > 1:
            return self._loop.step(*inputs)
        carry, residuals = self._loop.step_forward(*inputs)
        self._residuals.append(residuals)
        return carry

    def close(self) -> None:
        """After the last trip: drops what the backward pass does not need."""
        if self._stride == 1:
            self._marks.clear()
            self._kept = Residuals((), ())
        else:
            needed = self._loop.captured_again
            self._kept = Residuals([v if p in needed else None for p, v in enumerate(self._values)], ())
        self._values = []

    def backward(self) -> Iterator[Residuals]:
        """The residuals of all trips, the last first. They are kept here: autograd may ask for them once more."""
        yield from reversed(self._residuals)
        (values, _), end = self._kept.lists(), self._trips
        for i, (mark, states) in reversed(list(enumerate(self._marks))):
            start = i * self._stride
            with rng(states):
                residuals = self._again(mark.lists()[0], values, end - start)
            while residuals:
                yield residuals.pop()
            end = start

    def _again(self, carry: Sequence[Any], values: Sequence[Any], trips: int) -> list[Residuals]:
        made: list[Residuals] = []
        for trip in range(trips):
            if trip and self._loop.condition_again:
                self._loop.holds(carry, values)
            carry, residuals = self._loop.step_forward(*self._loop.inputs(self._loop.positions, carry, 0, values))
            made.append(residuals)
        return made
