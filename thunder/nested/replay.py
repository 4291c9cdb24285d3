"""How an inner computation gets into the enclosing trace: its bound symbols are copied, with other proxies.

Inputs become the enclosing level's values. What the computation makes gets its own name if the trace that it goes
into does not have that name yet, and else a fresh one, so a computation can be replayed any number of times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from thunder.core.interpreter import _interpreterruntimectx
from thunder.core.prims import PrimIDs
from thunder.core.proxies import CollectionProxy, NumberProxy, Proxy, TensorProxy
from thunder.core.pytree import tree_flatten_with_dataclass, tree_unflatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.nested.stand_ins import like

_NOT_REPLAYED = (PrimIDs.UNPACK_TRIVIAL, PrimIDs.RETURN)


class Substitution(dict):
    """Name of a proxy of the inner computation to the value that takes its place in ``trace``."""

    def __init__(self, values: Iterable[tuple[str, Any]], trace: TraceCtx):
        super().__init__(values)
        self._trace = trace
        # where the enclosing level is: an inner level whose function is an operator itself has no frame of the user's
        runtime = _interpreterruntimectx.get(None)
        self._location = (None, None) if runtime is None else runtime.get_current_user_source_location()

    def value(self, x: Any) -> Any:
        """``x`` with the proxies in it exchanged."""
        if isinstance(x, Proxy):
            if isinstance(x, CollectionProxy):
                return self._collection(x)
            return self.get(x.name, x)
        if isinstance(x, (tuple, list)):
            items = [self.value(i) for i in x]
            return type(x)._make(items) if hasattr(x, "_make") else type(x)(items)
        if isinstance(x, dict):
            return type(x)((k, self.value(v)) for k, v in x.items())
        if isinstance(x, slice):
            return slice(self.value(x.start), self.value(x.stop), self.value(x.step))
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            flat, spec = tree_flatten_with_dataclass(x)
            return tree_unflatten([self.value(leaf) for leaf in flat], spec)
        return x

    def _collection(self, x: CollectionProxy) -> CollectionProxy:
        new = object.__new__(type(x))
        new.__dict__.update(x.__dict__)
        new.coll = self.value(x.coll)
        return new

    def define(self, bsym: BoundSymbol) -> None:
        """Makes proxies for what the bound symbol and its subsymbols make."""
        for out in bsym.flat_proxy_outs:
            if out.name not in self:
                self[out.name] = self._fresh(out)
        for sub in bsym.subsymbols:
            self.define(sub)

    def _fresh(self, proxy: Proxy) -> Proxy:
        name = proxy.name if not self._trace.has_name(proxy.name) else None
        new = like(proxy, self._trace.make_name(name, prefix=proxy.prefix))
        if isinstance(new, TensorProxy) and any(isinstance(s, NumberProxy) for s in new._shape):
            new._shape = tuple(self.value(s) for s in new._shape)
        return new

    def bound_symbol(self, bsym: BoundSymbol) -> BoundSymbol:
        """A copy of the bound symbol, and of its subsymbols, with the proxies exchanged."""
        return bsym.from_bsym(
            args=self.value(bsym.args),
            kwargs=self.value(bsym.kwargs),
            output=self.value(bsym.output),
            source_filename=bsym.source_filename or self._location[0],
            source_positions=bsym.source_positions or self._location[1],
            subsymbols=[self.bound_symbol(sub) for sub in bsym.subsymbols],
            _object_ctx={},
            _import_ctx={},
        )


def replay(computation: TraceCtx, inputs: Iterable[Any], trace: TraceCtx) -> Substitution:
    """Appends the computation's bound symbols to the current scope of ``trace``.

    Args:
        computation: an inner level's computation trace.
        inputs: for each of ``computation.args`` the value that takes its place.
        trace: the trace that is being made.

    Returns:
        What takes the place of each proxy of the computation.
    """
    substitution = Substitution(((p.name, v) for p, v in zip(computation.args, inputs, strict=True)), trace)
    scope = trace.peek_scope()
    for bsym in computation.bound_symbols:
        if bsym.sym.id not in _NOT_REPLAYED:
            substitution.define(bsym)
            scope.append(substitution.bound_symbol(bsym))
    return substitution
