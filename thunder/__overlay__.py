"""lightning-thunder's ``thunder``, with a ``thunder.jit`` whose callables lookasides may call with proxies."""

from functools import wraps

_installed_jit = jit


@wraps(_installed_jit)
def jit(fn, /, **options):
    from thunder.nested.jitted import make_reentrant

    return make_reentrant(_installed_jit(fn, **options))
