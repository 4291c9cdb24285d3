"""What ``while_loop``, ``scan`` and ``map`` share: an operator that runs one inner program again and again.

A *carry* goes from each trip to the next; *elements*, one slice of each of ``xs`` for each trip, go in, and *results of
the trip* come out, which are stacked. What the function captures is the same in all trips, and is not stacked.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from thunder.core import devices, dtypes
from thunder.core.proxies import TensorProxy
from thunder.torch.higher_order.common import HigherOrderError
from thunder.torch.higher_order.inner_function import InnerFunction, described, spelled, structure
from thunder.torch.higher_order.operator import RunTimeOperator, Values, differentiable
from thunder.torch.higher_order.program import Program, Residuals, constant_dtype, dependent_outputs
from thunder.torch.higher_order.requires_grad import is_differentiable


def placeholder(value: TensorProxy, shape: Sequence[int] | None = None) -> TensorProxy:
    """What the function of a loop is traced with instead of a carry or an element.

    It is not the first trip's value, which the function may capture, too. It may require a gradient, for all that the
    function can know.
    """
    shape = value.shape if shape is None else shape
    return TensorProxy(like=value, shape=tuple(shape), requires_grad=is_differentiable(value))


@dataclasses.dataclass(frozen=True)
class Step:
    """The function of a loop, traced.

    Attributes:
        function: the traced function.
        outputs: the parts of its result: the next carry, then the results of the trip.
    """

    function: InnerFunction
    outputs: Sequence[Any]


def check_carry(
    function: InnerFunction, before: Sequence[tuple[Any, Any]], before_spec: Any, after: Sequence, after_spec: Any
) -> None:
    """Raises if the carry that a function returns is another one than it gets.

    Args:
        before, after: path and value for each leaf.
        before_spec, after_spec: the structures.
    """
    if before_spec != after_spec:
        raise HigherOrderError(
            f"{function.name} of `{function.operator}` gets the carry {structure(before, before_spec)} and returns "
            f"{structure(after, after_spec)} (`*` is a leaf). Let it return the containers that it gets."
        )
    for (path, was), (_, now) in zip(before, after):
        if is_like_number(was, now) if isinstance(now, int) else described(was) == described(now):
            continue
        raise HigherOrderError(
            f"{function.name} of `{function.operator}` gets {described(was)} at {spelled(path)} of the carry and "
            f"returns {described(now)} there. All trips need one shape, dtype and device: convert the result, or the "
            f"initial value, with `.to(...)`, `.expand(...)` or `.reshape(...)`."
        )


def is_like_number(proxy: TensorProxy, number: int) -> bool:
    """Whether a tensor is like the one that an int or a bool becomes in a program."""
    same_dtype = proxy.dtype is constant_dtype(number)
    return same_dtype and not proxy.shape and proxy.device.devicetype is devices.DeviceType.CPU


class Loop(RunTimeOperator):
    """``*carry, *stacked = loop(*init, *xs, *captured)``.

    Args:
        name: how the symbol begins.
        where: the functions, for messages.
        step: what runs in each trip.
        init: the carry before the first trip.
        xs: what the elements are slices of, along the first dimension.
        stacked: proxies that are like the stacked results of the trips.
        values: the numbering of all values; other inner functions have noted theirs already.
        programs: further inner programs, by the names of their parameters.
    """

    def __init__(
        self,
        name: str,
        where: str,
        step: Step,
        init: Sequence[TensorProxy],
        xs: Sequence[TensorProxy],
        stacked: Sequence[TensorProxy],
        values: Values,
        programs: Mapping[str, Program] | None = None,
    ):
        self.positions = values.positions(step.function.nested)
        self._values = [*init, *xs, *values.captured]
        self._wanted = differentiable(self._values)
        self.carries, self._elements = len(init), range(len(init), len(init) + len(xs))
        flags = self._may_require_grad(step)
        program = Program(step.function.nested, step.outputs, [flags[p] for p in self.positions])
        programs = {**(programs or {}), step.function.parameter: program}
        super().__init__(name, where, [*init, *stacked], programs)
        self._carry_like, self._xs_like = [like(c) for c in init], [like(x) for x in xs]
        self._program, self.step_is_random = program, program.is_random
        self.step = program.forward(self.executors)

    def record(self) -> list[TensorProxy]:
        """Records the loop in the current trace; returns the last carry, and the stacked results of the trips."""
        values, self._values = self._values, []  # the enclosing level's, which shall not live as long as this
        return self(values)

    def _may_require_grad(self, step: Step) -> list[bool]:
        """For each value whether it may require a gradient in some trip; notes which outputs of a step may."""
        flags = list(self._wanted)
        while True:  # a carry may if it does in an earlier trip
            given = [flags[p] for p in self.positions]
            self._depends = dependent_outputs(step.function.nested, step.outputs, given)
            carries = [f or d for f, d in zip(flags, self._depends[: self.carries])]
            if carries == flags[: self.carries]:
                return flags
            flags[: self.carries] = carries

    #
    # When the program runs
    #

    @abc.abstractmethod
    def backward_trips(self, steps: list) -> Iterator[tuple[int, Residuals]]:
        """For each trip, the last first, the index of its elements and its residuals."""

    def inputs(self, positions: Sequence[int], carry: Sequence[Any], at: int, values: Sequence[Any]) -> list[Any]:
        """The values at the positions, in a trip: the carry, the elements of the given index, and what is captured."""

        def value(p: int) -> Any:
            if p < self.carries:
                return carry[p]
            return values[p].select(0, at) if p in self._elements else values[p]

        return [value(p) for p in positions]

    def prepare_gradient(self) -> Iterable[int]:
        self.step_forward, self._step_backward, has_gradient = self._program.with_gradient(self.executors)
        carries = [i for i in range(self.carries) if self._wanted[i]]
        return carries + [p for p, has in zip(self.positions, has_gradient) if has and p >= self.carries]

    def run_backward(
        self, record: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Mapping[int, torch.Tensor | None]:
        carry, stacked = gradients[: self.carries], gradients[self.carries :]
        elements = {p: torch.zeros(**x) for p, x in zip(self._elements, self._xs_like) if p in self.positions}
        sums = Sums()
        for at, residuals in self.backward_trips(record[0].take()):
            given = [*carry, *(g if g is None else g[at] for g in stacked)]
            found = self._step_backward(residuals, [g if d else None for g, d in zip(given, self._depends)])
            carry = [torch.zeros(**c) if d else None for d, c in zip(self._depends, self._carry_like)]
            for p, gradient in zip(self.positions, found):
                if gradient is None:
                    continue
                if p < self.carries:
                    carry[p] = gradient
                elif p in elements:
                    elements[p][at] = gradient
                else:
                    sums.add(p, gradient)
        return {**dict(enumerate(carry)), **elements, **sums.totals}


def like(proxy: TensorProxy) -> dict[str, Any]:
    """The arguments for ``torch.empty`` or ``torch.zeros`` to make such a tensor."""
    dtype, device = dtypes.to_torch_dtype(proxy.dtype), devices.to_torch_device(proxy.device)
    return {"size": tuple(proxy.shape), "dtype": dtype, "device": device}


class Sums:
    """Sums of tensors by keys. The first is not copied."""

    def __init__(self) -> None:
        self.totals: dict[int, torch.Tensor] = {}
        self._own: set[int] = set()

    def add(self, key: int, value: torch.Tensor) -> None:
        """Adds to the sum of the key."""
        if key in self._own:
            self.totals[key].add_(value)
        elif key in self.totals:
            self.totals[key] = self.totals[key] + value
            self._own.add(key)
        else:
            self.totals[key] = value
