"""Plays a few tasks of a job with the parts of a run: tokenizer, sandboxes, tools, teacher, agents, scorers.

Only a thorough check uses browsers, MCP servers, model servers and other tools outside the sandbox.
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

from replayground.deploy.checking import places
from replayground.deploy.checking.places import SourceLocation
from replayground.deploy.checking.report import CheckReport, described, within
from replayground.deploy.config import Config
from replayground.producers.attempt import without_world
from replayground.producers.chat import CHAT_FILES, Chat, chat_of
from replayground.producers.policy import Demonstrator, Policy, PolicyFailed, Turn, TurnRequest, served_models
from replayground.producers.rollouts import backend_of, system_prompt_of
from replayground.producers.tasks import DEMONSTRATIONS, DEMONSTRATOR
from replayground.producers.topology import AgentCatalog
from replayground.producers.turns import hash_of_tools, play
from replayground.sandboxes.backends.enclosed import EnclosedBackend
from replayground.sandboxes.outside.contract import OutsideFailed, OutsideTool
from replayground.sandboxes.outside.providers import FAMILIES, MCP_PREFIX, Outside
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Backend, SandboxFailed, SandboxUnavailable
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import set_up_world, world_from_json
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
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
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.job import Job, Scorer
from replayground.streams.hops.messages_to_trajectories import AssembleTrajectories
from replayground.streams.rules.judges import judges_of
from replayground.streams.rules.scoring import checked, scorers_by_name
from replayground.trainer.tokenizer import fit_tokenizer

# Several, since a teacher may draw at random what it does.
_DEMONSTRATIONS = 8
_DEMONSTRATIONS_QUICK = 4
_TEACHING_SECONDS_QUICK = 0.5
_TEXTS_QUICK = 500
_ROLLOUT_SECONDS_MAX = 30.0
_MODEL_SECONDS_MAX = 10.0
"how long a check waits for the answer of a model server"
_WRONG_ANSWER = "(a wrong answer, made up by the check)"


@dataclass
class Drawn:
    """A task of the job, and the line that made it."""

    task: Task
    place: SourceLocation
    split: str
    session: str
    number: int
    is_playable: bool = True
    "False when a mistake in it was reported already"


@dataclass(frozen=True)
class Subject:
    """The job under test, loaded."""

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
    """A rollout that was played by the check."""

    drawn: Drawn
    ended: RolloutEnded
    trajectory: TrajectoryAssembled | None
    observed: list[ToolObserved]


def try_job(subject: Subject, report: CheckReport, *, thorough: bool) -> None:
    """Plays tasks of the job and adds every mistake to the report. Blocks for seconds."""
    chat = _chat(subject, report, thorough)
    if chat is not None:
        asyncio.run(_Trial(subject, report, thorough, chat).run())


def _chat(subject: Subject, report: CheckReport, thorough: bool) -> Chat | None:
    """The chat format of the run's model; None when it cannot be made."""
    config, job = subject.config, subject.job
    folder = config.trainer.model.path
    with report.step("tokenizer") as step:
        try:
            # A model folder without a tokenizer was reported by the check of the config.
            if folder is not None and (Path(folder) / "tokenizer.json").is_file():
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
    """The job with few texts for the tokenizer: fitting it to all of them takes too long for a quick check."""
    texts = subject.job.texts
    prompts = [drawn.task.prompt for drawn in subject.drawn]

    def few(seed: int) -> Iterator[str]:
        return iter(prompts) if texts is None else islice(texts(seed), _TEXTS_QUICK)

    return dataclasses.replace(subject.job, texts=few)


class _Answers:
    """A policy that always answers with the same text, as if sampled by version 1."""

    def __init__(self, chat: Chat, text: str) -> None:
        self._tokens = chat.turn(text)

    async def next_turn(self, request: TurnRequest) -> Turn:
        count = len(self._tokens)
        return Turn(self._tokens, [0.0] * count, [VersionSpan(version=1, start=0, end=count)], "stop")


@dataclass
class _Teacher:
    """Wraps the job's `demonstrate` and keeps its exceptions: a rollout passes on only their text, not their line."""

    demonstrate: Callable[[Task, list[tuple[str, str]], int], str]
    errors: list[BaseException] = field(default_factory=list)

    def __call__(self, task: Task, turns: list[tuple[str, str]], seed: int) -> str:
        try:
            with within():
                said = self.demonstrate(task, turns, seed)
            # Such as a function that ends without `return`: encoding None would fail far from its cause.
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
        # One sandbox at a time: a check plays its rollouts one after another.
        try:
            async with Pool(backend, 1, warm=0) as self.pool, contextlib.AsyncExitStack() as stack:
                if self.subject.agent_catalog is None or not self._drawn():
                    self.report.note("not tried because of the mistakes above: sandbox, teacher, agents, tools")
                elif await self._opens_sandbox(backend):
                    await self._open_models(stack, self.subject.agent_catalog)
                    await self._open_outside(stack)
                    await self._try_teacher(self.subject.agent_catalog)
                    await self._try_agents(self.subject.agent_catalog)
                    if self.thorough:
                        await self._try_tools()
                # Needs no sandbox, so it is tried even if nothing else could be.
                await self._try_scorers()
        finally:
            if isinstance(backend, EnclosedBackend):
                backend.close()

    # What a rollout needs.

    async def _opens_sandbox(self, backend: Backend) -> bool:
        """Opens a sandbox and sets up the worlds of tasks in it; False when no sandbox can be opened."""
        # Mistakes of isolation belong to the config, mistakes of a world to the line of its task.
        place = places.of_setting(self.subject.source, "rollouts.isolation")
        with self.report.step(f"sandbox by {backend.isolation}") as step:
            worlds = 0
            for drawn in self._playable():
                parts = {name: part for name in ("files", "tables", "keys") if (part := _part(drawn.task, name))}
                try:
                    async with self.pool.lease(owner="check", seconds=_ROLLOUT_SECONDS_MAX) as sandbox:
                        result = await sandbox.call(set_up_world.name, parts, "world") if parts else None
                except SandboxUnavailable as error:
                    self.report.mistake(place, f"{error}; `replayground doctor` lists what is missing")
                    return False
                except SandboxFailed as error:
                    self.report.mistake(place, f"no sandbox could be opened: {error}; run `replayground doctor`")
                    return False
                worlds += 1
                if result is not None and result.is_error:
                    self.report.mistake(drawn.place, f"the world of a task cannot be set up: {result.content}")
            step.name = f"sandbox by {backend.isolation}, with {worlds} worlds"
        return True

    async def _open_models(self, stack: contextlib.AsyncExitStack, agent_catalog: AgentCatalog) -> None:
        """Opens the clients of models other than the policy; a quick check replaces them by a fixed answer."""
        # A server that does not answer should fail the check within seconds, whatever patience a run has.
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
                    f"not tried: the servers of {', '.join(agent_catalog.models)}; `replayground check` tries them"
                )
            self.models = {name: _Answers(self.chat, _answer_text(_WRONG_ANSWER)) for name in agent_catalog.models}

    async def _open_outside(self, stack: contextlib.AsyncExitStack) -> None:
        """Starts the tools outside the sandbox that tasks name; a quick check only names them."""
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
        """The first task of each pair of session and agent."""
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
        """The tools of a task; None when one of them cannot be used in this check."""
        if self.outside is None and self._tools_outside(drawn.task):
            return None
        outside = self.outside.tools if self.outside is not None else ()
        try:
            return toolset(agent_catalog.tools_of(drawn.task), [*self.subject.job.tools, *outside])
        except ValueError as error:
            self.report.mistake(drawn.place, str(error))
            return None

    # What is tried.

    async def _try_teacher(self, agent_catalog: AgentCatalog) -> None:
        config, demonstrate = self.subject.config, self.subject.job.demonstrate
        tasks = [drawn for drawn in self._drawn() if drawn.session in (DEMONSTRATIONS, "train")]
        if config.job.demonstrations == 0 or not tasks:
            return
        if demonstrate is None and not any(agent.teacher for agent in agent_catalog.agents.values()):
            return  # the check of the job has reported it
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
        """Plays demonstrations of the first tasks; a quick check stops after half a second."""
        count, began = _DEMONSTRATIONS if self.thorough else _DEMONSTRATIONS_QUICK, time.monotonic()
        played: list[_Played] = []
        for number, drawn in enumerate(tasks[:count]):
            tools = self._tools(drawn, agent_catalog)
            if tools is not None:
                # As the feeder submits it: a job without agents demonstrates under the name of the demonstrator.
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
            text = f"demonstrate raises {described(error)}; it must return the text of the next turn"
            self.report.mistake(place if place.line is not None else at, text, kind=type(error).__name__)
        # An exception of the teacher ends its rollout as infra_error; it was reported above, with its line.
        for one in played:
            if one.ended.ended_by == "infra_error" and not teacher.errors:
                self.report.mistake(at, f"a demonstration fails: {one.ended.reason}")
        if played and not any(one.ended.ended_by in ("answered", "infra_error") for one in played):
            ends = ", ".join(sorted({f"{one.ended.ended_by} ({one.ended.reason})" for one in played}))
            self.report.warn(at, f"none of {len(played)} demonstrations ends with <answer>…</answer>: {ends}")

    def _judge_tools(self, played: list[_Played]) -> None:
        """Reports tools of the job that raise. Calls that a perturbation of the world has failed do not count."""
        for tool in (tool for tool in self.subject.job.tools if tool.source):
            observed = [o for one in played for o in one.observed if o.tool == tool.name and o.perturbation is None]
            failed = [o for o in observed if o.error_kind == "tool"]
            if failed:
                place = places.of_definition(self.subject.module, tool.name)
                text = f"the tool {tool.name} fails when the teacher calls it: {failed[0].content}"
                remedy = "fix it; for a mistake of the agent, raise ToolError"
                # A tool that fails sometimes may be meant; one that always fails is a mistake.
                tell = self.report.mistake if len(failed) == len(observed) else self.report.warn
                tell(place, f"{text}; {remedy}")

    async def _try_agents(self, agent_catalog: AgentCatalog) -> None:
        """Plays tasks in which every agent answers at once: this renders prompts, tools and topologies as in a run."""
        found = [
            (drawn, tools) for drawn in self._playable() if (tools := self._tools(drawn, agent_catalog)) is not None
        ]
        if not found:
            return  # _open_outside or _tools has said why
        with self.report.step(f"task played by {', '.join(sorted({drawn.task.agent for drawn, _ in found}))}"):
            for drawn, tools in found:
                policy = _Answers(self.chat, _answer_text(drawn.task.reference or _WRONG_ANSWER))
                one = await self._play(drawn, drawn.task, policy, tools, agent_catalog, "train", seed=0)
                if one.ended.ended_by == "infra_error":
                    self.report.mistake(drawn.place, f"a task cannot be played: {one.ended.reason}")
                elif one.ended.ended_by == "token_limit":
                    self.report.warn(drawn.place, f"{one.ended.reason}: raise [feeder.sampling] tokens_max")

    async def _try_tools(self) -> None:
        """Calls the tools of the job that no demonstration called, with the simplest arguments of their schema."""
        called = {observed.tool for one in self.played for observed in one.observed}
        rest = [tool for tool in self.subject.job.tools if tool.source and tool.name not in called]
        for tool in rest:
            arguments = sample_arguments(tool.parameters)
            with self.report.step(f"tool {tool.name} with {msgspec.json.encode(arguments).decode()}"):
                async with Workbench(self.pool, {tool.name: tool}, seed=0, owner="check") as bench:
                    observation = await bench.call(tool.name, arguments)
                # Only a warning: the tool may rightly reject arguments that were made up.
                if observation.error_kind == "tool":
                    place = places.of_definition(self.subject.module, tool.name)
                    text = f"the tool {tool.name} fails with {arguments}: {observation.content}"
                    self.report.warn(place, f"{text}; for a mistake of the agent, raise ToolError")

    async def _try_scorers(self) -> None:
        """Runs every scorer that a task names on a right answer, a wrong one, none, and on the demonstrations."""
        known = scorers_by_name(self.subject.job.scorers)
        tasks = [drawn for drawn in self.subject.drawn if _is_scored_as_played(drawn)]
        attempts = [attempt for drawn in _one_of_each(tasks) for attempt in await self._attempts_at(drawn)]
        attempts += [(one.drawn, one.trajectory) for one in self.played if one.trajectory is not None]
        # Judges are not tried: each question costs, and people have no time for it.
        tried = known.keys() - judges_of(known).keys()
        names = list(dict.fromkeys(name for drawn, _ in attempts for name in drawn.task.scorers if name in tried))
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
            # In a run, an exception of a scorer excludes the trajectory; here the author should see it.
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
        # Excluding some attempts is a scorer's right; excluding all of them leaves nothing to train on.
        for reason, drawn in excluded.items() if not is_scored else ():
            text = f"scorer {scorer.name} excludes every attempt that was tried: {reason}"
            self.report.mistake(drawn.place, f"{text}; {_remedy_of_exclusion(drawn.task)}")

    async def _attempts_at(self, drawn: Drawn) -> list[tuple[Drawn, TrajectoryAssembled]]:
        """Trajectories with a right answer, a wrong one and none, made without a sandbox or tools."""
        plain = msgspec.structs.replace(drawn.task, toolset=[], world='{"name":"empty"}')
        texts = [_answer_text(drawn.task.reference or ""), _answer_text(_WRONG_ANSWER), "neither a call nor an answer"]
        played = [
            await self._play(drawn, plain, _Answers(self.chat, text), {}, AgentCatalog(), "train", seed=0)
            for text in texts
        ]
        return [
            # The scorer gets the task as in a run, where a long world is replaced by its hash.
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
    """The simplest arguments that satisfy the JSON schema of a tool: only the required ones."""
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
    """The trajectory of an attempt; None when its events do not make one."""
    # By the same hop as in a run, so that a scorer sees the same trajectory.
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
    """One task for each combination of split, set of scorers, and with or without a reference."""
    chosen: dict[tuple[Any, ...], Drawn] = {}
    for drawn in tasks:
        chosen.setdefault((drawn.split, drawn.task.reference is None, *drawn.task.scorers), drawn)
    return list(chosen.values())


def _is_scored_as_played(drawn: Drawn) -> bool:
    """False for a task with values of a wrong type: that was reported, and scorers would fail because of it."""
    return isinstance(drawn.task.prompt, str) and isinstance(drawn.task.reference, str | None)


def _remedy_of_exclusion(task: Task) -> str:
    return "give its tasks a reference, or name another scorer" if task.reference is None else "check the scorer"


def _part(task: Task, name: str) -> dict[str, Any]:
    return world_from_json(task.world).part(name)


def _answer_text(answer: str) -> str:
    return f"<answer>{answer}</answer>"


def _nobody(task: Task, turns: list[tuple[str, str]], seed: int) -> str:
    raise BadInput(f"the agent {task.agent!r} has no teacher, and the job has no function demonstrate")


async def _keep_nothing(data: bytes) -> str:
    return ""
