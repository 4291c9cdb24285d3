"""What the operators share: which operations are random, what leaves a function, and inner programs that run alone."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from thunder.core.interpreter import unwrap
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.nested.effects import written_values
from thunder.nested.errors import NestedTracingError, name_of
from thunder.nested.levels import Level
from thunder.nested.rewrap import reachable_proxies
from thunder.nested.trace import NestedTrace


class HigherOrderError(NestedTracingError, TypeError):
    """A higher-order operator of PyTorch was called in a way that it, or its Thunder program, does not allow."""


class OperatorTag(enum.Enum):
    """What the symbol of an operator of an executor's own says about itself."""

    REPEATABLE = enum.auto()  # it may be executed once more, and gives the same then


# Not every random prim says so, and operations that thunder leaves to torch say nothing about themselves.
_RANDOM_PRIMS = {PrimIDs.RANDN, PrimIDs.RANDINT}
_RANDOM_NAMES = re.compile(
    r"dropout|rand|bernoulli|multinomial|gumbel|fractional_max|rrelu|exponential|geometric|cauchy|"
    r"(^|_)poisson$|(^|_)(log_)?normal_?$|(^|_)uniform_?$"
)


def is_random(bsym: BoundSymbol) -> bool:
    """Whether the operation, or one that it consists of, draws random numbers, or may do so."""
    if bsym.subsymbols:
        return any(map(is_random, bsym.subsymbols))
    if has_tags(bsym, {OpTags.RANDOM_OP, OpTags.TORCH_COMPILE_COMPLIANT_CUSTOM_OP}) or bsym.sym.id in _RANDOM_PRIMS:
        return True
    if bsym.sym.executor is not None:  # an operator of the program's own may do anything
        return not has_tags(bsym, {OperatorTag.REPEATABLE})
    return not isinstance(bsym.sym.id, PrimIDs) and _RANDOM_NAMES.search(bsym.sym.name) is not None


def in_place_copies(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """The primitive copies ``copy_(new, changed)`` that the operation makes."""
    if bsym.sym.id is PrimIDs.COPY_:
        yield bsym
    for sub in bsym.subsymbols:
        yield from in_place_copies(sub)


def leaving_names(nested: NestedTrace) -> set[str]:
    """The names, in the inner computation, of all that the function returned, raised or put outside of itself."""
    level = nested._level
    raised = [] if nested.exception is None else [nested.exception.args, vars(nested.exception)]
    values = [nested.result, *written_values(level), *raised]
    return {level.final_name(proxy) for proxy in reachable_proxies(level, values)}


def names(proxies: Any) -> set[str]:
    """The names of some proxies."""
    return {proxy.name for proxy in proxies}


def function_name(fn: Any) -> str:
    """A (wrapped) function as messages name it, with file and line."""
    fn = unwrap(fn)
    return name_of(fn) if callable(fn) else repr(fn)


def checked_callable(fn: Any, operator: str, parameter: str) -> Callable:
    """The plain function of a wrapped one.

    Raises:
        HigherOrderError: it is not callable.
    """
    if not callable(unwrap(fn)):
        raise HigherOrderError(f"`{operator}` needs a callable for `{parameter}`, but got {unwrap(fn)!r}.")
    return unwrap(fn)


def executors_of(level: Level) -> Sequence[Any]:
    """The executors of the outermost level, which execute the whole program."""
    while level.enclosing is not None:
        level = level.enclosing
    return level.ctx.compile_data.executors_list


def without_aliases(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results, with copies of those that share memory with an input or an earlier result.

    Thunder takes the results of an operator for new tensors, and a change of one in place for a change of it alone.
    """

    def memory(tensor: torch.Tensor) -> int:
        while is_functorch_wrapped_tensor(tensor):  # by a torch.vmap that this runs in
            tensor = get_unwrapped(tensor)
        return tensor.untyped_storage().data_ptr()

    seen = {memory(t) for t in inputs if isinstance(t, torch.Tensor)}
    own = []
    for result in results:
        if isinstance(result, torch.Tensor):
            result = result.clone() if memory(result) in seen else result
            seen.add(memory(result))
        own.append(result)
    return tuple(own)


def rng_states() -> list[torch.Tensor]:
    """The states of the generators of the CPU and of all accelerators in use."""
    accelerators = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *accelerators]


@contextlib.contextmanager
def rng(states: Sequence[torch.Tensor]) -> Iterator[None]:
    """Runs with the generators in those states, and puts them back; with no states leaves them alone."""
    before = rng_states()[: len(states)]
    try:
        _set_rng_states(states)
        yield
    finally:
        _set_rng_states(before)


def _set_rng_states(states: Sequence[torch.Tensor]) -> None:
    for device, state in enumerate(states, start=-1):
        if device < 0:
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)
