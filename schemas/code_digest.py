"""Digests of code that users write, so that a changed scorer cannot be mistaken for the old one.

A digest covers the source of a function or class, and of everything that it uses in its own module and in modules of
the same folder: functions, classes and the statements that bind or fill constants, transitively. Of constants that
cannot change (numbers, texts, tuples), of captured variables, defaults and settings it covers the value, too: objects by
their class and their state. What a function imports while it runs counts as a whole file. Layout and comments do not
count, docstrings do. Of everything else (packages, replayground itself) only the name counts, so that an upgrade changes
no digest. Without source (a function made by exec) the bytecode counts, which differs between versions of Python.

Not covered: what code reads while it runs, such as a file, lists and dicts that functions fill, and the state of objects
that cannot be pickled, such as a connection.
"""

import ast
import copyreg
import dataclasses
import dis
import hashlib
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path, PurePath
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import msgspec

_DIGITS = 12
_OURS = "replayground"
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
# Of no effect on what code does, or new in some version of Python.
_FIELDS_LEFT_OUT = frozenset({"kind", "type_comment", "type_ignores"})


def digest_of_function(function: Callable[..., Any], settings: Mapping[str, Any]) -> str:
    """A digest of a function, of what it is wrapped in by decorators, and of its settings; the same in every process and
    on every machine."""
    *wrappers, innermost = _unwrapped(function)
    assert isinstance(innermost, FunctionType), "a function is what decorators wrap"
    used = _UsedCode(innermost.__globals__, innermost.__code__.co_filename)
    used.add_function(innermost, is_root=True)
    for number, wrapper in enumerate(wrappers):
        used.add_wrapper(number, wrapper)
    return used.digest(settings)


def digest_of_object(value: object) -> str:
    """A digest of an object: of the code of its class, and of its attributes."""
    cls = type(value)
    used = _UsedCode(*_home_of(cls, value))
    used.add_class(cls)
    return used.digest(_attributes_of(value))


def digest_of_class(cls: type) -> str:
    """A digest of the code of a class, and of those in the same folder that it inherits from."""
    used = _UsedCode(*_home_of(cls, cls))
    used.add_class(cls)
    return used.digest({})


def _unwrapped(function: object) -> list[object]:
    """A function and those that it wraps, by functools.wraps, the innermost last."""
    chain = [function]
    while (inner := getattr(chain[-1], "__wrapped__", None)) is not None and inner not in chain:
        chain.append(inner)
    return chain


def _home_of(cls: type, value: object) -> tuple[dict[str, Any], str]:
    """The module whose code a class is, and its file."""
    methods = [member for member in vars(cls).values() if isinstance(member, FunctionType)]
    if methods:
        return methods[0].__globals__, methods[0].__code__.co_filename
    module = sys.modules.get(cls.__module__)
    if module is not None and cls.__module__.partition(".")[0] not in sys.stdlib_module_names:
        return vars(module), _file_of(vars(module))
    # Such as a SimpleNamespace: its function is all that is the user's.
    score = getattr(value, "score", None)
    function = _unwrapped(getattr(score, "__func__", score))[-1]
    first = function if isinstance(function, FunctionType) else _no_method
    return first.__globals__, first.__code__.co_filename


def _no_method() -> None: ...


def _attributes_of(value: object) -> dict[str, Any]:
    """Attributes by name, also of objects that have no __dict__."""
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls)]
    named = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return named | getattr(value, "__dict__", {})


def _slots_of(cls: type) -> tuple[str, ...]:
    if issubclass(cls, msgspec.Struct):
        return cls.__struct_fields__
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


class _UsedCode:
    """Everything that some code uses, as text by name. Filled by the add methods, each thing once."""

    def __init__(self, module_globals: dict[str, Any], filename: str) -> None:
        self._root = module_globals
        self._folder = Path(filename).parent
        self._texts: dict[str, str] = {}
        self._functions: dict[FunctionType, str] = {}
        "the key of each: two of one name, such as lambdas, have two"
        self._classes: set[type] = set()
        self._objects: dict[int, tuple[object, str]] = {}
        "texts of objects by id, kept so that no id is used twice"

    def digest(self, settings: Mapping[str, Any]) -> str:
        for name, value in settings.items():
            self._texts[f"setting {name}"] = self._value(value)
        # Sorted, so that the order in which code was found does not matter.
        lines = [f"{name} = {text}" for name, text in sorted(self._texts.items())]
        return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]

    def add_function(self, function: FunctionType, *, is_root: bool = False) -> str:
        """Returns the name by which other texts refer to it."""
        if function in self._functions:
            return self._functions[function]
        key = self._free_key(f"function {'' if is_root else function.__module__}.{function.__qualname__}")
        self._functions[function] = key
        node = _node_of(function)
        if node is None:
            self._texts[key] = self._code(function.__code__)
            names = _names_loaded(function.__code__)
        else:
            # Settings of its decorator are covered by their values, and others wrap it (add_wrapper).
            self._texts[key] = _canonical(_without_decorators(node) if is_root else node)
            names = _names_in(node)
            self._add_imports(node)
        for name in sorted(names):
            self._add_global(function.__globals__, name)
        self._add_bound_values(key, function)
        return key

    def add_wrapper(self, number: int, wrapper: object) -> None:
        """What a decorator put around the function: its code if that is the job's, and what it captured."""
        if not isinstance(wrapper, FunctionType):
            self._texts[f"wrapper {number}"] = f"{type(wrapper).__module__}.{type(wrapper).__qualname__}"
        elif self._is_own(wrapper.__globals__):
            self._texts[f"wrapper {number}"] = self.add_function(wrapper)
        else:
            self._texts[f"wrapper {number}"] = f"function {wrapper.__module__}.{wrapper.__qualname__}"
            self._add_bound_values(f"wrapper {number}", wrapper)

    def _add_bound_values(self, key: str, function: FunctionType) -> None:
        """The values that a function has captured, and those of its parameters."""
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._texts[f"{key} captures {name}"] = self._value(_content(cell))
        if function.__defaults__ or function.__kwdefaults__:
            self._texts[f"{key} defaults"] = self._value([function.__defaults__, function.__kwdefaults__])

    def _free_key(self, name: str) -> str:
        number = 1
        while (key := name if number == 1 else f"{name} {number}") in self._texts:
            number += 1
        # Taken now: what it uses may have the same name.
        self._texts[key] = ""
        return key

    def add_class(self, cls: type) -> None:
        """The statement that defines a class, and the classes that it inherits from in the same folder."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        module_globals, _ = _home_of(cls, cls)
        if self._is_own(module_globals):
            if module_globals.get(cls.__name__) is cls:
                self._add_global(module_globals, cls.__name__)
            else:
                self._add_local_class(cls)
        for base in cls.__bases__:
            self.add_class(base)

    def _add_local_class(self, cls: type) -> None:
        """A class that was made inside of a function: its members are all there is."""
        for name, member in vars(cls).items():
            part = _parts_of_member(member)
            # What Python itself keeps in a class: some of it comes and goes.
            is_internal = name.startswith("__") and not isinstance(part, FunctionType)
            if not is_internal and not isinstance(part, MemberDescriptorType | GetSetDescriptorType):
                self._texts[f"class {cls.__qualname__}.{name}"] = self._value(part)

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
            if not isinstance(found, ast.Import | ast.ImportFrom):
                self._add_imports(found)
            for used in sorted(_names_in(found)):
                self._add_global(module_globals, used)

    def _add_imports(self, node: ast.AST) -> None:
        """The files beside this one that code imports while it runs, whole: what it uses of them is not known before."""
        # A package that is upgraded must change nothing, nor must replayground itself.
        if str(self._root.get("__name__", "")).partition(".")[0] == _OURS:
            return
        for name in sorted(_modules_imported(node)):
            path = self._folder / f"{name}.py"
            if f"file {path.name}" not in self._texts and path.is_file():
                tree = _tree_of(str(path))
                self._texts[f"file {path.name}"] = _canonical(tree)
                self._add_imports(tree)

    def _value_from_elsewhere(self, value: Any) -> str:
        """What stands for a value that the module imports: its code if that is the job's, else its name."""
        if isinstance(value, ModuleType):
            if not self._is_own(vars(value)):
                return f"module {value.__name__}"
            tree = _tree_of(_file_of(vars(value)))
            self._add_imports(tree)
            return _canonical(tree)
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
        if isinstance(value, type):
            self.add_class(value)
            return f"class {value.__module__}.{value.__qualname__}"
        if isinstance(value, FunctionType):
            named = f"function {value.__module__}.{value.__qualname__}"
            return self.add_function(value) if self._is_own(value.__globals__) else named
        return self._object(value)

    def _object(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if id(value) in self._objects:
            return self._objects[id(value)][1]
        # Before its parts are looked at: it may hold itself.
        self._objects[id(value)] = (value, kind)
        self.add_class(type(value))
        try:
            text = f"{kind} {self._state(value)}".rstrip()
        except RecursionError:
            text = kind
        self._objects[id(value)] = (value, text)
        return text

    def _state(self, value: Any) -> str:
        """What an object holds, as text; empty when that is not known."""
        if isinstance(value, MethodType):
            return f"{self._value(value.__func__)} of {self._value(value.__self__)}"
        if isinstance(inner := inspect.getattr_static(value, "__wrapped__", None), FunctionType):
            return self._value(inner)
        if isinstance(value, msgspec.Struct):
            return self._value({name: getattr(value, name) for name in value.__struct_fields__})
        if dataclasses.is_dataclass(value):
            return self._value({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, PurePath):
            return self._value(str(value))
        reduced = copyreg.dispatch_table.get(type(value))
        try:
            parts = value.__reduce_ex__(2) if reduced is None else reduced(value)
        except Exception:  # a lock, a connection, or whatever else a user's class raises
            return ""
        if isinstance(parts, str):
            return parts
        # Function and arguments that make it, its state, and the entries of a list or dict.
        made, entries = parts[:3], [list(part) for part in parts[3:5] if part is not None]
        return self._value([*made, *entries])

    def _code(self, code: CodeType) -> str:
        return f"code {code.co_code.hex()} {code.co_names} {self._value(code.co_consts)}"

    def _is_own(self, module_globals: dict[str, Any]) -> bool:
        """Whether this module is the job's: that of the code itself, or one in the same folder."""
        if module_globals is self._root:
            return True
        names = (self._root.get("__name__", ""), module_globals.get("__name__", ""))
        if any(name.partition(".")[0] == _OURS for name in names):
            return False
        file = Path(_file_of(module_globals))
        # Or a copy of one there: a replay keeps the files of a scorer in a folder of its own.
        return file.parent == self._folder or _are_equal(file, self._folder / file.name)


def _are_equal(one: Path, other: Path) -> bool:
    if not other.is_file():
        return False
    linecache.checkcache(str(one))
    linecache.checkcache(str(other))
    return linecache.getlines(str(one)) == linecache.getlines(str(other))


def _is_plain(value: object) -> bool:
    """Whether a value is data that cannot change: what the module fills later would give another digest each time."""
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _parts_of_member(member: Any) -> Any:
    """The functions of a member of a class, or its value."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return [member.fget, member.fset, member.fdel]
    return member.func if isinstance(member, cached_property) else member


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
    if code.co_name == "<lambda>":
        return _lambda_of(code)
    for node in ast.walk(_tree_of(code.co_filename)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
            return node
    return None


def _lambda_of(code: CodeType) -> ast.Lambda | None:
    """The lambda with this code; None when it cannot be told from others of its line."""
    nodes = [node for node in ast.walk(_tree_of(code.co_filename)) if isinstance(node, ast.Lambda)]
    found = [node for node in nodes if node.lineno == code.co_firstlineno]
    if len(found) > 1:
        # Without the first instruction, whose place is only a line. Python may be told to keep no columns at all.
        places = [(line, column) for line, _, column, end in code.co_positions() if line and column is not None and end]
        found = [node for node in found if places and all(_is_inside(node.body, place) for place in places)]
    # One inside of another begins later.
    return max(found, key=lambda node: (node.lineno, node.col_offset), default=None)


def _is_inside(node: ast.expr, place: tuple[int, int]) -> bool:
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= place < end


def _modules_imported(node: ast.AST) -> set[str]:
    """The last parts of the names of modules that code may import."""
    names: set[str] = set()
    for found in ast.walk(node):
        if isinstance(found, ast.Import):
            names.update(alias.name.rpartition(".")[2] for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            # `from . import rules` imports a module, too.
            names.update({(found.module or "").rpartition(".")[2], *(alias.name for alias in found.names)})
    return names


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    # A function begins with its first decorator.
    return min([node.lineno, *(found.lineno for found in node.decorator_list)])


def _without_decorators(node: _FunctionNode) -> ast.AST:
    fields = {name: value for name, value in ast.iter_fields(node) if name != "decorator_list"}
    return type(node)(**fields, decorator_list=[]) if not isinstance(node, ast.Lambda) else node


def _statements_that_bind(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    for statement in tree.body:
        if name in _names_bound(statement) or _fills(statement, name):
            yield statement


def _fills(statement: ast.stmt, name: str) -> bool:
    """Whether a statement of a module may change what a name is bound to, as `LIST.append(1)` and `DICT["a"] = 1` do."""
    if isinstance(statement, ast.Assign):
        # A plain name on the left binds that one.
        targets = [target for target in statement.targets if isinstance(target, ast.Attribute | ast.Subscript)]
        return any(_mentions(target, name) for target in targets)
    is_main = isinstance(statement, ast.If) and _mentions(statement.test, "__name__")
    return isinstance(statement, _FILLING) and not is_main and _mentions(statement, name)


_FILLING = (ast.Expr, ast.AugAssign, ast.Delete, ast.For, ast.While, ast.If, ast.With, ast.Try)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(found, ast.Name) and found.id == name for found in ast.walk(node))


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
