"""``torch.utils.checkpoint.checkpoint``: what lies between a function's inputs and its results is not kept.

The function's program is replayed into the enclosing trace, as if it had been called without ``checkpoint``;
``recomputation.py`` has tagged its operations before.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch.utils.checkpoint
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils.checkpoint import noop_context_fn

import thunder.nested
from thunder.core.compile_data import get_compile_data
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.nested.levels import current_level
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import HigherOrderError, checked_callable, function_name
from thunder.torch.higher_order.recomputation import mark_for_recomputation
from thunder.torch.higher_order.requires_grad import may_require_grad, may_require_grad_in_another_call
from thunder.torch.higher_order.selective_checkpoint import Kept, kept_by, policy_of

# What torch lets the caller say about how it recomputes, which says nothing about what is computed.
_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(torch.utils.checkpoint.checkpoint).parameters.items()
    if name in ("context_fn", "determinism_check", "debug", "early_stop")
}
_IGNORED = _DEFAULTS.keys() - {"context_fn"}


@thunder.nested.lookaside(torch.utils.checkpoint.checkpoint)
def checkpoint(function: WrappedValue, /, *args: WrappedValue, **options: WrappedValue) -> WrappedValue:
    """Calls the function; what lies between its inputs and its results is not kept for the backward pass::

        def checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs):
            return function(*args, **kwargs)

    The backward pass computes it once more, from the inputs. Kept are, nevertheless:

    - what the policy in ``context_fn`` asks for (``create_selective_checkpoint_contexts``). It is asked while tracing,
      about the aten operators that eager PyTorch would dispatch to; what it reads is not guarded;
    - of what is drawn at random, the state of the generator before, from which the recomputation draws the very same.
      The numbers themselves are kept where they are smaller, depend on other values, or come from an operator of
      another executor; and where ``preserve_rng_state`` is False, so that no state is stashed;
    - what operations of the program's own give (custom operators), which may be random;
    - what depends on a buffer that the function changes in place (the running mean of a batch norm); and everything,
      if it changes another tensor in place.

    Effects are made once, by the forward pass. ``use_reentrant=None`` is taken for False. ``determinism_check``,
    ``debug`` and ``early_stop`` are about recomputations that may differ from the forward pass, which these cannot:
    a warning says that they are ignored where they are not the default.

    Raises:
        HigherOrderError: ``function`` is not callable, or ``use_reentrant`` is true.
        ValueError: ``determinism_check`` is none of torch's, or ``debug`` and ``context_fn`` are given, as in torch.
    """
    checked_callable(function, "torch.utils.checkpoint.checkpoint", "function")
    if unwrap(options.pop("use_reentrant", False)):
        raise HigherOrderError(
            f"`torch.utils.checkpoint.checkpoint` of {function_name(function)} was asked for `use_reentrant=True`, "
            f"which calls the function from autograd's backward pass and cannot be traced. Pass `use_reentrant=False`: "
            f"the values and gradients are the same."
        )
    preserve_rng_state = unwrap(options.pop("preserve_rng_state", True))
    given = {name: unwrap(options.pop(name)) for name in _DEFAULTS if name in options}
    _check_options(given)
    where = function_name(function)
    _warn_of_ignored(where, given)
    policy = policy_of(given.get("context_fn", noop_context_fn), where)
    records_gradients = get_compile_data().is_grad_enabled
    nested = thunder.nested.trace(function, *args, **options)
    if records_gradients:
        kept = Kept() if policy is None else kept_by(policy, nested, where)
        mark_for_recomputation(nested, kept, redraws=bool(preserve_rng_state) and _has_gradient(nested))
    return nested.inline()


@thunder.nested.lookaside(torch.ops.higher_order.tag_activation_checkpoint)
def tag_activation_checkpoint(module: WrappedValue, /, *args: WrappedValue, **options: WrappedValue) -> WrappedValue:
    """What Dynamo makes of ``checkpoint``: the function is a graph module, and ``context_fn`` lies in its ``meta``."""
    if isinstance(unwrap(module), _LazyGraphModule):
        _LazyGraphModule.force_recompile(unwrap(module))  # or its first call would, while it is interpreted
    context_fn = getattr(unwrap(module), "meta", {}).get("_checkpoint_context_fn")
    if context_fn is not None:
        options["context_fn"] = context_fn
    return checkpoint(module, *args, **options)


def _check_options(given: dict[str, Any]) -> None:
    """What torch checks of its options."""
    allowed = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    if given.get("determinism_check", "default") not in allowed:
        raise ValueError(
            f"determinism_check should be one of {list(allowed)}, but got {given['determinism_check']}",
        )
    if given.get("debug") and given.get("context_fn", noop_context_fn) is not noop_context_fn:
        raise ValueError("debug=True is incompatible with non-default context_fn")


def _warn_of_ignored(where: str, given: dict[str, Any]) -> None:
    ignored = [f"`{name}`" for name, value in given.items() if name in _IGNORED and value != _DEFAULTS[name]]
    if ignored:
        warnings.warn(
            f"`torch.utils.checkpoint.checkpoint` of {where}: thunder.jit recomputes what the backward pass needs, by "
            f"the traced operations themselves, and ignores {', '.join(ignored)}. The values and gradients are not "
            f"affected.",
            stacklevel=2,
        )


def _has_gradient(nested: NestedTrace) -> bool:
    """Whether autograd may have anything to recompute; elsewhere thunder executes random operations in other ways."""
    level, values = current_level(), [i.value for i in nested.inputs]
    return any(may_require_grad(level, v) or may_require_grad_in_another_call(level, v) for v in values)
