"""A policy that says again what an earlier run said, id by id: agents, tools and worlds can be played without a model.

    [rollouts]
    servers = ["recorded:<run id>"]        a run on the same log

A turn is found by all the ids that had been read before it. Where several attempts had read the same, as members of a group
have at their first turn, the one of the same seed is taken, or else one by the seed. What nobody had read before, because a
tool now answers otherwise, has no turn: the rollout ends by infra_error and says so.

Not covered: the recording is held in memory, about 100 bytes and 12 a token for each turn.
"""

import hashlib
from dataclasses import dataclass, field

from msgspec import Struct

from producers.policy import PolicyFailed, Turn, TurnRequest
from schemas.errors import BadInput
from schemas.events import (
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
from schemas.packed import pack_tokens, unpack_logprobs, unpack_tokens
from streams.log.protocol import Log

PREFIX = "recorded:"
_EVENTS_AT_ONCE = 2000


def recorded_run(servers: list[str]) -> str | None:
    """The run that is to be said again, when that is what [rollouts] servers asks for. Raises BadInput."""
    recorded = [server for server in servers if server.startswith(PREFIX)]
    if not recorded:
        return None
    run_id = recorded[0].removeprefix(PREFIX)
    if len(servers) > 1 or not run_id:
        raise BadInput(f'[rollouts] servers: a recording stands alone, as ["{PREFIX}<run id>"], not {servers}')
    return run_id


def read_recording(log: Log, run_id: str) -> "RecordedTurns":
    """All turns of a run that are on the log now. Raises BadInput when there are none, LogUnavailable."""
    recording = RecordedTurns()
    reader = log.reader(["messages"], start=_start_of(log, run_id), run_id=run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(_EVENTS_AT_ONCE, 0.5):
                if delivery.event is not None and delivery.event.meta.run_id == run_id:
                    recording.note(delivery.event)
    finally:
        reader.close()
    if not recording.turns:
        raise BadInput(f'[rollouts] servers: the log holds no turn of a run "{run_id}" that could be said again')
    return recording


def _start_of(log: Log, run_id: str) -> list[Position]:
    """Where the run began on the log; [] = nobody told, so it is looked for from the beginning."""
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
    """A turn as it is kept."""

    seed: int
    tokens: bytes
    logprobs: bytes
    versions: list[VersionSpan]
    finish_reason: str


@dataclass(slots=True)
class _RecordedAttempt:
    seed: int
    read: dict[int, bytes]
    "ids of each context so far"


@dataclass(slots=True)
class RecordedTurns:
    """Turns by what had been read before them. A fold over `messages`, in the order of each attempt."""

    turns: int = 0
    _said: dict[bytes, list[_RecordedTurn]] = field(default_factory=dict)
    _attempts: dict[str, _RecordedAttempt] = field(default_factory=dict)

    def note(self, event: Event) -> None:
        """Takes note of one message; whatever is no message of an attempt under way is passed over."""
        attempt_id = event.meta.attempt_id or ""
        if isinstance(event, RolloutStarted):
            self._attempts[attempt_id] = _RecordedAttempt(event.seed, {0: event.prompt_tokens})
        attempt = self._attempts.get(attempt_id)
        if attempt is None:
            return
        match event:
            case TurnGenerated():
                self._keep(attempt, event)
            case ToolObserved() | AgentMessaged():
                attempt.read[event.context] = attempt.read.get(event.context, b"") + event.tokens
            case RolloutEnded():
                del self._attempts[attempt_id]

    def turn(self, tokens: list[int], seed: int) -> Turn | None:
        """What was said after exactly these ids; None when nobody had read them."""
        said = self._said.get(_name(pack_tokens(tokens)), [])
        found = next((each for each in said if each.seed == seed), said[seed % len(said)] if said else None)
        if found is None:
            return None
        return Turn(unpack_tokens(found.tokens), unpack_logprobs(found.logprobs), found.versions, found.finish_reason)

    def _keep(self, attempt: _RecordedAttempt, event: TurnGenerated) -> None:
        read = attempt.read.get(event.context, b"")
        said = _RecordedTurn(attempt.seed, event.tokens, event.logprobs, event.versions, event.finish_reason)
        alike = self._said.setdefault(_name(read), [])
        if said not in alike:  # a second attempt of the same rollout may have said the same
            alike.append(said)
            self.turns += 1
        attempt.read[event.context] = read + event.tokens


class RecordedPolicy:
    """See producers.policy.Policy. Turns that were sampled keep their log-probabilities and weight versions."""

    def __init__(self, recording: RecordedTurns) -> None:
        self._recording = recording

    async def next_turn(self, turn_request: TurnRequest) -> Turn:
        turn = self._recording.turn(turn_request.tokens, turn_request.seed)
        if turn is None:
            raise PolicyFailed(f"nothing is recorded after these {len(turn_request.tokens)} ids")
        if len(turn.tokens) > turn_request.tokens_max:
            raise PolicyFailed(
                f"the recorded turn has {len(turn.tokens)} ids where {turn_request.tokens_max} are allowed"
            )
        return turn


def _name(packed: bytes) -> bytes:
    return hashlib.blake2b(packed, digest_size=16).digest()
