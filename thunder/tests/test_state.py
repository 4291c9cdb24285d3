"""Grad mode, autocast, default dtype and the RNG stream, set outside, inside and across nested functions."""

from __future__ import annotations

import functools

import pytest
import torch
from nested_helpers import CALLS, assert_same, check, fresh, inlined, jit, plain_call

import thunder

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
WEIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


def no_grad_outside(c, x):
    with torch.no_grad():
        y = c(lambda a: a.sin() * 2, x)
    return y * x


def no_grad_inside(c, x):
    def body(a):
        with torch.no_grad():
            b = a.sin()
        return b * a

    return c(body, x)


def enable_grad_inside_no_grad(c, x):
    with torch.no_grad():

        def body(a):
            with torch.enable_grad():
                b = a.sin()
            return b, a.cos()

        y, z = c(body, x)
    return y * 2 + z * x


def set_grad_enabled_inside(c, x):
    def body(a):
        torch.set_grad_enabled(False)
        b = a.sin()
        torch.set_grad_enabled(True)
        return a * b

    return c(body, x)


def decorated_no_grad(c, x):
    @torch.no_grad()
    def body(a):
        return a.sin()

    return c(body, x) * x


def no_grad_and_exception(c, x):
    def body(a):
        with torch.no_grad():
            raise ValueError

    try:
        c(body, x)
    except ValueError:
        pass
    return x.sin() * 2


def left_disabled_by_exception(c, x):
    def body(a):
        torch.set_grad_enabled(False)
        raise ValueError

    try:
        c(body, x)
    except ValueError:
        y = x.sin()
    torch.set_grad_enabled(True)
    return y + x


def detach_inside(c, x):
    return c(lambda a: a.detach() * a, x)


def autocast_outside(c, x):
    with torch.autocast("cpu", torch.bfloat16):
        return c(lambda a: a @ WEIGHT, x).float()


def autocast_inside(c, x):
    def body(a):
        with torch.autocast("cpu", torch.bfloat16):
            b = a @ WEIGHT
        return b, a @ WEIGHT

    b, d = c(body, x)
    return b.float(), d


def autocast_disabled_inside(c, x):
    with torch.autocast("cpu", torch.bfloat16):

        def body(a):
            with torch.autocast("cpu", enabled=False):
                return a @ WEIGHT

        return c(body, x), c(lambda a: a @ WEIGHT, x).float()


def autocast_across(c, x):
    autocast = torch.autocast("cpu", torch.bfloat16)
    c(lambda a: (autocast.__enter__(), None)[1], x)
    y = x @ WEIGHT
    autocast.__exit__(None, None, None)
    return y.float(), x @ WEIGHT


def no_grad_across(c, x):
    c(lambda a: torch.set_grad_enabled(False), x)
    y = x * 2
    c(lambda a: torch.set_grad_enabled(True), x)
    return y * x


# Stock thunder computes these otherwise than eager PyTorch: dropout draws from another distribution, and the
# `requires_grad` of a result is that of the whole computation. Nested they are what they are inline.


def dropout(c, x):
    y = torch.nn.functional.dropout(x, 0.5)
    z = c(lambda a: torch.nn.functional.dropout(a, 0.5), x)
    return y, z, torch.nn.functional.dropout(x, 0.5)


def rand(c, x):
    return c(lambda a: a * torch.rand(4, 4), x) + torch.rand(4, 4), c(lambda a: a + torch.randn(4, 4), x)


def rand_inside_and_outside(c, x):
    y = torch.rand(4, 4) + x
    z = c(lambda a: c(lambda b: b * torch.rand(4, 4), a) + torch.randn(4, 4), y)
    return z * torch.rand(4, 4)


def more_draws(c, x):
    def body(a):
        b = a + torch.randint(0, 5, (4,)) + torch.randn_like(a)
        return b * torch.rand_like(a) + torch.bernoulli(torch.full((4,), 0.5))

    return c(body, x) + torch.rand(4)


def factory(c, x):
    return c(lambda a: a + torch.ones(4) + torch.arange(4), x)


def no_grad_inside_no_grad(c, x):
    def body(a):
        with torch.no_grad():
            y = a.sin()
        return y * a

    with torch.no_grad():
        y = c(body, x)
        z = y * x
    return z * x + c(body, x)


def reads_grad_mode(c, x):
    def body(a):
        return a * 2 if torch.is_grad_enabled() else a * 3

    with torch.no_grad():
        y = c(body, x)
    return y + c(body, x)


PROGRAMS = (
    no_grad_outside,
    no_grad_inside_no_grad,
    reads_grad_mode,
    enable_grad_inside_no_grad,
    no_grad_inside,
    set_grad_enabled_inside,
    decorated_no_grad,
    no_grad_and_exception,
    left_disabled_by_exception,
    detach_inside,
    autocast_outside,
    autocast_inside,
    autocast_disabled_inside,
    autocast_across,
    no_grad_across,
    more_draws,
    rand,
    rand_inside_and_outside,
    factory,
)


@pytest.mark.parametrize("call", (plain_call, *CALLS))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_state(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("call", CALLS)
def test_dropout_equals_the_inlined_program_and_leaves_the_same_rng_state(call):
    results = []
    for c in (plain_call, call):
        (x,) = fresh((X,))
        torch.manual_seed(0)
        result = jit(functools.partial(dropout, c))(x)
        sum(r.sum() for r in (result if isinstance(result, tuple) else (result,))).backward()
        results.append((result, x.grad, torch.get_rng_state()))
    assert_same(results[1], results[0])


@pytest.mark.parametrize("context", (torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)))
def test_ambient_state_around_the_call_is_guarded_by_level_0(context):
    def make(c):
        return lambda x: c(lambda a: (a @ WEIGHT).sin(), x)

    nested, eager = jit(make(inlined)), make(plain_call)
    for enter in (False, True, False):
        if enter:
            with context():
                assert_same(nested(*fresh((X,))), eager(*fresh((X,))))
        else:
            assert_same(nested(*fresh((X,))), eager(*fresh((X,))))
    assert (thunder.cache_misses(nested), thunder.cache_hits(nested)) == (2, 1)


def test_default_dtype_is_guarded_by_level_0():
    def make(c):
        return lambda x: c(lambda a: a + torch.ones(4, 4), x)

    nested, eager = jit(make(inlined)), make(plain_call)
    assert_same(nested(X), eager(X))
    try:
        torch.set_default_dtype(torch.float64)
        assert_same(nested(X), eager(X))
    finally:
        torch.set_default_dtype(torch.float32)
    assert thunder.cache_misses(nested) == 2


# What stock thunder refuses inline, or computes otherwise than eager PyTorch: nested it is the same, with the same
# message, and leaves the same state behind.


def inference_mode_inside(c, x):
    def body(a):
        with torch.inference_mode():
            b = a * 2
        return b

    return c(body, x) * 1


def inference_mode_outside(c, x):
    with torch.inference_mode():
        return c(lambda a: a * 2, x)


def default_dtype_inside(c, x):
    def body(a):
        torch.set_default_dtype(torch.float64)
        return a + torch.ones(4)

    return c(body, x)


def default_dtype_across(c, x):
    c(lambda a: torch.set_default_dtype(torch.float64), x)
    return x + torch.ones(4)


def default_dtype_outside(c, x):
    torch.set_default_dtype(torch.float64)
    return c(lambda a: a + torch.ones(4), x)


def default_device_inside(c, x):
    def body(a):
        with torch.device("cpu"):
            return a + torch.ones(4)

    return c(body, x)


def default_device_outside(c, x):
    with torch.device("cpu"):
        return c(lambda a: a + torch.ones(4), x)


def generator(c, x):
    g = torch.Generator().manual_seed(3)
    return c(lambda a: a + torch.rand(4, generator=g), x)


def asks_for_grad_mode(c, x):
    with torch.no_grad():
        return c(lambda a: a * 2 if torch.is_grad_enabled() else a * 3, x)


AS_INLINE = (
    inference_mode_inside,
    inference_mode_outside,
    default_dtype_inside,
    default_dtype_across,
    default_dtype_outside,
    default_device_inside,
    default_device_outside,
    generator,
    asks_for_grad_mode,
)


def _run(program):
    """The result or the exception, and the defaults that are left."""
    try:
        try:
            found = jit(program)(*fresh((X,)))
        except Exception as error:
            found = f"{type(error).__name__}: {error}".splitlines()[0]
        return found, torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("program", AS_INLINE, ids=lambda f: f.__name__)
def test_is_as_the_inlined_program(program, call):
    assert_same(_run(functools.partial(program, call)), _run(functools.partial(program, plain_call)))
