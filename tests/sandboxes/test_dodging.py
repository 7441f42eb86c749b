"""Nothing that an agent writes or that its code does ends a rollout by infra_error, which would be retried, not scored."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import descendants
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.enclosed import EnclosedProcesses
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World
from tests.sandboxes.conftest import LIMITS, Run

REFUSED = (
    "at most 4096 bytes|Permission denied|File name too long|UnicodeEncodeError|embedded null byte|not under /work"
)


@contextlib.asynccontextmanager
async def opened(limits: Limits, uid: int) -> AsyncIterator[RunnerSandbox]:
    sandbox = await BubblewrapBackend(SHIPPED | WORLD_TOOLS, limits, first_uid=uid).open(0)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def nested(depth: int) -> Any:
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [101, 500, 900, 990, 1_000, 1_500, 3_000, 100_000])
async def test_arguments_nested_without_end(backend: BubblewrapBackend, depth: int) -> None:
    async with Pool(backend, size=1) as pool, Workbench(pool, toolset(["excel_write"]), seed=1, owner="test") as bench:
        observed = await bench.call("excel_write", {"path": "a.xlsx", "cells": {"A1": nested(depth)}})
        assert (observed.error_kind, observed.content) == (
            "agent",
            "error: the arguments are nested more than 100 deep",
        )


async def test_arguments_of_a_depth_that_is_allowed_arrive(sandbox: RunnerSandbox) -> None:
    result = await sandbox.call("excel_write", {"path": "a.xlsx", "cells": {"A1": nested(98)}}, "deep")
    assert result.error_kind in ("agent", "tool")


@pytest.mark.parametrize("path", ["a" * 2_000_000, "a/" * 1_000_000, "\ud800" * 5_000, "a\0b", "\U0001f600" * 400_000])
async def test_paths_of_any_length_and_encoding(sandbox: RunnerSandbox, path: str) -> None:
    with pytest.raises(OSError, match=REFUSED):
        await sandbox.get(path)
    with pytest.raises(OSError, match=REFUSED):
        await sandbox.put(path, b"x")
    assert (await sandbox.call("python", {"code": "1 + 1"}, path[:20])).content == "2"


async def test_names_that_the_agent_chose_may_be_in_an_error(sandbox: RunnerSandbox, run: Run) -> None:
    await run("import os; name = 'n' * 250\nfor _ in range(15): os.mkdir(name); os.chdir(name)\nos.chmod('.', 0)")
    with pytest.raises(OSError, match=REFUSED):
        await sandbox.get("/".join(["n" * 250] * 15) + "/x")


async def test_more_bytes_than_the_disk_has(sandbox: RunnerSandbox) -> None:
    with pytest.raises(OSError, match="longer than the disk"):
        await sandbox.put("large", bytes(LIMITS.disk_bytes_max + 1))


@pytest.mark.skipif(os.geteuid() != 0, reason="the oom score of another user's process is set")
async def test_a_runner_that_the_kernel_ends_for_the_agents_memory() -> None:
    """Whose process the kernel takes is chance, or the agent's choice: it can lower its own score. Here the runner's is
    raised instead, so that it is taken for certain."""
    limits = Limits(memory_bytes_max=128 * MEBIBYTE, disk_bytes_max=MEBIBYTE, call_timeout_seconds=60)
    async with opened(limits, 316_000) as sandbox:
        enclosure = sandbox.enclosure
        assert isinstance(enclosure, EnclosedProcesses)
        if enclosure.cgroup is None:
            pytest.skip("there is no cgroup here")
        sacrifice_first(descendants(enclosure.process.pid))
        code = """
import os, time
open("/proc/self/oom_score_adj", "w").write("0")
for _ in range(8):
    if os.fork() == 0:
        held = bytearray(b"x" * (30 << 20))
        time.sleep(600)
"""
        first = await sandbox.call("python", {"code": code}, "fill")
        async with asyncio.timeout(120):
            await enclosure.process.wait()
        with pytest.raises(OSError, match="it used more than 128 MiB of memory"):
            await sandbox.get("a")
        with pytest.raises(OSError, match="it used more than 128 MiB of memory"):
            await sandbox.put("a", b"")
        again = await sandbox.call("python", {"code": "1"}, "again")
        assert again.error_kind == "agent"
        assert first.error_kind in (None, "agent")
        assert not await sandbox.reset()


def sacrifice_first(pids: set[int]) -> None:
    for pid in pids:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


async def test_processes_that_burn_the_cpu_time_of_the_runner() -> None:
    limits = Limits(cpu_cores_max=0.06, call_timeout_seconds=600)
    async with opened(limits, 316_100) as sandbox:
        code = """
import os
open("large", "wb").write(os.urandom(1 << 20) * 30)
for _ in range(30):
    if os.fork() == 0:
        while True: pass
"""
        assert (await sandbox.call("python", {"code": code}, "burn")).error_kind is None
        # Either is well: what is not is an infra error.
        with contextlib.suppress(OSError):
            assert len(await sandbox.get("large")) == 30 << 20


@pytest.mark.parametrize("victim", ["bwrap", "runner"])
async def test_a_sandbox_that_is_killed_from_outside_is_still_an_infra_error(victim: str) -> None:
    async with opened(Limits(), 316_200) as sandbox:
        assert isinstance(sandbox.enclosure, EnclosedProcesses)
        code = "import time; open('began', 'w').close(); time.sleep(600)"
        assert (await sandbox.call("python", {"code": "1 + 1"}, "a")).content == "2"
        under_way = asyncio.create_task(sandbox.call("python", {"code": code}, "b"))
        outer = sandbox.enclosure.process.pid
        chain = sorted(descendants(outer))
        await asyncio.sleep(0.2)
        os.kill(outer if victim == "bwrap" else max(chain, key=depth_below(outer)), signal.SIGKILL)
        with pytest.raises(SandboxFailed):
            await under_way


@pytest.mark.parametrize("is_busy_host", [True, False])
async def test_a_silent_runner_is_its_agents_fault_unless_the_host_let_nothing_run(is_busy_host: bool) -> None:
    """The runner is stopped from outside; on a busy host the witness beside it stands still as well."""
    backend = BubblewrapBackend(SHIPPED, Limits(call_timeout_seconds=0.5), first_uid=316_300)
    sandbox = await backend.open(0)
    assert isinstance(sandbox.enclosure, EnclosedProcesses)
    assert backend._witness is not None
    assert (await sandbox.call("python", {"code": "1 + 1"}, "a")).content == "2"
    outer = sandbox.enclosure.process.pid
    runner = max(descendants(outer), key=depth_below(outer))
    stopped = [runner, *([backend._witness.pid] if is_busy_host else [])]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        if is_busy_host:
            with pytest.raises(SandboxFailed, match="did not answer in time"):
                await sandbox.call("python", {"code": "2 + 2"}, "b")
        else:
            silent = await sandbox.call("python", {"code": "2 + 2"}, "b")
            assert (silent.error_kind, "it did not answer in time" in silent.content) == ("agent", True)
    finally:
        # The runner is gone: a sandbox that does not answer is closed.
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped[-1], signal.SIGCONT)
        await sandbox.close()
        backend.close()


async def test_a_response_that_a_held_up_worker_reads_late_counts() -> None:
    """The worker itself could not run while the response came, and its timer fires before it reads."""
    async with opened(Limits(call_timeout_seconds=0.3), 316_400) as sandbox:
        assert (await sandbox.call("python", {"code": "1 + 1"}, "a")).content == "2"
        call = asyncio.create_task(sandbox.call("python", {"code": "import time; time.sleep(0.2); 2 + 2"}, "b"))
        await asyncio.sleep(0.1)
        time.sleep(6.0)  # noqa: ASYNC251  # longer than the time of the call and the grace after it
        assert (await call).content == "4"


def depth_below(outer: int) -> Any:
    """A key for the runner: the child of bwrap, before any session."""

    def key(pid: int) -> tuple[bool, int]:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return (parent == outer, -pid)

    return key


async def test_a_file_in_the_place_of_the_world(pool: Pool) -> None:
    """A tool outside puts files where the agent says, before any code has run in the sandbox."""
    world = World(name="w", tables={"items": Table(("name",), (("panel",),))})
    async with Workbench(pool, toolset(["terminal"]), world, seed=1, owner="test") as bench:
        await bench._put_file("world.sqlite", b"this is no database")
        observed = await bench.call("terminal", {"command": "true"})
        assert observed.error_kind == "agent"
        assert "the world could not be set up" in observed.content


async def test_a_session_that_cannot_be_started_again(sandbox: RunnerSandbox, run: Run) -> None:
    """Nothing of an earlier call makes a later one the fault of the sandbox."""
    for code in (
        "import os; os.chmod('/work', 0); os._exit(1)",
        "import os\nfor n in range(3000): open(f'/tmp/{n}', 'w').close()",
        "import os\nwhile True: os.write(os.open('/tmp/f', os.O_WRONLY | os.O_CREAT | os.O_APPEND), b'x' * 100_000)",
        "import os\nwhile os.fork() or True: pass",
        "import os, signal; os.kill(-1, signal.SIGSTOP)",
        "import os, signal; os.kill(-1, signal.SIGKILL)",
        "import os; os.closerange(0, 64)",
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1, 1)); bytearray(1 << 20)",
        "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        "import gc; [o.close() for o in gc.get_objects() if hasattr(o, 'close') and not isinstance(o, type)]",
        "import builtins; builtins.__dict__.clear()",
        "import os; os.write(3, b'+' * 100_000)",
        "import threading, os; threading.Thread(target=lambda: [os.write(3, bytes(64)) for _ in range(1000)]).start()",
    ):
        await run(code)
    # The thread of the last one may still have written to the socket after its call.
    await run("1")
    assert await run("1 + 1") == "2"


@pytest.fixture
async def pool(backend: BubblewrapBackend) -> AsyncIterator[Pool]:
    async with Pool(backend, size=1, warm=0) as pool:
        yield pool
