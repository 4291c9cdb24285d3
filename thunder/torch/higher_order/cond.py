"""``torch.cond``: one of two branches, chosen when the program runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

import thunder.nested
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.nested.errors import name_of
from thunder.nested.lookasides import call_interpreted
from thunder.torch.higher_order.common import HigherOrderError, checked_callable
from thunder.torch.higher_order.inner_function import (
    InnerFunction,
    call_with,
    check_known_shapes,
    described,
    spelled,
    structure,
)
from thunder.torch.higher_order.operator import Record, RunTimeOperator, Values, differentiable
from thunder.torch.higher_order.program import Program


@thunder.nested.lookaside(torch.cond)
@thunder.nested.lookaside(torch.ops.higher_order.cond)
def cond(
    pred: WrappedValue, true_fn: WrappedValue, false_fn: WrappedValue, operands: WrappedValue | None = None
) -> WrappedValue | Any:
    """Calls one of two functions::

        def cond(pred, true_fn, false_fn, operands=()):
            return true_fn(*operands) if pred else false_fn(*operands)

    If ``pred`` is a number of Python it is known while tracing (and guarded), and the branch is inlined. If it is a
    tensor both branches are traced, and the program has one operator, which runs one of them. They must give results
    of one structure, with equal shapes, dtypes and devices, and have no effects. Results are new tensors, even where
    a branch returns an operand or a view of it.

    The forward pass keeps what the gradient of the taken branch needs. What only the other branch uses gets zeros.

    Transforms that were given to ``thunder.jit`` do not see the operations of the branches.

    Raises:
        HigherOrderError: ``pred`` is no bool tensor of one element and no number; a branch is not callable, raises,
            or has effects; the branches' results differ; shapes are symbolic.
    """
    operands = wrap_const(()) if operands is None else operands
    functions = checked_callable(true_fn, "torch.cond", "true_fn"), checked_callable(false_fn, "torch.cond", "false_fn")
    if not isinstance(unwrap(pred), TensorProxy):
        taken = true_fn if _truth(pred, functions[0]) else false_fn
        return thunder.nested.trace(call_with, taken, operands, {}).inline()
    _check_pred(unwrap(pred), functions[0])
    true = InnerFunction("torch.cond", "true_fn", true_fn, operands, runs=False)
    false = InnerFunction("torch.cond", "false_fn", false_fn, operands, runs=False)
    _check_same(true, false)
    outputs = iter(_conditional(unwrap(pred), true, false) if true.tensors else ())
    leaves = [next(outputs) if isinstance(leaf, TensorProxy) else leaf for _, leaf in true.leaves]
    return tree_unflatten(leaves, true.spec)


#
# What is allowed
#


def _truth(pred: WrappedValue, true_fn: Callable) -> bool:
    value = unwrap(pred)
    if isinstance(value, (bool, int, float)) or (isinstance(value, NumberProxy) and value.value is not None):
        truth = unwrap(call_interpreted(bool, pred))  # by the interpreter, which guards it
        return bool(truth.value if isinstance(truth, NumberProxy) else truth)
    raise HigherOrderError(
        f"`pred` of the `torch.cond` with {name_of(true_fn)} is {type(unwrap(pred)).__name__}. Pass a bool tensor with "
        f"one element, or a Python number whose value is known while tracing (not the result of `.item()`)."
    )


def _check_pred(pred: TensorProxy, true_fn: Callable) -> None:
    if any(size != 1 for size in pred.shape) or pred.dtype is not dtypes.bool8:
        raise HigherOrderError(
            f"`pred` of the `torch.cond` with {name_of(true_fn)} is {described(pred)}. It must be a bool tensor with "
            f"one element: compare, or use `.any()`, `.all()` or `.bool()`."
        )
    check_known_shapes("torch.cond", true_fn)


def _check_same(true: InnerFunction, false: InnerFunction) -> None:
    if true.spec != false.spec:
        raise HigherOrderError(
            f"The branches of `torch.cond` must return one structure, but {true.name} returns "
            f"{structure(true.leaves, true.spec)} and {false.name} returns {structure(false.leaves, false.spec)} (`*` "
            f"is a leaf). Let both return the same containers."
        )
    for (path, a), (_, b) in zip(true.leaves, false.leaves):
        both_tensors = isinstance(a, TensorProxy) and isinstance(b, TensorProxy)
        if both_tensors and described(a) == described(b):
            continue
        if not (isinstance(a, TensorProxy) or isinstance(b, TensorProxy)) and type(a) is type(b) and a == b:
            continue
        remedy = "Convert one with `.to(...)`, `.expand(...)` or `.reshape(...)`" if both_tensors else "Return tensors"
        raise HigherOrderError(
            f"The branches of `torch.cond` must return equal types, but at {spelled(path)} {true.name} returns "
            f"{described(a)} and {false.name} returns {described(b)}. {remedy}."
        )


#
# The operator
#


def _conditional(pred: TensorProxy, true: InnerFunction, false: InnerFunction) -> list[TensorProxy]:
    values = Values()
    positions = {True: values.positions(true.nested), False: values.positions(false.nested)}
    flags = differentiable(values.captured)
    branches = {
        taken: _Branch(Program(b.nested, b.tensors, [flags[p] for p in positions[taken]]), positions[taken])
        for taken, b in ((True, true), (False, false))
    }
    where = f"the `torch.cond` with {true.name} and {false.name}"
    return Conditional(where, true.tensors, branches)([pred, *values.captured])


class _Branch:
    """A branch's program, and which of the operator's values, without ``pred``, are its inputs."""

    def __init__(self, program: Program, positions: Sequence[int]):
        self.program, self.positions = program, positions

    def inputs(self, values: Sequence[Any]) -> list[Any]:
        """The branch's inputs among the operator's values."""
        return [values[1 + p] for p in self.positions]


class Conditional(RunTimeOperator):
    """``results = torch_cond(pred, *values)``, where the values are the inputs of both branches, each once."""

    def __init__(self, where: str, results: Sequence[TensorProxy], branches: Mapping[bool, _Branch]):
        programs = {"true_fn": branches[True].program, "false_fn": branches[False].program}
        super().__init__("torch_cond", where, results, programs)
        self._branches = branches
        self._forward = {taken: branch.program.forward(self.executors) for taken, branch in branches.items()}

    def run(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        taken = bool(values[0])
        return self._forward[taken](*self._branches[taken].inputs(values))

    def prepare_gradient(self) -> Iterable[int]:
        self._with_gradient, wanted = {}, set()
        for taken, branch in self._branches.items():
            *pair, has_gradient = branch.program.with_gradient(self.executors)
            self._with_gradient[taken] = pair
            wanted |= {1 + p for p, has in zip(branch.positions, has_gradient) if has}
        return wanted

    def run_forward(self, values: Sequence[Any]) -> tuple[Sequence[torch.Tensor], Sequence[Any]]:
        taken = bool(values[0])
        results, residuals = self._with_gradient[taken][0](*self._branches[taken].inputs(values))
        return results, [Record([(taken, residuals)])]

    def run_backward(
        self, record: Sequence[Any], gradients: Sequence[torch.Tensor | None]
    ) -> Mapping[int, torch.Tensor | None]:
        taken, residuals = record[0].take().pop()
        found = self._with_gradient[taken][1](residuals, gradients)
        return {1 + p: gradient for p, gradient in zip(self._branches[taken].positions, found)}
