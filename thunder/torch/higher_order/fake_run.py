"""What PyTorch would dispatch the operations of a trace to: they are run once more, on fake tensors.

NOTE [aten operators]: each operation is run by PyTorch's function of its name, below a mode that notes the aten
operators, as the mode of a policy does in eager PyTorch. What PyTorch's function cannot run as the trace has it, the
caller takes apart; primitives run as thunder's own PyTorch executor runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

import thunder.torch as ltorch
from thunder.common import transform_to_torch_types
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import NumberProxy, TensorProxy
from thunder.core.symbol import BoundSymbol, has_tags
from thunder.core.trace import TraceCtx, tracectx
from thunder.executors.passes import transform_for_execution
from thunder.executors.torchex import ex as torch_executor
from thunder.nested.levels import current_level
from thunder.nested.replay import Substitution
from thunder.nested.trace import NestedTrace
from thunder.torch.higher_order.common import OperatorTag, names
from thunder.torch.higher_order.requires_grad import may_require_grad


@dataclasses.dataclass(eq=False)
class Call:
    """A call of an aten operator on fake tensors, and what a policy says about it."""

    operator: Any
    args: tuple
    kwargs: dict[str, Any]
    result: Any
    answer: Any = None

    def is_like(self, other: Call) -> bool:
        """Whether it is the same operator, with results of the same form."""
        return self.operator == other.operator and forms(self.result) == forms(other.result)


def tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in a structure."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storages(values: Any) -> set[int]:
    """What memory the tensors in a structure have."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(values)}


def forms(values: Any) -> list[tuple]:
    """Shapes and dtypes of the tensors in a structure."""
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors(values)]


class _Recorder(TorchDispatchMode):
    """Notes the operators that reach it, below autograd and above the fake tensors, as a policy's own mode does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            self.calls.append(Call(func, args, kwargs or {}, result))
        return result


class FakeRun:
    """Runs bound symbols on fake tensors, by PyTorch's functions. See NOTE [asking a policy]."""

    def __init__(self, nested: NestedTrace):
        self._mode = FakeTensorMode()
        self._values = _FakeValues((), nested.computation_trace)
        level = current_level()
        for i in nested.inputs:
            if isinstance(i.proxy, TensorProxy):
                self._values[i.proxy.name] = self._fake(i.proxy, may_require_grad(level, i.value))

    @contextlib.contextmanager
    def fakes(self) -> Iterator[None]:
        """Where fake tensors may be used."""
        with torch.enable_grad(), torch._C._DisableAutocast(), self._mode:
            yield

    def __call__(self, bsym: BoundSymbol) -> list[Call]:
        """Runs it; returns what its function dispatched to.

        Raises:
            Exception: it cannot be run, or gives other tensors than in the trace.
        """
        failure: Exception = NotImplementedError("it is no function of PyTorch")
        for function, args, kwargs in self._ways(bsym):
            try:
                return self._call(bsym, function, args, kwargs)
            except Exception as error:
                failure = error
        raise failure

    def _call(self, bsym: BoundSymbol, function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Call]:
        with self.fakes(), _Recorder() as recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the program's own call has given them
            results = tensors(function(*args, **kwargs))
        proxies = [o for o in bsym.flat_outs if isinstance(o, TensorProxy)]
        expected = [(self._shape(p), dtypes.to_torch_dtype(p.dtype)) for p in proxies]
        if forms(results) != expected:
            raise TypeError(f"it gives {forms(results)} instead of {expected}")
        self._values.update(zip((p.name for p in proxies), results))
        return recorder.calls

    def _ways(self, bsym: BoundSymbol) -> Iterator[tuple[Callable, tuple, dict[str, Any]]]:
        """Functions, with arguments, that may do what the bound symbol does."""
        for function in _torch_functions(bsym):
            yield function, *self._values.value(_as_written(bsym))
        if not bsym.subsymbols and (bsym.sym.executor is None or has_tags(bsym, {OperatorTag.REPEATABLE})):
            inputs = list({p.name: p for p in bsym.flat_proxy_args}.values())
            yield _as_executed(bsym, inputs), tuple(map(self._values.value, inputs)), {}

    def make_up_results(self, bsym: BoundSymbol) -> None:
        """Fake tensors for those results that it could not compute."""
        for out in bsym.flat_outs:
            if isinstance(out, TensorProxy) and out.name not in self._values:
                self._values[out.name] = self._fake(out, requires_grad=dtypes.is_inexact_dtype(out.dtype))

    def storages(self, proxies: Sequence[Any]) -> set[int]:
        """The memory of the fake tensors of some proxies."""
        return storages([self._values.get(p.name) for p in proxies])

    def _fake(self, proxy: TensorProxy, requires_grad: bool) -> torch.Tensor:
        form = {"dtype": dtypes.to_torch_dtype(proxy.dtype), "device": devices.to_torch_device(proxy.device)}
        with self.fakes():
            # no leaf, so that it may be changed in place
            return torch.empty(self._shape(proxy), **form, requires_grad=requires_grad).clone()

    def _shape(self, proxy: TensorProxy) -> tuple[int, ...]:
        return self._values.value(tuple(proxy._shape))  # `shape` would record an operation


class _FakeValues(Substitution):
    """Names to fake tensors; in arguments, thunder's types become PyTorch's."""

    def value(self, x: Any) -> Any:
        """``x`` as PyTorch's functions take it."""
        if isinstance(x, NumberProxy):
            return x.python_type(1) if x.value is None else x.value
        if isinstance(x, dtypes.dtype):
            return dtypes.to_torch_dtype(x)
        if isinstance(x, devices.Device):
            return devices.to_torch_device(x)
        return super().value(x)


# `1 - a` is not `torch.sub(1, a)` to PyTorch.
_REFLECTED = {"torch.sub": operator.sub, "torch.true_divide": operator.truediv}


def _torch_functions(bsym: BoundSymbol) -> Iterator[Callable]:
    """PyTorch's functions that the symbol is named after, and that thunder replaces by it."""
    if bsym.sym.id in _REFLECTED and not isinstance(bsym.args[0], TensorProxy):
        yield lambda a, b: _REFLECTED[bsym.sym.id](a, b)
    named = _function_named(bsym.sym.id)
    if named is not None:
        yield named
    for function, symbol in ltorch._torch_to_thunder_function_map.items():
        if symbol is bsym.sym and callable(function):
            yield function


def _function_named(name: Any) -> Callable | None:
    parts = name.split(".") if isinstance(name, str) else [""]
    if parts[0] != "torch":
        return None
    value = functools.reduce(lambda parent, part: getattr(parent, part, None), parts[1:], torch)
    return value if callable(value) else None


def _as_written(bsym: BoundSymbol) -> tuple[tuple, dict[str, Any]]:
    """The arguments without the defaults that thunder fills in: ``sum(a)`` and ``sum(a, None)`` are two operators."""
    parameters = inspect.signature(bsym.sym.meta).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    kwargs = {k: v for k, v in bsym.kwargs.items() if not (k in defaults and v is defaults[k])}
    args = list(bsym.args)
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name, value in reversed(list(zip(positional, args))):
        if len(args) > len(positional) or name not in defaults or value is not defaults[name]:
            break
        args.pop()
    return tuple(args), kwargs


def _as_executed(bsym: BoundSymbol, inputs: Sequence[Any]) -> Callable:
    """A primitive, or an operator of an executor, as a function of its inputs, as thunder runs it with PyTorch."""
    trace = TraceCtx()
    with tracectx(trace):
        trace.names |= names((*inputs, *bsym.flat_proxy_outs))
        for proxy in inputs:
            prims.unpack_trivial(proxy, name=proxy.name)
        trace.bound_symbols.append(bsym.from_bsym())
        prims.python_return(bsym.output)
    trace._siginfo = SigInfo("primitive")
    trace._siginfo.args = [(proxy.name, None) for proxy in inputs]
    trace.args = tuple(inputs)
    executors = [torch_executor] if bsym.sym.executor is None else [bsym.sym.executor, torch_executor]
    return transform_to_torch_types(transform_for_execution(trace, executors)).python_callable()
