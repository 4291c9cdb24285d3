"""``autograd_function_apply``, the operator that TorchDynamo makes of a ``torch.autograd.Function``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from autograd_functions import IN_PLACE_PROGRAMS, PROGRAMS, tensor
from nested_helpers import check, inlined, jit, plain_call

from thunder.torch.higher_order.gradient_rule import AutogradFunctionError


def captured(program: Callable, inputs: tuple) -> torch.fx.GraphModule:
    """The graph that TorchDynamo makes of the program."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(program, backend=backend, fullgraph=True)(*inputs)
    return graphs[0]


CAPTURED = (
    *("ctx", "input", "setup", "setup keywords", "two results", "partly used", "identity", "identity returned"),
    *("inner", "kinds of results", "unmaterialized", "needs", "local in-place", "enable_grad", "broadcast"),
    *("in sequence", "dirty gets a history"),
)


@pytest.mark.parametrize("call", (plain_call, inlined), ids=lambda c: c.__name__)
@pytest.mark.parametrize("name", CAPTURED)
def test_operator_of_dynamo(name, call):
    x, y = tensor(4), tensor(4, seed=1)
    graph = captured((PROGRAMS | IN_PLACE_PROGRAMS)[name], (x, y))
    assert "autograd_function_apply" in graph.code
    inputs = tuple(x if "_x_" in node.target else y for node in graph.graph.find_nodes(op="placeholder"))
    check(lambda call: lambda *inputs: call(graph, *inputs), inputs, call)


def test_operator_of_older_dynamo():
    """Which gave ``ctx`` to both functions, and counted the arguments that have a gradient."""

    def forward(ctx, x, y, captured):
        return (x * y + captured, x > 0), (x, y)

    def backward(ctx, grad, mask, x, y):
        return grad * y * 2, grad * x * 3

    def program(x, y, captured):
        result, mask = torch.ops.higher_order.autograd_function_apply(
            forward, backward, x, y, captured, args_tensor_mask=[True, True], non_differentiable_idx=[1]
        )
        return result * mask

    x, y, captured = inputs = tensor(4), tensor(4, seed=1), tensor(4, seed=2)
    result = jit(program)(*inputs)
    torch.testing.assert_close(result, (x * y + captured) * (x > 0))
    result.sum().backward()
    grad = (x.detach() > 0).float()
    torch.testing.assert_close([x.grad, y.grad], [grad * y * 2, grad * x * 3])
    assert captured.grad is None


def test_operator_of_dynamo_names_its_function():
    def forward(x):
        x.mul_(2)
        return x * 2, ()

    def program(x):
        return torch.ops.higher_order.autograd_function_apply(
            forward, lambda grad: grad, x * 1, non_differentiable_idx=[], saved_for_backward_idx=[]
        )

    with pytest.raises(AutogradFunctionError, match=r"forward` \(.*test_autograd_function_apply.py:"):
        jit(program)(tensor(4))
