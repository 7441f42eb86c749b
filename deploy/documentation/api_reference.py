"""The reference of `import replayground`, generated from source: every public name with its signature, sentences and methods."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import replayground
from replayground.deploy.documentation.markdown import table
from replayground.schemas.sentences import sentences

_PRIVATE_PATH = re.compile(r"\b(?:replayground\.|collections\.abc\.|typing\.|datetime\.|pathlib\.|types\.)(?:\w+\.)*")
_HEAD = """# Python API: every name

Generated from the package `replayground` by `python -m replayground.deploy.documentation`; a test compares.

What the names are for, with examples that are run: [the Python API](../python_api.md). Events: [their own page](events.md).
"""


def python_api() -> str:
    """The whole page."""
    names = sorted(replayground.__all__, key=lambda name: (name.lower(), name))
    listed = " · ".join(f"[{name}](#{anchor})" for name, anchor in zip(names, _anchors(names), strict=True))
    return "\n".join([_HEAD, listed, *(line for name in names for line in _section(name))]) + "\n"


def _anchors(names: list[str]) -> list[str]:
    """As the site generator makes them: of two headings that differ in case alone, the second is numbered."""
    lower = [name.lower() for name in names]
    return [f"{name}_1" if name in lower[:place] else name for place, name in enumerate(lower)]


def _section(name: str) -> Iterator[str]:
    value = getattr(replayground, name)
    yield from ("", f"## {name}", "")
    if not isinstance(value, type):
        yield from (_code(f"{name}{_signature(value)}"), "", _text(value))
        return
    yield _text(value)
    if _is_made_by_users(value):
        yield from ("", _code(f"{name}{_signature(value).removesuffix(' -> None')}"))
    rows = [(f"`{field}`", f"`{_type_of(kind)}`", _sentence_of(value, field)) for field, kind in _fields(value)]
    if any(told for _, _, told in rows):
        yield from ("", *table(("field", "type", "meaning"), rows))
    for method in _methods(value):
        yield from ("", _code(f"{method}{_signature(getattr(value, method))}"), "", _text(getattr(value, method)))


def _is_made_by_users(value: type) -> bool:
    """Errors are raised and protocols implemented: neither is called by name."""
    return not issubclass(value, BaseException) and not getattr(value, "_is_protocol", False)


def _signature(value: Any) -> str:
    shown = _PRIVATE_PATH.sub("", str(inspect.signature(value)))
    # annotations that are evaluated later are strings; defaults keep their quotes
    shown = re.sub(r"(: |-> )'([^']*)'", r"\1\2", shown)
    # a default object shows its address, which differs at every start
    shown = re.sub(r"<class '([\w.]+)'>", lambda found: found[1].rpartition(".")[2], shown)
    shown = re.sub(r"<[^<>]*>", "…", shown)
    # the order of a set differs at every start too
    shown = re.sub(r"frozenset\(\{(.*?)\}\)", lambda found: f"{{{', '.join(sorted(found[1].split(', ')))}}}", shown)
    return re.sub(r"\(self(, /)?(, )?", "(", shown)


def _fields(value: type) -> Iterator[tuple[str, Any]]:
    """Annotated public fields, those of base classes first."""
    seen: dict[str, Any] = {}
    for base in reversed(value.__mro__):
        if base.__module__.startswith("replayground"):
            seen |= inspect.get_annotations(base)
    yield from ((name, kind) for name, kind in seen.items() if not name.startswith("_") and "ClassVar" not in str(kind))


def _type_of(annotation: Any) -> str:
    return _PRIVATE_PATH.sub("", annotation.__name__ if isinstance(annotation, type) else str(annotation))


def _sentence_of(value: type, field: str) -> str:
    """The string under the field, where it is declared."""
    for base in value.__mro__:
        if base.__module__.startswith("replayground") and field in sentences(base):
            return sentences(base)[field]
    return ""


def _methods(value: type) -> list[str]:
    return [
        name
        for name, member in vars(value).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod | staticmethod))
    ]


def _text(documented: Any) -> str:
    """A docstring as Markdown: examples and indented blocks become code."""
    lines: list[str] = []
    is_code = False
    for line in inspect.cleandoc(inspect.getdoc(documented) or "").splitlines():
        begins = line.startswith((">>> ", "    ")) or bool(re.match(r"\w+ {2,}\S", line))
        if begins and not is_code:
            lines.append("```python" if line.startswith(">>>") else "```text")
            is_code = True
        elif not line.strip() and is_code:
            lines.append("```")
            is_code = False
        lines.append(line)
    return "\n".join([*lines, "```"] if is_code else lines)


def _code(text: str) -> str:
    return f"```python\n{text}\n```"
