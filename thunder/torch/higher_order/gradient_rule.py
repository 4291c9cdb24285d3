"""The gradient of a function that brings its own: ``backward`` is traced, and becomes the rule of an operator.

``connect(*targets, *outputs, *operands)`` is an operator of the level's own executor. It gives its outputs, and copies
nothing. Its gradient rule replays ``backward`` and gives each target, an input of the function, its gradient.
``operands`` are what ``backward`` reads besides the outputs' gradients: what ``ctx`` holds, and what it captures.

NOTE [undefined gradients]: autograd decides at run time which outputs have a gradient; a trace has no such choice.
After ``ctx.set_materialize_grads(False)`` an output that can never have a gradient still gives None to ``backward``,
and a differentiable output that the program happens not to use gives zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import thunder.clang as clang
import thunder.torch as ltorch
from thunder.core import prims, utils
from thunder.core.interpreter import InterpreterError, WrappedValue, unwrap
from thunder.core.prims import OpTags
from thunder.core.proxies import NumberProxy, Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol, Symbol, has_tags
from thunder.core.trace import TraceCtx, get_tracectx, tracectx
from thunder.core.transforms import get_grad, put_grad, sum_to
from thunder.core.update_aliases import insert_alias_updates
from thunder.extend import TemporaryExecutor
from thunder.nested.ambient import grad_mode
from thunder.nested.captures import Attr, Item, Path, path_of
from thunder.nested.effects import _made_inside
from thunder.nested.errors import NestedTracingError
from thunder.nested.levels import current_level
from thunder.nested.replay import replay
from thunder.nested.trace import NestedTrace, trace
from thunder.torch.higher_order.common import OperatorTag
from thunder.torch.higher_order.requires_grad import Aliases

if TYPE_CHECKING:
    from thunder.torch.higher_order.custom_gradient import Definition

_CTX_ATTRIBUTES = Path("args", (Item(0), Attr("__dict__")))


class AutogradFunctionError(NestedTracingError):
    """A ``torch.autograd.Function`` does what a trace cannot do at the same time as autograd would."""


@dataclasses.dataclass(frozen=True)
class Target:
    """An input of the function, for which ``backward`` returns a gradient or None.

    Attributes:
        value: the input.
        wanted: whether the gradient is wanted; it is a tensor then.
    """

    value: Any
    wanted: bool


@dataclasses.dataclass(frozen=True)
class Rule:
    """``backward``, as a computation of the gradients of the outputs, and of operands, in this order.

    Attributes:
        computation: a trace that returns, in a tuple, for each wanted target its gradient or None.
        operands: the values, of the level that it was traced in, that it reads besides the gradients.
    """

    computation: TraceCtx
    operands: tuple[Proxy, ...]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Records the computation in the current trace."""
        replayed = replay(self.computation, values, get_tracectx())
        return replayed.value(self.computation.bound_symbols[-1].args[0])


def connect(
    definition: Definition,
    ctx: WrappedValue,
    targets: Sequence[Target],
    outputs: Sequence[Any],
    positions: Sequence[int],
) -> tuple[TensorProxy, ...]:
    """Gives outputs of the function, which have no gradient by themselves, the gradient that ``backward`` computes.

    Args:
        definition: the function.
        ctx: what ``backward`` gets first.
        targets: what gets gradients, one for each that ``backward`` returns.
        outputs: all outputs of the function, for each of which ``backward`` gets a gradient or None.
        positions: which of them are to have a gradient.
    """
    rule = _trace_backward(definition, ctx, targets, outputs, positions)
    tensors = [t.value for t in targets if t.wanted]
    first, last = len(tensors), len(tensors) + len(positions)

    def identity(*args: Any) -> tuple[TensorProxy, ...]:
        return tuple(prims.shallow_copy(output) for output in args[first:last])

    def gradient(*args: Any) -> tuple[TensorProxy, ...]:
        results = identity(*args)
        for target, grad in zip(args[:first], rule(*map(get_grad, results), *args[last:]), strict=True):
            if grad is not None:
                put_grad(target, grad)
        return results

    operator = _register(
        definition.symbol, meta=lambda *args: tuple(map(_like, args[first:last])), executed=identity, gradient=gradient
    )
    return operator(*tensors, *(outputs[i] for i in positions), *rule.operands)


def anchor(tensor: Any) -> Any:
    """A value that has the gradient of ``tensor``, and keeps it when ``tensor`` is changed in place."""
    if not isinstance(tensor, TensorProxy):
        return tensor

    def gradient(a: TensorProxy) -> TensorProxy:
        result = prims.shallow_copy(a)
        put_grad(a, get_grad(result))
        return result

    return _register("before_changes", meta=_like, executed=prims.shallow_copy, gradient=gradient)(tensor)


def view_of(tensor: TensorProxy) -> TensorProxy:
    """Another tensor with the same memory."""
    tags = [OperatorTag.REPEATABLE]
    return _executor().register_operator("view_of", meta=_like, fn=lambda a: a.view_as(a), tags=tags)(tensor)


def _register(name: str, *, meta: Callable, executed: Callable, gradient: Callable) -> Symbol:
    operator = _executor().register_operator(name, meta=meta, tags=[OperatorTag.REPEATABLE])
    _executor().register_implementation(operator, execution_transform=executed, grad_transform=gradient)
    return operator


def _executor() -> TemporaryExecutor:
    return current_level().ctx.ad_hoc_executor


def _like(tensor: TensorProxy) -> TensorProxy:
    return TensorProxy(like=tensor, requires_grad=False)


#
# Tracing backward
#


def _trace_backward(
    definition: Definition,
    ctx: WrappedValue,
    targets: Sequence[Target],
    outputs: Sequence[Any],
    positions: Sequence[int],
) -> Rule:
    grads = {i: _like(outputs[i]) for i in positions}
    with _scratch_scope() as bsyms, grad_mode(False, autocast=False):
        nested = trace(definition.backward, ctx, *_gradient_arguments(unwrap(ctx), outputs, grads))
        _check_effects(definition, nested)
        try:
            results = _checked(definition, unwrap(nested.inline()), targets)
        except (InterpreterError, NestedTracingError):
            raise
        except Exception as error:  # autograd would raise it when it calls backward
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(f"Raised while thunder traced the backward of {definition.where}.")
            results = _raised_in_backward(error, targets, grads.values())
    bsyms = [bsym for bsym in bsyms if not has_tags(bsym, {OpTags.CTX_MANAGER_ENTER_EXIT_OP})]
    return _rule(definition, bsyms, tuple(grads.values()), results)


@contextlib.contextmanager
def _scratch_scope() -> Iterator[list[BoundSymbol]]:
    """What the body records is not put into the trace, but into the list that this gives."""
    tr = get_tracectx()
    depth, bsyms = len(tr.scopes), []
    tr.push_scope(bsyms)
    try:
        yield bsyms
    finally:
        del tr.scopes[depth:]


def _gradient_arguments(ctx: Any, outputs: Sequence[Any], grads: dict[int, TensorProxy]) -> list[Any]:
    def argument(i: int, output: Any) -> Any:
        if i in grads or not isinstance(output, TensorProxy):
            return grads.get(i)
        if not (ctx.materialize_grads and ctx._materialize_non_diff_grads):
            return None
        return ltorch.zeros(*output.shape, device=output.device, dtype=output.dtype)

    return [argument(i, output) for i, output in enumerate(outputs)]


def _check_effects(definition: Definition, nested: NestedTrace) -> None:
    """``backward`` runs later than it is traced, so it may change nothing but attributes of its ``ctx``."""
    level = nested._level
    owners = [owner.provenance for owner in level.ctx._additional_outputs]
    paths = [path_of(p) for p in owners if path_of(p) is not None or not _made_inside(p.inputs[0])]
    if paths := [p for p in (*paths, *(write.path for write in level.writes)) if p != _CTX_ATTRIBUTES]:
        raise AutogradFunctionError(
            f"{definition.where}, changes {_spoken(paths[0], nested.fn)} in its backward, which is traced before it "
            f"runs. Change nothing there but attributes of `ctx`, and return what is wanted as an output or a gradient."
        ) from nested.exception


def _spoken(path: Path | None, fn: Callable) -> str:
    if path is None:
        return "an object"
    if path.steps[-1] == Attr("__globals__"):
        return "a global"
    text = path.spoken(fn).removesuffix(".__dict__")
    return f"`{text.replace('args[0]', 'ctx', 1)}`"


def _checked(definition: Definition, returned: Any, targets: Sequence[Target]) -> tuple[Any, ...]:
    """A gradient of the right shape and dtype, or None, for each wanted target, and the errors of autograd."""
    results = returned if isinstance(returned, tuple) else (returned,)
    n = len(targets)
    if len(results) < n or any(extra is not None for extra in results[n:]):
        raise RuntimeError(
            f"function {definition.name}Backward returned an incorrect number of gradients (expected {n}, got "
            f"{len(results)})"
        )
    checked = [_checked_one(definition, i, g, t) for i, (g, t) in enumerate(zip(results, targets))]
    return tuple(g for g, t in zip(checked, targets) if t.wanted)


def _checked_one(definition: Definition, i: int, grad: Any, target: Target) -> Any:
    if grad is None:
        return None
    if not isinstance(target.value, TensorProxy):
        raise RuntimeError(
            f"function {definition.name}Backward returned a gradient different than None at position {i + 1}, but the "
            f"corresponding forward input was not a Variable"
        )
    if not isinstance(grad, TensorProxy):
        typ = grad.python_type if isinstance(grad, NumberProxy) else type(grad)
        raise RuntimeError(f"expected Variable or None (got {typ.__name__})")
    if not target.wanted:
        return None
    shape = target.value.shape
    if not utils.same_shape(grad.shape, shape):
        if not _expands_to(shape, grad.shape):
            raise RuntimeError(
                f"Function {definition.name}Backward returned an invalid gradient at index {i} - got "
                f"{list(grad.shape)} but expected shape compatible with {list(shape)}"
            )
        grad = sum_to(grad, shape)
    return clang.maybe_convert_to_dtype(grad, target.value.dtype)


def _expands_to(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    if len(shape) > len(wanted):
        return False
    return all(s in (1, w) for s, w in zip(reversed(shape), reversed(wanted)))


def _raised_in_backward(error: Exception, targets: Sequence[Target], grads: Sequence[TensorProxy]) -> tuple[Any, ...]:
    """Gradients whose computation raises the error."""

    def raise_error(*grads: Any) -> None:
        raise error.with_traceback(None)

    return _executor().register_operator(
        "raised_in_backward",
        meta=lambda *_: tuple(_like(t.value) for t in targets if t.wanted),
        fn=raise_error,
        tags=[OpTags.DONT_DCE],
    )(*grads)


def _rule(definition: Definition, bsyms: list[BoundSymbol], grads: tuple[TensorProxy, ...], results: tuple) -> Rule:
    aliases = Aliases(bsyms)
    read = [p for bsym in bsyms for p in bsym.flat_proxy_args] + [r for r in results if isinstance(r, Proxy)]
    operands = {p.name: p for p in read if p.name not in aliases.made and p.name not in {g.name for g in grads}}
    if aliases.changed:
        raise AutogradFunctionError(
            f"{definition.where}, changes in place, in its backward, a gradient that it was given, or a tensor that "
            f"was saved or that it captures ({', '.join(sorted(aliases.changed))}). Change a clone of it."
        )
    computation = TraceCtx()
    computation.names = set(get_tracectx().names)
    computation.args = (*grads, *operands.values())
    computation.bound_symbols = list(bsyms)
    computation.scopes = [computation.bound_symbols]
    with tracectx(computation):
        prims.python_return(results)
    return Rule(insert_alias_updates(computation, []), tuple(operands.values()))
