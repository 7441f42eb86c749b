"""The trace store: writing it, reading it as it grows, and how much of the disk it takes.

sink_to_bare        the traces program's writer beside the bare parts: confluent-kafka consume, fastavro decode, and
                    clickhouse-connect inserts of the same rows into the same tables, in batches of the same size. Both read
                    the same broker in every round, into a database of their own. Processor seconds of the process, with
                    the threads of ClickHouse and the consumer, so that waiting for a batch counts for neither
visible_seconds     from the time of an event until a query of the store returns it, at 1,000 events a second; and until the
                    page over HTTP has it, looked at once a second as a live view does
views_…, pages_…    every view of SQL about one run (its first hundred rows, and all of them counted), and every view of the
                    page as whole HTML, as after new rows of the run, in stores of 10^5, 10^6 (and 10^7) events of runs alike:
                    95th percentile over rounds of the slowest, and how the one that grows most grows within a round.
                    Processor milliseconds, with one thread for a question: what it takes on a core that is free; and elapsed
hostile_…           longest seconds of GET /api/overview while twenty statements without bound are sent to POST /api/sql at once,
                    until all of them have ended; beside what it takes alone
stored_to_log       bytes on disk of an event, merged, beside those of its message on the log (compressed, as produced)
"""

import gc
import io
import itertools
import math
import os
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import fastavro
import msgspec
from clickhouse_connect.driver.client import Client
from confluent_kafka import Consumer, TopicPartition

from bench.plots import write_plot
from bench.rounds import Figure, figure
from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.columns import TABLES_STORED, Table, stored_columns
from replayground.consumers.clickhouse.deliveries import delivery_row
from replayground.consumers.clickhouse.rows import Row, event_row
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.clickhouse.views import VIEWS
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard import addresses, routes
from replayground.consumers.dashboard.request import ViewRequest
from replayground.consumers.dashboard.routes import VIEWS as PAGES
from replayground.consumers.dashboard.web import LogSource, Traces, WebServer
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.lag_watch import LagWatch
from replayground.consumers.operations_log import OperationsWriter
from replayground.consumers.reports.svg import Line
from replayground.deploy.local.stack import LogAddresses, local_log
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Address, Event, RolloutStarted
from replayground.schemas.ids import now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.topics import TOPICS
from replayground.streams.log.kafka import KafkaLog
from tests.consumers.sql_attacks import WITHOUT_BOUND
from tests.consumers.synthetic_run import FIELD_RUN, SyntheticRun, run_of

_BATCH_ROWS = TracesSettings().batch_rows_max
_NAMES = [topic.name for topic in TOPICS]
_CONSUMER = {
    "group.id": "bare",
    "enable.auto.commit": False,
    "isolation.level": "read_committed",
    "fetch.min.bytes": 64 * 1024,
    "fetch.wait.max.ms": 50,
    "queued.max.messages.kbytes": 32 * 1024,
}
_COPIES_AT_ONCE = 20
_TABLE = Path(__file__).parent.parent / "docs" / "bench_traces.md"
_DRAWN = ("turns", "trajectories", "rewards", "pass_at_k", "lineage whole", "page /flow")
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")


def measure(quick: bool) -> dict[str, Figure]:
    """Limits: sink_to_bare at least 0.7, visible_seconds at most 2, views at 10^6 events at most 300 ms, and growth of
    those of one run from 10^6 to 10^7 at most 2."""
    figures: dict[str, Figure] = {}
    for name in ("sink", "visible", "hostile", "views"):
        figures |= PARTS[name](quick)
    return figures


def _of_sink(quick: bool) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, _log(Path(folder)) as (addresses, log):
        events = _fill(log, steps=100 if quick else 400)
        return _sink(addresses, log, f"chdb://{folder}/store", events, rounds=1 if quick else 5)


def _of_visible(quick: bool) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, _log(Path(folder)) as (_, log):
        return _visible(log, f"chdb://{folder}/store", seconds=5 if quick else 20)


def _of_hostile(quick: bool) -> dict[str, Figure]:
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder, _log(Path(folder)) as (_, log):
        _fill(log, steps=100)
        return _hostile(log, f"chdb://{folder}/store", rounds=1 if quick else 3)


def _of_views(sizes: Sequence[int], rounds: int, quick: bool) -> dict[str, Figure]:
    # In a folder that stays when TRACES_BENCH_FOLDER names one: a part that was interrupted goes on.
    kept = os.environ.get("TRACES_BENCH_FOLDER")
    with tempfile.TemporaryDirectory(prefix="replayground-bench-") as folder:
        chosen, times = ((20_000, 100_000), 5) if quick else (sizes, rounds)
        return views(Path(kept or folder), chosen, times, is_kept=len(chosen) > 2)


PARTS: dict[str, Callable[[bool], dict[str, Figure]]] = {
    "sink": _of_sink,
    "visible": _of_visible,
    "hostile": _of_hostile,
    "views": partial(_of_views, (100_000, 1_000_000), 10),
    # Half an hour and more, and 5 GB of disk: not part of `measure`. Writes the plot and docs/bench_traces.md.
    "views_10m": partial(_of_views, (100_000, 1_000_000, 10_000_000), 10),
}
"each can be measured alone: `python -m bench traces:sink`"


# --- writing


def _fill(log: KafkaLog, steps: int) -> int:
    """Appends a run; returns the number of its events."""
    made = SyntheticRun(run_of(steps=steps, demonstrations=steps), evaluation_tasks=20).append_to(log)
    print(f"{len(made):,} events on the log", file=sys.stderr, flush=True)
    return len(made)


def _sink(addresses: LogAddresses, log: KafkaLog, dsn: str, events: int, rounds: int) -> dict[str, Figure]:
    found: list[tuple[float, float]] = []
    rows = [delivery_row(delivery) for delivery in _deliveries(log)]
    prepared = [_columns_of(rows[at : at + _BATCH_ROWS]) for at in range(0, len(rows), _BATCH_ROWS)]
    # The rows of the bench itself: each collection of garbage would walk through all of them.
    gc.collect()
    gc.freeze()
    # The first round is not counted: whoever comes first in it loads what both need.
    for number in range(rounds + 1):
        # Each database is new: both write into empty tables.
        bare_store, sink_store = (Store(dsn, f"{name}_{number}", threads=1) for name in ("bare", "sink"))
        sides: list[tuple[str, Callable[[], float]]] = [
            ("bare", partial(_bare_seconds, addresses, bare_store, prepared, events)),
            ("sink", partial(_sink_seconds, log, sink_store)),
        ]
        # Every other round in reverse order: neither side may always find the machine warm.
        seconds = {name: side() for name, side in (sides if number % 2 == 0 else reversed(sides))}
        assert sink_store.checksums()["events"][0] == bare_store.checksums()["events"][0] == events
        if number > 0:
            found.append((seconds["bare"], seconds["sink"]))
        print(f"  {seconds}", file=sys.stderr, flush=True)
        figures = _sizes(sink_store, log, events)
        bare_store.close()
        sink_store.close()
    return {
        "sink_to_bare": figure(bare / sink for bare, sink in found),
        "sink_events_per_second": figure(events / sink for _, sink in found),
        **figures,
    }


def _deliveries(log: KafkaLog) -> Iterator[Any]:
    reader = log.reader(_NAMES)
    while not reader.caught_up():
        yield from reader.poll(1000, 1.0)
    reader.close()


def _sink_seconds(log: KafkaLog, store: Store) -> float:
    """Processor seconds of the traces program's writer, from an empty store to one that has everything."""
    # So long that batches are full, as those of the bare part, also on a machine that is busy with other work.
    settings = TracesSettings(flush_seconds=5.0)
    writer, stop = TraceWriter(log, store, FIELD_RUN, settings, ProgramMetrics()), threading.Event()
    thread = threading.Thread(target=writer.write_until, args=(stop,))
    began = time.process_time()
    thread.start()
    while not writer.await_caught_up(60.0):
        pass
    seconds = time.process_time() - began
    stop.set()
    thread.join()
    return seconds


Block = dict[Table, tuple[list[str], list[list[Any]]]]
"column names and columns of a batch, by table"


def _columns_of(rows: Sequence[Row]) -> Block:
    """The rows as clickhouse-connect takes them fastest, made before the clock starts: column by column."""
    block: Block = {}
    for table in TABLES_STORED:
        names = [name for name in stored_columns(table) if any(row.get(name) is not None for row in rows)]
        block[table] = names, [[_plain(name, row.get(name)) for row in rows] for name in names]
    return block


_ABSENT: dict[str, Any] = {}


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return bytes(value).decode()
    return _default(name) if value is None else value


def _default(name: str) -> Any:
    """What a column holds where a row has nothing."""
    from replayground.consumers.clickhouse.columns import COLUMNS

    if not _ABSENT:
        for column in COLUMNS:
            kind = column.kind
            _ABSENT[column.name] = (
                None
                if "Nullable" in kind and not kind.startswith("Array")
                else {}
                if kind.startswith("Map")
                else []
                if kind.startswith("Array")
                else ""
                if "String" in kind
                else 0
            )
    return _ABSENT[name]


def _bare_seconds(addresses: LogAddresses, store: Store, blocks: Sequence[Block], events: int) -> float:
    with ConfluentSchemas(addresses) as schemas:
        consumer = _bare_consumer(addresses)
        began = time.process_time()
        client: Client = store._connect()
        waiting, inserted = 0, 0
        for count in _bare_batches(consumer, schemas, events):
            waiting += count
            while inserted < len(blocks) and waiting >= min(_BATCH_ROWS, events - inserted * _BATCH_ROWS):
                for table, (names, columns) in blocks[inserted].items():
                    client.insert(table, columns, column_names=names, column_oriented=True)
                inserted, waiting = inserted + 1, waiting - _BATCH_ROWS
        seconds = time.process_time() - began
        client.close()
        consumer.close()
        return seconds


class ConfluentSchemas:
    """Decodes with plain fastavro and the schema that the message names."""

    def __init__(self, addresses: LogAddresses) -> None:
        self._registry = ConfluentRegistry(addresses.log.registry_url)
        self._schemas: dict[bytes, Any] = {}

    def __enter__(self) -> "ConfluentSchemas":
        return self

    def __exit__(self, *_: object) -> None:
        self._registry.close()

    def decode(self, value: bytes) -> Any:
        if value[1:5] not in self._schemas:
            self._schemas[value[1:5]] = fastavro.parse_schema(self._registry.schema_of(int.from_bytes(value[1:5])))
        stream = io.BytesIO(value)
        stream.seek(5)
        return fastavro.schemaless_reader(stream, self._schemas[value[1:5]], None)


def _bare_consumer(addresses: LogAddresses) -> Consumer:
    consumer = Consumer({"bootstrap.servers": addresses.log.bootstrap_servers, **_CONSUMER})
    prefix = addresses.log.topic_prefix
    consumer.assign([TopicPartition(f"{prefix}{t.name}", p, 0) for t in TOPICS for p in range(t.partitions)])
    return consumer


def _bare_batches(consumer: Consumer, schemas: ConfluentSchemas, events: int) -> Iterator[int]:
    seen = 0
    while seen < events:
        messages = consumer.consume(1000, 0.1)
        for message in messages:
            schemas.decode(message.value() or b"")
        seen += len(messages)
        yield len(messages)


def _sizes(store: Store, log: KafkaLog, events: int) -> dict[str, Figure]:
    """Bytes of an event on disk, and beside those of its message as the broker keeps it (lz4)."""
    for table in TABLES_STORED:
        store._writing.command(f"OPTIMIZE TABLE {table} FINAL")
    asked = "SELECT sum(bytes_on_disk) FROM system.parts WHERE database = currentDatabase() AND active"
    stored = int(store.ask(asked).rows[0][0]) / events
    import lz4.frame

    values = [message.value for message in log.messages(_NAMES) if message.value is not None]
    # By hundreds, about as many as a producer puts into a batch.
    packed = sum(len(lz4.frame.compress(b"".join(values[at : at + 100]))) for at in range(0, len(values), 100))
    return {
        "stored_to_log_bytes": figure([stored / (packed / events)]),
        "stored_bytes_per_event": figure([stored]),
    }


@contextmanager
def _served(log: KafkaLog, store: Store, dsn: str) -> Iterator[str]:
    """The traces program in this process, caught up; yields the address of its page."""
    writer, stop = TraceWriter(log, store, FIELD_RUN, TracesSettings(), ProgramMetrics()), threading.Event()
    lag = LagWatch(log, ProgramMetrics())
    settings = TracesSettings(dsn=dsn, database=_VISIBLE, port=_free_port(), sql_seconds_max=5.0)
    web = WebServer(store, settings, LogSource(log, lag, writer, OperationsWriter(log)))
    thread = threading.Thread(target=writer.write_until, args=(stop,))
    thread.start()
    lag.start()
    web.start()
    while not writer.await_caught_up(60.0):
        pass
    try:
        yield f"http://127.0.0.1:{settings.port}"
    finally:
        stop.set()
        thread.join()
        web.stop()
        lag.stop()
        store.close()


def _visible(log: KafkaLog, dsn: str, seconds: int) -> dict[str, Figure]:
    """Seconds until an event can be queried, and until it is on the page, at a thousand a second."""
    store = Store(dsn, _VISIBLE, threads=1)
    with _served(log, store, dsn) as address:
        return _visible_at(address, log, store, seconds)


def _hostile(log: KafkaLog, dsn: str, rounds: int) -> dict[str, Figure]:
    """Seconds of the page's overview while statements without bound are asked, the longest of each round."""
    store = Store(dsn, _VISIBLE, threads=1)
    with _served(log, store, dsn) as address:
        alone = [_overview_seconds(address) for _ in range(20)]
        longest: list[float] = []
        for _ in range(rounds):
            asked = [threading.Thread(target=_ask, args=(address, WITHOUT_BOUND[n % 6])) for n in range(20)]
            for thread in asked:
                thread.start()
            seconds = [_overview_seconds(address)]
            while any(thread.is_alive() for thread in asked):
                seconds.append(_overview_seconds(address))
                time.sleep(0.1)
            longest.append(max(seconds))
            print(f"  {len(seconds)} times: longest {max(seconds):.2f} s", file=sys.stderr, flush=True)
    return {"overview_seconds": figure(alone), "hostile_overview_seconds_longest": figure(longest)}


def _overview_seconds(address: str) -> float:
    began = time.perf_counter()
    with urllib.request.urlopen(f"{address}/api/overview", timeout=120) as response:
        assert response.read()
    return time.perf_counter() - began


def _ask(address: str, statement: str) -> None:
    body = msgspec.json.encode({"sql": statement})
    request = urllib.request.Request(f"{address}/api/sql", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            raise AssertionError(f"it was answered: {response.read()[:200]!r}")
    except urllib.error.HTTPError as refused:
        refused.close()


def _visible_at(address: str, log: KafkaLog, store: Store, seconds: int) -> dict[str, Figure]:
    look = _Look(address)
    look.start()
    waits: list[float] = []
    began = time.perf_counter()
    events = SyntheticRun(run_of(steps=10_000, demonstrations=0, run_id=_VISIBLE), 20).events()
    appended = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        while appended < elapsed * 1000:
            event = next(events)
            meta = msgspec.structs.replace(event.meta, timestamp=now_microseconds())
            log.append(msgspec.structs.replace(event, meta=meta))
            look.offer(event)
            appended += 1
        asked = f"SELECT max(timestamp) FROM events WHERE run_id = '{_VISIBLE}'"
        if newest := store.ask(asked).rows[0][0]:
            waits.append((now_microseconds() - newest) / 1e6)
        time.sleep(0.1)
    log.flush()
    look.stop()
    print(f"  {appended:,} events in {seconds} s, {len(look.waits)} looks at the page", file=sys.stderr, flush=True)
    return {
        "visible_seconds_p95": figure([_percentile(waits)]),
        "visible_on_page_seconds_p95": figure([_percentile(look.waits)]),
    }


_VISIBLE = "visible"
_LOOK_SECONDS = 1.0
"how often a live view of the page asks again"


class _Look(threading.Thread):
    """A browser with a live view open: from the time of a RolloutStarted until the page of its trajectory is there."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.waits: list[float] = []
        self._url = url
        self._newest: tuple[float, str] | None = None
        self._ended = threading.Event()
        self._chance = random.Random(0)

    def offer(self, event: Event) -> None:
        if isinstance(event, RolloutStarted):
            self._newest = time.perf_counter(), event.meta.trajectory_id or ""

    def run(self) -> None:
        while not self._ended.wait(0.01):
            if self._newest is None:
                continue
            (began, trajectory), self._newest = self._newest, None
            # The event arrives at any moment between two looks.
            time.sleep(self._chance.random() * _LOOK_SECONDS)
            while not self._is_there(trajectory) and not self._ended.wait(_LOOK_SECONDS):
                pass
            if not self._ended.is_set():
                self.waits.append(time.perf_counter() - began)

    def stop(self) -> None:
        self._ended.set()
        self.join()

    def _is_there(self, trajectory: str) -> bool:
        query = urllib.parse.urlencode({"run": _VISIBLE, "id": trajectory})
        try:
            with urllib.request.urlopen(f"{self._url}{addresses.TRAJECTORY}?{query}", timeout=30) as response:
                return bool(response.read())
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:
                raise
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- reading

_RUN = "copy-0"
# The list of runs; what people did on the whole field; and rejects, which have their numbers among those of all runs.
_PAGES_OF_ALL_RUNS = (addresses.RUNS, addresses.AUDIT, addresses.REJECTS)
_STORED_VIEWS = tuple(view.name for view in VIEWS if view.sql)


@dataclass(frozen=True)
class _Question:
    """What is asked, and whether it is about one run: then it must not grow with the store."""

    ask: Callable[[], object]
    of_one_run: bool = True


@dataclass(frozen=True)
class _Taken:
    """Milliseconds of one question at one size, round by round."""

    processor: list[float]
    elapsed: list[float]

    @property
    def processor_ms(self) -> float:
        return _percentile(self.processor)

    @property
    def elapsed_ms(self) -> float:
        return _percentile(self.elapsed)

    def __str__(self) -> str:
        return f"{self.processor_ms:.0f} ({self.elapsed_ms:.0f} elapsed)"


def views(folder: Path, sizes: Sequence[int], rounds: int, is_kept: bool) -> dict[str, Figure]:
    """Asks every view of SQL and of the page at each size, all sizes in every round, so that growth is a ratio within a
    round. Each size has a database of its own; those that are in `folder` from an earlier call are not made again.
    `is_kept` writes the plot and the table."""
    stores = {size: _store_of(folder, size) for size in sizes}
    questions = {size: _questions(store) for size, store in stores.items()}
    found: dict[int, dict[str, _Taken]] = {size: {} for size in sizes}
    for name in questions[sizes[0]]:
        taken = _taken({size: questions[size][name].ask for size in sizes}, rounds)
        for size in sizes:
            found[size][name] = taken[size]
        print(f"  {name}: {', '.join(str(taken[size]) for size in sizes)}", file=sys.stderr, flush=True)
    of_one_run = [name for name, question in questions[sizes[0]].items() if question.of_one_run]
    for store in stores.values():
        store.close()
    if is_kept:
        _plot(found)
        _write_table(found, of_one_run, rounds)
    return _figures(found, of_one_run)


def _store_of(folder: Path, size: int) -> Store:
    """A store with so many events, when ClickHouse has merged what it merges by itself."""
    store = Store(f"chdb://{folder}/views", f"views_{size}", threads=1)
    base = list(SyntheticRun(run_of(steps=150, demonstrations=20, run_id=_RUN), evaluation_tasks=50).events())
    store.insert([event_row(Address(event.meta.topic, 0, at), event) for at, event in enumerate(base)])
    _copy_until(store, len(base), size)
    # Merges are processor time of this process, too.
    while int(store.ask("SELECT count() FROM system.merges").rows[0][0]):
        time.sleep(1.0)
    return store


def _taken(asked: Mapping[int, Callable[[], object]], rounds: int) -> dict[int, "_Taken"]:
    """What one question takes at each size."""
    for ask in asked.values():
        ask()
    processor: dict[int, list[float]] = {size: [] for size in asked}
    elapsed: dict[int, list[float]] = {size: [] for size in asked}
    for number in range(rounds):
        # Every other round in reverse order: no size may always find the machine warm.
        for size, ask in list(asked.items())[:: 1 if number % 2 == 0 else -1]:
            began, at = time.process_time(), time.perf_counter()
            ask()
            processor[size].append((time.process_time() - began) * 1000)
            elapsed[size].append((time.perf_counter() - at) * 1000)
    return {size: _Taken(processor[size], elapsed[size]) for size in asked}


def _growth(before: "_Taken", after: "_Taken") -> Figure:
    return figure(late / early for early, late in zip(before.processor, after.processor, strict=True))


def _figures(found: dict[int, dict[str, _Taken]], of_one_run: Sequence[str]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for size, taken in found.items():
        pages = [one for name, one in taken.items() if name.startswith("page ")]
        of_sql = [one for name, one in taken.items() if not name.startswith("page ")]
        for told, some in (("views", of_sql), ("pages", pages)):
            figures[f"{told}_p95_ms_worst_at_{size}"] = figure([max(one.processor_ms for one in some)])
            figures[f"{told}_elapsed_p95_ms_worst_at_{size}"] = figure([max(one.elapsed_ms for one in some)])
    for before, after in itertools.pairwise(found):
        growth = {name: _growth(found[before][name], found[after][name]) for name in of_one_run}
        worst_one = max(growth, key=lambda name: growth[name].median)
        print(f"  from {before:,} to {after:,}: {worst_one} grows most, {growth[worst_one]}", file=sys.stderr)
        figures[f"growth_worst_{before}_to_{after}"] = growth[worst_one]
    return figures


def _copy_until(store: Store, events: int, size: int) -> None:
    """Copies the run under other names until the store has so many events."""
    # Counted in the table that is filled last: an interrupted copy is made again.
    there = int(store.ask("SELECT count() FROM events").rows[0][0]) // events
    wanted = max(1, size // events)
    for first in range(there, wanted, _COPIES_AT_ONCE):
        following = min(wanted, first + _COPIES_AT_ONCE)
        for table in TABLES_STORED:
            names = [name for name in stored_columns(table) if name not in ("run_id", "offset", "id")]
            chosen = ", ".join(f"`{name}`" for name in names)
            store._writing.command(
                f"INSERT INTO {table} (run_id, offset, id, {chosen}) SELECT concat('copy-', toString(copy)), "
                f"offset + copy * {events}, concat(id, '-', toString(copy)), {chosen} FROM {table} "
                f"ARRAY JOIN range(toUInt64({first}), toUInt64({following})) AS copy WHERE run_id = '{_RUN}'"
            )
        print(f"  {following * events:,} events", file=sys.stderr, flush=True)


def _questions(store: Store) -> dict[str, _Question]:
    asked = {"run": _RUN, "purpose": "", "outcome": "", "session": "", "rows": 50}
    questions = {"transcripts": _Question(lambda: store.ask(queries.TRANSCRIPTS, asked))}
    for name in _STORED_VIEWS:
        # As the console shows it, and over all rows of the run.
        for told, sql in (("", f"SELECT * FROM {name}"), (" whole", f"SELECT count() FROM {name}")):
            statement = f"{sql} WHERE run_id = '{_RUN}' LIMIT 100"
            questions[f"{name}{told}"] = _Question(partial(store.ask, statement))
    traces = Traces(store, TracesSettings(), None)
    for path, query in _pages(store).items():
        is_of_one = path not in _PAGES_OF_ALL_RUNS
        questions[f"page {path}"] = _Question(partial(_page, traces, path, query), of_one_run=is_of_one)
    return questions


def _pages(store: Store) -> dict[str, dict[str, list[str]]]:
    """Every view of the page with its query: about the run, its middle trajectory, step and group."""
    ((trajectory, group),) = store.ask(
        "SELECT trajectory_id, group_id FROM events WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' "
        "AND purpose = 'train' ORDER BY offset LIMIT 1 OFFSET 100",
        {"run": _RUN},
    ).rows
    ((topic, partition, offset),) = store.ask(
        "SELECT topic, partition, offset FROM events WHERE run_id = {run:String} AND type = 'StepTaken' LIMIT 1",
        {"run": _RUN},
    ).rows
    run = {"run": [_RUN]}
    one = run | {"id": [trajectory]}
    more = {
        addresses.TRAJECTORY: one,
        addresses.TOKENS: one,
        addresses.GROUP: run | {"id": [group]},
        addresses.COMPARE: run | {"left": [trajectory], "right": [trajectory]},
        addresses.BATCHES: run | {"step": ["70"]},
        addresses.LINEAGE: run | {"version": ["70"]},
        addresses.EVENT: run
        | {"type": ["StepTaken"], "topic": [topic], "partition": [str(partition)], "offset": [str(offset)]},
        addresses.RUNS: {},
    }
    return {path: more.get(path, run) for path in PAGES}


def _page(traces: Traces, path: str, query: dict[str, list[str]]) -> None:
    """The whole HTML, as after new rows of the run: nothing that was asked about it is known any more."""
    kept = traces.answers._kept
    # New rows of a run are no new runs, and what was asked about others stays.
    for key in [key for key in kept if key[0] != queries.RUN_FACTS and not _is_of_another(key[1:])]:
        del kept[key]
    traces._seen.clear()
    traces._runs._figures.pop(_RUN, None)
    response = routes._page(ViewRequest(traces, path, query), PAGES[path], "bench")
    assert response.status_code == 200, bytes(response.body).decode()[-2000:]


def _is_of_another(parameters: Sequence[tuple[str, Any]]) -> bool:
    return any(name == "run" and value not in ("", _RUN) for name, value in parameters)


def _percentile(seconds: Sequence[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(len(seconds) * 0.95))]


def _plot(found: dict[int, dict[str, _Taken]]) -> None:
    lines = [
        Line(name, [(math.log10(size), taken[name].processor_ms) for size, taken in found.items()], colour, marks=True)
        for name, colour in zip(_DRAWN, _COLOURS, strict=True)
    ]
    write_plot(
        "traces_views", "Processor milliseconds of a question (p95)", lines, "events in the store: 10 to the power of"
    )


def _write_table(found: dict[int, dict[str, _Taken]], of_one_run: Sequence[str], rounds: int) -> None:
    """docs/bench_traces.md: every question at every size."""
    sizes = list(found)
    rows = []
    for name in found[sizes[0]]:
        taken = [found[size][name] for size in sizes]
        growth = [str(_growth(before, after)) for before, after in itertools.pairwise(taken)]
        told = [f"{one.processor_ms:.0f} ({one.elapsed_ms:.0f})" for one in taken]
        rows.append(" | ".join([f"| {name}{'' if name in of_one_run else ' (of all runs)'}", *told, *growth]) + " |")
    heads = [*(f"{size:,} events" for size in sizes), *(f"{a:,} to {b:,}" for a, b in itertools.pairwise(sizes))]
    _TABLE.write_text(
        "\n".join(
            [
                "# Questions by the size of the trace store",
                "",
                f"Written by `python -m bench traces:views_10m` on {datetime.now(UTC):%Y-%m-%d}, {rounds} rounds.",
                "Processor milliseconds with one thread, the 95th percentile, and in brackets the time that passed on a",
                "machine with other work; then how the question grows: ratio within a round, median (lowest–highest).",
                "A name is a view of SQL about one run, its first hundred rows; `whole`: all of its rows counted;",
                "`page …`: a view of the [dashboard](dashboard.md) as whole HTML, as after new rows of the run.",
                "",
                f"| question | {' | '.join(heads)} |",
                f"|---|{'---|' * len(heads)}",
                *rows,
                "",
            ]
        )
    )


@contextmanager
def _log(folder: Path) -> Iterator[tuple[LogAddresses, KafkaLog]]:
    with local_log(folder / "log") as addresses:
        codec = Codec(ConfluentRegistry(addresses.log.registry_url), Blobs(addresses.blobs_url))
        log = KafkaLog(addresses.log, codec)
        try:
            yield addresses, log
        finally:
            log.close()
            codec.close()
