"""A bounded set of warm sandboxes, leased one owner at a time.

An owner takes a place. A place has a sandbox for the agent's code and, if it is asked for, one *apart*, in which no code
of the agent ever runs. Both belong to the place, so nobody holds one and waits for another.

A sandbox comes back to the pool only after it has reset itself, which happens behind the leaser's back. It is thrown
away, and the place opens a new one on demand, when the lease ended in an exception, ran out of time, or the sandbox
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


class Lease:
    """What one owner has leased. Its sandboxes are opened when they are first asked for."""

    def __init__(self, pool: "Pool", slot: int) -> None:
        self.slot = slot
        self.sandboxes: dict[int, Sandbox] = {}
        """Those that the owner has had, by the number that the backend knows them by."""
        self._pool = pool
        self._has_expired = False

    async def sandbox(self, apart: bool = False) -> Sandbox:
        """The place's sandbox, the same one each time. SandboxFailed when none can be opened, or the lease ran out."""
        if self._has_expired:
            raise SandboxFailed("the lease has run out")
        number = self.slot + (self._pool.size if apart else 0)
        if number not in self.sandboxes:
            self.sandboxes[number] = await self._pool.open_sandbox(number)
        return self.sandboxes[number]

    def expire(self) -> None:
        self._has_expired = True
        self._pool.expire(self)


class Pool:
    """At most `size` places with sandboxes of one backend. Use `async with`, or `start` and `close`."""

    def __init__(self, backend: Backend, size: int, warm: int | None = None) -> None:
        """In `warm` places a sandbox is opened by `start`, in the others on demand; None = in all."""
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
    async def reserve(self, *, owner: str, seconds: float) -> AsyncIterator[Lease]:
        """A place for this owner; waits while all are taken. After `seconds` its sandboxes are closed under the owner,
        whose next call then raises SandboxFailed. SandboxFailed too when the pool is closed."""
        slot = await self._take()
        lease = Lease(self, slot)
        self.leased[slot] = owner
        expiry = asyncio.get_running_loop().call_later(seconds, lease.expire)
        healthy = False
        try:
            yield lease
            healthy = True
        finally:
            expiry.cancel()
            del self.leased[slot]
            self._in_background(self._give_back(lease, healthy))

    @contextlib.asynccontextmanager
    async def lease(self, *, owner: str, seconds: float, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        """A place's sandbox for the agent's code: clean, or with the files of a snapshot.

        Raises as `reserve` does; SandboxFailed when none can be opened; OSError when the snapshot is refused."""
        async with self.reserve(owner=owner, seconds=seconds) as lease:
            sandbox = await lease.sandbox()
            if snapshot is not None:
                await sandbox.restore(snapshot)
            yield sandbox

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
        try:
            self._check_open()
        except SandboxFailed:
            self._free.put_nowait(slot)
            raise
        return slot

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the pool is closed")

    async def open_sandbox(self, number: int) -> Sandbox:
        """The sandbox of this number, or a new one when there is none or it died while nobody used it."""
        sandbox = self._sandboxes.get(number)
        if sandbox is not None and not sandbox.is_alive:
            logger.warning("idle_sandbox_died", extra={"sandbox": sandbox.sandbox_id})
            del self._sandboxes[number]
            await sandbox.close()
            sandbox = None
        if sandbox is None:
            self._check_open()
            sandbox = self._sandboxes[number] = await self.backend.open(number)
        return sandbox

    def expire(self, lease: Lease) -> None:
        for sandbox in lease.sandboxes.values():
            logger.warning("lease_expired", extra={"owner": self.leased.get(lease.slot), "sandbox": sandbox.sandbox_id})
            self._in_background(sandbox.close())

    async def _give_back(self, lease: Lease, healthy: bool) -> None:
        """Reset or throw away, then free the slot, whatever happens."""
        try:
            for number, sandbox in lease.sandboxes.items():
                await self._clean(number, sandbox, healthy)
        finally:
            self._free.put_nowait(lease.slot)

    async def _clean(self, number: int, sandbox: Sandbox, healthy: bool) -> None:
        """It is the pool's again only when it has proved itself clean."""
        self._sandboxes.pop(number, None)
        is_clean = False
        try:
            is_clean = healthy and await sandbox.reset()
        except SandboxFailed as error:
            logger.warning("sandbox_reset_failed", extra={"sandbox": sandbox.sandbox_id, "reason": str(error)})
        finally:
            if is_clean:
                self._sandboxes[number] = sandbox
            else:
                await sandbox.close()

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_finished)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sandbox_not_returned", exc_info=error)
