"""Processes started by a launcher (launcher.py) and watched by pidfd, from one asyncio program."""

import asyncio
import contextlib
import os
import select
import signal
import socket
import sys
import weakref
from pathlib import Path

import msgspec

from sandboxes.protocol import SandboxFailed

LAUNCHER = Path(__file__).with_name("launcher.py")
PACKET_BYTES_MAX = 1 << 16


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher is to start."""

    command: list[str]
    environment: dict[str, str]
    user: int | None = None
    """As root: the uid to become, after the disk has been mounted."""
    disk_options: str = ""
    libraries: str = ""


class Process:
    """A child of the launcher. Its pidfd names it and no other, also after its end."""

    def __init__(self, pid: int, pidfd: int, launcher: "Launcher") -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._launcher = launcher  # which ends its children when it is forgotten

    @property
    def is_running(self) -> bool:
        if self._pidfd < 0:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return not poller.poll(0)

    def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        """Return when it has ended."""
        while self.is_running:
            await readable(self._pidfd)

    def release(self) -> None:
        """Forget it. Only after it has ended."""
        descriptor, self._pidfd = self._pidfd, -1
        if descriptor >= 0:
            os.close(descriptor)


class Launcher:
    """The host's end of one launcher process. It ends, with all that it started, when this object is forgotten."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", str(LAUNCHER)],
                {"LANG": "C.UTF-8"},
                file_actions=[(os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)],
            )
        ours.setblocking(False)
        self._channel = ours
        self._turn = asyncio.Lock()
        self.close = weakref.finalize(self, end_launcher, ours, pid)

    @property
    def is_gone(self) -> bool:
        poller = select.poll()
        poller.register(self._channel, select.POLLHUP)
        return bool(poller.poll(0))

    async def start(self, launch: Launch, descriptors: list[int]) -> Process:
        """Hand over the request with its descriptors. SandboxFailed when nothing was started."""
        exchange = asyncio.create_task(self._exchange(launch, [os.dup(descriptor) for descriptor in descriptors]))
        try:
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            exchange.add_done_callback(end_unwanted)
            raise

    async def _exchange(self, launch: Launch, descriptors: list[int]) -> Process:
        try:
            async with self._turn:
                socket.send_fds(self._channel, [msgspec.json.encode(launch)], descriptors)
                await readable(self._channel.fileno())
                answer, received, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, 1)
        except OSError as error:
            raise SandboxFailed(f"the launcher of sandboxes is gone: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not received:
            raise SandboxFailed(f"the sandbox was not started: {answer.decode() or 'the launcher is gone'}")
        return Process(int(answer), received[0], self)


def end_unwanted(exchange: "asyncio.Task[Process]") -> None:
    if not exchange.cancelled() and exchange.exception() is None:
        exchange.result().kill()
        exchange.result().release()


def end_launcher(channel: socket.socket, pid: int) -> None:
    channel.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def readable(descriptor: int) -> None:
    """Return when the descriptor can be read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    watched = os.dup(descriptor)  # a number of its own, so that two may wait for one descriptor

    def finish() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(watched, finish)
    try:
        await ready
    finally:
        loop.remove_reader(watched)
        os.close(watched)
