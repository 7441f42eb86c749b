"""A bounded set of warm sandboxes, each leased to one owner at a time.

An owner leases a slot. A slot has a sandbox for the agent's code and, on demand, a second one *apart*, in which no code
of the agent ever runs. Both belong to the slot: an owner of one never waits for the other, so owners cannot deadlock.

A sandbox is reset in the background after its lease and returns to the pool only if the reset verified that it is
clean. It is closed, and the slot opens a new one on demand, when the lease ended in an exception, when it expired, or
when the reset failed.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from types import TracebackType
from typing import Any, Self

from replayground.sandboxes.protocol import Backend, Sandbox, SandboxFailed

logger = logging.getLogger(__name__)

ROOM_POLL_SECONDS = 0.05


class Lease:
    """The exclusive use of one slot by one owner. Its sandboxes are opened at the first request."""

    def __init__(self, pool: "Pool", slot: int) -> None:
        self.slot = slot
        self.sandboxes: dict[int, Sandbox] = {}
        """The sandboxes opened so far, by the slot number that the backend was given."""
        self._pool = pool
        self._has_expired = False

    async def sandbox(self, apart: bool = False) -> Sandbox:
        """The sandbox of this slot, the same each time. SandboxFailed if it cannot be opened or the lease has expired."""
        self._check_time()
        # Backends number sandboxes from 0; those apart follow after all ordinary ones.
        number = self.slot + (self._pool.size if apart else 0)
        if number not in self.sandboxes:
            sandbox = await self._pool.open_sandbox(number, apart)
            # Kept in any case, so that giving the lease back ends it.
            self.sandboxes[number] = sandbox
            # It may have run out while the sandbox was being opened: `expire` could not close what was not there yet.
            try:
                self._check_time()
            except SandboxFailed:
                await sandbox.close()
                raise
        return self.sandboxes[number]

    def _check_time(self) -> None:
        if self._has_expired:
            raise SandboxFailed("the lease has run out")

    def expire(self) -> None:
        self._has_expired = True
        self._pool.expire(self)


class Pool:
    """At most `size` slots with sandboxes of one backend. Use `async with`, or `start` and `close`."""

    def __init__(self, backend: Backend, size: int, warm: int | None = None) -> None:
        """`start` opens sandboxes in the first `warm` slots (None: in all); the other slots open theirs on demand."""
        if size < 1:
            raise ValueError(f"a pool needs at least one slot, not {size}")
        self.backend = backend
        self.size = size
        self.leased: dict[int, str] = {}
        """Owner by slot, for metrics and tests."""
        self._warm = size if warm is None else min(warm, size)
        # Last in, first out: a slot that was just used has a warm sandbox, an unused one may not have any yet.
        self._free: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        self._sandboxes: dict[int, Sandbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        for slot in reversed(range(size)):
            self._free.put_nowait(slot)

    async def start(self) -> None:
        """Open the warm sandboxes. Raises what `Backend.open` raises."""
        # One after another, so that a machine that cannot open sandboxes reports it once and not once for each slot.
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
        """Lease a slot; waits while all are taken, or while the machine has no room for one more. After `seconds` its
        sandboxes are closed and the owner's next call raises SandboxFailed. Raises SandboxFailed when the pool is
        closed."""
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
            # In the background: the owner may have been cancelled, and it should not wait for the reset.
            self._in_background(self._give_back(lease, healthy))

    @contextlib.asynccontextmanager
    async def lease(self, *, owner: str, seconds: float, snapshot: bytes | None = None) -> AsyncIterator[Sandbox]:
        """Lease a slot and open its sandbox for the agent's code: empty, or with the files of a snapshot.

        Raises as `reserve` does; SandboxFailed when no sandbox can be opened; OSError when the snapshot is refused."""
        async with self.reserve(owner=owner, seconds=seconds) as lease:
            sandbox = await lease.sandbox()
            if snapshot is not None:
                await sandbox.restore(snapshot)
            yield sandbox

    async def close(self) -> None:
        """Close every sandbox, leased or not. Waits for resets that are under way. Idempotent."""
        # First, so that no waiter of `_take` gets a slot while the resets are awaited.
        self._closed = True
        await self.settle()
        sandboxes, self._sandboxes = list(self._sandboxes.values()), {}
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    @property
    def open(self) -> list[Sandbox]:
        """The sandboxes that are open now, leased or not."""
        return list(self._sandboxes.values())

    async def settle(self) -> None:
        """Wait until no sandbox is being reset or closed in the background."""
        # A loop: while these are awaited, further leases may end and start more.
        while pending := {task for task in self._tasks if not task.done()}:
            await asyncio.wait(pending)

    async def _take(self) -> int:
        """Wait for a free slot and for room. Raises SandboxFailed when the pool was closed meanwhile."""
        slot = await self._free.get()
        try:
            # A pool without a lease goes ahead in any case: what it would wait for may never end.
            while not self._closed and self.leased and not self.backend.has_room():  # noqa: ASYNC110  # nobody tells
                await asyncio.sleep(ROOM_POLL_SECONDS)
            self._check_open()
        except BaseException:
            # Put back, so that the next waiter wakes up and sees the closed pool too; otherwise it waits for ever.
            self._free.put_nowait(slot)
            raise
        return slot

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxFailed("the pool is closed")

    async def open_sandbox(self, number: int, apart: bool) -> Sandbox:
        """The sandbox of this number; a new one when there is none or it died while idle. Raises as `Backend.open`."""
        sandbox = self._sandboxes.get(number)
        if sandbox is not None and not sandbox.is_alive:
            logger.warning("idle_sandbox_died", extra={"sandbox": sandbox.sandbox_id})
            del self._sandboxes[number]
            await sandbox.close()
            sandbox = None
        if sandbox is None:
            self._check_open()
            sandbox = await self.backend.open(number, apart)
            # The pool was closed meanwhile, and `close` could not know of this one.
            if self._closed:
                await sandbox.close()
                self._check_open()
            self._sandboxes[number] = sandbox
        return sandbox

    def expire(self, lease: Lease) -> None:
        for sandbox in lease.sandboxes.values():
            logger.warning("lease_expired", extra={"owner": self.leased.get(lease.slot), "sandbox": sandbox.sandbox_id})
            self._in_background(sandbox.close())

    async def _give_back(self, lease: Lease, healthy: bool) -> None:
        """Reset or close the sandboxes of a lease, then free its slot."""
        # Each by itself: an error with one must not leave the other in the pool as it is.
        cleaning = (self._clean(number, sandbox, healthy) for number, sandbox in lease.sandboxes.items())
        ends = await asyncio.gather(*cleaning, return_exceptions=True)
        # Also after an error: a slot that is not freed shrinks the pool for ever.
        self._free.put_nowait(lease.slot)
        for end in ends:
            if isinstance(end, BaseException):
                raise end

    async def _clean(self, number: int, sandbox: Sandbox, healthy: bool) -> None:
        """Return a sandbox to the pool if its reset verified that it is clean; close it otherwise."""
        # Removed before the reset: should the reset raise, nobody is given a sandbox in an unknown state.
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
        # The event loop keeps only weak references to tasks.
        self._tasks.add(task)
        task.add_done_callback(self._on_finished)

    def _on_finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("sandbox_not_returned", exc_info=error)
