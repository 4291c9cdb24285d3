"""What may require a gradient, and what shares memory: thunder's intermediate values never say so themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import thunder.torch as ltorch
from thunder.core import dtypes
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import Proxy, ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.nested.levels import Level

_DETACHING = ("detach", "detach_copy")


def is_differentiable(value: object) -> bool:
    """Whether PyTorch could record a gradient for the value, by its type."""
    return isinstance(value, TensorProxy) and dtypes.is_inexact_dtype(value.dtype)


def may_require_grad(level: Level, value: object) -> bool:
    """Whether a value of the running level ``level`` may require a gradient: False only if it certainly does not.

    What does not depend, by operations that were recorded while gradients were on, on an input that requires a
    gradient does not require one.
    """
    return _depends(level, value, lambda proxy: _input_requires_grad(level, proxy))


def may_require_grad_in_another_call(level: Level, value: object) -> bool:
    """Whether :func:`may_require_grad` may have another answer when the trace of an inner level is replayed again."""
    return level.enclosing is not None and _depends(level, value, is_differentiable)


def note_requires_grad_read(level: Level) -> None:
    """Notes that the program depends on an answer that another call may change: traces of it are not reused."""
    enclosing: Level | None = level
    while enclosing is not None:
        enclosing.reads_requires_grad = True
        enclosing = enclosing.enclosing


def _depends(level: Level, value: object, on: Callable[[Proxy], bool]) -> bool:
    if not is_differentiable(value):
        return False
    bsyms, made = _recorded(level)
    candidates = {p.name: p for p in (value, *(arg for bsym in bsyms for arg in bsym.flat_proxy_args))}
    found = {name for name, p in candidates.items() if name not in made and on(p)}
    passed_on(bsyms, found)
    return value.name in found


def passed_on(bsyms: Iterable[BoundSymbol], found: set[str]) -> None:
    """Adds to ``found``, names of values that may require a gradient, what may require one because of them."""
    size = -1
    while size != len(found):  # in-place operations and views pass it on against the order of the trace
        size = len(found)
        for bsym in bsyms:
            found |= _passed_on(bsym, found)


def is_program_input(level: Level, proxy: Proxy) -> bool:
    """Whether the value comes from outside of the outermost program: an argument, a parameter, a global."""
    if proxy.name in _recorded(level)[1]:
        return False
    foreign = _foreign(level, proxy)
    return foreign is None or is_program_input(level.enclosing, foreign)


def is_or_has_view(level: Level, value: object) -> bool:
    """Whether another value of the program may share its memory with this one."""
    if not isinstance(value, Proxy):
        return False
    if any(_makes_view(bsym, value.name) for bsym in _recorded(level)[0]):
        return True
    foreign = _foreign(level, value)
    return foreign is not None and is_or_has_view(level.enclosing, foreign)


def _makes_view(bsym: BoundSymbol, name: str) -> bool:
    names = {p.name for p in (*bsym.flat_proxy_args, *bsym.flat_proxy_outs)}
    return (_is_view(bsym) and name in names) or any(_makes_view(sub, name) for sub in bsym.subsymbols)


def _recorded(level: Level) -> tuple[list[BoundSymbol], set[str]]:
    """The operations that the level has recorded until now, and the names that they make."""
    bsyms = [bsym for scope in level.ctx.computation_trace.scopes for bsym in scope or ()]
    return bsyms, {out.name for bsym in bsyms for out in bsym.flat_proxy_outs}


def _foreign(level: Level, own_input: Proxy) -> Proxy | None:
    """The enclosing level's value that an input stands for, None if the level has unpacked it itself."""
    if level.enclosing is not None and level.is_foreign(own_input):
        return own_input
    return level.stand_ins.get(own_input.name)


def _input_requires_grad(level: Level, proxy: Proxy) -> bool:
    foreign = _foreign(level, proxy)
    if foreign is not None:
        return may_require_grad(level.enclosing, foreign)
    return is_differentiable(proxy) and proxy.requires_grad


def _passed_on(bsym: BoundSymbol, found: set[str]) -> set[str]:
    """The operands and results of an operation that may require a gradient if those in ``found`` do."""
    outs = [out for out in bsym.flat_proxy_outs if is_differentiable(out)]
    if bsym.sym.name in _DETACHING or any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in out.tags for out in outs):
        return set()
    args = [arg for arg in bsym.flat_proxy_args if is_differentiable(arg)]
    passed = set()
    if any(arg.name in found for arg in args):
        passed |= {out.name for out in outs}
        passed |= {target.name for target in _changed_operands(bsym)}
    if _is_view(bsym) and any(out.name in found for out in outs):
        passed |= {arg.name for arg in args}
    return passed


def is_in_place(bsym: BoundSymbol) -> bool:
    """Whether the operation, or one that it consists of, changes a tensor in place."""
    return any(True for _ in _changed_operands(bsym))


def _changed_operands(bsym: BoundSymbol) -> Iterator[Proxy]:
    if bsym.sym.id is PrimIDs.COPY_:
        yield bsym.args[1]
    elif bsym.sym.tags and OpTags.IN_PLACE in bsym.sym.tags:
        yield bsym.flat_proxy_args[0]
    for sub in bsym.subsymbols:
        yield from _changed_operands(sub)


def _is_view(bsym: BoundSymbol) -> bool:
    return bsym.sym in ltorch._syms_returning_views or bsym.sym in ltorch._syms_that_may_return_views


class Aliases:
    """Which values of a piece of a trace are one tensor, and which of those from outside it changes in place.

    Attributes:
        made: the names that the piece makes.
        changed: the names, of tensors from outside, that it changes in place, themselves or a view of them.
    """

    def __init__(self, bsyms: Iterable[BoundSymbol]):
        self.made: set[str] = set()
        self.changed: set[str] = set()
        self._same: dict[str, str] = {}
        self._owners: dict[str, set[str]] = {}
        for bsym in bsyms:
            self._visit(bsym)

    def tensor(self, proxy: Proxy) -> str:
        """The name of the tensor that the value is: the result of ``x.add_(1)`` is ``x``."""
        name = proxy.name
        while name in self._same:
            name = self._same[name]
        return name

    def outside(self, proxy: Proxy) -> bool:
        """Whether the value is, or may share its memory with, a tensor from outside."""
        return bool(self._owners_of(proxy.name))

    def _visit(self, bsym: BoundSymbol) -> None:
        for sub in bsym.subsymbols:
            self._visit(sub)
        args = {arg.name for arg in bsym.flat_proxy_args}
        outs = {out.name for out in bsym.flat_proxy_outs} - args
        self.made |= outs
        changed = list(_changed_operands(bsym))
        for target in changed:
            self.changed |= self._owners_of(target.name)
        if changed and len(outs) == 1:
            self._same.update((out, changed[0].name) for out in outs if out != changed[0].name)
        if changed or _is_view(bsym):
            owners = set().union(*map(self._owners_of, args))
            for out in outs:
                self._owners[out] = self._owners.get(out, set()) | owners

    def _owners_of(self, name: str) -> set[str]:
        return self._owners.get(name, set()) if name in self.made else {name}
