"""What a nested function changes outside itself is seen afterwards, by the enclosing code and by the caller."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from nested_helpers import CALLS, check, inlined, jit, operator, plain_call, twice_deep

import thunder.nested

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Box:
    pass


class Counter(torch.nn.Module):
    """Its state is that of a submodule: stock thunder loses what is set on the outermost module itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.n = 1

    def forward(self, x):
        self.total = self.total + x.detach().sum(0)
        return x * self.total


class WithCounter(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.counter = Counter()


class BufferUpdates(WithCounter):
    def forward(self, x):
        y = self.call(self.counter, x)
        before = self.counter.total * 1
        z = self.call(lambda a: self.counter(a) + self.counter.total, y.sin())
        return z + before, self.counter.total * 2


class BoundMethod(WithCounter):
    def forward(self, x):
        return self.call(self.counter.forward, x) + self.counter.total


class SetsBufferOfSubmodule(WithCounter):
    def forward(self, x):
        def body(a):
            self.counter.total = a.detach().sum(0)
            return a * self.counter.total

        return self.call(body, x) + self.counter.total


class ReadsPending(WithCounter):
    """The enclosing level changes a buffer, and the nested function reads it."""

    def forward(self, x):
        self.counter.total = self.counter.total + x.detach().sum(0)
        return self.call(lambda a: a * self.counter.total, x)


class BatchNorm(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.call(self.norm, x) + self.call(lambda a: self.norm(a.sin()), x) + self.norm.running_mean


@pytest.mark.parametrize("call", (plain_call, *CALLS))
@pytest.mark.parametrize("module", (BufferUpdates, BoundMethod, SetsBufferOfSubmodule, ReadsPending))
def test_modules(module, call):
    # without a gradient: stock thunder gives a buffer that is set the `requires_grad` of the whole computation
    check(module, (X.detach(),), call)


@pytest.mark.parametrize("call", (plain_call, inlined, twice_deep))
def test_batch_norm(call):
    check(BatchNorm, (X,), call)


def list_append(c, x):
    seen = [x]

    def body(a):
        seen.append(a.sin())
        seen.append(a.cos())
        return a * len(seen)

    y = c(body, x)
    return y, seen[-1] * len(seen), sum(seen)


def list_item(c, x):
    items = [x, x.exp()]

    def body(a):
        items[0] = a.sin()
        items[1] = items[0] * 2
        return items[1] + a

    y = c(body, x)
    return y, items[0] + items[1]


def list_pop(c, x):
    items = [x, x.exp(), x.cos()]
    y = c(lambda a: a + items.pop(), x)
    return y * len(items), items[-1]


def list_unchanged_on_read(c, x):
    items = [x, x.exp()]
    y = c(lambda a: a + items[0] + len(items), x)
    return y, items


def dict_item(c, x):
    table = {"a": x}

    def body(a):
        table["b"] = a.sin()
        table["a"] = table["a"] * 2
        return table["b"] + a

    y = c(body, x)
    return y, table["a"], table["b"], list(table)


def dict_delete(c, x):
    table = {"a": x, "b": x.sin()}

    def body(a):
        del table["b"]
        table.update(c=a)
        return a * len(table)

    y = c(body, x)
    return y, sorted(table)


def nonlocal_variable(c, x):
    total = x * 0
    n = 0

    def body(a):
        nonlocal total, n
        total = total + a.sin()
        n += 1
        return a * n

    y = c(body, x)
    z = c(body, y)
    return z, total, n


def object_attribute(c, x):
    class Box:
        pass

    box = Box()
    box.value = x

    def body(a):
        box.value = box.value * a
        box.extra = a.sin()
        return box.value + a

    y = c(body, x)
    return y, box.value, box.extra


def object_attributes_in_a_row(c, x):
    box = Box()
    box.value, box.tag, box.items = x, "t", [x]

    def body(a):
        box.value = a.sin()
        box.tag = "three"
        box.items = [a.cos(), 2]
        box.tag += "!"
        return a

    y = c(body, x)
    return y * len(box.tag), box.value * box.items[1], box.tag, box.items[0]


def order_of_effects(c, x):
    log = []

    def body(a, n):
        log.append(n)
        return a + n

    for i in range(3):
        log.append(-i)
        x = c(body, x, i)
    return x, log


def set_item(c, x):
    known = {1}

    def body(a):
        known.add(2)
        known.discard(1)
        return a * len(known)

    return c(body, x), sorted(known)


def nested_containers(c, x):
    table = {"l": [x]}

    def body(a):
        table["l"].append(a.sin())
        table["m"] = [a]
        return a

    return c(body, x), sum(table["l"]), table["m"][0]


def effect_in_two_levels(c, x):
    seen = []

    def outer(a):
        seen.append(a.sin())

        def inner(b):
            seen.append(b.cos())
            return b * len(seen)

        return c(inner, a) + seen[-1]

    y = c(outer, x)
    return y, seen, len(seen)


def list_passed_as_argument(c, x):
    def body(items, a):
        items.append(a.sin())
        return items[0] + a

    seen = [x]
    return c(body, seen, x), seen[1]


def in_place_on_intermediate(c, x):
    y = x * 2

    def body(a):
        y.add_(a)
        return y * 2

    z = c(body, x)
    return z + y


def in_place_on_argument(c, x):
    y = x * 2
    z = c(lambda a: a.mul_(3), y)
    return y + z


def in_place_on_view(c, x):
    y = x * 1

    def body(a):
        a[0].add_(1)
        return a * 2

    return c(body, y), y


def in_place_on_view_of_capture(c, x):
    y = x * 1

    def body(a):
        y[0].add_(1)
        return a * y

    return c(body, x) + y


def in_place_on_view_as_argument(c, x):
    y = x * 1
    t = y.t()
    c(lambda a: a.add_(1), t)
    return y * 2, t * 1


def in_place_on_view_made_inside(c, x):
    y = x * 1
    v = c(lambda a: a[0], y)
    v.add_(1)
    return y * 2, v * 1


def item_of_tensor(c, x):
    y = x * 1

    def body(a):
        y[0] = a[1]
        a[:, 1] = 0.5
        return a * 2

    return c(body, x * 2), y * 1


def augmented_assignment(c, x):
    y = x * 1

    def body(a):
        nonlocal y
        y += a
        return a

    return c(body, x) + y


def returns_changed_list(c, x):
    items = [x]

    def body(a):
        items.append(a.sin())
        return items

    result = c(body, x)
    return result[1], len(result), result is items


def slot_of_an_object(c, x):
    class Slotted:
        __slots__ = ("count", "last")

    slotted = Slotted()
    slotted.count = 1.0

    def body(a):
        slotted.count = slotted.count + 1
        slotted.last = a.sin()
        return a * slotted.count

    return c(body, x) * slotted.count, slotted.last


def no_such_slot(c, x):
    class Slotted:
        __slots__ = ("count",)

    slotted = Slotted()
    slotted.count = 1.0

    def body(a):
        try:
            slotted.absent = a
        except AttributeError:
            slotted.count = 3.0
        return a * slotted.count

    return c(body, x) * slotted.count


def closures_that_share_a_cell(c, x):
    def make(a):
        shared = a

        def double():
            nonlocal shared
            shared = shared * 2

        def read():
            return shared

        return double, read

    double, read = c(make, x)
    double()
    return read()


FUNCTIONS = (
    slot_of_an_object,
    no_such_slot,
    closures_that_share_a_cell,
    list_append,
    list_item,
    list_pop,
    list_unchanged_on_read,
    dict_item,
    dict_delete,
    nonlocal_variable,
    object_attribute,
    object_attributes_in_a_row,
    order_of_effects,
    set_item,
    nested_containers,
    effect_in_two_levels,
    list_passed_as_argument,
    returns_changed_list,
)
IN_PLACE = (
    in_place_on_intermediate,
    in_place_on_argument,
    in_place_on_view,
    in_place_on_view_of_capture,
    in_place_on_view_as_argument,
    in_place_on_view_made_inside,
    item_of_tensor,
    augmented_assignment,
)


@pytest.mark.parametrize("call", (plain_call, *CALLS))
@pytest.mark.parametrize("program", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)


@pytest.mark.parametrize("call", (plain_call, inlined, twice_deep))
@pytest.mark.parametrize("program", IN_PLACE, ids=lambda f: f.__name__)
def test_in_place(program, call):
    check(lambda c: functools.partial(program, c), (X,), call)


def test_object_reached_in_a_way_that_cannot_be_recorded():
    def program(x):
        box = Box()
        box.value = x
        reference = weakref.ref(box)

        def body(a):
            reference().value = a.sin()
            return a

        return inlined(body, x) + box.value

    with pytest.raises(thunder.nested.CaptureError, match="sets `value` on an object that was reached in a way"):
        jit(program)(X)


CHANGES = [p for p in IN_PLACE if p is not in_place_on_view_made_inside]  # that is changed outside


@pytest.mark.parametrize("program", (*CHANGES, BatchNorm(operator)))
def test_in_place_is_refused_by_an_operator(program):
    bound = program if isinstance(program, torch.nn.Module) else functools.partial(program, operator)
    with pytest.raises(thunder.nested.InPlaceError, match=r"changes a tensor in place \(`\w+_` at .*py:\d+\)"):
        jit(bound)(X)
