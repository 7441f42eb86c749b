"""Which file and line a mistake stands at: of a setting in TOML, of an exception, of a function, of a task."""

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
    """A file and, where one is known, a line of it. Its text is relative to the working folder, if it lies below."""

    file: Path
    line: int | None = None

    def __str__(self) -> str:
        path = self.file.absolute()
        shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return str(shown) if self.line is None else f"{shown}:{self.line}"


def of_setting(file: Path, setting: str) -> SourceLocation:
    """The line that sets a dotted setting; else the one of the nearest section above it.

    Not covered: lines inside of strings and arrays that span several are read as if they stood alone."""
    wanted = [part for part in re.sub(r"\[\d+\].*", "", setting).split(".") if part]
    best, line = 0, None
    for number, path in _settings(file):
        depth = _common(path, wanted)
        if depth > best and depth == len(path):
            best, line = depth, number
    return SourceLocation(file, line)


def of_toml_error(file: Path, text: str) -> SourceLocation:
    """The line that a decoder of TOML names in its message."""
    found = _TOML_LINE.search(text)
    if found is not None:
        return SourceLocation(file, int(found.group(1)))
    is_cut_off = text.endswith("(at end of document)")
    return SourceLocation(file, len(file.read_bytes().splitlines()) if is_cut_off else None)


def of_error(error: BaseException, module: Path) -> SourceLocation:
    """The last line of the job, or beside it, that an exception passed through; of a syntax error, the line itself."""
    for link in _causes(error):
        if isinstance(link, SyntaxError) and link.filename is not None:
            return SourceLocation(Path(link.filename), link.lineno)
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if Path(frame.filename).resolve().parent == module.resolve().parent:
                return SourceLocation(Path(frame.filename), frame.lineno)
    return SourceLocation(module)


def of_code(function: Any, module: Path) -> SourceLocation:
    """The first line of a function or method; of anything else, the module."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return SourceLocation(module) if code is None else SourceLocation(Path(code.co_filename), code.co_firstlineno)


def of_definition(module: Path, name: str) -> SourceLocation:
    """The line that defines a name at the top of a module."""
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
    """The line at which a generator waits after it has yielded a task; of any other iterator, the line of its maker."""
    while isinstance(getattr(tasks, "gi_yieldfrom", None), GeneratorType):
        tasks = tasks.gi_yieldfrom
    frame = getattr(tasks, "gi_frame", None)
    return otherwise if frame is None else SourceLocation(Path(frame.f_code.co_filename), frame.f_lineno)


def _settings(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Every line that opens a section or sets a key, with its whole path."""
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
    """How many parts agree from the beginning."""
    for depth, (part, asked) in enumerate(zip(path, wanted, strict=False)):
        if asked not in (part, _ANY):
            return depth
    return min(len(path), len(wanted))


def _causes(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__
