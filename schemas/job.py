"""A job is a Python module with tasks, and optionally tools, scorers, agents and a scripted teacher.

def tasks(split, seed, start=0) -> Iterator[Task]
    Endless. `split` is "train" or "heldout"; the same seed gives the same tasks. Task number `start` comes first. The
    parameter `start` is optional: without it, a feeder that restarts draws and drops all tasks before that one.
SYSTEM_PROMPT: str
    Optional. What the agent reads before the task.
AGENTS: tuple
    Optional. Agents, topologies and models (producers.agent, producers.topology); every task names one of them as its
    `agent`. Without AGENTS a task is played by one agent with SYSTEM_PROMPT and the task's toolset, whatever its name.
TOOLS: tuple
    Optional. The job's own tools (sandboxes.tools).
SCORERS: tuple[Scorer, ...]
    Optional. The job's own scorers, besides exact_match.
def demonstrate(task, turns, seed) -> str
    Optional. The next turn of a scripted teacher, given the (turn, observation) pairs so far.
def texts(seed) -> Iterator[str]
    Optional. Sample texts to fit a tokenizer to, when the model is made from scratch.
SCAFFOLD: tuple[str, ...]
    Optional. Texts that this tokenizer encodes as one token each.
"""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

from msgspec import Struct

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task, TrajectoryAssembled


class Score(Struct, frozen=True, kw_only=True):
    """The result of a scorer. `excluded_because` makes the trajectory an invalid member: its score does not count."""

    score: float
    parts: dict[str, float] = {}
    evidence: str = ""
    excluded_because: str | None = None
    passed: bool | None = None
    "whether the attempt passed; None = decided by the scorer's pass mark"


Needs = Literal["trajectory", "stored_world", "sandbox"]
"""What a scorer looks at: the trajectory alone, a stored state of the world besides, or the sandbox while it lives. The
first gives the same score whenever it is asked, and a replay can run it."""


class Scorer(Protocol):
    """Scores a trajectory. It should be pure: replay scores a trajectory again and expects the same result.

    A scorer may also have `version` (a digest of its code and attributes), `weight` (how much its score counts in the
    reward; 1), `pass_mark` (the score from which on an attempt has passed; 1, and None for a scorer that does not decide
    it, such as a penalty) and `needs` (see Needs; a replay refuses a scorer that does not say)."""

    @property
    def name(self) -> str: ...

    def score(self, trajectory: TrajectoryAssembled) -> Score: ...


class Tasks(Protocol):
    """Generates the tasks of a split, from number `start` on."""

    def __call__(self, split: str, seed: int, start: int = 0) -> Iterator[Task]: ...


@dataclass(frozen=True)
class Job:
    """A loaded job module, checked."""

    name: str
    tasks: Tasks
    system_prompt: str
    tools: tuple[Any, ...]
    scorers: tuple[Scorer, ...]
    demonstrate: Callable[[Task, list[tuple[str, str]], int], str] | None
    texts: Callable[[int], Iterator[str]] | None
    scaffold: tuple[str, ...] = ()
    agents: tuple[Any, ...] = ()


def load_job(module: str) -> Job:
    """Imports a job by dotted name or by path of a .py file, which runs its code, and checks it. Raises BadInput."""
    loaded = load_module(module)
    tasks = getattr(loaded, "tasks", None)
    if not callable(tasks):
        raise BadInput(
            f"job module {module} has no function tasks(split, seed): see schemas/job.py for what a job needs"
        )
    return Job(
        name=loaded.__name__,
        tasks=_with_start(tasks),
        system_prompt=getattr(loaded, "SYSTEM_PROMPT", ""),
        tools=_parts(loaded, "TOOLS", ("name", "parameters"), "functions with @tool"),
        scorers=_parts(loaded, "SCORERS", ("name", "score"), "objects with name and score()"),
        demonstrate=getattr(loaded, "demonstrate", None),
        texts=getattr(loaded, "texts", None),
        scaffold=_parts(loaded, "SCAFFOLD", (), "texts"),
        agents=_parts(loaded, "AGENTS", ("name",), "agents, topologies and models"),
    )


def load_module(module: str) -> ModuleType:
    """Imports a module of the user by dotted name or by path of a .py file, which runs its code. Raises BadInput."""
    return _from_file(Path(module)) if module.endswith(".py") else _from_name(module)


def _parts(loaded: ModuleType, name: str, needs: tuple[str, ...], what: str) -> tuple[Any, ...]:
    """A tuple that the module defines; empty when it does not. Raises BadInput for entries that programs cannot use."""
    parts = getattr(loaded, name, ())
    # (entry) without a comma is no tuple: a common mistake, so the message shows how to write it.
    if not isinstance(parts, tuple | list):
        raise BadInput(
            f"{name} of job module {loaded.__name__} is {type(parts).__name__}, not a tuple of {what}: with one entry "
            f"it is written {name} = (entry,)"
        )
    for part in parts:
        # A class has the attributes too, but its methods need an object.
        lacks = next((attribute for attribute in needs if not hasattr(part, attribute)), None)
        if isinstance(part, type) or lacks is not None:
            shown = getattr(part, "__name__", type(part).__name__)
            why = f"the class {shown}, not an object: write {shown}()" if isinstance(part, type) else shown
            raise BadInput(f"{name} of job module {loaded.__name__} holds {why}; it takes {what}")
    return tuple(parts)


def _with_start(tasks: Any) -> Tasks:
    """Adds the parameter `start` to a function without it, by drawing and dropping the tasks before."""
    if "start" in inspect.signature(tasks).parameters:
        return tasks  # type: ignore[no-any-return]

    @functools.wraps(tasks)
    def drawn(split: str, seed: int, start: int = 0) -> Iterator[Task]:
        return islice(tasks(split, seed), start, None)

    return drawn


def _from_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BadInput(
            f"job module {name} cannot be imported: {error}; set [job] module to a dotted name or a .py file"
        ) from error
    # The module can raise anything, and may even call sys.exit: each is an error of the job, not of this program.
    except (Exception, SystemExit) as error:
        raise BadInput(f"job module {name} fails when loaded: {type(error).__name__}: {error}") from error


_LOADED_FROM_FILES: set[str] = set()
"names of modules that stand in sys.modules since a file was loaded"


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise BadInput(f"job module {path} does not exist: set [job] module to a .py file beside the TOML file")
    if _is_name_taken(path):
        raise BadInput(f"job module {path} has the name of another module, {path.stem}: rename the file")
    _LOADED_FROM_FILES.add(path.stem)
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    # Before it is executed: dataclasses and the like look up the module of a class while they define it.
    sys.modules[path.stem] = module
    try:
        specification.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as in _from_name
        raise BadInput(f"job module {path} fails when loaded: {type(error).__name__}: {error}") from error
    return module


def _is_name_taken(path: Path) -> bool:
    """Whether a module of this name is there already, or may be imported later: the file would take its place for
    everything in this process."""
    loaded = sys.modules.get(path.stem)
    is_itself = path.stem in _LOADED_FROM_FILES or getattr(loaded, "__file__", None) == str(path.absolute())
    return path.stem in sys.stdlib_module_names or (loaded is not None and not is_itself)
