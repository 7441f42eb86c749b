"""The wall of people's SQL: every statement runs in a process of its own that the kernel holds.

Promise P12: a person's SQL can read the views of traces and do nothing else, whatever it says. The process
(sql_process) is in the jail that the project has for programs of others (sandboxes.outside.jail): another user, its own
namespaces, no network, no file but Python, chDB and a read-only copy of the store, an empty environment, a filter of
system calls, a cgroup and rlimits. It is started by exec, so that nothing of this program's memory is in it; it answers
one statement and ends, or is killed when its time is over. The parser (sql_guard) is only the door.

From the first statement on, one process is kept ready, without data: the copy of the store is made when a statement
arrives, so that a result is as new as the store at that moment.

Not covered: where no cgroup can be made, memory is limited by rlimit alone. A kernel bug is a way out.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import msgspec
import structlog

from replayground.consumers.clickhouse import sql_guard, sql_process
from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlRefused, table_of
from replayground.consumers.clickhouse.sql_snapshot import SnapshotFailed, take_snapshot
from replayground.consumers.config import TracesSettings
from replayground.sandboxes import seccomp
from replayground.sandboxes.limits import MEBIBYTE
from replayground.sandboxes.machine import SYSTEM_PATH
from replayground.sandboxes.outside.jail import Jail
from replayground.sandboxes.protocol import SandboxFailed

_START_SECONDS_MAX = 60.0
# Over the time limit that ClickHouse has itself, so that its own sentence comes first.
_GRACE_SECONDS = 2.0
_HEADER_BYTES_MAX = 64 * 1024
# Of chDB itself, before it has read a row.
_OVERHEAD_BYTES = 768 * MEBIBYTE
_THREADS_MAX = 512
# Where the jail shows our two files and the packages of chDB.
_PROGRAM, _PACKAGES = "/program", "/packages"
PATHS = f"import sys; sys.path[:0] = ['{_PROGRAM}', '{_PACKAGES}']"
_START = f"{PATHS}; from {sql_process.__name__} import main; main()"

_log = structlog.get_logger(__name__)


class _Header(msgspec.Struct):
    """What the process says about its result. Read as text of a stranger: it may be a statement's work."""

    error: str | None = None
    bytes: int = 0


class WalledProcesses:
    """Answers statements by a process each. Belongs to one event loop."""

    def __init__(self, settings: TracesSettings, is_guarded: bool) -> None:
        self._settings = settings
        self._store = Path(urlparse(settings.dsn).path)
        self._is_guarded = is_guarded
        self._turns = asyncio.Semaphore(settings.sql_processes)
        self._ready: asyncio.Task[_Process] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        # Beside the store: hard links do not reach another file system.
        self._copies = self._store.with_name(f"{self._store.name}.sql")
        _remove_left_behind(self._copies)
        self._filter = tempfile.NamedTemporaryFile(prefix="sql-seccomp-")  # noqa: SIM115
        self._filter.write(seccomp.filter_program(runs_agents_code=False))
        self._filter.flush()

    async def ask(self, sql: str, run_id: str | None) -> SqlAnswer:
        """The result of one statement, over one run or all. Raises SqlRefused."""
        reason = sql_guard.too_long(sql) if self._is_guarded else None
        if reason is not None:
            raise SqlRefused(reason)
        async with self._turns:
            process = await self._take()
            try:
                return await self._answer(process, sql, run_id)
            finally:
                # The next statement need not wait for the end of this process.
                self._later(process.close())
                if self._ready is None:
                    self._ready = asyncio.create_task(self._start())

    async def close(self) -> None:
        if self._ready is not None:
            with contextlib.suppress(SqlRefused):
                await (await self._ready).close()
        await asyncio.gather(*self._ending)
        # Not empty while another program asks about the same store.
        with contextlib.suppress(OSError):
            self._copies.rmdir()
        self._filter.close()

    async def _take(self) -> "_Process":
        ready, self._ready = self._ready, None
        process = await (ready if ready is not None else self._start())
        if process.is_running:
            return process
        # It was killed while it waited.
        await process.close()
        return await self._start()

    async def _start(self) -> "_Process":
        folder, lock = _folder_for_copy(self._copies)
        process = _Process(folder, lock, jail(folder, self._filter.name, self._settings))
        try:
            await process.start()
        except BaseException:
            await process.close()
            raise
        return process

    async def _answer(self, process: "_Process", sql: str, run_id: str | None) -> SqlAnswer:
        taken = time.monotonic()
        try:
            await asyncio.to_thread(take_snapshot, self._store, self._settings.database, process.folder)
        except SnapshotFailed as error:
            raise SqlRefused(str(error)) from error
        seconds = self._settings.sql_seconds_max
        try:
            async with asyncio.timeout(seconds + _GRACE_SECONDS):
                found = await process.ask(self._request(sql, run_id), self._settings.sql_bytes_max)
        except TimeoutError:
            raise SqlRefused(f"the statement took longer than {seconds:g} s and was ended") from None
        result = await asyncio.to_thread(table_of, found)
        age = round(time.monotonic() - taken, 3)
        return SqlAnswer(columns=[column.name for column in result.meta], rows=result.data, age_seconds=age)

    def _request(self, sql: str, run_id: str | None) -> dict[str, Any]:
        settings = self._settings
        return {
            "sql": sql,
            "database": settings.database,
            "run_id": run_id,
            "is_guarded": self._is_guarded,
            # The jail holds the process to cores; this is the last resort where it has no cgroup.
            "cpu_seconds_max": round((settings.sql_seconds_max + 2 * _GRACE_SECONDS) * settings.threads),
            # Limits of ClickHouse give a better sentence than a killed process. Nothing depends on them.
            "settings": {
                "limit": str(settings.sql_rows_max + 1),
                "max_result_bytes": str(settings.sql_bytes_max),
                "max_execution_time": str(max(1, round(settings.sql_seconds_max))),
                "max_memory_usage": str(settings.sql_memory_bytes_max),
                "max_threads": str(settings.threads),
                "readonly": "1",
            },
        }

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Process:
    """One process in its jail, with a folder that is its view of the store."""

    def __init__(self, folder: Path, lock: int, jail: Jail) -> None:
        self.folder = folder
        self._lock = lock
        self._jail = jail
        self._held = contextlib.AsyncExitStack()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts it and waits until it has loaded chDB. Raises SqlRefused when there can be no wall here."""
        try:
            command = await self._held.enter_async_context(self._jail.launched([python(), "-I", "-S", "-c", _START]))
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": SYSTEM_PATH},
                cwd="/",
                limit=_HEADER_BYTES_MAX,
            )
            async with asyncio.timeout(_START_SECONDS_MAX):
                if await self._line() == b"ready\n":
                    return
                assert self._process.stderr is not None
                complaint = (await self._process.stderr.read(2000)).decode(errors="replace").strip()
        except (SandboxFailed, OSError, TimeoutError) as error:
            complaint = str(error) or f"no answer in {_START_SECONDS_MAX:.0f} s"
        _log.error("sql_wall_unavailable", reason=complaint)
        raise SqlRefused(
            f"SQL is refused, because its process cannot be walled off here ({' '.join(complaint.split())[:300]}): "
            "see `replayground doctor`"
        )

    async def ask(self, request: dict[str, Any], bytes_max: int) -> bytes:
        """The bytes of the result. Raises SqlRefused."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            await self._process.stdin.drain()
        try:
            header = msgspec.json.decode(await self._line(), type=_Header)
            if header.error is not None:
                raise SqlRefused(header.error)
            if not 0 <= header.bytes <= bytes_max:
                raise SqlRefused(f"the result is larger than {bytes_max / MEBIBYTE:g} MiB")
            return await self._process.stdout.readexactly(header.bytes)
        except (msgspec.DecodeError, asyncio.IncompleteReadError):
            raise SqlRefused(
                "the statement ended its process: it used too much memory or processor time, or met an error of ClickHouse"
            ) from None

    async def close(self) -> None:
        """Kills it, waits for its end and removes its copy of the store. Never raises for one that is dead."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            # asyncio closes the pipes of a killed process by itself, but not the one that nobody has read to its end.
            self._process._transport.close()  # type: ignore[attr-defined]
        await self._held.aclose()
        await asyncio.to_thread(shutil.rmtree, self.folder, True)
        os.close(self._lock)

    async def _line(self) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline()
        # Longer than the limit of the stream.
        except ValueError:
            return b""


def _folder_for_copy(parent: Path) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds a lock on it for as long as this program lives."""
    parent.mkdir(mode=0o700, exist_ok=True)
    with _held(parent):
        folder = Path(tempfile.mkdtemp(dir=parent))
        # Shown in the jail alone, by a mount: the folder above is closed to others.
        folder.chmod(0o755)
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _remove_left_behind(parent: Path) -> None:
    """Removes the copies of programs that were killed: their hard links would keep parts on the disk for ever."""
    if not parent.is_dir():
        return
    with _held(parent):
        for folder in parent.iterdir():
            with contextlib.suppress(BlockingIOError), _held(folder, fcntl.LOCK_NB):
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _held(folder: Path, how: int = 0) -> Iterator[None]:
    """Raises BlockingIOError with LOCK_NB when another program holds it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield
    finally:
        os.close(lock)


def jail(folder: Path, seccomp_file: str, settings: TracesSettings, more: tuple[tuple[str, str], ...] = ()) -> Jail:
    """The walls around a process that sees this folder as the copy of the store. `more` is readable too."""
    chdb = find_spec("chdb")
    assert chdb is not None
    assert chdb.origin is not None
    packages = Path(chdb.origin).parent.parent
    return Jail(
        hostname="sql",
        readable=(
            (sys.base_prefix, sys.base_prefix),
            *((str(packages / name), f"{_PACKAGES}/{name}") for name in ("chdb", "chdb_core.libs")),
            *((str(module.__file__), _inside(module.__name__)) for module in (sql_guard, sql_process)),
            (str(folder), sql_process.SNAPSHOT),
            *more,
        ),
        seccomp_file=seccomp_file,
        memory_bytes_per_process_max=settings.sql_memory_bytes_max + 4 * _OVERHEAD_BYTES,
        memory_bytes_max=settings.sql_memory_bytes_max + _OVERHEAD_BYTES,
        cpu_cores_max=float(settings.threads),
        processes_max=_THREADS_MAX,
        disk_bytes_max=64 * MEBIBYTE,
    )


def _inside(module: str) -> str:
    return f"{_PROGRAM}/{module.replace('.', '/')}.py"


def python() -> str:
    # Not sys.executable: that of a virtual environment lies outside of what the jail shows.
    return str(Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}"))
