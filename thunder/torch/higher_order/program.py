"""The program of a traced function as callables of its own, for an operator that calls it when the whole runs.

NOTE [residuals]: ``Program.with_gradient`` gives a pair of callables, as autograd has it: the first computes the
outputs and keeps residuals, the second computes gradients from them, so that nothing is computed twice. Residuals are
references to inputs and intermediates; nothing is copied for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

import thunder.core.prims as prims
from thunder.common import transform_for_execution, transform_to_torch_types
from thunder.core import devices, dtypes
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from thunder.core.transform_common import (
    dce,
    remove_context_manager_prims_from_trace,
    wrap_return_value_together_with_arguments,
)
from thunder.executors.passes import del_last_used
from thunder.nested.replay import replay
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import is_random, names
from thunder.torch.higher_order.requires_grad import passed_on
from thunder.transforms.autodiff import grad_transform_on_trace, split_into_forward_and_backward


class Program:
    """The program of a traced function.

    Args:
        nested: the function's trace.
        outputs: what the program shall give: proxies of the inner computation; ints and bools, which become tensors.
        differentiable: for each of the trace's inputs whether gradients for it may be asked for. Proxies do not tell:
            those of intermediate values never say that they require a gradient.
    """

    def __init__(self, nested: NestedTrace, outputs: Sequence[Any], differentiable: Sequence[bool]):
        names = [nested._level.final_name(o) if isinstance(o, TensorProxy) else o for o in outputs]
        self._trace = stand_alone(nested, names, differentiable)
        self.is_random = any(map(is_random, self._trace.bound_symbols))

    def __str__(self) -> str:
        with tracectx(self._trace):
            return "\n".join(
                line for bsym in self._trace.bound_symbols for line in bsym.python(indent=0, print_depth=1)
            )

    def forward(self, executors: Sequence[Any]) -> Callable:
        """A callable that takes the inputs as real tensors and returns a tuple of outputs."""
        trace = transform_for_execution(dce(self._trace), executors, use_del_last_used=False)[-1]
        return _callable(del_last_used(trace))

    def with_gradient(self, executors: Sequence[Any]) -> tuple[Callable, Callable, list[bool]]:
        """The program with its gradient, see NOTE [residuals].

        Returns:
            A callable of the inputs that returns the outputs and :class:`Residuals`; a callable of those and of a
            gradient for each output (None where it has none) that returns a gradient for each input (or None); and for
            each input whether it has a gradient.
        """
        pair = self.forward_and_backward(executors)

        def run(*inputs: Any) -> tuple[tuple, Residuals]:
            outputs, tensors, others = pair.forward(*inputs)
            return outputs, Residuals(tensors, others)

        def run_backward(residuals: Residuals, gradients: Sequence[torch.Tensor | None]) -> Sequence[Any]:
            return pair.backward(*residuals.lists(), list(gradients))

        return run, run_backward, pair.has_gradient

    def forward_and_backward(self, executors: Sequence[Any]) -> ForwardAndBackward:
        """The program with its gradient, as plain callables."""
        joint = grad_transform_on_trace(dce(wrap_return_value_together_with_arguments(self._trace)))
        joint = transform_for_execution(joint, executors, use_del_last_used=False)[-1]
        forward_trace, backward_trace = split_into_forward_and_backward(joint)
        saved = [list(proxies) for proxies in forward_trace.bound_symbols[-1].args[1]]
        run = _callable(del_last_used(forward_trace))

        def forward(*inputs: Any) -> tuple[tuple, Sequence[torch.Tensor], Sequence[Any]]:
            result, (tensors, others) = run(*inputs)
            return result["output"], tensors, others

        if backward_trace is None:
            count = len(self._trace.args)
            return ForwardAndBackward(forward, lambda *_: [None] * count, *saved, [False] * count)
        has_gradient = [g is not None for g in backward_trace.bound_symbols[-1].args[0]]
        run_backward = _callable(del_last_used(backward_trace, clear_mutable_collections=True))

        def backward(tensors: Sequence[Any], others: Sequence[Any], gradients: Sequence[Any]) -> Sequence[Any]:
            return run_backward([list(tensors), list(others)], list(gradients))

        return ForwardAndBackward(forward, backward, *saved, has_gradient)

    @property
    def inputs(self) -> Sequence[Proxy]:
        """The program's inputs."""
        return self._trace.args


@dataclasses.dataclass(frozen=True)
class ForwardAndBackward:
    """A program with its gradient.

    Attributes:
        forward: a callable of the inputs that returns the outputs and the residuals: tensors, and other values.
        backward: a callable of those two and of a gradient for each output that returns one for each input, or None.
        tensors, others: proxies for the residuals.
        has_gradient: for each input whether it has a gradient.
    """

    forward: Callable
    backward: Callable
    tensors: Sequence[TensorProxy]
    others: Sequence[Proxy]
    has_gradient: Sequence[bool]


def _callable(trace: TraceCtx) -> Callable:
    # what it is called from has thunder's decorators, which would hide gradients from transforms of torch.func
    return transform_to_torch_types(trace).python_callable(include_decorators=False)


class ChangedError(RuntimeError):
    """A tensor that a gradient needs was changed in place after the forward pass."""


class Residuals:
    """What the backward pass needs of one run of a program.

    The tensors are detached: an output among them would hold on to itself by way of its gradient function.
    """

    def __init__(self, tensors: Sequence[Any], others: Sequence[Any]):
        self._tensors = [t.detach() if isinstance(t, torch.Tensor) else t for t in tensors]
        self._versions = [version_of(t) for t in self._tensors]
        self._others = others

    def lists(self) -> list[list]:
        """The tensors and the other values.

        Raises:
            ChangedError: a tensor was changed in place in the meantime.
        """
        if self._versions != [version_of(t) for t in self._tensors]:
            raise ChangedError
        return [list(self._tensors), list(self._others)]


def version_of(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def dependent_outputs(nested: NestedTrace, outputs: Sequence[Any], differentiable: Sequence[bool]) -> list[bool]:
    """Which outputs may require a gradient if the inputs that ``differentiable`` tells do."""
    found = {i.proxy.name for i, d in zip(nested.inputs, differentiable) if d}
    passed_on(nested.computation_trace.bound_symbols, found)
    return [isinstance(o, TensorProxy) and nested._level.final_name(o) in found for o in outputs]


def stand_alone(nested: NestedTrace, outputs: Sequence[str | int], differentiable: Sequence[bool]) -> TraceCtx:
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
        for output in outputs:
            result = replayed[output] if isinstance(output, str) else _constant(output)
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


def constant_dtype(value: int) -> dtypes.dtype:
    """The dtype of the tensor that an output becomes which is an int or a bool."""
    return dtypes.bool8 if isinstance(value, bool) else dtypes.int64


def _constant(value: int) -> TensorProxy:
    return prims.full((), value, device=devices.cpu, dtype=constant_dtype(value))
