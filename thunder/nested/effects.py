"""What a function changes outside itself while it is traced, and how the change is made in the enclosing level.

stock thunder records attributes set on modules and other objects in ``JitCtx._additional_outputs``. Containers and
closure cells it changes at once, which is right at level 0, where the interpreter *is* the program. An inner level
changes copies of containers, and gives cells their contents back when it ends, so that the enclosing level is left
as it was. When the trace is replayed, all of these changes are made by the enclosing level's own interpreter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import CellType, MemberDescriptorType
from typing import TYPE_CHECKING, Any

from thunder.core.interpreter import (
    InterpreterFrame,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    populate_attribute_wrapper,
    unwrap,
    wrap_const,
)
from thunder.nested.captures import Attr, Lift, Path, path_of
from thunder.nested.errors import CaptureError, name_of
from thunder.nested.lookasides import call_interpreted

if TYPE_CHECKING:
    from thunder.nested.levels import Level

_MUTATORS = frozenset(
    getattr(typ, name)
    for typ in (list, dict, set)
    for name in (
        *("__setitem__", "__delitem__", "__iadd__", "__imul__", "__ior__", "__iand__", "__ixor__", "__isub__"),
        *("append", "extend", "insert", "remove", "reverse", "sort", "pop", "clear", "update", "setdefault"),
        *("popitem", "add", "discard", "difference_update", "intersection_update", "symmetric_difference_update"),
    )
    if hasattr(typ, name)
)
_EMPTY = object()


@dataclasses.dataclass(frozen=True)
class Write:
    """A container or cell that came from outside and was changed: its wrapper, its path, and what was in it."""

    wrapper: WrappedValue
    path: Path
    original: Any


@dataclasses.dataclass
class SlotWrite:
    """A slot of an object from outside that was set: thunder records what is in a ``__dict__`` only."""

    path: Path
    obj: Any
    name: str
    original: Any
    value: WrappedValue


class Writes:
    """The containers and cells from outside that the function of a level has changed, in order of the first change."""

    def __init__(self) -> None:
        self._writes: dict[int, Write] = {}
        self.slots: dict[tuple[int, str], SlotWrite] = {}

    def __iter__(self) -> Iterator[Write]:
        return iter(self._writes.values())

    def __len__(self) -> int:
        return len(self._writes) + len(self.slots)

    def of(self, wrapper: WrappedValue) -> Write | None:
        """The record of a changed container or cell, or None where it is unchanged."""
        return self._writes.get(id(wrapper))

    def forget(self, wrapper: WrappedValue) -> None:
        """Takes a changed container for unchanged."""
        self._writes.pop(id(wrapper), None)

    def before_call(self, level: Level, fn: Callable, args: tuple) -> None:
        """Before a method changes a container that came from outside: lets it change a copy instead."""
        if fn is object.__setattr__ and len(args) == 3:
            self._before_slot(*args)
        if not args or fn not in _MUTATORS:
            return
        container = args[0]
        if type(container.value) not in (list, dict, set) or id(container) in self._writes:
            return
        path = path_of(container.provenance)
        if path is None:
            return
        original = container.value
        if container.original_value is container.nothing:
            if isinstance(original, set):
                container.register_proxy(set(original))
            else:
                container.track_items()
                level.ctx.proxify(container)
        self._writes[id(container)] = Write(container, path, original)

    def _before_slot(self, obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> None:
        path, plain, attribute = path_of(obj.provenance), obj.value, unwrap(name)
        # setting what is no slot raises, and changes nothing
        if path is None or not isinstance(getattr(type(plain), attribute, None), MemberDescriptorType):
            return
        known = self.slots.get((id(plain), attribute))
        original = getattr(plain, attribute, _EMPTY) if known is None else known.original
        self.slots[id(plain), attribute] = SlotWrite(path, plain, attribute, original, value)

    def before_store_deref(self, frame: InterpreterFrame, name: str) -> None:
        """Before a closure cell is written by the opcode of the frame's current instruction."""
        self.before_cell(next(c for i, c in enumerate(frame.localsplus) if frame.get_localsplus_name(i) == name))

    def before_cell(self, cell: WrappedValue) -> None:
        """Before a closure cell is written: if it came from outside, notes what was in it."""
        path = path_of(cell.provenance)
        if path is not None and id(cell) not in self._writes:
            self._writes[id(cell)] = Write(cell, path, _contents(unwrap(cell)))

    def undo(self) -> None:
        """Gives cells and slots their contents back (containers were changed in copies)."""
        for slot in self.slots.values():
            if slot.original is _EMPTY:
                object.__delattr__(slot.obj, slot.name)
            else:
                object.__setattr__(slot.obj, slot.name, slot.original)
        for write in self:
            if isinstance(write.wrapper.value, CellType):
                if write.original is _EMPTY:
                    del write.wrapper.value.cell_contents
                else:
                    write.wrapper.value.cell_contents = write.original


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Python's sign for an empty cell
        return _EMPTY


def written_values(level: Level) -> list[Any]:
    """The values that the changes put into what is outside."""
    members = [m[3] for modifications in level.ctx._additional_outputs.values() for m in modifications]
    written = [
        w.wrapper.attribute_wrappers["cell_contents"] if isinstance(w.wrapper.value, CellType) else w.wrapper
        for w in level.writes
    ]
    return [unwrap(v) for v in (*members, *written, *(slot.value for slot in level.writes.slots.values()))]


def has_effects(level: Level) -> bool:
    """Whether the function changed anything outside itself that is not a tensor's data."""
    return bool(level.ctx._additional_outputs) or len(level.writes) > 0


def replay_effects(level: Level, enclosing: Level, lift: Lift, rewrap: Callable[[Any], WrappedValue]) -> None:
    """Makes, in the enclosing level, the changes that the function of ``level`` made.

    Args:
        level: the inner level, which has ended.
        enclosing: the level in which the changes are made.
        lift: finds the changed objects in the enclosing level.
        rewrap: gives the enclosing level's value for a (wrapped) value of the inner level.
    """
    # all is looked up before anything is changed: a path leads to what the function found there
    changes: list[Callable[[], None]] = []
    for modifications in level.ctx._additional_outputs.values():
        for inst, owner, key, value in modifications:
            assert inst is PseudoInst.STORE_SUBSCR, inst
            changes += _member_change(level, lift, owner, key, rewrap(value))
    for write in level.writes:
        target = lift(write.path)
        if isinstance(write.wrapper.value, CellType):
            value = rewrap(write.wrapper.attribute_wrappers["cell_contents"])
            changes.append(functools.partial(_set_cell, enclosing, target, value))
        else:
            changes.append(_container_change(target, write.wrapper, rewrap))
    for slot in level.writes.slots.values():
        changes.append(functools.partial(_set_slot, lift(slot.path), slot.name, rewrap(slot.value)))
    for change in changes:
        change()
    lift.forget()


def _set_cell(enclosing: Level, target: WrappedValue, value: WrappedValue) -> None:
    if enclosing.enclosing is not None:
        enclosing.writes.before_cell(target)
    target.value.cell_contents = value.value
    populate_attribute_wrapper(target, "cell_contents", value)


def _set_slot(target: WrappedValue, name: str, value: WrappedValue) -> None:
    call_interpreted(object.__setattr__, target, wrap_const(name), value)
    target.attribute_wrappers[name] = value


def _member_change(
    level: Level, lift: Lift, owner: WrappedValue, key: WrappedValue, value: WrappedValue
) -> list[Callable[[], None]]:
    """``owner`` is an object's ``__dict__`` or a module's ``_buffers``, ``_parameters`` or ``_modules``."""
    path = path_of(owner.provenance)
    if path is None:
        if _made_inside(owner.provenance.inputs[0]):
            return []  # it comes back with the result
        raise CaptureError(
            f"{name_of(level.fn)} sets `{unwrap(key)}` on an object that was reached in a way that cannot be "
            f"recorded. Pass the object as an argument or close over it."
        )
    members = None if path.steps[-1] == Attr("__dict__") else lift(path)
    return [functools.partial(_set_member, lift(path.parent), members, wrap_const(unwrap(key)), value)]


def _set_member(obj: WrappedValue, members: WrappedValue | None, key: WrappedValue, value: WrappedValue) -> None:
    from thunder.core.jit_ext import EXT_FLAG_IS_MODULE_MEMBER_DICT

    if members is None:
        call_interpreted(object.__setattr__, obj, key, value)
        if "__dict__" in obj.attribute_wrappers:
            members = obj.attribute_wrappers["__dict__"]
            members.item_wrappers[key.value], members.key_wrappers[key.value] = value, key
    else:
        members.provenance.ext_flag |= EXT_FLAG_IS_MODULE_MEMBER_DICT
        call_interpreted(dict.__setitem__, members, key, value)
    obj.attribute_wrappers[key.value] = value  # where the interpreter looks first


def _made_inside(provenance: ProvenanceRecord) -> bool:
    """Whether an object was made by the function: by a ``__new__``, or as one of torch's context managers."""
    if provenance.inst is PseudoInst.OPAQUE:
        maker = provenance.inputs[0]
        if maker.inst is PseudoInst.CONSTANT:
            return getattr(maker.value, "__name__", None) == "__new__"
        return maker.inst is PseudoInst.LOAD_ATTR and maker.inputs[1].value == "__new__"
    if provenance.inst is PseudoInst.LOAD_ATTR and provenance.inputs[0].inst is PseudoInst.CONSTANT:
        # `with` keeps the bound `__exit__` only; those of torch set what they restore on themselves
        owner = getattr(provenance.inputs[0].value, "__self__", None)
        return type(owner).__module__.startswith("torch.")
    return provenance.inst is PseudoInst.NEW


def _container_change(
    target: WrappedValue, changed: WrappedValue, rewrap: Callable[[Any], WrappedValue]
) -> Callable[[], None]:
    if isinstance(changed.value, list):
        return functools.partial(
            call_interpreted, list.__setitem__, target, wrap_const(slice(None)), rewrap_items(changed, rewrap)
        )
    if isinstance(changed.value, dict):
        before = unwrap(target)
        removed = [key for key in before if key not in changed.value]
        items = {
            key: rewrap(changed.item_wrappers.get(key, value))
            for key, value in changed.value.items()
            if before.get(key, _EMPTY) is not value
        }
        return functools.partial(_change_dict, target, removed, items)
    return functools.partial(_change_set, target, set(changed.value))


def _change_dict(target: WrappedValue, removed: list[Any], items: dict[Any, WrappedValue]) -> None:
    for key in removed:
        call_interpreted(dict.__delitem__, target, wrap_const(key))
    for key, value in items.items():
        call_interpreted(dict.__setitem__, target, wrap_const(key), value)


def _change_set(target: WrappedValue, items: set[Any]) -> None:
    call_interpreted(set.clear, target)
    call_interpreted(set.update, target, wrap_const(items))


def rewrap_items(changed: WrappedValue, rewrap: Callable[[Any], WrappedValue]) -> WrappedValue:
    """A fresh wrapped list of the enclosing level with the items of a list of the inner level."""
    items = [rewrap(w if w is not None else v) for w, v in zip(changed.item_wrappers, changed.value)]
    fresh = wrap_const([item.value for item in items])
    fresh.item_wrappers = items
    return fresh
