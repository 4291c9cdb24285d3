"""lightning-thunder's ``thunder``, with a ``thunder.jit`` that may be used, and called, inside compiled code."""

from functools import wraps

from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder

from thunder.core.jit_ext import register_general_jit_lookaside
from thunder.nested.jitted import jit_lookaside, make_reentrant
from thunder.nested.regions import region_lookaside

_installed_jit = jit


@wraps(_installed_jit)
def jit(fn, /, **options):
    return make_reentrant(_installed_jit(fn, **options), options)


register_general_jit_lookaside(jit)(jit_lookaside)
register_general_jit_lookaside(invoke_subgraph_placeholder)(region_lookaside)

import thunder.torch.higher_order  # noqa: F401, E402
