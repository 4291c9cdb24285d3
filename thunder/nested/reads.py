"""What a level read from outside, and whether another call would read the same: the read set of a region.

Every value that is reached by a path is noted with a fingerprint of what was found there (``fingerprints.py``). Beside
these, the pattern of which paths lead to the same object is compared. A read that cannot be noted makes the trace not
reusable, and is named as the reason.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from thunder.core.interpreter import (
    InterpreterRuntimeCtx,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    do_raise,
    get_interpreterruntimectx,
    populate_single_dict_item_wrapper,
    wrap,
)
from thunder.core.proxies import Proxy
from thunder.nested.captures import Attr, Path, path_of
from thunder.nested.fingerprints import (
    CONSTANTS,
    VALUES,
    Unreadable,
    fingerprint,
    identities_inside,
    identity,
    pattern,
    spoken,
)

if TYPE_CHECKING:
    from thunder.nested.levels import Level

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
_PURE_MODULES = {"builtins", "_operator", operator.__name__, math.__name__}
_UNNOTED = {torch.nn.Module.named_parameters, torch.nn.Module.named_buffers}


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
            self.identities[path] = (identity(plain), *identities_inside(read, path))
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
                return f"`{path}` is {spoken(found)}, was {spoken(expected)}"
            identities[path] = (identity(value), *identities_inside(value, path))
        if pattern(identities) != pattern(self.identities):
            return "other paths lead to the same object"
        return None


def has_key(mapping: WrappedValue, key: WrappedValue) -> WrappedValue:
    """``key in mapping`` as ``dict`` has it, which reads the keys, and the key's value if it is there.

    Stock thunder reads all values of the mapping, and ``torch.nn.Module.__getattr__`` asks for keys of ``__dict__``:
    blocks that are alike but for a number that they do not use would not share a trace.
    """
    # the methods of `dict` itself: a subclass's own would run here without being interpreted, or call this one again
    try:
        found = dict.__contains__(mapping.value, key.value)
    except Exception as error:  # the key's `__hash__` or `__eq__` may raise
        return do_raise(error)
    if found:
        populate_single_dict_item_wrapper(dict.__getitem__(mapping.value, key.value), mapping, key.value)
    asked = ProvenanceRecord(PseudoInst.CONTAINS_OP, inputs=[mapping.provenance, key.provenance])
    return wrap(found, provenance=asked)


def _is_thunder(module: str | None) -> bool:
    if module is None or module.startswith("thunder.tests"):
        return False
    return module.startswith(("thunder.", "optree."))  # optree walks the arguments of thunder's operators


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*VALUES, *CONSTANTS, Proxy, torch.Tensor, types.FunctionType)) or (
        isinstance(value, (tuple, list)) and all(map(_is_plain, value))
    )


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
