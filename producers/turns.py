"""The turn loop of one rollout, without the log: a policy speaks, tools answer, events are emitted as they happen.

Everything that can happen ends in one RolloutEnded: an answer, a limit, the deadline, the agent's own error, or an
infrastructure error (sandbox, server, a broken task), which is nobody's fault and is asked for again by the scheduler.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from producers.agent import Answer, Call, ChatFormat, Idle, Malformed, parse
from producers.attempt import Attempt, Emit
from producers.policy import Moment, Policy, PolicyFailed, Turn
from sandboxes.protocol import SandboxFailed
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Observation, Workbench
from schemas.errors import LogUnavailable
from schemas.events import (
    EndedBy,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    ToolCalled,
    ToolObserved,
    TurnGenerated,
)
from schemas.ids import now_microseconds
from schemas.packed import pack_logprobs, pack_tokens

logger = logging.getLogger(__name__)

COST_PER_TOKEN_SAMPLED = 1e-6
COST_PER_TOKEN_READ = 1e-7
"A price list of our own, so that cost per success can be compared between runs."

type KeepBlob = Callable[[bytes], str]
"Stores bytes that a tool produced and returns their uri."


@dataclass(frozen=True, slots=True)
class _End:
    """How it ended."""

    ended_by: EndedBy
    answer: str | None = None
    reason: str | None = None


@dataclass(slots=True)
class _Rollout:
    """What has been read and said so far."""

    attempt: Attempt
    chat: ChatFormat
    keep_blob: KeepBlob
    tokens: list[int]
    turns: list[tuple[str, str]] = field(default_factory=list)
    tokens_sampled: int = 0
    turns_sampled: int = 0


async def play(
    request: RolloutRequested,
    *,
    policy: Policy,
    bench: Workbench,
    chat: ChatFormat,
    system_prompt: str,
    worker: str,
    emit: Emit,
    keep_blob: KeepBlob,
    tools_hash: str,
) -> RolloutEnded:
    """Plays one attempt to its end, emitting every message; returns the last one. Closes the bench.

    Raises only what `emit` raises, and CancelledError, after which the attempt stays without an end."""
    began = time.monotonic()
    attempt = Attempt(request, emit)
    rollout = _Rollout(attempt, chat, keep_blob, chat.prompt(system_prompt, request.task.prompt))
    emit(_started(attempt, bench, rollout, worker, tools_hash))
    end = await _ended(rollout, policy, bench)
    tokens_read = len(rollout.tokens) - rollout.tokens_sampled
    ended = RolloutEnded(
        meta=attempt.meta("rollout", worker, "assemble"),
        ended_by=end.ended_by,
        answer=end.answer,
        reason=end.reason,
        turns=rollout.turns_sampled,
        tokens_sampled=rollout.tokens_sampled,
        tokens_read=tokens_read,
        milliseconds=(time.monotonic() - began) * 1000,
        cost=rollout.tokens_sampled * COST_PER_TOKEN_SAMPLED + tokens_read * COST_PER_TOKEN_READ,
    )
    emit(ended)
    return ended


def hash_of_tools(tools: Mapping[str, Tool]) -> str:
    """sha256 of all tools as the agent may call them."""
    return hashlib.sha256(msgspec.json.encode([tool.specification() for tool in tools.values()])).hexdigest()


def _started(attempt: Attempt, bench: Workbench, rollout: _Rollout, worker: str, tools_hash: str) -> RolloutStarted:
    request = attempt.request
    return RolloutStarted(
        meta=attempt.meta("rollout", worker, request.task.agent),
        task=request.task,
        index=request.index,
        seed=request.seed,
        worker=worker,
        sandbox=bench.sandbox_id,
        isolation=bench.isolation,
        prompt_tokens=pack_tokens(rollout.tokens),
        template_hash=rollout.chat.template_hash,
        tools_hash=tools_hash,
        world_hash=hashlib.sha256(request.task.world.encode()).hexdigest(),
        required_version=request.required_version,
    )


async def _ended(rollout: _Rollout, policy: Policy, bench: Workbench) -> _End:
    """The loop under its deadline, with the errors of the infrastructure named."""
    seconds_left = (rollout.attempt.request.deadline - now_microseconds()) / 1e6
    if seconds_left <= 0:
        return _End("deadline", reason="the deadline had passed before a worker was free")
    try:
        async with asyncio.timeout(seconds_left), bench:
            while True:
                end = await _one_turn(rollout, policy, bench)
                if end is not None:
                    return end
    except TimeoutError:
        return _End("deadline", reason=f"not done after {seconds_left:.1f} s")
    except PolicyFailed as error:
        return _End("infra_error", reason=f"policy: {error}")
    except SandboxFailed as error:
        return _End("infra_error", reason=f"sandbox: {error}")
    except LogUnavailable:
        raise
    except Exception as error:  # a job's teacher or tool may raise anything; it must not take the worker with it
        logger.exception("rollout %s failed", rollout.attempt.request.meta.trajectory_id)
        return _End("infra_error", reason=f"{type(error).__name__}: {error}")


async def _one_turn(rollout: _Rollout, policy: Policy, bench: Workbench) -> _End | None:
    """One turn and what it led to; the end, if that is one."""
    request = rollout.attempt.request
    sampling = request.sampling
    room = sampling.tokens_max - len(rollout.tokens)
    if rollout.turns_sampled >= sampling.turns_max:
        return _End("turn_limit", reason=f"no answer in {sampling.turns_max} turns")
    if room <= 0:
        return _End("token_limit", reason=f"no answer in {sampling.tokens_max} tokens")
    text, turn = await _speak(rollout, policy, min(room, sampling.max_tokens_per_turn))
    wrong = [span.version for span in turn.versions if span.version != request.required_version]
    if request.required_version is not None and wrong:
        return _End(
            "infra_error", reason=f"sampled by version {wrong[0]} where {request.required_version} was asked for"
        )
    said = parse(text)
    match said:
        case Answer(answer):
            return _End("answered", answer=answer)
        case Idle():
            return _End("agent_error", reason="neither a call nor an answer")
        case Malformed(reason):
            observation = Observation(f"error: {reason}", True, "agent", None, 0.0)
            return _observe(rollout, text, turn, "", observation)
        case Call():
            return await _use_tool(rollout, text, turn, said, bench)


async def _speak(rollout: _Rollout, policy: Policy, tokens_max: int) -> tuple[str, Turn]:
    request = rollout.attempt.request
    began = time.monotonic()
    turn = await policy.next_turn(
        Moment(
            task=request.task,
            seed=request.seed,
            tokens=rollout.tokens,
            turns=rollout.turns,
            sampling=request.sampling,
            tokens_max=tokens_max,
            required_version=request.required_version,
        )
    )
    text = rollout.chat.decode(turn.tokens)
    rollout.tokens = rollout.tokens + turn.tokens  # a new list: whoever was handed the old one may keep it
    rollout.tokens_sampled += len(turn.tokens)
    rollout.turns_sampled += 1
    version = turn.versions[-1].version if turn.versions else None
    rollout.attempt.emit(
        TurnGenerated(
            meta=rollout.attempt.meta("turn", request.task.agent, "environment", version),
            agent=request.task.agent,
            text=text,
            tokens=pack_tokens(turn.tokens),
            logprobs=pack_logprobs(turn.logprobs),
            versions=turn.versions,
            sampling=request.sampling,
            finish_reason=turn.finish_reason,
            milliseconds=(time.monotonic() - began) * 1000,
        )
    )
    return text, turn


async def _use_tool(rollout: _Rollout, text: str, turn: Turn, call: Call, bench: Workbench) -> _End | None:
    agent = rollout.attempt.request.task.agent
    rollout.attempt.emit(
        ToolCalled(
            meta=rollout.attempt.meta("tool_call", agent, call.tool),
            call_id=_call_id(rollout),
            agent=agent,
            tool=call.tool,
            arguments=call.text,
        )
    )
    return _observe(rollout, text, turn, call.tool, await bench.call(call.tool, call.arguments))


def _observe(rollout: _Rollout, text: str, turn: Turn, tool: str, observation: Observation) -> _End | None:
    """Shows the agent what came back. What would not fit into its tokens is recorded, and not read."""
    tokens = rollout.chat.observation(observation.content, turn.tokens[-1] == rollout.chat.end)
    tokens_max = rollout.attempt.request.sampling.tokens_max
    fits = len(rollout.tokens) + len(tokens) < tokens_max
    agent = rollout.attempt.request.task.agent
    rollout.attempt.emit(
        ToolObserved(
            meta=rollout.attempt.meta("observation", tool or "environment", agent),
            call_id=_call_id(rollout),
            tool=tool,
            content=observation.content,
            is_error=observation.is_error,
            error_kind=observation.error_kind,
            milliseconds=observation.milliseconds,
            blobs=[rollout.keep_blob(blob.data) for blob in observation.blobs],
            perturbation=msgspec.json.encode(observation.perturbation).decode() if observation.perturbation else None,
            tokens=pack_tokens(tokens) if fits else b"",
        )
    )
    if not fits:
        return _End("token_limit", reason=f"the observation does not fit into {tokens_max} tokens")
    rollout.tokens = rollout.tokens + tokens
    rollout.turns.append((text, observation.content))
    return None


def _call_id(rollout: _Rollout) -> str:
    """One call a turn, so the turn names it."""
    return f"call-{rollout.turns_sampled}"
