"""Checks a job file and what it names without a sandbox: config, module, agents, tasks. Then starts the trial."""

import inspect
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from replayground.deploy.checking import places
from replayground.deploy.checking.places import SourceLocation
from replayground.deploy.checking.report import CheckReport, described, within
from replayground.deploy.checking.trial import Drawn, Subject, try_job
from replayground.deploy.config import Config, examine, read_toml
from replayground.deploy.resolve import read_request
from replayground.deploy.sources import origin_of
from replayground.producers.task_lines import KnownNames, read_lines
from replayground.producers.tasks import DEMONSTRATIONS, TRAINING, require_teacher, seed_of
from replayground.producers.topology import AgentCatalog, agent_catalog_of
from replayground.sandboxes.worlds.world import world_from_json
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task
from replayground.schemas.job import Job, load_job
from replayground.streams.judges.program import keys_of
from replayground.streams.rules.judges import judges_of
from replayground.streams.rules.scoring import scorers_by_name

_TASKS_DRAWN = 50
"of each session, in a thorough check"
_TASKS_DRAWN_QUICKLY = 4
_DRAWING_SECONDS_QUICK = 0.2
_LINES_NAMED_MAX = 20
"bad lines of a tasks file that are printed; the rest is counted"
_TASK_NEEDS = "a Task needs prompt, reference, agent, toolset, world, scorers, group_size and split"
_NO_REFERENCE = "give every Task a reference; reference=None where no answer is the right one"


def check_job(source: Path, seed: int, report: CheckReport, *, thorough: bool) -> None:
    """Checks a job and adds every mistake to the report. Without `thorough` it takes about a second: a few tasks, no
    browser, no MCP server and no model server."""
    config = _check_config(source, report)
    if config is not None:
        _JobCheck(source, config, seed, report, thorough).run()


def _check_config(source: Path, report: CheckReport) -> Config | None:
    """The config without its wrong settings, so that the rest can be checked; None when it cannot be read."""
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
                # Finds what is valid but must not be stored, such as a password in plain text.
                read_request(source)
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
        self._judges(job)
        drawn = self._tasks(job, agent_catalog or AgentCatalog())
        if agent_catalog is not None:
            self._trains(agent_catalog, drawn)
        if not drawn:
            return
        subject = Subject(self.source, self.config, job, agent_catalog, self.module, self.seed, tuple(drawn))
        try_job(subject, self.report, thorough=self.thorough)

    @property
    def module(self) -> Path:
        """The file of the job's module; the config file when the module has none."""
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
        # An exception of the module itself; then a module that does not exist; then a rule that the module breaks.
        if error.__cause__ is not None and module != self.source:
            return places.of_error(error.__cause__, module)
        if module == self.source or not module.is_file():
            return places.of_setting(self.source, "job.module")
        # load_job begins such messages with the name: "TOOLS of job module … is Tool, not a tuple of …".
        name = str(error).partition(" ")[0]
        return places.of_definition(module, name) if name.isupper() else SourceLocation(module, 1)

    def _agent_catalog(self, job: Job) -> AgentCatalog | None:
        """The agents of the job; an empty catalog when it defines none, None when the definition is wrong."""
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

    def _judges(self, job: Job) -> None:
        """Checks that the job's judges have an endpoint, a key and the program that asks them."""
        judges = judges_of(job.scorers)
        if not judges:
            return
        try:
            keys_of(scorers_by_name(job.scorers), self.config.judge)
        except BadInput as error:
            self.report.mistake(places.of_setting(self.source, "judge.endpoints"), str(error))
        if "judge" not in self.config.harness.programs:
            text = f"harness.programs lacks judge, and the job has judges ({', '.join(judges)}): add it"
            self.report.mistake(places.of_setting(self.source, "harness.programs"), text)

    def _trains(self, agent_catalog: AgentCatalog, drawn: list[Drawn]) -> None:
        """Checks the names in [job] trains: a misspelt agent would silently not be trained."""
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
        """The split and name of every session for which a run draws tasks."""
        if self.config.job.demonstrations > 0:
            yield "train", DEMONSTRATIONS
        yield "train", TRAINING
        if self.config.feeder.evaluation_tasks > 0:
            yield "heldout", "heldout"

    def _draw(self, job: Job, split: str, session: str) -> list[Drawn]:
        """The first tasks of a session, each with the line that yielded it."""
        # The seed that the feeder uses: the tasks that are checked are those of the run.
        seed = seed_of(self.seed, split, session)
        # Unwrapped: load_job may wrap `tasks`, and the line of the user's own function is wanted.
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
        # SystemExit too: a module that calls sys.exit() must not end the check without a word.
        except (Exception, SystemExit) as error:
            remedy = _NO_REFERENCE if "'reference'" in str(error) else _TASK_NEEDS
            place = places.of_error(error, self.module)
            text = f"tasks({split!r}, seed) raises {described(error)}; {remedy}"
            self.report.mistake(place, text, kind=type(error).__name__)
        return [found for found in drawn if isinstance(found.task, Task)]

    def _first(self, made: Any, at: SourceLocation, split: str, session: str) -> Iterator[Drawn]:
        began = time.monotonic()
        for number, task in enumerate(islice(made, _TASKS_DRAWN if self.thorough else _TASKS_DRAWN_QUICKLY)):
            # Now, while the generator is suspended at the yield of this very task.
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
        """Checks that `tasks` repeats: the same seed gives the same tasks, and `start` skips exactly that many."""
        # A restarted feeder draws again, and ids are derived from numbers: other tasks would reuse ids on the log.
        split, middle = drawn[0].split, len(drawn) // 2
        expected = [found.task for found in drawn]
        if list(islice(job.tasks(split, seed), len(drawn))) != expected:
            text = f"tasks({split!r}, seed) yields other tasks the second time: draw from random.Random(seed) alone"
            self.report.mistake(at, text, kind="repeats")
        elif list(islice(job.tasks(split, seed, middle), len(drawn) - middle)) != expected[middle:]:
            text = f"tasks({split!r}, seed, start={middle}) does not begin with task number {middle} of start=0"
            self.report.mistake(at, f"{text}: count from start", kind="start")
        if len(drawn) < _TASKS_DRAWN:
            text = f"tasks({split!r}, seed) ends after {len(drawn)} tasks: a run that needs more waits for ever"
            self.report.warn(at, text)

    def _check_task(self, found: Drawn, names: KnownNames) -> None:
        task = found.task
        # Names are looked up only in a task whose values have the right types.
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
                # The check of the config has reported it.
                return []
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
    """Fields whose values cannot be written to the log."""
    # msgspec structs do not check types when they are made, only when they are decoded.
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
    """The line of an agents file that a message is about."""
    # In order of precision: the line of a TOML error, the path in a message of msgspec, a quoted name.
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
    """A message without its leading file name, which the place of the mistake contains already."""
    return text.removeprefix(f"{file}: ").removeprefix(f"{file} ")
