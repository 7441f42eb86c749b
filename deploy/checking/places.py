"""Finds the file and line of a mistake: of a setting in TOML, an exception, a function, or a task."""

import ast
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import GeneratorType
from typing import Any

_TABLE = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([\w.\"' -]+?)\s*=")
_TOML_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_ANY = "NAME"
"stands for any name in a setting such as rollouts.tools.mcp.NAME.command"


@dataclass(frozen=True)
class SourceLocation:
    """A file and, if known, a line. As text, the path is relative to the working folder if it lies below it."""

    file: Path
    line: int | None = None

    def __str__(self) -> str:
        path = self.file.absolute()
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return str(shown) if self.line is None else f"{shown}:{self.line}"


def of_setting(file: Path, setting: str) -> SourceLocation:
    """The line that sets a dotted setting, else the line of the nearest section above it.

    Not covered: multi-line strings and arrays; their lines are read as if they were settings."""
    # tomllib gives no positions, so the lines are matched here.
    wanted = [part for part in re.sub(r"\[\d+\].*", "", setting).split(".") if part]
    best, line = 0, None
    for number, path in _settings(file):
        depth = _common(path, wanted)
        if depth > best and depth == len(path):
            best, line = depth, number
    return SourceLocation(file, line)


def of_toml_error(file: Path, text: str) -> SourceLocation:
    """The line that tomllib names in its error message."""
    found = _TOML_LINE.search(text)
    if found is not None:
        return SourceLocation(file, int(found.group(1)))
    is_cut_off = text.endswith("(at end of document)")
    return SourceLocation(file, len(file.read_bytes().splitlines()) if is_cut_off else None)


def of_error(error: BaseException, module: Path) -> SourceLocation:
    """The innermost line of the job's folder in a traceback; for a SyntaxError, its line."""
    for link in _causes(error):
        if isinstance(link, SyntaxError) and link.filename is not None:
            return SourceLocation(Path(link.filename), link.lineno)
        # Innermost first, but only files of the job: the author cannot change a library where the exception was raised.
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if Path(frame.filename).resolve().parent == module.resolve().parent:
                return SourceLocation(Path(frame.filename), frame.lineno)
    return SourceLocation(module)


def of_code(function: Any, module: Path) -> SourceLocation:
    """The first line of a function or method; for anything else, the module."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return SourceLocation(module) if code is None else SourceLocation(Path(code.co_filename), code.co_firstlineno)


def of_definition(module: Path, name: str) -> SourceLocation:
    """The line that defines a name at the top level of a module."""
    # By parsing: a tool is an object, which does not know where it was defined.
    try:
        body = ast.parse(module.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return SourceLocation(module)
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = {getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)}
        if name in names:
            return SourceLocation(module, node.lineno)
    return SourceLocation(module)


def of_yield(tasks: Any, otherwise: SourceLocation) -> SourceLocation:
    """The line at which a generator has yielded a task; for any other iterator, `otherwise`."""
    # The suspended frame stands at its yield. Through `yield from`, the innermost generator made the task.
    while isinstance(getattr(tasks, "gi_yieldfrom", None), GeneratorType):
        tasks = tasks.gi_yieldfrom
    frame = getattr(tasks, "gi_frame", None)
    return otherwise if frame is None else SourceLocation(Path(frame.f_code.co_filename), frame.f_lineno)


def _settings(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Every line that opens a section or sets a key, with its whole dotted path."""
    section: list[str] = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), start=1):
        if (table := _TABLE.match(line)) is not None:
            section = _parts(table.group(1))
            yield number, section
        elif (key := _KEY.match(line)) is not None:
            yield number, [*section, *_parts(key.group(1))]


def _parts(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _common(path: list[str], wanted: list[str]) -> int:
    """The number of leading parts that agree."""
    for depth, (part, asked) in enumerate(zip(path, wanted, strict=False)):
        if asked not in (part, _ANY):
            return depth
    return min(len(path), len(wanted))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that led to it. Ours often wrap the one that names a line of the job."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
