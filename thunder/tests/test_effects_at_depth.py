"""Places outside a nested function that are set several times, read in between, and set from several levels."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nested_helpers import check, inlined, jit, operator, plain_call, twice_deep

import thunder

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Box:
    def __init__(self, value=None):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class Property:
    def __init__(self, value):
        self._value = value

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value


@dataclasses.dataclass(frozen=True)
class Place:
    """An object that holds a value: how it is made around one, and how the value is read and set."""

    make: Callable[[Any], Any]
    read: Callable[[Any], Any]
    set: Callable[[Any, Any], None]


def _set_attribute(o, value):
    o.value = value


def _set_new_attributes(o, value):
    o.extra = value
    o.value = o.extra * 1


def _set_inner_attribute(o, value):
    o.value.value = value


def _replace_inner_object(o, value):
    o.value = Box(value)


def _set_item(key, o, value):
    o[key] = value


def _set_inner_item(o, value):
    o["a"][0]["b"] = value


def _append(o, value):
    o.append(value)


PLACES = {
    "attribute": Place(Box, lambda o: o.value, _set_attribute),
    "new attributes": Place(Box, lambda o: o.value, _set_new_attributes),
    "setattr": Place(Box, lambda o: o.value, lambda o, value: setattr(o, "value", value)),
    "attribute of an attribute": Place(lambda v: Box(Box(v)), lambda o: o.value.value, _set_inner_attribute),
    "object in an attribute": Place(lambda v: Box(Box(v)), lambda o: o.value.value, _replace_inner_object),
    "slot": Place(Slotted, lambda o: o.value, _set_attribute),
    "property": Place(Property, lambda o: o.value, _set_attribute),
    "dict item": Place(lambda v: {"a": v}, lambda o: o["a"], functools.partial(_set_item, "a")),
    "list item": Place(lambda v: [v], lambda o: o[0], functools.partial(_set_item, 0)),
    "list end": Place(lambda v: [v], lambda o: o[-1], _append),
    "item of an item": Place(lambda v: {"a": [{"b": v}]}, lambda o: o["a"][0]["b"], _set_inner_item),
}


def set_twice(c, p, x):
    o = p.make(x * 1)

    def f(a):
        p.set(o, p.read(o) + a)
        between = p.read(o) * 3
        p.set(o, p.read(o) * 2 - a)
        return between + p.read(o)

    y = c(f, x)
    return y, p.read(o), c(f, y), p.read(o)


def set_in_three_levels(c, p, x):
    o = p.make(x * 1)

    def f(a):
        p.set(o, p.read(o) + a)

        def g(b):
            p.set(o, p.read(o) * 2)

            def h(d):
                p.set(o, p.read(o) - d)
                return d * p.read(o)

            y = c(h, b) + p.read(o)
            p.set(o, p.read(o) + y)
            return y

        y = c(g, a)
        p.set(o, p.read(o) + y)
        return y + c(g, y)

    return c(f, x), p.read(o)


def set_around(c, p, x):
    o = p.make(x * 1)
    p.set(o, x * 2)

    def f(a):
        p.set(o, p.read(o) + a)
        return a * p.read(o)

    y = c(f, x)
    p.set(o, p.read(o) * 2)
    y = c(f, y) + p.read(o)
    p.set(o, p.read(o) + y)
    return y, p.read(o)


def set_where_it_raises(c, p, x):
    o = p.make(x * 1)

    def f(a):
        try:
            p.set(o, p.read(o) + a)

            def g(b):
                p.set(o, p.read(o) * 2)
                p.set(o, p.read(o) - b)
                raise ValueError("no")

            y = c(g, a)
        except ValueError:
            p.set(o, p.read(o) * 3)
            y = p.read(o) * 2
        finally:
            p.set(o, p.read(o) + x)
        return y + p.read(o)

    return c(f, x), p.read(o)


def set_through_arguments(c, p, x):
    o = p.make(x * 1)

    def f(o, a):
        p.set(o, p.read(o) + a)

        def g(b, *, o):
            p.set(o, p.read(o) * 2)
            p.set(o, p.read(o) - b)
            return b * 1

        y = c(g, a, o=o)
        p.set(o, p.read(o) + y)
        return y

    return c(f, o, x) + c(f, o, x), p.read(o)


PROGRAMS = (set_twice, set_in_three_levels, set_around, set_where_it_raises, set_through_arguments)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_set_several_times(program, place):
    check(lambda c: functools.partial(program, c, PLACES[place]), (X,), inlined, calls=1)


@pytest.mark.parametrize("call", (plain_call, operator, twice_deep))
def test_set_several_times_by_other_calls(call):
    check(lambda c: functools.partial(set_in_three_levels, c, PLACES["attribute"]), (X,), call)


@pytest.mark.parametrize("call", (plain_call, inlined))
def test_attributes_of_an_argument(call):
    def program(c, box, x):
        box.value = box.value + 1
        box.value = box.value * 2
        y = c(lambda a: a + box.value, x)
        box.value = box.value - 3
        return y

    actual, expected = Box(X.detach()), Box(X.detach())
    jitted = thunder.jit(functools.partial(program, call))  # traces that set attributes cannot be checked
    for _ in range(2):
        torch.testing.assert_close(jitted(actual, X), program(plain_call, expected, X))
        torch.testing.assert_close(actual.value, expected.value)


class Doubling(Property):
    """What is set is not what is read."""

    @Property.value.setter
    def value(self, value):
        self._value = value * 2
        self.count = self.count + 1 if hasattr(self, "count") else 1

    @property
    def readonly(self):
        return self._value


class Descriptor:
    def __get__(self, instance, owner):
        return instance.__dict__["kept"]

    def __set__(self, instance, value):
        instance.__dict__["kept"] = value * 3


class Described:
    value = Descriptor()

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("call", (plain_call, inlined, twice_deep))
@pytest.mark.parametrize("kind", (Doubling, Described))
def test_descriptors_are_interpreted(kind, call):
    def program(c, x):
        o = kind(x)

        def f(a):
            o.value = o.value + a
            between = o.value * 1
            try:
                o.readonly = a
            except AttributeError:
                o.value = o.value - a
            return between

        y = c(f, x)
        return y, o.value, o.__dict__

    check(lambda c: lambda x: [*program(c, x)[:2], *program(c, x)[2].values()], (X,), call, calls=1)


def default_object(c, x):
    box = Box(x * 1)

    def f(a, o=box, *, p=box):
        o.value = o.value + a
        p.value = p.value * 2

        def g(b, o=o, t=(p, x)):
            o.value = o.value - b
            t[0].value = t[0].value * t[1]
            return b + o.value

        return c(g, a) + p.value

    return c(f, x) + box.value, box.value


def default_list_kept_between_calls(c, x):
    def f(a, seen=[]):  # noqa: B006
        seen.append(a)
        return a * len(seen) + seen[0]

    return c(f, x), c(f, x * 2), c(f, x, [])


def default_values(c, x):
    def f(a, b=x, n=2, *, k=1.5, dtype=torch.float32, absent=None):
        return (a * n + b * k).to(dtype) if absent is None else a

    return c(f, x), c(f, x, n=3)


@pytest.mark.parametrize("call", (plain_call, inlined, operator, twice_deep))
@pytest.mark.parametrize("program", (default_object, default_list_kept_between_calls, default_values))
def test_defaults(program, call):
    check(lambda c: functools.partial(program, c), (X,), call, calls=1)


def changed_and_replaced_list(c, x):
    box = Box([x])
    old = box.value

    def f(a):
        box.value.append(a)
        box.value = [*box.value, a * 2]
        box.value.append(a * 3)

        def g(b):
            box.value.append(b)
            box.value = box.value[1:]
            return b * len(box.value)

        return c(g, a) * len(box.value)

    return c(f, x), box.value, old


def swapped_objects(c, x):
    box, table, pair = Box(Box(x)), {"a": Box(x * 2)}, [Box(x * 3), Box(x * 4)]

    def f(a):
        box.value, table["a"], pair[0], pair[1] = pair[0], box.value, pair[1], table["a"]
        box.value.value = box.value.value + a
        return a * 1

    return c(f, x), box.value.value, table["a"].value, [b.value for b in pair]


def set_in_two_levels(c, x):
    seen = {1}

    def f(a):
        seen.add(2)

        def g(b):
            seen.add(len(seen) + 1)
            return b * len(seen)

        return c(g, a) * len(seen)

    return c(f, x), sorted(seen)


def object_of_several_names(c, x):
    box = Box(x)
    other, items = Box(box), [box]

    def f(a):
        box.value = box.value + a
        other.value.value = other.value.value * 2
        items[0].value = items[0].value - a
        return a * box.value

    return c(f, x), box.value, other.value.value, items[0].value


@pytest.mark.parametrize("call", (inlined, operator, twice_deep))
@pytest.mark.parametrize(
    "program", (changed_and_replaced_list, swapped_objects, set_in_two_levels, object_of_several_names)
)
def test_what_was_found_is_changed(program, call):
    check(lambda c: functools.partial(program, c), (X,), call, calls=1)


def test_default_object_is_guarded():
    box = Box(2.0)

    def program(x):
        def f(a, o=box):
            return a * o.value

        return inlined(f, x)

    jitted = jit(program)
    for value in (2.0, 3.0):
        box.value = value
        torch.testing.assert_close(jitted(X), X * value)
