"""Tasks as people write them (JSONL), and the check that every task passes before it is submitted.

A misspelt scorer, tool or agent is found here, with all names that exist; later it could only fail rollout by rollout.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from producers.topology import AgentCatalog
from sandboxes.outside.providers import require_tools
from sandboxes.worlds.world import world_from_json
from schemas.errors import BadInput
from schemas.events import GroupSize, Task
from schemas.job import Job, Tasks
from streams.rules.scoring import scorers_by_name

_LINES_NAMED_MAX = 20
"numbers of bad lines that one error lists"


class TaskLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task as people write it: fields of Task, most of them optional. The world is JSON, quoted or not."""

    prompt: str
    reference: str | None = None
    agent: str = "agent"
    toolset: list[str] = []
    world: msgspec.Raw = msgspec.Raw(b'{"name":"empty"}')
    scorers: list[str] = msgspec.field(default_factory=lambda: ["exact_match"])
    group_size: GroupSize | None = None
    "attempts that are compared with each other; unless given, as the run has it"
    split: Literal["train", "heldout"] | None = None
    "unless given: train, or heldout for a task of purpose eval"
    tags: dict[str, str] = {}
    purpose: Literal["train", "eval"] = "train"
    "what a submitted task is for; in a tasks file the feeder decides that by the split"

    def task(self, group_size: int) -> Task:
        """Raises ValueError or a msgspec error when the world cannot be used."""
        world = bytes(self.world)
        text = msgspec.json.decode(world, type=str) if world.startswith(b'"') else world.decode()
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
    """What tasks of a job may name."""

    job: Job
    agent_catalog: AgentCatalog
    _passed: set[tuple[str, ...]] = field(default_factory=set)

    def require(self, task: Task) -> None:
        """ValueError, with all that exists, for a scorer, tool or agent that does not."""
        named = (task.agent, "", *task.toolset, "", *task.scorers)
        if named not in self._passed:  # tasks of a job name the same few things a million times
            for problem in self.problems(task):
                raise ValueError(problem)
            self._passed.add(named)

    def problems(self, task: Task) -> Iterator[str]:
        """What is wrong with the names of a task, a sentence each."""
        yield from self._problems_of_agent(task.agent)
        try:
            require_tools(self.agent_catalog.tools_of(task), self.job.tools)
        except ValueError as error:
            yield str(error)
        yield from self._problems_of_scorers(task.scorers)

    def _problems_of_agent(self, name: str) -> Iterator[str]:
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
    """The tasks of a JSONL file. Raises BadInput that names the file, the line and what is wrong with it."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"tasks file {path} cannot be read: {error.strerror}") from error
    return [task for _, task in parse_lines(lines, f"tasks file {path}", names, group_size=1)]


def parse_lines(lines: Iterable[bytes], source: str, names: KnownNames, group_size: int) -> list[tuple[TaskLine, Task]]:
    """Every task of these lines; empty lines are passed over. Raises BadInput that says what is wrong with the first bad
    line, and names the others. `group_size` is for tasks that do not say theirs."""
    read = list(read_lines(lines, names, group_size))
    bad = [(number, line) for number, line in read if isinstance(line, str)]
    if bad:
        number, problem = bad[0]
        raise BadInput(f"{source}, line {number}: {problem}{_others([other for other, _ in bad[1:]])}")
    return [line for _, line in read if not isinstance(line, str)]


def read_lines(
    lines: Iterable[bytes], names: KnownNames, group_size: int
) -> Iterator[tuple[int, tuple[TaskLine, Task] | str]]:
    """Every line that is not empty with its number: its task, or what is wrong with it."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=TaskLine)
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
    """The same tasks, each checked as it is drawn. Raises BadInput."""

    def drawn(split: str, seed: int, start: int = 0) -> Iterator[Task]:
        for number, task in enumerate(tasks(split, seed, start), start=start):
            try:
                names.require(task)
            except ValueError as error:
                raise BadInput(f"{source}, task {number} of split {split}: {error}") from error
            yield task

    return drawn


def require_first(tasks: Tasks, source: str) -> None:
    """Draws the first task of each split, so that a job whose tasks cannot be played says so at once. Raises BadInput."""
    for split in ("train", "heldout"):
        for task in tasks(split, 0):
            try:
                world_from_json(task.world)
            except (ValueError, msgspec.MsgspecError) as error:
                raise BadInput(f"{source}, task 0 of split {split}: its world cannot be used: {error}") from error
            break
