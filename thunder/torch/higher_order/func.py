"""``torch.func``: ``grad``, ``grad_and_value``, ``vjp`` and ``jvp`` of functions, inside of compiled code.

The function is traced as an inner level, and its trace is replayed together with its gradient (``joint.py``). Each
differentiated argument is traced as a tensor of its own, so that a captured tensor is a constant, also if it is the
very tensor that is passed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten, treespec_pprint

import thunder.nested
from thunder.core import dtypes
from thunder.core.interpreter import WrappedValue, unwrap, wrap_const, wrapped_build_tuple
from thunder.core.proxies import TensorProxy
from thunder.nested.captures import wrap_call
from thunder.nested.errors import name_of
from thunder.nested.levels import Level, current_level
from thunder.nested.lookasides import call_interpreted
from thunder.torch.higher_order.common import HigherOrderError, checked_callable
from thunder.torch.higher_order.differentiate import Call, plain_of, type_of
from thunder.torch.higher_order.joint import constant

#
# The operators
#


@thunder.nested.lookaside(torch.func.grad)
def grad(func: WrappedValue, argnums: WrappedValue | int = 0, has_aux: WrappedValue | bool = False) -> WrappedValue:
    """A function that computes the gradient of ``func``, which returns a scalar tensor::

        def grad(func, argnums=0, has_aux=False):
            def wrapper(*args, **kwargs):
                gradient, value = grad_and_value(func, argnums, has_aux)(*args, **kwargs)
                return (gradient, value[1]) if has_aux else gradient
            return wrapper

    See :func:`grad_and_value`.
    """
    checked_callable(func, "torch.func.grad", "func")
    return call_interpreted(_grad, func, *_constants(argnums, has_aux))


@thunder.nested.lookaside(torch.func.grad_and_value)
def grad_and_value(
    func: WrappedValue, argnums: WrappedValue | int = 0, has_aux: WrappedValue | bool = False
) -> WrappedValue:
    """A function that computes the gradient of ``func``, which returns a scalar tensor, and its value::

        def grad_and_value(func, argnums=0, has_aux=False):
            def wrapper(*args, **kwargs):
                leaves = [t.detach().requires_grad_() for t in args[argnums]]
                value = func(*args, with the leaves in their place, **kwargs)
                return torch.autograd.grad(value, leaves, create_graph=True), value
            return wrapper

    The result can be differentiated once more, with respect to the arguments and to what ``func`` captures.

    Raises:
        RuntimeError: ``func`` returns no scalar tensor, or ``has_aux`` and no pair; ``argnums`` are no positions; an
            argument is no floating point tensor.
        ValueError: an argument that is to be differentiated holds something that is no tensor.
        HigherOrderError: ``func`` changes something outside of it, or a tensor in place; an operation in it has no
            gradient rule.
    """
    checked_callable(func, "torch.func.grad_and_value", "func")
    return call_interpreted(_grad_and_value, func, *_constants(argnums, has_aux))


def _grad(func, argnums, has_aux):
    """What is interpreted."""

    def wrapper(*args, **kwargs):
        return eager_transforms.grad_impl(func, argnums, has_aux, args, kwargs)

    return wrapper


def _grad_and_value(func, argnums, has_aux):
    """What is interpreted."""

    def wrapper(*args, **kwargs):
        return eager_transforms.grad_and_value_impl(func, argnums, has_aux, args, kwargs)

    return wrapper


@thunder.nested.lookaside(eager_transforms.grad_impl)
def _grad_impl(
    func: WrappedValue, argnums: WrappedValue, has_aux: WrappedValue, args: WrappedValue, kwargs: WrappedValue
) -> WrappedValue:
    results = _grad_and_value_impl(func, argnums, has_aux, args, kwargs).item_wrappers
    return wrapped_build_tuple((results[0], _items(results[1])[1])) if unwrap(has_aux) else results[0]


@thunder.nested.lookaside(eager_transforms.grad_and_value_impl)
def _grad_and_value_impl(
    func: WrappedValue, argnums: WrappedValue, has_aux: WrappedValue, args: WrappedValue, kwargs: WrappedValue
) -> WrappedValue:
    api = "grad_and_value(f)(*args)"
    positions = eager_transforms._slice_argnums(tuple(range(len(unwrap(args)))), unwrap(argnums), as_tuple=False)
    call = Call.trace(func, _items(args), _keywords(kwargs), positions, api, has_aux=unwrap(has_aux))
    output = call.output
    if not isinstance(output, TensorProxy):
        raise RuntimeError(f"{api}: Expected f(*args) to return a Tensor, got {type_of(output)}")
    if output.ndim != 0:
        raise RuntimeError(
            f"{api}: Expected f(*args) to return a scalar Tensor, got tensor with {output.ndim} dims. Maybe you wanted "
            f"to use the vjp or jacrev APIs instead?"
        )
    # eager PyTorch gives zeros for an integer
    result = call.replay([output] if dtypes.is_inexact_dtype(output.dtype) else [])
    ones = [constant(1.0, o) for o in call.outputs]
    return wrapped_build_tuple((_wrapped(call.gradients(ones)), result))


@thunder.nested.lookaside(torch.func.vjp)
def vjp(func: WrappedValue, *primals: WrappedValue, has_aux: WrappedValue | bool = False) -> WrappedValue:
    """The value of ``func``, and a function that computes products of vectors with its Jacobian::

        def vjp(func, *primals):
            leaves = [t.detach().requires_grad_() for t in primals]
            output = func(*leaves)
            return output, lambda v: torch.autograd.grad(output, leaves, v, create_graph=True, retain_graph=True)

    The function may be called any number of times; ``func`` is computed once. Raises what ``grad_and_value`` raises,
    but for outputs, which may be any structure of floating point tensors.
    """
    checked_callable(func, "torch.func.vjp", "func")
    api = "vjp(f, *primals)"
    call = Call.trace(func, primals, {}, tuple(range(len(primals))), api, has_aux=unwrap(has_aux))
    outputs, spec = tree_flatten(call.output)
    _check_outputs(outputs, api)
    for output in outputs:
        if not dtypes.is_inexact_dtype(output.dtype):
            raise RuntimeError(
                "vjp(f, ...): All outputs of f must be floating-point or complex Tensors, got Tensor with dtype "
                f"{dtypes.to_torch_dtype(output.dtype)}"
            )
    result = call.replay(outputs)
    pull = call_interpreted(_vjp_fn, wrap_const(_Pull(call, spec, current_level())))
    if not unwrap(has_aux):
        return wrapped_build_tuple((result, pull))
    result.track_items()
    return wrapped_build_tuple((result.item_wrappers[0], pull, result.item_wrappers[1]))


@dataclasses.dataclass(frozen=True, eq=False)
class _Pull:
    call: Call
    spec: TreeSpec
    level: Level


def _vjp_fn(pull):
    """What is interpreted."""

    def vjp_fn(cotangents, retain_graph=True, create_graph=None):
        return _pulled(pull, cotangents)

    return vjp_fn


def _pulled(pull: Any, cotangents: Any) -> Any:
    """Has a lookaside: what the function that ``vjp`` returns computes."""


@thunder.nested.lookaside(_pulled)
def _pulled_lookaside(pull: WrappedValue, cotangents: WrappedValue) -> Any:
    pulled: _Pull = unwrap(pull)
    call = pulled.call
    if pulled.level is not current_level():
        raise HigherOrderError(
            f"The function that `torch.func.vjp` of {call.name} returned is called inside of another function that is "
            f"traced by itself. Call it in the function that has called `vjp`."
        )
    given, spec = tree_flatten(plain_of(cotangents))
    if spec != pulled.spec:
        raise RuntimeError(
            "Expected pytree structure of cotangents to be the same as pytree structure of outputs to the function. "
            f"cotangents: {treespec_pprint(spec)}, primal output: {treespec_pprint(pulled.spec)}"
        )
    for i, (cotangent, output) in enumerate(zip(given, call.outputs)):
        if tuple(cotangent.shape) != tuple(output.shape):
            raise RuntimeError(
                f"Mismatch in shape: grad_output[{i}] has a shape of torch.Size({list(cotangent.shape)}) and "
                f"output[{i}] has a shape of torch.Size({list(output.shape)})."
            )
    return call.gradients(given)


@thunder.nested.lookaside(torch.func.jvp)
def jvp(
    func: WrappedValue,
    primals: WrappedValue,
    tangents: WrappedValue,
    *,
    strict: WrappedValue | bool = False,
    has_aux: WrappedValue | bool = False,
) -> WrappedValue:
    """The value of ``func``, and its derivative in the direction of ``tangents``::

        def jvp(func, primals, tangents):
            output, vjp_fn = vjp(func, *primals)
            zeros = torch.zeros_like(output).requires_grad_()
            return output, torch.autograd.grad(vjp_fn(zeros), zeros, tangents)

    The gradient's computation is differentiated with respect to what it is linear in, so each operation of it needs a
    gradient rule. Raises what ``vjp`` raises.
    """
    checked_callable(func, "torch.func.jvp", "func")
    api = eager_transforms.jvp_str
    if unwrap(strict):
        raise HigherOrderError(f"`torch.func.jvp` of {name_of(unwrap(func))}: `strict=True` is not supported.")
    if not isinstance(unwrap(primals), tuple):
        raise RuntimeError(f"{api}: Expected primals to be a tuple. E.g. it should be valid to call f(*primals).")
    flat, spec = tree_flatten(plain_of(primals))
    given, tangents_spec = tree_flatten(plain_of(tangents))
    if spec != tangents_spec:
        raise RuntimeError(
            f"{api}: Expected primals and tangents to have the same python structure. For example, if primals is a "
            f"tuple of 3 tensors, tangents also must be. Got primals with structure {spec} and tangents with structure "
            f"{tangents_spec}"
        )
    for name, values in (("primals", flat), ("tangents", given)):
        if not values:
            raise RuntimeError(f"{api}: Expected {name} to contain at least one Tensor.")
        for value in values:
            if not isinstance(value, TensorProxy):
                raise RuntimeError(f"{api}: Expected {name} to only contain Tensors, got {type_of(value)}")
    for primal, tangent in zip(flat, given):
        if tuple(primal.shape) != tuple(tangent.shape):
            raise RuntimeError(
                "Trying to set a forward gradient that has a different size than that of the original Tensor, this is "
                f"not supported. Tensor is of size {list(primal.shape)} while the given forward gradient is of size "
                f"{list(tangent.shape)}."
            )
    positions = tuple(range(len(unwrap(primals))))
    call = Call.trace(func, _items(primals), {}, positions, api, has_aux=unwrap(has_aux))
    outputs, spec = tree_flatten(call.output)
    _check_outputs(outputs, api)
    result = call.replay(outputs)
    pushed = _wrapped(tree_unflatten(call.pushed(given), spec))
    if not unwrap(has_aux):
        return wrapped_build_tuple((result, pushed))
    output, aux = _items(result)
    return wrapped_build_tuple((output, pushed, aux))


#
# Transforms that are missing
#


def _missing(name: str, why: str) -> Callable:
    def lookaside(func: WrappedValue, *args: WrappedValue, **kwargs: WrappedValue) -> WrappedValue:
        of = f" of {name_of(unwrap(func))}" if callable(unwrap(func)) else ""
        raise HigherOrderError(f"`torch.func.{name}`{of} is not possible under `thunder.jit`: {why}.")

    return lookaside


_JACOBIAN = "it needs `vmap` over a gradient. Call `torch.func.vjp` or `jvp` for each row or column"
for _name, _why in {
    "jacrev": _JACOBIAN,
    "jacfwd": _JACOBIAN,
    "hessian": _JACOBIAN,
    "linearize": "it runs the function to record it. Call `torch.func.jvp`",
    "functionalize": "thunder makes programs functional by itself. Call the function without it",
    "stack_module_state": "it makes new leaf tensors. Call it outside of the compiled function, and pass its results",
    "replace_all_batch_norm_modules_": "it changes the module. Call it outside of the compiled function",
    "rearrange": "its pattern cannot be interpreted. Use `permute`, `reshape` and `expand`",
    "debug_unwrap": "there are no wrapped tensors in a trace. Call it outside of the compiled function",
}.items():
    if hasattr(torch.func, _name):
        thunder.nested.lookaside(getattr(torch.func, _name))(_missing(_name, _why))


def _check_outputs(outputs: Sequence[Any], api: str) -> None:
    if not outputs or (len(outputs) == 1 and outputs[0] is None):
        raise RuntimeError(f"{api}: Expected f to be a function that has non-empty output (got output = {outputs})")
    for output in outputs:
        if not isinstance(output, TensorProxy):
            raise RuntimeError(
                f"{api}: expected f(*primals) to return only tensors, got unsupported type {type_of(output)}"
            )


def _constants(*values: Any) -> list[WrappedValue]:
    return [v if isinstance(v, WrappedValue) else wrap_const(v) for v in values]


def _items(values: WrappedValue) -> list[WrappedValue]:
    values.track_items()
    return list(values.item_wrappers)


def _keywords(kwargs: WrappedValue) -> dict[str, WrappedValue]:
    kwargs.track_items()
    return {k: kwargs.item_wrappers[k] for k in unwrap(kwargs)}


def _wrapped(value: Any) -> WrappedValue:
    return wrap_call(value, (), {})[0]
