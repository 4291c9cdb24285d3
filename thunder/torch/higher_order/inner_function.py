"""A function that an operator calls when the program runs: traced, and checked for what it may not do there."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CellType
from typing import Any

from torch.utils._pytree import GetAttrKey, SequenceKey, keystr, tree_flatten_with_path, tree_unflatten

import thunder.nested
from thunder.core import devices, dtypes
from thunder.core.compile_data import get_cache_option, get_compile_data
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.nested.ambient import ambient_state
from thunder.nested.captures import Attr, Path, path_of
from thunder.nested.effects import _made_inside
from thunder.nested.errors import name_of
from thunder.nested.lookasides import read_attribute, read_item
from thunder.nested.rewrap import reachable_proxies
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import HigherOrderError, checked_callable
from thunder.torch.higher_order.requires_grad import is_in_place


def call_with(fn: Callable, arguments: Any, keywords: dict[str, Any]) -> Any:
    """What is traced: the arguments of the operator's function are one structure."""
    return fn(*arguments, **keywords)


class InnerFunction:
    """A traced function of an operator.

    Args:
        operator: the operator, and
        parameter: the parameter of it that the function is, for messages.
        fn: the wrapped function.
        arguments, keywords: the arguments, as one (wrapped or plain) structure each.
        runs: whether it is certain, while tracing, that the function runs.

    Attributes:
        leaves: path and value for each part of the result.
        spec: the result's structure.

    Raises:
        HigherOrderError: the function is not callable, or does what only a function that is called at once, and once,
            may do; it raises, and may not run at all.
        Exception: what the function raises, if it certainly runs.
    """

    def __init__(
        self,
        operator: str,
        parameter: str,
        fn: WrappedValue,
        arguments: Any,
        keywords: dict[str, Any] | None = None,
        *,
        runs: bool,
    ):
        self.fn = checked_callable(fn, operator, parameter)
        self.name = f"`{parameter}` {name_of(self.fn)}"
        self.operator, self.parameter = operator, parameter
        self.nested = thunder.nested.trace(call_with, fn, arguments, keywords or {})
        self._check(runs)
        leaves, self.spec = tree_flatten_with_path(self.nested.result)
        self.leaves: list[tuple[Any, Any]] = leaves
        self._check_leaves()

    @property
    def tensors(self) -> list[TensorProxy]:
        """The leaves of the result that are tensors."""
        return [leaf for _, leaf in self.leaves if isinstance(leaf, TensorProxy)]

    def _check(self, runs: bool) -> None:
        error = self.nested.exception
        if error is not None and runs:
            raise error
        if error is not None:
            raise HigherOrderError(
                f"{self.name} of `{self.operator}` raises {type(error).__name__}: {error}. It is traced, whether and "
                f"however often it runs, so it may not raise. Return a value that says so instead."
            ) from error
        effect = self._effect()
        if effect is not None:
            raise HigherOrderError(
                f"{self.name} of `{self.operator}` {effect}, but it is traced once, and whether and how often it runs "
                f"is known only when the program runs. Return the new value, and make the change after the call."
            )

    def _effect(self) -> str | None:
        if self.nested._level.final_state != ambient_state(get_compile_data()):
            return "leaves grad mode or autocast changed"
        return effect_of(self.nested, self.fn, 1)  # the function is the first argument of `call_with`

    def _check_leaves(self) -> None:
        for path, leaf in self.leaves:
            if not isinstance(leaf, TensorProxy) and reachable_proxies(self.nested._level, [leaf]):
                raise HigherOrderError(
                    f"{self.name} of `{self.operator}` returns at {spelled(path)} a {type(leaf).__name__}, which "
                    f"depends on tensors. Return tensors, in tuples, lists and dicts."
                )


def effect_of(nested: NestedTrace, fn: Callable, skipped: int = 0) -> str | None:
    """What a traced function changes in place or outside of it, as a part of a sentence; None if nothing.

    Args:
        nested: the trace.
        fn: the function, as messages are to speak of it.
        skipped: how many steps of the paths in the trace lead to the function.
    """
    level = nested._level
    for bsym in nested.computation_trace.bound_symbols:
        if is_in_place(bsym):
            where = f", {bsym.source_filename}:{bsym.source_positions.lineno}" if bsym.source_positions else ""
            return f"changes a tensor in place (`{bsym.sym.name}`{where})"
    for _, owner, key, _ in itertools.chain(*level.ctx._additional_outputs.values()):
        if path_of(owner.provenance) is not None or not _made_inside(owner.provenance.inputs[0]):
            return f"sets `{unwrap(key)}` on an object outside of it"
    for write in level.writes:
        steps = write.path.steps[skipped:]
        if isinstance(write.wrapper.value, CellType):
            steps = (*steps, Attr("cell_contents"))
        root = "fn" if skipped else write.path.root
        return f"changes `{Path(root, steps).spoken(fn)}`, which is outside of it"
    return None


def spelled(path: Any) -> str:
    """Where a leaf is in a structure, for messages."""
    return f"`{keystr(path)}`" if path else "the top"


def described(leaf: Any) -> str:
    """Kind, dtype, shape and device of a leaf, for messages."""
    if isinstance(leaf, TensorProxy):
        dtype, device = dtypes.to_torch_dtype(leaf.dtype), devices.to_torch_device(leaf.device)
        return f"a {dtype} tensor of shape {tuple(leaf.shape)} on {device}"
    value = leaf.value if isinstance(leaf, NumberProxy) else leaf
    return f"the {type(value).__name__} {value!r}"


def structure(leaves: list[tuple[Any, Any]], spec: Any) -> Any:
    """A structure, for messages, with a ``*`` for each leaf."""
    return tree_unflatten(["*"] * len(leaves), spec)


def checked_call(operator: str, parameter: str, fn: WrappedValue) -> str:
    """The call of an operator with a function, as messages name it.

    Raises:
        HigherOrderError: the function is not callable, or shapes are symbolic.
    """
    plain = checked_callable(fn, operator, parameter)
    check_known_shapes(operator, plain)
    return f"the `{operator}` with {name_of(plain)}"


def check_known_shapes(operator: str, fn: Callable) -> None:
    """Raises where shapes are symbolic, which the inner programs cannot be compiled with."""
    if get_cache_option() is CACHE_OPTIONS.SYMBOLIC_VALUES:
        raise HigherOrderError(
            f"The `{operator}` with {name_of(fn)} needs shapes that are known while tracing. Compile without "
            f"`cache='symbolic values'`."
        )


def read_leaves(tree: WrappedValue) -> tuple[list[tuple[Any, WrappedValue]], Any]:
    """Path and wrapped value for each leaf of a wrapped structure, read by the interpreter, which guards it.

    Returns:
        The leaves, and the structure.
    """
    paths, spec = tree_flatten_with_path(unwrap(tree))
    leaves = []
    for path, _ in paths:
        value = tree
        for key in path:
            if isinstance(key, GetAttrKey):
                value = read_attribute(value, key.name)
            else:
                value = read_item(value, key.idx if isinstance(key, SequenceKey) else key.key)
        leaves.append((path, value))
    return leaves, spec


def read_flat(tree: WrappedValue) -> list[Any]:
    """The plain leaves of a wrapped structure, read like :func:`read_leaves`."""
    return [unwrap(leaf) for _, leaf in read_leaves(tree)[0]]
