"""What a level is, and how it is entered and left.

A *level* is one run of ``thunder_general_jit``. Level 0 is the outermost; an inner level has an *enclosing* level,
whose proxies are *foreign* to it. NOTE [foreign proxies]: an inner level never uses a foreign proxy. Where it meets
one it registers a proxy of its own, a *stand-in*, with its own provenance and checks, just as for a real tensor. No
``ProvenanceRecord`` is then shared between levels, which is what corrupted the enclosing ``unpack_inputs``. The names
of the enclosing levels are reserved in the inner computation trace, so a proxy is foreign if and only if its name is.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import thunder.clang as clang
from thunder.core.compile_data import _compile_data
from thunder.core.interpreter import (
    InterpreterError,
    InterpreterRuntimeCtx,
    ProvenanceRecord,
    WrappedValue,
    get_interpreterruntimectx,
    wrap_const,
)
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy, variableify
from thunder.core.utils import is_hashable
from thunder.nested.ambient import inherited_state
from thunder.nested.captures import Lift, Path, path_of
from thunder.nested.effects import Writes
from thunder.nested.ended import EndedProxies
from thunder.nested.errors import CaptureError, NestedTracingError
from thunder.nested.reads import Reads
from thunder.nested.roots import plain_function, runs_lookaside_of
from thunder.nested.stand_ins import stand_in

if TYPE_CHECKING:
    from thunder.core.jit_ext import JitCtx

_READS_REQUIRES_GRAD = TensorProxy.requires_grad.fget
_level: ContextVar[Level | None] = ContextVar("thunder_nested_level", default=None)


def current_level() -> Level | None:
    """The innermost level that is running in this thread, or None."""
    return _level.get()


class Level:
    """One run of ``thunder_general_jit``.

    Attributes:
        fn: the function that the level traces.
        arguments: its positional and keyword arguments.
        enclosing: the level in whose run this one began, or None for level 0.
        ctx: the level's ``JitCtx``, once ``thunder_general_jit`` has made it.
        lenient: whether an exception of the function, or a result or effect that the level's own epilogue cannot hold,
            is left to the caller.
        result: the wrapped result of the function, in an inner level.
        stand_ins: own name to the foreign proxy that the proxy of that name stands for.
        own: the name of such a foreign proxy to the own one.
        exception: what the function raised, if it is lenient.
        reads_requires_grad: whether the function asked a tensor for ``requires_grad``, which no check records.
        unrepresentable: why the level's own epilogue lacks a result or an effect, if it is lenient.
        final_state: grad mode and autocast at the end of the function.
        reads: the read set, if the level is traced as a region or inside of one.
        is_traced_as_region: whether it is a region itself, whose root function is not looked aside once more.
        ambient: what ``regions.py`` compares beside it.
        regions: the traces of regions in this compilation.
        runtimes: the interpreters of the enclosing levels, the nearest first.
        writes: what the function changed in containers and cells that came from outside.
    """

    def __init__(self, fn: Callable, arguments: tuple[tuple, dict], enclosing: Level | None, *, lenient: bool = False):
        self.fn = fn
        self.arguments = arguments
        self.enclosing = enclosing
        self.lenient = lenient
        self.ctx: JitCtx | None = None
        self.result: WrappedValue | None = None
        self.stand_ins: dict[str, Proxy] = {}
        self.writes = Writes()
        self.python_types: dict[str, type] = {}
        self.exception: Exception | None = None
        self.reads_requires_grad = False
        self.unrepresentable: Exception | None = None
        self.final_state: tuple[bool, tuple] | None = None
        self._reserved: set[str] = set()
        self.own: dict[str, Proxy] = {}
        self._postfixes: dict[str, str] = {}
        self.reads: Reads | None = None
        self.is_traced_as_region = False
        self.ambient: tuple | None = None
        self.runtimes: tuple[InterpreterRuntimeCtx, ...] = ()
        self._interprets_root = False
        self._ended: EndedProxies = EndedProxies() if enclosing is None else enclosing._ended
        if enclosing is not None:
            self._reserved = set(enclosing.ctx.computation_trace.names)
            self.runtimes = (get_interpreterruntimectx(), *enclosing.runtimes)
            if enclosing.reads is not None:
                self.reads = Reads()

    @property
    def depth(self) -> int:
        """0 for the outermost level."""
        return 0 if self.enclosing is None else self.enclosing.depth + 1

    @property
    def outermost(self) -> Level:
        """The level of depth 0."""
        return self if self.enclosing is None else self.enclosing.outermost

    def attach(self, ctx: JitCtx) -> None:
        """Takes the context that ``thunder_general_jit`` made for this level."""
        self.ctx = ctx
        self.reserve(self._reserved)
        if self.enclosing is None:
            from thunder.nested.regions import Regions, named_regions

            self._region_classes, self._region_modules = named_regions(ctx.compile_data)
            self.regions = Regions()
            self.stats = _compile_data.get()[1]
        else:
            self.regions = self.enclosing.regions
            self._interprets_root = self.is_traced_as_region or runs_lookaside_of(self.fn)

    def is_region(self, module: Any) -> bool:
        """Whether the option ``nested_regions`` of the outermost level names the module or its class."""
        if self.enclosing is not None:
            return self.enclosing.is_region(module)
        return isinstance(module, self._region_classes) or id(module) in self._region_modules

    def reserve(self, names: set[str]) -> None:
        """Takes the names, which are those of an enclosing level's proxies, for those of foreign ones."""
        self._reserved |= names
        self.ctx.computation_trace.names |= names

    def is_foreign(self, proxy: Proxy) -> bool:
        """Whether the proxy belongs to an enclosing level."""
        return proxy.name in self._reserved

    def postfix(self, provenance: ProvenanceRecord, postfix: str) -> str:
        """A postfix for the name of a tensor that was reached by a path.

        It must lead to a name, which that of a dict's key ``"linear.weight"`` does not, and to no name of the
        enclosing levels or of another tensor, because ``proxify`` would take that name away from them.

        Args:
            provenance: how the tensor was reached.
            postfix: what the installed thunder proposes.
        """
        path = path_of(provenance) if self.enclosing is not None else None
        if path is not None and path.is_capture:
            postfix = "_" + re.sub(r"\W+", "_", path.spoken(self.fn)).strip("_")
        if postfix not in self._postfixes:
            spelled = re.sub(r"\W", "_", postfix)
            free, n = spelled, 0
            while spelled and (f"t{free}" in self._reserved or free in self._postfixes.values()):
                n += 1
                free = f"{spelled}_{n}"
            self._postfixes[postfix] = free
        return self._postfixes[postfix]

    def path_to(self, own_input: Proxy) -> Path | None:
        """How an input of this level was reached, or None where no path leads to it (a default argument, say)."""
        return None if self.is_foreign(own_input) else path_of(own_input.history)

    def final_name(self, proxy: Proxy) -> str:
        """The name in the finished traces: proxies are renamed after the user's variables at the end."""
        return self.ctx._proxy_swapmap.get(variableify(proxy), proxy).name

    #
    # Values that come from outside
    #

    def adopt(self, value: WrappedValue) -> None:
        """Puts this level's own value in the place of one of the enclosing levels'. Called for every wrapped value."""
        uvalue = value.value
        if isinstance(uvalue, Proxy):
            self._ended.check(uvalue, self)
            if uvalue.name in self._reserved and isinstance(uvalue, (TensorProxy, NumberProxy)):
                value.register_proxy(stand_in(self, uvalue, value.provenance))
                value.python_typ = self._python_type(uvalue)
        elif self.runtimes and isinstance(uvalue, (dict, list, set)):
            self._adopt_changed_container(value)

    def _python_type(self, foreign: Proxy) -> type:
        """The type of the real tensor that an enclosing level made the proxy for (for ``isinstance(w, Parameter)``)."""
        level = self.enclosing
        while level is not None:
            if foreign.name in level.python_types:
                return level.python_types[foreign.name]
            level = level.enclosing
        return type(foreign)

    def _adopt_changed_container(self, value: WrappedValue) -> None:
        """Enclosing levels record changes to containers in copies; what they changed must be read here, too."""
        container = value.value
        for runtime in self.runtimes:
            known = runtime._known_wrappers.get(id(container))
            wrapper = known[0]() if known is not None else None
            if wrapper is not None and wrapper.original_value is container:
                changed = wrapper.value
                value.register_proxy(type(changed)(changed))
                if isinstance(changed, list):
                    value.item_wrappers = [None] * len(changed)
                return

    #
    # The root function
    #

    def interprets(self, fn: Callable) -> bool:
        """Whether the call of ``fn`` that is about to happen is that of the root function, to be interpreted."""
        if self._interprets_root and fn is plain_function(self.fn):
            self._interprets_root = False
            return True
        return False

    def before_call(self, fn: Callable, args: tuple) -> None:
        """Before anything is called: notes what the call reads or changes outside the function, in ways of its own."""
        if fn is _READS_REQUIRES_GRAD:
            for level in self.and_enclosing_regions():
                level.reads_requires_grad = True
        elif is_hashable(fn):
            self.writes.before_call(self, fn, args)

    def and_enclosing_regions(self) -> Iterator[Level]:
        """This level, and those around it that are traced as regions: what one reads, they have read."""
        level: Level | None = self
        while level is not None:
            if level is self or level.reads is not None:
                yield level
            level = level.enclosing

    def observe(self, run: Callable) -> Callable:
        """Lets the level see the result and the errors of the interpreted function."""

        @functools.wraps(run)
        def observed(*args: Any, **kwargs: Any) -> Any:
            try:
                result = run(*args, **kwargs)
            except InterpreterError as error:
                # each level wraps an error of the interpreter once more; the innermost says where it happened
                if isinstance(error.__cause__, (InterpreterError, NestedTracingError)):
                    raise error.__cause__ from error.__cause__.__cause__
                raise
            except Exception as exception:
                if not self.lenient:
                    raise
                self.exception = exception
                result = wrap_const(None)
            if self.enclosing is not None:
                self.result = result
            return result

        return observed

    def guard(self, lift: Lift) -> None:
        """Reads in the level that goes on now all that this level read by a path, so that it is guarded there, too."""
        for check, *values in self.ctx._constraints:
            static = check is clang.check_number_type_and_value
            for value in values:
                path = self.path_to(value) if isinstance(value, Proxy) else None
                if path is None or (value.name in self.stand_ins and not static):
                    continue
                outer = lift(path).value
                if static and isinstance(outer, NumberProxy):
                    outer.make_static_constrained()  # the inner level has relied on its value
        if current_level().reads is not None:
            self._pass_on_reads(lift, current_level().reads)

    def _pass_on_reads(self, lift: Lift, reads: Reads) -> None:
        """What this level read, the region that encloses it has read, too, also where no guard records it."""
        if self.reads.reason is not None:
            reads.refuse(self.reads.reason)
        for path in self.reads.found:
            try:
                lift(path)
            except CaptureError as error:
                reads.refuse(str(error))


@contextlib.contextmanager
def running(level: Level) -> Iterator[None]:
    """The body runs as code of the level."""
    token = _level.set(level)
    try:
        yield
    finally:
        _level.reset(token)


@contextlib.contextmanager
def enter_level(fn: Callable, arguments: tuple[tuple, dict], *, lenient: bool = False) -> Iterator[Level]:
    """Runs the body as a level that traces ``fn``; leaves everything as it was, on return and on every exception."""
    enclosing = current_level()
    level = Level(fn, arguments, enclosing, lenient=lenient)
    try:
        with running(level), contextlib.nullcontext() if enclosing is None else inherited_state(level):
            yield level
    finally:
        level.writes.undo()
        level._ended.add(level)
        if level.ctx is not None:
            level.ctx.level = None  # a cycle would keep the arguments until the next garbage collection
