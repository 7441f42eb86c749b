"""What the wall holds when ClickHouse itself has fallen, and what this program does with an answer that is a weapon."""

import asyncio
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import msgspec
import pytest

from replayground.consumers.clickhouse import sql_wall
from replayground.consumers.clickhouse.people_sql import PeopleSql
from replayground.consumers.clickhouse.sql_answers import SqlBusy, SqlRefused, table_of
from replayground.consumers.clickhouse.sql_snapshot import take_snapshot
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.sandboxes import seccomp
from replayground.sandboxes.machine import SYSTEM_PATH

INTRUDER = Path(__file__).with_name("sql_intruder.py")
PROJECT = Path(__file__).resolve().parents[2]
ABSTRACT = f"replayground-{uuid.uuid4().hex}"
ROW = {"topic": "steps", "partition": 0, "offset": 1, "type": "undecodable", "body": "{}"}
HEAVY = "SELECT count() FROM numbers(100000000000) AS a WHERE NOT ignore(sipHash128(number))"


@pytest.fixture
def settings(chdb_dsn: str) -> Iterator[TracesSettings]:
    database = f"test_{uuid.uuid4().hex}"
    store = Store(chdb_dsn, database, threads=1)
    store.insert([ROW])
    yield TracesSettings(dsn=chdb_dsn, database=database, sql_seconds_max=20)
    store.close()


@pytest.fixture
def unguarded(settings: TracesSettings) -> Iterator[PeopleSql]:
    asked = PeopleSql(settings, is_guarded=False)
    yield asked
    asked.close()


def intrude(settings: TracesSettings, folder: Path, kind: str, port: int) -> object:
    """The first line of the intruder, which is killed as a statement is whose time is over."""
    snapshot, program = folder / "snapshot", folder / "filter"
    snapshot.mkdir()
    take_snapshot(Path(urlparse(settings.dsn).path), settings.database, snapshot)
    program.write_bytes(seccomp.filter_program(runs_agents_code=False))
    jail = sql_wall.jail(snapshot, str(program), settings, ((str(INTRUDER), "/program/intruder.py"),))
    command = [sql_wall.python(), "-I", "-S", "/program/intruder.py", kind, str(port), ABSTRACT]

    async def run() -> object:
        async with jail.launched(command) as launched:
            process = await asyncio.create_subprocess_exec(
                *launched,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": SYSTEM_PATH},
                cwd="/",
            )
            assert process.stdout is not None
            line = await process.stdout.readline()
            process.kill()
            await process.wait()
            return json.loads(line)

    return asyncio.run(run())


def test_code_of_its_own_gets_nowhere(settings: TracesSettings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{ABSTRACT}")
        abstract.listen()
        seen = intrude(settings, tmp_path, "look", listener.getsockname()[1])
    assert isinstance(seen, dict)
    written = seen.pop("written")
    # Python lies below a folder of its own.
    assert set(seen.pop("folders")) <= {Path(sys.base_prefix).parts[1]}
    assert [(name, found) for name, found in seen.items() if found] == []
    kept_in_memory = {folder: mebibytes for folder, mebibytes in written.items() if mebibytes}
    assert set(kept_in_memory) == {"/tmp", "/dev/shm"}
    assert max(kept_in_memory.values()) <= 64


def test_processes_that_ignore_signals_end_with_the_statement(settings: TracesSettings, tmp_path: Path) -> None:
    processes = intrude(settings, tmp_path, "stay", 0)
    assert isinstance(processes, int)
    assert 2 < processes <= sql_wall._THREADS_MAX + 8
    # Found by a file that only they have: the processes of other jails have other ones.
    assert not [line for line in running() if "/program/intruder.py" in line and ABSTRACT in line]


def running() -> Iterator[str]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


@pytest.mark.parametrize(
    ("made", "told"),
    [
        # Quotes that never close: a search that goes back would take hours, with this whole program waiting.
        (
            "concat(repeat(',', 1000000), repeat(',', 1000000), repeat(',', 1000000), '\"', repeat('\\\\\"', 1000000))",
            "values",
        ),
        ('concat(\'{"meta":[{"name":"x"}],"data":[["\', unhex(\'FF\'), \'"]]}\')', "no table"),
        ("concat('{\"meta\":[],\"data\":[', repeat('[', 1000000), ']}')", "no table"),
        ("concat('{\"meta\":[],\"data\":[[', repeat('9', 1000000), ']]}')", "no table"),
        ('concat(\'{"data":[],"meta":[\', repeat(\'{"name":""},\', 100000), \'{"name":""}]}\')', "columns"),
        ("''", "no table"),
    ],
)
def test_an_answer_that_is_made_for_its_reader_is_refused(unguarded: PeopleSql, made: str, told: str) -> None:
    with pytest.raises(SqlRefused, match=told):
        unguarded.ask(f"SELECT {made} FORMAT RawBLOB")


def test_quotes_and_commas_within_strings_are_no_values() -> None:
    text = '[,"' * 1_000_000
    assert table_of(json.dumps({"meta": [{"name": "x"}], "data": [[text]]}).encode()).data == [[text]]


def test_hostile_questions_of_one_person_do_not_hold_up_the_others(settings: TracesSettings) -> None:
    asked = PeopleSql(msgspec.structs.replace(settings, sql_seconds_max=300), is_guarded=False)
    refused: list[SqlRefused] = []

    def ask_heavily() -> None:
        try:
            asked.ask(HEAVY, person="mallory")
        except SqlRefused as error:
            refused.append(error)

    threads = [threading.Thread(target=ask_heavily) for _ in range(20)]
    for thread in threads:
        thread.start()
    while len(refused) + asked.waiting < 20:
        threads[0].join(0.01)
    assert [type(error) for error in refused] == [SqlBusy] * 12
    # None of the eight comes to an end by itself, so this one did not wait for them.
    assert asked.ask("SELECT count() FROM events", person="ann").rows == [[1]]
    assert asked.waiting == 8
    # Whoever waits is told when the program ends.
    asked.close()
    for thread in threads:
        thread.join()
    assert [str(error) for error in refused if not isinstance(error, SqlBusy)] == [
        "the statement was ended, because the program that runs it is ending"
    ] * 8


def test_copies_of_a_program_that_was_killed_are_removed(settings: TracesSettings) -> None:
    copies = Path(f"{urlparse(settings.dsn).path}.sql")
    copies.mkdir(exist_ok=True)
    left, held = copies / "left", copies / "held"
    for folder in (left, held):
        (folder / "metadata").mkdir(parents=True)
    lock = os.open(held, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        asked = PeopleSql(settings)
        assert asked.ask("SELECT 1").rows == [[1]]
        asked.close()
        assert sorted(copies.iterdir()) == [held]
    finally:
        os.close(lock)
    asked = PeopleSql(settings)
    assert asked.ask("SELECT 1").rows == [[1]]
    asked.close()
    assert not copies.exists()


def test_a_store_that_a_strict_umask_has_closed_answers(tmp_path: Path) -> None:
    # In a process of its own: chDB takes one folder for each.
    program = f"""
import os
os.umask(0o077)
from replayground.consumers.clickhouse.people_sql import PeopleSql
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
store = Store("chdb://{tmp_path}/store", "traces", threads=1)
store.insert([{ROW!r}])
asked = PeopleSql(TracesSettings(dsn="chdb://{tmp_path}/store", database="traces"))
print(asked.ask("SELECT count() FROM payloads").rows)
asked.close()
store.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.stdout == "[[1]]\n", done.stderr[-2000:]
    # Only its owner can go into it.
    assert (tmp_path / "store").stat().st_mode & 0o077 == 0
