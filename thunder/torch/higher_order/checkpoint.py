"""``torch.utils.checkpoint.checkpoint``: which operations the backward pass makes once more.

The function's program is replayed into the enclosing trace, as if it had been called without ``checkpoint``; tags on
its operations tell thunder's gradient transform (``thunder.transforms.autodiff``) what to recompute.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator

import torch.utils.checkpoint

import thunder.core.prims as prims
import thunder.nested
import thunder.torch as ltorch
from thunder.core.interpreter import WrappedValue, unwrap
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, has_tags
from thunder.core.trace import TraceCtx
from thunder.nested.captures import Attr
from thunder.nested.stand_ins import like
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import (
    HigherOrderError,
    checked_callable,
    function_name,
    in_place_copies,
    is_random,
    leaving_names,
    names,
)

# What torch lets the caller say about how it recomputes, which says nothing about what is computed.
_IGNORED = {
    name: parameter.default
    for name, parameter in inspect.signature(torch.utils.checkpoint.checkpoint).parameters.items()
    if name in ("context_fn", "determinism_check", "debug", "early_stop")
}
_NOT_REPEATED = {OpTags.IN_PLACE, OpTags.DONT_DCE, OpTags.DONT_RECOMPUTE_IN_BACKWARD}


@thunder.nested.lookaside(torch.utils.checkpoint.checkpoint)
def checkpoint(function: WrappedValue, /, *args: WrappedValue, **options: WrappedValue) -> WrappedValue:
    """Calls the function; what lies between its inputs and its results is not kept for the backward pass::

        def checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True, **kwargs):
            return function(*args, **kwargs)

    The backward pass computes it once more, from the inputs. Kept are, nevertheless:

    - what random operations drew, so that the recomputation has the very values of the forward pass, whatever
      ``preserve_rng_state`` is (torch promises them if it is True, and promises nothing if it is False);
    - what operations of the program's own give (custom operators), which may be random;
    - what depends on a buffer that the function changes in place (the running mean of a batch norm); and everything,
      if it changes another tensor in place.

    Effects are made once, by the forward pass. ``use_reentrant=None`` is taken for False. ``context_fn``,
    ``determinism_check``, ``debug`` and ``early_stop`` are ignored, with a warning where they are not the default.

    Raises:
        HigherOrderError: ``function`` is not callable, or ``use_reentrant`` is true.
    """
    checked_callable(function, "torch.utils.checkpoint.checkpoint", "function")
    if unwrap(options.pop("use_reentrant", False)):
        raise HigherOrderError(
            f"`torch.utils.checkpoint.checkpoint` of {function_name(function)} was asked for `use_reentrant=True`, "
            f"which calls the function from autograd's backward pass and cannot be traced. Pass `use_reentrant=False`: "
            f"the values and gradients are the same."
        )
    options.pop("preserve_rng_state", None)
    _warn_of_ignored(function, options)
    nested = thunder.nested.trace(function, *args, **options)
    mark_for_recomputation(nested)
    return nested.inline()


def _warn_of_ignored(function: WrappedValue, options: dict[str, WrappedValue]) -> None:
    given = {name: unwrap(options.pop(name)) for name in _IGNORED if name in options}
    ignored = [f"`{name}`" for name, value in given.items() if value != _IGNORED[name]]
    if ignored:
        warnings.warn(
            f"`torch.utils.checkpoint.checkpoint` of {function_name(function)}: thunder.jit decides by itself what is "
            f"recomputed and ignores {', '.join(ignored)}. The values and gradients are not affected.",
            stacklevel=2,
        )


def mark_for_recomputation(nested: NestedTrace) -> None:
    """Tags the operations of a traced function whose results the backward pass shall compute once more."""
    trace = nested.computation_trace
    copies = [copy for bsym in trace.bound_symbols for copy in in_place_copies(bsym)]
    changed = names(copy.args[1] for copy in copies)
    opaque = any(leaf.sym.tags and OpTags.IN_PLACE in leaf.sym.tags for b in trace.bound_symbols for leaf in _leaves(b))
    if opaque or not changed <= {i.proxy.name for i in nested.inputs if _is_buffer(i)}:
        return  # other inputs or intermediates may be views of what is changed, and would be read after the change
    leaving, bsyms = leaving_names(nested), []
    marker = _Marker(leaving, changed)
    for bsym in trace.bound_symbols:
        if names(bsym.flat_proxy_outs) & leaving and _keeps_more_than_its_result(bsym):
            made, *kept = _with_result_apart(trace, bsym, leaving)
            if marker(made):
                bsyms += [made, *kept]
                continue
        marker(bsym)
        bsyms.append(bsym)
    trace.bound_symbols[:] = bsyms


def _keeps_more_than_its_result(bsym: BoundSymbol) -> bool:
    """Whether the gradient rule of the operation may keep intermediates (the softmax in a cross entropy)."""
    is_view = bsym.sym in ltorch._syms_returning_views or bsym.sym in ltorch._syms_that_may_return_views
    return not is_view and len(list(_leaves(bsym))) > 1


def _leaves(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    for sub in bsym.subsymbols:
        yield from _leaves(sub)
    if not bsym.subsymbols:
        yield bsym


def _with_result_apart(trace: TraceCtx, bsym: BoundSymbol, leaving: set[str]) -> list[BoundSymbol]:
    """The operation with results of other names, so that it may be recomputed, and those under their own, to be kept.

    Before: ``loss = cross_entropy(a, b)``
    After:  ``t0 = cross_entropy(a, b)``, ``loss = shallow_copy(t0)``
    """
    given = names(bsym.flat_proxy_args)
    results = {o.name: o for o in bsym.flat_proxy_outs if o.name in leaving and o.name not in given}
    apart = {variableify(o): like(o, trace.make_name(prefix=o.prefix)) for o in results.values()}
    made = bsym.from_bsym_swap_proxies(apart)
    return [made, *(prims.shallow_copy.bind(apart[variableify(o)], output=o) for o in results.values())]


def _is_buffer(i: thunder.nested.Input) -> bool:
    return i.path is not None and Attr("_buffers") in i.path.steps[-2:]


class _Marker:
    """Tags an operation, or those that it consists of, for recomputation.

    Args:
        leaving: names of what leaves the function. It is not recomputed: others use it, and it may be a result of the
            whole program, whose gradient belongs to the proxy of the forward pass.
        changed: names of what is changed in place. What depends on it is not recomputed, so that no change is seen
            early or made twice.
    """

    def __init__(self, leaving: set[str], changed: set[str]):
        self._leaving, self._changed = leaving, set(changed)

    def __call__(self, bsym: BoundSymbol) -> bool:
        """Returns whether the whole operation was tagged."""
        if bsym.subsymbols:
            # all of them, not up to the first that is kept
            whole = all([self(sub) for sub in bsym.subsymbols])
        else:
            whole = self._can_be_repeated(bsym)
        outs = names(bsym.flat_proxy_outs)
        # an operation that gives back its argument makes nothing; tagged, it would seem to need itself
        whole = whole and not outs & (self._leaving | names(bsym.flat_proxy_args))
        if whole:
            bsym.tags.add(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
        return whole

    def _can_be_repeated(self, bsym: BoundSymbol) -> bool:
        if names(bsym.flat_proxy_args) & self._changed:
            self._changed |= names(bsym.flat_proxy_outs)
            return False
        if is_random(bsym) or has_tags(bsym, _NOT_REPEATED):
            return False
        # what gives no proxy at all converts a constant of the program
        return all(isinstance(out, TensorProxy) for out in bsym.flat_proxy_outs)
