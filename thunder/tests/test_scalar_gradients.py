"""Gradients of CPU tensors without dimensions, which thunder does not broadcast (``thunder/core/transforms.py``)."""

from __future__ import annotations

import pytest
import torch

import thunder

OPERATIONS = {
    "mul": lambda a, s: a * s,
    "reflected mul": lambda a, s: s * a,
    "add": lambda a, s: a + s,
    "sub": lambda a, s: s - a,
    "div": lambda a, s: a / s,
    "reflected div": lambda a, s: s / a,
    "pow": lambda a, s: a**s,
    "reflected pow": lambda a, s: s**a,
    "maximum": torch.maximum,
    "where": lambda a, s: torch.where(a > 0.5, a, s),
    "addcmul": lambda a, s: torch.addcmul(a, a, s),
    "clamp": torch.clamp,
    "masked_fill": lambda a, s: a.masked_fill(a > 0.5, s),
    "float64": lambda a, s: a * s.double(),
    "two dimensions": lambda a, s: a.reshape(2, 2) * s,
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_gradient_is_summed(operation):
    def program(x, y):
        return operation(x.abs() + 0.1, y.abs().sum() * 0.5)

    found = []
    for fn in (thunder.jit(program), program):
        # the sizes agree, so that a gradient that is not summed fits
        x, y = (torch.linspace(-1.0, high, 4).requires_grad_() for high in (2.0, 1.0))
        out = fn(x, y)
        (out * torch.arange(1.0, 5).reshape(out.shape)).sum().backward()
        found.append((out, x.grad, y.grad))
    torch.testing.assert_close(*found)
