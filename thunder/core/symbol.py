"""lightning-thunder's ``thunder.core.symbol``, whose symbols leave no scope behind when they raise.

``Symbol.__call__`` pushes a scope for the subsymbols. A program that catches the exception of an operation, a shape
mismatch say, would go on in that scope, and end in ``IndexError: pop from empty list``.
"""

from thunder_overlay import execute_installed

execute_installed(globals())

_installed_call = Symbol.__call__


def _call(self, *args, **kwargs):
    trace = get_tracectx()
    if trace is None:
        return _installed_call(self, *args, **kwargs)
    depth = len(trace.scopes)
    try:
        return _installed_call(self, *args, **kwargs)
    except BaseException:
        del trace.scopes[depth:]
        raise


Symbol.__call__ = _call
