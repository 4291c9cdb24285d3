"""Caching modes, sharp edges, debug options, and the interpreter used by a lookaside itself."""

from __future__ import annotations

import warnings

import pytest
import torch
from nested_helpers import CALLS, assert_same, inlined, jit, plain_call, with_lookaside

import thunder
import thunder.nested
from thunder.core.interpreter import interpret, unwrap
from thunder.core.jit_ext import (
    JITSharpEdgeError,
    _general_jit_lookaside_map,
    _general_jit_sharp_edge,
    general_jit_callbacks,
    general_jit_lookaside,
)
from thunder.core.options import DebugOptions


class Config:
    factor = 3


CONFIG = Config()

PROGRAMS = {
    "shape": lambda c: lambda x, n: c(lambda a: a * a.shape[0] + n, x),
    "reshape": lambda c: lambda x, n: c(lambda a: a.reshape(-1, a.shape[1]).sum(0), x) * n,
    "branch on a number": lambda c: lambda x, n: c(lambda a, m: a * m if m > 1 else a, x, n),
    "captured number": lambda c: lambda x, n: (lambda m: c(lambda a: a * m, x))(n + 1),
    "attribute": lambda c: lambda x, n: c(lambda a: a * CONFIG.factor, x),
    "returned number": lambda c: lambda x, n: x * c(lambda a, m: m * 2, x, n),
    "intermediate's shape": lambda c: lambda x, n: (lambda y: c(lambda a: a * y.shape[0], x))(torch.cat([x, x])),
}
INPUTS = ((3, 2), (3, 3), (5, 3), (3, 2))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("cache", ("symbolic values", "constant values", "no caching"))
@pytest.mark.parametrize("make", [pytest.param(p, id=n) for n, p in PROGRAMS.items()])
def test_caching_modes(make, cache, call):
    nested, inline = (thunder.jit(make(c), cache=cache) for c in (call, plain_call))
    for rows, n in INPUTS:
        x = torch.randn(rows, 4)
        assert_same(nested(x, n), make(plain_call)(x, n))
        inline(x, n)
    assert thunder.cache_misses(nested) == thunder.cache_misses(inline)


@pytest.mark.parametrize("change", (lambda: setattr(CONFIG, "factor", 4), lambda: None))
def test_an_attribute_is_guarded_or_an_input_with_symbolic_values(change, monkeypatch):
    monkeypatch.setattr(CONFIG, "factor", 3)
    nested = thunder.jit(PROGRAMS["attribute"](inlined), cache="symbolic values")
    x = torch.randn(3, 4)
    assert_same(nested(x, 1), x * 3)
    change()
    assert_same(nested(x, 1), x * CONFIG.factor)


@pytest.mark.parametrize(
    "inner, outer", [("symbolic values", "constant values"), ("constant values", "symbolic values")]
)
def test_levels_of_different_modes(inner, outer):
    """The mode is that of the outermost level: what is guarded, or an input, is so for the whole program."""
    function = thunder.jit(lambda a, n: a * n + a.shape[0], cache=inner)
    nested = thunder.jit(lambda x, n: function(x, n), cache=outer)
    for rows, n in INPUTS:
        x = torch.randn(rows, 4)
        assert_same(nested(x, n), x * n + rows)


def test_same_input_is_refused_as_without_nesting():
    for call in (plain_call, *CALLS):
        with pytest.raises(NotImplementedError, match="SAME_INPUT is not supported"):
            thunder.jit(lambda x, call=call: call(torch.sin, x), cache="same input")(torch.randn(3))


class Unknown:
    pass


UNKNOWN = Unknown()


def reads_sharp_edge(a):
    return (a.sin(), UNKNOWN)[0]


AT_THE_LINE = f"unknown type Unknown.* It is at .*test_modes.py:{reads_sharp_edge.__code__.co_firstlineno + 1}"


@pytest.mark.parametrize("call", (plain_call, *CALLS))
def test_sharp_edges(call):
    x = torch.randn(3)
    assert_same(thunder.jit(lambda x: call(reads_sharp_edge, x), sharp_edges="allow")(x), x.sin())
    with pytest.warns(UserWarning, match=AT_THE_LINE) as caught:
        thunder.jit(lambda x: call(reads_sharp_edge, x), sharp_edges="warn")(x)
    assert sum("Unknown" in str(w.message) for w in caught) == 1
    # in stock thunder the error for a value of unknown type is lost, and nested it is, too
    assert_same(thunder.jit(lambda x: call(reads_sharp_edge, x), sharp_edges="error")(x), x.sin())


@pytest.mark.parametrize("call", (plain_call, *CALLS))
def test_sharp_edge_that_is_an_error(call):
    def reads(a):
        _general_jit_sharp_edge("an edge,", None)
        return a.sin()

    def lookaside(desc, value):
        return _general_jit_sharp_edge(unwrap(desc), value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(_general_jit_lookaside_map, _general_jit_sharp_edge, lookaside)
        line = f"an edge, It is at .*test_modes.py:{reads.__code__.co_firstlineno + 1}"
        with pytest.raises(JITSharpEdgeError, match=line):
            thunder.jit(lambda x: call(reads, x), sharp_edges="error")(torch.randn(3))


def test_a_jitted_function_has_its_own_sharp_edges():
    x = torch.randn(3)
    strict = thunder.jit(reads_sharp_edge, sharp_edges="warn")
    with pytest.warns(UserWarning, match="unknown type Unknown"):
        assert_same(thunder.jit(lambda x: strict(x))(x), x.sin())
    lenient = thunder.jit(reads_sharp_edge)
    with warnings.catch_warnings(record=True) as caught:
        assert_same(thunder.jit(lambda x: lenient(x), sharp_edges="warn")(x), x.sin())
    assert not any("unknown type Unknown" in str(w.message) for w in caught)


def test_history_is_recorded():
    nested = thunder.jit(
        lambda x: inlined(lambda a: a.sin(), x), debug_options=DebugOptions(record_interpreter_history=True)
    )
    nested(torch.randn(3))
    log = thunder.last_interpreter_log(nested)
    assert any(isinstance(item, dict) and item.get("kind") == "Lookaside" for item in log)


def test_progress_is_one_line_over_all_levels(capsys):
    nested = thunder.jit(
        lambda x: inlined(lambda a: inlined(torch.cos, a.sin()), x),
        debug_options=DebugOptions(show_interpreter_progress=True),
    )
    nested(torch.randn(3))
    printed = capsys.readouterr().err
    assert printed.count("Begin interpretation") == printed.count("Finished interpretation") == 1


def test_interpret_inside_a_lookaside():
    """As the reporter first tried: the interpreter, with the general jit's lookaside and callbacks, on proxies."""

    def lookaside(fn, x):
        run = interpret(
            unwrap(fn),
            fn_lookaside=general_jit_lookaside,
            callbacks=general_jit_callbacks,
            with_provenance_tracking=True,
            uncacheable_classes=(torch.Tensor, int, float, str, type(None)),
        )
        return run(unwrap(x))

    call = with_lookaside(lookaside)
    x = torch.randn(3, requires_grad=True)
    result = jit(lambda x: call(lambda a: torch.sin(torch.cos(a)), x) + 1)(x)
    assert_same(result, x.cos().sin() + 1)
