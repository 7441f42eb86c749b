"""The messages of one attempt at a rollout: their numbers, envelopes and, when it cannot be played, their end."""

import hashlib
from collections.abc import Callable

import msgspec

from schemas.events import EndedBy, Event, Meta, RolloutEnded, RolloutRequested, RolloutStarted, Task
from schemas.ids import new_id, now_microseconds

type Emit = Callable[[Event], None]

WORLD_BYTES_INLINE = 256
"a longer world stands in TaskSubmitted alone, and is referred to; a shorter one is not worth a second read"


def world_hash_of(task: Task) -> str:
    return task.world_hash or hashlib.sha256(task.world.encode()).hexdigest()


def without_world(task: Task) -> Task:
    """The task as events after TaskSubmitted carry it: a world that is not short is named by its hash."""
    if len(task.world.encode()) <= WORLD_BYTES_INLINE:
        return task
    return msgspec.structs.replace(task, world="", world_hash=world_hash_of(task))


class AttemptWriter:
    """Numbers and addresses the messages of one attempt at a request."""

    def __init__(self, request: RolloutRequested, emit: Emit, attempt_id: str | None = None) -> None:
        self.request = request
        self.attempt_id = attempt_id or new_id()
        self._emit = emit
        self._seq = 0
        self._cause = request.meta.id
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
        """The envelope of the next message. Each message is caused by the one before, the first by the request. The
        caller is whoever the request came from, unless the sender speaks on behalf of another agent."""
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
        self._seq += 1
        self._cause = message_id
        return meta

    def emit(self, event: Event) -> None:
        self._emit(event)


def close_unplayed(attempt: AttemptWriter, worker: str, ended_by: EndedBy, reason: str) -> RolloutEnded:
    """An attempt that begins and ends at once, because it cannot or need not be played. Returns its end."""
    request = attempt.request
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
