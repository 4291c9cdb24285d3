"""How a foreign proxy, one of an enclosing level, is replaced by a level's own, see NOTE [foreign proxies]."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import thunder.clang as clang
from thunder.core.compile_data import get_cache_option
from thunder.core.interpreter import ProvenanceRecord, PseudoInst
from thunder.core.options import CACHE_OPTIONS
from thunder.core.proxies import CONSTRAINT, NumberProxy, Proxy, ProxyTag, TensorProxy
from thunder.nested.captures import Attr, path_of

if TYPE_CHECKING:
    from thunder.nested.levels import Level


def like(proxy: Proxy, name: str) -> Proxy:
    """A proxy equal to ``proxy`` but for its name. The name is not recorded in any trace."""
    new = object.__new__(type(proxy))
    new.__dict__.update(proxy.__dict__)
    new._name = name
    new._tags = set(proxy._tags)
    new.history = None
    return new


def stand_in(level: Level, foreign: Proxy, provenance: ProvenanceRecord) -> Proxy:
    """The level's own proxy for a tensor or number of an enclosing level; the same one for the same foreign proxy.

    Args:
        level: the level that has met the foreign proxy.
        foreign: the proxy.
        provenance: how it was reached. If no path leads there the stand-in has no history.
    """
    if foreign.name in level.own:
        return level.own[foreign.name]
    from thunder.core.jit_ext import EXT_FLAG_IS_PROXY_DERIVED, EXT_FLAG_IS_TENSOR_PROXY, should_register_for_prologue

    history = provenance if should_register_for_prologue(provenance) else None
    if isinstance(foreign, TensorProxy):
        provenance.ext_flag |= EXT_FLAG_IS_TENSOR_PROXY
        own = _tensor(level, foreign, history)
    else:
        provenance.ext_flag |= EXT_FLAG_IS_PROXY_DERIVED
        own = _number(level, foreign, history)
    return own


def _tensor(level: Level, foreign: TensorProxy, history: ProvenanceRecord | None) -> TensorProxy:
    from thunder.core.jit_ext import _infer_name_postfix_from_provenance

    postfix = "" if history is None else _infer_name_postfix_from_provenance(history)
    own = like(foreign, level.ctx.computation_trace.make_name(f"t{postfix}" if postfix else None, prefix="t"))
    own._shape = tuple(_dimension(level, s, history, i) for i, s in enumerate(foreign._shape))
    path = path_of(history)
    if path is not None and path.steps[-2:-1] == (Attr("_parameters"),):
        own._tags.add(ProxyTag.STATIC_MEMORY_LOCATION)  # `unpack_inputs` knows parameters by it
    _note(level, foreign, own, history)
    cached = get_cache_option() in (CACHE_OPTIONS.CONSTANT_VALUES, CACHE_OPTIONS.SYMBOLIC_VALUES)
    if history is not None and cached:
        level.ctx.add_constraint((clang.check_tensor_shape_and_metadata, own))
    return own


def _number(level: Level, foreign: NumberProxy, history: ProvenanceRecord | None) -> NumberProxy:
    if foreign.name not in level.own:
        own = like(foreign, level.ctx.computation_trace.make_name(prefix=foreign.prefix))
        if foreign.value is None:  # it is known when the program runs (`.item()`), and cannot be guarded
            own.constraint = CONSTRAINT.DYNAMIC
        _note(level, foreign, own, history)
    return level.own[foreign.name]


def _dimension(level: Level, size: Any, history: ProvenanceRecord | None, index: int) -> Any:
    """A dimension of a stand-in's shape: with symbolic values it is a number of the enclosing level."""
    if not isinstance(size, NumberProxy):
        return size
    if history is not None:
        # a copy, as the record of the tensor itself will be flagged as a tensor's, which no path goes through
        shape = ProvenanceRecord(PseudoInst.LOAD_ATTR, inputs=[copy.copy(history), _constant("shape")])
        shape.inputs[0].ext_flag = 0
        history = ProvenanceRecord(PseudoInst.BINARY_SUBSCR, inputs=[shape, _constant(index)])
    return _number(level, size, history)


def _constant(value: Any) -> ProvenanceRecord:
    return ProvenanceRecord(PseudoInst.CONSTANT, inputs=[], value=value)


def _note(level: Level, foreign: Proxy, own: Proxy, history: ProvenanceRecord | None) -> None:
    own.history = history
    level.stand_ins[own.name] = foreign
    level.own[foreign.name] = own
