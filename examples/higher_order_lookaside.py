"""A higher-order lookaside: a function that gets a function, compiled by lightning-thunder.

    python examples/higher_order_lookaside.py

Prints the inner and the outer traces, the result beside eager PyTorch's, and the difference of the gradients.
"""

import torch

import thunder
import thunder.nested


def my_call(fn, *args, **kwargs):
    """What PyTorch runs: it calls the function."""
    return fn(*args, **kwargs)


inner = []  # kept only to be printed below


@thunder.nested.lookaside(my_call)
def _my_call(fn, *args, **kwargs):
    """What thunder traces instead: the function's own program, with its inputs, replayed into the outer trace."""
    inner.append(thunder.nested.trace(fn, *args, **kwargs))
    return inner[-1].inline()


class Model(torch.nn.Module):
    """Its forward passes a closure to ``my_call`` that reads a parameter and an intermediate value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cos(x)
        return my_call(lambda a: torch.sin(self.linear(a)) * y, x)


def main() -> None:
    """Compiles the model, and compares it with eager PyTorch."""
    torch.manual_seed(0)
    model = Model()
    jitted = thunder.jit(model)
    x = torch.randn(3, 4, requires_grad=True)

    result = jitted(x)
    (nested,) = inner
    print("# The inner prologue: what the closure read\n")
    print(nested.results.prologue_trace)
    print("\n# The inner computation\n")
    print(nested.computation_trace)
    print("\n# Its inputs, and the values of the enclosing level that they stand for\n")
    for i in nested.inputs:
        print(f"{i.proxy.name:<25} {i.name:<25} {i.value.name}")
    print("\n# The outer computation: the closure's operations are in it\n")
    print(thunder.last_traces(jitted)[0])

    expected = model(x)
    print("\n# Results\n")
    print("thunder:", result.detach()[0].tolist())
    print("eager:  ", expected.detach()[0].tolist())
    inputs = (x, *model.parameters())
    gradients = torch.autograd.grad(result.sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.sum(), inputs)
    difference = max((g - e).abs().max().item() for g, e in zip(gradients, expected_gradients))
    print("largest difference of the results:  ", (result - expected).abs().max().item())
    print("largest difference of the gradients:", difference)


if __name__ == "__main__":
    main()
