"""Statements of people, by command, HTTP or page: a bounded queue before the wall.

The wall is a process for each statement when the store is chDB (sql_wall), and a user of its own when it is a ClickHouse
server (sql_server). At most [traces] sql_waiting_max statements run or wait, a quarter of them of one person; more are
refused at once. One person never has all processes, so that nobody's questions hold up those of others. All of it lives
in a thread of its own: the threads that serve the page are never waiting for a statement of a person.
"""

import asyncio
import threading
from collections import Counter
from typing import Any, Protocol

from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlBusy, SqlRefused
from replayground.consumers.config import TracesSettings


class Wall(Protocol):
    """Runs statements. Belongs to one event loop."""

    async def ask(self, sql: str, run_id: str | None) -> SqlAnswer:
        """The result of one statement, over one run or all. Raises SqlRefused."""
        ...

    async def close(self) -> None:
        """Frees what it holds; no statement is running."""
        ...


class PeopleSql:
    """The queue, thread-safe. Nothing is started before the first statement."""

    def __init__(self, settings: TracesSettings, is_guarded: bool = True) -> None:
        """`is_guarded=False` leaves the door out, for tests that show that the wall holds alone."""
        self._settings = settings
        self._is_guarded = is_guarded
        self._waiting: Counter[str] = Counter()
        self._turns: dict[str, asyncio.Semaphore] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, threading.Thread, Wall] | None = None

    def ask(self, sql: str, run_id: str | None = None, person: str = "") -> SqlAnswer:
        """The result of one statement, over one run or all; blocks. Raises SqlRefused, and SqlBusy at once."""
        loop, wall = self._started()
        return asyncio.run_coroutine_threadsafe(self._ended(wall, sql, run_id, person), loop).result()

    async def asked(self, sql: str, run_id: str | None = None, person: str = "") -> SqlAnswer:
        """As `ask`, for coroutines."""
        loop, wall = self._started()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._ended(wall, sql, run_id, person), loop))

    @property
    def waiting(self) -> int:
        """Statements that run or wait."""
        return self._waiting.total()

    def close(self) -> None:
        """Ends all processes; statements that are running fail."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            loop, thread, wall = running
            asyncio.run_coroutine_threadsafe(self._end(wall), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _started(self) -> tuple[asyncio.AbstractEventLoop, Wall]:
        with self._lock:
            if self._running is None:
                loop = asyncio.new_event_loop()
                wall = _wall(self._settings, self._is_guarded)
                thread = threading.Thread(target=loop.run_forever, name="sql", daemon=True)
                thread.start()
                self._running = loop, thread, wall
            return self._running[0], self._running[2]

    async def _ended(self, wall: Wall, sql: str, run_id: str | None, person: str) -> SqlAnswer:
        """As `_ask`; `close` can end it, and whoever waits for it is told."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await self._ask(wall, sql, run_id, person)
        except asyncio.CancelledError:
            raise SqlRefused("the statement was ended, because the program that runs it is ending") from None
        finally:
            self._tasks.discard(task)

    async def _end(self, wall: Wall) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wall.close()

    async def _ask(self, wall: Wall, sql: str, run_id: str | None, person: str) -> SqlAnswer:
        # In one thread from here on: the counts need no lock.
        most = self._settings.sql_waiting_max
        if self._waiting.total() >= most or self._waiting[person] >= max(1, most // 4):
            raise SqlBusy("too many statements are waiting: try again when some of them are done")
        self._waiting[person] += 1
        turns = self._turns.setdefault(person, asyncio.Semaphore(max(1, self._settings.sql_processes - 1)))
        try:
            async with turns:
                return await wall.ask(sql, run_id)
        finally:
            self._waiting[person] -= 1
            if not self._waiting[person]:
                # Or the names of all persons would stay.
                del self._waiting[person], self._turns[person]


def _wall(settings: TracesSettings, is_guarded: bool) -> Wall:
    if settings.dsn.startswith("chdb:"):
        from replayground.consumers.clickhouse.sql_wall import WalledProcesses

        return WalledProcesses(settings, is_guarded)
    from replayground.consumers.clickhouse.sql_server import ServerUser

    return ServerUser(settings, is_guarded)
