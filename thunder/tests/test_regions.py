"""Regions are traced once and reused exactly when all that was read is the same; counted in both directions."""

from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref

import pytest
import torch
from nested_helpers import assert_same, fresh, inlined, jit, plain_call

import thunder
import thunder.nested
import thunder.nested.regions as regions

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
SCALE = 2.0
region = torch.compiler.nested_compile_region


class Block(torch.nn.Module):
    def __init__(self, seed=0, activation=torch.tanh):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("offset", torch.arange(4.0))
        self.activation = activation
        self.power = 2
        self.absent = None
        self.table = {"scale": 0.5}
        self.names = ["a"]

    def forward(self, x):
        y = self.activation(self.linear(x)) ** self.power * self.table["scale"] + self.offset
        y = y * len(self.names)
        if self.training:
            y = y + 1
        return y if self.absent is None else y * self.absent


class Model(torch.nn.Module):
    def __init__(self, n=4, **options):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(i, **options) for i in range(n))
        self.dropout = 0.0

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def counts(jitted):
    """How often the regions were traced and reused."""
    found = thunder.nested.report(jitted)
    return [(r.traced, r.reused) for r in found]


def check_model(model, expected, *, eager=None, named=(Block,)):
    """Compares a model whose blocks are regions with eager PyTorch, and counts tracings."""
    jitted = jit(model, nested_regions=list(named))
    x1, x2 = fresh((X, X))
    result, reference = jitted(x1), (eager or model)(x2)
    assert_same(result, reference)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(result.sum(), [x1, *parameters])
    assert_same(gradients, torch.autograd.grad(reference.sum(), [x2, *parameters]))
    assert counts(jitted) == expected, thunder.nested.report(jitted)
    return jitted


def test_alike_blocks_are_traced_once():
    jitted = check_model(Model(), [(1, 3)])
    jitted(X)
    assert (thunder.cache_misses(jitted), thunder.cache_hits(jitted)) == (1, 1)


def test_blocks_by_qualified_name():
    check_model(Model(3), [(1, 1)], named=("blocks.0", "blocks.2"))


def test_the_replayed_computation_is_that_of_the_inlined_program():
    model = Model(3)
    results = []
    for options in ({}, {"nested_regions": [Block]}):
        jitted = thunder.jit(model, **options)
        (x,) = fresh((X,))
        result = jitted(x)
        operations = [b.sym.name for b in thunder.last_traces(jitted)[0].bound_symbols]
        results.append((result.detach(), torch.autograd.grad(result.sum(), [x, *model.parameters()]), operations))
    (a, ga, ops_a), (b, gb, ops_b) = results
    assert torch.equal(a, b) and all(map(torch.equal, ga, gb)) and ops_a == ops_b


# What a block reads, and what must not be reused when it differs in one block

CHANGES = {
    "number": lambda b: setattr(b, "power", 3),
    "None": lambda b: setattr(b, "absent", 2.0),
    "function": lambda b: setattr(b, "activation", torch.sin),
    "module in the place of a function": lambda b: setattr(b, "activation", torch.nn.Tanh()),
    "item of a dict": lambda b: b.table.update(scale=0.25),
    "key of a dict": lambda b: b.table.update(other=0.25),
    "length of a list": lambda b: b.names.append("b"),
    "mode": lambda b: b.eval(),
    "parameter removed": lambda b: setattr(b.linear, "bias", None),
    "shape of a buffer": lambda b: setattr(b, "offset", torch.zeros(1)),
    "dtype of a buffer": lambda b: setattr(b, "offset", torch.arange(4)),
    "hook": lambda b: b.register_forward_hook(lambda module, args, result: result * 2),
    "pre-hook": lambda b: b.linear.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "attribute of a submodule": lambda b: setattr(b.linear, "extra", 3),
}


@pytest.mark.parametrize("change", [pytest.param(c, id=n) for n, c in CHANGES.items()])
@pytest.mark.parametrize("which", (0, 2))
def test_a_different_block_is_traced_anew(change, which):
    model = Model()
    change(model.blocks[which])
    jitted = check_model(model, [(2, 2)])
    (report,) = thunder.nested.report(jitted)
    # after the different block the first trace is found again, so only one reason is given
    assert len(report.reasons) == 1 and report.reasons[0].startswith("`fn")


@dataclasses.dataclass
class Value:
    a: int


class Slotted:
    __slots__ = ("s",)

    def __init__(self, **values):
        for name, value in values.items():
            setattr(self, name, value)


class Plain:
    def __init__(self, **values):
        self.__dict__.update(values)


# a function that reads an attribute in a way that the interpreter does not see, and two values that it tells apart
UNSEEN_READS = {
    "== of lists": (lambda x, v: x * 2 if v == [0] else x * 3, [0], [1]),
    "== of dicts": (lambda x, v: x * 2 if v == {"a": 0} else x * 3, {"a": 0}, {"a": 1}),
    "== of nested lists": (lambda x, v: x * 2 if v == [[0]] else x * 3, [[0]], [[1]]),
    "== of dataclasses": (lambda x, v: x * 2 if v == Value(1) else x * 3, Value(1), Value(2)),
    "== of a list of dataclasses": (lambda x, v: x * 2 if v == [Value(1)] else x * 3, [Value(1)], [Value(2)]),
    "max": (lambda x, v: x * max(v), [1.0, 2.0], [1.0, 3.0]),
    "sum": (lambda x, v: x * sum(v), [1.0, 2.0], [1.0, 3.0]),
    "sorted": (lambda x, v: x * sorted(v)[0], [1.0, 2.0], [1.5, 3.0]),
    "deque": (lambda x, v: [x * i for i in v][-1], collections.deque([2.0]), collections.deque([3.0])),
    "hasattr": (lambda x, v: x * 2 if hasattr(v, "q") else x * 3, Plain(), Plain(q=1)),
    "missing slot": (lambda x, v: x * getattr(v, "s", 3.0), Slotted(), Slotted(s=2.0)),
}


@pytest.mark.parametrize("which", (0, 1))
@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in UNSEEN_READS.items()])
def test_what_is_read_without_the_interpreter(case, which):
    fn, *values = case

    class Reading(torch.nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return fn(x, self.value)

    model = torch.nn.Sequential(*(Reading(v) for v in (values if which == 0 else values[::-1])))
    jitted = thunder.jit(model, nested_regions=[Reading])
    assert_same(jitted(X), model(X))
    assert counts(jitted) == [(2, 0)]


def test_a_subclass_is_a_region_of_its_own():
    class Special(Block):
        def forward(self, x):
            return super().forward(x) * 3

    model = Model()
    model.blocks[1] = Special(1)
    check_model(model, [(1, 2), (1, 0)])


def test_all_blocks_changed_between_calls():
    model = Model()
    jitted = check_model(model, [(1, 3)])
    for block in model.blocks:
        block.power = 3
    assert_same(jitted(X), model(X))
    assert thunder.cache_misses(jitted) == 2 and counts(jitted) == [(1, 3)]


@pytest.mark.parametrize("which", (0, 3))
def test_one_block_changed_between_calls_is_guarded(which):
    """The guards of a reused trace are those of the objects it was reused for."""
    model = Model()
    jitted = check_model(model, [(1, 3)])
    model.blocks[which].power = 3
    assert_same(jitted(X), model(X))
    assert thunder.cache_misses(jitted) == 2 and counts(jitted) == [(2, 2)]


def test_module_replaced_between_calls():
    model = Model()
    holder = [model.blocks[0], model.blocks[1]]
    call = region(lambda block, x: block(x))
    jitted = jit(lambda x: call(holder[1], call(holder[0], x)))
    assert_same(jitted(X), holder[1](holder[0](X)))
    holder[1] = Block(7)
    holder[1].power = 3
    assert_same(jitted(X), holder[1](holder[0](X)))


def test_weight_tying():
    model = Model()
    model.blocks[2].linear.weight = model.blocks[0].linear.weight
    check_model(model, [(1, 3)])


def test_tying_within_a_block():
    """Two paths to one tensor are another pattern of equal tensors."""

    class Two(torch.nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.a = torch.nn.Parameter(torch.ones(4))
            self.b = self.a if tied else torch.nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x):
            return x * self.a + self.b

    model = torch.nn.Sequential(Two(True), Two(False), Two(True), Two(False))
    check_model(model, [(2, 2)], named=(Two,))


# nested_compile_region


def test_decorated_function_and_method():
    class Marked(Block):
        @region
        def forward(self, x):
            return Block.forward(self, x)

    first, second = Marked(0), Marked(1)

    @region
    def scaled(a, factor):
        return torch.tanh(a) * factor * SCALE

    def program(x):
        return scaled(first(scaled(x, 2.0)), 2.0) + second.forward(x)

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(1, 1), (1, 1)]


def test_wrapper_of_a_bound_method():
    """torch's own wrapper sets attributes on what it wraps, which a bound method does not take; a partial does."""
    import functools

    blocks = [region(functools.partial(Block(i).forward)) for i in range(2)]
    jitted = jit(lambda x: blocks[1](blocks[0](x)))
    assert_same(jitted(X), blocks[1](blocks[0](X)))
    assert counts(jitted) == [(1, 1)]


def test_arguments_of_another_value_shape_or_structure():
    @region
    def body(a, n, options=None):
        return a * n + (0 if options is None else options["k"])

    def program(x):
        y = body(x, 2) + body(x, 2) + body(x, 3)
        y = y + body(x, 2, {"k": 1}) + body(x, 2, {"k": 1}) + body(x, 2, options={"k": 2})
        return y, body(x[:1], 2), body(x[:1], 2)

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(5, 3)]


@pytest.mark.parametrize("first", ("same", "different"))
def test_pattern_of_equal_tensors_among_arguments(first):
    """torch's own region reuse gives wrong numbers for ``g(a, a)`` and then ``g(a, b)``."""

    @region
    def g(a, b):
        return torch.sin(a) * b + (1 if a is b else 2)

    def program(x):
        y = x.cos()
        pairs = [(x, x), (x, y), (y, y), (y, x)]
        return [g(a, b) for a, b in (pairs if first == "same" else pairs[::-1])]

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(2, 2)]


def test_pattern_of_equal_tensors_among_arguments_and_captures():
    def program(x):
        y = x.cos()

        def call(a):
            return region(lambda b: (b * y) + (1 if b is y else 2))(a)

        return call(x), call(y), call(x)

    jitted = jit(program)
    assert_same(jitted(X), program(X))


def test_captures_are_found_anew():
    def program(x):
        result = 0
        for i in range(3):
            y = x * i
            result = result + region(lambda a: a.sin() * y)(x)
        return result

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(1, 2)]


def test_captured_number_is_read():
    def program(x):
        return sum(region(lambda a: a * n)(x) for n in (2, 3, 2))

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(2, 1)]


def test_grad_mode_and_autocast():
    @region
    def body(a):
        return (a @ a).sin()

    def program(x):
        y = body(x)
        with torch.no_grad():
            z = body(x)
        with torch.autocast("cpu", torch.bfloat16):
            w = body(x).float().detach()
        return y * z + w + body(x)

    jitted = jit(program)
    x1, x2 = fresh((X, X))
    result, expected = jitted(x1), program(x2)
    assert_same(result, expected)
    assert_same(torch.autograd.grad(result.sum(), x1), torch.autograd.grad(expected.sum(), x2))
    assert counts(jitted) == [(3, 1)]


def test_random_operations_draw_anew():
    @region
    def body(a):
        return a * torch.rand(4, 4)

    def program(x):
        return body(x) + 2 * body(x)

    jitted = jit(program)
    torch.manual_seed(0)
    result = jitted(X)
    torch.manual_seed(0)
    assert_same(result, program(X))
    assert counts(jitted) == [(1, 1)]


def test_in_place_effects_and_buffer_updates_are_replayed_on_the_new_objects():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x):
            self.total.add_(x.detach().sum(0))
            return x * 2 + self.total

    models = [torch.nn.Sequential(Counting(), Counting(), Counting()) for _ in range(2)]
    jitted = jit(models[0], nested_regions=[Counting])
    for _ in range(2):
        assert_same(jitted(X.detach()), models[1](X.detach()))
    assert_same([b for b in models[0].buffers()], [b for b in models[1].buffers()])
    assert counts(jitted) == [(1, 2)]


def test_changes_of_the_enclosing_level_are_seen():
    class Holder:
        factor = 1.0

    holder = Holder()

    def program(x):
        @region
        def body(a):
            return a * holder.factor

        y = body(x)
        holder.factor = 3.0
        z = body(x)
        holder.factor = 1.0
        return y, z, body(x)

    expected = program(X)  # first, because stock thunder's epilogue does not leave the last value that was set
    assert_same(thunder.jit(program)(X), expected)


def test_effects_on_containers_are_not_reused_and_said_so():
    def program(x):
        seen = []

        @region
        def body(a):
            seen.append(a.sin())
            return a * len(seen)

        return body(x) + body(x), len(seen), seen[1]

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(2, 0)]
    assert "not reusable: it changes containers" in thunder.nested.report(jitted)[0].reasons[0]


def test_reads_that_cannot_be_noted():
    import time

    def program(x):
        @region
        def body(a):
            time.perf_counter()
            return a.sin()

        return body(x) + body(x)

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(2, 0)]
    assert "it calls `perf_counter`" in thunder.nested.report(jitted)[0].reasons[0]


def test_exceptions():
    @region
    def body(a, fail):
        if fail:
            raise ValueError("asked to")
        return a.sin()

    def program(x):
        y = body(x, False)
        for _ in range(2):
            try:
                body(x, True)
            except ValueError as error:
                y = y * len(str(error))
        return y + body(x, False)

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(3, 1)]


def test_region_in_a_region():
    class Outer(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.first, self.second = Block(seed), Block(seed + 1)

        def forward(self, x):
            return self.second(self.first(x))

    model = torch.nn.Sequential(Outer(0), Outer(2), Outer(4))
    check_model(model, [(1, 2), (1, 1)], named=(Outer, Block))


def test_an_inner_difference_is_seen_by_the_outer_region():
    class Outer(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.block = Block(seed)

        def forward(self, x):
            return self.block(x)

    model = torch.nn.Sequential(Outer(0), Outer(2), Outer(4))
    model[1].block.power = 3
    jitted = check_model(model, [(2, 1), (2, 0)], named=(Outer, Block))
    assert "power" in thunder.nested.report(jitted)[0].reasons[0]


def test_jitted_callables_are_regions():
    inner = thunder.jit(lambda a, n: a.sin() * n)

    def program(x):
        return inner(x, 2) + inner(x.cos(), 2) + inner(x, 3)

    jitted = jit(program)
    assert_same(jitted(X), X.sin() * 2 + X.cos().sin() * 2 + X.sin() * 3)
    assert counts(jitted) == [(2, 1)]


def test_checkpoint_around_and_inside_a_region():
    class Checkpointed(Block):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    model = torch.nn.Sequential(Checkpointed(0), Checkpointed(1), Checkpointed(2))
    check_model(model, [(1, 2)], named=(Checkpointed,))


def test_nested_call_inside_a_region():
    def program(x):
        @region
        def body(a):
            return inlined(lambda b: b.sin() * SCALE, a)

        return body(x) + body(x)

    jitted = jit(program)
    assert_same(jitted(X), X.sin() * SCALE * 2)
    assert counts(jitted) == [(1, 1)]


@pytest.mark.parametrize("change", ("absent", "activation", "hook"))
def test_what_a_level_inside_a_region_reads_the_region_has_read(change):
    """Also what no guard records: None, functions, hooks."""

    class Outer(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.block = Block(seed)

        def forward(self, x):
            return inlined(lambda a: inlined(self.block, a) * 2, x)

    model = torch.nn.Sequential(Outer(0), Outer(2), Outer(4))
    block = model[1].block
    if change == "hook":
        block.register_forward_hook(lambda module, args, result: result * 2)
    else:
        setattr(block, change, 2.0 if change == "absent" else torch.sin)
    eager = torch.nn.Sequential(*(lambda_module(m.block) for m in model))
    check_model(model, [(2, 1)], named=(Outer,), eager=eager)


def lambda_module(block):
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return block(x) * 2

    return Doubled()


def test_a_call_that_cannot_be_noted_inside_a_level_inside_a_region():
    import time

    def program(x):
        @region
        def body(a):
            return inlined(lambda b: (time.perf_counter(), b.sin())[1], a)

        return body(x) + body(x)

    jitted = jit(program)
    assert_same(jitted(X), program(X))
    assert counts(jitted) == [(2, 0)]


def test_checkpoint_around_regions():
    class Around(Model):
        def forward(self, x):
            for block in self.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            return x

    check_model(Around(3), [(1, 2)])


# Bounds, and what is told


def test_more_traces_than_are_kept_are_a_warning():
    @region
    def body(a, n):
        return a * n

    def program(x):
        return sum(body(x, n) for n in range(regions.MAX_TRACES + 3))

    jitted = jit(program)
    with pytest.warns(UserWarning, match="was traced 8 times in one compilation"):
        assert_same(jitted(X), program(X))
    assert counts(jitted) == [(regions.MAX_TRACES + 3, 0)]


def test_report_prints_as_a_table():
    model = Model()
    model.blocks[1].activation = torch.sin
    jitted = check_model(model, [(2, 2)])
    text = str(thunder.nested.report(jitted))
    assert "Block" in text and "traced" in text and "`fn.activation`" in text.replace("\n", "")
    report = thunder.nested.report(jitted)[0]
    assert report.seconds[0] > 0 and report.seconds[1] > 0 and "test_regions.py" in report.name


def test_report_before_the_first_call():
    with pytest.raises(thunder.nested.OutsideTraceError, match="call it first"):
        thunder.nested.report(thunder.jit(torch.sin))


@pytest.mark.parametrize("wrong", (3, "no.such.module", int))
def test_wrong_regions(wrong):
    with pytest.raises(thunder.nested.ArgumentError, match="nested_regions"):
        thunder.jit(Model(1), nested_regions=[wrong])(X)


def test_the_model_is_freed_with_the_compiled_function():
    def make():
        model = Model(2)
        jitted = thunder.jit(model, nested_regions=[Block])
        jitted(X)
        return weakref.ref(model.blocks[0]), weakref.ref(model.blocks[1].linear.weight)

    references = make()
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_without_regions_nothing_is_noted():
    jitted = jit(lambda x: plain_call(torch.sin, x))
    jitted(X)
    assert thunder.nested.report(jitted) == []


class Numbered(Block):
    """A block that knows its number, as those of many models."""

    def __init__(self, number, used=False):
        super().__init__()
        self.number, self.used = number, used

    def forward(self, x):
        return super().forward(x) * (self.number if self.used else 1)


@pytest.mark.parametrize("used", (False, True))
def test_an_attribute_that_is_not_read_may_differ(used):
    model = torch.nn.Sequential(*(Numbered(i, used) for i in range(4)))
    jitted = jit(model, nested_regions=[Numbered])
    assert_same(jitted(X), model(X))
    assert counts(jitted) == [(4, 0) if used else (1, 3)]


OPTIONS = {"doubled": True, "unused": 1}


@pytest.mark.parametrize(
    "change", (lambda o: o.pop("doubled"), lambda o: o.update(unused=2)), ids=("removed", "unused")
)
def test_a_key_that_is_asked_for_is_guarded(change, monkeypatch):
    monkeypatch.setitem(globals(), "OPTIONS", dict(OPTIONS))
    block = torch.compiler.nested_compile_region(lambda x: x * 2 if "doubled" in OPTIONS else x)
    jitted = jit(lambda x: block(block(x)))
    assert_same(jitted(X), X * 4)
    change(OPTIONS)
    assert_same(jitted(X), X * 4 if "doubled" in OPTIONS else X)


NAMES = {
    "asked for": (lambda x: x * 2 if "ABSENT" in globals() else x * 3, {"ABSENT": 1}),
    "shadows a builtin": (lambda x: x * abs(-2), {"abs": lambda value: 7}),
    "value": (lambda x: x * SCALE, {"SCALE": 4.0}),
}


@pytest.mark.parametrize("flipped", (False, True))
@pytest.mark.parametrize("case", NAMES)
def test_the_same_code_with_other_globals(case, flipped):
    fn, more = NAMES[case]
    blocks = [region(types.FunctionType(fn.__code__, fn.__globals__ | new)) for new in ({}, more)]
    first, second = reversed(blocks) if flipped else blocks
    jitted = jit(lambda x: second(first(x)))
    assert_same(jitted(X), second(first(X)))
    assert counts(jitted) == [(2, 0)]


def test_a_global_that_was_absent():
    names = dict(globals())
    block = region(types.FunctionType(NAMES["asked for"][0].__code__, names))

    def program(x):
        x = block(block(x))
        names["ABSENT"] = 1
        return block(x)

    jitted = jit(program)
    assert_same(jitted(X), X * 18)
    assert counts(jitted) == [(2, 1)]
