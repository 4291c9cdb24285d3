"""Proxies that have outlived their level: a lookaside that keeps and uses one gets an error, not a wrong program."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from thunder.core.proxies import Proxy
from thunder.nested.errors import EscapedProxyError, name_of

if TYPE_CHECKING:
    from thunder.nested.levels import Level


class EndedProxies:
    """The proxies of the inner levels of one compilation that have ended, by identity."""

    def __init__(self) -> None:
        self._makers: dict[int, tuple[weakref.ref, str]] = {}

    def add(self, level: Level) -> None:
        """Adds the proxies of an inner level that ends."""
        if level.enclosing is None or level.ctx is None:
            return
        maker = name_of(level.fn)
        made = [p for bsym in level.ctx.computation_trace.bound_symbols for p in bsym.flat_proxy_outs]
        for proxy in (*made, *level.own.values()):
            if not level.is_foreign(proxy):
                self._makers[id(proxy)] = (weakref.ref(proxy), maker)

    def check(self, proxy: Proxy, level: Level) -> None:
        """Checks a proxy that ``level`` meets.

        Raises:
            EscapedProxyError: the level that made it has ended.
        """
        reference, maker = self._makers.get(id(proxy), (None, ""))
        if reference is not None and reference() is proxy:
            raise EscapedProxyError(
                f"The proxy {proxy.name} was made while {maker} was traced, and is used in {name_of(level.fn)} after "
                f"that trace has ended. Take the values of a nested trace from what `inline()`, `as_operator()` or "
                f"`thunder_callable()` return; do not keep the proxies that the inner function worked with."
            )
