"""How agents work together in one rollout: the topologies of producers/topology.py, played.

Whatever one agent tells another is an AgentMessaged event with sender, receiver and caller, and the ids that the receiver
reads it as. An agent that cannot go on ends the rollout, unless a leader asked it: then the leader is told, and goes on.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from producers.agent import POLICY, Agent, system_prompt
from producers.formats import Answer, Call
from producers.policy import Policy, PolicyFailed
from producers.seat import Ended, Rollout, Seat, Word
from producers.topology import ASK, HAND_OFF, Cast, HandOff, Loop, Parallel, Series, Team
from sandboxes.tools.registry import toolset
from schemas.errors import BadInput
from schemas.events import Task

USER = "user"


@dataclass(frozen=True, slots=True)
class Voices:
    """Who speaks: the policy of the rollout's purpose, and other models by name."""

    policy: Policy
    models: Mapping[str, Policy]
    purpose: str

    def of(self, agent: Agent) -> Policy:
        name = agent.teacher if self.purpose == "demonstrate" and agent.teacher is not None else agent.model
        if name == POLICY:
            return self.policy
        if name not in self.models:
            raise PolicyFailed(f"agent {agent.name} speaks through the model {name!r}, which this worker does not know")
        return self.models[name]


class Ensemble:
    """The agents of one rollout."""

    def __init__(self, task: Task, cast: Cast, voices: Voices, rollout: Rollout) -> None:
        """`task.agent` is an agent or a topology of the cast."""
        self._task = task
        self._cast = cast
        self._voices = voices
        self._rollout = rollout
        self._seats: dict[str, Seat] = {}
        self.entry = self.seat(cast.entry(task.agent))

    async def play(self) -> str:
        """The answer to the task; its entry must be open. Raises Ended, PolicyFailed, SandboxFailed."""
        return await self._run(self._task.agent, Word("task", USER, USER, self._task.prompt))

    def seat(self, name: str) -> Seat:
        if name not in self._seats:
            self._seats[name] = self._taken_seat(self._cast.agents[name])
        return self._seats[name]

    def _taken_seat(self, agent: Agent) -> Seat:
        bench = self._rollout.bench
        errands = self._cast.errands(self._task.agent, agent.name)
        names = self._task.toolset if agent.tools is None else agent.tools
        try:
            tools = toolset(names, bench.tools.values()) | errands
        except ValueError as error:
            raise BadInput(str(error)) from error
        said = system_prompt(agent, tools, bench.world)
        return Seat(self._rollout, agent, self._voices.of(agent), said, tools, errands)

    async def _run(self, name: str, word: Word) -> str:
        """What an agent or a topology answers to a word."""
        if name in self._cast.agents:
            return await self._asked(name, word)
        topology = self._cast.topologies[name]
        match topology:
            case Series():
                return await self._series(topology, word)
            case Parallel():
                return await self._parallel(topology, word)
            case Loop():
                return await self._loop(topology, word)
            case HandOff():
                return await self._asked(topology.agents[0], word)
            case Team():
                return await self._asked(topology.leader, word)

    async def _series(self, series: Series, word: Word) -> str:
        for step in series.steps:
            text = await self._run(step, word)
            word = Word("result", step, series.name, text)
        return word.content

    async def _parallel(self, parallel: Parallel, word: Word) -> str:
        branches = [asyncio.ensure_future(self._run(step, word)) for step in parallel.steps]
        try:
            answers = await asyncio.gather(*branches)
        finally:  # when one cannot go on, nobody waits for the others
            await self._call_off(branches)
        return "\n".join(f"{step}: {answer}" for step, answer in zip(parallel.steps, answers, strict=True))

    async def _call_off(self, branches: Sequence[asyncio.Future[str]]) -> None:
        """Ends what still runs, but nothing in the middle of a call of a tool: others may go on with the sandbox."""
        async with self._rollout.bench_lock:
            for branch in branches:
                branch.cancel()
            await asyncio.gather(*branches, return_exceptions=True)

    async def _loop(self, loop: Loop, word: Word) -> str:
        draft = ""
        for _ in range(loop.rounds_max):
            draft = await self._run(loop.body, word)
            verdict = await self._run(loop.judge, Word("result", loop.body, loop.name, draft))
            if verdict.strip().casefold() == loop.accepts.strip().casefold():
                break
            word = Word("remarks", loop.judge, loop.name, verdict)
        return draft

    async def _asked(self, name: str, word: Word) -> str:
        """The answer of an agent, or of whoever it handed the task to."""
        seat = self._told(self.seat(name), word)
        while True:
            said = await seat.converse()
            match said:
                case Answer(text):
                    return text
                case Call(tool) if tool == ASK:
                    await self._delegate(seat, said, word)
                case Call():
                    assert said.tool == HAND_OFF
                    over = Word("hand_off", seat.agent.name, word.sender, said.arguments["message"])
                    seat = self._told(self.seat(said.arguments["agent"]), over)

    async def _delegate(self, leader: Seat, call: Call, word: Word) -> None:
        worker, name = str(call.arguments["agent"]), leader.agent.name
        leader.is_busy = True
        try:
            reply = await self._run(worker, Word("delegation", name, word.sender, call.arguments["message"]))
        except Ended as end:
            if end.ended_by == "infra_error":
                raise
            reply = f"error: {worker} gave no answer: {end.reason}"
        finally:
            leader.is_busy = False
        leader.hear(Word("reply", worker, name, reply), reply, role="tool")

    def _told(self, seat: Seat, word: Word) -> Seat:
        """The seat after it has read the word. What the entry was opened with is not said to it twice."""
        if seat.is_busy:
            raise Ended("agent_error", f"{seat.agent.name} is spoken to while it waits for an answer itself")
        if seat is self.entry and seat.turns_sampled == 0 and word.kind == "task":
            return seat
        seat.hear(word, _heard(word, self._task.prompt, is_first=not seat.is_open))
        return seat


def _heard(word: Word, task_prompt: str, is_first: bool) -> str:
    """What the receiver reads. Whoever takes part in the task reads it once; a worker reads only what the leader says."""
    if word.kind in ("task", "delegation"):
        return word.content
    said = f"{word.sender}: {word.content}"
    return f"{task_prompt}\n\n{said}" if is_first else said
