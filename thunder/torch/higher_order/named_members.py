"""``Module.named_parameters`` and ``named_buffers``: in the order of the module, as the running level sees them.

The installed lookasides go through a set of names, so that the order changes from process to process, and find only
what is an ``nn.Parameter``, which a tensor that ``functional_call`` was given need not be.
"""

from __future__ import annotations

import torch

import thunder.nested
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const
from thunder.nested.lookasides import call_interpreted


@thunder.nested.lookaside(torch.nn.Module.named_parameters)
def _named_parameters(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> WrappedValue:
    return _named_members("named_parameters", "_parameters", module, args, kwargs)


@thunder.nested.lookaside(torch.nn.Module.named_buffers)
def _named_buffers(module: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> WrappedValue:
    return _named_members("named_buffers", "_buffers", module, args, kwargs)


def _named_members(method: str, members: str, module: WrappedValue, args: tuple, kwargs: dict) -> WrappedValue:
    plain = unwrap(module)
    names = [
        name for name, _ in getattr(plain, method)(*map(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()})
    ]
    prefix = unwrap(args[0]) if args else unwrap(kwargs.get("prefix", ""))
    own = [name.removeprefix(f"{prefix}.") if prefix else name for name in names]
    places = tuple((name, tuple(n.split(".")[:-1]), n.split(".")[-1]) for name, n in zip(names, own))
    return call_interpreted(_yield_members, module, wrap_const(places), wrap_const(members))


def _yield_members(module, places, members):
    """What is interpreted."""
    for name, path, last in places:
        owner = module
        for submodule in path:
            owner = getattr(owner, submodule)
        yield name, getattr(owner, members)[last]
