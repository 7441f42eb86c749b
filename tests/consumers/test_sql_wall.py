"""Promise P12: a person's SQL can read the views of traces and do nothing else, whatever it says.

The statements of sql_attacks are tried with the door left out: the wall alone must hold. The same statements are tried
without the wall, to show that they do harm there.
"""

import hashlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import pytest

from replayground.consumers.clickhouse import sql_wall
from replayground.consumers.clickhouse.deliveries import delivery_row
from replayground.consumers.clickhouse.people_sql import PeopleSql
from replayground.consumers.clickhouse.sql_answers import SqlBusy, SqlRefused
from replayground.consumers.clickhouse.sql_process import quoted
from replayground.consumers.clickhouse.sql_snapshot import take_snapshot
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.sandboxes import seccomp
from replayground.sandboxes.machine import SYSTEM_PATH
from replayground.schemas.topics import TOPICS
from replayground.streams.log.memory import MemoryLog
from tests.consumers.sql_attacks import (
    CONNECTIONS,
    READS,
    SEEN_BY_THE_DOOR,
    UNSEEN,
    WAITING,
    WITHOUT_BOUND,
    WRITES,
    filled,
)
from tests.consumers.sql_questions import QUESTIONS
from tests.consumers.synthetic_run import SyntheticRun, run_of

DATABASE = "walled"
DRIVER = Path(__file__).with_name("sql_driver.py")
PROJECT = Path(__file__).resolve().parents[2]
PACKAGES = Path(sql_wall.__file__).parents[3]
SECRET = "canary-7d1f-not-for-people"


class Listener:
    """Hangs up on whoever connects, and counts them."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._socket.getsockname()[1])
        self.reached = 0
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            connection.close()
            if self.reached < 0:
                return
            self.reached += 1

    def close(self) -> None:
        self.reached = -1
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._socket.close()


@dataclass(frozen=True)
class Field:
    """A store with two runs in it, a copy of it, and what no statement may reach."""

    settings: TracesSettings
    store: Path
    snapshot: Path
    outside: Path
    listener: "Listener"

    def fill(self, statement: str) -> str:
        return filled(
            statement,
            secret=self.outside / "secret.csv",
            written=self.outside / "written.csv",
            folder=self.outside,
            port=self.listener.port,
            database=DATABASE,
        )


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory, chdb_dsn: str) -> Iterator[Field]:
    from replayground.schemas.blobs import Blobs
    from replayground.schemas.codec import Codec
    from replayground.schemas.registry import MemoryRegistry

    folder = tmp_path_factory.mktemp("wall")
    log = MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{folder}/blobs")))
    for name in ("run-0", "run-1"):
        SyntheticRun(run_of(steps=4, demonstrations=4, run_id=name), evaluation_tasks=4).append_to(log)
    store = Store(chdb_dsn, DATABASE, threads=1)
    reader = log.reader([topic.name for topic in TOPICS])
    while not reader.caught_up():
        store.insert([delivery_row(delivery) for delivery in reader.poll(200, 0.1)])
    # Another database in the same folder, that of somebody else.
    other = Store(chdb_dsn, "of_others", threads=1)
    snapshot, outside = folder / "snapshot", folder / "outside"
    snapshot.mkdir()
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    (outside / "secret.csv").write_text(SECRET + "\n")
    take_snapshot(Path(urlparse(chdb_dsn).path), DATABASE, snapshot)
    listener = Listener()
    settings = TracesSettings(dsn=chdb_dsn, database=DATABASE, sql_seconds_max=20, sql_rows_max=50)
    yield Field(settings, Path(urlparse(chdb_dsn).path), snapshot, outside, listener)
    listener.close()
    store.close()
    other.close()


@pytest.fixture(scope="module")
def people(field: Field) -> Iterator[PeopleSql]:
    asked = PeopleSql(field.settings)
    yield asked
    asked.close()


def walled(field: Field, statements: Sequence[str], kind: str, tmp_path: Path) -> list[tuple[bool, str]]:
    """What the statements answer in one process in the jail."""
    program = tmp_path / "filter"
    program.write_bytes(seccomp.filter_program(runs_agents_code=False))
    jail = sql_wall.jail(field.snapshot, str(program), field.settings, ((str(DRIVER), "/program/driver.py"),))
    start = f"{sql_wall.PATHS}; sys.argv[1:] = ['/snapshot', '{DATABASE}', '{kind}']; from driver import main; main()"
    return answers(jail.command([sql_wall.python(), "-I", "-S", "-c", start]), statements, {"PATH": SYSTEM_PATH})


def unwalled(field: Field, statements: Sequence[str], tmp_path: Path) -> list[tuple[bool, str]]:
    """The same outside of the jail, on another copy, as the user of this test."""
    snapshot = tmp_path / "snapshot"
    shutil.copytree(field.snapshot, snapshot, symlinks=True)
    command = [sys.executable, str(DRIVER), str(snapshot), DATABASE, "open"]
    return answers(command, statements, {"PATH": SYSTEM_PATH, "PYTHONPATH": str(PACKAGES.parent)})


def answers(command: list[str], statements: Sequence[str], environment: dict[str, str]) -> list[tuple[bool, str]]:
    text = "".join(json.dumps(statement) + "\n" for statement in statements)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env=environment, check=False, timeout=240
    )
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(statements), done.stderr[-2000:]
    return found


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a database and a hash of what is in it, without what ClickHouse itself writes in the background."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def test_with_the_door_left_out_no_statement_gets_through_the_wall(field: Field, tmp_path: Path) -> None:
    before = fingerprint(field.snapshot)
    outside = sorted(path.name for path in field.outside.iterdir())
    found = walled(field, [*map(field.fill, (*SEEN_BY_THE_DOOR, *UNSEEN))], "open", tmp_path)
    assert not [text for _, text in found if SECRET in text]
    assert sorted(path.name for path in field.outside.iterdir()) == outside
    assert not field.listener.reached
    # Hard links of the store itself.
    assert fingerprint(field.snapshot) == before


def test_the_same_statements_do_harm_without_the_wall(field: Field, tmp_path: Path) -> None:
    found = unwalled(field, [*map(field.fill, (*READS[:10], WRITES[0], CONNECTIONS[0]))], tmp_path)
    assert len([text for _, text in found if SECRET in text]) > 5
    (field.outside / "written.csv").unlink()
    assert field.listener.reached
    field.listener.reached = 0


def test_nothing_of_this_program_is_inside(field: Field) -> None:
    """The files that a statement could read at best: Python, chDB and the copy."""
    open_wall = PeopleSql(field.settings, is_guarded=False)
    try:
        for path in ("/proc/self/environ", "/proc/1/environ", "/proc/net/tcp"):
            try:
                (row,) = open_wall.ask(f"SELECT file('{path}')").rows
            except SqlRefused:
                continue
            assert os.environ["PATH"] not in row[0]
            assert f":{field.listener.port:04X}" not in row[0]
        assert open_wall.ask("SHOW DATABASES LIKE 'of_others'").rows == []
    finally:
        open_wall.close()


def test_time_and_memory_have_an_end(field: Field) -> None:
    limits = {"sql_seconds_max": 1.0, "sql_memory_bytes_max": 200_000_000, "sql_bytes_max": 1_000_000}
    open_wall = PeopleSql(TracesSettings(dsn=field.settings.dsn, database=DATABASE, **limits), is_guarded=False)  # type: ignore[arg-type]
    try:
        for statement in (*WITHOUT_BOUND, *map(field.fill, WAITING)):
            with pytest.raises(SqlRefused) as refused:
                open_wall.ask(statement)
            assert "\n" not in str(refused.value)
        # And the next question is answered.
        assert open_wall.ask("SELECT 1").rows == [[1]]
    finally:
        open_wall.close()
    assert not field.store.with_name(f"{field.store.name}.sql").exists()


def test_the_door_says_in_a_sentence_what_is_no_question(field: Field, tmp_path: Path) -> None:
    """The door itself: nothing is run, so that no failure is taken for its verdict."""
    statements = [*map(field.fill, (*SEEN_BY_THE_DOOR, *WAITING))]
    found = walled(field, statements, "door", tmp_path)
    assert [statement for statement, (refused, _) in zip(statements, found, strict=True) if not refused] == []
    assert not [text for _, text in found if "\n" in text or len(text) > 600]


def test_the_door_lets_every_honest_question_through(field: Field, tmp_path: Path) -> None:
    found = walled(field, QUESTIONS, "guarded", tmp_path)
    assert [(q, text) for q, (refused, text) in zip(QUESTIONS, found, strict=True) if refused] == []


def test_the_door_reads_a_statement_as_clickhouse_does(field: Field, tmp_path: Path) -> None:
    """Changed at random, a statement is refused exactly when what ClickHouse's parser read in it is refused."""
    source = random.Random(7)
    known = [*QUESTIONS, *map(field.fill, (*SEEN_BY_THE_DOOR, *UNSEEN))]
    found = walled(field, [changed(source.choice(known), source) for _ in range(400)], "verdicts", tmp_path)
    assert not [text for differs, text in found if differs]
    assert not [text for _, text in found if "\n" in text.partition(" | ")[0]]
    # Enough of them are still statements.
    assert len([text for _, text in found if not text.startswith("ClickHouse refused")]) > 100


def changed(statement: str, source: random.Random) -> str:
    words = re.split(r"(\W)", statement)
    for _ in range(source.randint(0, 2)):
        at = source.randrange(len(words))
        odd = source.choice(("\u200b", "“", "\ufeff", "//", "--", ";", "`"))
        words[at : at + 1] = source.choice(([], [words[at]] * 2, [source.choice(words)], [words[at], odd]))
    return "".join(words)


def test_the_user_of_a_server_is_made_by_statements_that_clickhouse_reads(field: Field, tmp_path: Path) -> None:
    text = re.sub(r"(?m)^--.*$", "", (PROJECT / "deploy/clickhouse/people.sql").read_text())
    statements = [statement.strip() for statement in text.split(";") if statement.strip()]
    asked = [f"SELECT formatQuerySingleLine({quoted(statement)})" for statement in statements]
    found = walled(field, asked, "open", tmp_path)
    assert [text for refused, text in found if refused] == []
    # Nothing is granted but SELECT on the traces.
    assert [statement for statement in statements if statement.startswith("GRANT")] == [
        "GRANT SELECT ON replayground.* TO replayground_people"
    ]


def test_a_question_sees_what_was_inserted_before_it(field: Field, people: PeopleSql) -> None:
    before = people.ask("SELECT count() FROM events").rows[0][0]
    store = Store(field.settings.dsn, DATABASE, threads=1)
    row = store.ask("SELECT max(offset) FROM events WHERE topic = 'steps'").rows[0][0]
    store.insert([{"topic": "steps", "partition": 9, "offset": row + 1, "type": "undecodable", "body": "{}"}])
    store.close()
    assert people.ask("SELECT count() FROM events").rows == [[before + 1]]


def test_a_question_about_one_run_sees_no_other(people: PeopleSql) -> None:
    assert people.ask("SELECT DISTINCT run_id FROM steps ORDER BY 1", None).rows == [["run-0"], ["run-1"]]
    assert people.ask("SELECT DISTINCT run_id FROM steps", "run-1").rows == [["run-1"]]


def test_one_person_cannot_fill_the_queue_for_all(field: Field) -> None:
    small = TracesSettings(dsn=field.settings.dsn, database=DATABASE, sql_waiting_max=4, sql_processes=1)
    asked = PeopleSql(small)
    try:
        ended: list[object] = []
        first = threading.Thread(target=lambda: ended.append(asked.ask("SELECT 1", person="a").rows))
        first.start()
        while not asked.waiting:
            first.join(0.01)
        with pytest.raises(SqlBusy):
            asked.ask("SELECT 1", person="a")
        assert asked.ask("SELECT 2", person="b").rows == [[2]]
        first.join()
        assert ended == [[[1]]]
    finally:
        asked.close()


def test_without_bubblewrap_sql_is_refused_and_not_run(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where programs are looked up is all that differs on a machine that lacks one.
    monkeypatch.setattr("replayground.sandboxes.machine.SYSTEM_PATH", "/nowhere")
    asked = PeopleSql(field.settings)
    try:
        with pytest.raises(SqlRefused, match=r"cannot be walled off here \(bubblewrap is not installed"):
            asked.ask("SELECT 1")
    finally:
        asked.close()
