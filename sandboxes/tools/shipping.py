"""Collects the source text of a tool that is sent into the sandbox: the function and the definitions that it uses.

These are the functions, classes and constants of the tool's file, functions that it imports by name from its own
package, and what those use. Nothing else exists inside. Modules are imported in the body of the function that uses
them, so that opening a sandbox never waits for an import that no call needs.
"""

import ast
import functools
import inspect
import linecache
import symtable
import textwrap
from collections.abc import Callable
from typing import Any

PROVIDED = frozenset({"ToolError"})
"""Names that the runner defines inside the sandbox."""


def shipped_source(function: Callable[..., Any]) -> str:
    """Source that defines the function, its helpers first. TypeError, with the name, when one cannot be shipped."""
    text = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(text).body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise TypeError(f"{function.__name__} is not a plain function")
    code = function.__code__
    if code.co_freevars:
        raise TypeError(
            f"{function.__name__} uses {code.co_freevars[0]} of the enclosing function, which is not shipped"
        )
    # The source text and not ast.unparse, which may write f-strings that only the newest Python can read.
    undecorated = "".join(text.splitlines(keepends=True)[definition.lineno - 1 :])
    shipped = _Shipped()
    shipped.add(function.__name__, undecorated, code.co_filename, function.__globals__)
    # Annotations stay unevaluated: the names in them do not exist inside.
    return "\n".join(["from __future__ import annotations", *shipped.texts.values()])


class _Shipped:
    """The source text of definitions by name, each after those it uses."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._files: dict[str, str] = {}

    def add(self, name: str, text: str, file: str, names: dict[str, Any]) -> None:
        """Add a definition of a file, and before it those that it uses. `names` are the globals of the file."""
        if self._files.setdefault(name, file) != file:
            raise TypeError(f"{name} is defined in {self._files[name]} and in {file}: rename one")
        if name in self.texts:
            return
        # A placeholder, so that functions which call each other do not recurse for ever.
        self.texts[name] = ""
        for used in _names_of_module(text):
            self._follow(used, name, file, names)
        # Deleted and added again: it moves behind its helpers, since a constant needs them when it is defined.
        del self.texts[name]
        self.texts[name] = text

    def _follow(self, used: str, user: str, file: str, names: dict[str, Any]) -> None:
        definitions, imported = _top_level(file)
        if used in definitions:
            self.add(used, definitions[used], file, names)
        elif used in imported:
            value = names.get(used)
            # Only functions of our own package: constants and classes of other files are not followed.
            if not inspect.isfunction(value) or _package(value.__module__) != _package(names["__name__"]):
                raise TypeError(f"{user} uses {used}, which its file imports at the top: import it inside the function")
            origin = value.__code__.co_filename
            self.add(used, _top_level(origin)[0][used], origin, value.__globals__)


def _package(module: str) -> str:
    """The package of a module. For our own modules it is the folder below `replayground`: otherwise a tool could pull
    in any part of the project."""
    names = module.split(".")
    return ".".join(names[:2]) if names[0] == "replayground" else names[0]


@functools.cache
def _top_level(file: str) -> tuple[dict[str, str], frozenset[str]]:
    """The source text of each top-level definition of a file by name, and the names that the file imports."""
    lines = linecache.getlines(file)
    definitions: dict[str, str] = {}
    imported: set[str] = set()
    for node in ast.parse("".join(lines)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            definitions[node.name] = "".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            text = "".join(lines[node.lineno - 1 : node.end_lineno])
            definitions.update({target.id: text for target in targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
    return definitions, frozenset(imported) - PROVIDED


def _names_of_module(text: str) -> list[str]:
    """Names that a definition takes from its module, sorted. Names in annotations do not count."""
    bare = ast.fix_missing_locations(_WithoutAnnotations().visit(ast.parse(text)))
    found: set[str] = set()
    # symtable resolves scopes as the compiler does; a walk over the tree would take local names for global ones.
    tables = [symtable.symtable(ast.unparse(bare), "<tool>", "exec")]
    while tables:
        table = tables.pop()
        tables.extend(table.get_children())
        is_module = table.get_type() == "module"
        found.update(s.get_name() for s in table.get_symbols() if s.is_referenced() and (is_module or s.is_global()))
    return sorted(found)


class _WithoutAnnotations(ast.NodeTransformer):
    """Removes annotations, which are never evaluated inside."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return self.generic_visit(ast.Assign(targets=[node.target], value=node.value or ast.Constant(None)))
