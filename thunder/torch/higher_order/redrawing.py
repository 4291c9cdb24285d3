"""Random numbers that are not kept: the backward pass draws them once more, from the state that the generator had.

What a function draws, up to an operation that may draw in a way of its own, becomes two operators. The first makes all
the draws, so that the program's generator goes on as it would have, and gives the state from before. The second is a
function of a state: it gives the numbers that a generator of its own draws from there, and the next state. So the
recomputation needs nothing but the first state::

    Before: ``a = uniform(...)``, ``b = randn(...)``
    After:  ``s0 = advance_generator(...)``, ``a, s1 = draw_from(s0, ...)``, ``b, s2 = draw_from(s1, ...)``

The forward pass draws twice, in exchange for the memory. Where the state is not smaller than the numbers, these are
kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from thunder.core import dtypes
from thunder.core.devices import DeviceType, cpu, to_device, to_torch_device
from thunder.core.prims import OpTags, PrimIDs
from thunder.core.proxies import ProxyTag, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.core.transform_common import NON_FUNCTIONAL_OPS
from thunder.core.transforms import _get_gradfn_and_executor, augmented_forward_impls
from thunder.extend import OperatorExecutor
from thunder.torch.higher_order.common import OperatorTag, is_random

# Kind, shape, bounds, device and dtype of a tensor of random numbers; all of them constants of the program.
Draw = tuple[str, tuple[int, ...], float, float, str, torch.dtype]


def redraw(trace: TraceCtx) -> None:
    """Has the random numbers in a function's trace drawn from a state, wherever the state is smaller than they are."""
    bsyms = [part for bsym in trace.bound_symbols for part in _down_to_draws(bsym)]
    replaced: dict[int, list[BoundSymbol]] = {}
    for run in _runs(bsyms):
        draws = [_draw(bsym) for bsym in run]
        if sum(map(_size, draws)) > _generator(draws[0]).get_state().numel():
            replaced |= zip(map(id, run), _from_state(trace, run, draws))
    if replaced:
        trace.bound_symbols[:] = [new for bsym in bsyms for new in replaced.get(id(bsym), [bsym])]


def _down_to_draws(bsym: BoundSymbol) -> Iterator[BoundSymbol]:
    """What the operation consists of, if it draws and the gradient transform takes it apart, too; else itself."""
    ruled = bsym.sym.id in augmented_forward_impls or _get_gradfn_and_executor(bsym)[0] is not None
    detached = any(ProxyTag.DETACHED_AUTOGRAD_GRAPH in out.tags for out in bsym.flat_proxy_outs)
    if ruled or detached or not bsym.subsymbols or not is_random(bsym):
        yield bsym
    else:
        for sub in bsym.subsymbols:
            yield from _down_to_draws(sub)


def _runs(bsyms: Sequence[BoundSymbol]) -> list[list[BoundSymbol]]:
    """Draws from one generator, with nothing between them that may use it otherwise."""
    runs: list[list[BoundSymbol]] = []
    current: dict[str, list[BoundSymbol]] = {}
    for bsym in bsyms:
        draw = _draw(bsym)
        if draw is not None:
            device = draw[4]
            if device not in current:
                current[device] = []
                runs.append(current[device])
            current[device].append(bsym)
        elif is_random(bsym):
            current = {}
    return runs


def _draw(bsym: BoundSymbol) -> Draw | None:
    """What the primitive draws, if that depends on nothing but constants."""
    match bsym.sym.id, bsym.args:
        case PrimIDs.UNIFORM, (shape, low, high):
            kind = "uniform"
        case PrimIDs.RANDN, (shape,):
            kind, low, high = "randn", 0, 0
        case PrimIDs.RANDINT, (low, high, shape):
            kind = "randint"
        case _:
            return None
    device, dtype = bsym.kwargs["device"], dtypes.to_torch_dtype(bsym.kwargs["dtype"])
    constant = all(isinstance(number, (int, float)) for number in (*shape, low, high))
    if not constant or device.devicetype not in (DeviceType.CPU, DeviceType.CUDA):
        return None
    return kind, tuple(shape), low, high, str(to_torch_device(device)), dtype


def _size(draw: Draw) -> int:
    return math.prod(draw[1]) * draw[5].itemsize


def _from_state(trace: TraceCtx, run: Sequence[BoundSymbol], draws: Sequence[Draw]) -> Iterator[list[BoundSymbol]]:
    """For each draw what takes its place."""
    size = _generator(draws[0]).get_state().numel()

    def state() -> TensorProxy:
        return TensorProxy(trace.make_name(prefix="rng_state"), shape=(size,), device=cpu, dtype=dtypes.uint8)

    before = state()
    bsyms = [_advance_generator.bind(tuple(draws), output=before)]
    for bsym, draw in zip(run, draws):
        after = state()
        bsyms.append(draw_from.bind(before, draw, output=(bsym.output, after)))
        yield bsyms
        before, bsyms = after, []


def _generator(draw: Draw) -> torch.Generator:
    """The program's generator for the draw."""
    device = torch.device(draw[4])
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


def _make(draw: Draw, generator: torch.Generator) -> torch.Tensor:
    """The numbers, as the primitive draws them."""
    kind, shape, low, high, device, dtype = draw
    if kind == "uniform":
        return torch.empty(shape, device=device, dtype=dtype).uniform_(low, high, generator=generator)
    if kind == "randn":
        return torch.randn(shape, device=device, dtype=dtype, generator=generator)
    return torch.randint(low, high, shape, device=device, dtype=dtype, generator=generator)


def _advance(draws: Sequence[Draw]) -> torch.Tensor:
    generator = _generator(draws[0])
    state = generator.get_state()
    for draw in draws:
        _make(draw, generator)
    return state


def _from(state: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(draw[4])
    generator.set_state(state)
    return _make(draw, generator), generator.get_state()


def _advance_meta(draws: Sequence[Draw]) -> TensorProxy:
    return TensorProxy(shape=tuple(_generator(draws[0]).get_state().shape), device=cpu, dtype=dtypes.uint8)


def _from_meta(state: TensorProxy, draw: Draw) -> tuple[TensorProxy, TensorProxy]:
    _, shape, _, _, device, dtype = draw
    return TensorProxy(shape=shape, device=to_device(device), dtype=dtypes.to_dtype(dtype)), TensorProxy(like=state)


_executor = OperatorExecutor("checkpoint_random_numbers")
_advance_generator = _executor.register_operator(
    "advance_generator", meta=_advance_meta, fn=_advance, tags=[OpTags.RANDOM_OP]
)
draw_from = _executor.register_operator("draw_from", meta=_from_meta, fn=_from, tags=[OperatorTag.REPEATABLE])
NON_FUNCTIONAL_OPS.add(_advance_generator.id)  # two of the same draws are two draws
