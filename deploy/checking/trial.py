"""Tries a job on a few of its tasks, with the parts that a run has: its tokenizer, sandboxes, tools, teacher, agents, scorers.

What a browser, an MCP server, a model behind a server or a tool outside the sandbox does is tried by a thorough check only.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from deploy.checking import places
from deploy.checking.places import SourceLocation
from deploy.checking.report import CheckReport, described, within
from deploy.config import Config
from producers.attempt import without_world
from producers.chat import CHAT_FILES, Chat, chat_of
from producers.policy import Demonstrator, Policy, PolicyFailed, Turn, TurnRequest, served_models
from producers.rollouts import backend_of, system_prompt_of
from producers.tasks import DEMONSTRATIONS, DEMONSTRATOR
from producers.topology import AgentCatalog
from producers.turns import hash_of_tools, play
from sandboxes.backends.enclosed import EnclosedBackend
from sandboxes.outside.contract import OutsideFailed, OutsideTool
from sandboxes.outside.providers import FAMILIES, MCP_PREFIX, Outside
from sandboxes.pool import Pool
from sandboxes.protocol import Backend, SandboxFailed, SandboxUnavailable
from sandboxes.tools.registry import toolset
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Workbench
from sandboxes.worlds.world import set_up_world, world_from_json
from schemas.errors import BadInput
from schemas.events import (
    Address,
    Event,
    Meta,
    Purpose,
    RolloutEnded,
    RolloutRequested,
    Task,
    ToolObserved,
    TrajectoryAssembled,
    VersionSpan,
)
from schemas.ids import new_id, now_microseconds
from schemas.job import Job, Scorer
from streams.hops.messages_to_trajectories import AssembleTrajectories
from streams.rules.scoring import checked, scorers_by_name
from trainer.tokenizer import fit_tokenizer

_DEMONSTRATIONS = 8
_DEMONSTRATIONS_QUICK = 4
_TEACHING_SECONDS_QUICK = 0.5
_TEXTS_QUICK = 500
_ROLLOUT_SECONDS_MAX = 30.0
_MODEL_SECONDS_MAX = 10.0
"how long a check waits for a model behind a server"
_WRONG_ANSWER = "(a wrong answer, made up by the check)"


@dataclass
class Drawn:
    """A task of the job, and where it was made."""

    task: Task
    place: SourceLocation
    split: str
    session: str
    number: int
    is_playable: bool = True
    "false when a mistake in it was told already"


@dataclass(frozen=True)
class Subject:
    """What is tried."""

    source: Path
    config: Config
    job: Job
    agent_catalog: AgentCatalog | None
    "None when it is wrong"
    module: Path
    seed: int
    drawn: tuple[Drawn, ...]


@dataclass
class _Played:
    """A rollout that was tried."""

    drawn: Drawn
    ended: RolloutEnded
    trajectory: TrajectoryAssembled | None
    observed: list[ToolObserved]


def try_job(subject: Subject, report: CheckReport, *, thorough: bool) -> None:
    """Takes every mistake into the report."""
    chat = _chat(subject, report, thorough)
    if chat is not None:
        asyncio.run(_Trial(subject, report, thorough, chat).run())


def _chat(subject: Subject, report: CheckReport, thorough: bool) -> Chat | None:
    """The chat format of the run's model."""
    config, job = subject.config, subject.job
    folder = config.trainer.model.path
    with report.step("tokenizer") as step:
        try:
            if folder is not None and (Path(folder) / "tokenizer.json").is_file():  # else it was told already
                step.name = f"tokenizer of {folder}"
                found = [Path(folder) / name for name in CHAT_FILES]
                return chat_of({path.name: path.read_bytes() for path in found if path.is_file()})
            with within():
                fitted = fit_tokenizer(
                    job if thorough else _with_fewer_texts(subject), subject.seed, config.trainer.model.vocabulary_size
                )
            return chat_of({"tokenizer.json": fitted.to_str().encode()})
        except BadInput as error:
            report.mistake(places.of_setting(subject.source, "trainer.model.path"), str(error))
        except (Exception, SystemExit) as error:
            text = f"texts(seed) raises {described(error)}; it must yield texts that the tokenizer is fitted to"
            report.mistake(places.of_error(error, subject.module), text)
    return None


def _with_fewer_texts(subject: Subject) -> Job:
    texts = subject.job.texts
    prompts = [drawn.task.prompt for drawn in subject.drawn]

    def few(seed: int) -> Iterator[str]:
        return iter(prompts) if texts is None else islice(texts(seed), _TEXTS_QUICK)

    return dataclasses.replace(subject.job, texts=few)


class _Answers:
    """Speaks for whoever has a turn: always the same text, sampled by weights that do not exist."""

    def __init__(self, chat: Chat, text: str) -> None:
        self._tokens = chat.turn(text)

    async def next_turn(self, request: TurnRequest) -> Turn:
        count = len(self._tokens)
        return Turn(self._tokens, [0.0] * count, [VersionSpan(version=1, start=0, end=count)], "stop")


@dataclass
class _Teacher:
    """The job's demonstrate, whose exceptions are kept: a rollout would only tell their text."""

    demonstrate: Callable[[Task, list[tuple[str, str]], int], str]
    errors: list[BaseException] = field(default_factory=list)

    def __call__(self, task: Task, turns: list[tuple[str, str]], seed: int) -> str:
        try:
            with within():
                said = self.demonstrate(task, turns, seed)
            if not isinstance(said, str):
                raise TypeError(f"it returned {type(said).__name__}, not the text of a turn")
            return said
        except (Exception, SystemExit) as error:
            self.errors.append(error)
            raise PolicyFailed(described(error)) from error


@dataclass
class _Trial:
    subject: Subject
    report: CheckReport
    thorough: bool
    chat: Chat
    played: list[_Played] = field(default_factory=list)
    pool: Pool = field(init=False)
    outside: Outside | None = None
    models: dict[str, Policy] = field(default_factory=dict)

    async def run(self) -> None:
        backend = backend_of(self.subject.job, self.subject.config.rollouts)
        try:
            async with Pool(backend, 1, warm=0) as self.pool, contextlib.AsyncExitStack() as stack:
                if self.subject.agent_catalog is None or not self._drawn():
                    self.report.note("not tried, because of the above: sandbox, teacher, agents, tools")
                elif await self._opens_sandbox(backend):
                    await self._open_models(stack, self.subject.agent_catalog)
                    await self._open_outside(stack)
                    await self._try_teacher(self.subject.agent_catalog)
                    await self._try_agents(self.subject.agent_catalog)
                    if self.thorough:
                        await self._try_tools()
                await self._try_scorers()
        finally:
            if isinstance(backend, EnclosedBackend):
                backend.close()

    # what a rollout needs

    async def _opens_sandbox(self, backend: Backend) -> bool:
        """Opens a sandbox that knows the job's tools, and puts worlds of tasks into it."""
        place = places.of_setting(self.subject.source, "rollouts.isolation")
        with self.report.step(f"sandbox by {backend.isolation}") as step:
            worlds = 0
            for drawn in self._playable():
                parts = {name: part for name in ("files", "tables", "keys") if (part := _part(drawn.task, name))}
                try:
                    async with self.pool.lease(owner="check", seconds=_ROLLOUT_SECONDS_MAX) as sandbox:
                        result = await sandbox.call(set_up_world.name, parts, "world") if parts else None
                except SandboxUnavailable as error:
                    self.report.mistake(place, f"{error}; `replayground doctor` says all that is missing")
                    return False
                except SandboxFailed as error:
                    self.report.mistake(place, f"no sandbox could be opened: {error}; ask `replayground doctor`")
                    return False
                worlds += 1
                if result is not None and result.is_error:
                    self.report.mistake(drawn.place, f"the world of a task cannot be set up: {result.content}")
            step.name = f"sandbox by {backend.isolation}, with {worlds} worlds"
        return True

    async def _open_models(self, stack: contextlib.AsyncExitStack, agent_catalog: AgentCatalog) -> None:
        """Models other than the policy: behind their servers, or, by a quick check, replaced by who knows the answer."""
        brief = {
            name: msgspec.structs.replace(
                model, timeout_seconds=min(model.timeout_seconds, _MODEL_SECONDS_MAX), patience_seconds=0.0
            )
            for name, model in agent_catalog.models.items()
        }
        try:
            self.models = dict(await stack.enter_async_context(served_models(brief, self.chat)))
        except BadInput as error:
            agents = self.subject.config.job.agents
            self.report.mistake(SourceLocation(Path(agents) if agents else self.subject.module), str(error))
        if not self.thorough:
            if agent_catalog.models:
                self.report.note(
                    f"not asked: the servers of {', '.join(agent_catalog.models)}; `replayground check` asks them"
                )
            self.models = {name: _Answers(self.chat, _answer_text(_WRONG_ANSWER)) for name in agent_catalog.models}

    async def _open_outside(self, stack: contextlib.AsyncExitStack) -> None:
        """Tools outside the sandbox, if a task has any."""
        names = sorted({name for drawn in self._drawn() for name in self._tools_outside(drawn.task)})
        if not names:
            return
        if not self.thorough:
            self.report.note(f"not tried: {', '.join(names)}; `replayground check` tries tools outside the sandbox")
            return
        with self.report.step(f"tools outside the sandbox: {', '.join(names)}"):
            try:
                outside = Outside(self.subject.config.rollouts.tools, self.subject.job.tools)
                self.outside = await stack.enter_async_context(outside)
            except OutsideFailed as error:
                self.report.mistake(places.of_setting(self.subject.source, "rollouts.tools"), str(error))

    def _drawn(self) -> list[Drawn]:
        return [drawn for drawn in self.subject.drawn if drawn.is_playable]

    def _playable(self) -> list[Drawn]:
        """The first task of each session, and of each agent that is named."""
        seen: set[tuple[str, str]] = set()
        chosen: list[Drawn] = []
        for drawn in self._drawn():
            if (drawn.session, drawn.task.agent) not in seen:
                seen.add((drawn.session, drawn.task.agent))
                chosen.append(drawn)
        return chosen

    def _tools_outside(self, task: Task) -> list[str]:
        own = {tool.name for tool in self.subject.job.tools if isinstance(tool, OutsideTool)}
        names = (self.subject.agent_catalog or AgentCatalog()).tools_of(task)
        return [name for name in names if name in FAMILIES or name in own or name.startswith(MCP_PREFIX)]

    def _tools(self, drawn: Drawn, agent_catalog: AgentCatalog) -> dict[str, Tool] | None:
        """The tools of a task; None when some cannot be tried now."""
        if self.outside is None and self._tools_outside(drawn.task):
            return None
        outside = self.outside.tools if self.outside is not None else ()
        try:
            return toolset(agent_catalog.tools_of(drawn.task), [*self.subject.job.tools, *outside])
        except ValueError as error:
            self.report.mistake(drawn.place, str(error))
            return None

    # what is tried

    async def _try_teacher(self, agent_catalog: AgentCatalog) -> None:
        config, demonstrate = self.subject.config, self.subject.job.demonstrate
        tasks = [drawn for drawn in self._drawn() if drawn.session in (DEMONSTRATIONS, "train")]
        if config.job.demonstrations == 0 or not tasks:
            return
        if demonstrate is None and not any(agent.teacher for agent in agent_catalog.agents.values()):
            return  # told already
        teacher = _Teacher(demonstrate or _nobody)
        with self.report.step("teacher") as step:
            played = await self._demonstrations(tasks, teacher, agent_catalog)
            self._judge_teacher(played, teacher)
            answered = sum(one.ended.ended_by == "answered" for one in played)
            step.name = f"teacher: {len(played)} demonstrations, {answered} with an answer{_calls(played)}"
        self._judge_tools(played)

    async def _demonstrations(
        self, tasks: list[Drawn], teacher: _Teacher, agent_catalog: AgentCatalog
    ) -> list[_Played]:
        """Several, since a teacher may well draw what it does; fewer when they are slow and the check is quick."""
        count, began = _DEMONSTRATIONS if self.thorough else _DEMONSTRATIONS_QUICK, time.monotonic()
        played: list[_Played] = []
        for number, drawn in enumerate(tasks[:count]):
            tools = self._tools(drawn, agent_catalog)
            if tools is not None:
                agent = drawn.task.agent if agent_catalog.plays(drawn.task.agent) else DEMONSTRATOR
                task = msgspec.structs.replace(drawn.task, agent=agent)
                policy = Demonstrator(teacher, self.chat)
                played.append(await self._play(drawn, task, policy, tools, agent_catalog, "demonstrate", seed=number))
            if not self.thorough and time.monotonic() - began > _TEACHING_SECONDS_QUICK:
                break
        self.played += played
        return played

    def _judge_teacher(self, played: list[_Played], teacher: _Teacher) -> None:
        job, module = self.subject.job, self.subject.module
        at = places.of_code(job.demonstrate, module)
        for error in teacher.errors:
            place = places.of_error(error, module)
            text = f"demonstrate raises {described(error)}; for (task, turns, seed) it must return the text of the next turn"
            self.report.mistake(place if place.line is not None else at, text, kind=type(error).__name__)
        for one in played:
            if one.ended.ended_by == "infra_error" and not teacher.errors:
                self.report.mistake(at, f"a demonstration fails: {one.ended.reason}")
        if played and not any(one.ended.ended_by in ("answered", "infra_error") for one in played):
            ends = ", ".join(sorted({f"{one.ended.ended_by} ({one.ended.reason})" for one in played}))
            self.report.warn(at, f"none of {len(played)} demonstrations ends with <answer>…</answer>: {ends}")

    def _judge_tools(self, played: list[_Played]) -> None:
        """An exception inside one of the job's tools. What the weather of a world did to a call is no mistake."""
        for tool in (tool for tool in self.subject.job.tools if tool.source):
            observed = [o for one in played for o in one.observed if o.tool == tool.name and o.perturbation is None]
            failed = [o for o in observed if o.error_kind == "tool"]
            if failed:
                place = places.of_definition(self.subject.module, tool.name)
                text = f"the tool {tool.name} fails when the teacher calls it: {failed[0].content}"
                remedy = "mend it; what an agent does wrong is told by ToolError"
                tell = self.report.mistake if len(failed) == len(observed) else self.report.warn
                tell(place, f"{text}; {remedy}")

    async def _try_agents(self, agent_catalog: AgentCatalog) -> None:
        """Everybody answers at once: prompts, templates, tools and topologies are put together as in a run."""
        found = [
            (drawn, tools) for drawn in self._playable() if (tools := self._tools(drawn, agent_catalog)) is not None
        ]
        if not found:
            return  # told by what is outside the sandbox
        with self.report.step(f"task played by {', '.join(sorted({drawn.task.agent for drawn, _ in found}))}"):
            for drawn, tools in found:
                policy = _Answers(self.chat, _answer_text(drawn.task.reference or _WRONG_ANSWER))
                one = await self._play(drawn, drawn.task, policy, tools, agent_catalog, "train", seed=0)
                if one.ended.ended_by == "infra_error":
                    self.report.mistake(drawn.place, f"a task cannot be played: {one.ended.reason}")
                elif one.ended.ended_by == "token_limit":
                    self.report.warn(drawn.place, f"{one.ended.reason}: raise [feeder.sampling] tokens_max")

    async def _try_tools(self) -> None:
        """Tools of the job that no demonstration called, with the plainest arguments that their schema allows."""
        called = {observed.tool for one in self.played for observed in one.observed}
        rest = [tool for tool in self.subject.job.tools if tool.source and tool.name not in called]
        for tool in rest:
            arguments = sample_arguments(tool.parameters)
            with self.report.step(f"tool {tool.name} with {msgspec.json.encode(arguments).decode()}"):
                async with Workbench(self.pool, {tool.name: tool}, seed=0, owner="check") as bench:
                    observation = await bench.call(tool.name, arguments)
                if observation.error_kind == "tool":
                    place = places.of_definition(self.subject.module, tool.name)
                    text = f"the tool {tool.name} fails with {arguments}: {observation.content}"
                    self.report.warn(place, f"{text}; what an agent does wrong is told by ToolError")

    async def _try_scorers(self) -> None:
        """Every scorer that a task names, on an attempt that is right, one that is wrong, one without an answer, and what
        the teacher did."""
        known = scorers_by_name(self.subject.job.scorers)
        tasks = [drawn for drawn in self.subject.drawn if _is_scored_as_played(drawn)]
        attempts = [attempt for drawn in _one_of_each(tasks) for attempt in await self._attempts_at(drawn)]
        attempts += [(one.drawn, one.trajectory) for one in self.played if one.trajectory is not None]
        names = list(dict.fromkeys(name for drawn, _ in attempts for name in drawn.task.scorers if name in known))
        for name in names:
            with self.report.step(f"scorer {name}"):
                self._try_scorer(known[name], [one for one in attempts if name in one[0].task.scorers])

    def _try_scorer(self, scorer: Scorer, attempts: Sequence[tuple[Drawn, TrajectoryAssembled]]) -> None:
        module = self.subject.module
        at = places.of_code(scorer.score, module)
        excluded: dict[str, Drawn] = {}
        is_scored = False
        for drawn, trajectory in attempts:
            answer = "without an answer" if trajectory.answer is None else f"with the answer {trajectory.answer[:40]!r}"
            try:
                with within():
                    score = checked(scorer.score(trajectory))
            except (Exception, SystemExit) as error:
                place = places.of_error(error, module)
                text = f"scorer {scorer.name} fails on an attempt {answer}: {described(error)}"
                remedy = "it must return a Score with a finite number for every attempt"
                if drawn.task.reference is None:
                    remedy += "; this task has no reference: give it one, or name another scorer"
                where = place if place.line is not None else at
                self.report.mistake(where, f"{text}; {remedy}", kind=f"{scorer.name} {type(error).__name__}")
                continue
            if score.excluded_because is None:
                is_scored = True
            else:
                excluded[score.excluded_because] = drawn
        for reason, drawn in excluded.items() if not is_scored else ():
            text = f"scorer {scorer.name} excludes every attempt that was tried: {reason}"
            self.report.mistake(drawn.place, f"{text}; {_remedy_of_exclusion(drawn.task)}")

    async def _attempts_at(self, drawn: Drawn) -> list[tuple[Drawn, TrajectoryAssembled]]:
        """Attempts by nobody, which need no sandbox and no tool."""
        plain = msgspec.structs.replace(drawn.task, toolset=[], world='{"name":"empty"}')
        texts = [_answer_text(drawn.task.reference or ""), _answer_text(_WRONG_ANSWER), "neither a call nor an answer"]
        played = [
            await self._play(drawn, plain, _Answers(self.chat, text), {}, AgentCatalog(), "train", seed=0)
            for text in texts
        ]
        return [
            (drawn, msgspec.structs.replace(one.trajectory, task=without_world(drawn.task)))
            for one in played
            if one.trajectory is not None
        ]

    async def _play(
        self,
        drawn: Drawn,
        task: Task,
        policy: Policy,
        tools: dict[str, Tool],
        agent_catalog: AgentCatalog,
        purpose: Purpose,
        *,
        seed: int,
    ) -> _Played:
        events: list[Event] = []
        ended = await play(
            _request(task, self.subject.config, purpose, seed),
            policy=policy,
            bench=Workbench(self.pool, tools, world_from_json(task.world), seed=seed, owner="check"),
            chat=self.chat,
            system_prompt=system_prompt_of(self.subject.job, task),
            worker="check",
            emit=events.append,
            keep_blob=_keep_nothing,
            tools_hash=hash_of_tools(tools),
            agent_catalog=agent_catalog,
            models=self.models,
        )
        observed = [event for event in events if isinstance(event, ToolObserved)]
        return _Played(drawn, ended, _assembled(events), observed)


def sample_arguments(parameters: dict[str, Any]) -> dict[str, Any]:
    """The plainest arguments that a JSON schema of a tool asks for: those that are required."""
    properties = parameters.get("properties", {})
    return {name: _sample(properties.get(name, {})) for name in parameters.get("required", ())}


_SAMPLES: dict[str, Any] = {"integer": 1, "number": 1.0, "string": "a", "boolean": True, "array": [], "object": {}}


def _sample(schema: dict[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return _sample(schema["anyOf"][0])
    return _SAMPLES.get(schema.get("type", ""))


def _request(task: Task, config: Config, purpose: Purpose, seed: int) -> RolloutRequested:
    now = now_microseconds()
    return RolloutRequested(
        meta=Meta(
            id=new_id(),
            run_id="check",
            session_id="check",
            task_id=new_id(),
            group_id=new_id(),
            trajectory_id=new_id(),
            category="rollout",
            topic="rollouts",
            sender="check",
            timestamp=now,
            purpose=purpose,
        ),
        task=task,
        index=0,
        seed=seed,
        sampling=config.feeder.sampling,
        deadline=now + int(_ROLLOUT_SECONDS_MAX * 1e6),
    )


def _assembled(events: Sequence[Event]) -> TrajectoryAssembled | None:
    """The trajectory of an attempt, by the hop that assembles those of a run."""
    hop, state = AssembleTrajectories(), None
    for offset, event in enumerate(events):
        outcome = hop.step(state, event, Address(topic="messages", partition=0, offset=offset))
        state = outcome.state
        for made in outcome.events:
            if isinstance(made, TrajectoryAssembled):
                return made
    return None


def _calls(played: list[_Played]) -> str:
    calls = Counter(observed.tool for one in played for observed in one.observed if observed.tool)
    return "".join(f", {count} calls of {tool}" for tool, count in sorted(calls.items()))


def _one_of_each(tasks: list[Drawn]) -> list[Drawn]:
    """One task for each set of scorers and split, and for those with and without a reference."""
    chosen: dict[tuple[Any, ...], Drawn] = {}
    for drawn in tasks:
        chosen.setdefault((drawn.split, drawn.task.reference is None, *drawn.task.scorers), drawn)
    return list(chosen.values())


def _is_scored_as_played(drawn: Drawn) -> bool:
    """Values that are wrong in kind would make scorers fail for what was told already."""
    return isinstance(drawn.task.prompt, str) and isinstance(drawn.task.reference, str | None)


def _remedy_of_exclusion(task: Task) -> str:
    return "give its tasks a reference, or name another scorer" if task.reference is None else "look at the scorer"


def _part(task: Task, name: str) -> dict[str, Any]:
    return world_from_json(task.world).part(name)


def _answer_text(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _nobody(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    raise BadInput(f"the agent {task.agent!r} has no teacher, and the job has no function demonstrate")


async def _keep_nothing(data: bytes) -> str:
    return ""
