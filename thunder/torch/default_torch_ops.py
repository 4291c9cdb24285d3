"""The table of automatically registered torch operators, without the names that the installed torch lacks.

torch removed the named-tensor methods (``torch.Tensor.align_as``, ``align_to``, ``has_names``, ``refine_names``,
``rename``), and lightning-thunder's table names them, so that ``import thunder`` fails. An operator that torch does
not have cannot be called, and so needs no entry.
"""

import ast

import torch

from thunder_overlay import execute_installed


def _exists(name: ast.expr) -> bool:
    """Whether an attribute chain that begins with ``torch`` leads anywhere."""
    if isinstance(name, ast.Attribute):
        return _exists(name.value) and hasattr(eval(ast.unparse(name.value), {"torch": torch}), name.attr)
    return isinstance(name, ast.Name)


class _DropAbsentNames(ast.NodeTransformer):
    def visit_List(self, node: ast.List) -> ast.List:
        node.elts = [e for e in node.elts if not isinstance(e, ast.Attribute) or _exists(e)]
        return node


execute_installed(globals(), transform=_DropAbsentNames().visit)
