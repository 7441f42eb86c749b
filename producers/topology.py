"""Topologies as data: how agents work together. A task names an agent or a topology; so do the steps of a topology.

    CATALOG = AgentCatalog.of([writer, critic, Loop(name="essay", body="writer", judge="critic")])

or the same as a TOML file, [job] agents = "agents.toml":

    [agents.writer]
    parts = [{ name = "role", text = "You write." }]
    [agents.critic]
    parts = [{ name = "role", text = "Answer accept, or what to change." }]
    [topologies.essay]
    kind = "loop"
    body = "writer"
    judge = "critic"

An agent keeps one context over a rollout, however many messages it gets. producers/ensemble.py runs topologies.
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from replayground.producers.agent import POLICY, Agent, Model, peer_tool
from replayground.sandboxes.outside.providers import require_tools
from replayground.sandboxes.tools.tool import Tool
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Task
from replayground.schemas.job import Job

ASK = "ask"
HAND_OFF = "hand_off"


class _Topology(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    name: str


class Series(_Topology, frozen=True, kw_only=True, tag="series"):
    """One after another: each step reads the task and the answer of the step before. The last answer counts."""

    steps: tuple[str, ...]


class Parallel(_Topology, frozen=True, kw_only=True, tag="parallel"):
    """All steps at once, on the same message. The answer has one line for each step: its name and its answer."""

    steps: tuple[str, ...]


class Loop(_Topology, frozen=True, kw_only=True, tag="loop"):
    """The body answers, and the judge accepts or says what to change, until it accepts or rounds_max is reached. The
    body's last answer counts."""

    body: str
    judge: str
    accepts: str = "accept"
    "the judge's whole answer that ends the loop; case does not matter"
    rounds_max: int = 3


class HandOff(_Topology, frozen=True, kw_only=True, tag="hand_off"):
    """The first agent begins. Each may answer, or hand the task to another agent with a message, which takes over."""

    agents: tuple[str, ...]


class Team(_Topology, frozen=True, kw_only=True, tag="team"):
    """The leader has the task and may ask workers, who read only the leader's messages."""

    leader: str
    workers: tuple[str, ...]


type Topology = Series | Parallel | Loop | HandOff | Team


class AgentCatalog(Struct, frozen=True, kw_only=True):
    """Agents, topologies and models by name. `of` and `from_toml` check them: every name exists, no agent runs twice at
    once, and no leader waits for itself."""

    agents: dict[str, Agent] = {}
    topologies: dict[str, Topology] = {}
    models: dict[str, Model] = {}

    @classmethod
    def of(cls, entries: Iterable[Any]) -> "AgentCatalog":
        """From Python objects. Raises BadInput that names the wrong entry and the reason."""
        kinds: dict[type, dict[str, Any]] = {Agent: {}, _Topology: {}, Model: {}}
        # Across kinds: a step or a task names an agent or a topology by the name alone.
        seen: set[str] = set()
        for entry in entries:
            kind = next((kind for kind in kinds if isinstance(entry, kind)), None)
            if kind is None:
                raise BadInput(f"AGENTS holds {type(entry).__name__}: it takes Agent, Model and topologies only")
            if entry.name in seen:
                raise BadInput(f"AGENTS holds two entries called {entry.name!r}: give one another name")
            seen.add(entry.name)
            kinds[kind][entry.name] = entry
        return _check_catalog(cls(agents=kinds[Agent], topologies=kinds[_Topology], models=kinds[Model]))

    @classmethod
    def from_toml(cls, path: Path) -> "AgentCatalog":
        """From a file with tables [agents.NAME], [topologies.NAME], [models.NAME]. Raises BadInput with the path."""
        try:
            raw = tomllib.loads(path.read_text())
            entries = msgspec.convert(_with_names(raw), _Tables)
        except OSError as error:
            raise BadInput(f"{path} cannot be read ({error.strerror}): name a TOML file of agents") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise BadInput(f"{path}: {error}") from error
        # The checks of `of` do not know the file: its name is added to their message.
        try:
            return cls.of([*entries.agents.values(), *entries.topologies.values(), *entries.models.values()])
        except BadInput as error:
            raise BadInput(f"{path}: {error}") from error

    def plays(self, name: str) -> bool:
        """Whether a task or a step may name it."""
        return name in self.agents or name in self.topologies

    def entry(self, name: str) -> str:
        """The agent that reads the task first."""
        return name if name in self.agents else self.entry(_members(self.topologies[name])[0])

    def members(self, name: str) -> list[str]:
        """All agents that may take part in this agent or topology, each once, in order."""
        if name in self.agents:
            return [name]
        inner = (agent for member in _members(self.topologies[name]) for agent in self.members(member))
        return list(dict.fromkeys(inner))

    def tools_of(self, task: Task) -> tuple[str, ...]:
        """Names of all tools that a rollout of the task may call."""
        # Of all agents: they share one workbench. Each participant is limited to its own (producers/participant.py).
        if not self.plays(task.agent):
            return tuple(task.toolset)
        agents = [self.agents[name] for name in self.members(task.agent)]
        named = [task.toolset if agent.tools is None else agent.tools for agent in agents]
        return tuple(dict.fromkeys(name for names in named for name in names))

    def peer_tools(self, name: str, agent: str) -> dict[str, Tool]:
        """The peer tools of an agent when `name` is played."""
        # Only topologies inside of `name` count: the same agent may lead a team in another topology of the catalog.
        found = [self.topologies[inner] for inner in self._inside(name)]
        workers = [w for team in found if isinstance(team, Team) and team.leader == agent for w in team.workers]
        desks = [desk.agents for desk in found if isinstance(desk, HandOff) and agent in desk.agents]
        others = dict.fromkeys(other for desk in desks for other in desk if other != agent)
        tools: dict[str, Tool] = {}
        if workers:
            description = "Give a worker something to do, and read the answer."
            tools[ASK] = peer_tool(ASK, description, tuple(dict.fromkeys(workers)))
        if others:
            tools[HAND_OFF] = peer_tool(HAND_OFF, "Hand the task to another agent, who takes over.", tuple(others))
        return tools

    def _inside(self, name: str) -> Iterator[str]:
        """The topology itself and all topologies in it, at any depth."""
        if name in self.topologies:
            yield name
            for member in _members(self.topologies[name]):
                yield from self._inside(member)


def agent_catalog_of(job: Job, agents_file: str | None) -> AgentCatalog:
    """The agents of a run: from the file, if one is named, else from the job's AGENTS. Raises BadInput."""
    agent_catalog = AgentCatalog.from_toml(Path(agents_file)) if agents_file else AgentCatalog.of(job.agents)
    # Here and not in the catalog, which does not know the tools of the job.
    for agent in agent_catalog.agents.values():
        try:
            require_tools(agent.tools or (), job.tools)
        except ValueError as error:
            raise BadInput(f"agent {agent.name!r}: {error}") from error
    return agent_catalog


class _Tables(Struct, forbid_unknown_fields=True):
    agents: dict[str, Agent] = {}
    topologies: dict[str, Topology] = {}
    models: dict[str, Model] = {}


def _with_names(raw: dict[str, Any]) -> dict[str, Any]:
    """The tables with the name of each entry added as its field `name`."""
    # Whatever is not a table stays as it is: the conversion then reports it with its place.
    return {
        section: {name: {"name": name, **table} if isinstance(table, dict) else table for name, table in tables.items()}
        if isinstance(tables, dict)
        else tables
        for section, tables in raw.items()
    }


def _members(topology: Topology) -> tuple[str, ...]:
    # The first one is the entry, which reads the task.
    match topology:
        case Series() | Parallel():
            return topology.steps
        case Loop():
            return topology.body, topology.judge
        case HandOff():
            return topology.agents
        case Team():
            return topology.leader, *topology.workers


def _check_catalog(agent_catalog: AgentCatalog) -> AgentCatalog:
    _check_models(agent_catalog)
    for topology in agent_catalog.topologies.values():
        if not _members(topology):
            raise BadInput(f"topology {topology.name!r} has no members")
        for member in _members(topology):
            if not agent_catalog.plays(member):
                known = ", ".join([*agent_catalog.agents, *agent_catalog.topologies])
                raise BadInput(f"topology {topology.name!r} names {member!r}, which is none of {known}")
    # Before the other checks: AgentCatalog.members would recurse for ever in a cycle.
    _check_circles(agent_catalog.topologies)
    for topology in agent_catalog.topologies.values():
        _CHECKS.get(type(topology), _check_nothing)(agent_catalog, topology)
    return agent_catalog


def _check_models(agent_catalog: AgentCatalog) -> None:
    known = {POLICY, *agent_catalog.models}
    for agent in agent_catalog.agents.values():
        for name in (agent.model, agent.teacher):
            if name is not None and name not in known:
                raise BadInput(
                    f"agent {agent.name!r} names the model {name!r}, which is none of {', '.join(sorted(known))}"
                )
    for model in agent_catalog.models.values():
        if not model.servers:
            raise BadInput(f"model {model.name!r} has no servers")


def _check_circles(topologies: Mapping[str, Topology]) -> None:
    finished: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise BadInput(f"topologies form a cycle: {' > '.join([*above, name])}")
        # Each topology is visited once: shared ones would otherwise be walked again on every path to them.
        if name in topologies and name not in finished:
            for member in _members(topologies[name]):
                visit(member, (*above, name))
            finished.add(name)

    for name in topologies:
        visit(name, ())


def _check_parallel(agent_catalog: AgentCatalog, topology: Any) -> None:
    # An agent has one context: two branches at once would mix in it.
    taken: dict[str, str] = {}
    for step in topology.steps:
        for agent in agent_catalog.members(step):
            if agent in taken:
                raise BadInput(f"in {topology.name!r} agent {agent!r} would run in two branches at once")
            taken[agent] = step


def _check_loop(agent_catalog: AgentCatalog, topology: Any) -> None:
    if topology.rounds_max < 1:
        raise BadInput(f"loop {topology.name!r}: rounds_max must be at least 1")


def _check_hand_off(agent_catalog: AgentCatalog, topology: Any) -> None:
    # A hand-off is a call of a peer tool, and only agents have tools.
    for agent in topology.agents:
        if agent not in agent_catalog.agents:
            raise BadInput(f"hand-off {topology.name!r} names {agent!r}, which is a topology: agents only")


def _check_team(agent_catalog: AgentCatalog, topology: Any) -> None:
    if topology.leader not in agent_catalog.agents:
        raise BadInput(f"the leader of team {topology.name!r} must be an agent, and {topology.leader!r} is a topology")
    if not topology.workers:
        raise BadInput(f"team {topology.name!r} has no workers")
    # The leader waits for its workers, so it must not be one of them, at any depth.
    for worker in topology.workers:
        if topology.leader in agent_catalog.members(worker):
            raise BadInput(f"in team {topology.name!r} the leader {topology.leader!r} would have to wait for itself")


def _check_nothing(agent_catalog: AgentCatalog, topology: Any) -> None: ...


_CHECKS: dict[type, Callable[[AgentCatalog, Any], None]] = {
    Parallel: _check_parallel,
    Loop: _check_loop,
    HandOff: _check_hand_off,
    Team: _check_team,
}
