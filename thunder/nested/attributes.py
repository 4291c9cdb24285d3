"""Attributes that are set, and asked for, as Python does it: descriptors, properties, and what was set in a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

from thunder.core.interpreter import WrappedValue, _interpret_call, unwrap, wrap_const
from thunder.core.proxies import Proxy


def _descriptor(obj: WrappedValue, name: Any) -> Any:
    """The property, or other descriptor written in Python, that sets the attribute of a wrapped object, or None."""
    if isinstance(unwrap(obj), Proxy):
        return None
    found = next((vars(t)[unwrap(name)] for t in type(unwrap(obj)).__mro__ if unwrap(name) in vars(t)), None)
    is_python = isinstance(getattr(type(found), "__set__", None), FunctionType)
    return found if is_python or isinstance(found, property) else None


def sets_by_descriptor(lookaside: Callable) -> Callable:
    """``object.__setattr__`` where a descriptor may do it: stock thunder does not interpret that, or bypasses it."""

    @wraps(lookaside)
    def set_attribute(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
        descriptor = _descriptor(obj, name)
        if descriptor is None:
            result = lookaside(obj, name, value)
        elif not isinstance(descriptor, property):
            result = _interpret_call(type(descriptor).__set__, wrap_const(descriptor), obj, value)
        elif descriptor.fset is not None:
            result = _interpret_call(descriptor.fset, obj, value)
        else:
            from thunder.core.jit_ext import _raw_object_setattr

            result = _raw_object_setattr(obj, name, value)  # which raises the AttributeError
        forget_computed(obj)
        return result

    return set_attribute


def forget_computed(obj: WrappedValue) -> None:
    """Properties are computed anew when they are read after an attribute of the object was set."""
    members = obj.attribute_wrappers.get("__dict__")
    for name in [n for n in obj.attribute_wrappers if _descriptor(obj, n) is not None]:
        del obj.attribute_wrappers[name]
        if members is not None and name not in members.value:
            members.item_wrappers.pop(name, None)
            members.key_wrappers.pop(name, None)


def forgets_computed(lookaside: Callable) -> Callable:
    """``setattr``, which notes what a property was set to as what it is."""

    @wraps(lookaside)
    def set_attribute(obj: WrappedValue, name: WrappedValue, value: WrappedValue) -> Any:
        result = lookaside(obj, name, value)
        forget_computed(obj)
        return result

    return set_attribute


def sees_what_was_set(lookaside: Callable) -> Callable:
    """``hasattr``, which asks the object itself; what was set on one from outside is in a copy of its ``__dict__``."""

    @wraps(lookaside)
    def has_attribute(obj: WrappedValue, name: WrappedValue) -> Any:
        from thunder.core.jit_ext import get_jit_ctx

        has_members = type(getattr(unwrap(obj), "__dict__", None)) is dict and not isinstance(unwrap(obj), Proxy)
        if has_members and get_jit_ctx().level.enclosing is not None:
            members = _interpret_call(getattr, obj, wrap_const("__dict__"))
        else:
            members = obj.attribute_wrappers.get("__dict__")
        if members is not None and unwrap(name) in members.value:
            return wrap_const(True)
        return lookaside(obj, name)

    return has_attribute
