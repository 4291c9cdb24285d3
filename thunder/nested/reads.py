"""What a level read from outside, and whether another call would read the same: the read set of a region.

Every value that is reached by a path is noted with a *fingerprint* of what was found there. Tensors are inputs, so
their metadata is; numbers, strings and None count by value; modules and other objects by type, because what is read
from them is noted on its own; containers by type and keys or length; functions by identity, or by code and defaults
where each call of an enclosing function makes a new one. Beside these, the pattern of which paths lead to the same
object is compared. A read that cannot be noted makes the trace not reusable, and is named as the reason.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

import thunder.core.devices as devices
import thunder.core.dtypes as dtypes
from thunder.core.interpreter import InterpreterRuntimeCtx, ProvenanceRecord, WrappedValue, get_interpreterruntimectx
from thunder.core.proxies import Proxy, TensorProxy
from thunder.nested.captures import Attr, Path, path_of

if TYPE_CHECKING:
    from thunder.nested.levels import Level

_VALUES = (int, float, complex, str, bytes, bool, type(None), slice, range, torch.dtype, torch.device, torch.Size)
_CONSTANTS = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
)
# made anew whenever they are read, or the same for all
_NO_IDENTITY = (
    *_VALUES,
    *_CONSTANTS,
    *(tuple, frozenset, types.BuiltinMethodType, types.MethodWrapperType),
    *(types.CellType, types.MappingProxyType, staticmethod, classmethod, property),
)
# types whose methods read nothing but the object itself, which is noted as a whole
_PURE_OWNERS = {
    *(str, bytes, int, float, bool, complex, tuple, frozenset, set, type(None), slice, range, type, object, property),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType, types.FunctionType),
    *(types.WrapperDescriptorType, types.MethodType, types.CellType, classmethod, staticmethod, super, torch.Size),
    *(types.BuiltinFunctionType, types.MethodWrapperType, types.ClassMethodDescriptorType),
}
# of their methods, those that read the attributes of an object, and those that may call such of what a container holds
_READ_STATE = {"__reduce__", "__reduce_ex__", "__getstate__", "__dir__", "__new__"}
_CALL_MEMBERS = {
    *("__repr__", "__str__", "__format__", "__mod__", "format", "format_map", "repr", "ascii"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__hash__"),
}
_PARSED = (str, bytes, int, float, complex)  # whose constructors call methods of their argument
_COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
_PURE_MODULES = {"builtins", "_operator", operator.__name__, math.__name__}
_OWN_DICTS = tuple(map(Attr, ("__dict__", "_parameters", "_buffers", "_modules")))
_UNNOTED = {torch.nn.Module.named_parameters, torch.nn.Module.named_buffers}


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
    if isinstance(value, _VALUES):
        return (type(value), repr(value) if isinstance(value, float) else value)
    if isinstance(value, dict):
        last = path.steps[-1] if path.steps else None
        if last == Attr("__globals__"):
            return (type(value),)
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
    if isinstance(item, _VALUES):
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
    return key if isinstance(key, _VALUES) else Same(key)


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
        return ("built-in method", value.__name__, Same(owner) if isinstance(owner, _CONSTANTS) else type(owner))
    if isinstance(value, _CONSTANTS):
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


class Reads:
    """The read set of a level.

    Attributes:
        found: fingerprints by path, in the order of the reads.
        reason: why a trace with these reads cannot be reused, or None.
    """

    def __init__(self) -> None:
        self.found: dict[Path, tuple] = {}
        self.identities: dict[Path, tuple] = {}
        self.reason: str | None = None
        self._of_tensors: set[Path] = set()

    def note(self, value: WrappedValue, level: Level, provenance: ProvenanceRecord | None = None) -> None:
        """Notes a wrapped value, if a path leads to it and it is read by this path for the first time.

        Args:
            value: the value.
            level: the level that has read it.
            provenance: how it was read, if not as it was first.
        """
        path = path_of(provenance or value.provenance)
        if path is None or path in self.found:
            return
        if path.steps and path.parent in self._of_tensors:
            self._of_tensors.add(path)  # a tensor's attributes are its metadata, which is noted with it
            return
        plain = value.value if value.original_value is value.nothing else value.original_value
        if isinstance(plain, Proxy) and not level.is_foreign(plain):
            return
        # of a container that an enclosing level has changed, the changed copy is read
        read = value.value if isinstance(plain, (dict, list)) else plain
        try:
            self.found[path] = fingerprint(read, path)
        except Unreadable as unreadable:
            self.refuse(str(unreadable))
        else:
            self.identities[path] = (identity(plain), *_identities_inside(read, path))
            if isinstance(plain, (Proxy, torch.Tensor)):
                self._of_tensors.add(path)

    def note_opaque_call(self, fn: Callable, args: Iterable[WrappedValue]) -> None:
        """Notes the call of a function that the interpreter cannot look into."""
        frame, name = get_interpreterruntimectx().peek_frame_stack(), getattr(fn, "__name__", None)
        if frame is not None and _is_thunder(frame.module) and name not in _CALL_MEMBERS:
            return  # thunder's own operators read their arguments
        owner = getattr(fn, "__objclass__", None) or (None if fn.__self__ is None else type(fn.__self__))
        if isinstance(owner, type) and issubclass(owner, BaseException):
            return
        called_on = (getattr(fn, "__self__", None), *(a.value for a in args))
        if name == "__new__" and (fn.__self__ not in _PARSED or all(map(_is_plain, called_on))):
            return
        if owner in _PURE_OWNERS and name not in _READ_STATE:
            if name not in _CALL_MEMBERS or all(map(_is_plain, called_on)):
                return
        known = getattr(fn, "__module__", None) or ""
        of_torch = known.startswith("torch") or getattr(torch._C, fn.__name__, None) == fn
        if (known in _PURE_MODULES or of_torch) and all(_is_plain(a.value) for a in args):
            return
        self.refuse(f"it calls `{getattr(fn, '__qualname__', fn)}`, whose reads cannot be noted")

    def note_lookaside(self, fn: Callable, args: tuple[WrappedValue, ...]) -> None:
        """Notes the call of a function whose lookaside reads without the interpreter."""
        if fn in _UNNOTED:
            self.refuse(f"it calls `{fn.__qualname__}`, whose reads cannot be noted")
        elif fn is hasattr and args:
            self._note_attributes(args[0])

    def _note_attributes(self, obj: WrappedValue) -> None:
        """Whether an object has an attribute depends on its type and on the keys of its ``__dict__``."""
        path, members = path_of(obj.provenance), getattr(obj.value, "__dict__", None)
        if path is None or isinstance(obj.value, (Proxy, torch.Tensor)):
            return
        if hasattr(type(obj.value), "__getattr__") and not isinstance(obj.value, torch.nn.Module):
            self.refuse(f"it calls `hasattr` on `{path}`, which has a `__getattr__`")
        elif isinstance(members, dict):
            members_path = path.then(Attr("__dict__"))
            self.found.setdefault(members_path, fingerprint(members, members_path))
            self.identities.setdefault(members_path, (identity(members),))

    def refuse(self, reason: str) -> None:
        """Makes traces with these reads not reusable; the first reason is kept."""
        self.reason = self.reason or reason

    def difference(self, resolve: Callable[[Path], Any]) -> str | None:
        """What is not as it was read, for people; None if all is the same.

        Args:
            resolve: gives the value that a call has at a path; raises LookupError where there is none.
        """
        identities: dict[Path, tuple] = {}
        for path, expected in self.found.items():
            try:
                value = resolve(path)
                found = fingerprint(value, path)
            except (LookupError, Unreadable):
                return f"`{path}` cannot be read"
            if found != expected:
                return f"`{path}` is {_spoken(found)}, was {_spoken(expected)}"
            identities[path] = (identity(value), *_identities_inside(value, path))
        if _pattern(identities) != _pattern(self.identities):
            return "other paths lead to the same object"
        return None


def _is_thunder(module: str | None) -> bool:
    if module is None or module.startswith("thunder.tests"):
        return False
    return module.startswith(("thunder.", "optree."))  # optree walks the arguments of thunder's operators


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_VALUES, *_CONSTANTS, Proxy, torch.Tensor, types.FunctionType)) or (
        isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    )


def identity(value: Any) -> Any:
    """What tells whether two paths lead to the same object; None for values whose identity no program goes by."""
    if isinstance(value, Proxy):
        return value.name
    if isinstance(value, types.MethodType):  # which the interpreter notes as a function of its object
        value = value.__func__
    return None if isinstance(value, _NO_IDENTITY) else Same(value)


def _identities_inside(container: Any, path: Path) -> Iterator[Any]:
    """Of what a container holds, which functions like ``==`` and ``in`` compare without the interpreter."""
    own = path.steps and path.steps[-1] in (Attr("__globals__"), *_OWN_DICTS)
    if not own and not isinstance(container, types.MethodType):  # those are noted as functions of their object
        yield from _members_identities(container, 4)


def _members_identities(container: Any, depth: int) -> Iterator[Any]:
    members: Iterable[Any] = ()
    if isinstance(container, dict):
        members = (*container, *container.values())
    elif isinstance(container, (set, frozenset)):
        members = sorted((m for m in container if not isinstance(m, _VALUES)), key=id)  # they are fingerprinted by id
    elif isinstance(container, (list, tuple)):
        members = container
    elif isinstance(container, types.MethodType):
        members = (container.__self__,)
    for member in members:
        yield identity(member)
        if depth:
            yield from _members_identities(member, depth - 1)


def _pattern(identities: dict[Path, tuple]) -> list[int | None]:
    first: dict[Any, int] = {}
    return [None if i is None else first.setdefault(i, len(first)) for all in identities.values() for i in all]


def _spoken(found: tuple) -> str:
    kind, *rest = found
    if kind == "tensor":
        return f"a tensor of {tuple(rest[0])}, {rest[1]}, {rest[2]}, {'with' if rest[3] else 'without'} `.grad`"
    rest = [r for r in rest if r not in ((), None)]
    if isinstance(kind, type):
        if issubclass(kind, dict):
            return f"a {kind.__name__} with the keys {rest[0] if rest else ()}"
        return f"{kind.__name__} {rest[0] if rest else None!r}"
    return " ".join(getattr(r, "__name__", None) or getattr(r, "co_name", None) or repr(r) for r in rest)


class Resolve:
    """Finds the plain values at the paths of a call, as the enclosing levels see them just now.

    Args:
        fn, args, kwargs: the wrapped function and arguments of the call.
        runtimes: the interpreters of the enclosing levels, which hold copies of the containers that they have changed.
    """

    def __init__(self, fn: Any, args: tuple, kwargs: dict, runtimes: Iterable[InterpreterRuntimeCtx]):
        plain_args = tuple(_original(a) for a in args)
        plain_kwargs = {k: _original(v) for k, v in kwargs.items()}
        self._runtimes = tuple(runtimes)
        self._values = {Path("fn"): _original(fn), Path("args"): plain_args, Path("kwargs"): plain_kwargs}

    def __call__(self, path: Path) -> Any:
        if path not in self._values:
            obj, step = self(path.parent), path.steps[-1]
            is_attribute = isinstance(step, Attr)
            self._values[path] = self._attribute(obj, step.name) if is_attribute else self._current(obj[step.key])
        return self._values[path]

    def _attribute(self, obj: Any, name: str) -> Any:
        members = getattr(obj, "__dict__", None)
        if name == "__dict__" or not isinstance(members, dict):
            value = getattr(obj, name, self)
        else:
            changed = self._current(members)
            value = changed[name] if name in changed else getattr(obj, name, self)
        if value is self:
            raise LookupError(name)
        return self._current(value)

    def _current(self, container: Any) -> Any:
        if isinstance(container, (dict, list, set)):
            for runtime in self._runtimes:
                known = runtime._known_wrappers.get(id(container))
                wrapper = known[0]() if known is not None else None
                if wrapper is not None and wrapper.original_value is container:
                    return wrapper.value
        return container


def _original(wrapped: Any) -> Any:
    return wrapped.value if isinstance(wrapped, WrappedValue) else wrapped
