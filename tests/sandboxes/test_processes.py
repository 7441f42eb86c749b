"""The launcher: its end is the end of its sandboxes, and never the end of the backend."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sandboxes.backends import lacking
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.cgroups import descendants
from sandboxes.backends.enclosed import EnclosedProcesses
from sandboxes.protocol import SandboxFailed
from sandboxes.tools.registry import SHIPPED

pytestmark = pytest.mark.skipif(lacking("bubblewrap") is not None, reason="bubblewrap is not installed")

# Opens two sandboxes, says so and waits for its end.
PROGRAM = """
import asyncio
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.tools.registry import SHIPPED
async def main():
    backend = BubblewrapBackend(SHIPPED, first_uid=309_400)
    sandboxes = [await backend.open(slot) for slot in range(2)]
    daemon = "import os, time\\nif os.fork() == 0:\\n    os.setsid(); time.sleep(600)"
    await sandboxes[0].call("python", {"code": daemon}, "a")
    print("open", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_kill_9_of_the_program_leaves_no_process() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "open\n"
    family = descendants(program.pid) - {program.pid}
    assert len(family) >= 6  # the launcher, and for each sandbox bwrap and the runner, and the daemon
    program.kill()
    program.wait()
    program.stdout.close()
    wait_until_gone(family)


def wait_until_gone(pids: set[int]) -> None:
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "processes outlived their sandbox"
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_killed_launcher_ends_its_sandboxes_and_the_next_open_starts_another() -> None:
    backend = BubblewrapBackend(SHIPPED, first_uid=309_500)
    sandbox = await backend.open(0)
    assert isinstance(sandbox.enclosure, EnclosedProcesses)
    process = sandbox.enclosure.process
    os.kill(parent_of(process.pid), signal.SIGKILL)
    await process.wait()
    with pytest.raises(SandboxFailed):
        await sandbox.call("python", {"code": "1"}, "a")
    await sandbox.close()
    again = await backend.open(0)
    assert (await again.call("python", {"code": "1 + 1"}, "a")).content == "2"
    await again.close()


async def test_cancelled_open_leaves_no_process() -> None:
    backend = BubblewrapBackend(SHIPPED, first_uid=309_600)
    await (await backend.open(0)).close()
    before = descendants(os.getpid())
    for steps in range(12):
        opening = asyncio.create_task(backend.open(0))
        for _ in range(steps):
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
    await asyncio.to_thread(wait_until, lambda: descendants(os.getpid()) <= before)
