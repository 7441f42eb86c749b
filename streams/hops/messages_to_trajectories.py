"""assemble: the messages of an attempt become one trajectory when its end arrives and nothing is missing.

Attempts of one trajectory are kept apart by attempt_id. What was seen before is ignored; a hole in `seq` refuses the
message that shows it, so that the attempt never yields a guessed trajectory and the scheduler asks for another.
"""

from functools import singledispatch
from typing import Any, cast

import msgspec
from msgspec import Struct

from schemas.events import (
    Address,
    AgentMessaged,
    Event,
    Meta,
    RolloutEnded,
    RolloutStarted,
    Segment,
    ToolCalled,
    ToolObserved,
    TrajectoryAssembled,
    TurnGenerated,
    Utterance,
)
from schemas.ids import derived_id
from schemas.packed import token_count
from streams.hops.hop import Outcome

CODE_VERSION = "assemble-1"
_UNKNOWN_LOGPROB = b"\x00\x00\x00\x00"


class Attempt(Struct):
    """An attempt under way: a trajectory that grows."""

    started: RolloutStarted
    seq_next: int
    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    segments: list[Segment]
    transcript: list[Utterance]
    tokens_sampled: int = 0
    turns: int = 0
    taught: bool = False
    "true when a turn came without log-probabilities: a teacher's, good for SFT and never for RL"


class Assembly(Struct):
    """All attempts of one trajectory: those under way, and the names of those that ended."""

    attempts: dict[str, Attempt] = {}
    ended: list[str] = []


class Assemble:
    """See streams.hops.hop.Hop."""

    name = "assemble"
    reads = "messages"
    state_class = Assembly

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: Assembly | None, event: Event, address: Address) -> Outcome:
        state = state or Assembly()
        attempt_id, seq = event.meta.attempt_id, event.meta.seq
        if attempt_id is None or seq is None:
            return Outcome(state, refused="a message of a rollout needs attempt_id and seq")
        if attempt_id in state.ended:
            return Outcome(state)
        attempt = state.attempts.get(attempt_id)
        expected = 0 if attempt is None else attempt.seq_next
        if seq < expected:
            return Outcome(state)
        if seq > expected:
            return Outcome(
                state, refused=f"seq {seq} where {expected} was to come: a message of the attempt is missing"
            )
        return self._taken(state, attempt_id, attempt, event)

    def _taken(self, state: Assembly, attempt_id: str, attempt: Attempt | None, event: Event) -> Outcome:
        if isinstance(event, RolloutEnded):
            if attempt is None:
                return Outcome(state, refused="an attempt ended that never started")
            rest = {name: other for name, other in state.attempts.items() if name != attempt_id}
            return Outcome(Assembly(rest, [*state.ended, attempt_id]), (_assembled(attempt, event),))
        if attempt is None and not isinstance(event, RolloutStarted):
            return Outcome(state, refused=f"an attempt starts with RolloutStarted, not {type(event).__name__}")
        grown = _begun(cast(RolloutStarted, event)) if attempt is None else _grown(event, attempt)
        grown = msgspec.structs.replace(grown, seq_next=cast(int, event.meta.seq) + 1)
        return Outcome(Assembly(state.attempts | {attempt_id: grown}, state.ended))


def _begun(started: RolloutStarted) -> Attempt:
    count = token_count(started.prompt_tokens)
    return Attempt(
        started=started,
        seq_next=1,
        tokens=started.prompt_tokens,
        loss_mask=bytes(count),
        logprobs=_UNKNOWN_LOGPROB * count,
        segments=[Segment(start=0, end=count, agent="prompt", policy_version=None)] if count else [],
        transcript=[Utterance(role="user", name=None, content=started.task.prompt)],
    )


@singledispatch
def _grown(event: Event, attempt: Attempt) -> Attempt:
    """The attempt with one more message. Messages that add nothing to the trajectory leave it as it is."""
    return attempt


@_grown.register
def _(event: TurnGenerated, attempt: Attempt) -> Attempt:
    start, count = token_count(attempt.tokens), token_count(event.tokens)
    segments = [
        Segment(start=start + span.start, end=start + span.end, agent=event.agent, policy_version=span.version)
        for span in event.versions
    ] or [Segment(start=start, end=start + count, agent=event.agent, policy_version=None)]
    return msgspec.structs.replace(
        attempt,
        tokens=attempt.tokens + event.tokens,
        loss_mask=attempt.loss_mask + b"\x01" * count,
        logprobs=attempt.logprobs + (event.logprobs or _UNKNOWN_LOGPROB * count),
        segments=attempt.segments + segments,
        transcript=[*attempt.transcript, Utterance(role="assistant", name=event.agent, content=event.text)],
        tokens_sampled=attempt.tokens_sampled + count,
        turns=attempt.turns + 1,
        taught=attempt.taught or (not event.logprobs and count > 0),
    )


@_grown.register
def _(event: ToolObserved, attempt: Attempt) -> Attempt:
    said = Utterance(
        role="tool", name=event.tool, content=event.content, is_error=event.is_error, perturbation=event.perturbation
    )
    return _read(attempt, event.tokens, event.tool, said)


@_grown.register
def _(event: AgentMessaged, attempt: Attempt) -> Attempt:
    return _read(
        attempt, event.tokens, event.kind, Utterance(role="agent", name=event.meta.sender, content=event.content)
    )


@_grown.register
def _(event: ToolCalled, attempt: Attempt) -> Attempt:
    return attempt  # the call's text and tokens are part of the turn that made it


def _read(attempt: Attempt, tokens: bytes, source: str, said: Utterance) -> Attempt:
    """Tokens that the policy read and did not say."""
    start, count = token_count(attempt.tokens), token_count(tokens)
    segment = Segment(start=start, end=start + count, agent=source, policy_version=None)
    return msgspec.structs.replace(
        attempt,
        tokens=attempt.tokens + tokens,
        loss_mask=attempt.loss_mask + bytes(count),
        logprobs=attempt.logprobs + _UNKNOWN_LOGPROB * count,
        segments=[*attempt.segments, segment] if count else attempt.segments,
        transcript=[*attempt.transcript, said],
    )


def _assembled(attempt: Attempt, ended: RolloutEnded) -> TrajectoryAssembled:
    started = attempt.started
    versions = [segment.policy_version for segment in attempt.segments if segment.policy_version is not None]
    return TrajectoryAssembled(
        meta=_meta(ended, min(versions, default=None)),
        task=started.task,
        index=started.index,
        seed=started.seed,
        tokens=attempt.tokens,
        loss_mask=attempt.loss_mask,
        logprobs=b"" if attempt.taught else attempt.logprobs,
        segments=attempt.segments,
        transcript=attempt.transcript,
        answer=ended.answer,
        ended_by=ended.ended_by,
        reason=ended.reason,
        turns=attempt.turns,
        tokens_sampled=attempt.tokens_sampled,
        policy_version_oldest=min(versions, default=None),
        template_hash=started.template_hash,
        tools_hash=started.tools_hash,
        world_hash=started.world_hash,
        cost=ended.cost,
    )


def _meta(ended: RolloutEnded, policy_version: int | None) -> Meta:
    changes: dict[str, Any] = {
        "id": derived_id("TrajectoryAssembled", ended.meta.attempt_id, CODE_VERSION),
        "seq": None,
        "category": "trajectory",
        "topic": "trajectories",
        "sender": "assemble",
        "receiver": "score",
        "causation_id": ended.meta.id,
        "policy_version": policy_version,
    }
    return msgspec.structs.replace(ended.meta, **changes)
