"""Writes the messages of one attempt at a rollout: numbers, envelopes, and the end of an attempt that is not played."""

import hashlib
from collections.abc import Callable

import msgspec

from replayground.schemas.events import EndedBy, Event, Meta, RolloutEnded, RolloutRequested, RolloutStarted, Task
from replayground.schemas.ids import new_id, now_microseconds

type Emit = Callable[[Event], None]

WORLD_BYTES_INLINE = 256
"a longer world is only in TaskSubmitted and is referred to by hash; a shorter one is not worth a second read"


def world_hash_of(task: Task) -> str:
    # A task that already refers to its world has an empty `world`, whose hash would be wrong.
    return task.world_hash or hashlib.sha256(task.world.encode()).hexdigest()


def without_world(task: Task) -> Task:
    """The task as events after TaskSubmitted carry it: a world above WORLD_BYTES_INLINE is replaced by its hash."""
    # A group of 8 would otherwise put 25 copies of the world on the log (decision 0018).
    if len(task.world.encode()) <= WORLD_BYTES_INLINE:
        return task
    return msgspec.structs.replace(task, world="", world_hash=world_hash_of(task))


class AttemptWriter:
    """Numbers the messages of one attempt at a request and fills their envelopes."""

    def __init__(self, request: RolloutRequested, emit: Emit, attempt_id: str | None = None) -> None:
        self.request = request
        # A redelivered request is another attempt. Only the scheduler passes an id: it closes a member again after a
        # restart, and both closings must count as one attempt.
        self.attempt_id = attempt_id or new_id()
        self._emit = emit
        self._seq = 0
        self._cause = request.meta.id
        # W3C trace ids are 32 hex digits: a UUID without its dashes.
        self._trace = (request.meta.trajectory_id or "").replace("-", "")

    def meta(
        self,
        category: str,
        sender: str,
        receiver: str,
        policy_version: int | None = None,
        *,
        caller: str | None = None,
    ) -> Meta:
        """The envelope of the next message, with the next seq. Its cause is the message before it; for the first, the
        request. `caller` is the agent on whose behalf the sender acts; left out, it is the sender of the request.

        Every call uses up one seq: emit the message, or `assemble` refuses the gap."""
        asked = self.request.meta
        message_id = new_id()
        meta = Meta(
            id=message_id,
            run_id=asked.run_id,
            session_id=asked.session_id,
            task_id=asked.task_id,
            group_id=asked.group_id,
            trajectory_id=asked.trajectory_id,
            attempt_id=self.attempt_id,
            seq=self._seq,
            category=category,
            topic="messages",
            sender=sender,
            receiver=receiver,
            caller=caller or asked.sender,
            priority=asked.priority,
            headers={"traceparent": f"00-{self._trace}-{message_id.replace('-', '')[-16:]}-01"},
            timestamp=now_microseconds(),
            correlation_id=asked.id,
            causation_id=self._cause,
            purpose=asked.purpose,
            policy_version=policy_version,
        )
        # Numbered here and not in emit: events are frozen, so the envelope comes first.
        self._seq += 1
        self._cause = message_id
        return meta

    def emit(self, event: Event) -> None:
        self._emit(event)


def close_unplayed(attempt: AttemptWriter, worker: str, ended_by: EndedBy, reason: str) -> RolloutEnded:
    """Emits the start and the end of an attempt that cannot or need not be played. Returns its end."""
    request = attempt.request
    # A start and an end, so that `assemble` folds it like any other attempt (decision 0003).
    attempt.emit(
        RolloutStarted(
            meta=attempt.meta("rollout", worker, request.task.agent),
            task=without_world(request.task),
            index=request.index,
            seed=request.seed,
            worker=worker,
            isolation="none",
            prompt_tokens=b"",
            template_hash="",
            tools_hash="",
            world_hash=world_hash_of(request.task),
            required_version=request.required_version,
        )
    )
    ended = RolloutEnded(
        meta=attempt.meta("rollout", worker, "assemble"),
        ended_by=ended_by,
        answer=None,
        reason=reason,
        turns=0,
        tokens_sampled=0,
        tokens_read=0,
        milliseconds=0.0,
        cost=0.0,
    )
    attempt.emit(ended)
    return ended
