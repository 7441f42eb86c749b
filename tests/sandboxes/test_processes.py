"""The launcher: its end is the end of its sandboxes, and never the end of the backend."""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from replayground.sandboxes.backends import lacking
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import descendants
from replayground.sandboxes.backends.enclosed import CLEAN_ENVIRONMENT, EnclosedProcesses
from replayground.sandboxes.backends.processes import Launch, Launcher
from replayground.sandboxes.machine import claim_uids
from replayground.sandboxes.protocol import SandboxFailed, SandboxUnavailable
from replayground.sandboxes.tools.registry import SHIPPED

pytestmark = pytest.mark.skipif(lacking("bubblewrap") is not None, reason="bubblewrap is not installed")

# Opens two sandboxes, says so and waits for its end.
PROGRAM = """
import asyncio
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.tools.registry import SHIPPED
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


async def test_a_moment_without_descriptors_spoils_only_that_opening() -> None:
    backend = BubblewrapBackend(SHIPPED, first_uid=309_700)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open("/dev/null", os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limit[1]))
    try:
        # Also the numbers that are free below the limit.
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        with pytest.raises(SandboxFailed, match="could not be compiled"):
            await backend.open(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        for descriptor in held:
            os.close(descriptor)
    await (await backend.open(0)).close()
    backend.close()


async def test_each_of_many_processes_gets_its_own_descriptors() -> None:
    """The launcher keeps a pipe for each, so descriptors arrive there with any number, also one that others move to."""
    launcher = Launcher()
    launch = Launch(command=["/bin/sh", "-c", "read said; echo $said"], environment=CLEAN_ENVIRONMENT)
    started = []
    for _ in range(120):
        ours, theirs = socket.socketpair()
        complaints = os.memfd_create("complaints")
        with theirs:
            started.append((await launcher.start(launch, [theirs.fileno(), complaints]), ours, complaints))
    for number, (_, ours, _) in enumerate(started):
        ours.sendall(f"{number}\n".encode())
    said = []
    for process, ours, complaints in started:
        await process.wait()
        process.release()
        ours.close()
        said.append(os.pread(complaints, 100, 0).decode())
        os.close(complaints)
    launcher.close()
    assert said == [f"{number}\n" for number in range(120)]


async def test_a_witness_tells_when_nothing_could_run_and_ends_with_its_backend() -> None:
    backend = BubblewrapBackend(SHIPPED, first_uid=309_750)
    sandbox = await backend.open(0)
    witness = backend._witness
    assert witness is not None
    groups = groups_of_witness(witness.pid)
    assert witness.is_running
    os.kill(witness.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        while witness.silent_seconds(60) < 0.6:
            assert time.monotonic() - began < 60
            await asyncio.sleep(0.05)
    finally:
        os.kill(witness.pid, signal.SIGCONT)
    # What is over is remembered, and only what lies in the time that was asked for counts.
    await asyncio.to_thread(wait_until, lambda: witness.silent_seconds(0.05) == 0.0)
    assert witness.silent_seconds(60) >= 0.6
    os.kill(witness.pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not witness.is_running)
    assert witness.silent_seconds(60) == 0.0
    again = await backend.open(1)
    assert backend._witness is not witness
    for each in (sandbox, again):
        await each.close()
    pid = backend._witness.pid if backend._witness is not None else 0
    backend.close()
    wait_until_gone({pid})
    assert not any(group.exists() for group in groups)
    assert groups_of_witness(pid) == []


def groups_of_witness(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/*witness-{pid}"))


CLAIM = "from replayground.sandboxes.machine import claim_uids; print(claim_uids(77, 10, 3), flush=True); input()"


async def test_programs_never_share_uids() -> None:
    """More programs than ranges, so that pids cannot tell them apart; the one too many is told."""
    programs = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CLAIM), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        said = [await program.stdout.readline() for program in programs if program.stdout is not None]
        assert sorted(map(int, said)) == [77, 87, 97]
        with pytest.raises(SandboxUnavailable, match="all 3 ranges of uids from 77 on are in use"):
            claim_uids(77, 10, 3)
        programs[0].kill()
        await programs[0].wait()
        assert claim_uids(77, 10, 3) == int(said[0])
    finally:
        for program in programs[1:]:
            program.kill()
            await program.wait()
