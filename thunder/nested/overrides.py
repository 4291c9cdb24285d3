"""What the ``thunder.jit`` of a callable says, where the callable is called by another program that is traced.

It becomes a part of that program, so what concerns the whole of a program is for the outermost ``thunder.jit`` to say:
:func:`warn_of_overridden` names the settings that do not count. A jitted module has parameters and buffers of its own
(``ThunderModule.get_parameter``), which transforms, ``load_state_dict`` and its own calls may have exchanged: those
are what the program reads and updates (:func:`model_of`, :func:`member_of`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from thunder.core.interpreter import (
    ProvenanceRecord,
    PseudoInst,
    WrappedValue,
    unwrap,
    wrap_attribute,
    wrap_const,
)
from thunder.core.module import ThunderModule
from thunder.core.options import resolve_cache_option
from thunder.nested.errors import CaptureError, name_of, user_location


def warn_of_overridden(fn: Callable, options: Mapping[str, Any], own: Any, outermost: Any) -> None:
    """Warns, at the line of the program that runs just now, of the settings of a jitted callable that do not count.

    Args:
        fn: the function or module that was jitted.
        options: what its ``thunder.jit`` was given.
        own, outermost: its compile data, and that of the program.
    """
    settings = list(_overridden(options, own, outermost))
    if not settings:
        return
    message = (
        f"{name_of(fn)} was compiled by `thunder.jit` with {' and '.join(settings)}, and is a part of the program of "
        f"{name_of(outermost.fn)} here, where this has no effect. Give it to the `thunder.jit` of that program."
    )
    location = user_location()
    if location is None:
        warnings.warn(message, stacklevel=2)
    else:
        warnings.warn_explicit(message, UserWarning, *location)


def _overridden(options: Mapping[str, Any], own: Any, outermost: Any) -> Iterator[str]:
    if options.get("transforms"):
        yield f"transforms={[type(t).__name__ for t in options['transforms']]}"
    if options.get("cache") is not None and resolve_cache_option(options["cache"]) is not outermost.cache_option:
        yield f"cache={options['cache']!r}"
    # what an executor looks aside does count; what it claims does not
    claiming = [e for e in own.executors_list if e.implmap and e not in outermost.executors_list]
    if options.get("executors") and claiming:
        yield f"executors={[e.name for e in claiming]}"
    disabled = options.get("disable_torch_autograd", False)
    if disabled and not outermost.disable_torch_autograd_support:
        yield "disable_torch_autograd=True"


def model_of(jitted: WrappedValue) -> WrappedValue:
    """The module that a wrapped ``ThunderModule`` has compiled, wrapped, whose members are read as the jitted one's.

    Raises:
        CaptureError: as :func:`check_members` does.
    """
    module = unwrap(jitted)
    model = wrap_attribute(module._model, jitted, wrap_const("_model"))
    is_own = model.provenance.inst is PseudoInst.LOAD_ATTR and model.provenance.inputs[0] is jitted.provenance
    if is_own:
        model.provenance.is_jitted_model = True
    check_members(module, exchanged=is_own and not _is_submodule_of_root(jitted.provenance))
    return model


def check_members(module: ThunderModule, *, exchanged: bool = False) -> None:
    """Checks that the program which calls a jitted module computes with the right parameters and buffers.

    Args:
        module: the jitted module.
        exchanged: whether the program reads them from it, so that each may be another tensor, of the same kind, than
            that of the module that it has compiled.

    Raises:
        CaptureError: it would compute with the wrong ones.
    """
    model = module._model
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, value in {**module._overrides_parameters, **module._overrides_buffers}.items():
        known = own.get(name)
        if known is value or (exchanged and _metadata(known) == _metadata(value)):
            continue
        transforms = "".join(f", by the transform {type(t).__name__}" for t in module._lc_transforms[:1])
        raise CaptureError(
            f"`{name}` of the jitted module {name_of(model)} was exchanged{transforms}, and is not what the module "
            f"itself has: it cannot be read by the program that calls the jitted module. Give transforms to the "
            f"`thunder.jit` of that program, and let it call the module that was not jitted."
        )


def _metadata(tensor: torch.Tensor | None) -> tuple | None:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _is_submodule_of_root(provenance: ProvenanceRecord) -> bool:
    from thunder.core.jit_ext import get_parameter_or_buffer_or_submodule_name_and_root

    if not _is_submodule(provenance):
        return False
    return get_parameter_or_buffer_or_submodule_name_and_root(provenance)[2].inst is PseudoInst.INPUT_FN


def _is_submodule(provenance: ProvenanceRecord) -> bool:
    """Whether a module was reached by ``_modules[name]`` of another."""
    if provenance.inst is not PseudoInst.BINARY_SUBSCR or provenance.inputs[0].inst is not PseudoInst.LOAD_ATTR:
        return False
    return provenance.inputs[0].inputs[1].value == "_modules"


def member_of(provenance: ProvenanceRecord, find: Callable) -> tuple[str, list[str], ProvenanceRecord]:
    """Kind, qualified name and root module of a parameter, buffer or submodule, to be read from the root by its name.

    The members of a jitted module are read from the jitted module; or, where it is itself a submodule of the outermost
    module, from that one, which has overrides for the members of all of its submodules.

    Args:
        provenance: how the member was reached.
        find: the installed function of this purpose, which takes the provenance.
    """
    is_model = getattr(provenance, "is_jitted_model", False)
    kind, name, root = ("_modules", [], provenance) if is_model else find(provenance)
    if not getattr(root, "is_jitted_model", False):
        return kind, name, root
    jitted = root.inputs[0]
    if _is_submodule_of_root(jitted):
        _, outer, root = member_of(jitted, find)
        return kind, [*outer, "_model", *name], root
    return kind, name, jitted
