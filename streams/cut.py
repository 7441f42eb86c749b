"""The cutter: groups in, batches out, each batch and the positions it consumed in one transaction (P4).

    groups ─► CutGroups (pure) ─► BatchCut + positions, now and then a SnapshotTaken ─► one Kafka transaction

All state is on the log: a restart reads the newest snapshot and the `batches` after it, or, without a snapshot, those of
the whole run. A second cutter fences the first.
"""

import threading
from collections.abc import Iterable, Sequence

import msgspec
import structlog

from schemas.errors import Fenced, LogBroken, LogUnavailable
from schemas.events import BatchCut, Event, Position, SnapshotTaken
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
        self._state = restore_state(log, hop, run)
        self._since_snapshot: _Unsaved | None = None

    def run_until(self, stop: threading.Event) -> None:
        # alone: reads all partitions, even while a fenced cutter is still a member of the group
        group = f"cut-{self._run.run_id}"
        reader = self._log.reader([self._hop.reads], group=group, alone=True, start=self._run.start)
        self._program_metrics.detail = "cuts batches"
        try:
            while not stop.is_set():
                # One at a time: the transaction commits the reader's positions, which must not pass the batch's last group.
                for delivery in reader.poll(1, self._settings.poll_seconds):
                    self._take(delivery, reader)
        finally:
            reader.close()
            self._transactor.close()

    def _take(self, delivery: Delivery, reader: Reader) -> None:
        self._program_metrics.count("events_read")
        self._limit.count(delivery.undecodable is not None)
        if delivery.event is None:
            self._reject(delivery, delivery.undecodable or "")
            return
        if self._hop.key(delivery.event) is None:
            return
        outcome = self._hop.step(self._state, delivery.event, delivery.address)
        if outcome.refused is not None:
            self._reject(delivery, outcome.refused)
            return
        self._state = outcome.state
        if outcome.events:
            # an uncommitted batch counts as lag, so that a log that accepts nothing shows as a stall
            self._program_metrics.gauge("lag", len(outcome.events))
            with self._program_metrics.busy():
                self._commit(outcome.events, reader)
            self._program_metrics.gauge("lag", 0)
            logger.info("batch_cut", index=self._state.index_next - 1)

    def _commit(self, batches: Sequence[Event], reader: Reader) -> None:
        assert len(batches) == 1, "a delivery completes at most one batch"
        events = list(batches)
        if self._is_snapshot_due(batches):
            events.append(self._snapshot())
            self._since_snapshot = _Unsaved()
        self._log.flush()  # rejects first: the commit passes their messages, which are then never read again
        self._transactor.commit(events, reader)
        self._program_metrics.count("events_written", len(events))

    def _is_snapshot_due(self, batches: Sequence[Event]) -> bool:
        if (
            self._since_snapshot is None
        ):  # with the first batch after a restart, or frequent restarts would read ever more
            return True
        for batch in batches:
            self._since_snapshot.count(batch)
        return self._since_snapshot.is_due(self._settings.snapshot_batches, len(self._state.seen))

    def _snapshot(self) -> SnapshotTaken:
        """Of the state that the batch of the same transaction leads to. All earlier batches stand before the end of the
        topic; this one will stand after it and is read again by a restart, which knows it by its index."""
        positions = self._log.end_positions(["batches"])
        state = msgspec.msgpack.encode(self._state)
        return snapshot(self._run, STATE_VERSION, positions, state, now_microseconds())

    def _reject(self, delivery: Delivery, reason: str) -> None:
        self._log.append(rejection(self._run.run_id, "cut", delivery, reason, now_microseconds()))
        self._program_metrics.count("rejected")


class _Unsaved:
    """What was cut since the last snapshot."""

    def __init__(self) -> None:
        self._batches = 0
        self._groups = 0

    def count(self, event: Event) -> None:
        if isinstance(event, BatchCut):
            self._batches += 1
            self._groups += len(event.groups) + len(event.groups_stale) + len(event.groups_passed)

    def is_due(self, batches_min: int, groups_remembered: int) -> bool:
        """Also when the state is large: all snapshots together are a few times as large as what they save reading."""
        return self._batches >= batches_min and 4 * self._groups >= groups_remembered


def restore_state(log: Log, hop: CutGroups, run: Run) -> CutState:
    """The cutter's state as the newest snapshot and the batches after it tell it. Raises LogBroken when they disagree."""
    run = msgspec.structs.replace(run, program=PROGRAM)
    taken = newest_snapshot(log, run, STATE_VERSION)
    if taken is None:
        return fold_batches(hop, batches_of(log, run, run.start))
    state = msgspec.msgpack.decode(taken.state, type=CutState)
    batches = list(batches_of(log, run, taken.positions))
    if not any(batch.index == state.index_next - 1 for batch in batches):
        raise LogBroken(
            f"the snapshot of the cutter was taken with batch {state.index_next - 1}, which is not on the log: "
            "topic batches was cut off or replaced; restore it, or start another run"
        )
    return fold_batches(hop, (batch for batch in batches if batch.index >= state.index_next), state)


def fold_batches(hop: CutGroups, batches: Iterable[BatchCut], state: CutState | None = None) -> CutState:
    """The state after these batches. Raises LogBroken when one is missing."""
    state = state or CutState()
    for batch in batches:
        if batch.index != state.index_next:
            raise LogBroken(f"batch {batch.index} follows on the log where batch {state.index_next} is due")
        state = hop.apply_batch(state, batch)
    return state


def batches_of(log: Log, run: Run, start: Sequence[Position]) -> Iterable[BatchCut]:
    """The batches of the run that are on the log now, from these positions on."""
    reader = log.reader(["batches"], start=start)
    try:
        while not reader.caught_up():
            for delivery in reader.poll(100, 1.0):
                if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == run.run_id:
                    yield delivery.event
    finally:
        reader.close()
