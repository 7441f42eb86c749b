"""The glossary is true: what it names exists, a class name has one meaning, and names that were replaced stay away."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "producers", "sandboxes", "streams", "trainer", "consumers", "deploy")

REPLACED_CLASSES = (
    "Pulse Keeper Mailbox Seat Cast Voices Recall Moment Word Ended Said Answer Answers Question Questions Recording "
    "Recordings Attempt Page Session Ask Asked Judged Wanted Names Found Listed ListedRun Visit Offer Room Home Place Trouble "
    "Changed Band Unread Guard Refusals Following Silent Progress Resolved Swept Restored Compared Served Station "
    "Assembly Gathering Cutting Piece Order Ends Writes SaidOnce KeepingConsumer KeepingThread Windows Put Report"
)
REPLACED_FUNCTIONS = (
    "_asked _told _tell _said _heard _speak _begun _grown _taken _completed _polled _posted _opened _living _restored "
    "told judged _opened_producer advanced telling explained begin_to_keep offsets_committed teaches_nothing say say_aside "
    "converse hear cast_of find_home draw_trouble must_exist _must_live"
)
REPLACED_MODULES = frozenset(
    {
        "deploy/session.py",
        "deploy/page.py",
        "deploy/operate/looking.py",
        "producers/seat.py",
        "consumers/clickhouse/answers.py",
        "consumers/clickhouse/guard.py",
        "sandboxes/outside/recordings.py",
    }
)

SAME_ON_PURPOSE = frozenset(
    {
        "Evaluation",  # the client of the traces program decodes into classes of its own: deploy must not import ClickHouse
        "Overview",
        "RunEntry",
        "ToolError",  # the runner imports nothing of ours, so it has its own
        "Model",  # of an agent, by which a user names it in TOML; and of the trainer
        "Part",  # of a system prompt, which users write; and of the installation, which is a script of its own
    }
)

LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
LOGGERS = frozenset({"logger", "_logger", "_log"})


@cache
def sources() -> dict[str, ast.Module]:
    """All modules of the packages, by path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def defined(kind: type[ast.ClassDef] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, str]]:
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, kind):
                yield path, node.name  # type: ignore[attr-defined]


def names_of(module: ast.Module) -> set[str]:
    """What a module defines at its top level."""
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.TypeAlias):
            names.add(node.name.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def places_in_glossary() -> list[str]:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    return [place for row in rows for place in re.findall(r"`([\w.]+)`", row.split(" | ")[-1])]


def exists(place: str) -> bool:
    """Whether a dotted name is a package, a module, or something that a module defines."""
    path = place.replace(".", "/")
    if f"{path}.py" in sources() or f"{path}/__init__.py" in sources():
        return True
    module, _, name = place.rpartition(".")
    source = sources().get(module.replace(".", "/") + ".py")
    return source is not None and name in names_of(source)


def test_everything_in_the_glossary_exists() -> None:
    places = places_in_glossary()
    assert len(places) > 80
    assert [place for place in places if not exists(place)] == []


def test_a_term_stands_in_the_glossary_once() -> None:
    rows = [line for line in (ROOT / "docs/glossary.md").read_text().splitlines() if line.startswith("| ")]
    terms = [row.split(" | ")[0].strip("| ") for row in rows if not row.startswith("| term")]
    assert sorted(set(terms)) == sorted(terms)


def test_a_class_name_has_one_meaning() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path, module in sources().items():
        for node in module.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path)
    doubled = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert doubled.keys() <= SAME_ON_PURPOSE, doubled


def test_replaced_names_stay_away() -> None:
    classes = [(path, name) for path, name in defined(ast.ClassDef) if name in REPLACED_CLASSES.split()]
    functions = [
        (path, name)
        for path, name in defined((ast.FunctionDef, ast.AsyncFunctionDef))
        if name in REPLACED_FUNCTIONS.split()
    ]
    assert not [*classes, *functions, *(REPLACED_MODULES & sources().keys())]


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path, module in sources().items():
        for node in ast.walk(module):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in LOGGERS and node.func.attr in LOG_METHODS:
                yield f"{path}:{node.lineno}", node


def test_log_events_are_snake_case_names_without_formatting() -> None:
    calls = list(log_calls())
    assert len(calls) > 40
    for place, call in calls:
        assert len(call.args) == 1, f"{place}: fields are named, not formatted into the event"
        event = call.args[0]
        assert isinstance(event, ast.Constant), place
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", str(event.value)), f"{place}: {event.value!r}"


def test_fields_that_sandboxes_log_are_rendered() -> None:
    """The harness renders a closed list of `extra` fields; one that it does not know would be lost."""
    serve = sources()["deploy/serve.py"]
    (known,) = [
        ast.literal_eval(node.value)
        for node in serve.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "_EXTRA_FIELDS"
    ]
    extras = [keyword.value for _, call in log_calls() for keyword in call.keywords if keyword.arg == "extra"]
    used = {ast.literal_eval(key) for extra in extras if isinstance(extra, ast.Dict) for key in extra.keys if key}
    assert used == set(known)


@pytest.mark.parametrize("place", ["streams.stage.Keeper", "streams.nothing", "producers.agent.Seat"])
def test_what_does_not_exist_is_noticed(place: str) -> None:
    assert not exists(place)
