"""What is compared of a value that a region read: its fingerprint, and which other values it is.

Tensors are inputs, so their metadata is; numbers, strings and None count by value; modules and other objects by type,
because what is read from them is noted on its own; containers by type and keys or length; functions by identity, or by
code and defaults where each call of an enclosing function makes a new one.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

import thunder.core.devices as devices
import thunder.core.dtypes as dtypes
from thunder.core.proxies import Proxy, TensorProxy
from thunder.nested.captures import Attr, Path

VALUES = (int, float, complex, str, bytes, bool, type(None), slice, range, torch.dtype, torch.device, torch.Size)
CONSTANTS = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
# made anew whenever they are read, or the same for all
_NO_IDENTITY = (
    *VALUES,
    *CONSTANTS,
    *(tuple, frozenset, types.BuiltinMethodType, types.MethodWrapperType),
    *(types.CellType, types.MappingProxyType, staticmethod, classmethod, property),
)
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_OWN_DICTS = tuple(map(Attr, ("__dict__", "_parameters", "_buffers", "_modules")))


class Same:
    """Equal to another one only if it holds the same object."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return getattr(self.value, "__qualname__", None) or repr(self.value)


class Unreadable(Exception):
    """A value that cannot be fingerprinted; the message says why."""


def fingerprint(value: Any, path: Path) -> tuple:
    """What must be found again at ``path`` for a trace to be reused.

    Raises:
        Unreadable: two values of this kind cannot be told to be the same.
    """
    if isinstance(value, TensorProxy):
        device, dtype = devices.to_torch_device(value.device), dtypes.to_torch_dtype(value.dtype)
        return ("tensor", tuple(value._shape), dtype, device, value.grad is not None)
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.dtype, value.device, value.is_leaf and value.grad is not None)
    if isinstance(value, Proxy):
        raise Unreadable(f"`{path}` is a number of the enclosing level")
    if isinstance(value, VALUES):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if isinstance(value, dict):
        last = path.steps[-1] if path.steps else None
        if last == Attr("__globals__"):
            # their values are noted when they are read; that a name is not there, or only in the builtins, is seen here
            return ("globals", Same(value), tuple(value))
        # what is in an object's own dicts is noted when it is read; other dicts may be compared as a whole
        return (type(value), tuple(map(_key, value)), None if last in _OWN_DICTS else _content(value.values()))
    if isinstance(value, (list, tuple)):
        return (type(value), len(value), _content(value))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(_key, value)))
    return _callable_or_object(value, path)


def _content(items: Iterable[Any], depth: int = 4) -> tuple:
    """The plain values in a container, which functions like ``==`` and ``max`` read without the interpreter."""
    return tuple(_item(i, depth) for i in items)


def _item(item: Any, depth: int) -> Any:
    if isinstance(item, VALUES):
        return (type(item), repr(item) if isinstance(item, float) else item)
    if isinstance(item, (Proxy, torch.Tensor, torch.nn.Module)):
        return None  # noted where it is read; which one it is, is in the pattern
    if depth == 0:
        return Same(item)
    if isinstance(item, (list, tuple)):
        return (type(item), _content(item, depth - 1))
    if isinstance(item, dict):
        return (type(item), tuple(map(_key, item)), _content(item.values(), depth - 1))
    if isinstance(item, (set, frozenset)):
        return (type(item), frozenset(map(_key, item)))
    if isinstance(item, types.CellType):
        return None if item == types.CellType() else _item(item.cell_contents, depth - 1)
    return _callable(item) or _compared(item, depth)


def _key(key: Any) -> Any:
    return key if isinstance(key, VALUES) else Same(key)


def _callable(value: Any) -> tuple | None:
    if isinstance(value, types.MethodType):  # the interpreter notes a type's method as a function of its object
        value = value.__func__
    if isinstance(value, types.FunctionType):
        if "<" not in value.__qualname__:
            return ("function", Same(value))
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        return ("function", value.__code__, tuple(map(_key, defaults)))
    if isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) and value.__self__ is not None:
        owner = value.__self__
        return ("built-in method", value.__name__, Same(owner) if isinstance(owner, CONSTANTS) else type(owner))
    if isinstance(value, CONSTANTS):
        return ("constant", Same(value))
    return None


def _callable_or_object(value: Any, path: Path) -> tuple:
    found = _callable(value)
    if found is not None:
        return found
    if hasattr(type(value), "__next__"):
        raise Unreadable(f"`{path}` is an iterator ({type(value).__name__}), which a call changes")
    if isinstance(value, Iterable) and not isinstance(value, (torch.nn.Module, type)) and not _is_own(value):
        raise Unreadable(f"`{path}` is a {type(value).__name__}, whose content cannot be noted")
    return ("object", type(value), _slots(value), _compared(value, 4))


def _is_own(value: Any) -> bool:
    """Whether iterating goes through Python code, which the interpreter sees, or a view that Python makes anew."""
    return isinstance(type(value).__iter__, types.FunctionType) or isinstance(value, types.MappingProxyType)


def _slots(value: Any) -> tuple:
    """Which slots are set, and with what plain values: their descriptors are not interpreted."""
    slots = [n for t in type(value).__mro__ for n, d in vars(t).items() if isinstance(d, types.MemberDescriptorType)]
    return tuple((n, _item(getattr(value, n), 1)) for n in slots if hasattr(value, n))


def _compared(value: Any, depth: int) -> Any:
    """What comparisons, which are not interpreted, may read; nothing for objects that are equal only to themselves."""
    kind = type(value)
    if isinstance(value, (torch.nn.Module, types.CellType)):
        return None
    if all(getattr(kind, n) is getattr(object, n) for n in _COMPARISONS):
        return None
    return _state(value, depth)


def _state(value: Any, depth: int) -> Any:
    """An object with all that is in it, also objects that have no comparison of their own."""
    if hasattr(value, "__dict__") and depth:
        members = vars(value)
        found = [_item(m, depth - 1) for m in members.values()]
        inside = [_state(m, depth - 1) if f is None and _is_object(m) else f for m, f in zip(members.values(), found)]
        return (type(value), tuple(members), tuple(inside))
    try:
        hash(value)
    except TypeError:
        return Same(value)
    return (type(value), value)


def _is_object(value: Any) -> bool:
    return not isinstance(value, (Proxy, torch.Tensor, torch.nn.Module, types.CellType))


def identity(value: Any) -> Any:
    """What tells whether two paths lead to the same object; None for values whose identity no program goes by."""
    if isinstance(value, Proxy):
        return value.name
    if isinstance(value, types.MethodType):  # which the interpreter notes as a function of its object
        value = value.__func__
    return None if isinstance(value, _NO_IDENTITY) else Same(value)


def identities_inside(container: Any, path: Path) -> Iterator[Any]:
    """Of what a container holds, which functions like ``==`` and ``in`` compare without the interpreter."""
    own = path.steps and path.steps[-1] in (Attr("__globals__"), *_OWN_DICTS)
    if not own and not isinstance(container, types.MethodType):  # those are noted as functions of their object
        yield from _members_identities(container, 4)


def _members_identities(container: Any, depth: int) -> Iterator[Any]:
    members: Iterable[Any] = ()
    if isinstance(container, dict):
        members = (*container, *container.values())
    elif isinstance(container, (set, frozenset)):
        members = sorted((m for m in container if not isinstance(m, VALUES)), key=id)  # they are fingerprinted by id
    elif isinstance(container, (list, tuple)):
        members = container
    elif isinstance(container, types.MethodType):
        members = (container.__self__,)
    for member in members:
        yield identity(member)
        if depth:
            yield from _members_identities(member, depth - 1)


def pattern(identities: dict[Path, tuple]) -> list[int | None]:
    first: dict[Any, int] = {}
    return [None if i is None else first.setdefault(i, len(first)) for all in identities.values() for i in all]


def spoken(found: tuple) -> str:
    kind, *rest = found
    if kind == "tensor":
        return f"a tensor of {tuple(rest[0])}, {rest[1]}, {rest[2]}, {'with' if rest[3] else 'without'} `.grad`"
    if kind == "globals":
        return f"{len(rest[1])} names of {rest[0].value.get('__name__')}"
    rest = [r for r in rest if r not in ((), None)]
    if isinstance(kind, type):
        if issubclass(kind, dict):
            return f"a {kind.__name__} with the keys {rest[0] if rest else ()}"
        return f"{kind.__name__} {rest[0] if rest else None!r}"
    return " ".join(getattr(r, "__name__", None) or getattr(r, "co_name", None) or repr(r) for r in rest)
