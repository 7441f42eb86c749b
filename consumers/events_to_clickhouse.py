"""The traces program: every topic of every run into ClickHouse, and the web page, SQL and reports over it.

    TraceWriter   deliveries → rows → one insert → commit, bounded by rows, by bytes and by time
    LagWatch      asks the log every few seconds how far each stage is behind
    web           (consumers.dashboard.web) the page and the interface, in a thread of this process

It belongs to the field, not to a run. Only this process opens the store. The store itself says how far it has come: what it
has already is passed over, so a crash between insert and commit, or a commit that failed, adds nothing twice (P9); and a
store that was removed is filled again from the beginning of the log, wherever the group stands.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import structlog

from consumers.clickhouse import queries
from consumers.clickhouse.deliveries import delivery_row
from consumers.clickhouse.rows import Row
from consumers.clickhouse.store import Place, Store, require_store
from consumers.config import TracesSettings
from consumers.lag_watch import LagWatch
from schemas.errors import BadInput, LogBroken, LogUnavailable
from schemas.events import EventRejected, Position
from schemas.ids import now_microseconds
from schemas.metrics import ProgramMetrics
from schemas.programs import ACCESS_BY_PROGRAM
from schemas.run import Run
from schemas.topics import FOREVER, NOBODY, TOPIC_BY_NAME, TOPICS
from streams.log.connect import open_log
from streams.log.protocol import Delivery, Log, Reader
from streams.log.runs import run_facts
from streams.rules.dead_letter import rejection
from streams.rules.runs import fold, may_read

_STAGE = "traces"
_REST_SECONDS = 0.1
_POLL_EVENTS_MAX = 250
"decoded at once: as rows their size is counted, while events that were spilled to blobs are far larger than their messages"
_NAMES = [topic.name for topic in TOPICS]
_KEPT = [topic.name for topic in TOPICS if not topic.compacted and topic.retention_milliseconds == FOREVER]
"topics of which no message is ever removed"

_log = structlog.get_logger(__name__)


def run(run: Run, settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Writes traces and serves the page until stopped. Raises BadInput, StoreFailed, LogUnavailable."""
    if settings.follow:
        _follow(run, settings, program_metrics, stop)
    else:
        _serve(settings, program_metrics, stop)


def _follow(run: Run, settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    from consumers.dashboard.web import LogSource, WebServer  # once the settings are known to be good: it takes seconds

    log = open_log(run)
    store = Store(settings.dsn, settings.database, settings.threads)
    lag = LagWatch(log, program_metrics)
    writer = TraceWriter(log, store, run, settings, program_metrics)
    web = WebServer(store, settings, LogSource(log, lag, writer))
    try:
        lag.start()
        web.start()
        program_metrics.detail = f"page on http://127.0.0.1:{settings.port}"
        writer.write_until(stop)
    finally:
        web.stop()
        lag.stop()
        store.close()
        log.close()


def _serve(settings: TracesSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """The store as it is, without the log."""
    from consumers.dashboard.web import WebServer

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
    """Brings the log into the store. `write_until` belongs to one thread; `await_caught_up` may be called by any."""

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
        """Reads and inserts until stopped; what was read is inserted before it returns. Raises StoreFailed,
        LogUnavailable, and BadInput when the store was filled from another log."""
        self._require_same_log()
        self._go_back_to_store()
        reader = self._log.reader(_NAMES, group=self._group)
        try:
            while not stop.is_set():
                rows, events = self._gather(reader, stop)
                # before the insert: what arrives during it is not in the store when we say that all is
                complete = self._asked.is_set() and reader.caught_up()
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
        """The rows of what was not taken yet. Counted as taken from here on, not from the insert: a reader that slept past its
        session is given again what it was given before, also what waits to be inserted."""
        new: list[Delivery] = []
        for delivery in deliveries:
            if self._is_new(delivery):
                new.append(delivery)
                self._following[delivery.address.topic, delivery.address.partition] = delivery.address.offset + 1
        self._reject(new)  # before the insert: what the store has is never looked at again
        return [delivery_row(delivery) for delivery in new]

    def _insert(self, rows: list[Row], events: int) -> None:
        self._store.insert(rows)
        self._program_metrics.count("events_read", events)

    def _reject(self, deliveries: Sequence[Delivery]) -> None:
        """What cannot be read and has no stage that refuses it becomes a dead letter here."""
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
        """What names a run by its first bytes is left to that run by all others (decision 0023). If the run has ended, began
        later or never was, none of its programs comes by: the reject that its stage would write is written here."""
        claimed = [(bad, reason, self._log.codec.run_of(bad.value)) for bad, reason in unreadable]
        if all(run_id is None for _, _, run_id in claimed):
            return []
        # read now, not remembered: a message may arrive before the facts about its run, which are on another topic
        states = fold(run_facts(self._log))
        rejects: list[EventRejected] = []
        for bad, reason, run_id in claimed:
            state = None if run_id is None else states.get(run_id)
            if run_id is None or _stage_of(bad) == NOBODY or (state is not None and may_read(state, bad.address)):
                continue
            # an id that no run has is no address for a reject: then it is the field's
            of_run = self._run_id if state is None else state.run_id
            rejects.append(rejection(of_run, _stage_of(bad), bad, reason, now_microseconds(), sender=_STAGE))
        return rejects

    def await_caught_up(self, timeout_seconds: float) -> bool:
        """Waits until everything that is on the log at this moment is in the store; False when that takes too long."""
        self._answered.clear()
        self._asked.set()
        try:
            return self._answered.wait(timeout_seconds)
        finally:
            self._asked.clear()

    def _gather(self, reader: Reader, stop: threading.Event) -> tuple[list[Row], int]:
        """The rows of what arrives within the flush time, at most one batch, and how many events that was."""
        rows: list[Row] = []
        events = bytes_gathered = 0
        flush_at = time.monotonic() + self._settings.flush_seconds
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
                # messages come one by one: taken ten times a second instead, they cost a tenth of the processor time
                stop.wait(min(_REST_SECONDS, patience_seconds))
        return rows, events

    def _is_new(self, delivery: Delivery) -> bool:
        address = delivery.address
        return address.offset >= self._following.get((address.topic, address.partition), 0)

    def _require_same_log(self) -> None:
        """Offsets say what the store has already: on a log that was begun anew they would hide its first events."""
        last = {
            (topic, partition): (offset, event_id)
            for topic, partition, offset, event_id in self._store.ask(queries.LAST_EVENTS).rows
            if topic in _KEPT
        }
        differing = self._first_difference(last)
        if differing is not None:
            raise BadInput(
                f"the trace store {self._settings.dsn} was filled from another log ({differing}): set [traces] dsn to another "
                "folder, or remove that one to have it filled again"
            )

    def _first_difference(self, last: dict[Place, tuple[int, str]]) -> str | None:
        """Where the log does not have the last event that the store has of a partition. Of all partitions at once: one by one
        it took a quarter of a second each."""
        if not last:
            return None
        ends = [end for end in self._log.end_positions(_KEPT) if (end.topic, end.partition) not in last]
        starts = [Position(topic=t, partition=p, offset=offset) for (t, p), (offset, _) in last.items()]
        try:
            reader = self._log.reader(_KEPT, start=[*starts, *ends])
        except LogBroken as error:
            return str(error)
        try:
            while last and not reader.caught_up():
                for delivery in reader.poll(_POLL_EVENTS_MAX, _REST_SECONDS):
                    address = delivery.address
                    wanted = last.pop((address.topic, address.partition), None)
                    found = (address.offset, delivery.event.meta.id if delivery.event is not None else None)
                    if wanted is not None and found != wanted:
                        return f"{address.topic}/{address.partition} at {wanted[0]} differs"
        finally:
            reader.close()
        return f"{len(last)} partitions end before the last event of the store" if last else None

    def _go_back_to_store(self) -> None:
        """The group may be ahead of the store, when rows were lost or the store was removed: what is between the two would
        never be read. Raises LogUnavailable."""
        in_store: Counter[str] = Counter()
        for (topic, _), following in self._following.items():
            in_store[topic] += following
        group_lags = self._log.group_lags(self._group, _KEPT)
        if all(group_lags[topic].committed <= in_store[topic] for topic in _KEPT):
            return
        _log.warning("store_behind_group", group=self._group)
        reader = self._log.reader(_NAMES, group=self._group, alone=True)
        try:
            places = [(end.topic, end.partition) for end in self._log.end_positions(_NAMES)]
            reader.commit([Position(topic=t, partition=p, offset=self._following.get((t, p), 0)) for t, p in places])
        finally:
            reader.close()


def _stage_of(delivery: Delivery) -> str:
    return TOPIC_BY_NAME[delivery.address.topic].rejected_by


def _commit(reader: Reader) -> None:
    """A commit that fails costs a second delivery, which the store passes over."""
    try:
        reader.commit()
    except LogUnavailable as error:
        _log.warning("commit_failed", reason=str(error))
