"""What bubblewrap and gVisor have in common on the host: a process that encloses a runner, a cgroup around it, a stream."""

import abc
import asyncio
import contextlib
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from sandboxes.backends.bundle import RUNNER, Bundle, compile_bundle
from sandboxes.backends.cgroups import Cgroup, CgroupRoot, NoCgroups, Overhead, descendants, find_cgroup_root, kill
from sandboxes.backends.channel import RunnerSandbox
from sandboxes.backends.processes import Launcher, Process
from sandboxes.limits import Limits
from sandboxes.machine import require_installed
from sandboxes.protocol import SandboxFailed, SandboxUnavailable
from sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

CLEAN_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
LIBRARIES = "/opt/libraries"


class EnclosedBackend(abc.ABC):
    """Opens sandboxes of one isolation that know the given tools. A subclass says how the process is started."""

    isolation: str
    leases_per_sandbox_max: int
    """How many leases one sandbox serves, unless told otherwise."""
    programs: Mapping[str, str]
    """What must be installed: Debian package by program."""
    overhead: Overhead
    """What the enclosure itself uses of the cgroup."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None,
        leases_per_sandbox_max: int | None,
        libraries: Path | None,
        cgroups: bool,
    ) -> None:
        """`libraries` is a folder of Python packages for the system's python3, which tools and the agent's code can
        import and nobody can change. Without `cgroups` none is made, even where it could be."""
        self.tools = dict(tools)
        self.limits = limits or Limits()
        self.leases_per_sandbox_max = leases_per_sandbox_max or type(self).leases_per_sandbox_max
        self.libraries = libraries.resolve() if libraries is not None else None
        self.runner_source = RUNNER.read_text()
        self.isolation_notes: tuple[str, ...] = ()
        """What this machine does not give, a sentence each."""
        self._launcher: Launcher | None = None
        self._bundle: asyncio.Task[Bundle] | None = None
        self._home = self._find_cgroup_root() if cgroups else None

    async def open(self, slot: int) -> RunnerSandbox:
        """Start the process and wait until the runner inside knows the tools."""
        self.check_machine()
        bundle = await self._compile_bundle()
        with memory_file("stderr", b"") as complaints:
            sandbox, enclosure = await self._connect(slot, bundle, complaints)
            try:
                await settle_in(sandbox, enclosure, bundle)
            except (SandboxFailed, OSError) as error:
                if isinstance(error, SandboxUnavailable):
                    raise
                complaints.seek(0)
                said = complaints.read(4096).decode(errors="replace").strip()
                raise SandboxFailed(f"{self.isolation} did not start: {said or error}") from error
            return sandbox

    def check_machine(self) -> None:
        """SandboxUnavailable, with what to do, when this machine cannot open such a sandbox."""
        require_installed(self.programs)
        if self.libraries is not None and not self.libraries.is_dir():
            raise SandboxUnavailable(
                f"the libraries for tools are not installed: there is no folder {self.libraries}: make setup"
            )

    def close(self) -> None:
        """End the launcher, and with it every sandbox that is still open. Happens by itself when this is forgotten."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None

    @abc.abstractmethod
    async def start(
        self, launcher: Launcher, slot: int, bundle: Bundle, connection: socket.socket, complaints: BinaryIO
    ) -> "StartedProcess":
        """Start the process whose descriptor 0 is the connection. SandboxFailed when it cannot be."""

    async def _connect(
        self, slot: int, bundle: Bundle, complaints: BinaryIO
    ) -> tuple[RunnerSandbox, "EnclosedProcesses"]:
        ours, theirs = socket.socketpair()
        with theirs:  # closed at once, else the end of the runner would not be the end of the stream
            try:
                enclosure = await self._enclose(slot, bundle, theirs, complaints)
            except BaseException:
                ours.close()
                raise
        stream = await asyncio.open_connection(sock=ours)
        leases = self.leases_per_sandbox_max
        return RunnerSandbox(self.isolation, enclosure, stream, self.tools, self.limits, leases), enclosure

    async def _enclose(
        self, slot: int, bundle: Bundle, connection: socket.socket, complaints: BinaryIO
    ) -> "EnclosedProcesses":
        if self._launcher is None or self._launcher.is_gone:
            self._launcher = Launcher()
        cgroup = self._new_cgroup()
        try:
            started = await self.start(self._launcher, slot, bundle, connection, complaints)
        except BaseException:
            if cgroup is not None:
                cgroup.remove()
            raise
        return EnclosedProcesses(started, cgroup)

    def _new_cgroup(self) -> Cgroup | None:
        try:
            return Cgroup(self._home, self.limits, self.overhead) if self._home is not None else None
        except OSError as error:
            raise SandboxFailed(f"the sandbox gets no cgroup: {error}") from error

    async def _compile_bundle(self) -> Bundle:
        """Once for the backend; an attempt that failed does not count."""
        if self._bundle is None:
            self._bundle = asyncio.create_task(compile_bundle(self.tools, self.runner_source))
        try:
            return await asyncio.shield(self._bundle)
        except SandboxUnavailable:
            self._bundle = None
            raise

    def _find_cgroup_root(self) -> CgroupRoot | None:
        try:
            return find_cgroup_root()
        except (NoCgroups, OSError) as error:
            self.isolation_notes = (f"no limit covers a {self.isolation} sandbox as a whole: no cgroup, as {error}",)
            logger.warning("cgroups_unavailable", extra={"reason": self.isolation_notes[0]})
            return None


class StartedProcess:
    """A process that encloses a runner, and what is to be removed after its end."""

    def __init__(self, process: Process, folder: Path | None = None) -> None:
        self.process = process
        self.folder = folder


class EnclosedProcesses:
    """Everything that runs for one sandbox, and the cgroup it is in, if any."""

    def __init__(self, started: StartedProcess, cgroup: Cgroup | None) -> None:
        self.process = started.process
        self.cgroup = cgroup
        self._folder = started.folder
        self._last_excess: str | None = None

    @property
    def is_running(self) -> bool:
        return self.process.is_running

    def used_up(self) -> str | None:
        """After the end it is still known what led to it."""
        if self.cgroup is not None and (excess := self.cgroup.exceeded()):
            return excess
        excess, self._last_excess = self._last_excess, None
        return excess

    async def adopt(self) -> None:
        """Put into the cgroup what is not yet there. In a thread, because the kernel may take 20 ms to do it."""
        if self.cgroup is not None:
            strangers = descendants(self.process.pid) - self.cgroup.members()
            if strangers:
                await asyncio.to_thread(self.cgroup.adopt, strangers)

    def check_adopted(self) -> None:
        if self.cgroup is not None and not descendants(self.process.pid) <= self.cgroup.members():
            raise SandboxFailed("a process of the sandbox is not in its cgroup")

    async def end(self) -> None:
        """Kill the process; all inside dies with it. Where there is a cgroup, this returns when all have ended;
        otherwise some may end a moment later."""
        if self.cgroup is None and self.is_running:
            kill(descendants(self.process.pid))
        self.process.kill()
        await self.process.wait()
        if self.cgroup is not None:
            self._last_excess = self.cgroup.exceeded() or self._last_excess
            try:
                await self.cgroup.sweep()
            except TimeoutError:
                logger.error("process_not_killed", extra={"cgroup": str(self.cgroup.folders[0])})
        self.process.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


async def settle_in(sandbox: RunnerSandbox, enclosure: EnclosedProcesses, bundle: Bundle) -> None:
    """Greet the runner while the cgroup takes it in. No code of an agent runs before both are done."""
    adopting = asyncio.create_task(enclosure.adopt())
    try:
        await sandbox.greet(bundle.tools)
        await adopting
        await enclosure.adopt()
        enclosure.check_adopted()
    except BaseException:
        await asyncio.gather(adopting, return_exceptions=True)
        await sandbox.close()
        raise


@contextlib.contextmanager
def memory_file(name: str, data: bytes) -> Iterator[BinaryIO]:
    """An anonymous file with this content, read from its start."""
    with open(os.memfd_create(name), "w+b") as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield file


def system_links() -> list[str]:
    """Top folders that are links into /usr on this machine, such as /lib64."""
    return [name for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if os.path.islink(f"/{name}")]
