"""How a result of an inner level becomes a wrapped value of the enclosing level.

The interpreter wraps each value and keeps, beside it, wrappers of its items and attributes. A result may be a value
of the enclosing level that the function passed through (then it is that very value), something that the function
computed (then its replayed proxy), or a structure that it built, which is built again from such parts.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    wrap,
    wrap_const,
    wrapped_build_tuple,
)
from thunder.core.proxies import Proxy
from thunder.nested.captures import Lift, path_of
from thunder.nested.errors import ResultError, name_of
from thunder.nested.levels import Level

_ATOMS = (int, float, complex, str, bytes, bool, type(None), type, types.ModuleType, slice, range)
_RUNNING = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.CodeType)


class Rewrap:
    """Makes wrapped values of the enclosing level from those of an inner level that has ended.

    Args:
        level: the inner level.
        lift: finds what the function passed through.
        replayed: name of a proxy in the inner computation to the value that takes its place.
    """

    def __init__(self, level: Level, lift: Lift, replayed: Mapping[str, Any]):
        self.level, self.lift, self.replayed = level, lift, replayed
        self._done: dict[tuple[str, int], tuple[Any, Any]] = {}

    def __call__(self, value: Any) -> WrappedValue:
        """The enclosing level's wrapped value for a value, wrapped or not, of the inner level."""
        return self._memo(value, self._wrapped if isinstance(value, WrappedValue) else self._from_plain)

    def exception(self, error: Exception) -> Exception:
        """An exception that the inner function raised, with the values of the enclosing level in its arguments."""
        if reachable_proxies(self.level, [error.args, vars(error)]):
            error.args = tuple(map(self._plain, error.args))
            for name, value in list(vars(error).items()):
                setattr(error, name, self._plain(value))
        return error

    def _memo(self, value: Any, make: Callable[[Any], Any]) -> Any:
        """The inner level's aliasing is kept: the same object becomes the same object. Holds on to the key object."""
        done = self._done.get((make.__name__, id(value)))
        if done is None:
            self._done[make.__name__, id(value)] = (value, value)  # what refers to itself ends here
            done = self._done[make.__name__, id(value)] = (value, make(value))
        return done[1]

    def _wrapped(self, w: WrappedValue) -> WrappedValue:
        uvalue = w.value
        if isinstance(uvalue, Proxy):
            return self._proxy(uvalue, w.provenance)
        written = self.level.writes.of(w)
        path = written.path if written is not None else path_of(w.provenance)
        if path is not None:
            return self.lift(path)
        if w.provenance.inst is PseudoInst.CONSTANT and isinstance(uvalue, _ATOMS):
            return wrap_const(uvalue)
        if type(uvalue) in (tuple, list):
            items = [self(i if i is not None else v) for i, v in zip(w.item_wrappers, uvalue)]
            if isinstance(uvalue, tuple):
                return wrapped_build_tuple(items)
            return self._container([i.value for i in items], w, items)
        if type(uvalue) is dict:
            items = {k: self(w.item_wrappers.get(k, v)) for k, v in uvalue.items()}
            new = self._container({k: i.value for k, i in items.items()}, w, items)
            new.key_wrappers = {k: wrap_const(k) for k in items}
            return new
        return self._wrap(self._plain(uvalue), w.provenance)

    def _proxy(self, proxy: Proxy, provenance: ProvenanceRecord) -> WrappedValue:
        path = self.level.path_to(proxy)
        if path is not None:
            return self.lift(path)
        return self._wrap(self._plain(proxy), provenance)

    def _container(self, value: Any, w: WrappedValue, items: Any) -> WrappedValue:
        new = self._wrap(value, w.provenance)
        new.item_wrappers = items
        return new

    def _from_plain(self, value: Any) -> WrappedValue:
        if isinstance(value, Proxy):
            return self._proxy(value, ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))
        return self._wrap(self._plain(value), None)

    def _wrap(self, value: Any, origin: ProvenanceRecord | None) -> WrappedValue:
        # objects made while tracing may be changed freely, which the interpreter sees by this instruction
        made = not isinstance(value, (Proxy, *_ATOMS)) and _is_object(value)
        provenance = ProvenanceRecord(PseudoInst.NEW if made else PseudoInst.LOOKASIDE, inputs=[])
        if origin is not None:
            provenance.ext_flag = origin.ext_flag
        return wrap(value, provenance=provenance)

    #
    # Plain values: objects that the function made, with the proxies in them exchanged
    #

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Proxy):
            if value.name in self.level.stand_ins:
                return self.lift.value_of(self.level.stand_ins[value.name], self.level.path_to(value))
            return self.replayed.get(self.level.final_name(value), value)
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, _RUNNING):
            raise ResultError(
                f"{name_of(self.level.fn)} returns a {type(value).__name__}, which holds on to the finished trace of "
                f"the function. Return the values that it would yield, for instance as a list."
            )
        return self._memo(value, self._plain_object)

    def _plain_object(self, value: Any) -> Any:
        if isinstance(value, tuple):
            items = [self._plain(v) for v in value]
            return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)
        if isinstance(value, (list, set, frozenset)):
            return type(value)([self._plain(v) for v in value])
        if isinstance(value, dict):
            return type(value)((k, self._plain(v)) for k, v in value.items())
        if isinstance(value, types.FunctionType) and self._mentions_inner(value):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._plain(value.__self__))
        if _is_object(value) and self._mentions_inner(value):
            new = object.__new__(type(value))
            for k, v in value.__dict__.items():
                object.__setattr__(new, k, self._plain(v))
            return new
        return value

    def _mentions_inner(self, value: Any) -> bool:
        return bool(reachable_proxies(self.level, [value]))

    def _cell(self, cell: types.CellType) -> types.CellType:
        return types.CellType(*map(self._plain, _parts(cell))) if self._mentions_inner(cell) else cell

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        cells = tuple(self._memo(cell, self._cell) for cell in fn.__closure__)  # functions may share a cell
        new = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
        new.__kwdefaults__ = fn.__kwdefaults__
        new.__dict__.update(fn.__dict__)
        return new


def reachable_proxies(level: Level, values: Iterable[Any]) -> list[Proxy]:
    """The proxies of an inner level that can be reached from plain values: items, attributes, closure cells."""
    found: dict[str, Proxy] = {}
    seen: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Proxy):
            if not level.is_foreign(value):
                found.setdefault(value.name, value)
        elif not isinstance(value, _ATOMS) and id(value) not in seen:
            seen[id(value)] = value
            for part in _parts(value):
                visit(part)

    for value in values:
        visit(value)
    return list(found.values())


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        return value
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, types.CellType):
        try:
            return (value.cell_contents,)
        except ValueError:  # Python's sign for an empty cell
            return ()
    if isinstance(value, types.FunctionType):
        return value.__closure__ or ()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    return vars(value).values() if _is_object(value) else ()


def _is_object(value: Any) -> bool:
    """Whether it is an object of a class of the user's: what it holds are its attributes."""
    if isinstance(value, (type, torch.nn.Module, functools.partial)) or not hasattr(value, "__dict__"):
        return False
    return not callable(value) or isinstance(type(value).__call__, types.FunctionType)


def is_rebuilt_from_parts(level: Level, value: Any) -> bool:
    """Whether a result consists of what the level computed, of what paths lead to, and of plain constants.

    Then the result of another call can be built from that call's parts.
    """
    if not isinstance(value, WrappedValue):
        return isinstance(value, _ATOMS)
    if isinstance(value.value, Proxy):
        return not level.is_foreign(value.value)
    if path_of(value.provenance) is not None or isinstance(value.value, _ATOMS):
        return True
    if type(value.value) in (tuple, list):
        return all(is_rebuilt_from_parts(level, w) for w in value.item_wrappers)
    if type(value.value) is dict:
        return all(is_rebuilt_from_parts(level, value.item_wrappers.get(k)) for k in value.value)
    return False
