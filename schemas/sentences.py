"""The strings under the fields of a class: schemas and the reference documentation are generated from them."""

import ast
import inspect
import sys
from functools import cache


def sentences(described: type) -> dict[str, str]:
    """Field name -> the string under it, for the fields that `described` itself declares and that have one."""
    return _of_module(described.__module__).get(described.__name__, {})


@cache
def _of_module(module: str) -> dict[str, dict[str, str]]:
    # Python discards a string that stands alone, so it is read from the source.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _of_class(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, following in zip(node.body, node.body[1:], strict=False):
        # A string belongs to the annotated field directly before it.
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(following, ast.Expr):
            found[field.target.id] = ast.literal_eval(following.value)
    return found
