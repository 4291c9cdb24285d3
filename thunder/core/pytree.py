"""lightning-thunder's ``thunder.core.pytree``, faster on what is flattened all the time.

Every pass flattens the arguments and outputs of every bound symbol, several times. The installed ``tree_flatten`` makes
a set of thirty types for each call, and ``tree_flatten_with_dataclass`` copies the tree to look for dataclasses that
are not registered yet.
"""

from thunder_overlay import execute_installed

execute_installed(globals())

_installed_tree_flatten = tree_flatten
_installed_tree_flatten_with_dataclass = tree_flatten_with_dataclass
_COMMON = frozenset((tuple, list, dict, type(None), int, float, bool, str))  # of those that the installed one takes
_leaf_types = set(_COMMON)  # of which no instance is a dataclass, or all are registered


def tree_flatten(args, namespace=OPTREE_NAMESPACE):
    if type(args) in _COMMON or isinstance(args, ProxyInterface):
        return optree.tree_flatten(args, none_is_leaf=True, namespace=namespace)
    return _installed_tree_flatten(args, namespace)


def tree_flatten_with_dataclass(tree):
    flat, spec = tree_flatten(tree)
    if _leaf_types.issuperset(map(type, flat)):
        return flat, spec
    if any(map(_maybe_register_dataclass, flat)):
        return _installed_tree_flatten_with_dataclass(tree)
    _leaf_types.update(map(type, flat))
    return flat, spec
