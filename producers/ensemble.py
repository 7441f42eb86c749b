"""Runs the agents of one rollout together, as the topologies of producers/topology.py say.

Every message between agents is an AgentMessaged event with sender, receiver and caller, and the token ids that the
receiver reads. An agent that cannot continue ends the rollout, unless a leader asked it: then the leader reads an error
and continues.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replayground.producers.agent import POLICY, Agent, system_prompt
from replayground.producers.participant import AgentMessage, AgentStopped, Participant, Rollout
from replayground.producers.policy import Policy, PolicyFailed
from replayground.producers.topology import ASK, HAND_OFF, AgentCatalog, HandOff, Loop, Parallel, Series, Team
from replayground.sandboxes.tools.registry import toolset
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task
from replayground.schemas.formats import FinalAnswer, ToolCall

USER = "user"


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy for the rollout's purpose, and the other models by name."""

    policy: Policy
    models: Mapping[str, Policy]
    purpose: str

    def of(self, agent: Agent) -> Policy:
        """The policy that plays this agent. Raises PolicyFailed for a model that this worker does not have."""
        # A teacher plays in demonstrations only: training and evaluation must sample the agent's own model.
        name = agent.teacher if self.purpose == "demonstrate" and agent.teacher is not None else agent.model
        if name == POLICY:
            return self.policy
        if name not in self.models:
            raise PolicyFailed(f"agent {agent.name} uses the model {name!r}, which this worker does not know")
        return self.models[name]


class Ensemble:
    """The agents of one rollout."""

    def __init__(self, task: Task, agent_catalog: AgentCatalog, policies: Policies, rollout: Rollout) -> None:
        """`task.agent` must be an agent or a topology of the catalog. Raises BadInput or PolicyFailed when the agent
        that reads the task first cannot be set up."""
        self._task = task
        self._agent_catalog = agent_catalog
        self._policies = policies
        self._rollout = rollout
        self._participants: dict[str, Participant] = {}
        # Only the entry is made now: RolloutStarted carries its prompt. Others are made when they are first spoken to.
        self.entry = self.participant(agent_catalog.entry(task.agent))

    async def play(self) -> str:
        """Plays until the final answer to the task, and returns it. The entry must be open. Raises AgentStopped,
        PolicyFailed, SandboxFailed."""
        return await self._run(self._task.agent, AgentMessage("task", USER, USER, self._task.prompt))

    def participant(self, name: str) -> Participant:
        # One participant for each agent in a rollout: an agent that is spoken to again keeps its context.
        if name not in self._participants:
            self._participants[name] = self._make_participant(self._agent_catalog.agents[name])
        return self._participants[name]

    def _make_participant(self, agent: Agent) -> Participant:
        bench = self._rollout.bench
        peer_tools = self._agent_catalog.peer_tools(self._task.agent, agent.name)
        names = self._task.toolset if agent.tools is None else agent.tools
        try:
            tools = toolset(names, bench.tools.values()) | peer_tools
        # An unknown tool is the job's mistake, not a bug of this worker.
        except ValueError as error:
            raise BadInput(str(error)) from error
        said = system_prompt(agent, tools, bench.world)
        # One agent alone keeps the sandbox as it is; several are kept apart from each other in it.
        session = agent.name if len(self._agent_catalog.members(self._task.agent)) > 1 else ""
        return Participant(self._rollout, agent, self._policies.of(agent), said, tools, peer_tools, session)

    async def _run(self, name: str, agent_message: AgentMessage) -> str:
        """The answer of an agent or a topology to a message."""
        if name in self._agent_catalog.agents:
            return await self._ask(name, agent_message)
        topology = self._agent_catalog.topologies[name]
        match topology:
            case Series():
                return await self._series(topology, agent_message)
            case Parallel():
                return await self._parallel(topology, agent_message)
            case Loop():
                return await self._loop(topology, agent_message)
            # Hand-offs and delegations are tool calls of the agents themselves: _ask carries them out.
            case HandOff():
                return await self._ask(topology.agents[0], agent_message)
            case Team():
                return await self._ask(topology.leader, agent_message)

    async def _series(self, series: Series, agent_message: AgentMessage) -> str:
        for step in series.steps:
            text = await self._run(step, agent_message)
            agent_message = AgentMessage("result", step, series.name, text)
        return agent_message.content

    async def _parallel(self, parallel: Parallel, agent_message: AgentMessage) -> str:
        branches = [asyncio.ensure_future(self._run(step, agent_message)) for step in parallel.steps]
        try:
            answers = await asyncio.gather(*branches)
        # gather raises as soon as one branch fails and leaves the others running.
        finally:
            await self._cancel_branches(branches)
        return "\n".join(f"{step}: {answer}" for step, answer in zip(parallel.steps, answers, strict=True))

    async def _cancel_branches(self, branches: Sequence[asyncio.Future[str]]) -> None:
        """Cancels the branches that still run, and waits for them."""
        # Under the lock no branch is inside a tool call. A call that is cut off would leave the shared sandbox in an
        # unknown state, and a leader above this step may continue with it.
        async with self._rollout.bench_lock:
            for branch in branches:
                branch.cancel()
            await asyncio.gather(*branches, return_exceptions=True)

    async def _loop(self, loop: Loop, agent_message: AgentMessage) -> str:
        draft = ""
        for _ in range(loop.rounds_max):
            draft = await self._run(loop.body, agent_message)
            verdict = await self._run(loop.judge, AgentMessage("result", loop.body, loop.name, draft))
            # The whole answer must match: remarks that only contain the word "accept" do not end the loop.
            if verdict.strip().casefold() == loop.accepts.strip().casefold():
                break
            # The body keeps its context, so the next round needs the remarks only.
            agent_message = AgentMessage("remarks", loop.judge, loop.name, verdict)
        return draft

    async def _ask(self, name: str, agent_message: AgentMessage) -> str:
        """The answer of an agent, or of the agent that it handed the task to."""
        participant = self._deliver(self.participant(name), agent_message)
        while True:
            said = await participant.run_until_reply()
            match said:
                case FinalAnswer(text):
                    return text
                case ToolCall(tool) if tool == ASK:
                    await self._delegate(participant, said, agent_message)
                case ToolCall():
                    # run_until_reply returns calls of peer tools only, and there are two of them.
                    assert said.tool == HAND_OFF
                    over = AgentMessage(
                        "hand_off", participant.agent.name, agent_message.sender, said.arguments["message"]
                    )
                    participant = self._deliver(self.participant(said.arguments["agent"]), over)

    async def _delegate(self, leader: Participant, call: ToolCall, agent_message: AgentMessage) -> None:
        worker, name = str(call.arguments["agent"]), leader.agent.name
        # While it waits nobody else may write to its context (_deliver refuses): two conversations would mix there.
        leader.is_busy = True
        try:
            reply = await self._run(
                worker, AgentMessage("delegation", name, agent_message.sender, call.arguments["message"])
            )
        except AgentStopped as end:
            # Not the worker's fault, so the leader must not have to deal with it: the whole rollout is retried.
            if end.ended_by == "infra_error":
                raise
            reply = f"error: {worker} gave no answer: {end.reason}"
        finally:
            leader.is_busy = False
        leader.receive(AgentMessage("reply", worker, name, reply), reply, role="tool")

    def _deliver(self, participant: Participant, agent_message: AgentMessage) -> Participant:
        """Hands the message to the participant. Raises AgentStopped when it waits for another agent, or has no room."""
        if participant.is_busy:
            raise AgentStopped(
                "agent_error", f"{participant.agent.name} is spoken to while it waits for an answer itself"
            )
        # `play` opened the entry with the task, so the entry has read it already.
        if participant is self.entry and participant.turns_sampled == 0 and agent_message.kind == "task":
            return participant
        participant.receive(
            agent_message, _render_message(agent_message, self._task.prompt, is_first=not participant.is_open)
        )
        return participant


def _render_message(agent_message: AgentMessage, task_prompt: str, is_first: bool) -> str:
    """What the receiver reads. An agent of the task reads the task once, before its first message from another agent. A
    worker of a team reads only what its leader writes."""
    if agent_message.kind in ("task", "delegation"):
        return agent_message.content
    said = f"{agent_message.sender}: {agent_message.content}"
    return f"{task_prompt}\n\n{said}" if is_first else said
