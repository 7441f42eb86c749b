"""What the documents say can be done: every command parses, every link, path, module and make target exists, every page is built.

Command lines are taken from shell blocks and from code spans, of all pages and of the examples.
"""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from replayground.deploy.cli import app
from replayground.deploy.documentation.reference import config_sections
from replayground.schemas.job import load_job
from replayground.streams.rules.scoring import scorers_by_name
from tests.producers.test_examples import demonstrations_right

PROJECT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [
        *PROJECT.glob("docs/**/*.md"),
        *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/runbook.md")),
    ]
)
EXAMPLES = sorted([*PROJECT.glob("examples/**/*.py"), *PROJECT.glob("examples/**/*.toml")])
FOLDERS = (
    "schemas",
    "producers",
    "sandboxes",
    "streams",
    "trainer",
    "consumers",
    "deploy",
    "tests",
    "bench",
    "examples",
)

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")
_PROGRAM = re.compile(r"(replayground|make|mkdocs|(\.venv/bin/)?(python3?|replayground|pytest))( |$)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
_PATH = re.compile(rf"(?<![\w/.-])(?:{'|'.join((*FOLDERS, 'docs'))})/[\w./*-]*[\w*/]")
_TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
_MODULE = re.compile(rf"(?:{'|'.join(FOLDERS)})(?:\.\w+)+")


class Line(NamedTuple):
    """A command as a page shows it."""

    page: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def _commands() -> list[Line]:
    found = [Line(_name(page), text) for page in PAGES for text in _commands_in(page.read_text())]
    for example in EXAMPLES:
        lines = (line.strip("# ") for line in example.read_text().splitlines())
        found += [Line(_name(example), line) for line in lines if _PROGRAM.match(line)]
    return list(dict.fromkeys(found))


def _commands_in(markdown: str) -> Iterator[str]:
    for fence in _FENCE.finditer(markdown):
        if fence[2] in ("sh", "bash", "console"):
            yield from (line.strip().removeprefix("$ ") for line in fence[3].splitlines() if line.strip(" \n"))
    for span in _SPAN.findall(_FENCE.sub("", markdown)):
        if _PROGRAM.match(span):
            yield span


def _name(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


def _calls(text: str) -> Iterator[list[str]]:
    """The programs that a shell line calls, without comments, redirections and variables before a program."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    call: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= set("|&;"):
            if call:
                yield call
            call = []
        elif call or re.match(r"\w+=", token) is None:
            call.append(token)


def _arguments(call: list[str]) -> list[str]:
    """What a program is given; a redirection ends it."""
    return call[1 : call.index(">")] if ">" in call else call[1:]


def _require(call: list[str]) -> None:
    """Raises when the program would refuse this call, or is not there."""
    program, arguments = call[0].removeprefix(".venv/bin/"), _arguments(call)
    if program == "replayground":
        _require_replayground(["1" if argument == "N" else argument for argument in arguments])
    elif program == "make":
        targets = [argument for argument in arguments if "=" not in argument]
        assert set(targets) <= _make_targets(), f"make knows {sorted(_make_targets())}"
    elif program in ("python", "python3"):
        _require_python(arguments)
    elif program == "pytest":
        assert [path for path in arguments if "/" in path and not _exists(path.split("::")[0])] == []
    elif program == "alias":
        assert arguments == ["replayground=.venv/bin/replayground"]
    else:
        assert program in ("cp", "git", "cd", "sh", "my-generator"), f"{program} is not checked by this test"


def _require_replayground(arguments: list[str]) -> None:
    """Parses as the command would, down to the last option; nothing is carried out."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not arguments or arguments == ["--help"]:
            return
        name, *arguments = arguments
        assert name in command.commands, f"there is no command {name}"
        command = command.commands[name]
    if not arguments:
        return  # a sentence names the command alone
    command.make_context(command.name, [argument for argument in arguments if argument not in ("--help", "…")])


def _require_python(arguments: list[str]) -> None:
    if arguments[:1] == ["-m"]:
        module = arguments[1]
        assert importlib.util.find_spec(module) is not None, f"there is no module {module}"
        if (found := importlib.util.find_spec(module)) and found.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__") is not None, f"{module} cannot be run"
    elif arguments:
        assert (PROJECT / arguments[0]).is_file(), f"there is no {arguments[0]}"


@cache
def _make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z]+):", (PROJECT / "Makefile").read_text(), re.MULTILINE))


COMMANDS = _commands()


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 100
    assert {line.page for line in COMMANDS} >= {"README.md", "docs/tutorial.md", "examples/office/job.py"}


@pytest.mark.parametrize("line", COMMANDS, ids=str)
def test_a_command_can_be_called_as_it_is_shown(line: Line) -> None:
    for call in _calls(line.text):
        _require(call)


@pytest.mark.parametrize("wrong", ["replayground rnu", "replayground run --config x", "make tset", "python -m benhc"])
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises((AssertionError, Exception), match=r"no command|[Nn]o such option|make knows|no module"):
        _require(next(_calls(wrong)))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link in _LINK.findall(_FENCE.sub("", page.read_text())) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=_name)
def test_paths_and_modules_exist(page: Path) -> None:
    text = page.read_text()
    paths = {path.rstrip(".") for path in _PATH.findall(text)}
    assert sorted(path for path in paths if not _exists(path)) == []
    tests = set(_TEST.findall(text))
    assert sorted((file, name) for file, name in tests if name not in _defined_in(PROJECT / file)) == []
    names = {span for span in _SPAN.findall(_FENCE.sub("", text)) if _MODULE.fullmatch(span)}
    assert sorted(name for name in names if name not in _settings() and not _is_defined(name)) == []


def _exists(path: str) -> bool:
    pattern = path.replace("NN", "*")  # stands for the number of an event
    return any(PROJECT.glob(pattern)) if "*" in pattern else (PROJECT / path).exists()


@cache
def _settings() -> frozenset[str]:
    """Dotted names of all config fields, such as streams.advantage."""
    return frozenset(f"{section}.{name}" for section, kind in config_sections() for name in kind.__struct_fields__)


def _is_defined(name: str) -> bool:
    """True for a module, and for a class, function or constant of one, by its source: nothing is imported."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = PROJECT.joinpath(*parts[:length])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if source.is_file():
            return length == len(parts) or parts[length] in _defined_in(source)
    return False


@cache
def _defined_in(source: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.TypeAlias):
            found.add(node.name.id)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def test_the_site_builds_without_a_warning_and_asks_nobody(tmp_path: Path) -> None:
    """Dead links and anchors are warnings of MkDocs, and --strict makes errors of them."""
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    for page in PAGES:
        assert (tmp_path / "site" / _built_name(page)).is_file(), page
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    fetched = [tag for page in pages for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page)]
    assert fetched
    assert [tag for tag in fetched if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)] == []


def _built_name(page: Path) -> str:
    relative = page.relative_to(PROJECT)
    return (relative.with_name("index.html") if page.stem == "README" else relative.with_suffix(".html")).as_posix()


@pytest.fixture
def tutorial_job(tmp_path: Path) -> Path:
    """What a reader has after step 3 of the tutorial: the example's imports, and the definitions of the page."""
    blocks = [fence[3] for fence in _FENCE.finditer((PROJECT / "docs/tutorial.md").read_text()) if fence[2] == "python"]
    example = (PROJECT / "examples/times_tables/job.py").read_text()
    last_import = [node for node in ast.parse(example).body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    imports = "\n".join(example.splitlines()[: last_import.end_lineno])
    job = tmp_path / "tutorial_job.py"
    job.write_text("\n\n\n".join([imports, *blocks]))
    return job


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
async def test_the_job_of_the_tutorial_works(tutorial_job: Path) -> None:
    job = load_job(str(tutorial_job))
    known = set(scorers_by_name(job.scorers))
    assert all(set(task.scorers) <= known for task in islice(job.tasks("train", 0), 20))
    right = await demonstrations_right(job)
    assert 5 <= right <= 15
