"""Replays the turns of an earlier run, id by id, so that agents, tools and worlds can be tried without a model.

    [rollouts]
    servers = ["recorded:<run id>"]        a run on the same log

A turn is looked up by all token ids of the context before it. If several attempts had the same context, as members of a
group have before their first turn, the turn of the same seed is used, or else one chosen by the seed. A context that
was not recorded, because a tool now returns something else, has no turn: the rollout ends by infra_error.

Not covered: the recording is held in memory, about 100 bytes and 12 a token for each turn.
"""

import hashlib
from dataclasses import dataclass, field

from msgspec import Struct

from replayground.producers.policy import PolicyFailed, Turn, TurnRequest
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    AgentMessaged,
    Event,
    Position,
    RolloutEnded,
    RolloutStarted,
    RunStarted,
    ToolObserved,
    TurnGenerated,
    VersionSpan,
)
from replayground.schemas.packed import pack_tokens, unpack_logprobs, unpack_tokens
from replayground.streams.log.protocol import Log

PREFIX = "recorded:"
_EVENTS_AT_ONCE = 2000


def recorded_run(servers: list[str]) -> str | None:
    """The run to replay, if [rollouts] servers names one. Raises BadInput when it also names servers."""
    recorded = [server for server in servers if server.startswith(PREFIX)]
    if not recorded:
        return None
    run_id = recorded[0].removeprefix(PREFIX)
    if len(servers) > 1 or not run_id:
        raise BadInput(f'[rollouts] servers: a recorded run stands alone, as ["{PREFIX}<run id>"], not {servers}')
    return run_id


def read_recording(log: Log, run_id: str) -> "RecordedTurns":
    """All turns of a run that are on the log now. Blocks until they are read. Raises BadInput when there are none,
    LogUnavailable."""
    recording = RecordedTurns()
    reader = log.reader(["messages"], start=_start_of(log, run_id), run_id=run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_AT_ONCE, 0.5):
                # The reader leaves out other runs only as far as the first bytes tell.
                if delivery.event is not None and delivery.event.meta.run_id == run_id:
                    recording.note(delivery.event)
    finally:
        reader.close()
    if not recording.turns:
        raise BadInput(f'[rollouts] servers: the log holds no turn of a run "{run_id}" to replay')
    return recording


def _start_of(log: Log, run_id: str) -> list[Position]:
    """Where the run began on the log. [] if it has no RunStarted: then the log is read from its beginning."""
    reader = log.reader(["runs"], run_id=run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_AT_ONCE, 0.5):
                if isinstance(delivery.event, RunStarted) and delivery.event.meta.run_id == run_id:
                    return delivery.event.positions
    finally:
        reader.close()
    return []


class _RecordedTurn(Struct, frozen=True):
    """A turn in the form it is kept in: packed bytes take less memory than lists."""

    seed: int
    tokens: bytes
    logprobs: bytes
    versions: list[VersionSpan]
    finish_reason: str


@dataclass(slots=True)
class _RecordedAttempt:
    seed: int
    read: dict[int, bytes]
    "packed ids of each context so far"


@dataclass(slots=True)
class RecordedTurns:
    """Turns by the context before them. A fold over `messages`, in the order of each attempt."""

    turns: int = 0
    _said: dict[bytes, list[_RecordedTurn]] = field(default_factory=dict)
    _attempts: dict[str, _RecordedAttempt] = field(default_factory=dict)

    def note(self, event: Event) -> None:
        """Folds one message. Ignores what does not belong to an attempt whose RolloutStarted was seen."""
        attempt_id = event.meta.attempt_id or ""
        if isinstance(event, RolloutStarted):
            self._attempts[attempt_id] = _RecordedAttempt(event.seed, {0: event.prompt_tokens})
        attempt = self._attempts.get(attempt_id)
        # Its start was before the first message read: its context is not known.
        if attempt is None:
            return
        match event:
            case TurnGenerated():
                self._keep(attempt, event)
            case ToolObserved() | AgentMessaged():
                attempt.read[event.context] = attempt.read.get(event.context, b"") + event.tokens
            # Contexts of ended attempts are not needed any more; only those of open ones stay in memory.
            case RolloutEnded():
                del self._attempts[attempt_id]

    def turn(self, tokens: list[int], seed: int) -> Turn | None:
        """The recorded turn after exactly these ids; None if there is none."""
        said = self._said.get(_name(pack_tokens(tokens)), [])
        found = next((each for each in said if each.seed == seed), said[seed % len(said)] if said else None)
        if found is None:
            return None
        return Turn(unpack_tokens(found.tokens), unpack_logprobs(found.logprobs), found.versions, found.finish_reason)

    def _keep(self, attempt: _RecordedAttempt, event: TurnGenerated) -> None:
        read = attempt.read.get(event.context, b"")
        said = _RecordedTurn(attempt.seed, event.tokens, event.logprobs, event.versions, event.finish_reason)
        alike = self._said.setdefault(_name(read), [])
        # A second attempt at the same rollout may have sampled the same turn.
        if said not in alike:
            alike.append(said)
            self.turns += 1
        attempt.read[event.context] = read + event.tokens


class RecordedPolicy:
    """See producers.policy.Policy. Turns keep the log-probabilities and weight versions they were sampled with."""

    def __init__(self, recording: RecordedTurns) -> None:
        self._recording = recording

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        turn = self._recording.turn(turn_request.tokens, turn_request.seed)
        if turn is None:
            raise PolicyFailed(f"nothing is recorded after these {len(turn_request.tokens)} token ids")
        # Not cut off: a shortened turn would not be the one that was sampled.
        if len(turn.tokens) > turn_request.tokens_max:
            raise PolicyFailed(
                f"the recorded turn has {len(turn.tokens)} token ids, but only {turn_request.tokens_max} are allowed"
            )
        return turn


def _name(packed: bytes) -> bytes:
    # 16 bytes instead of the context itself: each turn repeats all before it, so the sum would grow quadratically.
    return hashlib.blake2b(packed, digest_size=16).digest()
