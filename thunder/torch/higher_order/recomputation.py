"""Which operations of a checkpointed function the backward pass makes once more.

Tags on the operations tell thunder's gradient transform (``thunder.transforms.autodiff``) what to recompute.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import thunder.core.prims as prims
import thunder.nested
import thunder.torch as ltorch
from thunder.core.prims import OpTags
from thunder.core.proxies import TensorProxy, variableify
from thunder.core.symbol import BoundSymbol, BoundSymbolTag, has_tags
from thunder.core.trace import TraceCtx
from thunder.nested.captures import Attr
from thunder.nested.stand_ins import like
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import in_place_copies, is_random, leaving_names, names
from thunder.torch.higher_order.redrawing import redraw
from thunder.torch.higher_order.selective_checkpoint import Kept

_NOT_REPEATED = {OpTags.IN_PLACE, OpTags.DONT_DCE, OpTags.DONT_RECOMPUTE_IN_BACKWARD}


class CheckpointTag(enum.Enum):
    """What a bound symbol in a checkpointed function says about itself."""

    KEPT = enum.auto()  # a policy has its results kept, in whatever checkpoint it lies


def mark_for_recomputation(nested: NestedTrace, kept: Kept, *, redraws: bool) -> None:
    """Tags the operations of a traced function whose results the backward pass shall compute once more.

    Args:
        nested: the trace of the function.
        kept: what the policy of selective checkpointing keeps.
        redraws: whether random numbers may be drawn once more, from the state that the generator had.
    """
    trace = nested.computation_trace
    copies = [copy for bsym in trace.bound_symbols for copy in in_place_copies(bsym)]
    changed = names(copy.args[1] for copy in copies)
    opaque = any(leaf.sym.tags and OpTags.IN_PLACE in leaf.sym.tags for b in trace.bound_symbols for leaf in _leaves(b))
    if opaque or not changed <= {i.proxy.name for i in nested.inputs if _is_buffer(i)}:
        return  # other inputs or intermediates may be views of what is changed, and would be read after the change
    if redraws:
        redraw(trace)
    leaving, bsyms = leaving_names(nested), []
    marker = _Marker(leaving, changed, kept.names)
    for bsym in trace.bound_symbols:
        apart = names(bsym.flat_proxy_outs) & (leaving | kept.results_only)
        is_apart = apart and _keeps_more_than_its_result(bsym)
        for part in _with_result_apart(trace, bsym, apart) if is_apart else [bsym]:
            marker(part)
            bsyms.append(part)
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


def _with_result_apart(trace: TraceCtx, bsym: BoundSymbol, apart: set[str]) -> list[BoundSymbol]:
    """The operation with results of other names, so that it may be recomputed, and those under their own, to be kept.

    Before: ``loss = cross_entropy(a, b)``
    After:  ``t0 = cross_entropy(a, b)``, ``loss = shallow_copy(t0)``
    """
    given = names(bsym.flat_proxy_args)
    results = {o.name: o for o in bsym.flat_proxy_outs if o.name in apart and o.name not in given}
    renamed = {variableify(o): like(o, trace.make_name(prefix=o.prefix)) for o in results.values()}
    made = bsym.from_bsym_swap_proxies(renamed)
    return [made, *(prims.shallow_copy.bind(renamed[variableify(o)], output=o) for o in results.values())]


def _is_buffer(i: thunder.nested.Input) -> bool:
    return i.path is not None and Attr("_buffers") in i.path.steps[-2:]


class _Marker:
    """Tags an operation, or those that it consists of, for recomputation.

    Args:
        leaving: names of what leaves the function. It is not recomputed: others use it, and it may be a result of the
            whole program, whose gradient belongs to the proxy of the forward pass.
        changed: names of what is changed in place. What depends on it is not recomputed, so that no change is seen
            early or made twice.
        kept: names of what a policy keeps.
    """

    def __init__(self, leaving: set[str], changed: set[str], kept: set[str]):
        self._leaving, self._changed, self._kept = leaving, set(changed), kept

    def __call__(self, bsym: BoundSymbol) -> bool:
        """Returns whether the whole operation was tagged."""
        if bsym.subsymbols:
            # all of them, not up to the first that is kept
            whole = all([self(sub) for sub in bsym.subsymbols])
        else:
            whole = self._can_be_repeated(bsym)
        outs = names(bsym.flat_proxy_outs)
        if outs & self._kept:
            bsym.tags.add(CheckpointTag.KEPT)
        # an operation that gives back its argument makes nothing; tagged, it would seem to need itself
        whole = whole and not outs & (self._leaving | names(bsym.flat_proxy_args))
        whole = whole and CheckpointTag.KEPT not in bsym.tags
        if whole:
            bsym.tags.add(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
        else:  # a checkpoint within may have tagged it
            bsym.tags.discard(BoundSymbolTag.RECOMPUTE_IN_BACKWARD)
        return whole

    def _can_be_repeated(self, bsym: BoundSymbol) -> bool:
        if names(bsym.flat_proxy_args) & self._changed:
            self._changed |= names(bsym.flat_proxy_outs)
            return False
        if is_random(bsym) or has_tags(bsym, _NOT_REPEATED):
            return False
        # what gives no proxy at all converts a constant of the program
        return all(isinstance(out, TensorProxy) for out in bsym.flat_proxy_outs)
