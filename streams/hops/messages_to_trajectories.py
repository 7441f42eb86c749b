"""assemble: the messages of an attempt become one trajectory when its end arrives and nothing is missing.

Attempts of one trajectory are kept apart by attempt_id. Repeats are ignored. A gap in `seq` rejects the message after it:
the attempt never yields a guessed trajectory, and the scheduler requests another attempt.

Messages of several contexts arrive mixed, in the order in which they happened; a trajectory holds its contexts one after
another, whole, so that whoever trains on it can keep them apart.

Beside each TrajectoryAssembled stands a small AttemptEnded, so that planners need not read tokens to count attempts.
"""

from bisect import bisect_right
from functools import singledispatch
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec import Struct

from schemas.events import (
    Address,
    AgentMessaged,
    AttemptEnded,
    Context,
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
KEYS_REMEMBERED = 1024
_UNKNOWN_LOGPROB = b"\x00\x00\x00\x00"


class MessageSpan(Struct):
    """The token range of one message, and the context it belongs to."""

    context: int
    start: int
    end: int


class PartialTrajectory(Struct):
    """An attempt that has not ended. Tokens are in the order of their messages."""

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
    pieces: list[MessageSpan] = []
    contexts: list[Context] = []
    "those begun so far; their starts are known at the end"
    untaught: bool = False
    "true when a turn came with log-probabilities: the policy's"


class AssemblyState(Struct):
    """All attempts of one trajectory: those under way, and the names of those that ended."""

    attempts: dict[str, PartialTrajectory] = {}
    ended: list[str] = []
    is_closed: bool = False
    "an attempt ended other than by infra_error: no further one is asked for"


class AssembleTrajectories:
    """See streams.hops.hop.Hop."""

    name = "assemble"
    reads = "messages"
    state_class = AssemblyState

    def __init__(self, keys_remembered: int = KEYS_REMEMBERED) -> None:
        self.keys_remembered = keys_remembered

    def is_closed(self, state: AssemblyState) -> bool:
        """Also while another attempt is open: it belongs to a second worker, which nobody waits for, or to a dead one."""
        return state.is_closed

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: AssemblyState | None, event: Event, address: Address) -> Outcome:
        attempt_id, seq = event.meta.attempt_id, event.meta.seq
        if attempt_id is None or seq is None or event.meta.group_id is None:
            return Outcome(state, refused="a message of a rollout needs group_id, attempt_id and seq")
        known = state or AssemblyState()
        if attempt_id in known.ended:
            return Outcome(state)
        attempt = known.attempts.get(attempt_id)
        expected = 0 if attempt is None else attempt.seq_next
        if seq < expected:
            return Outcome(state)
        if seq > expected:
            return Outcome(
                state, refused=f"seq {seq} where {expected} was to come: a message of the attempt is missing"
            )
        return self._apply(known, attempt_id, attempt, event)

    def _apply(self, state: AssemblyState, attempt_id: str, attempt: PartialTrajectory | None, event: Event) -> Outcome:
        if isinstance(event, RolloutEnded):
            if attempt is None:
                return Outcome(state, refused="an attempt ended that never started")
            rest = {name: other for name, other in state.attempts.items() if name != attempt_id}
            assert attempt_id not in state.ended, "an attempt ends once"
            trajectory = _assemble(attempt, event)
            is_closed = state.is_closed or event.ended_by != "infra_error"
            return Outcome(
                AssemblyState(rest, [*state.ended, attempt_id], is_closed), (trajectory, _attempt_ended(trajectory))
            )
        if attempt is None and not isinstance(event, RolloutStarted):
            return Outcome(state, refused=f"an attempt starts with RolloutStarted, not {type(event).__name__}")
        wrong = _complaint(event, attempt) if attempt is not None else None
        if wrong is not None:
            return Outcome(state, refused=wrong)
        grown = _begin(cast(RolloutStarted, event)) if attempt is None else _extend(event, attempt)
        grown = msgspec.structs.replace(grown, seq_next=cast(int, event.meta.seq) + 1)
        return Outcome(AssemblyState(state.attempts | {attempt_id: grown}, state.ended, state.is_closed))


def _complaint(event: Event, attempt: PartialTrajectory) -> str | None:
    """Why a message does not fit its attempt; None when it does."""
    if not isinstance(event, (TurnGenerated, ToolObserved, AgentMessaged)):
        return None
    known = max(1, len(attempt.contexts))
    if not 0 <= event.context < known + (not isinstance(event, TurnGenerated)):
        return f"context {event.context} of an attempt that has {known}"
    if len(event.tokens) % 4:
        return f"{len(event.tokens)} bytes of tokens are no whole tokens"
    if isinstance(event, TurnGenerated):
        if event.logprobs and len(event.logprobs) != len(event.tokens):
            return "a turn has another number of log-probabilities than of tokens"
        if any(not 0 <= span.start <= span.end <= token_count(event.tokens) for span in event.versions):
            return "a weight version is named for tokens that the turn does not have"
    return None


def _begin(started: RolloutStarted) -> PartialTrajectory:
    count = token_count(started.prompt_tokens)
    return PartialTrajectory(
        started=started,
        seq_next=1,
        tokens=started.prompt_tokens,
        loss_mask=bytes(count),
        logprobs=_UNKNOWN_LOGPROB * count,
        segments=[Segment(start=0, end=count, agent="prompt", policy_version=None)] if count else [],
        transcript=[Utterance(role="user", name=None, content=started.task.prompt)],
        pieces=[MessageSpan(0, 0, count)],
        contexts=[Context(start=0, agent=started.meta.receiver or started.task.agent)],
    )


@singledispatch
def _extend(event: Event, attempt: PartialTrajectory) -> PartialTrajectory:
    """The attempt with one more message. Messages that add nothing to the trajectory leave it as it is."""
    return attempt


@_extend.register
def _(event: TurnGenerated, attempt: PartialTrajectory) -> PartialTrajectory:
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
        untaught=attempt.untaught or bool(event.logprobs),
        pieces=[*attempt.pieces, MessageSpan(event.context, start, start + count)],
    )


@_extend.register
def _(event: ToolObserved, attempt: PartialTrajectory) -> PartialTrajectory:
    said = Utterance(
        role="tool", name=event.tool, content=event.content, is_error=event.is_error, perturbation=event.perturbation
    )
    return _read(attempt, event, event.tool, said)


@_extend.register
def _(event: AgentMessaged, attempt: PartialTrajectory) -> PartialTrajectory:
    return _read(attempt, event, event.kind, Utterance(role="agent", name=event.meta.sender, content=event.content))


@_extend.register
def _(event: ToolCalled, attempt: PartialTrajectory) -> PartialTrajectory:
    return attempt  # the call's text and tokens are part of the turn that made it


def _read(
    attempt: PartialTrajectory, event: ToolObserved | AgentMessaged, source: str, said: Utterance
) -> PartialTrajectory:
    """Adds tokens that an agent read and did not sample."""
    tokens = event.tokens
    start, count = token_count(attempt.tokens), token_count(tokens)
    contexts = attempt.contexts
    if event.context >= max(1, len(contexts)):
        begun = Context(start=start, agent=event.meta.receiver or source, because=event.context_because)
        contexts = [*contexts, begun]
    segment = Segment(start=start, end=start + count, agent=source, policy_version=None)
    return msgspec.structs.replace(
        attempt,
        tokens=attempt.tokens + tokens,
        loss_mask=attempt.loss_mask + bytes(count),
        logprobs=attempt.logprobs + _UNKNOWN_LOGPROB * count,
        segments=[*attempt.segments, segment] if count else attempt.segments,
        transcript=[*attempt.transcript, said],
        pieces=[*attempt.pieces, MessageSpan(event.context, start, start + count)],
        contexts=contexts,
    )


def _assemble(attempt: PartialTrajectory, ended: RolloutEnded) -> TrajectoryAssembled:
    started = attempt.started
    attempt = _by_context(_without_teachers(attempt))
    assert len(attempt.logprobs) == 4 * len(attempt.loss_mask), "each token has one log-probability and one mask"
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
        tokens_sampled=attempt.loss_mask.count(1),
        policy_version_oldest=min(versions, default=None),
        template_hash=started.template_hash,
        tools_hash=started.tools_hash,
        world_hash=started.world_hash,
        cost=ended.cost,
        contexts=attempt.contexts if len(attempt.contexts) > 1 else [],
    )


def _attempt_ended(trajectory: TrajectoryAssembled) -> AttemptEnded:
    """The same fact without tokens and transcript."""
    changes: dict[str, Any] = {
        "id": derived_id("AttemptEnded", trajectory.meta.attempt_id, CODE_VERSION),
        "category": "attempt",
        "topic": "attempts",
        "receiver": "scheduler",
    }
    return AttemptEnded(
        meta=msgspec.structs.replace(trajectory.meta, **changes),
        index=trajectory.index,
        group_size=trajectory.task.group_size,
        ended_by=trajectory.ended_by,
        reason=trajectory.reason,
        tokens_sampled=trajectory.tokens_sampled,
        policy_version_oldest=trajectory.policy_version_oldest,
    )


def _without_teachers(attempt: PartialTrajectory) -> PartialTrajectory:
    """Where the policy worked with a teacher, only what the policy sampled is marked as such, and can be trained on."""
    if not (attempt.taught and attempt.untaught):
        return attempt
    mask = bytearray(attempt.loss_mask)
    for segment in attempt.segments:
        if segment.policy_version is None:
            mask[segment.start : segment.end] = bytes(segment.end - segment.start)
    return msgspec.structs.replace(attempt, loss_mask=bytes(mask), taught=False)


def _by_context(attempt: PartialTrajectory) -> PartialTrajectory:
    """The same tokens, context after context instead of in the order of their messages."""
    if len(attempt.contexts) < 2:
        return attempt
    pieces = sorted(attempt.pieces, key=lambda piece: piece.context)  # stable: within a context the order stays
    starts = list(accumulate((piece.end - piece.start for piece in pieces), initial=0))[:-1]
    moved = {piece.start: start for piece, start in zip(pieces, starts, strict=True) if piece.end > piece.start}
    first = {piece.context: start for piece, start in zip(reversed(pieces), reversed(starts), strict=True)}
    return msgspec.structs.replace(
        attempt,
        tokens=b"".join(attempt.tokens[4 * piece.start : 4 * piece.end] for piece in pieces),
        loss_mask=b"".join(attempt.loss_mask[piece.start : piece.end] for piece in pieces),
        logprobs=b"".join(attempt.logprobs[4 * piece.start : 4 * piece.end] for piece in pieces),
        segments=_move_segments(attempt.segments, moved),
        contexts=[
            msgspec.structs.replace(context, start=first[number]) for number, context in enumerate(attempt.contexts)
        ],
    )


def _move_segments(segments: list[Segment], moved: dict[int, int]) -> list[Segment]:
    """Segments at their new places, in order. Each lies within one of the pieces that were moved from start to start."""
    origins = sorted(moved)
    found: list[Segment] = []
    for segment in (segment for segment in segments if segment.end > segment.start):
        origin = origins[bisect_right(origins, segment.start) - 1]
        shift = moved[origin] - origin
        found.append(msgspec.structs.replace(segment, start=segment.start + shift, end=segment.end + shift))
    return sorted(found, key=lambda segment: segment.start)


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
