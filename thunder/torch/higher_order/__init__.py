"""PyTorch's operators that take functions, under ``thunder.jit``: one module for each."""

import thunder.torch.higher_order.associative_scan  # noqa: F401
import thunder.torch.higher_order.autograd_function  # noqa: F401
import thunder.torch.higher_order.checkpoint  # noqa: F401
import thunder.torch.higher_order.cond  # noqa: F401
import thunder.torch.higher_order.func  # noqa: F401
import thunder.torch.higher_order.functional_call  # noqa: F401
import thunder.torch.higher_order.map  # noqa: F401
import thunder.torch.higher_order.named_members  # noqa: F401
import thunder.torch.higher_order.scan  # noqa: F401
import thunder.torch.higher_order.second_derivatives  # noqa: F401
import thunder.torch.higher_order.vmap  # noqa: F401
import thunder.torch.higher_order.while_loop  # noqa: F401
