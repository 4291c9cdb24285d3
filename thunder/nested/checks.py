"""Misuse of nested traces: each check raises an error of its own, whose message names the function and the remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy
from thunder.core.symbol import has_tags
from thunder.nested.captures import Lift, Path
from thunder.nested.effects import has_effects
from thunder.nested.errors import (
    ArgumentError,
    InPlaceError,
    LevelError,
    OutsideTraceError,
    ReplayError,
    UntraceableCallableError,
    name_of,
)
from thunder.nested.levels import Level, current_level

if TYPE_CHECKING:
    from thunder.nested.trace import NestedTrace


def enclosing_level(what: str) -> Level:
    """The level that is running.

    Args:
        what: the function of ``thunder.nested`` that needs one.

    Raises:
        OutsideTraceError: there is none.
    """
    level = current_level()
    if level is None:
        raise OutsideTraceError(
            f"`thunder.nested.{what}` was called while nothing is traced. Call it in a lookaside, registered with "
            f"`thunder.nested.lookaside`, of a function that runs under `thunder.jit`."
        )
    return level


def check_callable(fn: Any) -> None:
    """What is to be traced must be callable, and hashable, as the interpreter needs it.

    Raises:
        UntraceableCallableError: it is not.
    """
    if not callable(fn):
        raise UntraceableCallableError(f"{fn!r} is not callable, so there is nothing to trace.")
    try:
        hash(fn)
    except TypeError as error:
        raise UntraceableCallableError(
            f"{name_of(fn)} cannot be hashed ({error}), so it cannot be told from other callables. Define `__hash__` "
            f"on {type(fn).__qualname__}, or pass its bound `__call__` method."
        ) from None


def check_level(nested: NestedTrace, method: str) -> None:
    """A trace belongs to the level in which it was made.

    Raises:
        LevelError: another level is running.
        OutsideTraceError: none is.
    """
    enclosing = enclosing_level(f"NestedTrace.{method}")
    if enclosing is not nested._enclosing:
        raise LevelError(
            f"The trace of {name_of(nested.fn)} was made while {name_of(nested._enclosing.fn)} was traced, and "
            f"`{method}` is called while {name_of(enclosing.fn)} is. Trace the function anew, with "
            f"`thunder.nested.trace`, in the lookaside that uses it."
        )


def check_replayable(nested: NestedTrace, method: str) -> None:
    """Effects are made by one replay, in the level of the trace.

    Raises:
        ReplayError: the function has effects, which were made by an earlier replay.
        LevelError, OutsideTraceError: as for :func:`check_level`.
    """
    check_level(nested, method)
    if nested._replayed and has_effects(nested._level):
        raise ReplayError(
            f"{name_of(nested.fn)} changes objects outside of it, and was traced as they were before its first "
            f"replay. Trace it anew, with `thunder.nested.trace`, to call it once more."
        )


def check_no_in_place(nested: NestedTrace) -> None:
    """One operator holds no in-place change.

    Raises:
        InPlaceError: the function changes a tensor in place.
    """
    for bsym in nested.computation_trace.bound_symbols:
        if has_tags(bsym, {OpTags.IN_PLACE}) or bsym.sym.id is PrimIDs.COPY_:
            where = f" at {bsym.source_filename}:{bsym.source_positions.lineno}" if bsym.source_positions else ""
            raise InPlaceError(
                f"{name_of(nested.fn)} changes a tensor in place (`{bsym.sym.name}`{where}), which one operator "
                f"cannot hold. Use the function's out-of-place form, or replay the trace with `inline()`."
            )


class ArgumentChecks:
    """Each check that an inner prologue makes of an argument, to be made of the arguments of another call.

    Args:
        level: the inner level, which has ended.
        lift: finds the arguments that it was traced with.
    """

    def __init__(self, level: Level, lift: Lift):
        self._level = level
        self._form = (len(lift.args), set(lift.kwargs))
        self._gradients = self._may_require_grad(lift)

    def __call__(self, args: tuple, kwargs: dict, lift: Lift) -> None:
        """Checks the arguments of a call, which ``lift`` finds.

        Raises:
            ArgumentError: they do not fit.
        """
        fn = name_of(self._level.fn)
        if (len(args), set(kwargs)) != self._form:
            raise ArgumentError(
                f"{fn} was traced with {self._form[0]} positional arguments and the keywords {sorted(self._form[1])}, "
                f"and is called with {len(args)} and {sorted(kwargs)}. Trace it with both forms."
            )
        gradients = self._may_require_grad(lift)
        for path, traced in self._checked():
            was = self._description(traced, self._gradients.get(path))
            now = self._description(lift(path).value, gradients.get(path))
            if was != now:
                raise ArgumentError(
                    f"{fn} was traced with {was} for `{path}`, and is called with {now}. Trace it once for each kind "
                    f"of argument."
                )

    def _checked(self) -> Iterator[tuple[Path, Any]]:
        """The paths to arguments that are checked, and the values that the function was traced with."""
        for _, *values in self._level.ctx._constraints:
            path = self._level.path_to(values[0]) if isinstance(values[0], Proxy) else None
            if path is not None and not path.is_capture:
                yield path, values[0] if len(values) == 1 else values[1]

    def _may_require_grad(self, lift: Lift) -> dict[Path, bool]:
        """Whether each argument may require a gradient, if the function's trace depends on it."""
        from thunder.torch.higher_order.requires_grad import may_require_grad

        if not self._level.reads_requires_grad:
            return {}
        return {path: may_require_grad(current_level(), lift(path).value) for path, _ in self._checked()}

    @staticmethod
    def _description(value: Any, may_require_grad: bool | None) -> str:
        shape = getattr(value, "_shape", None)
        if shape is None:
            return repr(value)
        grad = ""
        if may_require_grad is not None:  # it counts only where the function asked; intermediate values never say so
            grad = f", requires_grad={value.requires_grad}, with{'' if may_require_grad else 'out'} a gradient"
        return f"a tensor of shape {tuple(shape)}, {value.dtype}, on {value.device}{grad}"
