"""The symbol of a :meth:`NestedTrace.as_operator`, and what its outputs must be."""

from __future__ import annotations

from typing import Any

from thunder.core.prims import shallow_copy
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import Symbol


def all_or_none_detached(outputs: list[Any]) -> tuple[Any, ...]:
    """Thunder differentiates no operation of which one result is detached: those results become copies that are not."""
    detached = [isinstance(o, TensorProxy) and ProxyTag.DETACHED_AUTOGRAD_GRAPH in o.tags for o in outputs]
    if all(detached):
        return tuple(outputs)
    return tuple(shallow_copy(o) if is_detached else o for o, is_detached in zip(outputs, detached))


class Operator(Symbol):
    """The symbol of one :meth:`NestedTrace.as_operator`. Two are equal only if they are the same one.

    Symbols of one id are else taken for equal, and then a pass that removes common subexpressions would take two
    operators of the same name for the same computation.
    """

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)
