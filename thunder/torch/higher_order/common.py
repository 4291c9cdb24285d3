"""What the operators share: which operations are random, what leaves a function, and inner programs that run alone."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import thunder.core.prims as prims
from thunder.common import transform_for_execution, transform_to_torch_types
from thunder.core.codeutils import SigInfo
from thunder.core.interpreter import unwrap
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import (
    dce,
    remove_context_manager_prims_from_trace,
    wrap_return_value_together_with_arguments,
)
from thunder.executors.passes import del_last_used
from thunder.nested.effects import written_values
from thunder.nested.errors import NestedTracingError, name_of
from thunder.nested.levels import Level
from thunder.nested.replay import replay
from thunder.nested.rewrap import reachable_proxies
from thunder.nested.trace import NestedTrace
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward


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


class Program:
    """The program of a traced function, as a function of tensors by itself, for an operator that calls it when run.

    Args:
        nested: the function's trace.
        outputs: the proxies of the inner computation that the program shall give.
        differentiable: for each of the trace's inputs whether gradients for it may be asked for. Proxies do not tell:
            those of intermediate values never say that they require a gradient.
    """

    def __init__(self, nested: NestedTrace, outputs: Sequence[TensorProxy], differentiable: Sequence[bool]):
        self._trace = _stand_alone(nested, [nested._level.final_name(p) for p in outputs], differentiable)
        self.is_random = any(map(is_random, self._trace.bound_symbols))

    def forward(self, executors: Sequence[Any]) -> Callable:
        """A callable that takes the inputs as real tensors and returns a tuple of outputs."""
        trace = transform_for_execution(dce(self._trace), executors, use_del_last_used=False)[-1]
        return transform_to_torch_types(del_last_used(trace)).python_callable()

    def gradient(self, executors: Sequence[Any]) -> tuple[Callable, list[bool]]:
        """A callable of the inputs and of a gradient for each output (None where it has none).

        It computes the program once more, and returns a gradient for each input.

        Returns:
            The callable, and for each input whether it has a gradient; elsewhere the callable returns None.
        """
        joint = grad_transform_on_trace(dce(wrap_return_value_together_with_arguments(self._trace)))
        joint = transform_for_execution(joint, executors, use_del_last_used=False)[-1]
        forward_trace, backward_trace = split_into_forward_and_backward(joint)
        if backward_trace is None:
            return (lambda inputs, gradients: [None] * len(inputs)), [False] * len(self._trace.args)
        has_gradient = [g is not None for g in backward_trace.bound_symbols[-1].args[0]]
        forward = transform_to_torch_types(del_last_used(forward_trace)).python_callable()
        backward = transform_to_torch_types(
            del_last_used(backward_trace, clear_mutable_collections=True)
        ).python_callable()

        def gradient(inputs: Sequence[Any], gradients: Sequence[torch.Tensor | None]) -> Sequence[Any]:
            _, (tensors, others) = forward(*inputs)
            return backward([list(tensors), list(others)], list(gradients))

        return gradient, has_gradient


def _stand_alone(nested: NestedTrace, outputs: Sequence[str], differentiable: Sequence[bool]) -> TraceCtx:
    """A trace of its own with the inner computation, which returns the outputs as a flat tuple of distinct tensors."""
    trace = TraceCtx()
    with tracectx(trace):
        inputs = []
        for i, wants in zip(nested.inputs, differentiable):
            proxy = i.proxy
            if isinstance(proxy, TensorProxy):
                own = TensorProxy(proxy.name, like=proxy, requires_grad=wants)
            else:
                trace.add_name(proxy.name)
                own = proxy
            prims.unpack_trivial(own, name=own.name)
            inputs.append(own)
        replayed = replay(nested.computation_trace, inputs, trace)
        seen = names(inputs)
        results = []
        for name in outputs:
            result = replayed[name]
            # as two names for one tensor they would share one gradient
            result = prims.clone(result) if result.name in seen else result
            seen.add(result.name)
            results.append(result)
        prims.python_return(tuple(results))
    signature = SigInfo("computation")
    signature.args = [(p.name, None) for p in inputs]
    trace._siginfo = signature
    trace.args = tuple(inputs)
    return remove_context_manager_prims_from_trace(trace)


def without_aliases(results: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The results, with copies of those that share memory with an input or an earlier result.

    Thunder takes the results of an operator for new tensors, and a change of one in place for a change of it alone.
    """

    def memory(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    seen = {memory(t) for t in inputs if isinstance(t, torch.Tensor)}
    own = []
    for result in results:
        if isinstance(result, torch.Tensor):
            result = result.clone() if memory(result) in seen else result
            seen.add(memory(result))
        own.append(result)
    return tuple(own)


def versions_of(values: Sequence[Any]) -> torch.Tensor:
    """How often each tensor was changed in place."""
    counted = [isinstance(v, torch.Tensor) and not v.is_inference() for v in values]
    return torch.tensor([v._version if c else 0 for v, c in zip(values, counted)], dtype=torch.int64)


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
