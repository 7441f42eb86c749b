"""assemble: turns the messages of an attempt into one trajectory when the attempt has ended and no message is missing.

Attempts of one trajectory are kept apart by attempt_id. Repeats are ignored. A message after a gap in `seq` is
rejected: no trajectory is made with messages missing, and the scheduler requests another attempt.

Messages of several contexts arrive mixed, in the order in which they happened. A trajectory holds its contexts one
after another, so that the trainer can separate them.

With each TrajectoryAssembled goes a small AttemptEnded: planners count attempts without reading tokens.
"""

from bisect import bisect_right
from functools import singledispatch
from itertools import accumulate
from typing import Any, cast

import msgspec
from msgspec import Struct

from replayground.schemas.events import (
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
from replayground.schemas.ids import derived_id
from replayground.schemas.packed import token_count
from replayground.streams.hops.hop import Outcome

# Part of the ids of derived events: change it when the same messages would give another trajectory.
CODE_VERSION = "assemble-2"
KEYS_REMEMBERED = 1024
# One float32 of 0.0, for tokens that the policy did not sample.
_UNKNOWN_LOGPROB = b"\x00\x00\x00\x00"


class MessageSpan(Struct):
    """The token range of one message, and the context it belongs to."""

    context: int
    start: int
    end: int


class PartialTrajectory(Struct):
    """An attempt that has not ended. Tokens are in message order; `_by_context` sorts them at the end."""

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
    # With defaults: a state that an older release stored has none of the fields below.
    pieces: list[MessageSpan] = []
    contexts: list[Context] = []
    "those begun so far; `start` is in message order until the end"
    untaught: bool = False
    "true when a turn came with log-probabilities: the policy's"


class AssemblyState(Struct):
    """All attempts of one trajectory: those under way, and the ids of those that ended."""

    attempts: dict[str, PartialTrajectory] = {}
    ended: list[str] = []
    is_closed: bool = False
    "an attempt ended other than by infra_error: no further one is requested"


class AssembleTrajectories:
    """See streams.hops.hop.Hop."""

    name = "assemble"
    reads = "messages"
    state_class = AssemblyState

    def __init__(self, keys_remembered: int = KEYS_REMEMBERED) -> None:
        self.keys_remembered = keys_remembered

    def is_closed(self, state: AssemblyState) -> bool:
        # Also while another attempt is open: it is of a dead worker, or of a second one that nobody waits for.
        return state.is_closed

    def key(self, event: Event) -> str | None:
        return event.meta.trajectory_id

    def step(self, state: AssemblyState | None, event: Event, address: Address) -> Outcome:
        attempt_id, seq = event.meta.attempt_id, event.meta.seq
        if attempt_id is None or seq is None or event.meta.group_id is None:
            return Outcome(state, refused="a message of a rollout needs group_id, attempt_id and seq")
        known = state or AssemblyState()
        # The same object as before: the stage then stores nothing.
        if attempt_id in known.ended:
            return Outcome(state)
        attempt = known.attempts.get(attempt_id)
        expected = 0 if attempt is None else attempt.seq_next
        if seq < expected:
            return Outcome(state)
        if seq > expected:
            return Outcome(state, refused=f"seq {seq}, expected {expected}: a message of the attempt is missing")
        return self._apply(known, attempt_id, attempt, event)

    def _apply(self, state: AssemblyState, attempt_id: str, attempt: PartialTrajectory | None, event: Event) -> Outcome:
        if isinstance(event, RolloutEnded):
            if attempt is None:
                return Outcome(state, refused="RolloutEnded of an attempt without RolloutStarted")
            rest = {name: other for name, other in state.attempts.items() if name != attempt_id}
            assert attempt_id not in state.ended, "an attempt ends once"
            trajectory = _assemble(attempt, event)
            # After an infra_error the scheduler requests another attempt at the same trajectory.
            is_closed = state.is_closed or event.ended_by != "infra_error"
            return Outcome(
                AssemblyState(rest, [*state.ended, attempt_id], is_closed), (trajectory, _attempt_ended(trajectory))
            )
        if attempt is None and not isinstance(event, RolloutStarted):
            return Outcome(state, refused=f"an attempt starts with RolloutStarted, not {type(event).__name__}")
        wrong = _complaint(event, attempt)
        if wrong is not None:
            return Outcome(state, refused=wrong)
        grown = _begin(cast(RolloutStarted, event)) if attempt is None else _extend(event, attempt)
        grown = msgspec.structs.replace(grown, seq_next=cast(int, event.meta.seq) + 1)
        return Outcome(AssemblyState(state.attempts | {attempt_id: grown}, state.ended, state.is_closed))


def _complaint(event: Event, attempt: PartialTrajectory | None) -> str | None:
    """Why a message does not fit its attempt, None when it does. Without an attempt, it is the one that begins it."""
    if isinstance(event, RolloutStarted):
        count = len(event.prompt_tokens)
        return f"{count} bytes of prompt tokens are no whole tokens" if count % 4 else None
    if attempt is None or not isinstance(event, (TurnGenerated, ToolObserved, AgentMessaged)):
        return None
    # A state of an older release has no list of contexts: such an attempt has one.
    known = max(1, len(attempt.contexts))
    # A turn extends a known context; an observation or agent message may also begin the next one.
    if not 0 <= event.context < known + (not isinstance(event, TurnGenerated)):
        return f"context {event.context} of an attempt that has {known}"
    if len(event.tokens) % 4:
        return f"{len(event.tokens)} bytes of tokens are no whole tokens"
    if isinstance(event, TurnGenerated):
        if event.logprobs and len(event.logprobs) != len(event.tokens):
            return "the numbers of log-probabilities and tokens differ"
        if any(not 0 <= span.start <= span.end <= token_count(event.tokens) for span in event.versions):
            return "the span of a weight version is outside the tokens of the turn"
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
    """The attempt with one more message. Kinds of messages without a handler below change nothing."""
    return attempt


@_extend.register
def _(event: TurnGenerated, attempt: PartialTrajectory) -> PartialTrajectory:
    start, count = token_count(attempt.tokens), token_count(event.tokens)
    segments = [
        Segment(
            start=start + span.start,
            end=start + span.end,
            agent=event.agent,
            policy_version=span.version,
            # The trainer's log-probabilities must be of the distribution that was sampled from (decision 0031).
            temperature=event.sampling.temperature,
            top_p=event.sampling.top_p,
        )
        for span in event.versions
        # Without versions it is a teacher's turn.
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
        # A turn without tokens has no log-probabilities either, whoever sampled it.
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
    """Adds tokens that an agent read and did not sample: their loss mask is 0."""
    tokens = event.tokens
    start, count = token_count(attempt.tokens), token_count(tokens)
    contexts = attempt.contexts
    # The next unused number begins a new context, with these tokens as its prompt.
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
        # Empty marks a teacher's trajectory: it serves SFT, and RL must not use it.
        logprobs=b"" if attempt.taught else attempt.logprobs,
        segments=attempt.segments,
        transcript=attempt.transcript,
        answer=ended.answer,
        ended_by=ended.ended_by,
        reason=ended.reason,
        turns=attempt.turns,
        # Not attempt.tokens_sampled: in an attempt with a teacher too, that counts the teacher's tokens.
        tokens_sampled=attempt.loss_mask.count(1),
        policy_version_oldest=min(versions, default=None),
        template_hash=started.template_hash,
        tools_hash=started.tools_hash,
        world_hash=started.world_hash,
        cost=ended.cost,
        # A single context is left out, as in events of older releases.
        contexts=attempt.contexts if len(attempt.contexts) > 1 else [],
        findings=ended.findings,
    )


def _attempt_ended(trajectory: TrajectoryAssembled) -> AttemptEnded:
    """The end of the attempt, without tokens and transcript."""
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
    """In an attempt of policy and teacher together, removes the teacher's tokens from the loss mask: only what the
    policy sampled can be trained on."""
    if not (attempt.taught and attempt.untaught):
        return attempt
    mask = bytearray(attempt.loss_mask)
    for segment in attempt.segments:
        if segment.policy_version is None:
            mask[segment.start : segment.end] = bytes(segment.end - segment.start)
    return msgspec.structs.replace(attempt, loss_mask=bytes(mask), taught=False)


def _by_context(attempt: PartialTrajectory) -> PartialTrajectory:
    """Moves tokens, mask, log-probabilities and segments from message order to one context after another."""
    if len(attempt.contexts) < 2:
        return attempt
    pieces = sorted(attempt.pieces, key=lambda piece: piece.context)  # stable: within a context the order stays
    # Where each piece begins in the new order, and the first of each context.
    starts = list(accumulate((piece.end - piece.start for piece in pieces), initial=0))[:-1]
    # Without empty pieces: they share their start with the next piece, whose place counts.
    moved = {piece.start: start for piece, start in zip(pieces, starts, strict=True) if piece.end > piece.start}
    # Backwards, so that the first piece of a context is the one that stays.
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
    """Segments at their new places, sorted. `moved` maps the old start of each piece to its new start."""
    origins = sorted(moved)
    found: list[Segment] = []
    for segment in (segment for segment in segments if segment.end > segment.start):
        # A segment lies within one piece: the last one that begins at or before it.
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
