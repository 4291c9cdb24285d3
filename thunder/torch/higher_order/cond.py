"""``torch.cond``: one of two branches, chosen when the program runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

import thunder.nested
import thunder.torch as ltorch
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import WrappedValue, _interpret_call, unwrap, wrap_const
from thunder.core.options import CACHE_OPTIONS
from thunder.core.prims import OpTags
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.transforms import get_grad, put_grad
from thunder.nested.captures import Attr, Path, path_of
from thunder.nested.effects import _made_inside
from thunder.nested.errors import name_of
from thunder.nested.levels import Level, ambient_state, current_level
from thunder.nested.rewrap import reachable_proxies
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import (
    HigherOrderError,
    OperatorTag,
    Program,
    checked_callable,
    executors_of,
    in_place_copies,
    rng,
    rng_states,
    versions_of,
    without_aliases,
)
from thunder.torch.higher_order.requires_grad import is_differentiable, may_require_grad


def call_branch(branch: Callable, operands: Sequence[Any]) -> Any:
    """What is traced for a branch."""
    return branch(*operands)


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

    The gradient is an operator, too: it computes the taken branch once more, with the random numbers that the first
    run had, and then its gradient. What only the other branch uses gets zeros.

    Transforms that were given to ``thunder.jit`` do not see the operations of the branches.

    Raises:
        HigherOrderError: ``pred`` is no bool tensor of one element and no number; a branch is not callable, raises,
            or has effects; the branches' results differ; shapes are symbolic.
    """
    operands = wrap_const(()) if operands is None else operands
    functions = checked_callable(true_fn, "torch.cond", "true_fn"), checked_callable(false_fn, "torch.cond", "false_fn")
    if not isinstance(unwrap(pred), TensorProxy):
        taken = true_fn if _truth(pred, functions[0]) else false_fn
        return thunder.nested.trace(call_branch, taken, operands).inline()
    _check_pred(unwrap(pred), functions[0])
    true = Branch("true_fn", functions[0], thunder.nested.trace(call_branch, true_fn, operands))
    false = Branch("false_fn", functions[1], thunder.nested.trace(call_branch, false_fn, operands))
    true.check()
    false.check()
    _check_same(true, false)
    outputs = iter(Conditional(true, false)(unwrap(pred)) if true.tensors else ())
    leaves = [next(outputs) if isinstance(leaf, TensorProxy) else leaf for _, leaf in true.leaves]
    return tree_unflatten(leaves, true.spec)


#
# What is allowed
#


def _truth(pred: WrappedValue, true_fn: Callable) -> bool:
    value = unwrap(pred)
    if isinstance(value, (bool, int, float)) or (isinstance(value, NumberProxy) and value.value is not None):
        truth = unwrap(_interpret_call(bool, pred))  # by the interpreter, which guards it
        return bool(truth.value if isinstance(truth, NumberProxy) else truth)
    raise HigherOrderError(
        f"`pred` of the `torch.cond` with {name_of(true_fn)} is {type(unwrap(pred)).__name__}. Pass a bool tensor with "
        f"one element, or a Python number whose value is known while tracing (not the result of `.item()`)."
    )


def _check_pred(pred: TensorProxy, true_fn: Callable) -> None:
    if any(size != 1 for size in pred.shape) or pred.dtype is not dtypes.bool8:
        raise HigherOrderError(
            f"`pred` of the `torch.cond` with {name_of(true_fn)} is {_described(pred)}. It must be a bool tensor with "
            f"one element: compare, or use `.any()`, `.all()` or `.bool()`."
        )
    if get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES:
        raise HigherOrderError(
            f"The `torch.cond` with {name_of(true_fn)} needs shapes that are known while tracing, as `pred` is a "
            f"tensor. Compile without `cache='symbolic values'`."
        )


def _described(leaf: Any) -> str:
    if isinstance(leaf, TensorProxy):
        dtype, device = dtypes.to_torch_dtype(leaf.dtype), devices.to_torch_device(leaf.device)
        return f"a {dtype} tensor of shape {tuple(leaf.shape)} on {device}"
    return f"the {type(leaf).__name__} {leaf!r}"


class Branch:
    """A branch that was traced.

    Attributes:
        leaves: path and value for each part of the result.
        spec: the result's structure.
        tensors: those leaves that are tensors.
    """

    def __init__(self, parameter: str, fn: Callable, nested: NestedTrace):
        self.fn, self.nested = fn, nested
        self.name = f"`{parameter}` {name_of(fn)}"
        leaves, self.spec = tree_flatten_with_path(nested.result)
        self.leaves: list[tuple[Any, Any]] = leaves
        self.tensors = [leaf for _, leaf in leaves if isinstance(leaf, TensorProxy)]

    def check(self) -> None:
        """Raises if the branch does what only a function that is called at once may do."""
        if self.nested.exception is not None:
            error = self.nested.exception
            raise HigherOrderError(
                f"{self.name} of `torch.cond` raises {type(error).__name__}: {error}. Both branches are traced, "
                f"whichever is taken, so none may raise. Return a value that says so instead."
            ) from error
        effect = self._effect()
        if effect is not None:
            raise HigherOrderError(
                f"{self.name} of `torch.cond` {effect}, but both branches are traced, and which is taken is known only "
                f"when the program runs. Return the new value, and make the change after the call."
            )
        for path, leaf in self.leaves:
            if not isinstance(leaf, TensorProxy) and reachable_proxies(self.nested._level, [leaf]):
                raise HigherOrderError(
                    f"{self.name} of `torch.cond` returns at {_spelled(path)} a {type(leaf).__name__}, which depends "
                    f"on tensors. Return tensors, in tuples, lists and dicts."
                )

    def _effect(self) -> str | None:
        level = self.nested._level
        for bsym in self.nested.computation_trace.bound_symbols:
            if any(in_place_copies(bsym)) or (bsym.sym.tags and OpTags.IN_PLACE in bsym.sym.tags):
                where = f", {bsym.source_filename}:{bsym.source_positions.lineno}" if bsym.source_positions else ""
                return f"changes a tensor in place (`{bsym.sym.name}`{where})"
        for _, owner, key, _ in itertools.chain(*level.ctx._additional_outputs.values()):
            if path_of(owner.provenance) is not None or not _made_inside(owner.provenance.inputs[0]):
                return f"sets `{unwrap(key)}` on an object outside of it"
        for write in level.writes:
            steps = write.path.steps[1:]  # the branch is the first argument of `call_branch`
            if isinstance(write.wrapper.value, CellType):
                steps = (*steps, Attr("cell_contents"))
            return f"changes `{Path('fn', steps).spoken(self.fn)}`, which is outside of it"
        if level.final_state != ambient_state(get_compile_data()):
            return "leaves grad mode or autocast changed"
        return None


def _spelled(path: Any) -> str:
    return f"`{keystr(path)}`" if path else "the top"


def _check_same(true: Branch, false: Branch) -> None:
    if true.spec != false.spec:
        structures = [tree_unflatten(["*"] * len(b.leaves), b.spec) for b in (true, false)]
        raise HigherOrderError(
            f"The branches of `torch.cond` must return one structure, but {true.name} returns {structures[0]} and "
            f"{false.name} returns {structures[1]} (`*` is a leaf). Let both return the same containers."
        )
    for (path, a), (_, b) in zip(true.leaves, false.leaves):
        both_tensors = isinstance(a, TensorProxy) and isinstance(b, TensorProxy)
        if both_tensors and _described(a) == _described(b):
            continue
        if not (isinstance(a, TensorProxy) or isinstance(b, TensorProxy)) and type(a) is type(b) and a == b:
            continue
        remedy = "Convert one with `.to(...)`, `.expand(...)` or `.reshape(...)`" if both_tensors else "Return tensors"
        raise HigherOrderError(
            f"The branches of `torch.cond` must return equal types, but at {_spelled(path)} {true.name} returns "
            f"{_described(a)} and {false.name} returns {_described(b)}. {remedy}."
        )


#
# The operator
#


@dataclasses.dataclass
class _Taken:
    """A branch's program, and which of the operator's values are its inputs."""

    program: Program
    positions: list[int]
    forward: Callable
    gradient: Callable | None = None


def _may_require_grad(level: Level, value: Any) -> bool:
    if not is_differentiable(value):
        return False
    # an inner level's trace may be replayed with other values; and the walk over the trace is not always needed
    return level.enclosing is not None or value.requires_grad or may_require_grad(level, value)


class Conditional:
    """The operator ``results = cond(pred, *values)``, where the values are the inputs of both branches, each once.

    With gradients it is ``*results, *states, versions = cond_forward(pred, *values)``: the states are those of the
    random number generators before the call, if a branch may draw from one, and the versions say whether a value was
    changed in place between the forward and the backward pass.
    """

    def __init__(self, true: Branch, false: Branch):
        level = current_level()
        self._executor, self._executors = level.ctx.ad_hoc_executor, executors_of(level)
        self._leaves = true.tensors
        self._names = f"{true.name} and {false.name}"
        self._values: dict[Any, Any] = {}
        self._differentiable: list[bool] = []
        self._branches = {True: self._taken(true), False: self._taken(false)}
        is_random = any(b.program.is_random for b in self._branches.values())
        self._states = [tuple(state.shape) for state in rng_states()] if is_random else []
        tags = [OpTags.RANDOM_OP if is_random else OperatorTag.REPEATABLE]
        register = self._executor.register_operator
        self._symbol = register("cond", meta=self._meta, fn=self._run, tags=tags)
        self._forward = register("cond_forward", meta=self._forward_meta, fn=self._run_forward, tags=tags)
        self._executor.register_implementation(
            self._symbol, execution_transform=self._symbol, grad_transform=self._grad_transform
        )

    def __call__(self, pred: TensorProxy) -> Sequence[TensorProxy]:
        """Records the call in the enclosing trace; returns the results."""
        values, self._values = self._values.values(), {}  # the enclosing level's, which shall not live as long as this
        results = self._symbol(pred, *values)
        return [r if leaf.ndim else ltorch.reshape(r, ()) for r, leaf in zip(results, self._leaves)]

    def _taken(self, branch: Branch) -> _Taken:
        level = current_level()
        keys = [i.value.name if isinstance(i.value, Proxy) else id(i.value) for i in branch.nested.inputs]
        for key, i in zip(keys, branch.nested.inputs):
            if key not in self._values:
                self._values[key] = i.value
                self._differentiable.append(_may_require_grad(level, i.value))
        order = list(self._values)
        positions = [order.index(key) for key in keys]
        program = Program(branch.nested, branch.tensors, [self._differentiable[p] for p in positions])
        return _Taken(program, positions, program.forward(self._executors))

    def _meta(self, pred: TensorProxy, *values: Any) -> tuple[TensorProxy, ...]:
        # the gradient transform gives an unused result a gradient of zeros, and cannot for one without dimensions
        return tuple(TensorProxy(like=leaf, shape=leaf.shape or (1,), requires_grad=False) for leaf in self._leaves)

    def _forward_meta(self, pred: TensorProxy, *values: Any) -> tuple[TensorProxy, ...]:
        states = [TensorProxy(shape=shape, device=devices.cpu, dtype=dtypes.uint8) for shape in self._states]
        versions = TensorProxy(shape=(len(values),), device=devices.cpu, dtype=dtypes.int64)
        return *self._meta(pred, *values), *states, versions

    def _run(self, pred: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
        taken = self._branches[bool(pred)]
        results = taken.forward(*(values[p] for p in taken.positions))
        results = [r.reshape(1) if r.ndim == 0 else r for r in results]
        return without_aliases(results, values)

    def _run_forward(self, pred: torch.Tensor, *values: Any) -> tuple[torch.Tensor, ...]:
        states = rng_states()[: len(self._states)] if self._states else ()
        return *self._run(pred, *values), *states, versions_of(values)

    def _grad_transform(self, pred: TensorProxy, *values: Any) -> tuple[TensorProxy, ...]:
        wanted = self._prepare_gradients()
        if not wanted:
            return self._symbol(pred, *values)
        results = self._forward(pred, *values)
        results, (*states, versions) = results[: len(self._leaves)], results[len(self._leaves) :]
        operator = self._executor.register_operator(
            "cond_gradient",
            meta=lambda pred, values, states, versions, gradients: tuple(TensorProxy(like=values[i]) for i in wanted),
            fn=lambda *args: self._run_gradient(wanted, *args),
            tags=[OperatorTag.REPEATABLE],
        )
        gradients = [get_grad(r) if dtypes.is_inexact_dtype(r.dtype) else None for r in results]
        for i, gradient in zip(wanted, operator(pred, values, states, versions, gradients)):
            put_grad(values[i], gradient)
        return results

    def _prepare_gradients(self) -> list[int]:
        """Makes the branches' gradients; returns the positions of the values that get one from either branch."""
        wanted = set()
        for taken in self._branches.values():
            taken.gradient, has_gradient = taken.program.gradient(self._executors)
            wanted |= {p for p, has in zip(taken.positions, has_gradient) if has}
        return sorted(wanted)

    def _run_gradient(
        self,
        wanted: Sequence[int],
        pred: torch.Tensor,
        values: Sequence[Any],
        states: Sequence[torch.Tensor],
        versions: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor, ...]:
        if not torch.equal(versions, versions_of(values)):
            raise RuntimeError(
                f"A tensor that the `torch.cond` with {self._names} reads was changed in place after the call, so that "
                f"the gradient cannot be computed. Change a clone of it."
            )
        gradients = [g if g is None else g.reshape(leaf.shape) for g, leaf in zip(gradients, self._leaves)]
        taken = self._branches[bool(pred)]
        with rng(states):
            found = taken.gradient([values[p] for p in taken.positions], gradients)
        by_position = dict(zip(taken.positions, found))
        own = [g if (g := by_position.get(i)) is not None else torch.zeros_like(values[i]) for i in wanted]
        return without_aliases(own, gradients)
