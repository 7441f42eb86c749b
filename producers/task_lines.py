"""Tasks in JSONL, as people write them, and the check that every task passes before it is submitted.

A misspelt scorer, tool or agent is reported here, with all names that exist. Later it would only fail its rollouts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from replayground.producers.topology import AgentCatalog
from replayground.sandboxes.outside.providers import require_tools
from replayground.sandboxes.worlds.world import world_from_json
from replayground.schemas.errors import BadInput
from replayground.schemas.events import GroupSize, Task
from replayground.schemas.job import Job, Tasks
from replayground.streams.rules.scoring import scorers_by_name

_LINES_NAMED_MAX = 20
"how many numbers of bad lines one error lists"


class TaskLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: the fields of Task, most of them optional. The world is a JSON object, or a string that holds one."""

    prompt: str
    reference: str | None = None
    agent: str = "agent"
    toolset: list[str] = []
    world: msgspec.Raw = msgspec.Raw(b'{"name":"empty"}')
    scorers: list[str] = msgspec.field(default_factory=lambda: ["exact_match"])
    group_size: GroupSize | None = None
    "attempts that are compared with each other; left out = group_size of the run. In a tasks file it is ignored"
    split: Literal["train", "heldout"] | None = None
    "left out = train, or heldout for a task of purpose eval"
    tags: dict[str, str] = {}
    purpose: Literal["train", "eval"] = "train"
    "purpose of a submitted task; in a tasks file the split decides"

    def task(self, group_size: int) -> Task:
        """The task. Raises ValueError or a msgspec error when the world cannot be used."""
        world = bytes(self.world)
        text = msgspec.json.decode(world, type=str) if world.startswith(b'"') else world.decode()
        # Parsed only to be checked: a task keeps its world as text.
        world_from_json(text)
        return Task(
            prompt=self.prompt,
            reference=self.reference,
            agent=self.agent,
            toolset=self.toolset,
            world=text,
            scorers=self.scorers,
            group_size=self.group_size or group_size,
            split=self.split or ("heldout" if self.purpose == "eval" else "train"),
            tags=self.tags,
        )


@dataclass(frozen=True)
class KnownNames:
    """The names that tasks of a job may use."""

    job: Job
    agent_catalog: AgentCatalog
    _passed: set[tuple[str, ...]] = field(default_factory=set)

    def require(self, task: Task) -> None:
        """Raises ValueError for a scorer, tool or agent that does not exist; it lists those that do."""
        # The empty strings separate the lists: ("a", "b") and ("a",), ("b",) must not be the same key.
        named = (task.agent, "", *task.toolset, "", *task.scorers)
        # A million tasks of a job use the same few names.
        if named not in self._passed:
            for problem in self.problems(task):
                raise ValueError(problem)
            self._passed.add(named)

    def problems(self, task: Task) -> Iterator[str]:
        """What is wrong with the names in a task, one sentence each."""
        yield from self._problems_of_agent(task.agent)
        try:
            require_tools(self.agent_catalog.tools_of(task), self.job.tools)
        except ValueError as error:
            yield str(error)
        yield from self._problems_of_scorers(task.scorers)

    def _problems_of_agent(self, name: str) -> Iterator[str]:
        # A job without agents plays every task with one agent, whatever its name is.
        known = [*self.agent_catalog.agents, *self.agent_catalog.topologies]
        if known and name not in known:
            yield f"there is no agent {name!r}; known agents: {', '.join(sorted(known))}"

    def _problems_of_scorers(self, names: Sequence[str]) -> Iterator[str]:
        known = scorers_by_name(self.job.scorers)
        if not names:
            yield f"a task needs at least one scorer; known scorers: {', '.join(sorted(known))}"
        for name in names:
            if name not in known:
                yield f"there is no scorer {name!r}; known scorers: {', '.join(sorted(known))}"


def read_tasks(path: Path, names: KnownNames) -> list[Task]:
    """The tasks of a JSONL file. Raises BadInput that names the file, the line and the problem."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"tasks file {path} cannot be read: {error.strerror}") from error
    # The group size does not matter: the feeder sets that of the session.
    return [task for _, task in parse_lines(lines, f"tasks file {path}", names, group_size=1)]


def parse_lines(lines: Iterable[bytes], source: str, names: KnownNames, group_size: int) -> list[tuple[TaskLine, Task]]:
    """All tasks of these lines; empty lines are skipped. Raises BadInput that describes the first bad line and lists
    the numbers of the others. `group_size` is for tasks that do not set theirs."""
    # All lines before any is used: a file is taken whole or not at all.
    read = list(read_lines(lines, names, group_size))
    bad = [(number, line) for number, line in read if isinstance(line, str)]
    if bad:
        number, problem = bad[0]
        raise BadInput(f"{source}, line {number}: {problem}{_others([other for other, _ in bad[1:]])}")
    return [line for _, line in read if not isinstance(line, str)]


def read_lines(
    lines: Iterable[bytes], names: KnownNames, group_size: int
) -> Iterator[tuple[int, tuple[TaskLine, Task] | str]]:
    """Each line that is not empty, with its number: its task, or what is wrong with it. Never raises for a bad line."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=TaskLine)
            # Rollouts of an evaluation are counted, not compared with each other.
            task = read.task(1 if read.purpose == "eval" else group_size)
            names.require(task)
            yield number, (read, task)
        except (ValueError, msgspec.MsgspecError) as error:
            yield number, str(error)


def _others(numbers: list[int]) -> str:
    if not numbers:
        return ""
    named = ", ".join(map(str, numbers[:_LINES_NAMED_MAX]))
    return f" ({len(numbers)} more bad lines: {named}{', …' if len(numbers) > _LINES_NAMED_MAX else ''})"


def check_tasks(tasks: Tasks, names: KnownNames, source: str) -> Tasks:
    """The same tasks, each checked when it is drawn. Iterating raises BadInput."""

    def drawn(split: str, seed: int, start: int = 0) -> Iterator[Task]:
        for number, task in enumerate(tasks(split, seed, start), start=start):
            try:
                names.require(task)
            except ValueError as error:
                raise BadInput(f"{source}, task {number} of split {split}: {error}") from error
            yield task

    return drawn


def require_first(tasks: Tasks, source: str) -> None:
    """Draws the first task of each split, so that a job with unusable tasks fails at the start. Raises BadInput."""
    for split in ("train", "heldout"):
        for task in tasks(split, 0):
            try:
                world_from_json(task.world)
            except (ValueError, msgspec.MsgspecError) as error:
                raise BadInput(f"{source}, task 0 of split {split}: its world cannot be used: {error}") from error
            break
