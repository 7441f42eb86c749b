"""Checks a job file and what it names, as far as that needs no sandbox: config, module, agents, tasks. Then its trial."""

import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from deploy.checking import places
from deploy.checking.places import SourceLocation
from deploy.checking.report import CheckReport, described, within
from deploy.checking.trial import Drawn, Subject, try_job
from deploy.config import Config, examine, read_toml
from deploy.resolve import read_request
from deploy.sources import origin_of
from producers.task_lines import KnownNames, read_lines
from producers.tasks import DEMONSTRATIONS, TRAINING, require_teacher, seed_of
from producers.topology import AgentCatalog, agent_catalog_of
from sandboxes.worlds.world import world_from_json
from schemas.errors import BadInput
from schemas.events import Task
from schemas.job import Job, load_job

_TASKS_DRAWN = 50
"of each session, by a whole check"
_TASKS_DRAWN_QUICKLY = 4
_DRAWING_SECONDS_QUICK = 0.2
_LINES_NAMED_MAX = 20
"bad lines of a tasks file that are told one by one"
_TASK_NEEDS = "a Task needs prompt, reference, agent, toolset, world, scorers, group_size and split"
_NO_REFERENCE = "give every Task a reference; reference=None where no answer is the right one"


def check_job(source: Path, seed: int, report: CheckReport, *, thorough: bool) -> None:
    """Tries a job and takes every mistake into the report. Without `thorough` only what takes about a second: a few tasks,
    and nothing that starts a browser or asks a server."""
    config = _check_config(source, report)
    if config is not None:
        _JobCheck(source, config, seed, report, thorough).run()


def _check_config(source: Path, report: CheckReport) -> Config | None:
    """The config, without what is wrong with it; None when it cannot be read at all."""
    with report.step(f"config {SourceLocation(source)}"):
        try:
            raw = read_toml(source)
        except BadInput as error:
            report.mistake(places.of_toml_error(source, str(error)), _without(str(error), source))
            return None
        config, problems = examine(raw)
        for problem in problems:
            report.mistake(places.of_setting(source, problem.setting), problem.sentence)
        if not problems:
            try:
                read_request(source)  # what is only wrong to write down, such as a password
            except BadInput as error:
                report.mistake(SourceLocation(source), _without(str(error), source))
        if "module" not in raw.get("job", {}):
            report.note(f"[job] names no module: the default job, {config.job.module}, is practised")
    return config


@dataclass
class _JobCheck:
    source: Path
    config: Config
    seed: int
    report: CheckReport
    thorough: bool

    def run(self) -> None:
        job = self._load()
        if job is None:
            return
        agent_catalog = self._agent_catalog(job)
        self._teacher(job, agent_catalog)
        drawn = self._tasks(job, agent_catalog or AgentCatalog())
        if agent_catalog is not None:
            self._trains(agent_catalog, drawn)
        if not drawn:
            return
        subject = Subject(self.source, self.config, job, agent_catalog, self.module, self.seed, tuple(drawn))
        try_job(subject, self.report, thorough=self.thorough)

    @property
    def module(self) -> Path:
        """The file of the job's module; the config where it has none."""
        name = self.config.job.module
        return Path(name) if name.endswith(".py") else origin_of(name) or self.source

    def _load(self) -> Job | None:
        with self.report.step(f"module {SourceLocation(self.module)}"):
            try:
                with within():
                    return load_job(self.config.job.module)
            except BadInput as error:
                self.report.mistake(self._place_of_load_error(error), str(error))
        return None

    def _place_of_load_error(self, error: BadInput) -> SourceLocation:
        module = self.module
        if error.__cause__ is not None and module != self.source:
            return places.of_error(error.__cause__, module)
        if module == self.source or not module.is_file():
            return places.of_setting(self.source, "job.module")
        name = str(error).partition(" ")[0]
        return places.of_definition(module, name) if name.isupper() else SourceLocation(module, 1)

    def _agent_catalog(self, job: Job) -> AgentCatalog | None:
        """None when it is wrong; a job that defines no agents has an empty one."""
        agents = self.config.job.agents
        file = self.module if agents is None else Path(agents)
        defined = agents is not None or bool(job.agents)
        try:
            agent_catalog = agent_catalog_of(job, agents)
        except BadInput as error:
            text = str(error)
            place = places.of_definition(file, "AGENTS") if agents is None else _place_in_agents(file, text)
            self.report.mistake(place, _without(text, file))
            return None
        if defined:
            with self.report.step(f"agents: {', '.join([*agent_catalog.agents, *agent_catalog.topologies])}"):
                pass
        return agent_catalog

    def _teacher(self, job: Job, agent_catalog: AgentCatalog | None) -> None:
        try:
            require_teacher(job, agent_catalog or AgentCatalog(), self.config.job.demonstrations)
        except BadInput as error:
            self.report.mistake(places.of_setting(self.source, "job.demonstrations"), str(error))

    def _trains(self, agent_catalog: AgentCatalog, drawn: list[Drawn]) -> None:
        """Whoever is misspelt here would never be trained, without a word."""
        known = set(agent_catalog.agents) or {found.task.agent for found in drawn}
        for name in self.config.job.trains:
            if name not in known:
                text = f"job.trains names {name!r}, which no task is played by; agents: {', '.join(sorted(known))}"
                self.report.mistake(places.of_setting(self.source, "job.trains"), text)

    def _tasks(self, job: Job, agent_catalog: AgentCatalog) -> list[Drawn]:
        names = KnownNames(job, agent_catalog)
        if self.config.feeder.tasks_file is not None:
            return self._tasks_of_file(Path(self.config.feeder.tasks_file), names)
        with self.report.step("tasks") as step:
            drawn = [found for split, session in self._sessions() for found in self._draw(job, split, session)]
            counts = {split: sum(found.split == split for found in drawn) for split in ("train", "heldout")}
            step.name = f"tasks: {counts['train']} of split train, {counts['heldout']} of heldout"
            for found in drawn:
                self._check_task(found, names)
        return drawn

    def _sessions(self) -> Iterator[tuple[str, str]]:
        """The sessions that a run draws tasks for, with their splits."""
        if self.config.job.demonstrations > 0:
            yield "train", DEMONSTRATIONS
        yield "train", TRAINING
        if self.config.feeder.evaluation_tasks > 0:
            yield "heldout", "heldout"

    def _draw(self, job: Job, split: str, session: str) -> list[Drawn]:
        """The first tasks of a session, each with the line that yielded it."""
        seed = seed_of(self.seed, split, session)
        make = inspect.unwrap(job.tasks)
        at = places.of_code(make, self.module)
        drawn: list[Drawn] = []
        try:
            with within():
                made = make(split, seed)
                drawn += self._first(made, at, split, session)
                if not drawn:
                    self._no_tasks(at, split)
                elif self.thorough:
                    self._check_repeats(job, drawn, seed, at)
        except (Exception, SystemExit) as error:
            remedy = _NO_REFERENCE if "'reference'" in str(error) else _TASK_NEEDS
            place = places.of_error(error, self.module)
            text = f"tasks({split!r}, seed) raises {described(error)}; {remedy}"
            self.report.mistake(place, text, kind=type(error).__name__)
        return [found for found in drawn if isinstance(found.task, Task)]

    def _first(self, made: Any, at: SourceLocation, split: str, session: str) -> Iterator[Drawn]:
        began = time.monotonic()
        for number, task in enumerate(islice(made, _TASKS_DRAWN if self.thorough else _TASKS_DRAWN_QUICKLY)):
            place = places.of_yield(made, at)
            if not isinstance(task, Task):
                text = f"tasks({split!r}, seed) yields {type(task).__name__}, not Task; {_TASK_NEEDS}"
                self.report.mistake(place, text, kind="not Task")
            yield Drawn(task, place, split, session, number)
            if not self.thorough and time.monotonic() - began > _DRAWING_SECONDS_QUICK:
                return

    def _no_tasks(self, at: SourceLocation, split: str) -> None:
        text = f"tasks({split!r}, seed) yields no task"
        if split == "heldout":
            self.report.warn(at, f"{text}: nothing is evaluated")
        else:
            self.report.mistake(at, f"{text}: it must go on yielding tasks, without an end")

    def _check_repeats(self, job: Job, drawn: list[Drawn], seed: int, at: SourceLocation) -> None:
        """A feeder that restarts draws again: other tasks would then carry the ids of those on the log."""
        split, middle = drawn[0].split, len(drawn) // 2
        expected = [found.task for found in drawn]
        if list(islice(job.tasks(split, seed), len(drawn))) != expected:
            text = f"tasks({split!r}, seed) yields other tasks the second time: draw from random.Random(seed) alone"
            self.report.mistake(at, text, kind="repeats")
        elif list(islice(job.tasks(split, seed, middle), len(drawn) - middle)) != expected[middle:]:
            text = f"tasks({split!r}, seed, start={middle}) does not begin with task number {middle} of start=0"
            self.report.mistake(at, f"{text}: count from start", kind="start")
        if len(drawn) < _TASKS_DRAWN:
            text = f"tasks({split!r}, seed) ends after {len(drawn)} tasks: a run that needs more of them waits for ever"
            self.report.warn(at, text)

    def _check_task(self, found: Drawn, names: KnownNames) -> None:
        task = found.task
        problems = list(_problems_of_values(task)) or list(names.problems(task))
        world = None if problems and not isinstance(task.world, str) else _problem_of_world(task)
        found.is_playable = not problems and world is None
        for problem in problems:
            self.report.mistake(found.place, problem)
        if world is not None:
            self.report.mistake(found.place, world, kind="world")

    def _tasks_of_file(self, file: Path, names: KnownNames) -> list[Drawn]:
        drawn: list[Drawn] = []
        with self.report.step("tasks file") as step:
            try:
                lines = file.read_bytes().splitlines()
            except OSError:
                return []  # told by the check of the config
            bad = 0
            for number, line in read_lines(lines, names, group_size=1):
                if isinstance(line, str):
                    bad += 1
                    if bad <= _LINES_NAMED_MAX:
                        self.report.mistake(SourceLocation(file, number), line)
                else:
                    drawn.append(Drawn(line[1], SourceLocation(file, number), line[1].split, line[1].split, number))
            if bad > _LINES_NAMED_MAX:
                self.report.mistake(SourceLocation(file), f"{bad - _LINES_NAMED_MAX} more lines are bad")
            if not any(found.split == "train" for found in drawn) and not bad:
                self.report.mistake(SourceLocation(file), "it has no task of split train: add some")
            step.name = f"tasks file {SourceLocation(file)}: {len(drawn)} tasks"
        return drawn


def _problems_of_values(task: Task) -> Iterator[str]:
    """Fields whose values cannot be written to the log: a class of ours checks nothing when it is made."""
    try:
        msgspec.convert(msgspec.to_builtins(task), Task)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        what, _, where = str(error).replace("`", "").partition(" - at $.")
        yield f"a Task cannot have this {where or 'value'}: {what}"


def _problem_of_world(task: Task) -> str | None:
    try:
        world_from_json(task.world)
    except (ValueError, msgspec.MsgspecError) as error:
        shown = task.world if len(task.world) <= 40 else f"{task.world[:40]}…"
        return (
            f"the world of a task cannot be used: {error} (it is {shown!r}); it is JSON such as "
            '{"name": "empty"}, or World(name=…).to_json()'
        )
    return None


def _place_in_agents(file: Path, text: str) -> SourceLocation:
    """The line of a file of agents that a message is about."""
    place = places.of_toml_error(file, text)
    if place.line is not None or not file.is_file():
        return place
    where = re.search(r"- at `\$\.([^`]+)`", text)
    if where is not None:
        return places.of_setting(file, where.group(1).replace("[...]", ".NAME"))
    for name in re.findall(r"'([^']+)'", text):
        for table in ("agents", "topologies", "models"):
            found = places.of_setting(file, f"{table}.{name}")
            if found.line is not None:
                return found
    return place


def _without(text: str, file: Path) -> str:
    """A sentence without the file that its place names already."""
    return text.removeprefix(f"{file}: ").removeprefix(f"{file} ")
