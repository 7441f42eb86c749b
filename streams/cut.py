"""The cutter: turns groups into batches. Each batch and the positions it consumed are one transaction (P4).

    groups ─► CutGroups (pure) ─► BatchCut + positions, now and then a SnapshotTaken ─► one Kafka transaction

The cutter keeps no state outside the log. A restart takes the newest snapshot, reads the `batches` after it, and goes
on with the groups after both; without a snapshot, it reads the batches of the whole run. While no batch can be cut, a
snapshot and the positions are written without one, which bounds how many groups a restart reads. A second cutter
fences the first.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from replayground.schemas.errors import Fenced, LogBroken, LogUnavailable
from replayground.schemas.events import Address, BatchCut, Event, Position, SnapshotTaken
from replayground.schemas.ids import now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from replayground.streams.config import CutSettings
from replayground.streams.hops.groups_to_batches import STATE_VERSION, CutGroups, CutState
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Delivery, Log, Reader, Transactor
from replayground.streams.log.snapshots import newest_snapshot, snapshot
from replayground.streams.log.takeover import fencing_error
from replayground.streams.rules.dead_letter import RejectLimit, rejection

logger = structlog.get_logger()

PROGRAM = "cut"
_RETRY_SECONDS = 1.0
# Dict keys are sorted: equal states give equal bytes.
_encode = msgspec.msgpack.Encoder(order="deterministic").encode


def run(run: Run, settings: CutSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Runs the cutter until `stop` is set. Raises Fenced when another cutter owns the transactional id, TakenOver when
    a newer start owns the run, LogBroken, TooManyRejects."""
    log = open_log(run)
    try:
        cut(run, settings, program_metrics, stop, log)
    except Fenced as error:
        # Decides whether the supervisor may restart this program.
        raise fencing_error(log, run, error) from error
    finally:
        log.close()


def cut(run: Run, settings: CutSettings, program_metrics: ProgramMetrics, stop: threading.Event, log: KafkaLog) -> None:
    """The program with an open log. After LogUnavailable it starts again from the state on the log."""
    hop = cut_hop_of(run)
    while not stop.is_set():
        try:
            Cutter(log, hop, run, settings, program_metrics).run_until(stop)
        except LogUnavailable as error:
            # The transaction was aborted or its outcome is unknown. Only the log knows which batches exist: a new
            # Cutter reads state and positions back.
            logger.warning("cutter_restarting", reason=str(error))
            program_metrics.detail = f"waiting for the log: {error}"
            # Rejects that were not acknowledged are lost with the producer; their groups are read again.
            log.forget_failure()
            stop.wait(_RETRY_SECONDS)


def cut_hop_of(run: Run) -> CutGroups:
    """The hop that cuts the batches of this run."""
    job = run.job
    return CutGroups(
        run.run_id, job.groups_per_batch, job.staleness_max, job.first_version, batches_max=job.steps or None
    )


class Cutter:
    """The cutter, from restored state to the first failure. After a failure, make a new one."""

    def __init__(
        self, log: Log, hop: CutGroups, run: Run, settings: CutSettings, program_metrics: ProgramMetrics
    ) -> None:
        self._log = log
        self._hop = hop
        self._run = msgspec.structs.replace(run, program=PROGRAM)
        self._settings = settings
        self._program_metrics = program_metrics
        self._limit = RejectLimit("cut", settings.rejects_share_max)
        # The transactional id before the state: from here on no older cutter can append a batch that this state lacks.
        self._transactor: Transactor = log.transactor(f"cut-{run.run_id}")
        before = restore_state(log, hop, run)
        self._state = before.state
        self._start = before.groups_from
        self._batches_from = before.batches_from
        self._since_snapshot = _Unsaved(settings, is_first=True)

    def run_until(self, stop: threading.Event) -> None:
        """Blocks until `stop` is set. Raises Fenced, LogBroken, LogUnavailable, TooManyRejects."""
        # Alone: it reads all partitions at once. As a member of a group it would share them with a fenced cutter, which
        # learns that it is fenced only when it commits (decision 0013).
        group = f"cut-{self._run.run_id}"
        reader = self._log.reader(
            [self._hop.reads], group=group, alone=True, start=self._run.start, run_id=self._run.run_id
        )
        self._program_metrics.detail = "cuts batches"
        try:
            # The state decides, not the committed positions: those may belong to a snapshot that is lost.
            reader.seek(_furthest([self._hop.reads], self._start, self._hop.positions(self._state)))
            while not stop.is_set():
                # One at a time: the transaction commits the reader's positions, which must not pass the last group of
                # the batch.
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
            # A batch that waits for its transaction counts as lag, so that the harness sees a stalled log.
            self._program_metrics.gauge("lag", max(1, len(batches)))
            with self._program_metrics.busy():
                self._commit(batches, reader)
            self._program_metrics.gauge("lag", 0)
        if batches:
            logger.info("batch_cut", index=self._state.index_next - 1)

    def _batches_after(self, delivery: Delivery) -> Sequence[Event]:
        """Folds a message into the state; returns the batch that it completes, if any. Raises TooManyRejects."""
        # The cutter of that run handles it, and counts it.
        if delivery.other_run is not None:
            return ()
        # Before the reject is written: this may stop the program, and the message is then read again.
        self._limit.count(delivery.undecodable is not None)
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
        """Writes batches, a snapshot if one is due, and the reader's positions in one transaction."""
        events = list(batches)
        self._since_snapshot.count(batches)
        if self._since_snapshot.is_due(groups_remembered=len(self._state.seen)):
            events.append(self._snapshot(reader, is_with_batch=bool(batches)))
            self._since_snapshot = _Unsaved(self._settings)
        # Rejects are outside the transaction. They must be durable before it: what it commits is not read again.
        self._log.flush()
        self._transactor.commit(events, reader)
        self._program_metrics.count("events_written", len(events))

    def _snapshot(self, reader: Reader, *, is_with_batch: bool) -> SnapshotTaken:
        """A snapshot of the state after this transaction."""
        # All earlier batches are before the end of the topic. A batch of this transaction comes after it: a restart
        # reads it again and skips it by its index.
        ends = self._log.end_positions(["batches"])
        saved = _Saved(self._state, None if is_with_batch else self._newest_batch())
        if is_with_batch:
            self._batches_from = ends
        # A partition that has delivered nothing since the restart is only in _start.
        groups = _furthest([self._hop.reads], self._start, reader.positions())
        return snapshot(self._run, STATE_VERSION, [*ends, *groups], _encode(saved), now_microseconds())

    def _newest_batch(self) -> Address | None:
        """The address of the newest batch of the run; None before the first. Raises LogBroken when it is gone."""
        index = self._state.index_next - 1
        if index < 0:
            return None
        for address, batch in placed_batches(self._log, self._run, self._batches_from):
            if batch.index == index:
                # The next search starts here.
                self._batches_from = [_at(address)]
                return address
        raise LogBroken(f"batch {index} was written and is not on the log: topic batches was truncated or replaced")

    def _reject(self, delivery: Delivery, reason: str) -> None:
        self._log.append(rejection(self._run.run_id, "cut", delivery, reason, now_microseconds()))
        self._program_metrics.count("rejected")


class _Unsaved:
    """Counts what was read and cut since the last snapshot."""

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
        """Whether the next transaction should contain a snapshot."""
        # With the first batch after a restart: a cutter that restarts often would otherwise never write one, and each
        # restart would read more.
        if self._is_first and self._batches:
            return True
        # A state that is large compared with the groups since then waits longer: snapshots stay a small multiple of the
        # batches that they save reading.
        is_worth_it = self._batches >= self._settings.snapshot_batches and 4 * self._groups >= groups_remembered
        return is_worth_it or self.is_long_ago


class _Saved(msgspec.Struct, frozen=True):
    """The content of a snapshot. Its positions say from where `batches` and `groups` are read on."""

    state: CutState
    batch_at: Address | None = None
    "of the newest batch in the state; None when it is in the transaction of the snapshot, or there is none"


@dataclass(frozen=True)
class RestoredCutter:
    """The state that a cutter starts with."""

    state: CutState
    groups_from: list[Position]
    "where `groups` is read on: everything before is in the state or does not concern this run"
    batches_from: Sequence[Position]
    "of `batches`: the newest batch in the state is not before these positions"


def restore_state(log: Log, hop: CutGroups, run: Run) -> RestoredCutter:
    """The cutter's state from the newest snapshot and the batches after it. Raises LogBroken when they disagree."""
    run = msgspec.structs.replace(run, program=PROGRAM)
    taken = newest_snapshot(log, run, STATE_VERSION)
    saved = _Saved(CutState()) if taken is None else msgspec.msgpack.decode(taken.state, type=_Saved)
    start = run.start if taken is None else taken.positions
    batches = list(placed_batches(log, run, start))
    _require_newest(log, run, saved, [batch for _, batch in batches])
    newest_at = batches[-1][0] if batches else saved.batch_at
    index_next = saved.state.index_next
    # The batch of the snapshot's own transaction is after its positions and already in its state.
    state = fold_batches(hop, (batch for _, batch in batches if batch.index >= index_next), saved.state)
    # Every partition gets a position: a partition without one would continue where the group committed, which may be
    # after groups that only a lost snapshot held.
    beginnings = [msgspec.structs.replace(end, offset=0) for end in log.end_positions([hop.reads])]
    return RestoredCutter(
        state=state,
        groups_from=_furthest([hop.reads], beginnings, run.start, start, hop.positions(state)),
        batches_from=start if newest_at is None else [_at(newest_at)],
    )


def _require_newest(log: Log, run: Run, saved: _Saved, batches: Sequence[BatchCut]) -> None:
    """Raises LogBroken unless the newest batch that a snapshot knows is on the log: else it is the snapshot of another
    log."""
    index = saved.state.index_next - 1
    if saved.batch_at is not None:
        batches = _batch_at(log, run, saved.batch_at)
    if index >= 0 and not any(batch.index == index for batch in batches):
        raise LogBroken(
            f"the snapshot of the cutter was taken with batch {index}, which is not on the log: "
            "topic batches was truncated or replaced; restore it, or start another run"
        )


def _batch_at(log: Log, run: Run, address: Address) -> list[BatchCut]:
    try:
        (event,) = log.read_at([address])
    except LookupError:
        return []
    return [event] if isinstance(event, BatchCut) and event.meta.run_id == run.run_id else []


def _furthest(topics: Sequence[str], *reached: Iterable[Position]) -> list[Position]:
    """The highest of the given positions for each partition of these topics."""
    by_place: dict[tuple[str, int], Position] = {}
    for position in (position for positions in reached for position in positions if position.topic in topics):
        known = by_place.setdefault((position.topic, position.partition), position)
        if known.offset < position.offset:
            by_place[position.topic, position.partition] = position
    return list(by_place.values())


def _at(address: Address) -> Position:
    return Position(topic=address.topic, partition=address.partition, offset=address.offset)


def fold_batches(hop: CutGroups, batches: Iterable[BatchCut], state: CutState | None = None) -> CutState:
    """The state after these batches. Changes the given state. Raises LogBroken when a batch is missing."""
    state = state or CutState()
    for batch in batches:
        if batch.index != state.index_next:
            raise LogBroken(f"unexpected batch order: found batch {batch.index}, expected batch {state.index_next}")
        state = hop.apply_batch(state, batch)
    return state


def batches_of(log: Log, run: Run, start: Sequence[Position]) -> Iterator[BatchCut]:
    """The batches of the run that are on the log now, from these positions on. Raises LogUnavailable."""
    return (batch for _, batch in placed_batches(log, run, start))


def placed_batches(log: Log, run: Run, start: Sequence[Position]) -> Iterator[tuple[Address, BatchCut]]:
    """The same with their addresses."""
    reader = log.reader(["batches"], start=start, run_id=run.run_id)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(100, 1.0):
                # run_id of the reader skips most messages of other runs, not all of them (Log.reader).
                if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == run.run_id:
                    yield delivery.address, delivery.event
    finally:
        reader.close()
