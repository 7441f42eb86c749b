"""Digests of code that users write, so that a changed scorer cannot be mistaken for the old one.

A digest covers the source of a function or class, and of everything that it uses in its own module and in modules of
the same folder: functions, classes and the statements that bind constants, transitively. Of constants that cannot
change (numbers, texts, tuples), of captured variables and of settings it covers the value, too. Layout and comments do
not count, docstrings do. Of everything else (packages, replayground itself) only the name counts, so that an upgrade
changes no digest. Without source (a function made by exec) the bytecode counts, which differs between versions of Python.

Not covered: what code reads while it runs, such as a file, and lists and dicts that the module fills.
"""

import ast
import dataclasses
import dis
import hashlib
import linecache
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

_DIGITS = 12
_OURS = "replayground"
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
# Of no effect on what code does, or new in some version of Python.
_FIELDS_LEFT_OUT = frozenset({"kind", "type_comment", "type_ignores"})


def digest_of_function(function: FunctionType, settings: Mapping[str, Any]) -> str:
    """A digest of a function and its settings; the same in every process and on every machine."""
    used = _UsedCode(function.__globals__, function.__code__.co_filename)
    used.add_function(function, is_root=True)
    return used.digest(settings)


def digest_of_object(value: object) -> str:
    """A digest of an object: of the code of its class, and of its attributes."""
    cls = type(value)
    methods = [member for member in vars(cls).values() if isinstance(member, FunctionType)]
    first = methods[0] if methods else _no_method
    used = _UsedCode(first.__globals__, first.__code__.co_filename)
    used.add_class(cls)
    return used.digest(getattr(value, "__dict__", {}))


def _no_method() -> None: ...


class _UsedCode:
    """Everything that some code uses, as text by name. Filled by the add methods, each thing once."""

    def __init__(self, module_globals: dict[str, Any], filename: str) -> None:
        self._root = module_globals
        self._folder = Path(filename).parent
        self._texts: dict[str, str] = {}

    def digest(self, settings: Mapping[str, Any]) -> str:
        for name, value in settings.items():
            self._texts[f"setting {name}"] = self._value(value)
        # Sorted, so that the order in which code was found does not matter.
        lines = [f"{name} = {text}" for name, text in sorted(self._texts.items())]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]

    def add_function(self, function: FunctionType, *, is_root: bool = False) -> None:
        key = f"function {'' if is_root else function.__module__}.{function.__qualname__}"
        if key in self._texts:
            return
        node = _node_of(function)
        if node is None:
            self._texts[key] = self._code(function.__code__)
            names = _names_loaded(function.__code__)
        else:
            # Settings of its decorator are covered by their values.
            self._texts[key] = _canonical(_without_decorators(node) if is_root else node)
            names = _names_in(node)
        for name in sorted(names):
            self._add_global(function.__globals__, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._texts[f"{key} captures {name}"] = self._value(_content(cell))

    def add_class(self, cls: type) -> None:
        """The statement that defines a class, and the classes that it inherits from in the same folder."""
        methods = [member for member in vars(cls).values() if isinstance(member, FunctionType)]
        for method in methods:
            if self._is_own(method.__globals__) and cls.__name__ in method.__globals__:
                self._add_global(method.__globals__, cls.__name__)
                return
        # Defined inside a function, or without source: its methods are all there is.
        for method in methods:
            if self._is_own(method.__globals__):
                self.add_function(method)

    def _add_global(self, module_globals: dict[str, Any], name: str) -> None:
        if name not in module_globals:
            return  # a builtin, or a name that exists only while the code runs
        value = module_globals[name]
        module = "" if module_globals is self._root else module_globals.get("__name__", "")
        key = f"global {module}.{name}"
        if key in self._texts:
            return
        # Before its parts are looked at: code may use itself.
        self._texts[key] = ""
        statements = list(_statements_that_bind(_tree_of(_file_of(module_globals)), name))
        text = [_import_text(found, name) or _canonical(found) for found in statements]
        is_imported = any(isinstance(found, ast.Import | ast.ImportFrom) for found in statements)
        if is_imported or not statements:
            text.append(self._value_from_elsewhere(value))
        elif _is_plain(value):
            text.append(self._value(value))
        self._texts[key] = " ".join(text)
        for found in statements:
            for used in sorted(_names_in(found)):
                self._add_global(module_globals, used)

    def _value_from_elsewhere(self, value: Any) -> str:
        """What stands for a value that the module imports: its code if that is the job's, else its name."""
        if isinstance(value, ModuleType):
            if not self._is_own(vars(value)):
                return f"module {value.__name__}"
            return _canonical(_tree_of(_file_of(vars(value))))
        origin = getattr(value, "__globals__", None)
        if isinstance(value, type):
            self.add_class(value)
        elif isinstance(value, FunctionType) and isinstance(origin, dict) and self._is_own(origin):
            self.add_function(value)
        # A built-in scorer says when it scores otherwise.
        version = getattr(value, "code_version", "")
        return f"{self._value(value)} {version if isinstance(version, str) else ''}"

    def _value(self, value: Any) -> str:
        """A value as text, without addresses and with sets in order."""
        if isinstance(value, str):
            # A path below the job's folder, which another machine keeps elsewhere.
            return repr(value.replace(str(self._folder), "."))
        if value is None or isinstance(value, bool | int | float | complex | bytes):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, list | tuple):
            return f"{type(value).__name__} ({', '.join(map(self._value, value))})"
        if isinstance(value, set | frozenset):
            return f"set ({', '.join(sorted(map(self._value, value)))})"
        if isinstance(value, Mapping):
            return f"mapping ({', '.join(f'{self._value(key)}: {self._value(of)}' for key, of in value.items())})"
        if isinstance(value, CodeType):
            return self._code(value)
        return self._object(value)

    def _object(self, value: Any) -> str:
        if isinstance(value, type):
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, FunctionType):
            if self._is_own(value.__globals__):
                self.add_function(value)
            return f"function {value.__module__}.{value.__qualname__}"
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, msgspec.Struct):
            return f"{kind} {self._value({name: getattr(value, name) for name in value.__struct_fields__})}"
        if dataclasses.is_dataclass(value):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return f"{kind} {self._value(fields)}"
        return kind

    def _code(self, code: CodeType) -> str:
        return f"code {code.co_code.hex()} {code.co_names} {self._value(code.co_consts)}"

    def _is_own(self, module_globals: dict[str, Any]) -> bool:
        """Whether this module is the job's: that of the code itself, or one in the same folder."""
        if module_globals is self._root:
            return True
        names = (self._root.get("__name__", ""), module_globals.get("__name__", ""))
        file = _file_of(module_globals)
        return not any(name.partition(".")[0] == _OURS for name in names) and Path(file).parent == self._folder


def _is_plain(value: object) -> bool:
    """Whether a value is data that cannot change: what the module fills later would give another digest each time."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _file_of(module_globals: dict[str, Any]) -> str:
    return str(module_globals.get("__file__") or "")


def _tree_of(filename: str) -> ast.Module:
    """The parsed source of a file; an empty module when it cannot be had."""
    # The file may have been edited since another function of it was looked at.
    linecache.checkcache(filename)
    return _parsed("".join(linecache.getlines(filename)))


@lru_cache(maxsize=64)
def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


type _FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _node_of(function: FunctionType) -> _FunctionNode | None:
    """The part of the source that defines a function; None without source."""
    code = function.__code__
    for node in ast.walk(_tree_of(code.co_filename)):
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>" and node.lineno == code.co_firstlineno:
            return node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
            return node
    return None


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    # A function begins with its first decorator.
    return min([node.lineno, *(found.lineno for found in node.decorator_list)])


def _without_decorators(node: _FunctionNode) -> ast.AST:
    fields = {name: value for name, value in ast.iter_fields(node) if name != "decorator_list"}
    return type(node)(**fields, decorator_list=[]) if not isinstance(node, ast.Lambda) else node


def _statements_that_bind(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    for statement in tree.body:
        if name in _names_bound(statement):
            yield statement


def _names_bound(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module binds, also inside of `if`, `for`, `with` and `try`."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    inner = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt | ast.ExceptHandler)]
    bound = {found.id for found in ast.walk(statement) if isinstance(found, ast.Name) and _is_stored(found)}
    return bound.union(*(_names_bound(child) for child in inner if isinstance(child, ast.stmt)))


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _import_text(statement: ast.stmt, name: str) -> str | None:
    """An import as text, without the other names that the same line imports; None for other statements."""
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return None
    origin = f"from {'.' * statement.level}{statement.module}" if isinstance(statement, ast.ImportFrom) else ""
    found = [alias.name for alias in statement.names if (alias.asname or alias.name.partition(".")[0]) == name]
    return f"{origin} import {', '.join(found)}"


def _names_in(node: ast.AST) -> set[str]:
    """Names that code looks up in its module."""
    # Compiled, since the compiler knows which names are local.
    body: ast.stmt = ast.Expr(node) if isinstance(node, ast.expr) else node  # type: ignore[assignment]
    module = ast.fix_missing_locations(ast.Module(body=[body], type_ignores=[]))
    try:
        return _names_loaded(compile(module, "<digest>", "exec"))
    except (SyntaxError, ValueError):  # such as `nonlocal` in an inner function
        return {found.id for found in ast.walk(node) if isinstance(found, ast.Name)}


def _names_loaded(code: CodeType) -> set[str]:
    names = {found.argval for found in dis.get_instructions(code) if found.opname in _GLOBAL_LOADS}
    return names.union(*(_names_loaded(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _canonical(node: Any) -> str:
    """Source as text that does not depend on its layout, nor on which version of Python parsed it."""
    # Not ast.dump, whose output differs between versions.
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _FIELDS_LEFT_OUT]
        shown = [f"{name}={_canonical(value)}" for name, value in fields if value is not None and value != []]
        return f"{type(node).__name__}({', '.join(shown)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_canonical, node))}]"
    return repr(node)
