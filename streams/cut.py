"""The cutter: groups in, batches out, each batch and the positions it consumed in one transaction (P4).

    groups ─► CutGroups (pure) ─► BatchCut + positions, now and then a SnapshotTaken ─► one Kafka transaction

Nothing is kept besides the log: a restart takes the newest snapshot of its state, reads the `batches` after it, and goes on
with the groups after both; without a snapshot, it reads the batches of the whole run. While no batch can be cut, a snapshot
and the positions are written alone, so that a restart never reads more than so many groups. A second cutter fences the first.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from schemas.errors import Fenced, LogBroken, LogUnavailable
from schemas.events import Address, BatchCut, Event, Position, SnapshotTaken
from schemas.ids import now_microseconds
from schemas.metrics import ProgramMetrics
from schemas.run import Run
from streams.config import CutSettings
from streams.hops.groups_to_batches import STATE_VERSION, CutGroups, CutState
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.protocol import Delivery, Log, Reader, Transactor
from streams.log.snapshots import newest_snapshot, snapshot
from streams.log.takeover import fencing_error
from streams.rules.dead_letter import RejectLimit, rejection

logger = structlog.get_logger()

PROGRAM = "cut"
_RETRY_SECONDS = 1.0
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def run(run: Run, settings: CutSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Cuts until told to stop. Raises Fenced when another cutter took over, TakenOver when the whole run was, LogBroken,
    TooManyRejects."""
    log = open_log(run)
    try:
        cut(run, settings, program_metrics, stop, log)
    except Fenced as error:
        raise fencing_error(log, run, error) from error
    finally:
        log.close()


def cut(run: Run, settings: CutSettings, program_metrics: ProgramMetrics, stop: threading.Event, log: KafkaLog) -> None:
    """The program over any log of Kafka. When the log is not available it starts over from the batches on it."""
    hop = cut_hop_of(run)
    while not stop.is_set():
        try:
            Cutter(log, hop, run, settings, program_metrics).run_until(stop)
        except LogUnavailable as error:
            # the transaction was aborted or its outcome is unknown: read state and positions back from the log
            logger.warning("cutter_restarting", reason=str(error))
            program_metrics.detail = f"waiting for the log: {error}"
            log.forget_failure()
            stop.wait(_RETRY_SECONDS)


def cut_hop_of(run: Run) -> CutGroups:
    """The hop that cuts batches of this run."""
    job = run.job
    return CutGroups(
        run.run_id, job.groups_per_batch, job.staleness_max, job.first_version, batches_max=job.steps or None
    )


class Cutter:
    """The cutter from its restored state to the first failure; the caller then makes a new one."""

    def __init__(
        self, log: Log, hop: CutGroups, run: Run, settings: CutSettings, program_metrics: ProgramMetrics
    ) -> None:
        self._log = log
        self._hop = hop
        self._run = msgspec.structs.replace(run, program=PROGRAM)
        self._settings = settings
        self._program_metrics = program_metrics
        self._limit = RejectLimit("cut", settings.rejects_share_max)
        # Takes the transactional id before the state is read: from here on no older cutter can append a batch.
        self._transactor: Transactor = log.transactor(f"cut-{run.run_id}")
        before = restore_state(log, hop, run)
        self._state = before.state
        self._start = before.groups_from
        self._batches_from = before.batches_from
        self._since_snapshot = _Unsaved(settings, is_first=True)

    def run_until(self, stop: threading.Event) -> None:
        # alone: reads all partitions, even while a fenced cutter is still a member of the group
        group = f"cut-{self._run.run_id}"
        reader = self._log.reader(
            [self._hop.reads], group=group, alone=True, start=self._run.start, run_id=self._run.run_id
        )
        self._program_metrics.detail = "cuts batches"
        try:
            # the state decides, not what the group has committed: that may belong to a snapshot which is lost
            reader.seek(_furthest([self._hop.reads], self._start, self._hop.positions(self._state)))
            while not stop.is_set():
                # One at a time: the transaction commits the reader's positions, which must not pass the batch's last group.
                for delivery in reader.poll(1, self._settings.poll_seconds):
                    self._take(delivery, reader)
        finally:
            reader.close()
            self._transactor.close()

    def _take(self, delivery: Delivery, reader: Reader) -> None:
        self._program_metrics.count("events_read")
        self._since_snapshot.groups_read += 1
        batches = self._batches_after(delivery)
        if batches or self._since_snapshot.is_long_ago:
            # as long as the batch waits for the log it counts as lag: a log that does not take it is seen as a stall
            self._program_metrics.gauge("lag", max(1, len(batches)))
            with self._program_metrics.busy():
                self._commit(batches, reader)
            self._program_metrics.gauge("lag", 0)
        if batches:
            logger.info("batch_cut", index=self._state.index_next - 1)

    def _batches_after(self, delivery: Delivery) -> Sequence[Event]:
        """Takes a message into the state; the batch that can be cut with it, if it can."""
        self._limit.count(delivery.undecodable is not None)
        if delivery.other_run is not None:
            return ()
        if delivery.event is None:
            self._reject(delivery, delivery.undecodable or "")
            return ()
        if self._hop.key(delivery.event) is None:
            return ()
        outcome = self._hop.step(self._state, delivery.event, delivery.address)
        if outcome.refused is not None:
            self._reject(delivery, outcome.refused)
            return ()
        self._state = outcome.state
        return outcome.events

    def _commit(self, batches: Sequence[Event], reader: Reader) -> None:
        """What was cut, a snapshot if one is due, and the positions of the reader, in one transaction."""
        events = list(batches)
        self._since_snapshot.count(batches)
        if self._since_snapshot.is_due(groups_remembered=len(self._state.seen)):
            events.append(self._snapshot(reader, is_with_batch=bool(batches)))
            self._since_snapshot = _Unsaved(self._settings)
        self._log.flush()  # rejects: what is committed here is not read again
        self._transactor.commit(events, reader)
        self._program_metrics.count("events_written", len(events))

    def _snapshot(self, reader: Reader, *, is_with_batch: bool) -> SnapshotTaken:
        """Of the state that this transaction leads to. All earlier batches stand before the end of the topic. A batch of the
        same transaction will stand after it and is read again by a restart, which knows it by its index."""
        ends = self._log.end_positions(["batches"])
        saved = _Saved(self._state, None if is_with_batch else self._newest_batch())
        if is_with_batch:
            self._batches_from = ends
        groups = _furthest([self._hop.reads], self._start, reader.positions())
        return snapshot(self._run, STATE_VERSION, [*ends, *groups], _encode(saved), now_microseconds())

    def _newest_batch(self) -> Address | None:
        """Where the newest batch of the run stands; None before the first. Raises LogBroken when it is gone."""
        index = self._state.index_next - 1
        if index < 0:
            return None
        for address, batch in placed_batches(self._log, self._run, self._batches_from):
            if batch.index == index:
                self._batches_from = [_at(address)]
                return address
        raise LogBroken(
            f"batch {index} is not on the log although it was written: topic batches was cut off or replaced"
        )

    def _reject(self, delivery: Delivery, reason: str) -> None:
        self._log.append(rejection(self._run.run_id, "cut", delivery, reason, now_microseconds()))
        self._program_metrics.count("rejected")


class _Unsaved:
    """What was read and cut since the last snapshot."""

    def __init__(self, settings: CutSettings, *, is_first: bool = False) -> None:
        self._settings = settings
        self._is_first = is_first
        self._batches = 0
        self._groups = 0
        self.groups_read = 0

    def count(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, BatchCut):
                self._batches += 1
                self._groups += len(event.groups) + len(event.groups_stale) + len(event.groups_passed)

    @property
    def is_long_ago(self) -> bool:
        return self.groups_read >= self._settings.snapshot_groups

    def is_due(self, groups_remembered: int) -> bool:
        """Also when the state is large: all snapshots together are a few times as large as what they save reading."""
        if self._is_first and self._batches:
            return True  # with the first batch after a restart, or frequent restarts would read ever more
        is_worth_it = self._batches >= self._settings.snapshot_batches and 4 * self._groups >= groups_remembered
        return is_worth_it or self.is_long_ago


class _Saved(msgspec.Struct, frozen=True):
    """What a snapshot holds. Its positions say where `batches` and `groups` are read on."""

    state: CutState
    batch_at: Address | None = None
    "of the newest batch in the state; None when it stands in the transaction of the snapshot, or there is none"


@dataclass(frozen=True)
class RestoredCutter:
    """What a life of the cutter begins with."""

    state: CutState
    groups_from: list[Position]
    "where `groups` is read on: everything before is in the state, or of no concern to it"
    batches_from: Sequence[Position]
    "of `batches`; the newest batch in the state does not stand before"


def restore_state(log: Log, hop: CutGroups, run: Run) -> RestoredCutter:
    """The cutter's state as the newest snapshot and the batches after it tell it. Raises LogBroken when they disagree."""
    run = msgspec.structs.replace(run, program=PROGRAM)
    taken = newest_snapshot(log, run, STATE_VERSION)
    saved = _Saved(CutState()) if taken is None else msgspec.msgpack.decode(taken.state, type=_Saved)
    start = run.start if taken is None else taken.positions
    batches = list(placed_batches(log, run, start))
    _require_newest(log, run, saved, [batch for _, batch in batches])
    newest_at = batches[-1][0] if batches else saved.batch_at
    index_next = saved.state.index_next
    state = fold_batches(hop, (batch for _, batch in batches if batch.index >= index_next), saved.state)
    # of every partition: where nobody names one, the group may have committed what only a lost snapshot held
    beginnings = [msgspec.structs.replace(end, offset=0) for end in log.end_positions([hop.reads])]
    return RestoredCutter(
        state=state,
        groups_from=_furthest([hop.reads], beginnings, run.start, start, hop.positions(state)),
        batches_from=start if newest_at is None else [_at(newest_at)],
    )


def _require_newest(log: Log, run: Run, saved: _Saved, batches: Sequence[BatchCut]) -> None:
    """The newest batch that a snapshot knows is on the log, or the snapshot is of another one."""
    index = saved.state.index_next - 1
    if saved.batch_at is not None:
        batches = _batch_at(log, run, saved.batch_at)
    if index >= 0 and not any(batch.index == index for batch in batches):
        raise LogBroken(
            f"the snapshot of the cutter was taken with batch {index}, which is not on the log: "
            "topic batches was cut off or replaced; restore it, or start another run"
        )


def _batch_at(log: Log, run: Run, address: Address) -> list[BatchCut]:
    try:
        (event,) = log.read_at([address])
    except LookupError:
        return []
    return [event] if isinstance(event, BatchCut) and event.meta.run_id == run.run_id else []


def _furthest(topics: Sequence[str], *reached: Iterable[Position]) -> list[Position]:
    """For every partition of these topics the greatest of the positions."""
    by_place: dict[tuple[str, int], Position] = {}
    for position in (position for positions in reached for position in positions if position.topic in topics):
        known = by_place.setdefault((position.topic, position.partition), position)
        if known.offset < position.offset:
            by_place[position.topic, position.partition] = position
    return list(by_place.values())


def _at(address: Address) -> Position:
    return Position(topic=address.topic, partition=address.partition, offset=address.offset)


def fold_batches(hop: CutGroups, batches: Iterable[BatchCut], state: CutState | None = None) -> CutState:
    """The state after these batches. Raises LogBroken when one is missing."""
    state = state or CutState()
    for batch in batches:
        if batch.index != state.index_next:
            raise LogBroken(f"batch {batch.index} follows on the log where batch {state.index_next} is due")
        state = hop.apply_batch(state, batch)
    return state


def batches_of(log: Log, run: Run, start: Sequence[Position]) -> Iterator[BatchCut]:
    """The batches of the run that are on the log now, from these positions on."""
    return (batch for _, batch in placed_batches(log, run, start))


def placed_batches(log: Log, run: Run, start: Sequence[Position]) -> Iterator[tuple[Address, BatchCut]]:
    """The same with their addresses."""
    reader = log.reader(["batches"], start=start, run_id=run.run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(100, 1.0):
                if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == run.run_id:
                    yield delivery.address, delivery.event
    finally:
        reader.close()
