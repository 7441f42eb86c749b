"""The traces program: every topic of the log into ClickHouse, and the web page, SQL and reports over it.

    TraceWriter   deliveries → rows → one insert → commit, bounded by rows, by bytes and by time
    LagWatch      asks the log every few seconds how far each stage is behind
    web           (consumers.dashboard.web) the page and the interface, in a thread of this process

Only this process opens the store. The store itself says how far it has come: what it has already is passed over, so a
crash between insert and commit, or a commit that failed, adds nothing twice (P9).
"""

import threading
import time
from collections.abc import Sequence

import structlog

from consumers.clickhouse import queries
from consumers.clickhouse.deliveries import delivery_row
from consumers.clickhouse.rows import Row
from consumers.clickhouse.store import Place, Store
from consumers.config import TracesSettings
from consumers.lag_watch import LagWatch
from schemas.errors import BadInput, LogUnavailable
from schemas.events import Address
from schemas.ids import now_microseconds
from schemas.metrics import Pulse
from schemas.run import Run
from schemas.topics import TOPIC_BY_NAME, TOPICS
from streams.log.connect import open_log
from streams.log.protocol import Delivery, Log, Reader
from streams.rules.dead_letter import rejected

_STAGE = "traces"
_REST_SECONDS = 0.1
_POLL_EVENTS_MAX = 250
"decoded at once: as rows their size is counted, while events that were spilled to blobs are far larger than their messages"
_FORGETTING = ("control", "weights")
"topics whose old messages may be removed from the log by age or by a tombstone"

_log = structlog.get_logger(__name__)


def run(run: Run, settings: TracesSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Writes traces and serves the page until stopped."""
    from consumers.dashboard.web import WebServer  # after the settings are known to be good: it takes seconds to import

    log = open_log(run)
    store = Store(settings.dsn, settings.database, settings.threads)
    lag = LagWatch(log, run, pulse)
    writer = TraceWriter(log, store, run, settings, pulse)
    web = WebServer(store, log, run, settings, lag, writer)
    try:
        lag.start()
        web.start()
        pulse.detail = f"page on http://127.0.0.1:{settings.port}"
        writer.write_until(stop)
    finally:
        web.stop()
        lag.stop()
        store.close()
        log.close()


class TraceWriter:
    """Brings the log into the store. `write_until` belongs to one thread; `await_caught_up` may be called by any."""

    def __init__(self, log: Log, store: Store, run: Run, settings: TracesSettings, pulse: Pulse) -> None:
        self._log = log
        self._store = store
        self._run_id = run.run_id
        self._group = f"traces-{run.run_id}"
        self._settings = settings
        self._pulse = pulse
        self._following: dict[Place, int] = store.next_offsets()
        self._asked = threading.Event()
        self._answered = threading.Event()

    def write_until(self, stop: threading.Event) -> None:
        """Reads and inserts until stopped; what was read is inserted before it returns. Raises StoreFailed,
        LogUnavailable, and BadInput when the store was filled from another log."""
        self._must_be_of_this_log()
        reader = self._log.reader([topic.name for topic in TOPICS], group=self._group)
        try:
            while not stop.is_set():
                rows, events = self._gathered(reader, stop)
                # before the insert: what arrives during it is not in the store when we say that all is
                complete = self._asked.is_set() and reader.caught_up()
                with self._pulse.busy():
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
        """The rows of what the store does not have yet."""
        new = [delivery for delivery in deliveries if self._is_new(delivery)]
        self._reject(new)  # before the insert: what the store has is never looked at again
        return [delivery_row(delivery) for delivery in new]

    def _insert(self, rows: list[Row], events: int) -> None:
        self._store.insert(rows)
        for row in rows:
            self._following[row["topic"], row["partition"]] = row["offset"] + 1
        self._pulse.count("events_read", events)

    def _reject(self, deliveries: Sequence[Delivery]) -> None:
        """What cannot be read and has no stage that refuses it becomes a dead letter here."""
        rejects = [
            rejected(self._run_id, _STAGE, bad, bad.undecodable, now_microseconds())
            for bad in deliveries
            if bad.undecodable is not None and TOPIC_BY_NAME[bad.address.topic].rejected_by == _STAGE
        ]
        if rejects:
            for reject in rejects:
                self._log.append(reject)
            self._log.flush()
            self._pulse.count("rejected", len(rejects))

    def await_caught_up(self, timeout_seconds: float) -> bool:
        """Waits until everything that is on the log at this moment is in the store; False when that takes too long."""
        self._answered.clear()
        self._asked.set()
        try:
            return self._answered.wait(timeout_seconds)
        finally:
            self._asked.clear()

    def _gathered(self, reader: Reader, stop: threading.Event) -> tuple[list[Row], int]:
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

    def _must_be_of_this_log(self) -> None:
        """Offsets say what the store has already: on a log that was begun anew they would hide its first events."""
        for topic, partition, offset, event_id in self._store.ask(queries.LAST_EVENTS).rows:
            if topic in _FORGETTING:
                continue
            try:
                (event,) = self._log.read_at([Address(topic, partition, offset)])
            except LookupError:
                event = None
            if event is None or event.meta.id != event_id:
                raise BadInput(
                    f"the trace store {self._settings.dsn} was filled from another log ({topic}/{partition} at {offset} "
                    "differs): set [traces] dsn to another folder, or remove that one to have it filled again"
                )


def _commit(reader: Reader) -> None:
    """A commit that fails costs a second delivery, which the store passes over."""
    try:
        reader.commit()
    except LogUnavailable as error:
        _log.warning("commit_failed", error=str(error))
