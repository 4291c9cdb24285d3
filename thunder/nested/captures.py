"""How an inner trace gets its inputs: paths by which values are reached, and lifting into the enclosing level.

A *path* spells out how a value is reached from a level's inputs: from the function, the positional or the keyword
arguments, by a chain of attribute loads and subscripts. *Lifting* walks the path in the enclosing level's interpreter,
from the wrapped function and arguments that the lookaside received. The enclosing level then makes proxies, names,
unpacks and guards by its own rules, just as if the inner function had been written inline.
"""

from __future__ import annotations

import dataclasses
import dis
from types import CellType, FunctionType, GetSetDescriptorType
from typing import Any

import torch

from thunder.core.interpreter import (
    InterpreterError,
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    populate_single_dict_item_wrapper,
    unwrap,
    wrap,
    wrap_args,
    wrap_attribute,
    wrap_binary_subscr,
    wrap_const,
    wrap_kwargs,
)
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy
from thunder.nested.errors import CaptureError, NestedTracingError, name_of
from thunder.nested.lookasides import read_attribute, read_item
from thunder.nested.overrides import model_of

_HEAP_TYPE = 1 << 9  # Python's flag of the types that a `class` statement makes
_ROOTS = {PseudoInst.INPUT_FN: "fn", PseudoInst.INPUT_ARGS: "args", PseudoInst.INPUT_KWARGS: "kwargs"}


@dataclasses.dataclass(frozen=True)
class Attr:
    """An attribute load."""

    name: str

    def of(self, obj: Any) -> Any:
        """The attribute of a plain object, None where it has none."""
        return getattr(obj, self.name, None)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclasses.dataclass(frozen=True)
class Item:
    """A subscript."""

    key: Any

    def of(self, obj: Any) -> Any:
        """The item of a plain object, None where it has none."""
        try:
            return obj[self.key]
        except (LookupError, TypeError):
            return None

    def __str__(self) -> str:
        return f"[{self.key!r}]"


_MEMBERS = tuple(Attr(name) for name in ("_parameters", "_buffers", "_modules"))
_UNSPOKEN = (*_MEMBERS, *(Attr(name) for name in ("__closure__", "__globals__", "__func__", "cell_contents")))


@dataclasses.dataclass(frozen=True)
class Path:
    """How a value is reached: ``root`` is ``fn``, ``args`` or ``kwargs``, and ``steps`` lead on from there."""

    root: str
    steps: tuple[Attr | Item, ...] = ()

    def __str__(self) -> str:
        return self.root + "".join(map(str, self.steps))

    def then(self, step: Attr | Item) -> Path:
        """The path that goes one step further."""
        return Path(self.root, (*self.steps, step))

    def spoken(self, fn: Any) -> str:
        """The path as the source of ``fn`` would spell it: ``self.linear.weight``.

        Python reaches it by ``fn.__closure__[0].cell_contents._modules['linear']._parameters['weight']``.
        """
        text, obj = "" if self.is_capture else self.root, fn
        previous, before = None, None
        for step in self.steps:
            if step == Attr("cell_contents") and isinstance(before, FunctionType):
                text = before.__code__.co_freevars[previous.key]
            elif previous == Attr("__globals__"):
                text = step.key
            elif previous in _MEMBERS:
                text += f".{step.key}"
            elif step not in _UNSPOKEN and previous != Attr("__closure__"):
                text += str(step)
            if previous != Attr("__closure__"):
                before = obj
            previous, obj = step, step.of(obj) if self.is_capture else None
        return text.removeprefix(".") or str(self)

    @property
    def parent(self) -> Path:
        """The path that goes one step less far."""
        return Path(self.root, self.steps[:-1])

    @property
    def is_capture(self) -> bool:
        """Whether it begins at the function, not at an argument."""
        return self.root == "fn"


def path_of(provenance: ProvenanceRecord | None) -> Path | None:
    """The path that a provenance record spells out, or None where it is none (a computed value, a constant)."""
    if provenance is None:
        return None
    known = provenance.__dict__
    if "nested_path" not in known:  # records are shared by all that is read from an object
        known["nested_path"] = _spelled(provenance)
    return known["nested_path"]


def _spelled(provenance: ProvenanceRecord) -> Path | None:
    inst = provenance.inst
    if inst in _ROOTS:
        return Path(_ROOTS[inst])
    name = inst.opname if isinstance(inst, dis.Instruction) else inst.value
    if name in ("LOAD_ATTR", "BINARY_SUBSCR") and len(provenance.inputs) == 2:
        obj, key = provenance.inputs
        return _step(obj, key, Attr if name == "LOAD_ATTR" else Item)
    if inst is PseudoInst.OPAQUE:
        return _opaque_step(*provenance.inputs[:2])
    return None


def _opaque_step(fn: ProvenanceRecord, args: ProvenanceRecord) -> Path | None:
    """The two opaque calls that ``unpack_inputs`` knows: ``obj.__getitem__(key)`` and ``getset.__get__(obj, type)``."""
    if fn.inst is not PseudoInst.CONSTANT:
        return None
    if getattr(fn.value, "__name__", None) == "__getitem__" and len(args.inputs) == 2:
        key, obj = args.inputs
        return _step(obj, key, Item)
    if fn.value == GetSetDescriptorType.__get__ and len(args.inputs) == 3:
        parent = path_of(args.inputs[1])
        return None if parent is None else parent.then(Attr(args.inputs[2].value.__name__))
    return None


def _step(obj: ProvenanceRecord, key: ProvenanceRecord, kind: type[Attr] | type[Item]) -> Path | None:
    if key.inst is not PseudoInst.CONSTANT:
        return None
    parent = path_of(obj)
    return None if parent is None else parent.then(kind(key.value))


class Lift:
    """Finds, in the enclosing level, the values that an inner level reached by paths.

    Args:
        fn, args, kwargs: the wrapped function and arguments that the inner level was begun with.
        known: values at the end of paths that the enclosing level cannot walk, see :func:`plain_closure`.
        direct: whether to look values up directly. Interpreting the look-ups would give the same, slowly; it is
            needed only where the values have not been read by that path before.
    """

    def __init__(
        self,
        fn: WrappedValue,
        args: tuple[WrappedValue, ...],
        kwargs: dict[str, WrappedValue],
        known: dict[Path, WrappedValue] | None = None,
        direct: bool = False,
    ):
        self.fn, self.args, self.kwargs = fn, args, kwargs
        self._known = known or {}
        self._direct = direct
        self._found: dict[Path, WrappedValue] = dict(self._known)

    def with_arguments(self, args: tuple[WrappedValue, ...], kwargs: dict[str, WrappedValue]) -> Lift:
        """The same for another call of the same function."""
        return Lift(self.fn, args, kwargs, self._known, self._direct)

    def __call__(self, path: Path) -> WrappedValue:
        """The wrapped value of the enclosing level at the end of the path; guards what it reads there.

        Raises:
            CaptureError: the enclosing level cannot follow the path.
        """
        found = self._found.get(path)
        if found is None:
            found = self._found[path] = self._find(path)
        return found

    def _find(self, path: Path) -> WrappedValue:
        if not path.steps:
            if path.root == "fn":
                return self.fn
            return wrap_args(self.args) if path.root == "args" else wrap_kwargs(self.kwargs)
        step = path.steps[-1]
        if len(path.steps) == 1 and isinstance(step, Item) and path.root != "fn":
            return self.args[step.key] if path.root == "args" else self.kwargs[step.key]
        obj = self(path.parent)
        if path_of(obj.provenance) is None and isinstance(step.of(unwrap(obj)), torch.Tensor):
            fn = unwrap(self.fn)
            raise CaptureError(
                f"{name_of(fn)} reads the tensor `{path.spoken(fn)}`, but the function itself comes from the lookaside "
                f"and not from the traced program, so the tensor can be neither unpacked nor guarded. Pass the tensor "
                f"as an argument."
            )
        if step == Attr("_model") and isinstance(unwrap(obj), ThunderModule):
            # not as a submodule, which a ThunderModule looks for in the module that it wraps
            return model_of(obj)
        if self._direct:
            return _look_up(obj, step)
        try:
            return read_attribute(obj, step.name) if isinstance(step, Attr) else read_item(obj, step.key)
        except (InterpreterError, NestedTracingError):
            raise
        except Exception as error:
            raise CaptureError(
                f"{name_of(unwrap(self.fn))} read `{path.spoken(unwrap(self.fn))}`, which the enclosing level cannot: "
                f"{type(error).__name__}: {error}. Pass the value as an argument instead."
            ) from error

    def value_of(self, foreign: Proxy, path: Path | None) -> Any:
        """The enclosing level's value for a foreign proxy: itself, unless it belongs to a level further out."""
        if path is not None:
            return self(path).value
        return wrap(foreign, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[])).value

    def forget(self) -> None:
        """Makes the next look-up read anew, after a change that a replay has made."""
        self._found = dict(self._known)


def _look_up(obj: WrappedValue, step: Attr | Item) -> WrappedValue:
    """What interpreting the load of an attribute, or a subscript, of a plain object ends in."""
    if isinstance(step, Item):
        if isinstance(obj.value, dict):
            populate_single_dict_item_wrapper(obj.value[step.key], obj, step.key)
            return obj.item_wrappers[step.key]
        obj.track_items()
        return obj.item_wrappers[step.key]
    from thunder.core.jit_ext import EXT_FLAG_IS_MODULE_MEMBER_DICT, MODULE_MEMBER_DICT_ATTRS

    known = obj.attribute_wrappers.get(step.name)
    if known is not None:
        return known
    value = wrap_attribute(getattr(obj.value, step.name), obj, wrap_const(step.name))
    if isinstance(obj.value, torch.nn.Module) and step.name in MODULE_MEMBER_DICT_ATTRS:
        value.provenance.ext_flag |= EXT_FLAG_IS_MODULE_MEMBER_DICT
    return value


def wrap_call(fn: Any, args: tuple, kwargs: dict) -> tuple[WrappedValue, tuple, dict]:
    """Function and arguments as wrapped values of the current level. What it has wrapped before keeps its wrapper."""

    def wrapped(value: Any) -> WrappedValue:
        if isinstance(value, (Proxy, list, tuple, dict)):
            return wrap(value, provenance=ProvenanceRecord(PseudoInst.LOOKASIDE, inputs=[]))
        return wrap_const(value)

    return wrapped(fn), tuple(wrapped(a) for a in args), {k: wrapped(v) for k, v in kwargs.items()}


def wrap_default_objects(fn: WrappedValue) -> None:
    """Wraps the objects that are defaults of a function from outside by their paths, because it may change them.

    The interpreter takes defaults for constants, but prefers the wrapper that an object has already.
    """
    plain = fn.value
    if not isinstance(plain, FunctionType) or path_of(fn.provenance) is None:
        return
    for name in ("__defaults__", "__kwdefaults__"):
        defaults = getattr(plain, name) or ()
        items = defaults.items() if isinstance(defaults, dict) else enumerate(defaults)
        objects = [(key, value) for key, value in items if _may_be_changed(value)]
        if objects:
            wrapped = wrap_attribute(defaults, fn, wrap_const(name))
            for key, value in objects:
                if isinstance(defaults, dict):
                    populate_single_dict_item_wrapper(value, wrapped, key)
                else:
                    wrapped.item_wrappers[key] = wrap_binary_subscr(value, wrapped, key)


def _may_be_changed(value: Any) -> bool:
    if isinstance(value, (list, dict, set)):
        return True
    if isinstance(value, tuple):
        return any(map(_may_be_changed, value))
    return bool(type(value).__flags__ & _HEAP_TYPE) and not isinstance(value, (Proxy, torch.Tensor, type))


def plain_closure(fn: Any) -> tuple[Any, dict[Path, WrappedValue]]:
    """A function of a lookaside that closes over wrapped values: the function that closes over the plain ones.

    Returns:
        The function, and the wrapped values by the paths at which it will find the plain ones.
    """
    cells = fn.__closure__ if isinstance(fn, FunctionType) and fn.__closure__ else ()
    closure = Path("fn").then(Attr("__closure__"))
    wrapped = {
        closure.then(Item(i)).then(Attr("cell_contents")): cell.cell_contents
        for i, cell in enumerate(cells)
        if cell != CellType() and isinstance(cell.cell_contents, WrappedValue)
    }
    if not wrapped:
        return fn, {}
    plain = tuple(cell if cell == CellType() else CellType(unwrap(cell.cell_contents)) for cell in cells)
    new = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, plain)
    new.__kwdefaults__ = fn.__kwdefaults__
    return new, wrapped
