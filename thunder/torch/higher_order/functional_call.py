"""``torch.func.functional_call``: a module's call with other tensors in the place of its parameters and buffers.

The call is traced as an inner level, in which the dicts of members (``_parameters``, ``_buffers``, ``__dict__``) of the
module and of its submodules are copies that have the given tensors. The enclosing level, and the module, never see
them. What ``forward`` itself changes is an effect like any other, unless it goes into a copy, in the place of a given
tensor: that change is made in the dict that was given.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import stateless
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

import thunder.nested
from thunder.core.interpreter import (
    WrappedValue,
    get_interpreterruntimectx,
    unwrap,
    wrap_attribute,
    wrap_const,
    wrapped_build_tuple,
)
from thunder.core.module import ThunderModule
from thunder.core.proxies import Proxy, TensorProxy
from thunder.nested.captures import Attr, Item, Path, path_of
from thunder.nested.errors import name_of
from thunder.nested.levels import Level, current_level
from thunder.nested.lookasides import call_interpreted, read_attribute, read_item
from thunder.nested.reads import Resolve
from thunder.torch.higher_order.common import HigherOrderError

_GIVEN = Path("args", (Item(3),))  # in `call_with`
_MEMBERS = ("_parameters", "_buffers")


@thunder.nested.lookaside(torch.func.functional_call)
def functional_call(
    module: WrappedValue,
    parameter_and_buffer_dicts: WrappedValue,
    args: WrappedValue | None = None,
    kwargs: WrappedValue | None = None,
    *,
    tie_weights: WrappedValue | bool = True,
    strict: WrappedValue | bool = False,
) -> WrappedValue:
    """Calls a module with other parameters and buffers::

        def functional_call(module, parameter_and_buffer_dicts, args=(), kwargs={}, *, tie_weights=True, strict=False):
            dicts = parameter_and_buffer_dicts
            given = {k: v for d in dicts for k, v in d.items()} if isinstance(dicts, (tuple, list)) else dicts
            own = {name: get_member(module, name) for name in given}
            try:
                for name, tensor in given.items():
                    set_member(module, name, tensor)  # and those that are tied to it, if tie_weights
                return module(*args, **kwargs)
            finally:
                for name in given:
                    given[name] = get_member(module, name)
                    set_member(module, name, own[name])

    The module's own tensors are neither read nor checked where they are replaced, so they may be on the meta device. A
    module that ``thunder.jit`` has made is called like the module that it was made of.

    Raises:
        ValueError: the dicts are none, or have a key in common; tied tensors get different values.
        RuntimeError: ``strict``, and the keys are not those of the module; the module is one of ``torch.jit``.
        AttributeError, TypeError: a key leads through what is no submodule; a value, or what it replaces, is no tensor.
        HigherOrderError: ``forward`` assigns to a buffer in a dict that the compiled program was given.
    """
    _check_module(unwrap(module))
    if isinstance(unwrap(module), ThunderModule):
        module = wrap_attribute(unwrap(module)._model, module, wrap_const("_model"))
    given = _given(parameter_and_buffer_dicts)
    state = _State.of(unwrap(module))
    untied = state.untied(given) if unwrap(tie_weights) else given
    if unwrap(strict):
        state.check_keys(unwrap(module), untied)
    places = tuple(_place(unwrap(module), name, value) for name, value in untied.items())
    if current_level().reads is not None:
        current_level().reads.refuse("it calls `functional_call`, which reads the module in a way of its own")
    single = isinstance(unwrap(parameter_and_buffer_dicts), dict)
    nested = thunder.nested.trace(
        call_with,
        module,
        places,
        wrapped_build_tuple(tuple(untied.values())),
        parameter_and_buffer_dicts if single else None,
        _arguments(args),
        {} if kwargs is None or unwrap(kwargs) is None else kwargs,
    )
    if single and current_level().enclosing is None and path_of(parameter_and_buffer_dicts.provenance) is not None:
        _check_assigned(nested, unwrap(module))
    return nested.inline()


@thunder.nested.lookaside(stateless.functional_call)
def _stateless_functional_call(
    module: WrappedValue, parameters_and_buffers: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue
) -> WrappedValue:
    warnings.warn(stateless.functional_call.__deprecated__, FutureWarning, stacklevel=2)
    return functional_call(module, parameters_and_buffers, *args, **kwargs)


def call_with(module, places, values, given, args, kwargs):
    """What is traced."""
    members = _swap(module, places, values)
    try:
        return module(*args, **kwargs)
    finally:
        _restore(members, given)


#
# What is given, and where it goes
#


def _check_module(module: Any) -> None:
    if isinstance(module, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise RuntimeError("The stateless API can't be used with Jitted modules")
    if isinstance(module, torch.nn.DataParallel):
        raise RuntimeError("The stateless API can't be used with nn.DataParallel module")


def _arguments(args: WrappedValue | None) -> WrappedValue:
    if args is None or unwrap(args) is None:
        return wrap_const(())
    return args if isinstance(unwrap(args), tuple) else wrapped_build_tuple((args,))


def _given(dicts: WrappedValue) -> dict[str, WrappedValue]:
    """The given tensors by name, in one dict."""
    plain = unwrap(dicts)
    if isinstance(plain, dict):
        return _items(dicts)
    if not isinstance(plain, Sequence):
        raise ValueError(
            f"Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got {type(plain)}"
        )
    if not all(isinstance(d, dict) for d in plain):
        raise ValueError("Expected all elements of parameter_and_buffer_dicts to be dictionaries")
    names = [name for d in plain for name in d]
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise ValueError(f"{repeated} appeared in multiple dictionaries; behavior of functional call is ambiguous")
    dicts.track_items()
    return {name: value for d in dicts.item_wrappers for name, value in _items(d).items()}


def _items(d: WrappedValue) -> dict[str, WrappedValue]:
    d.track_items()
    return {name: d.item_wrappers[name] for name in unwrap(d)}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a given tensor goes: ``getattr(submodule, members)[name]``, with the submodule that ``path`` leads to."""

    path: tuple[str, ...]
    members: str
    name: str
    key: str


def _place(module: torch.nn.Module, key: str, value: WrappedValue) -> _Place:
    """The place for a key of the given dict, and torch's errors."""
    prefix, _, name = key.rpartition(".")
    owner = NamedMemberAccessor(module).get_submodule(prefix)
    plain = unwrap(value)
    if plain is not None and not isinstance(plain, (TensorProxy, torch.Tensor)):
        raise TypeError(f"{plain} is not an instance of torch.Tensor")
    if not name:
        raise KeyError('tensor name can\'t be empty string ""')
    members = next((members for members in _MEMBERS if name in getattr(owner, members)), None)
    if members is None:
        own = getattr(owner, name, None)
        if own is not None and not isinstance(own, torch.Tensor):
            raise TypeError(f"attribute `{name}`: {own} is not an instance of torch.Tensor")
        if hasattr(type(owner), name):
            raise HigherOrderError(
                f"`functional_call` of {name_of(module)} is given `{key}`, which is computed by its class. Give the "
                f"tensors that it is computed from (those of a parametrization end in `.original`)."
            )
        members = "_parameters" if issubclass(value.python_typ, torch.nn.Parameter) and own is None else "__dict__"
    return _Place(tuple(prefix.split(".")) if prefix else (), members, name, key)


class _State:
    """A module's parameters and buffers by name, as the running levels see them. Torch's functions ask it for them."""

    def __init__(self, parameters: dict[str, Any], buffers: dict[str, Any]):
        self._parameters, self._buffers = parameters, buffers

    @classmethod
    def of(cls, module: torch.nn.Module) -> _State:
        """The state of a module. Tensors are replaced by what tells which ones are the same."""
        level = current_level()
        resolve = Resolve(module, (), {}, (get_interpreterruntimectx(), *level.runtimes))
        found = {members: dict(_named(resolve, members, Path("fn"), "")) for members in _MEMBERS}
        same = {m: {name: _identity(level, value) for name, value in found[m].items()} for m in _MEMBERS}
        return cls(same["_parameters"], same["_buffers"])

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        """Name and identity of each parameter."""
        yield from self._parameters.items()

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, Any]]:
        """Name and identity of each buffer."""
        yield from self._buffers.items()

    def untied(self, given: dict[str, WrappedValue]) -> dict[str, WrappedValue]:
        """The given tensors, also under the names that are tied to theirs."""
        level = current_level()
        same = {name: _identity(level, unwrap(value)) for name, value in given.items()}
        values = {i: given[name] for name, i in same.items()}
        return {name: given.get(name, values[i]) for name, i in stateless._untie_named_tensors_map(self, same).items()}

    def check_keys(self, module: torch.nn.Module, given: dict[str, WrappedValue]) -> None:
        """Raises where the names are not those of the module."""
        missing, unexpected = NamedMemberAccessor(self).check_keys(given)
        found = (("Unexpected", unexpected), ("Missing", missing))
        errors = [f"{what} key(s): {', '.join(map(repr, keys))}." for what, keys in found if keys]
        if errors:
            raise RuntimeError(
                "Error(s) in reparametrizing for {}:\n\t{}".format(module._get_name(), "\n\t".join(errors))
            )


def _named(resolve: Resolve, members: str, path: Path, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in resolve(path.then(Attr(members))).items():
        if value is not None:
            yield prefix + name, value
    submodules = path.then(Attr("_modules"))
    for name, submodule in resolve(submodules).items():
        if submodule is not None:
            yield from _named(resolve, members, submodules.then(Item(name)), f"{prefix}{name}.")


def _identity(level: Level, value: Any) -> Any:
    """The same for the same tensor: two paths that lead to one tensor give two proxies."""
    while isinstance(value, Proxy):
        if value.name in level.stand_ins:
            value = level.stand_ins[value.name]
        elif level.is_foreign(value):
            pass
        else:
            path = path_of(value.history)
            if path is None:
                return value.name
            return id(Resolve(level.fn, *level.arguments, ())(path))
        level = level.enclosing
    return id(value)


#
# The call, in the inner level
#


class _Swapped:
    """The members that are replaced, in the inner level."""

    def __init__(self) -> None:
        self._members: list[tuple[_Place, WrappedValue, WrappedValue]] = []

    def put(self, module: WrappedValue, place: _Place, value: WrappedValue) -> None:
        """Replaces one member of a module or of one of its submodules, in a copy of the dict of members."""
        owner = module
        for name in place.path:
            submodules = read_attribute(owner, "_modules")
            # the attribute would be looked for among all parameters and buffers, which reads them
            is_member = name in unwrap(submodules)
            owner = read_item(submodules, name) if is_member else read_attribute(owner, name)
        members = read_attribute(owner, place.members)
        if members.original_value is members.nothing:
            members.register_proxy(type(members.value)(members.value))  # what is in there is not read
        members.value[place.name] = value.value
        members.item_wrappers[place.name] = value
        members.key_wrappers[place.name] = wrap_const(place.name)
        owner.attribute_wrappers[place.name] = value  # where the interpreter looks first
        self._members.append((place, members, value))

    def forget_changes(self) -> None:
        """What was set in the place of a given tensor is no change of the module."""
        changes = current_level().ctx._additional_outputs
        for place, members, _ in self._members:
            current_level().writes.forget(members)  # a change of anything else in there is recorded in `changes`
            changes[members] = [c for c in changes[members] if unwrap(c[2]) != place.name]
            if not changes[members]:
                del changes[members]

    def assigned(self) -> Iterator[tuple[str, WrappedValue]]:
        """What was set in the place of a given tensor, with the key under which that was given."""
        for place, members, value in self._members:
            new = members.item_wrappers.get(place.name)
            if new is not None and new.value is not value.value:
                yield place.key, new


def _swap(module: Any, places: Any, values: Any) -> Any:
    """Has a lookaside: replaces members of the module."""


@thunder.nested.lookaside(_swap)
def _swap_lookaside(module: WrappedValue, places: WrappedValue, values: WrappedValue) -> _Swapped:
    swapped = _Swapped()
    values.track_items()
    for place, value in zip(unwrap(places), values.item_wrappers, strict=True):
        swapped.put(module, place, value)
    return swapped


def _restore(swapped: Any, given: Any) -> None:
    """Has a lookaside: what was set in the place of a given tensor becomes a change of ``given``, if that is a dict."""


@thunder.nested.lookaside(_restore)
def _restore_lookaside(swapped: WrappedValue, given: WrappedValue) -> None:
    unwrap(swapped).forget_changes()
    if unwrap(given) is not None:
        for key, value in unwrap(swapped).assigned():
            if key in unwrap(given):
                call_interpreted(dict.__setitem__, given, wrap_const(key), value)


def _check_assigned(nested: thunder.nested.NestedTrace, module: torch.nn.Module) -> None:
    """The installed thunder would put proxies into a dict that comes from outside of the program."""
    if any(write.path == _GIVEN for write in nested._level.writes):
        raise HigherOrderError(
            f"{name_of(module)} sets a buffer that `functional_call` was given in a dict which comes from outside of "
            f"the compiled program, where it cannot be put back. Change the buffer in place (`self.buffer.copy_(...)`) "
            f"or give a dict that the program makes (`dict(buffers)`)."
        )
