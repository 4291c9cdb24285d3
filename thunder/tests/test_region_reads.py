"""What a region reads in each of Python's ways: alike blocks are reused, blocks that differ in what is read are not."""

from __future__ import annotations

import array
import collections
import copy
import enum
import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable
from types import MappingProxyType
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
from nested_helpers import assert_same

import thunder
import thunder.nested

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OrderedDict = collections.OrderedDict
Point = collections.namedtuple("Point", "a b")


class Scaled(torch.nn.Module):
    def __init__(self, factor: float = 2.0):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Other(Scaled):
    pass


def modules(kind: Callable, *factors: float) -> Callable:
    """Makes a new container of modules each time."""
    if kind is torch.nn.ModuleDict:
        return lambda: kind({f"m{i}": Scaled(f) for i, f in enumerate(factors)})
    return lambda: kind([Scaled(f) for f in factors])


def attribute(**values: Any) -> Callable:
    """Makes a new object of a class with these class attributes each time."""
    return type("Holder", (), values)


class Plain:
    def __init__(self, **values: Any):
        self.__dict__.update(values)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


FACTORS = {Color.RED: 2.0, Color.BLUE: 3.0}
SHARED = [Scaled(2.0), Scaled(3.0)]
BY_MODULE = {SHARED[0]: 2.0, SHARED[1]: 3.0}


class Listed(list):
    pass


class Mapped(dict):
    pass


class Opposite(dict):
    def __contains__(self, key):
        return not super().__contains__(key)


class Unhashed:
    def __hash__(self):
        raise ValueError("no hash")


class Number(int):
    pass


class Text(str):
    pass


class Spoken:
    """Its attribute is read by what Python calls in its own ways."""

    def __init__(self, q):
        self.q = q

    def __repr__(self):
        return str(self.q)

    def __lt__(self, other):
        return self.q < other.q

    def __hash__(self):
        return hash(self.q)


class Around:
    """Its comparison reads an attribute of an attribute."""

    def __init__(self, inner):
        self.inner = inner

    def __lt__(self, other):
        return self.inner.q < other.inner.q


def marked_with(made: Any, q: float) -> Any:
    """The object, with an attribute."""
    made.q = q
    return made


def graded(has_grad: bool) -> torch.Tensor:
    """A leaf, with or without a gradient."""
    leaf = torch.ones(4).requires_grad_()
    leaf.grad = torch.ones(4) if has_grad else None
    return leaf


def adder(n: float) -> Callable:
    """A function that a call makes."""
    return lambda x: x + n


def twins(equal: bool, make: Callable) -> Callable:
    """Makes a list of two objects that are the same one, or not."""

    def pair() -> list:
        first = make()
        return [first, first if equal else make()]

    return pair


def with_list(which: int) -> Callable:
    """Makes a module of a list, and the list."""

    def pair() -> tuple:
        found = [Scaled(), Scaled(), Scaled()]
        return found[which], found

    return pair


def _is(x, v):
    return x * 2 if v[0] is v[1] else x * 3


def _chain(x, v):
    for m in v:
        x = m(x)
    return x


def _chain_items(x, v):
    for name, m in v.items():
        x = m(x) + len(name)
    return x


def _sum_items(x, v):
    for k, n in v.items():
        x = x * n + len(k)
    return x


def _loop(x, items):
    for n in items:
        x = x * n + 1
    return x


def _loop_pairs(x, pairs):
    for a, b in pairs:
        x = x * a + b
    return x


def _copied(x, v):
    w = v.copy()
    w.append(4.0)
    return _loop(x, w)


def _popped(x, v):
    w = list(v)
    return x * w.pop()


def _unpacked(x, v):
    a, *rest = v
    return x * a + len(rest) * rest[-1]


def _matched(x, v):
    match v:
        case [1, b]:
            return x * b
        case {"k": k}:
            return x + k
        case _:
            return x


def _updated(x, v):
    w = {}
    w.update(v)
    return x * w["a"]


def _asks_for_a_list(x, v):
    try:
        return x if ["a"] in v else x * 2
    except TypeError:
        return x * v["a"]


UNHASHED = Unhashed()


def _asks_for_an_unhashed(x, v):
    try:
        return x if UNHASHED in v else x * 2
    except ValueError:
        return x * v["a"]


# a function of x and v, and two makers of v: what is made by one must be told from what is made by the other
READS = {
    "OrderedDict items": (_sum_items, OrderedDict(a=1.0, b=2.0), OrderedDict(b=2.0, a=1.0)),
    "OrderedDict value": (lambda x, v: x * v["a"], OrderedDict(a=1.0), OrderedDict(a=2.0)),
    "dict order": (_sum_items, {"a": 1.0, "bb": 2.0}, {"bb": 2.0, "a": 1.0}),
    "dict values": (lambda x, v: _loop(x, v.values()), {"a": 1.0}, {"a": 2.0}),
    "dict keys": (lambda x, v: x * len("".join(v.keys())), {"a": 1.0}, {"bb": 1.0}),
    "dict iteration": (lambda x, v: x * len("".join(v)), {"a": 1.0}, {"bb": 1.0}),
    "dict get": (lambda x, v: x * v.get("a", 3.0), {"b": 1.0}, {"a": 1.0}),
    "dict in": (lambda x, v: x * 2 if "a" in v else x, {"a": 1}, {"b": 1}),
    "dict in: None": (lambda x, v: x * 2 if "a" in v else x, {"a": None}, {"b": None}),
    "dict in, and its value": (lambda x, v: x * v["a"] if "a" in v else x, {"a": 1, "b": 2}, {"a": 2, "b": 2}),
    "dict not in": (lambda x, v: x * 2 if "a" not in v else x, {"a": 1}, {}),
    "in __dict__": (lambda x, v: x * 2 if "a" in v.__dict__ else x, lambda: Plain(a=1.0), lambda: Plain(b=1.0)),
    "dict in, of no hash": (_asks_for_a_list, {"a": 1.0}, {"a": 2.0}),
    "dict in, whose hash raises": (_asks_for_an_unhashed, {"a": 1.0}, {"a": 2.0}),
    "dict in, of its own": (lambda x, v: x * 2 if "a" in v else x, lambda: Opposite(a=1.0), lambda: Opposite(b=1.0)),
    "dict copy": (lambda x, v: x * v.copy()["a"], {"a": 1.0}, {"a": 2.0}),
    "dict of keyword arguments": (lambda x, v: x * (lambda a: a)(**v), {"a": 1.0}, {"a": 2.0}),
    "dict update": (_updated, {"a": 1.0}, {"a": 2.0}),
    "dict |": (lambda x, v: x * (v | {"b": 1.0})["a"], {"a": 1.0}, {"a": 2.0}),
    "dict | from the right": (lambda x, v: x * ({"a": 1.0} | v)["a"], {"b": 1.0}, {"a": 2.0}),
    "dict pop of a copy": (lambda x, v: x * dict(v).pop("a"), {"a": 1.0}, {"a": 2.0}),
    "defaultdict": (lambda x, v: x * v["a"], collections.defaultdict(int, a=1), collections.defaultdict(int, a=2)),
    "Counter": (lambda x, v: x * v["a"], collections.Counter("a"), collections.Counter("aa")),
    "set iteration": (lambda x, v: _loop(x, v), {2.0}, {3.0}),
    "set sorted": (lambda x, v: _loop(x, sorted(v)), {1.0, 2.0}, {1.0, 3.0}),
    "set in": (lambda x, v: x * 2 if "a" in v else x, {"a"}, {"b"}),
    "set |": (lambda x, v: x * len(v | {1}), {1}, {2}),
    "set &": (lambda x, v: x * len(v & {1}), {1}, {2}),
    "set <=": (lambda x, v: x * 2 if v <= {1} else x, {1}, {2}),
    "set issubset": (lambda x, v: x * 2 if v.issubset({1}) else x, {1}, {2}),
    "frozenset": (lambda x, v: x * 2 if 1 in v else x, frozenset({1}), frozenset({2})),
    "frozenset iteration": (lambda x, v: _loop(x, v), frozenset({1.0}), frozenset({2.0})),
    "zip": (lambda x, v: _loop_pairs(x, zip(v, v)), [1.0, 2.0], [1.0, 3.0]),
    "zip of lengths": (lambda x, v: _loop_pairs(x, zip(v, (1.0, 2.0, 3.0))), [1.0, 2.0], [1.0, 2.0, 3.0]),
    "enumerate": (lambda x, v: _loop_pairs(x, enumerate(v)), [1.0, 2.0], [1.0, 3.0]),
    "reversed": (lambda x, v: _loop(x, reversed(v)), [1.0, 2.0], [1.0, 3.0]),
    "map": (lambda x, v: _loop(x, map(lambda n: n + 1, v)), [1.0, 2.0], [1.0, 3.0]),
    "map of a builtin": (lambda x, v: _loop(x, map(abs, v)), [1.0, 2.0], [1.0, 3.0]),
    "filter": (lambda x, v: _loop(x, filter(lambda n: n > 1, v)), [1.0, 2.0], [1.0, 3.0]),
    "comprehension": (lambda x, v: _loop(x, [n * 2 for n in v if n]), [1.0, 2.0], [1.0, 0.0]),
    "generator": (lambda x, v: x * sum(n * 2 for n in v), [1.0, 2.0], [1.0, 3.0]),
    "any": (lambda x, v: x * 2 if any(v) else x, [0, 0], [0, 1]),
    "all": (lambda x, v: x * 2 if all(v) else x, [1, 0], [1, 1]),
    "min": (lambda x, v: x * min(v), [1.0, 2.0], [3.0, 2.0]),
    "min with a key": (lambda x, v: x * min(v, key=lambda n: -n), [1.0, 2.0], [1.0, 3.0]),
    "sorted with a key": (lambda x, v: x * sorted(v, key=lambda n: -n)[0], [1.0, 2.0], [1.0, 3.0]),
    "iter and next": (lambda x, v: x * next(iter(v)), [1.0, 2.0], [3.0, 2.0]),
    "list copy": (_copied, [1.0, 2.0], [1.0, 3.0]),
    "list of a list": (_popped, [1.0, 2.0], [1.0, 3.0]),
    "list slice": (lambda x, v: _loop(x, v[1:]), [1.0, 2.0], [1.0, 3.0]),
    "list [:]": (lambda x, v: _loop(x, v[:]), [1.0, 2.0], [1.0, 3.0]),
    "list +": (lambda x, v: _loop(x, v + [1.0]), [1.0, 2.0], [1.0, 3.0]),
    "list *": (lambda x, v: _loop(x, v * 2), [1.0, 2.0], [1.0, 3.0]),
    "list starred": (lambda x, v: _loop(x, [*v, 1.0]), [1.0, 2.0], [1.0, 3.0]),
    "list extend": (lambda x, v: _loop(x, (lambda w: (w.extend(v), w)[1])([])), [1.0, 2.0], [1.0, 3.0]),
    "list index": (lambda x, v: x * v.index(2), [1, 2], [2, 1]),
    "list count": (lambda x, v: x * v.count(2), [1, 2], [2, 2]),
    "list in": (lambda x, v: x * 2 if 2 in v else x, [1, 2], [1, 3]),
    "list <": (lambda x, v: x * 2 if v < [1, 2] else x, [1, 1], [1, 3]),
    "list truth": (lambda x, v: x * 2 if v else x, [1], []),
    "list unpacked": (_unpacked, [1.0, 2.0], [1.0, 3.0]),
    "nested list": (lambda x, v: x * v[0][1], [[1.0, 2.0]], [[1.0, 3.0]]),
    "list matched": (_matched, [1, 2.0], [1, 3.0]),
    "dict matched": (_matched, {"k": 2.0}, {"k": 3.0}),
    "tuple <": (lambda x, v: x * 2 if v < (1, 2) else x, (1, 1), (1, 3)),
    "tuple ==": (lambda x, v: x * 2 if v == (1, 2) else x, (1, 2), (1, 3)),
    "tuple hash": (lambda x, v: x * 2 if hash(v) == hash((1, 2)) else x, (1, 2), (1, 3)),
    "tuple +": (lambda x, v: _loop(x, v + (1.0,)), (1.0, 2.0), (1.0, 3.0)),
    "tuple index": (lambda x, v: x * v.index(2), (1, 2), (2, 1)),
    "tuple count": (lambda x, v: x * v.count(2), (1, 2), (2, 2)),
    "tuple of a list": (lambda x, v: _loop(x, tuple(v)), [1.0, 2.0], [1.0, 3.0]),
    "tuple as a key": (lambda x, v: x * {(1, 2): 2.0}.get(v, 3.0), (1, 2), (1, 3)),
    "named tuple": (lambda x, v: x * v.b, Point(1.0, 2.0), Point(1.0, 3.0)),
    "named tuple unpacked": (lambda x, v: _loop(x, v), Point(1.0, 2.0), Point(1.0, 3.0)),
    "named tuple replaced": (lambda x, v: x * v._replace(a=1.0).b, Point(1.0, 2.0), Point(1.0, 3.0)),
    "named tuple as a dict": (lambda x, v: x * v._asdict()["b"], Point(1.0, 2.0), Point(1.0, 3.0)),
    "str hash": (lambda x, v: x * 2 if hash(v) == hash("a") else x, "a", "b"),
    "str join": (lambda x, v: x * len(",".join(v)), ["a", "b"], ["a", "bb"]),
    "str join of a tuple": (lambda x, v: x * len(",".join(v)), ("a", "b"), ("a", "bb")),
    "str count": (lambda x, v: x * v.count("a"), "ab", "aa"),
    "str format": (lambda x, v: x * len(f"{v}"), [1, 2], [1, 22]),
    "str %": (lambda x, v: x * len("%s %s" % v), (1, 2), (1, 22)),  # noqa: UP031
    "str % of an object": (lambda x, v: x * len("%s" % (v,)), lambda: Spoken(2), lambda: Spoken(22)),  # noqa: UP031
    "str of an object": (lambda x, v: x * len(str(v)), lambda: Spoken(2), lambda: Spoken(22)),
    "f-string of an object": (lambda x, v: x * len(f"{v}"), lambda: Spoken(2), lambda: Spoken(22)),
    "str.format of an object": (lambda x, v: x * len("{}".format(v)), lambda: Spoken(2), lambda: Spoken(22)),  # noqa: UP030, UP032
    "str of a list of objects": (lambda x, v: x * len(str(v)), lambda: [Spoken(2)], lambda: [Spoken(22)]),
    "str of a tuple of objects": (lambda x, v: x * len(str(v)), lambda: (Spoken(2),), lambda: (Spoken(22),)),
    "tuple < of objects": (
        lambda x, v: x * 2 if v[:1] < v[1:] else x,
        lambda: (Spoken(1), Spoken(2)),
        lambda: (Spoken(2), Spoken(1)),
    ),
    "< of objects": (lambda x, v: x * 2 if v < Spoken(2) else x, lambda: Spoken(1), lambda: Spoken(3)),
    "< of objects of objects": (
        lambda x, v: x * 2 if v < Around(Plain(q=2)) else x,
        lambda: Around(Plain(q=1)),
        lambda: Around(Plain(q=3)),
    ),
    "hash of a tuple of objects": (
        lambda x, v: x * 2 if hash(v) == hash((1,)) else x,
        lambda: (Spoken(1),),
        lambda: (Spoken(2),),
    ),
    "max of objects": (lambda x, v: x * max(v).q, lambda: [Spoken(1), Spoken(2)], lambda: [Spoken(1), Spoken(3)]),
    "str of a list": (lambda x, v: x * len(str(v)), [1, 2], [1, 22]),
    "repr of a dict": (lambda x, v: x * len(repr(v)), {"a": 1}, {"a": 22}),
    "bytes": (lambda x, v: x * v[0], b"a", b"b"),
    "range": (lambda x, v: _loop(x, v), range(2), range(3)),
    "slice": (lambda x, v: x[v], slice(0, 2), slice(0, 3)),
    "complex": (lambda x, v: x * v.imag, 1 + 1j, 1 + 2j),
    "pow": (lambda x, v: x * pow(*v), [2.0, 2.0], [2.0, 3.0]),
    "divmod": (lambda x, v: x * divmod(*v)[1], [5, 3], [5, 4]),
    "round": (lambda x, v: x * round(v), 1.1, 2.1),
    "int of a str": (lambda x, v: x * int(v), "1", "2"),
    "bool of an int": (lambda x, v: x * 2 if bool(v) else x, 0, 1),
    "int and bool": (lambda x, v: x * 2 if v is True else x, True, 1),
    "int and float": (lambda x, v: x * 2 if isinstance(v, int) else x, 1, 1.0),
    "zero's sign": (lambda x, v: x / v, 0.0, -0.0),
    "isinstance": (lambda x, v: x * 2 if isinstance(v, Other) else x, lambda: Scaled(), lambda: Other()),
    "type": (lambda x, v: x * 2 if type(v) is Other else x, lambda: Scaled(), lambda: Other()),
    "getattr": (lambda x, v: x * getattr(v, "factor"), lambda: Scaled(2.0), lambda: Scaled(3.0)),  # noqa: B009
    "vars": (lambda x, v: x * vars(v)["factor"], lambda: Scaled(2.0), lambda: Scaled(3.0)),
    "__dict__": (lambda x, v: x * v.__dict__["factor"], lambda: Scaled(2.0), lambda: Scaled(3.0)),
    "class attribute": (lambda x, v: x * v.factor, attribute(factor=2.0), attribute(factor=3.0)),
    "class attribute of the type": (lambda x, v: x * type(v).factor, attribute(factor=2.0), attribute(factor=3.0)),
    "class attribute hidden": (lambda x, v: x * v.factor, lambda: Scaled(2.0), lambda: Other(3.0)),
    "property": (
        lambda x, v: x * v.p,
        attribute(p=property(lambda self: 2.0)),
        attribute(p=property(lambda self: 3.0)),
    ),
    "ModuleList": (_chain, modules(torch.nn.ModuleList, 2.0, 3.0), modules(torch.nn.ModuleList, 2.0, 4.0)),
    "ModuleList length": (_chain, modules(torch.nn.ModuleList, 2.0), modules(torch.nn.ModuleList, 2.0, 4.0)),
    "ModuleList index": (
        lambda x, v: v[-1](x),
        modules(torch.nn.ModuleList, 2.0, 3.0),
        modules(torch.nn.ModuleList, 2.0, 4.0),
    ),
    "ModuleList slice": (
        lambda x, v: _chain(x, v[1:]),
        modules(torch.nn.ModuleList, 2.0, 3.0),
        modules(torch.nn.ModuleList, 2.0, 4.0),
    ),
    "ModuleList reversed": (
        lambda x, v: _chain(x, reversed(v)),
        modules(torch.nn.ModuleList, 2.0, 3.0),
        modules(torch.nn.ModuleList, 2.0, 4.0),
    ),
    "ModuleList enumerated": (
        lambda x, v: _chain(x, [m for i, m in enumerate(v) if i]),
        modules(torch.nn.ModuleList, 2.0, 3.0),
        modules(torch.nn.ModuleList, 2.0, 4.0),
    ),
    "ModuleDict items": (
        _chain_items,
        modules(torch.nn.ModuleDict, 2.0, 3.0),
        modules(torch.nn.ModuleDict, 2.0, 4.0),
    ),
    "ModuleDict values": (
        lambda x, v: _chain(x, v.values()),
        modules(torch.nn.ModuleDict, 2.0, 3.0),
        modules(torch.nn.ModuleDict, 2.0, 4.0),
    ),
    "ModuleDict keys": (
        lambda x, v: x * len("".join(v.keys())),
        lambda: torch.nn.ModuleDict({"a": Scaled()}),
        lambda: torch.nn.ModuleDict({"bb": Scaled()}),
    ),
    "ModuleDict in": (
        lambda x, v: x * 2 if "a" in v else x,
        lambda: torch.nn.ModuleDict({"a": Scaled()}),
        lambda: torch.nn.ModuleDict({"bb": Scaled()}),
    ),
    "Sequential": (
        lambda x, v: v(x),
        lambda: torch.nn.Sequential(Scaled(2.0)),
        lambda: torch.nn.Sequential(Scaled(3.0)),
    ),
    "children": (
        lambda x, v: _chain(x, v.children()),
        lambda: torch.nn.Sequential(Scaled(2.0)),
        lambda: torch.nn.Sequential(Scaled(3.0)),
    ),
    "ParameterList": (
        lambda x, v: x * len(list(v)),
        lambda: torch.nn.ParameterList([torch.ones(4)]),
        lambda: torch.nn.ParameterList([torch.ones(4), torch.ones(4)]),
    ),
    "torch.tensor": (lambda x, v: x * torch.tensor(v), [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 5.0]),
    "torch.full": (lambda x, v: x + torch.full(v, 2.0).sum(), [2, 2], [2, 3]),
    "torch.full value": (lambda x, v: x * torch.full((4,), v), 2.0, 3.0),
    "torch.zeros": (lambda x, v: x + torch.zeros(*v).numel(), [2, 2], [2, 3]),
    "torch.arange": (lambda x, v: x * torch.arange(*v), [0, 4], [1, 5]),
    "split": (lambda x, v: torch.split(x, v)[0], [1, 3], [2, 2]),
    "split method": (lambda x, v: x.split(v)[0], [1, 3], [2, 2]),
    "reshape": (lambda x, v: x.reshape(v), [2, 8], [8, 2]),
    "permute": (lambda x, v: x.permute(*v), [0, 1], [1, 0]),
    "sum over dimensions": (lambda x, v: x.sum(v), [0], [1]),
    "index by a list": (lambda x, v: x[:, v], [0], [1]),
    "pad": (lambda x, v: torch.nn.functional.pad(x, v), [1, 0], [0, 1]),
    "to dtype": (lambda x, v: x.to(v), torch.float64, torch.float32),
    "to dtype by options": (lambda x, v: x.to(**v), {"dtype": torch.float64}, {"dtype": torch.float32}),
    "tensors in a list": (
        lambda x, v: x * v[0] + len(v),
        lambda: [torch.ones(4)],
        lambda: [torch.ones(4), torch.ones(4)],
    ),
    "tensors in a dict": (lambda x, v: x * v["a"], lambda: {"a": torch.ones(4)}, lambda: {"a": torch.ones(1)}),
    "is: tensors": (_is, twins(True, lambda: torch.ones(4)), twins(False, lambda: torch.ones(4))),
    "is: modules": (_is, twins(True, Scaled), twins(False, Scaled)),
    "is: objects": (_is, twins(True, Plain), twins(False, Plain)),
    "is: lists": (_is, twins(True, list), twins(False, list)),
    "is: dicts": (_is, twins(True, dict), twins(False, dict)),
    "is: functions": (_is, twins(True, lambda: adder(1)), twins(False, lambda: adder(1))),
    "is: types": (_is, lambda: [int, int], lambda: [int, bool]),
    "== of a list of modules": (lambda x, v: x * 2 if [v[0]] == v[1][:1] else x * 3, with_list(0), with_list(1)),
    "== of lists of modules": (
        lambda x, v: x * 2 if v[0] == v[1] else x * 3,
        lambda: [[SHARED[0]], [SHARED[0]]],
        lambda: [[SHARED[0]], [SHARED[1]]],
    ),
    "in: module": (lambda x, v: x * 2 if v[0] in v[1] else x * 3, with_list(1), lambda: (Scaled(), [Scaled()] * 3)),
    "index of a module": (lambda x, v: x * v[1].index(v[0]), with_list(1), with_list(2)),
    "module as a key": (lambda x, v: x * BY_MODULE[v], lambda: SHARED[0], lambda: SHARED[1]),
    "module in a set": (
        lambda x, v: x * 2 if v[0] in v[1] else x * 3,
        lambda: (SHARED[0], {SHARED[0]}),
        lambda: (SHARED[1], {SHARED[0]}),
    ),
    "== of lists of functions": (lambda x, v: x * 2 if v == [torch.sin] else x, [torch.sin], [torch.cos]),
    "in: function": (lambda x, v: x * 2 if torch.sin in v else x, [torch.sin], [torch.cos]),
    "== of lists of made functions": (
        lambda x, v: x * 2 if v[:1] == v[1:] else x * 3,
        twins(True, lambda: adder(1)),
        twins(False, lambda: adder(1)),
    ),
    "function in a list": (lambda x, v: v[0](x), lambda: [adder(1)], lambda: [adder(2)]),
    "function in a dict": (lambda x, v: v["f"](x), {"f": torch.sin}, {"f": torch.cos}),
    "== of deep lists": (lambda x, v: x * 2 if v == [[[[[[[0]]]]]]] else x, [[[[[[[0]]]]]]], [[[[[[[1]]]]]]]),
    "max of deep lists": (lambda x, v: x * max(v)[0][0][0][0][0], [[[[[[1.0]]]]]], [[[[[[2.0]]]]]]),
    "enum is": (lambda x, v: x * 2 if v is Color.RED else x, lambda: Color.RED, lambda: Color.BLUE),
    "enum ==": (lambda x, v: x * 2 if v == Color.RED else x, lambda: Color.RED, lambda: Color.BLUE),
    "enum value": (lambda x, v: x * v.value, lambda: Color.RED, lambda: Color.BLUE),
    "enum as a key": (lambda x, v: x * FACTORS[v], lambda: Color.RED, lambda: Color.BLUE),
    "enum in a list": (lambda x, v: x * 2 if Color.RED in v else x, lambda: [Color.RED], lambda: [Color.BLUE]),
    "enum in a tuple": (lambda x, v: x * 2 if v in (Color.RED,) else x, lambda: Color.RED, lambda: Color.BLUE),
    "copy of an object": (lambda x, v: x * copy.copy(v).q, lambda: Plain(q=2.0), lambda: Plain(q=3.0)),
    "deepcopy of an object": (lambda x, v: x * copy.deepcopy(v).q, lambda: Plain(q=2.0), lambda: Plain(q=3.0)),
    "deepcopy of a list": (lambda x, v: x * copy.deepcopy(v)[0], [2.0], [3.0]),
    "state of an object": (lambda x, v: x * v.__reduce_ex__(4)[2]["q"], lambda: Plain(q=2.0), lambda: Plain(q=3.0)),
    "attrgetter": (lambda x, v: x * operator.attrgetter("q")(v), lambda: Plain(q=2.0), lambda: Plain(q=3.0)),
    "itemgetter": (lambda x, v: x * operator.itemgetter(0)(v), [2.0], [3.0]),
    "operator.getitem": (lambda x, v: x * operator.getitem(v, 0), [2.0], [3.0]),
    "functools.reduce": (lambda x, v: x * functools.reduce(lambda a, b: a * b, v), [2.0, 1.0], [3.0, 1.0]),
    "itertools.chain": (lambda x, v: _loop(x, itertools.chain(v, [1.0])), [2.0], [3.0]),
    "math.prod": (lambda x, v: x * math.prod(v), [2.0], [3.0]),
    "SimpleNamespace": (lambda x, v: x * v.q, lambda: Namespace(q=2.0), lambda: Namespace(q=3.0)),
    "== of namespaces": (
        lambda x, v: x * 2 if v == Namespace(q=2.0) else x,
        lambda: Namespace(q=2.0),
        lambda: Namespace(q=3.0),
    ),
    "dir": (lambda x, v: x * len(dir(v)), lambda: Plain(q=2.0), lambda: Plain()),
    "callable's name": (lambda x, v: x * len(v.__name__), lambda: torch.sin, lambda: torch.sigmoid),
    "defaults of a function": (lambda x, v: v(x), lambda: lambda x, n=2.0: x * n, lambda: lambda x, n=3.0: x * n),
    "partial": (
        lambda x, v: v(x),
        lambda: functools.partial(torch.mul, other=2.0),
        lambda: functools.partial(torch.mul, other=3.0),
    ),
    "bound method": (lambda x, v: v(x), lambda: Scaled(2.0).forward, lambda: Scaled(3.0).forward),
    "array": (lambda x, v: x * v[0], array.array("d", [2.0]), array.array("d", [3.0])),
    "deque": (lambda x, v: x * v[0], collections.deque([2.0]), collections.deque([3.0])),
    "memory of a bytearray": (lambda x, v: x * v[0], bytearray(b"a"), bytearray(b"b")),
    "mappingproxy": (
        lambda x, v: x * v["q"],
        lambda: MappingProxyType({"q": 2.0}),
        lambda: MappingProxyType({"q": 3.0}),
    ),
    "list of a subclass": (lambda x, v: x * v[0], lambda: Listed([2.0]), lambda: Listed([3.0])),
    "number's attribute": (
        lambda x, v: x * v.q,
        lambda: marked_with(Number(1), 2.0),
        lambda: marked_with(Number(1), 3.0),
    ),
    "str's attribute": (lambda x, v: x * v.q, lambda: marked_with(Text("a"), 2.0), lambda: marked_with(Text("a"), 3.0)),
    "list's attribute": (
        lambda x, v: x * v.q,
        lambda: marked_with(Listed([1]), 2.0),
        lambda: marked_with(Listed([1]), 3.0),
    ),
    "dict's attribute": (
        lambda x, v: x * v.q,
        lambda: marked_with(Mapped({"a": 1}), 2.0),
        lambda: marked_with(Mapped({"a": 1}), 3.0),
    ),
    "tensor's attribute": (
        lambda x, v: x * v.q,
        lambda: marked_with(torch.ones(4), 2.0),
        lambda: marked_with(torch.ones(4), 3.0),
    ),
    "parameter's requires_grad": (
        lambda x, v: x * 2 if v.requires_grad else x * v,
        lambda: torch.ones(4).requires_grad_(),
        lambda: torch.ones(4),
    ),
    "strides": (lambda x, v: x * v.stride()[0], lambda: torch.ones(4, 4), lambda: torch.ones(4, 4).t()),
    "contiguous": (
        lambda x, v: x * 2 if v.is_contiguous() else x,
        lambda: torch.ones(2, 3),
        lambda: torch.ones(3, 2).t(),
    ),
    "is_leaf": (
        lambda x, v: x * 2 if v.is_leaf else x,
        lambda: torch.ones(4),
        lambda: torch.ones(4).requires_grad_() * 2,
    ),
    "isinstance of a tensor": (
        lambda x, v: x * 2 if isinstance(v, torch.nn.Parameter) else x,
        lambda: torch.ones(4),
        lambda: torch.nn.Parameter(torch.ones(4)),
    ),
    "grad": (lambda x, v: x * 2 if v.grad is None else x, lambda: graded(False), lambda: graded(True)),
    "stack of a list": (
        lambda x, v: x + torch.stack(v).sum(0),
        lambda: [torch.ones(4), torch.zeros(4)],
        lambda: [torch.ones(4), torch.ones(4), torch.ones(4)],
    ),
}

# alike, and traced again all the same: why
NOT_REUSED = {
    **{n: "it calls `sorted`" for n in ("set sorted",)},
    **{n: "it calls `sum`" for n in ("generator",)},
    **{n: "it calls `str.__new__`" for n in READS if n.startswith("str of a") and "object" in n},
    "f-string of an object": "it calls `format`",
    "str.format of an object": "it calls `str.format`",
    "hash of a tuple of objects": "it calls `hash`",
    "max of objects": "it calls `max`",
    "repr of a dict": "it calls `repr`",
    "vars": "it calls `vars`",
    "dir": "it calls `dir`",
    "deepcopy of a list": "it calls `id`",
    "state of an object": "it calls `object.__reduce_ex__`",
    "attrgetter": "it calls `attrgetter.__call__`",
    "itemgetter": "it calls `itemgetter.__call__`",
    "== of namespaces": "it calls `SimpleNamespace.__init__`",
    "array": "whose content cannot be noted",
    "deque": "whose content cannot be noted",
    "memory of a bytearray": "whose content cannot be noted",
    "mappingproxy": "`fn.value` is mappingproxy",
    "== of deep lists": "`fn.value` is list",  # deeper than is noted
    "max of deep lists": "`fn.value` is list",
    "parameter's requires_grad": "`requires_grad`",
}
# stock thunder itself raises, or answers otherwise than eager PyTorch: without regions, too
STOCK_FAULTS = {
    *("dict keys", "ModuleDict keys", "list count", "tuple count", "ModuleList reversed", "partial"),
    *("copy of an object", "deepcopy of an object", "tensor's attribute", "strides", "is_leaf"),
    *("is: tensors", "contiguous"),
}


class Reading(torch.nn.Module):
    def __init__(self, fn, value):
        super().__init__()
        self.value = value
        self.fn = fn

    def forward(self, x):
        return self.fn(x, self.value)


class Blocks(torch.nn.Module):
    def __init__(self, fn, values):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Reading(fn, v) for v in values)

    def forward(self, x):
        return [block(x) for block in self.blocks]


def made(value: Any) -> Any:
    """A new object like the value."""
    return value() if callable(value) else copy.deepcopy(value)


@pytest.mark.parametrize("case", [pytest.param(n, id=n) for n in READS if n not in STOCK_FAULTS])
def test_reads(case, monkeypatch):
    installed_init = inspect.getclosurevars(torch.nn.Module.__init__).nonlocals.get("init")
    if installed_init is not None:
        # TorchDynamo, once it has run in this process, asks each new module for its `id`: that is not reusable
        monkeypatch.setattr(torch.nn.Module, "__init__", installed_init)
    fn, first, second = READS[case]
    model = Blocks(fn, (made(first), made(first), made(second), made(second)))
    jitted = thunder.jit(model, nested_regions=[Reading])
    assert_same(jitted(X), model(X))
    (report,) = thunder.nested.report(jitted)
    if case in NOT_REUSED:
        assert report.reused == 0 and any(NOT_REUSED[case] in r for r in report.reasons), report
    else:
        assert (report.traced, report.reused) == (2, 2), report


def value_or_error(call: Callable) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("case", sorted(STOCK_FAULTS))
def test_regions_do_not_change_what_stock_thunder_gets_wrong(case):
    fn, first, second = READS[case]
    for value in (first, second):
        model = Blocks(fn, (made(value),))
        plain, regions = (
            value_or_error(lambda: thunder.jit(model, **options)(X)) for options in ({}, {"nested_regions": [Reading]})
        )
        if isinstance(plain, type):
            assert regions is plain
        else:
            assert_same(regions, plain)
