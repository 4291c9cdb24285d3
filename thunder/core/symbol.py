"""lightning-thunder's ``thunder.core.symbol``, whose symbols leave no scope behind when they raise; and faster.

``Symbol.__call__`` pushes a scope for the subsymbols. A program that catches the exception of an operation, a shape
mismatch say, would go on in that scope, and end in ``IndexError: pop from empty list``.

Each bound symbol is made, copied and asked for its tags by every pass. The installed ``normalize`` inspects the meta
function's signature each time, ``has_tags`` collects all tags of all subsymbols before it looks for one, copies are
flattened anew, and ``from_bsym_swap_proxies`` builds again also what holds no proxy to swap.
"""

import weakref

from thunder_overlay import execute_installed, with_other_functions

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


# the metas of operators that are made while tracing must not be kept alive
_signatures = weakref.WeakKeyDictionary()


def _signature(meta, installed=inspect.signature):
    key = type(meta) if isinstance(meta, Symbol) else meta  # equal symbols need not be the same one
    try:
        found = _signatures.get(key)
        if found is None:
            found = _signatures[key] = installed(meta)
    except TypeError:  # neither hashable nor weakly referable
        return installed(meta)
    return found


inspect = with_other_functions(inspect, signature=_signature)


def has_tags(bsym, tags):
    of_symbol = bsym.sym.tags
    if (of_symbol is not None and not tags.isdisjoint(of_symbol)) or not tags.isdisjoint(bsym.tags):
        return True
    return any(has_tags(sub, tags) for sub in bsym.subsymbols)


# NOTE [flattened once] A copy of a bound symbol mostly has the args, kwargs and output of the original, as they are.
# What they were flattened to is handed on with them, and not used if a pass has assigned others (``bsym.args = ...``).


def _flattened(self, memo, *trees):
    known = self.__dict__.get(memo)
    if known is None or any(a is not b for a, b in zip(known[0], trees)):
        flat = tree_flatten_with_dataclass(trees if len(trees) > 1 else trees[0])
        known = self.__dict__[memo] = (trees, flat)
    return known[1]


class _Cached:
    """``functools.cached_property`` without the lock that Python before 3.12 takes for each first access."""

    def __init__(self, get, name):
        self._get, self._name = get, name

    def __get__(self, bsym, owner=None):
        if bsym is None:
            return self
        value = bsym.__dict__[self._name] = self._get(bsym)
        return value


for _name, _property in tuple(vars(BoundSymbol).items()):
    if isinstance(_property, functools.cached_property):
        setattr(BoundSymbol, _name, _Cached(_property.func, _name))
BoundSymbol.flat_args_and_spec = _Cached(
    lambda self: _flattened(self, "_flat_inputs", self.args, self.kwargs), "flat_args_and_spec"
)
BoundSymbol.flat_outs_and_spec = _Cached(
    lambda self: _flattened(self, "_flat_output", self.output), "flat_outs_and_spec"
)

_installed_from_bsym = BoundSymbol.from_bsym
_installed_from_bsym_swap_proxies = BoundSymbol.from_bsym_swap_proxies


def _from_bsym(self, **changes):
    new = _installed_from_bsym(self, **changes)
    for memo in ("_flat_inputs", "_flat_output"):
        if memo in self.__dict__:
            new.__dict__[memo] = self.__dict__[memo]
    return new


def _is_swapped(flat, swap_map):
    return any(isinstance(x, Proxy) and (isinstance(x, CollectionProxy) or variableify(x) in swap_map) for x in flat)


def _from_bsym_swap_proxies(self, swap_map, skip_inputs=False, skip_output=False, skip_subsymbols=False):
    if len(swap_map) == 0:
        return self
    keeps_inputs = skip_inputs or not _is_swapped(self.flat_args, swap_map)
    keeps_output = skip_output or not _is_swapped(self.flat_outs, swap_map)
    new = _installed_from_bsym_swap_proxies(self, swap_map, keeps_inputs, keeps_output, skip_subsymbols=True)
    if not skip_subsymbols:
        new.subsymbols = [s.from_bsym_swap_proxies(swap_map, skip_inputs, skip_output) for s in self.subsymbols]
    return new


BoundSymbol.from_bsym = _from_bsym
BoundSymbol.from_bsym_swap_proxies = _from_bsym_swap_proxies
