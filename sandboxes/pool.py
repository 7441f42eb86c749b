"""A bounded set of warm sandboxes, leased one owner at a time.

A sandbox comes back to the pool only after it has reset itself, which happens behind the leaser's back. It is thrown
away, and the slot opens a new one on demand, when the lease ended in an exception, ran out of time, or the sandbox
cannot prove itself clean.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Self

from sandboxes.protocol import Backend, Sandbox, SandboxFailed

logger = logging.getLogger(__name__)


class Pool:
    """At most `size` sandboxes of one backend. Use `async with`, or `start` and `close`."""

    def __init__(self, backend: Backend, size: int, warm: int | None = None) -> None:
        """`warm` of them are opened by `start`, the others on demand; None = all."""
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.backend = backend
        self.size = size
        self.leased: dict[int, str] = {}
        """Owner by slot, for those who watch."""
        self._warm = size if warm is None else min(warm, size)
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        self._sandboxes: dict[int, Sandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        for slot in reversed(range(size)):
            self._free.put_nowait(slot)

    async def start(self) -> None:
        """Open the warm sandboxes, one after another, so that a machine that cannot says so once. Raises as `open`."""
        for slot in range(self._warm):
            if slot not in self._sandboxes:
                self._sandboxes[slot] = await self.backend.open(slot)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @contextlib.asynccontextmanager
    async def lease(self, *, owner: str, seconds: float, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        """A clean sandbox for this owner, or one with the files of a snapshot; waits while all are taken.

        After `seconds` it is closed under the owner, whose next call then raises SandboxFailed. SandboxFailed too when
        none can be opened or the pool is closed; OSError when the snapshot is refused."""
        slot = await self._take()
        try:
            sandbox = await self._living(slot)
        except BaseException:
            self._free.put_nowait(slot)
            raise
        self.leased[slot] = owner
        expiry = asyncio.get_running_loop().call_later(seconds, self._expire, slot, sandbox)
        healthy = False
        try:
            if snapshot is not None:
                await sandbox.restore(snapshot)
            yield sandbox
            healthy = True
        finally:
            expiry.cancel()
            del self.leased[slot]
            self._in_background(self._give_back(slot, sandbox, healthy))

    async def close(self) -> None:
        """End every sandbox, leased or not. Idempotent."""
        self._closed = True
        await self.settle()
        sandboxes, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    @property
    def open(self) -> list[Sandbox]:
        """The sandboxes that are open now, leased or not."""
        return list(self._sandboxes.values())

    async def settle(self) -> None:
        """Return when no sandbox is being reset or thrown away."""
        while pending := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(pending)

    async def _take(self) -> int:
        """A free slot. While we wait the pool may close; whoever waits behind us must learn it too."""
        slot = await self._free.get()
        if self._closed:
            self._free.put_nowait(slot)
            raise SandboxFailed("the pool is closed")
        return slot

    async def _living(self, slot: int) -> Sandbox:
        """The slot's sandbox, or a new one when there is none or it died while nobody used it."""
        sandbox = self._sandboxes.get(slot)
        if sandbox is not None and not sandbox.is_alive:
            logger.warning("sandbox %s died while idle and is replaced", sandbox.sandbox_id)
            await self._throw_away(slot, sandbox)
            sandbox = None
        if sandbox is None:
            sandbox = self._sandboxes[slot] = await self.backend.open(slot)
        return sandbox

    async def _give_back(self, slot: int, sandbox: Sandbox, healthy: bool) -> None:
        """Reset or throw away, then free the slot, whatever happens."""
        try:
            if not (healthy and await sandbox.reset()):
                await self._throw_away(slot, sandbox)
        except SandboxFailed as error:
            logger.warning("sandbox %s failed its reset and is thrown away: %s", sandbox.sandbox_id, error)
            await self._throw_away(slot, sandbox)
        finally:
            self._free.put_nowait(slot)

    async def _throw_away(self, slot: int, sandbox: Sandbox) -> None:
        self._sandboxes.pop(slot, None)
        await sandbox.close()

    def _expire(self, slot: int, sandbox: Sandbox) -> None:
        logger.warning("the lease of %s on %s ran out", self.leased.get(slot), sandbox.sandbox_id)
        self._in_background(sandbox.close())

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a sandbox could not be given back", exc_info=error)
