"""An operator of the program whose results, and whose gradient, are computed by callables of the operator's own.

In a trace it is ``results = op(*values)``; where gradients are computed, ``*results, *record = op_forward(*values)``,
and ``*gradients = op_gradient(record, gradients)``. What is recorded is mostly known only when the program runs: of
which branch, for how many trips. Then it is one opaque value, which autograd keeps until the backward pass.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.prims import OpTags
from thunder.core.proxies import AnyProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol, default_python_printer
from thunder.core.transforms import get_grad, put_grad
from thunder.extend import OperatorExecutor
from thunder.nested.levels import Level, current_level
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import OperatorTag, executors_of, without_aliases
from thunder.torch.higher_order.program import ChangedError, Program
from thunder.torch.higher_order.requires_grad import is_differentiable, may_require_grad


class Values:
    """What the inner functions of an operator read: first what the operator passes to them, then what they capture.

    Args:
        passed: proxies that the functions were traced with, in the place of what the operator passes to them.

    Attributes:
        captured: the values of the enclosing level that they capture, each once.
    """

    def __init__(self, passed: Iterable[Proxy] = ()):
        self._index = {p.name: i for i, p in enumerate(passed)}
        self._passed = len(self._index)
        self.captured: list[Any] = []

    def positions(self, nested: NestedTrace) -> list[int]:
        """For each input of a trace its position among the values."""
        keys = [i.value.name if isinstance(i.value, Proxy) else id(i.value) for i in nested.inputs]
        for key, i in zip(keys, nested.inputs):
            if key not in self._index:
                self._index[key] = self._passed + len(self.captured)
                self.captured.append(i.value)
        return [self._index[key] for key in keys]


def differentiable(values: Iterable[Any]) -> list[bool]:
    """For each value of the level that is being traced, whether a gradient for it may be asked for."""
    level = current_level()
    return [_may_require_grad(level, v) for v in values]


def _may_require_grad(level: Level, value: Any) -> bool:
    if not is_differentiable(value):
        return False
    # an inner level's trace may be replayed with other values; and the walk over the trace is not always needed
    return level.enclosing is not None or value.requires_grad or may_require_grad(level, value)


class Record:
    """What the forward pass of an operator keeps for its backward pass: a list, of one item for each step."""

    def __init__(self, steps: list):
        self._steps: list | None = steps

    def take(self) -> list:
        """The list, from which steps may be removed. It is gone then, unless autograd retains the graph."""
        if self._steps is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time, after its residuals have been freed. Pass "
                "`retain_graph=True` to the first backward pass."
            )
        if torch._C._autograd._get_current_graph_task_keep_graph():
            return list(self._steps)
        steps, self._steps = self._steps, None
        return steps


class RunTimeOperator(abc.ABC):
    """One call of an operator.

    Args:
        name: how its symbol begins.
        where: the inner functions, for messages.
        results: proxies, each of which is like one result.
        programs: the inner programs, by the names of the operator's parameters.
    """

    def __init__(self, name: str, where: str, results: Sequence[TensorProxy], programs: Mapping[str, Program]):
        level = current_level()
        self.executors = executors_of(level)
        self._executor = level.ctx.ad_hoc_executor
        self._name, self._where, self._results, self._programs = name, where, results, programs
        self._with_gradients_of: Sequence[int] | None = None
        is_random = any(program.is_random for program in programs.values())
        self._tags = [OpTags.RANDOM_OP if is_random else OperatorTag.REPEATABLE]
        self._symbol = self._register("", self._meta, self._run, self._printed)
        self._executor.register_implementation(
            self._symbol, execution_transform=self._symbol, grad_transform=self._grad_transform
        )

    def __call__(self, values: Sequence[Any]) -> list[TensorProxy]:
        """Records the call in the trace of the current level; returns the results."""
        results = self._symbol(*values)
        return [r if like.ndim else ltorch.reshape(r, ()) for r, like in zip(results, self._results)]

    @abc.abstractmethod
    def run(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The results, for real values."""

    @abc.abstractmethod
    def prepare_gradient(self) -> Iterable[int]:
        """Makes what the next two need; returns the positions of the values that get a gradient."""

    @abc.abstractmethod
    def run_forward(self, values: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        """The results, and what :meth:`run_backward` needs, in the order of :meth:`record_meta`."""

    @abc.abstractmethod
    def run_backward(
        self, record: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Mapping[int, torch.Tensor | None]:
        """The gradients of values by their positions, from those of the results."""

    def record_meta(self, values: Sequence[Any]) -> tuple[Proxy, ...]:
        """Proxies for what :meth:`run_forward` records: one :class:`Record`."""
        return (AnyProxy(Record([]), prefix="record"),)

    #
    # The symbols
    #

    def _register(
        self, suffix: str, meta: Callable, fn: Callable, printer: Callable = default_python_printer
    ) -> Symbol:
        # not by the executor's own method, which gives names that nobody can read
        name = f"{self._name}{suffix}_{self._executor.counter}"
        self._executor.counter += 1
        return OperatorExecutor.register_operator(
            self._executor, name, meta=meta, fn=fn, tags=self._tags, python_printer=printer
        )

    def _printed(self, bsym: BoundSymbol, *printables: Any) -> list[str]:
        """The call, and the inner programs as comments, as thunder prints what an operation consists of."""
        lines = [default_python_printer(bsym, *printables)]
        for parameter, program in self._programs.items():
            lines += [f"  # {parameter}:", *(f"    # {line}" for line in str(program).splitlines())]
        return lines

    def _meta(self, *values: Any) -> tuple[TensorProxy, ...]:
        # the gradient transform gives an unused result a gradient of zeros, and cannot for one without dimensions
        return tuple(TensorProxy(like=r, shape=r.shape or (1,), requires_grad=False) for r in self._results)

    def _forward_meta(self, *values: Any) -> tuple[Any, ...]:
        return *self._meta(*values), *self.record_meta(values)

    def _grad_transform(self, *values: Any) -> tuple[TensorProxy, ...]:
        if self._with_gradients_of is None:  # a region that is reused calls the operator again
            self._with_gradients_of = sorted(self.prepare_gradient())
        wanted = {i: values[i] for i in self._with_gradients_of}
        if not wanted:
            return self._symbol(*values)
        made = self._register("_forward", self._forward_meta, self._run_forward, self._printed)(*values)
        results, record = made[: len(self._results)], list(made[len(self._results) :])
        zeros = {
            i: functools.partial(
                torch.zeros,
                tuple(v.shape),
                dtype=dtypes.to_torch_dtype(v.dtype),
                device=devices.to_torch_device(v.device),
            )
            for i, v in wanted.items()
        }
        gradient = self._register(
            "_gradient",
            lambda record, gradients: tuple(TensorProxy(like=v, requires_grad=False) for v in wanted.values()),
            lambda record, gradients: self._run_backward(zeros, record, gradients),
        )
        given = [get_grad(r) if dtypes.is_inexact_dtype(r.dtype) else None for r in results]
        for value, grad in zip(wanted.values(), gradient(record, given)):
            put_grad(value, grad)
        return results

    #
    # When the program runs
    #

    def _run(self, *values: Any) -> tuple[torch.Tensor, ...]:
        return _as_operator_results(self.run(values), values)

    def _run_forward(self, *values: Any) -> tuple[Any, ...]:
        results, record = self.run_forward(values)
        return *_as_operator_results(results, values), *record

    def _run_backward(
        self, zeros: Mapping[int, Callable], record: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        given = [g if g is None else g.reshape(like.shape) for g, like in zip(gradients, self._results)]
        try:
            found = self.run_backward(record, given)
        except ChangedError:
            raise RuntimeError(
                f"A tensor that the gradient of {self._where} needs was changed in place after the call. Change a "
                f"clone of it."
            ) from None
        made = [found[i] if found.get(i) is not None else zero() for i, zero in zeros.items()]
        return without_aliases(made, gradients)


def _as_operator_results(results: Sequence[torch.Tensor], values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    return without_aliases([r.reshape(1) if r.ndim == 0 else r for r in results], values)
