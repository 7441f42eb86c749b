"""Plays one rollout from start to end, independent of the log: events are emitted as they happen.

participant (one agent: its context, turns and calls) ◄─ ensemble (agents together) ◄─ play (start, deadline, end).
Every outcome is one RolloutEnded: an answer, a limit, the deadline, an error of the agent, or an infrastructure error
(sandbox, server, a broken task), which does not count against the agent and is retried by the scheduler.
"""

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import structlog

from replayground.producers.agent import only_agent
from replayground.producers.attempt import AttemptWriter, Emit, close_unplayed, without_world, world_hash_of
from replayground.producers.cancellation import CancelHandle
from replayground.producers.chat import Chat
from replayground.producers.ensemble import Ensemble, Policies
from replayground.producers.participant import AgentStopped, KeepBlob, Rollout
from replayground.producers.policy import Policy, PolicyFailed, RequestRefused, TurnTooLong
from replayground.producers.topology import AgentCatalog
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.checks import CheckResult
from replayground.schemas.errors import BadInput, LogUnavailable
from replayground.schemas.events import EndedBy, RolloutEnded, RolloutRequested, RolloutStarted, WorldFinding
from replayground.schemas.ids import now_microseconds
from replayground.schemas.packed import pack_tokens

logger = structlog.get_logger()

COST_PER_TOKEN_SAMPLED = 1e-6
COST_PER_TOKEN_READ = 1e-7
"Prices of our own choice in no currency, so that cost per success can be compared between runs."


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a rollout ended."""

    ended_by: EndedBy
    answer: str | None = None
    reason: str | None = None
    findings: tuple[WorldFinding, ...] = ()


async def play(
    request: RolloutRequested,
    *,
    policy: Policy,
    bench: Workbench,
    chat: Chat,
    system_prompt: str,
    worker: str,
    emit: Emit,
    keep_blob: KeepBlob,
    tools_hash: str,
    cancel_handle: CancelHandle | None = None,
    agent_catalog: AgentCatalog | None = None,
    models: Mapping[str, Policy] | None = None,
) -> RolloutEnded:
    """Plays one attempt to its end, emits every message and returns the last. Closes the bench. `cancel_handle` ends it
    early. A task whose agent is not in the catalog is played by one agent with `system_prompt`.

    Raises only what `emit` raises, and CancelledError: then the attempt has no RolloutEnded."""
    began = time.monotonic()
    task = request.task
    if agent_catalog is None or not agent_catalog.plays(task.agent):
        agent_catalog = AgentCatalog(agents={task.agent: only_agent(task.agent, system_prompt)})
    attempt = AttemptWriter(request, emit)
    rollout = Rollout(attempt, chat, bench, keep_blob)
    try:
        ensemble = Ensemble(
            task, agent_catalog, Policies(policy, models or {}, request.meta.purpose or "train"), rollout
        )
        prompt = ensemble.entry.open(task.prompt)
    # Before RolloutStarted, which needs the prompt: close_unplayed emits a start of its own.
    except (BadInput, PolicyFailed) as error:
        return close_unplayed(attempt, worker, "infra_error", f"agent {task.agent}: {error}")
    emit(_started_event(rollout, ensemble.entry.agent.name, prompt, worker, tools_hash))
    end = await _run_agents(rollout, ensemble, cancel_handle or CancelHandle())
    ended = RolloutEnded(
        meta=attempt.meta("rollout", worker, "assemble"),
        ended_by=end.ended_by,
        answer=end.answer,
        reason=end.reason,
        turns=rollout.turns_sampled,
        tokens_sampled=rollout.tokens_sampled,
        tokens_read=rollout.tokens_read,
        milliseconds=(time.monotonic() - began) * 1000,
        cost=rollout.tokens_sampled * COST_PER_TOKEN_SAMPLED + rollout.tokens_read * COST_PER_TOKEN_READ,
        findings=list(end.findings),
    )
    emit(ended)
    return ended


def hash_of_tools(tools: Mapping[str, Tool]) -> str:
    """sha256 of the specifications of all tools, in their order."""
    return hashlib.sha256(msgspec.json.encode([tool.specification() for tool in tools.values()])).hexdigest()


def _started_event(rollout: Rollout, agent: str, prompt: list[int], worker: str, tools_hash: str) -> RolloutStarted:
    request = rollout.attempt.request
    return RolloutStarted(
        meta=rollout.attempt.meta("rollout", worker, agent),
        task=without_world(request.task),
        index=request.index,
        seed=request.seed,
        worker=worker,
        isolation=rollout.bench.isolation,
        prompt_tokens=pack_tokens(prompt),
        template_hash=rollout.chat.template_hash,
        tools_hash=tools_hash,
        world_hash=world_hash_of(request.task),
        required_version=request.required_version,
    )


async def _run_agents(rollout: Rollout, ensemble: Ensemble, cancel_handle: CancelHandle) -> _Ending:
    """Runs the agents under the deadline, and names infrastructure errors as such."""
    seconds_left = (rollout.attempt.request.deadline - now_microseconds()) / 1e6
    if seconds_left <= 0:
        return _Ending("infra_error", reason="the deadline had passed before a worker was free")
    try:
        # The bench inside the timeout: it sees the cancellation, so the pool throws away a sandbox that was cut off.
        async with asyncio.timeout(seconds_left) as timeout, rollout.bench:
            cancel_handle.bind(timeout)
            end = await _play_to_end(ensemble)
            # While the sandboxes live: nothing of the world is left after that.
            return replace(end, findings=tuple(map(_finding, await rollout.bench.check_world())))
    except TimeoutError:
        # A cancellation ends a rollout by moving its deadline to now.
        if cancel_handle.reason is not None:
            return _Ending("cancelled", reason=cancel_handle.reason)
        # Without a single turn a server was away for the whole time: not the agent's fault (decision 0012).
        ended_by: EndedBy = "deadline" if rollout.turns_sampled else "infra_error"
        return _Ending(ended_by, reason=f"not done after {seconds_left:.1f} s")
    except PolicyFailed as error:
        # Else an agent whose context or turn may grow beyond what a server takes could have its bad attempts repeated.
        is_agents = isinstance(error, RequestRefused | TurnTooLong) and rollout.turns_sampled > 0
        return _Ending("agent_error" if is_agents else "infra_error", reason=f"policy: {error}")
    except SandboxFailed as error:
        return _Ending("infra_error", reason=f"sandbox: {error}")
    # Not an error of the rollout: without the log nothing can be recorded, and the worker must end.
    except LogUnavailable:
        raise
    # The teacher or a tool of a job may raise anything. It must not end the worker.
    except Exception as error:
        logger.exception("rollout_failed", trajectory_id=rollout.attempt.request.meta.trajectory_id)
        return _Ending("infra_error", reason=f"{type(error).__name__}: {error}")


def _finding(found: CheckResult) -> WorldFinding:
    # A file may hold half of a surrogate pair as a tool returns it, which Avro could not write.
    text = found.content.encode("utf-8", "backslashreplace").decode()
    return WorldFinding(
        name=found.name, kind=found.kind, content=text, exit_code=found.exit_code, problem=found.problem
    )


async def _play_to_end(ensemble: Ensemble) -> _Ending:
    """Plays until the agents answer or cannot continue."""
    # Caught inside of the bench's `async with`: an exception that leaves it makes the pool throw the sandbox away, and
    # a limit or a mistake of the agent is no reason for that.
    try:
        return _Ending("answered", answer=await ensemble.play())
    except AgentStopped as end:
        return _Ending(end.ended_by, reason=end.reason)
