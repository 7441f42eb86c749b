"""Leasing: bounded, warm, clean, and nothing left behind."""

import asyncio
from typing import cast

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.scripted import ScriptedBackend, ScriptedSandbox
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Sandbox, SandboxFailed
from tests.sandboxes.test_contract import kill_and_wait


async def test_pool_is_warm_and_bounded() -> None:
    backend = ScriptedBackend({})
    async with Pool(backend, size=2) as pool:
        assert len(backend.opened) == 2
        inside = most = 0

        async def work() -> None:
            nonlocal inside, most
            async with pool.lease(owner="w", seconds=60):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0)
                inside -= 1

        await asyncio.gather(*(work() for _ in range(20)))
        await pool.settle()
        assert (most, len(backend.opened), pool.leased) == (2, 2, {})
    assert all(sandbox.closed for sandbox in backend.opened)


async def test_opens_on_demand_when_not_warm() -> None:
    backend = ScriptedBackend({})
    async with Pool(backend, size=3, warm=0) as pool:
        assert backend.opened == []
        async with pool.lease(owner="a", seconds=60):
            assert (len(backend.opened), pool.leased) == (1, {0: "a"})


async def test_failed_lease_throws_the_sandbox_away() -> None:
    backend = ScriptedBackend({})
    async with Pool(backend, size=1) as pool:
        with pytest.raises(RuntimeError, match="rollout broke"):
            async with pool.lease(owner="a", seconds=60):
                raise RuntimeError("rollout broke")
        async with pool.lease(owner="b", seconds=60) as second:
            assert second is backend.opened[1]
    assert backend.opened[0].closed


async def test_cancelled_lease_throws_the_sandbox_away() -> None:
    backend = ScriptedBackend({})
    async with Pool(backend, size=1) as pool:
        holding = asyncio.Event()

        async def hold() -> None:
            async with pool.lease(owner="a", seconds=60):
                holding.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(hold())
        await holding.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await pool.settle()
        assert backend.opened[0].closed


async def test_expired_lease_ends_the_sandbox_under_its_owner() -> None:
    backend = ScriptedBackend({"echo": lambda arguments: "x"})
    async with Pool(backend, size=1) as pool:
        async with pool.lease(owner="slow", seconds=0.01) as sandbox:
            await backend.opened[0].closing.wait()
            with pytest.raises(SandboxFailed):
                await sandbox.call("echo", {}, "a")
        async with pool.lease(owner="next", seconds=60) as sandbox:
            assert (await sandbox.call("echo", {}, "a")).content == "x"


async def test_dirty_sandbox_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend({})

    async def not_clean(sandbox: ScriptedSandbox) -> bool:
        return False

    monkeypatch.setattr(ScriptedSandbox, "reset", not_clean)
    async with Pool(backend, size=1) as pool:
        for _ in range(3):
            async with pool.lease(owner="a", seconds=60):
                pass
        await pool.settle()
        assert len(backend.opened) == 3


async def test_open_that_fails_frees_its_slot() -> None:
    class Broken(ScriptedBackend):
        async def open(self, slot: int, apart: bool = False) -> ScriptedSandbox:
            if not self.opened:
                self.opened.append(ScriptedSandbox({}))
                raise SandboxFailed("not today")
            return await super().open(slot, apart)

    async with Pool(Broken({}), size=1, warm=0) as pool:
        with pytest.raises(SandboxFailed, match="not today"):
            async with pool.lease(owner="a", seconds=60):
                pass
        async with pool.lease(owner="a", seconds=60):
            pass


async def test_closed_pool_refuses_waiters() -> None:
    pool = Pool(ScriptedBackend({}), size=1)
    await pool.start()

    async def wait_for_one() -> None:
        async with pool.lease(owner="b", seconds=60):
            pass

    async with pool.lease(owner="a", seconds=60):
        waiting = [asyncio.create_task(wait_for_one()) for _ in range(3)]
        await asyncio.sleep(0)
        await pool.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [SandboxFailed] * 3
    await pool.close()


class SlowToOpen(ScriptedBackend):
    """Opens a sandbox only when it is told to."""

    def __init__(self) -> None:
        super().__init__({"echo": lambda arguments: "x"})
        self.is_opening, self.may_open = asyncio.Event(), asyncio.Event()

    async def open(self, slot: int, apart: bool = False) -> ScriptedSandbox:
        self.is_opening.set()
        await self.may_open.wait()
        return await super().open(slot, apart)


async def test_sandbox_that_opens_after_the_pool_was_closed_is_closed() -> None:
    backend = SlowToOpen()
    pool = Pool(backend, size=1, warm=0)

    async def visit() -> None:
        async with pool.lease(owner="a", seconds=60):
            pass

    visiting = asyncio.create_task(visit())
    await backend.is_opening.wait()
    await pool.close()
    backend.may_open.set()
    with pytest.raises(SandboxFailed, match="the pool is closed"):
        await visiting
    assert [sandbox.closed for sandbox in backend.opened] == [True]


async def test_lease_that_expires_while_it_opens_hands_out_nothing() -> None:
    backend = SlowToOpen()
    async with Pool(backend, size=1, warm=0) as pool, pool.reserve(owner="a", seconds=60) as lease:
        opening = asyncio.create_task(lease.sandbox())
        await backend.is_opening.wait()
        lease.expire()
        backend.may_open.set()
        with pytest.raises(SandboxFailed, match="the lease has run out"):
            await opening
        assert [sandbox.closed for sandbox in backend.opened] == [True]


async def test_an_error_with_one_sandbox_does_not_leave_the_other_unclean(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend({})
    resets: list[ScriptedSandbox] = []

    async def reset(sandbox: ScriptedSandbox) -> bool:
        resets.append(sandbox)
        if sandbox is backend.opened[0]:
            raise OSError("no more descriptors")
        return True

    monkeypatch.setattr(ScriptedSandbox, "reset", reset)
    async with Pool(backend, size=1, warm=0) as pool:
        async with pool.reserve(owner="a", seconds=60) as lease:
            await lease.sandbox()
            await lease.sandbox(apart=True)
        await pool.settle()
        assert resets == backend.opened
        assert backend.opened[0].closed
        assert pool.open == [backend.opened[1]]


async def test_real_sandbox_that_dies_is_replaced(backend: BubblewrapBackend) -> None:
    async def who(sandbox: Sandbox) -> str:
        return (await sandbox.call("python", {"code": "1 + 1"}, "k")).content + sandbox.sandbox_id

    async with Pool(backend, size=1) as pool:
        async with pool.lease(owner="a", seconds=60) as sandbox:
            first = await who(sandbox)
        async with pool.lease(owner="b", seconds=60) as sandbox:
            assert await who(sandbox) == first
            await kill_and_wait(cast(RunnerSandbox, sandbox))
        async with pool.lease(owner="c", seconds=60) as sandbox:
            assert (await who(sandbox))[:1] == "2"
            assert await who(sandbox) != first


async def test_sandbox_that_dies_while_idle_is_not_handed_out(backend: BubblewrapBackend) -> None:
    async with Pool(backend, size=1) as pool:
        idle = pool._sandboxes[0]
        await kill_and_wait(cast(RunnerSandbox, idle))
        async with pool.lease(owner="a", seconds=60) as sandbox:
            assert sandbox.sandbox_id != idle.sandbox_id
            assert (await sandbox.call("python", {"code": "1 + 1"}, "k")).content == "2"
