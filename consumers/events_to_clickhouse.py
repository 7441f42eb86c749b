"""The traces program: writes every topic of every run to ClickHouse and serves the web page, SQL and reports from it.

    TraceWriter   deliveries → rows → one insert → commit, bounded by rows, bytes and time
    LagWatch      asks the log every few seconds how far each stage is behind
    web           (consumers.dashboard.web) the page and the HTTP interface, in a thread of this process

It belongs to the field, not to a run. Only this process opens the store. The store itself says which offsets it has:
they are skipped, so a crash between insert and commit, or a failed commit, inserts nothing twice (P9). A store that was
removed is filled again from the beginning of the log, whatever the group has committed.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.deliveries import delivery_row
from replayground.consumers.clickhouse.rows import Row
from replayground.consumers.clickhouse.store import Place, Store, require_store
from replayground.consumers.config import TracesSettings
from replayground.consumers.lag_watch import LagWatch
from replayground.consumers.operations_log import OperationsWriter
from replayground.schemas.errors import BadInput, LogBroken, LogUnavailable
from replayground.schemas.events import EventRejected, Position
from replayground.schemas.ids import now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.programs import ACCESS_BY_PROGRAM
from replayground.schemas.run import Run
from replayground.schemas.topics import FOREVER, NOBODY, TOPIC_BY_NAME, TOPICS
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Delivery, Log, Reader
from replayground.streams.log.runs import run_facts
from replayground.streams.rules.dead_letter import rejection
from replayground.streams.rules.runs import fold, may_read

_STAGE = "traces"
_MANY_EVENTS = 200
_REST_SECONDS = 0.1
_POLL_EVENTS_MAX = 250
"""Deliveries decoded by one poll. The bytes of a batch are known only afterwards, and a spilled event is far larger
than its message: this bounds by how much a batch can exceed batch_bytes_max."""
_NAMES = [topic.name for topic in TOPICS]
_KEPT = [topic.name for topic in TOPICS if not topic.compacted and topic.retention_milliseconds == FOREVER]
"topics from which no message is ever removed"

_log = structlog.get_logger(__name__)


def run(run: Run, settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Writes traces and serves the page; returns when `stop` is set. Raises BadInput, StoreFailed, LogUnavailable."""
    if settings.follow:
        _follow(run, settings, program_metrics, stop)
    else:
        _serve(settings, program_metrics, stop)


def _follow(run: Run, settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    # Imported here because it takes seconds: wrong settings are reported before that.
    from replayground.consumers.dashboard.web import LogSource, WebServer

    log = open_log(run)
    store = Store(settings.dsn, settings.database, settings.threads)
    lag = LagWatch(log, program_metrics)
    writer = TraceWriter(log, store, run, settings, program_metrics)
    operations = open_log(run)
    web = WebServer(store, settings, LogSource(log, lag, writer, OperationsWriter(operations)))
    try:
        lag.start()
        web.start()
        program_metrics.detail = f"page on http://127.0.0.1:{settings.port}"
        writer.write_until(stop)
    finally:
        # The threads first: they use the store and the log.
        web.stop()
        lag.stop()
        store.close()
        operations.close()
        log.close()


def _serve(settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Serves the store as it is, without a log, until `stop` is set."""
    from replayground.consumers.dashboard.web import WebServer

    require_store(settings.dsn)
    store = Store(settings.dsn, settings.database, settings.threads)
    web = WebServer(store, settings, None)
    try:
        web.start()
        program_metrics.detail = f"page on http://127.0.0.1:{settings.port}, not following the log"
        stop.wait()
    finally:
        web.stop()
        store.close()


class TraceWriter:
    """Copies the log into the store. `write_until` belongs to one thread; `await_caught_up` is called from other
    threads, by one caller at a time."""

    def __init__(
        self, log: Log, store: Store, run: Run, settings: TracesSettings, program_metrics: ProgramMetrics
    ) -> None:
        self._log = log
        self._store = store
        self._run_id = run.run_id
        self._group = ACCESS_BY_PROGRAM[_STAGE].group_of(run.run_id)
        self._settings = settings
        self._program_metrics = program_metrics
        self._following: dict[Place, int] = store.next_offsets()
        self._asked = threading.Event()
        self._answered = threading.Event()

    def write_until(self, stop: threading.Event) -> None:
        """Reads and inserts until `stop` is set; inserts what was read before it returns. Raises StoreFailed,
        LogUnavailable, and BadInput when the store was filled from another log."""
        # Both before the group is joined: from then on messages of the wrong log, or from behind a gap, would arrive.
        self._require_same_log()
        self._go_back_to_store()
        reader = self._log.reader(_NAMES, group=self._group)
        try:
            while not stop.is_set():
                rows, events = self._gather(reader, stop)
                # Before the insert: what arrives during it is not in the store when `complete` is reported.
                complete = self._asked.is_set() and reader.caught_up()
                # Insert, then commit: a crash in between delivers the same messages again, and they are skipped. The
                # other order could leave messages that are committed and not in the store.
                with self._program_metrics.busy():
                    self._insert(rows, events)
                if events:
                    _commit(reader)
                if complete:
                    self._answered.set()
        finally:
            reader.close()

    def insert(self, deliveries: Sequence[Delivery]) -> None:
        """Inserts what the store does not have yet."""
        self._insert(self._rows(deliveries), len(deliveries))

    def _rows(self, deliveries: Sequence[Delivery]) -> list[Row]:
        """Rows of the deliveries that were not taken before. Writes rejects. Raises LogUnavailable."""
        new: list[Delivery] = []
        for delivery in deliveries:
            if self._is_new(delivery):
                new.append(delivery)
                # Taken from here on, not from the insert on: a reader whose session expired gets again what it had
                # polled, including rows that still wait to be inserted.
                self._following[delivery.address.topic, delivery.address.partition] = delivery.address.offset + 1
        # Before the insert: offsets that the store has are skipped after a restart, and the rejects would be missing.
        self._reject(new)
        return [delivery_row(delivery) for delivery in new]

    def _insert(self, rows: list[Row], events: int) -> None:
        self._store.insert(rows)
        self._program_metrics.count("events_read", events)

    def _reject(self, deliveries: Sequence[Delivery]) -> None:
        """Writes a dead letter for every undecodable message that no other stage rejects; blocks until they are
        stored."""
        unreadable = [(bad, bad.undecodable) for bad in deliveries if bad.undecodable is not None]
        rejects = [
            rejection(self._run_id, _STAGE, bad, reason, now_microseconds())
            for bad, reason in unreadable
            if _stage_of(bad) == _STAGE
        ]
        rejects += self._reject_for_absent_runs(
            [(bad, reason) for bad, reason in unreadable if _stage_of(bad) != _STAGE]
        )
        if rejects:
            for reject in rejects:
                self._log.append(reject)
            self._log.flush()
            self._program_metrics.count("rejected", len(rejects))

    def _reject_for_absent_runs(self, unreadable: Sequence[tuple[Delivery, str]]) -> list[EventRejected]:
        """The rejects that stages of other runs would write, for runs that do not write them. A message whose first
        bytes name a run is left to that run by all others (decision 0023). If the run has ended, started after the
        message or never existed, none of its programs will read it."""
        claimed = [(bad, reason, self._log.codec.run_of(bad.value)) for bad, reason in unreadable]
        if all(run_id is None for _, _, run_id in claimed):
            return []
        # Read now, not kept in memory: a message may arrive before the facts about its run, which are on another topic.
        states = fold(run_facts(self._log))
        rejects: list[EventRejected] = []
        for bad, reason, run_id in claimed:
            state = None if run_id is None else states.get(run_id)
            # NOBODY: a dead letter that cannot be decoded must not cause another dead letter.
            if run_id is None or _stage_of(bad) == NOBODY or (state is not None and may_read(state, bad.address)):
                continue
            # An id that the log does not know is no run: the reject belongs to the field.
            of_run = self._run_id if state is None else state.run_id
            rejects.append(rejection(of_run, _stage_of(bad), bad, reason, now_microseconds(), sender=_STAGE))
        return rejects

    def await_caught_up(self, timeout_seconds: float) -> bool:
        """Blocks until everything that is on the log now is in the store; returns False after the timeout."""
        # Cleared first: an answer to an earlier call must not count for this one.
        self._answered.clear()
        self._asked.set()
        try:
            return self._answered.wait(timeout_seconds)
        finally:
            self._asked.clear()

    def _gather(self, reader: Reader, stop: threading.Event) -> tuple[list[Row], int]:
        """Rows of what arrives within the flush time, at most one batch, and the number of deliveries they came
        from."""
        rows: list[Row] = []
        events = bytes_gathered = 0
        half_seconds = self._settings.flush_seconds / 2
        flush_at = time.monotonic() + 2 * half_seconds
        while not stop.is_set() and bytes_gathered < self._settings.batch_bytes_max:
            patience_seconds = flush_at - time.monotonic()
            room = min(_POLL_EVENTS_MAX, self._settings.batch_rows_max - events)
            if patience_seconds <= 0 or room <= 0:
                break
            deliveries = reader.poll(room, patience_seconds)
            new = self._rows(deliveries)
            rows += new
            events += len(deliveries)
            bytes_gathered += sum(len(row["body"]) for row in new)
            if len(deliveries) < room:
                # An insert costs about the same for one row and for some hundreds: so many wait for half the time.
                if events >= _MANY_EVENTS:
                    flush_at, half_seconds = flush_at - half_seconds, 0.0
                # Messages arrive one by one: polled ten times a second instead, they cost a tenth of the CPU time.
                stop.wait(max(0.0, min(_REST_SECONDS, flush_at - time.monotonic())))
        return rows, events

    def _is_new(self, delivery: Delivery) -> bool:
        address = delivery.address
        return address.offset >= self._following.get((address.topic, address.partition), 0)

    def _require_same_log(self) -> None:
        """Raises BadInput when the store was filled from another log. Offsets alone say what the store has: on a new
        log they would hide its first events."""
        # Only topics that keep everything: on others the last event of the store may be gone from the log.
        last = {
            (topic, partition): (offset, event_id)
            for topic, partition, offset, event_id in self._store.ask(queries.LAST_EVENTS).rows
            if topic in _KEPT
        }
        differing = self._first_difference(last)
        if differing is not None:
            raise BadInput(
                f"the trace store {self._settings.dsn} was filled from another log ({differing}): set [traces] dsn to "
                "another folder, or remove that one to have it filled again"
            )

    def _first_difference(self, last: dict[Place, tuple[int, str]]) -> str | None:
        """Describes a partition where the log does not have the last event of the store; None when there is no such
        partition."""
        if not last:
            return None
        # One reader for all partitions: one by one took a quarter of a second each. Partitions without rows are read
        # from their end on, so that nothing of them has to be read.
        ends = [end for end in self._log.end_positions(_KEPT) if (end.topic, end.partition) not in last]
        starts = [Position(topic=t, partition=p, offset=offset) for (t, p), (offset, _) in last.items()]
        try:
            reader = self._log.reader(_KEPT, start=[*starts, *ends])
        # A position beyond the end of its partition.
        except LogBroken as error:
            return str(error)
        try:
            while last and not reader.caught_up():
                for delivery in reader.poll(_POLL_EVENTS_MAX, _REST_SECONDS):
                    address = delivery.address
                    # Only the first message of a partition is compared: it must be the last event of the store.
                    wanted = last.pop((address.topic, address.partition), None)
                    found = (address.offset, delivery.event.meta.id if delivery.event is not None else None)
                    if wanted is not None and found != wanted:
                        return f"{address.topic}/{address.partition} at {wanted[0]} differs"
        finally:
            reader.close()
        return f"{len(last)} partitions end before the last event of the store" if last else None

    def _go_back_to_store(self) -> None:
        """Moves the group back when it is ahead of the store, because rows were lost or the store was removed: what
        lies between the two would never be read. Raises LogUnavailable."""
        in_store: Counter[str] = Counter()
        for (topic, _), following in self._following.items():
            in_store[topic] += following
        group_lags = self._log.group_lags(self._group, _KEPT)
        if all(group_lags[topic].committed <= in_store[topic] for topic in _KEPT):
            return
        _log.warning("store_behind_group", group=self._group)
        # alone: has every partition without joining the group, so that every position can be committed at once.
        reader = self._log.reader(_NAMES, group=self._group, alone=True)
        try:
            places = [(end.topic, end.partition) for end in self._log.end_positions(_NAMES)]
            reader.commit([Position(topic=t, partition=p, offset=self._following.get((t, p), 0)) for t, p in places])
        finally:
            reader.close()


def _stage_of(delivery: Delivery) -> str:
    return TOPIC_BY_NAME[delivery.address.topic].rejected_by


def _commit(reader: Reader) -> None:
    """Commits what was polled. A failure is logged and not raised."""
    # It only causes a second delivery, which is skipped because the store has these offsets.
    try:
        reader.commit()
    except LogUnavailable as error:
        _log.warning("commit_failed", reason=str(error))
