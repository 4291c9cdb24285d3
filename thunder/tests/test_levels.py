"""A level leaves the enclosing one as it was, on return and on every exception."""

from __future__ import annotations

import contextvars

import pytest
import torch
from nested_helpers import assert_same, inlined, jit, plain_call, with_lookaside

import thunder
import thunder.nested
import thunder.nested.levels as levels
from thunder.core.interpreter import get_interpretercompilectx, get_interpreterruntimectx, unwrap
from thunder.core.jit_ext import SHARP_EDGES_OPTIONS, get_compile_data, get_jit_ctx, thunder_general_jit
from thunder.core.trace import get_tracectx

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def snapshot() -> dict:
    """All that belongs to the level that runs just now."""
    ctx, runtime, data, trace = get_jit_ctx(), get_interpreterruntimectx(), get_compile_data(), get_tracectx()
    return {
        "level": id(levels.current_level()),
        "contexts": [id(c) for c in (ctx, runtime, get_interpretercompilectx(), data, trace)],
        "scopes": [(id(scope), len(scope)) for scope in trace.scopes],
        "names": (set(trace.names), trace.name_ctr, trace.obj_name_ctr),
        "prologue names": set(ctx.prologue_trace.names),
        "constraints": list(ctx._constraints),
        "recorded modifications": {id(k): len(v) for k, v in ctx._additional_outputs.items()},
        "rename map": dict(ctx._proxy_swapmap),
        "grad mode": data.is_grad_enabled,
        "autocast": list(data.autocast_stack.stack),
        "source location": (trace._current_source_filename, trace._current_source_positions),
        "frames": [id(frame) for frame in runtime.frame_stack],
        "exceptions": (runtime.curexc, list(runtime.exception_stack)),
        "cache info": id(thunder._cache_info_ctx.get()),
        "torch grad mode": torch.is_grad_enabled(),
        "variables": len(contextvars.copy_context()),
    }


class Holder:
    pass


HOLDER = Holder()
WEIGHT = torch.ones(4)


def reads(a):
    return a * WEIGHT


def changes_modes(a):
    torch.set_grad_enabled(False)
    torch.autocast("cpu", torch.bfloat16).__enter__()
    return a @ a.t()


def changes_objects(a):
    HOLDER.value = 3
    return a.sin()


def raises(a):
    changes_modes(a)
    raise ValueError("from the inner function")


def raises_in_operator(a):
    return a.sin() @ a


def returns_what_cannot_be_held(a):
    return iter([a.sin()])


@pytest.mark.parametrize(
    "fn, error",
    [
        (reads, None),
        (changes_modes, None),
        (changes_objects, None),
        (raises, ValueError),
        (raises_in_operator, RuntimeError),
        (returns_what_cannot_be_held, thunder.nested.ResultError),
        (3, thunder.nested.UntraceableCallableError),
    ],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
@pytest.mark.parametrize("depth", (1, 2))
def test_isolation(fn, error, depth):
    seen = []

    def lookaside(_, x):
        y = thunder.nested.trace(torch.cos, x).inline()
        before = snapshot()
        try:
            thunder_general_jit(fn, (unwrap(y),), {}, sharp_edges=SHARP_EDGES_OPTIONS.ALLOW)
            seen.append(None)
        except Exception as raised:
            seen.append(type(raised))
        assert snapshot() == before
        return thunder.nested.trace(torch.sin, y).inline()

    call = with_lookaside(lookaside)

    def program(x):
        return call(fn, x) if depth == 1 else inlined(lambda a: call(fn, a), x)

    assert_same(jit(program)(X), X.cos().sin())
    assert seen == [error]
    assert levels.current_level() is None
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("mode", (torch.no_grad, torch.enable_grad))
def test_fresh_compile_data_sees_the_enclosing_grad_mode(mode):
    """The reported script makes its own compile data, whose grad mode is on."""

    def lookaside(fn, x):
        from thunder.common import CompileData
        from thunder.core.compile_data import compile_data_and_stats

        data = CompileData(fn=unwrap(fn), disable_preprocessing=True, executor_lookasides={})
        with compile_data_and_stats(data, None):
            results = thunder_general_jit(unwrap(fn), (unwrap(x),), {}, sharp_edges=SHARP_EDGES_OPTIONS.ALLOW)
        assert data.is_grad_enabled  # as it was made
        tags = {str(tag) for b in results.computation_trace.bound_symbols for p in b.flat_proxy_outs for tag in p.tags}
        seen.append(any("DETACHED" in tag for tag in tags))
        return thunder.nested.trace(fn, x).inline()

    seen = []
    call = with_lookaside(lookaside)

    def make(c):
        def program(x):
            with mode():
                y = c(lambda a: a.sin(), x)
            return y * x

        return program

    x = X.detach().requires_grad_()
    result = jit(make(call))(x)
    assert_same(result, make(plain_call)(x))
    assert seen == [mode is torch.no_grad]


def test_states_that_change_within_the_function_go_on_after_it():
    def make(c):
        def program(x):
            y = c(lambda a: (torch.set_grad_enabled(False), a.sin())[1], x)
            z = x.cos()
            torch.set_grad_enabled(True)
            return x * 2 + y + z

        return program

    x1, x2 = (X.detach().requires_grad_() for _ in range(2))
    jit(make(inlined))(x1).sum().backward()
    make(plain_call)(x2).sum().backward()
    assert_same(x1.grad, x2.grad)


def test_names_of_the_enclosing_level_are_free_again():
    """The traces of a nested program have the names that the inlined program's have."""

    def make(c):
        return lambda x: c(lambda a: a.sin() * a.cos(), x).exp() + c(lambda a: a.tan(), x)

    texts = []
    for c in (inlined, plain_call):
        jitted = jit(make(c))
        jitted(X)
        texts.append(str(thunder.last_traces(jitted)[0]))
    assert texts[0] == texts[1]


def test_escaped_proxy():
    kept = []

    def keeps(fn, x):
        nested = thunder.nested.trace(fn, x)
        kept.append(nested.result)
        return nested.inline()

    def uses(fn, x):
        try:
            return thunder.nested.trace(lambda a: a + kept[0], x).inline()
        except thunder.nested.EscapedProxyError as error:
            messages.append(str(error))
        return thunder.nested.trace(fn, x).inline()

    messages = []
    keep, use = with_lookaside(keeps), with_lookaside(uses)
    assert_same(jit(lambda x: use(torch.cos, keep(lambda a: a.sin(), x)))(X), X.sin().cos())
    (message,) = messages
    assert "test_levels.py" in message and "after that trace has ended" in message and "inline()" in message


class RaisesInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.sin()
        raise ValueError("from forward")

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def raises_in_checkpoint(x):
    return torch.utils.checkpoint.checkpoint(lambda a: raises(a.sin()), x, use_reentrant=False)


def raises_in_composite_operator(x):
    return torch.nn.functional.linear(x, x.sin()[:, :2])


@pytest.mark.parametrize("fn", (RaisesInForward.apply, raises_in_checkpoint, raises_in_composite_operator))
@pytest.mark.parametrize("call", (plain_call, inlined))
def test_an_exception_leaves_no_scope_behind(fn, call):
    """In stock thunder a program that catches it ends in ``IndexError: pop from empty list``, nested or not."""

    def program(x):
        try:
            y = call(fn, x)
        except (ValueError, RuntimeError):
            torch.set_grad_enabled(True)
            y = x * 2
        return y.cos()

    x = X.detach().requires_grad_()
    result = jit(program)(x)
    assert_same(result, (x * 2).cos())
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert_same(gradient, torch.autograd.grad((x * 2).cos().sum(), x)[0])
