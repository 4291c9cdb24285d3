"""Random PyTorch programs with nesting, captures, effects, control flow and exceptions, and their comparison.

A program is Python source. Its nested functions are called by ``call``, and its operations by ``cut``. It runs four
ways: eager; compiled with both being plain calls (stock thunder inlines them); compiled with ``call`` nested; and
compiled with both nested, so that the program is nested at every possible cut. All must agree in values, gradients,
effects, the state of the random number generator, and exceptions.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from nested_helpers import assert_same, inlined, plain_call

import thunder

UNARY = ("torch.sin", "torch.tanh", "torch.exp", "torch.neg", "torch.relu", "torch.Tensor.t")
BINARY = ("torch.add", "torch.mul", "torch.sub", "torch.maximum", "torch.matmul")
MAX_DEPTH = 4


class ProgramError(Exception):
    """What random programs raise."""


class Counter(torch.nn.Module):
    """A module with parameters, a buffer that its forward changes, and attributes that it reads."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(4))
        self.scale = 0.5
        self.absent = None

    def forward(self, x):
        self.total.add_(
            1
        )  # in place: to a buffer that is set, stock thunder gives the gradient of all that is computed
        y = torch.tanh(self.linear(x)) * self.scale + self.total
        return y if self.absent is None else y * self.absent


class Box:
    """An object whose attributes programs set."""

    @property
    def half(self):
        return self._half * 2

    @half.setter
    def half(self, value):
        self._half = value * 0.5


class Program(torch.nn.Module):
    """A random program as a module: its state is that of a submodule."""

    def __init__(self, source: str, call: Any, cut: Any):
        super().__init__()
        self.counter = Counter()
        namespace = {"torch": torch, "Box": Box, "ProgramError": ProgramError, "LIMIT": 3}
        exec(compile(source, "<random program>", "exec"), namespace)
        self.program, self.call, self.cut = namespace["program"], call, cut

    def forward(self, x, w):
        return self.program(self.call, self.cut, self.counter, x, w)


@dataclasses.dataclass
class Scope:
    """What the statements of one function body may use: tensors that are readable, and the nesting depth.

    In a guarded one, functions may raise: the exception is caught further out.
    """

    depth: int
    tensors: list[str]
    names: list[int]
    guarded: bool = False

    def fresh(self, prefix: str) -> str:
        self.names[0] += 1
        return f"{prefix}{self.names[0]}"

    def inner(self, argument: str) -> Scope:
        return Scope(self.depth + 1, [*self.tensors, argument], self.names, self.guarded)


@st.composite
def programs(draw: Any) -> str:
    """The source of a function ``program(call, cut, counter, x, w)``."""
    scope = Scope(0, ["x", "w"], [0])
    body = draw(st.sampled_from((_function, _function, _try)))(draw, scope)
    body += _block(draw, scope, draw(st.integers(0, 3)))
    body.append(
        f"return {scope.tensors[-1]}, acc, list(seen), box.value, box.inner.value, box.half, hasattr(box, 'count'), "
        "sorted(table), table['k']"
    )
    setup = ["seen = [x * 2]", "acc = x * 0", "table = {'k': x * 3}", "box = Box()", "box.inner = Box()"]
    setup += ["box.value = w * 1", "box.inner.value = x * 1", "box.half = w"]
    return "def program(call, cut, counter, x, w):\n" + textwrap.indent("\n".join(setup + body), "    ")


def _block(draw: Any, scope: Scope, length: int) -> list[str]:
    lines: list[str] = []
    for _ in range(length):
        lines += _statement(draw, scope)
    return lines


def _statement(draw: Any, scope: Scope) -> list[str]:
    kinds = ["operation", "operation", "effect", "effect", "read", "read", "if", "for", "random", "no_grad", "module"]
    if scope.depth < MAX_DEPTH:
        kinds += ["function"] * 5 + ["try"] * 2 + ["raising function"] * scope.guarded
    return _STATEMENTS[draw(st.sampled_from(kinds))](draw, scope)


def _tensor(draw: Any, scope: Scope) -> str:
    return draw(st.sampled_from(scope.tensors))


def _operation(draw: Any, scope: Scope) -> list[str]:
    new = scope.fresh("v")
    if draw(st.booleans()):
        line = f"{new} = cut({draw(st.sampled_from(UNARY))}, {_tensor(draw, scope)})"
    else:
        line = f"{new} = cut({draw(st.sampled_from(BINARY))}, {_tensor(draw, scope)}, {_tensor(draw, scope)})"
    scope.tensors.append(new)
    # bounded, so that no program overflows
    return [line, f"{new} = torch.tanh({new})"]


def _effect(draw: Any, scope: Scope) -> list[str]:
    t = _tensor(draw, scope)
    lines = {
        "append": f"seen.append({t})",
        "item": f"seen[0] = seen[0] + {t}",
        "dict": f"table['k'] = {t}; table[{draw(st.sampled_from('abc'))!r}] = len(seen)",
        "attribute": f"box.value = box.value + {t}",
        "property": f"box.half = {t}",
        "inner attribute": f"box.inner.value = torch.tanh(box.inner.value + {t})",
        "new attribute": "box.count = box.count + 1 if hasattr(box, 'count') else len(seen)",
        "buffer": f"counter.total.add_({t}.detach().mean(0))",
        "pop": "len(seen) > 1 and seen.pop()",
    }
    if scope.depth:
        lines["nonlocal"] = lines["nonlocal again"] = f"acc = acc + {t}"
    if scope.tensors[-1].startswith("v"):
        local = f"{scope.fresh('v')}"
        lines["in place"] = f"{local} = {t} * 1; {local}.mul_(0.5).add_({t})"
    return [lines[draw(st.sampled_from(sorted(lines)))]]


def _read(draw: Any, scope: Scope) -> list[str]:
    new = scope.fresh("v")
    places = ("box.value", "getattr(box, 'value')", "box.inner.value", "seen[0]", "seen[-1]", "table['k']", "acc")
    scope.tensors.append(new)
    return [f"{new} = torch.tanh({draw(st.sampled_from(places))})"]


def _for(draw: Any, scope: Scope) -> list[str]:
    return [f"for _ in range(min(len(seen), {draw(st.integers(1, 3))})):", *_indent(_effect(draw, scope))]


def _if(draw: Any, scope: Scope) -> list[str]:
    conditions = (
        "x.shape[0] > LIMIT",
        "len(seen) > 2",
        "'a' in table",
        "counter.absent is None",
        "hasattr(box, 'count')",
    )
    condition = draw(st.sampled_from(conditions))
    lengths = [len(scope.tensors)]
    then = _operation(draw, scope)
    del scope.tensors[lengths[0] :]
    return [f"if {condition}:", *_indent([*then, *_effect(draw, scope)]), "else:", *_indent(_effect(draw, scope))]


def _random(draw: Any, scope: Scope) -> list[str]:
    new = scope.fresh("v")
    line = f"{new} = {_tensor(draw, scope)} * torch.rand(4, 4)"
    scope.tensors.append(new)
    return [line]


def _no_grad(draw: Any, scope: Scope) -> list[str]:
    if scope.depth < MAX_DEPTH and draw(st.booleans()):
        return ["with torch.no_grad():", *_indent(_function(draw, scope))]
    new = scope.fresh("v")
    t = _tensor(draw, scope)
    scope.tensors.append(new)
    return ["with torch.no_grad():", f"    {new} = cut(torch.sin, {t})"]


def _module(draw: Any, scope: Scope) -> list[str]:
    new = scope.fresh("v")
    target = draw(st.sampled_from(("counter", "counter.linear", "counter.forward")))
    line = f"{new} = torch.tanh(call({target}, {_tensor(draw, scope)}))"
    scope.tensors.append(new)
    return [line]


def _function(draw: Any, scope: Scope, raises: bool = False) -> list[str]:
    fn, argument, new = scope.fresh("f"), scope.fresh("a"), scope.fresh("v")
    inner = scope.inner(argument)
    default = draw(st.sampled_from(("", f", d={_tensor(draw, scope)}", ", *, k=2", ", o=box")))
    body = _block(draw, inner, draw(st.integers(1, 2)))
    if "o=" in default:
        body.append(f"o.value = torch.tanh(o.value + {_tensor(draw, inner)})")
    if raises:
        condition = draw(st.sampled_from(("", "if len(seen) > 1: ", "if hasattr(box, 'count'): ")))
        body.append(f"{condition}raise ProgramError({fn!r}, len(seen))")
    result = inner.tensors[-1] + (" * d" if "d=" in default else " * k" if "k=" in default else "")
    body.append(f"return torch.tanh({result})")
    definition = [f"def {fn}({argument}{default}):", *_indent([*(["nonlocal acc"] if _uses_acc(body) else []), *body])]
    call = f"{new} = call({fn}, {_tensor(draw, scope)}{', k=3' if 'k=' in default else ''})"
    scope.tensors.append(new)
    return [*definition, call]


def _raising_function(draw: Any, scope: Scope) -> list[str]:
    return _function(draw, scope, raises=True)


def _uses_acc(body: list[str]) -> bool:
    return any("acc = " in line for line in body)


def _try(draw: Any, scope: Scope) -> list[str]:
    length = len(scope.tensors)
    raises = draw(st.booleans())
    inside = dataclasses.replace(scope, guarded=True)
    guarded = _function(draw, inside, raises)
    result = scope.tensors[-1]
    del scope.tensors[length:]
    fallback = _tensor(draw, scope)
    scope.tensors.append(result)
    return [
        "try:",
        *_indent(guarded),
        "except ProgramError as error:",
        f"    {result} = {fallback} * error.args[1]",
        "finally:",
        *_indent(_effect(draw, scope)),
    ]


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for text in lines for line in text.split("\n")]


_STATEMENTS = {
    "operation": _operation,
    "effect": _effect,
    "read": _read,
    "if": _if,
    "for": _for,
    "random": _random,
    "no_grad": _no_grad,
    "module": _module,
    "function": _function,
    "raising function": _raising_function,
    "try": _try,
}


def run(source: str, call: Any, cut: Any, compiled: bool) -> tuple:
    """Everything that can be observed of two calls of a program."""
    module = Program(source, call, cut)
    run = thunder.jit(module) if compiled else module
    observed = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x, w = (torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2))
        torch.manual_seed(seed)
        result = run(x, w)
        loss = sum(t.sum() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        loss.backward()
        values = torch.utils._pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, result)
        gradients = [x.grad, w.grad, *(p.grad for p in module.parameters())]
        gradients = [torch.zeros(()) if g is None else g.clone() for g in gradients]
        buffers = {name: value.detach() for name, value in run.named_buffers()}
        observed.append((values, gradients, buffers, torch.get_rng_state()))
    return tuple(observed)


def compare(source: str) -> str:
    """Runs a program the four ways.

    Returns:
        ``agreed``, or ``stock differs`` where stock thunder does not agree with eager PyTorch, or cannot compile the
        program; the nested programs are then compared with the inlined one alone, or not at all.

    Raises:
        AssertionError: a nested program differs from the inlined one.
    """
    eager = run(source, plain_call, plain_call, compiled=False)
    try:
        reference = run(source, plain_call, plain_call, compiled=True)
    except Exception as error:
        return f"stock fails: {type(error).__name__}: {str(error)[:100]}"
    outcome = "agreed"
    try:
        assert_same(reference, eager)
    except AssertionError:
        outcome = "stock differs"
    for cut in (plain_call, inlined):
        assert_same(run(source, inlined, cut, compiled=True), reference)
    return outcome


def sample(count: int, seed: int) -> list[str]:
    """``count`` different programs, always the same for the same seed."""
    found: dict[str, None] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=4 * count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def collect(source: str) -> None:
        found.setdefault(source)

    collect()
    return list(found)[:count]
