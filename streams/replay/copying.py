"""Copies the batches of one run into another, so that another trainer learns from the same trajectories.

Members keep their addresses: nothing but the batch itself is written again. Index and base version are those of the new
run. Copies are written exactly once: they and how far the source was read are one transaction.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import msgspec
from msgspec import Struct

from replayground.schemas.events import BatchCut, BatchMember, Event, Position
from replayground.schemas.ids import derived_id, now_microseconds
from replayground.schemas.run import Run
from replayground.streams.log.protocol import Delivery, Log
from replayground.streams.log.snapshots import snapshot, snapshot_to_continue
from replayground.streams.replay.patience import while_log_is_away
from replayground.streams.replay.selection import PartitionSelection

STATE_VERSION = "copying-1"
_TOPIC = "batches"
_BATCHES_PER_COMMIT = 64
_POLL_SECONDS = 0.2


class CopyState(Struct):
    """How far the source was copied."""

    offset: int
    "of topic batches, which has one partition: the next one to read"
    index_next: int = 0
    skipped: int = 0
    "batches of the source of which nothing was chosen"


class CopyRule(Struct, frozen=True, kw_only=True):
    """Which batches of a source become which batches of the new run. Pure."""

    run_id: str
    source: str
    first_version: int
    "of the new run, and the lowest base version that is copied"
    until: int | None = None
    "batches that lead to a version above it are left out"
    selections: dict[int, PartitionSelection] | None = None
    "members that are kept, by partition; None = all"

    def takes(self, batch: BatchCut) -> bool:
        """Whether the batch is of the source and within the wanted versions."""
        is_wanted = batch.base_version >= self.first_version and (self.until is None or batch.base_version < self.until)
        return batch.meta.run_id == self.source and is_wanted

    def copy(self, batch: BatchCut, index: int) -> BatchCut | None:
        """The batch as one of the new run; None when none of its members was chosen."""
        members = [member for member in batch.members if self._has(member)]
        if not members:
            return None
        kept = {member.group_id for member in members}
        meta = msgspec.structs.replace(
            batch.meta,
            id=derived_id("BatchCut", self.run_id, index, batch.meta.id, len(members)),
            run_id=self.run_id,
            sender="replay",
            causation_id=batch.meta.id,
        )
        return msgspec.structs.replace(
            batch,
            meta=meta,
            index=index,
            base_version=self.first_version + index,
            members=members,
            groups=[group_id for group_id in batch.groups if group_id in kept],
            positions=[],
        )

    def is_done(self, state: "CopyState") -> bool:
        """Whether no further batch of the source can be wanted."""
        # With a selection, batches of which nothing was chosen are skipped.
        copied = state.index_next + state.skipped
        return self.until is not None and self.first_version + copied >= self.until

    def _has(self, member: BatchMember) -> bool:
        if self.selections is None:
            return True
        chosen = self.selections.get(member.trajectory.partition)
        return chosen is not None and chosen.group_size(member.trajectory.offset) is not None


def batches_from(log: Log, run_id: str, start: Sequence[Position]) -> Iterator[BatchCut]:
    """The batches of a run that are on the log now."""
    with closing(log.reader([_TOPIC], start=start, run_id=run_id)) as reader:
        while not reader.caught_up():
            for delivery in reader.poll(100, _POLL_SECONDS):
                if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == run_id:
                    yield delivery.event


def copy_batches(
    run: Run,
    log: Log,
    rule: CopyRule,
    start: Sequence[Position],
    has_ended: Callable[[], bool],
    stop: threading.Event,
) -> CopyState | None:
    """Copies until everything of the source is copied and `has_ended` says that no more comes; None when `stop` was set.
    Waits while the log is unavailable. Raises Fenced, LogBroken."""
    return while_log_is_away(lambda: _copy(run, log, rule, start, has_ended, stop), stop)


def _copy(
    run: Run,
    log: Log,
    rule: CopyRule,
    start: Sequence[Position],
    has_ended: Callable[[], bool],
    stop: threading.Event,
) -> CopyState | None:
    run = msgspec.structs.replace(run, program="replay-copy")
    transactor = log.transactor(f"replay-{run.run_id}-copy")
    try:
        taken = snapshot_to_continue(log, run, STATE_VERSION)
        first = next((position.offset for position in start if position.topic == _TOPIC), 0)
        state = CopyState(first) if taken is None else msgspec.msgpack.decode(taken.state, type=CopyState)
        position = Position(topic=_TOPIC, partition=0, offset=state.offset)
        with closing(log.reader([_TOPIC], start=[position], run_id=rule.source)) as reader:
            while not stop.is_set():
                if rule.is_done(state):
                    return state
                # Asked before the poll: what the source wrote before its end is then on the log.
                is_last = has_ended()
                deliveries = reader.poll(_BATCHES_PER_COMMIT, _POLL_SECONDS)
                if deliveries:
                    transactor.commit([*_copies(rule, state, deliveries), _snapshot(run, state)], None)
                elif is_last and reader.caught_up():
                    return state
        return None
    finally:
        transactor.close()


def _copies(rule: CopyRule, state: CopyState, deliveries: Sequence[Delivery]) -> Iterator[Event]:
    """Copies of what was delivered. Changes the state."""
    for delivery in deliveries:
        state.offset = delivery.address.offset + 1
        if not isinstance(delivery.event, BatchCut) or not rule.takes(delivery.event):
            continue
        copied = rule.copy(delivery.event, state.index_next)
        if copied is None:
            state.skipped += 1
        else:
            state.index_next += 1
            yield copied


def _snapshot(run: Run, state: CopyState) -> Event:
    position = Position(topic=_TOPIC, partition=0, offset=state.offset)
    return snapshot(run, STATE_VERSION, [position], msgspec.msgpack.encode(state), now_microseconds())
