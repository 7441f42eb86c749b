"""The log into a real chDB: nothing twice, nothing missing, whatever happens between insert and commit."""

import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from replayground.consumers.clickhouse.migrations import TABLE
from replayground.consumers.clickhouse.queries import COUNTS_BY_RUN, LAST_EVENTS, RUN_FACTS, STANDING
from replayground.consumers.clickhouse.rows import Row, event_row
from replayground.consumers.clickhouse.store import Store, StoreFailed
from replayground.consumers.config import TracesSettings
from replayground.consumers.events_to_clickhouse import TraceWriter
from replayground.consumers.reports.summary import count_rows
from replayground.deploy.operate.dead_letters import dead_letters
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, Event, EventRejected, Meta, Position, RunEnded, RunResumed, RunStarted
from replayground.schemas.ids import new_id
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.topics import TOPICS
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from tests.consumers.synthetic_run import FIELD_RUN, SyntheticRun, run_of
from tests.flow.synthetic import observations, rollout

RUN = run_of(steps=2, demonstrations=4)
SETTINGS = TracesSettings(flush_seconds=0.1, batch_rows_max=50)
NAMES = [topic.name for topic in TOPICS]


def _meta(run_id: str) -> Meta:
    return Meta(id=new_id(), run_id=run_id, category="run", topic="runs", sender="operator", timestamp=0)


def started_event(run_id: str, begins_after: int = 0) -> RunStarted:
    """Its positions are `begins_after` on every partition."""
    places = [(topic.name, partition) for topic in TOPICS for partition in range(topic.partitions)]
    return RunStarted(
        meta=_meta(run_id),
        kind="practise",
        config="{}",
        files=[],
        seed=0,
        code_version="",
        packages={},
        positions=[Position(topic=t, partition=p, offset=begins_after) for t, p in places],
        started_by="ann",
    )


def resumed(run_id: str) -> RunResumed:
    return RunResumed(meta=_meta(run_id), start=1, code_version="", packages={}, started_by="bob")


def ended(run_id: str, start: int = 0) -> RunEnded:
    return RunEnded(meta=_meta(run_id), reason="stopped", detail="", start=start)


def events() -> list[Event]:
    return list(SyntheticRun(RUN, evaluation_tasks=3).events())


def write_all(log: MemoryLog, store: Store, settings: TracesSettings = SETTINGS) -> None:
    """Runs the writer until it has caught up, then stops it."""
    writer, stop = TraceWriter(log, store, FIELD_RUN, settings, ProgramMetrics()), threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            writer.write_until(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while thread.is_alive() and not writer.await_caught_up(1.0):
            pass
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def test_the_store_equals_the_log(memory_log: MemoryLog, store: Store) -> None:
    written = events()
    for event in written:
        memory_log.append(event)
    write_all(memory_log, store)
    assert count_rows(store, memory_log) == (len(written), len(written))
    assert {row[0] for row in store.ask("SELECT id FROM events").rows} == {event.meta.id for event in written}


def test_what_cannot_be_read_is_a_row_and_a_dead_letter_where_no_stage_refuses_it(
    memory_log: MemoryLog, store: Store
) -> None:
    for topic in TOPICS:
        memory_log.append_bytes(topic.name, b"key", b"no event at all")
    write_all(memory_log, store)
    write_all(memory_log, store)  # a second life repeats nothing
    undecodable = store.ask("SELECT topic FROM events WHERE type = 'undecodable'").rows
    assert {topic for (topic,) in undecodable} == set(NAMES)
    dead = [d.event for d in memory_log.reader(["dead-letters"]).poll(100, 0) if isinstance(d.event, EventRejected)]
    assert {reject.origin.topic for reject in dead} == {
        *("runs", "tasks", "attempts", "batches", "steps", "weights", "serving", "control", "snapshots"),
        # The judge reads judgements too, in runs that have one.
        *("selections", "judgements", "operations"),
    }
    assert len(dead) == 12
    assert {reject.stage for reject in dead} == {"traces"}


def unreadable(log: MemoryLog, run_id: str) -> bytes:
    """A message that names a run and cannot be decoded."""
    return log.codec.encode(rollout(0, 0, run_id=run_id)[0])[:-7]


@pytest.mark.parametrize(
    ("facts", "of_run"),
    [
        ([], FIELD_RUN.run_id),
        ([started_event("a"), ended("a")], "a"),
        ([started_event("a"), ended("a", start=0), resumed("a"), ended("a", start=1)], "a"),
        ([started_event("a", begins_after=1)], "a"),
        ([started_event("a")], None),
        ([started_event("a"), ended("a"), resumed("a")], None),
        ([started_event("b")], FIELD_RUN.run_id),
    ],
    ids=["no run", "ended", "ended again", "began later", "active", "resumed", "another is active"],
)
def test_what_names_a_run_is_rejected_here_when_that_run_is_not_there(
    memory_log: MemoryLog, store: Store, facts: list[Event], of_run: str | None
) -> None:
    """All other runs leave it to the run that it names (decision 0023): if nobody is left, it must not vanish."""
    for topic in ("rollouts", "messages", "trajectories", "rewards", "groups", "dead-letters"):
        memory_log.append_bytes(topic, b"key", unreadable(memory_log, "a"))
    for fact in facts:
        memory_log.append(fact)
    write_all(memory_log, store)
    write_all(memory_log, store)
    dead = [d.event for d in memory_log.reader(["dead-letters"]).poll(100, 0) if isinstance(d.event, EventRejected)]
    stages = {
        "rollouts": "rollouts",
        "messages": "assemble",
        "trajectories": "score",
        "rewards": "group",
        "groups": "cut",
    }
    expected = {} if of_run is None else stages
    assert {reject.origin.topic: reject.stage for reject in dead} == expected
    assert len(dead) == len(expected)
    assert {(reject.meta.run_id, reject.meta.sender) for reject in dead} <= {(of_run, "traces")}


def test_a_reject_in_place_of_a_run_is_the_one_that_the_run_itself_would_write(
    memory_log: MemoryLog, store: Store
) -> None:
    """The run may be resumed and come by after all: whoever reads the dead letters knows the second one by its id."""
    memory_log.append_bytes("messages", b"key", unreadable(memory_log, "a"))
    write_all(memory_log, store)
    Driver(memory_log, hops((), "standardised"), "a").run_until_caught_up()
    Driver(memory_log, hops((), "standardised"), "b").run_until_caught_up()
    dead = [d.event for d in memory_log.reader(["dead-letters"]).poll(100, 0) if isinstance(d.event, EventRejected)]
    assert [reject.meta.sender for reject in dead] == ["traces", "assemble"]
    assert len({reject.meta.id for reject in dead}) == 1
    assert len(dead_letters(memory_log)) == 1


def test_what_was_inserted_but_not_committed_is_passed_over(memory_log: MemoryLog, store: Store) -> None:
    written = events()
    for event in written[: len(written) // 2]:
        memory_log.append(event)
    reader = memory_log.reader(NAMES, group="traces")
    TraceWriter(memory_log, store, FIELD_RUN, SETTINGS, ProgramMetrics()).insert(reader.poll(1000, 0))  # and no commit
    for event in written[len(written) // 2 :]:
        memory_log.append(event)
    write_all(memory_log, store)
    assert count_rows(store, memory_log) == (len(written), len(written))


def test_what_is_delivered_again_before_it_was_inserted_is_one_row(memory_log: MemoryLog, store: Store) -> None:
    """A reader that slept past its session is given again what it had polled and not committed."""
    for event in events():
        memory_log.append(event)
    delivered = memory_log.reader(NAMES).poll(1000, 0)
    TraceWriter(memory_log, store, FIELD_RUN, SETTINGS, ProgramMetrics()).insert([*delivered, *delivered[3:]])
    assert count_rows(store, memory_log) == (len(delivered), len(delivered))


def test_a_batch_is_bounded_by_its_bytes_too(
    memory_log: MemoryLog, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for event in observations(600, content_bytes=2000, run_id="large"):
        memory_log.append(event)
    rows_inserted: list[int] = []
    insert = store.insert

    def counting(rows: Sequence[Row]) -> None:
        rows_inserted.append(len(rows))
        insert(rows)

    monkeypatch.setattr(store, "insert", counting)
    write_all(memory_log, store, TracesSettings(flush_seconds=2.0, batch_bytes_max=100_000))
    assert count_rows(store, memory_log) == (600, 600)
    assert max(rows_inserted) <= 250, "more was gathered after the bytes of a batch were reached"


def test_the_same_batch_inserted_again_adds_nothing(store: Store) -> None:
    rows = [event_row(Address(event.meta.topic, 0, n), event) for n, event in enumerate(events())]
    store.insert(rows)
    store.insert(rows)
    assert store.ask("SELECT count() FROM events").rows == [(len(rows),)]


def test_a_store_of_another_log_is_refused(memory_log: MemoryLog, store: Store) -> None:
    other = SyntheticRun(run_of(steps=1, demonstrations=1, run_id="other"), evaluation_tasks=1)
    rows = [event_row(Address("tasks", 0, n), event) for n, event in enumerate(other.events())]
    store.insert(rows)
    for event in events():
        memory_log.append(event)
    with pytest.raises(BadInput, match="another log"):
        write_all(memory_log, store)


def test_a_log_that_lost_its_end_is_refused(memory_log: MemoryLog, store: Store) -> None:
    written = events()
    for event in written:
        memory_log.append(event)
    write_all(memory_log, store)
    shorter = MemoryLog(memory_log.codec)
    for event in written[:-1]:
        shorter.append(event)
    with pytest.raises(BadInput, match="another log"):
        write_all(shorter, store)


def test_it_waits_for_a_log_that_says_nothing(memory_log: MemoryLog, store: Store) -> None:
    write_all(memory_log, store)
    assert count_rows(store, memory_log) == (0, 0)


def test_a_store_that_was_removed_is_filled_again(memory_log: MemoryLog, store: Store, chdb_dsn: str) -> None:
    written = events()
    for event in written:
        memory_log.append(event)
    write_all(memory_log, store)
    another = Store(chdb_dsn, "another", threads=1)
    write_all(memory_log, another)
    assert count_rows(another, memory_log) == (len(written), len(written))
    another.close()


def test_a_store_of_another_layout_is_refused(chdb_dsn: str, store: Store) -> None:
    store._writing.command("CREATE DATABASE other_layout")
    store._writing.command("CREATE TABLE other_layout.events (id String) ENGINE = MergeTree ORDER BY id")
    with pytest.raises(StoreFailed, match="made by another release"):
        Store(chdb_dsn, "other_layout", threads=1)


def test_a_store_without_projections_gets_them(chdb_dsn: str, store: Store) -> None:
    """As the release before had it: rows stay, and the same questions are answered."""
    store._writing.command("CREATE DATABASE before")
    store._writing.command(TABLE.replace("EXISTS events", "EXISTS before.events"))
    store._writing.command(
        "INSERT INTO before.events (topic, partition, offset, type, id) VALUES ('tasks', 1, 7, 'x', 'y')"
    )
    migrated = Store(chdb_dsn, "before", threads=1)
    assert migrated.next_offsets() == {("tasks", 1): 8}
    assert migrated.ask(LAST_EVENTS).rows == [("tasks", 1, 7, "y")]
    migrated.close()


@pytest.mark.parametrize(
    ("question", "projection"),
    [(STANDING, "standing"), (LAST_EVENTS, "standing"), (COUNTS_BY_RUN, "by_run"), (RUN_FACTS, "run_facts")],
)
def test_what_is_asked_at_every_start_does_not_read_the_table(question: str, projection: str, store: Store) -> None:
    store.insert([event_row(Address(event.meta.topic, 0, n), event) for n, event in enumerate(events())])
    plan = [line for (line,) in store.ask(f"EXPLAIN {question}").rows]
    (read,) = [line for line in plan if "ReadFromMergeTree" in line]
    assert f"({projection})" in read


def test_projections_stay_true_when_rows_are_removed(store: Store) -> None:
    store.insert([event_row(Address("tasks", 0, n), event) for n, event in enumerate(events())])
    last = store.next_offsets()["tasks", 0]
    assert store.replace(("tasks", 0), [last - 1, last - 2], []) == 2
    assert store.next_offsets() == {("tasks", 0): last - 2}
    assert store.ask(COUNTS_BY_RUN).rows == store.ask(COUNTS_BY_RUN + " SETTINGS optimize_use_projections = 0").rows


_CRASHING = """
import os, signal, sys
from replayground.consumers.clickhouse.rows import Row, event_row
from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import Address
from tests.consumers.synthetic_run import SyntheticRun, run_of
from tests.flow.synthetic import observations
store = Store(f"chdb://{sys.argv[1]}", "crash", threads=1)
events = list(SyntheticRun(run_of(steps=1, demonstrations=2), evaluation_tasks=2).events())
known = store.next_offsets().get(("tasks", 0), 0)
rows = [event_row(Address("tasks", 0, n), event) for n, event in enumerate(events) if n >= known]
store.insert(rows)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
store.insert([event_row(Address("tasks", 0, n), event) for n, event in enumerate(events)])
print(len(events), *store.ask("SELECT count(), uniqExact(offset) FROM events").rows[0])
"""


def test_rows_survive_a_kill_and_are_not_inserted_twice_after_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _CRASHING, str(tmp_path / "store")]
    killed = subprocess.run([*command, "die"], capture_output=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    again = subprocess.run([*command, "live"], capture_output=True, timeout=60, check=True)
    events_made, rows, offsets = map(int, again.stdout.split())
    assert events_made == rows == offsets
