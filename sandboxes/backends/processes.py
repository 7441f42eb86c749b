"""Processes that a launcher (launcher.py) starts and one asyncio program watches by pidfd."""

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

from replayground.sandboxes.protocol import SandboxFailed

LAUNCHER = Path(__file__).with_name("launcher.py")
PACKET_BYTES_MAX = 1 << 16


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the launcher: what to start, and how."""

    command: list[str]
    environment: dict[str, str]
    user: int | None = None
    """The uid to change to after the disk has been mounted; None when the launcher is not root, or for gVisor."""
    disk_options: str = ""
    libraries: str = ""
    devices: tuple[str, ...] = ()
    cgroup_entrances: tuple[str, ...] = ()
    """Files into which the process writes itself before it does anything else."""


class Process:
    """A child of the launcher. Its pidfd identifies it also after its end, when the pid may be reused."""

    def __init__(self, pid: int, pidfd: int, pipe: int, launcher: "Launcher") -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._pipe = pipe
        # A reference: a launcher that is garbage collected ends, and bwrap with it.
        self._launcher = launcher

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
        """Wait until it has ended."""
        while self.is_running:
            await readable(self._pidfd)

    async def exit_code(self) -> int | None:
        """Wait until it has ended: its exit code, or -N for signal N. None when the launcher ended before it."""
        await readable(self._pipe)
        written = os.read(self._pipe, 16)
        return int(written) if written else None

    def release(self) -> None:
        """Close the descriptors. Only after the process has ended: from then on `kill` does nothing."""
        descriptors, self._pidfd, self._pipe = (self._pidfd, self._pipe), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)


class Launcher:
    """The host's end of one launcher process, which ends when this object is closed or garbage collected."""

    def __init__(self) -> None:
        # SEQPACKET keeps requests apart, each with its descriptors.
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
        """Send the request with its descriptors and wait for the process. SandboxFailed when nothing was started."""
        # Copies of the descriptors: a cancelled caller closes its own while the request is still under way.
        exchange = asyncio.create_task(self._exchange(launch, [os.dup(descriptor) for descriptor in descriptors]))
        try:
            # Shielded: a response that nobody reads would be taken for that of the next request.
            return await asyncio.shield(exchange)
        except asyncio.CancelledError:
            # The process may be starting right now, and nobody else knows of it.
            exchange.add_done_callback(end_unwanted)
            raise

    async def _exchange(self, launch: Launch, descriptors: list[int]) -> Process:
        try:
            async with self._turn:
                socket.send_fds(self._channel, [msgspec.json.encode(launch)], descriptors)
                await readable(self._channel.fileno())
                answer, received, _, _ = socket.recv_fds(self._channel, PACKET_BYTES_MAX, 2)
        except OSError as error:
            raise SandboxFailed(f"the sandbox launcher has ended: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if not received:
            raise SandboxFailed(f"the sandbox was not started: {answer.decode() or 'the launcher has ended'}")
        return Process(int(answer), received[0], received[1], self)


def end_unwanted(exchange: "asyncio.Task[Process]") -> None:
    if not exchange.cancelled() and exchange.exception() is None:
        exchange.result().kill()
        exchange.result().release()


def end_launcher(channel: socket.socket, pid: int) -> None:
    # The launcher reads the end of its input and returns.
    channel.close()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


async def readable(descriptor: int) -> None:
    """Wait until the descriptor is readable."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    # A copy, because the event loop keeps one reader for each number: two may wait for the same process.
    watched = os.dup(descriptor)

    def finish() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(watched, finish)
    try:
        await ready
    finally:
        loop.remove_reader(watched)
        os.close(watched)
