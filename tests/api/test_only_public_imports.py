"""Examples and the code in docs import nothing of ours but `replayground`, and every example file is short."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayground.deploy.sources import OWN_PACKAGES

PROJECT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted(path for path in (PROJECT / "examples").rglob("*") if path.suffix in (".py", ".toml"))
TEMPLATES = sorted((PROJECT / "deploy" / "templates").rglob("*.py"))
PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
PRIVATE = {*OWN_PACKAGES, "tests", "bench"}
_BLOCK = re.compile(r"^```(?:python|pycon|py)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^\s*(?:>>> |\.\.\. )?\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_an_example_is_short_and_imports_the_public_api_alone(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < 60
    if path.suffix == ".py":
        assert [name for name in _imported(text) if not _is_public(name)] == []


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_new_job_imports_the_public_api_alone(path: Path) -> None:
    assert [name for name in _imported(path.read_text()) if not _is_public(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_code_in_docs_imports_the_public_api_alone(page: Path) -> None:
    imported = [name for block in _BLOCK.findall(page.read_text()) for name in _IMPORT.findall(block)]
    assert [name for name in imported if not _is_public(name)] == []


def test_a_private_module_would_be_found() -> None:
    assert not _is_public("replayground.schemas.events")
    assert not _is_public("replayground.field")
    assert _is_public("replayground.events")
    assert _IMPORT.findall(
        _BLOCK.findall("```pycon\n>>> from replayground.deploy.traces_client import Page\n```")[0]
    ) == ["replayground.deploy.traces_client"]


def _imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


def _is_public(name: str) -> bool:
    if name.partition(".")[0] == "replayground":
        return name in ("replayground", "replayground.events")
    return name.partition(".")[0] not in PRIVATE
