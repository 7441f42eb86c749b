"""What a program in a jail of the tools outside can reach: the same jail that holds Chromium and MCP servers."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from replayground.sandboxes.limits import MEBIBYTE
from replayground.sandboxes.outside.jail import Jail, jail_cgroup_root

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


async def run(code: str, jail: Jail | None = None) -> str:
    """Runs Python in the jail; what it printed, or its last words."""
    program = ["/usr/bin/python3", "-I", "-c", code]
    async with asyncio.timeout(120), (jail or Jail(hostname="test")).launched(program) as command:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=-1, stderr=-1, env={"SECRET": "x", "PATH": "/usr/bin"}
        )
        said, complained = await process.communicate()
    return (said or complained).decode().strip().splitlines()[-1]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server on the host's loopback, such as the broker."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_no_network_unless_asked_for(port: int) -> None:
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 30); print('reached')"
    assert await run(connect) == "ConnectionRefusedError: [Errno 111] Connection refused"
    assert await run(connect, Jail(hostname="test", network=True)) == "reached"
    assert "Network is unreachable" in await run("import socket; socket.create_connection(('192.0.2.1', 80), 30)")
    abstract = "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0/tmp/.X11-unix/X0')"
    assert "ConnectionRefusedError" in await run(abstract)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os; print(sorted(os.environ))", "['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']"),
        ("print(b'SECRET' in open('/proc/1/environ', 'rb').read())", "False"),
        (
            "import os; print(os.path.exists('/etc/passwd'), os.path.exists('/home'), os.path.exists('/var'))",
            "False False False",
        ),
        ("import os; print(os.getuid(), len([n for n in os.listdir('/proc') if n.isdecimal()]) <= 3)", "65534 True"),
        (
            "print([line for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))])",
            "NoNewPrivs:\\t1",
        ),
        ("open('/usr/x', 'w')", "Read-only file system"),
        ("open('/x', 'w')", "Read-only file system"),
        ("open('/tmp/x', 'wb').write(bytes(40 << 20))", "No space left on device"),
        ("import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))", "-1"),
        ("import os; os.kill(1, 9); print(os.getppid() >= 0)", "True"),
    ],
)
async def test_nothing_of_the_host(code: str, says: str) -> None:
    assert says in await run(code)


async def test_memory_and_processes_are_limited() -> None:
    jail = Jail(hostname="test", memory_bytes_per_process_max=100 * MEBIBYTE, processes_max=8)
    assert await run("bytearray(300 << 20)", jail) == "MemoryError"
    fork = "import os, time\nfor n in range(50):\n    if os.fork() == 0:\n        time.sleep(60)"
    assert "Resource temporarily unavailable" in await run(fork, jail)


async def test_what_is_readable_is_there_and_cannot_be_changed(tmp_path: Path) -> None:
    """Also below a folder that the jail's own user could not enter."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "note.txt").write_text("hello")
    jail = Jail(hostname="test", readable=((str(hidden), "/srv/notes"),))
    assert await run("print(open('/srv/notes/note.txt').read())", jail) == "hello"
    assert "Read-only file system" in await run("open('/srv/notes/other.txt', 'w')", jail)


@pytest.mark.skipif(jail_cgroup_root() is None, reason="no cgroup can be made here")
async def test_memory_of_all_processes_together_is_limited() -> None:
    """Each stays below the limit of a process; files in memory count too."""
    jail = Jail(hostname="test", memory_bytes_max=200 * MEBIBYTE, disk_bytes_max=128 * MEBIBYTE)
    together = """
import os
open("/tmp/x", "wb").write(bytes(60 << 20))
for _ in range(6):
    if os.fork() == 0:
        kept = os.urandom(40 << 20)
        os.read(os.pipe()[0], 1)
print("ended by signal", os.WTERMSIG(os.waitpid(-1, 0)[1]))
"""
    assert await run(together, jail) == "ended by signal 9"


@pytest.mark.skipif(jail_cgroup_root() is None, reason="no cgroup can be made here")
async def test_nothing_is_left_when_the_block_ends() -> None:
    async with Jail(hostname="test").launched(["/bin/sh", "-c", "echo here; sleep 600"]) as command:
        process = await asyncio.create_subprocess_exec(*command, stdout=-1)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"here\n"
        folders = [Path(word) for word in command[4 : command.index("--")]]
        assert all((folder / "cgroup.procs").read_text() for folder in folders)
    # killed itself, or ended by the death of what runs inside, whichever the sweep of the cgroup came to first
    assert await process.wait() in (-9, 128 + 9)
    assert not any(folder.exists() for folder in folders)
