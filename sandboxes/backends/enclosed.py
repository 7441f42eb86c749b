"""What bubblewrap and gVisor share on the host: a process with a runner inside, a cgroup around it, a stream to it."""

import abc
import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from replayground.sandboxes.backends.bundle import RUNNER, Bundle, compile_bundle
from replayground.sandboxes.backends.cgroups import (
    Cgroup,
    CgroupRoot,
    NoCgroups,
    Overhead,
    ParentGroup,
    descendants,
    find_cgroup_root,
    kill,
    memory_of,
)
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.processes import Launcher, Process
from replayground.sandboxes.backends.witness import Witness
from replayground.sandboxes.limits import Limits, Totals
from replayground.sandboxes.machine import require_installed
from replayground.sandboxes.protocol import SandboxFailed, SandboxUnavailable
from replayground.sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

CLEAN_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
LIBRARIES = "/opt/libraries"
# How long a process whose runner has gone may take to end.
LAST_MOMENT_SECONDS = 2.0
# Of a process that is forked before its parent is adopted, only the next listing knows.
ADOPTIONS_MAX = 10
# The part of a time for which the witness must have been silent to show that the host kept sandboxes from running.
STARVED_SHARE = 0.5


class EnclosedBackend(abc.ABC):
    """Opens sandboxes of one isolation with the given tools. A subclass implements how the process is started."""

    isolation: str
    leases_per_sandbox_max: int
    """Default of how many leases one sandbox serves."""
    programs: Mapping[str, str]
    """Required programs: Debian package by program."""
    overhead: Overhead
    """What the isolation itself uses in the cgroup."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None,
        leases_per_sandbox_max: int | None,
        libraries: Path | None,
        cgroups: bool,
        totals: Totals | None,
    ) -> None:
        """`libraries` is a folder of Python packages for the system's python3, which tools and the agent's code can
        import; it is mounted read-only. `cgroups=False` makes no cgroup even where that is possible. `totals` are of
        all sandboxes on this machine together; programs that share them should set the same."""
        self.tools = dict(tools)
        self.limits = limits or Limits()
        self.leases_per_sandbox_max = leases_per_sandbox_max or type(self).leases_per_sandbox_max
        self.libraries = libraries.resolve() if libraries is not None else None
        self.runner_source = RUNNER.read_text()
        self.isolation_notes: tuple[str, ...] = ()
        """Protections that this machine does not offer, one sentence each."""
        self._launcher: Launcher | None = None
        self._witness: Witness | None = None
        self._bundles: dict[bool, asyncio.Task[Bundle]] = {}
        self._home = self._find_cgroup_root() if cgroups else None
        self.parent = self._make_parent(totals or Totals()) if self._home is not None else None
        """The group above those of all sandboxes; None without cgroups."""

    async def open(self, slot: int, apart: bool = False) -> RunnerSandbox:
        """Start the process and wait until its runner has the tools. Raises SandboxUnavailable or SandboxFailed."""
        self.check_machine()
        bundle = await self._compile_bundle(apart)
        # Collects what bwrap or runsc print; the reason why a start failed is only there.
        with memory_file("stderr", b"") as complaints:
            sandbox, enclosure = await self._connect(slot, apart, bundle, complaints)
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
        """Raises SandboxUnavailable, with what to install, when this machine cannot open such a sandbox."""
        require_installed(self.programs)
        if self.libraries is not None and not self.libraries.is_dir():
            raise SandboxUnavailable(
                f"the libraries for tools are not installed: there is no folder {self.libraries}: make setup"
            )

    def close(self) -> None:
        """End the launcher. bwrap sandboxes that are still open end with it (--die-with-parent). Also happens when the
        backend and its sandboxes are garbage collected."""
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        if self._witness is not None:
            self._witness.close()
            self._witness = None
        if self.parent is not None:
            self.parent.remove()

    def has_room(self) -> bool:
        """As in the protocol. True where nothing counts what all sandboxes use."""
        processes = self.limits.processes_max + self.overhead.processes
        return self.parent is None or self.parent.has_room(memory_of(self.limits, self.overhead), processes)

    @abc.abstractmethod
    async def start(
        self,
        launcher: Launcher,
        slot: int,
        bundle: Bundle,
        connection: socket.socket,
        complaints: BinaryIO,
        entrances: tuple[str, ...],
    ) -> "StartedProcess":
        """Start the process with the connection as its descriptor 0, in the cgroup of these entrances. Raises
        SandboxFailed when it cannot be started."""

    async def _connect(
        self, slot: int, apart: bool, bundle: Bundle, complaints: BinaryIO
    ) -> tuple[RunnerSandbox, "EnclosedProcesses"]:
        ours, theirs = socket.socketpair()
        # Our copy of the runner's end must be closed, or its death would not end the stream.
        with theirs:
            try:
                enclosure = await self._enclose(slot, bundle, theirs, complaints)
            except BaseException:
                ours.close()
                raise
        stream = await asyncio.open_connection(sock=ours)
        tools = tools_shipped(self.tools, apart)
        leases = self.leases_per_sandbox_max
        return RunnerSandbox(self.isolation, enclosure, stream, tools, self.limits, leases), enclosure

    async def _enclose(
        self, slot: int, bundle: Bundle, connection: socket.socket, complaints: BinaryIO
    ) -> "EnclosedProcesses":
        # A launcher that was killed took its sandboxes along; the backend itself goes on with a new one.
        if self._launcher is None or self._launcher.is_gone:
            self._launcher = Launcher()
        witness = self._running_witness()
        # Made first: without it nothing is started that would then run unlimited.
        cgroup = self._new_cgroup()
        try:
            entrances = entrances_of(cgroup)
            started = await self.start(self._launcher, slot, bundle, connection, complaints, entrances)
        except BaseException:
            if cgroup is not None:
                cgroup.remove()
            raise
        return EnclosedProcesses(started, cgroup, witness)

    def _running_witness(self) -> Witness | None:
        """One for the backend; another one when it was killed. None when none can be started: then nothing shows that
        the host was busy, and a silent runner is blamed on its agent."""
        if self._witness is None or not self._witness.is_running:
            if self._witness is not None:
                self._witness.close()
            try:
                self._witness = Witness(self.parent)
            except OSError as error:
                logger.warning("witness_not_started", extra={"reason": str(error)})
                self._witness = None
        return self._witness

    def _new_cgroup(self) -> Cgroup | None:
        try:
            return Cgroup(self._home, self.limits, self.overhead, self.parent) if self._home is not None else None
        except OSError as error:
            raise SandboxFailed(f"cannot make a cgroup for the sandbox: {error}") from error

    async def _compile_bundle(self, apart: bool) -> Bundle:
        """Compile once for the backend and each kind of sandbox. After a failure the next call tries again. Raises
        SandboxUnavailable, and SandboxFailed when the compiler could not be started."""
        if apart not in self._bundles or has_failed(self._bundles[apart]):
            compiling = compile_bundle(tools_shipped(self.tools, apart), self.runner_source)
            self._bundles[apart] = asyncio.create_task(compiling)
        try:
            # Shielded: one cancelled `open` must not cancel the compilation that others wait for.
            return await asyncio.shield(self._bundles[apart])
        # Such as no descriptor or no memory for a moment.
        except OSError as error:
            raise SandboxFailed(f"the tools could not be compiled: {error}") from error

    def _make_parent(self, totals: Totals) -> ParentGroup | None:
        assert self._home is not None
        try:
            return ParentGroup(self._home, totals)
        except OSError as error:
            self.isolation_notes += (f"nothing limits all {self.isolation} sandboxes together: {error}",)
            logger.warning("totals_unavailable", extra={"reason": self.isolation_notes[-1]})
            return None

    def _find_cgroup_root(self) -> CgroupRoot | None:
        try:
            return find_cgroup_root()
        except (NoCgroups, OSError) as error:
            self.isolation_notes = (
                f"limits of a {self.isolation} sandbox hold for each process only, because there is no cgroup: {error}",
            )
            logger.warning("cgroups_unavailable", extra={"reason": self.isolation_notes[0]})
            return None


def entrances_of(cgroup: Cgroup | None) -> tuple[str, ...]:
    """As `Cgroup.entrances`; none without a cgroup. Raises SandboxFailed."""
    try:
        return cgroup.entrances() if cgroup is not None else ()
    except OSError as error:
        raise SandboxFailed(f"cannot make a cgroup for the sandbox: {error}") from error


def tools_shipped(tools: Mapping[str, Tool], apart: bool) -> dict[str, Tool]:
    """The tools of one kind of sandbox. The agent's code must not find the source and constants of tools apart."""
    return {name: tool for name, tool in tools.items() if tool.apart == apart or tool.sets_up}


class StartedProcess:
    """A process with a runner inside, and the folder to remove after it has ended."""

    def __init__(self, process: Process, folder: Path | None = None) -> None:
        self.process = process
        self.folder = folder


class EnclosedProcesses:
    """All processes of one sandbox, and their cgroup if there is one."""

    def __init__(self, started: StartedProcess, cgroup: Cgroup | None, witness: Witness | None = None) -> None:
        self.process = started.process
        self.cgroup = cgroup
        self._witness = witness
        self._folder = started.folder
        self._last_excess: str | None = None

    @property
    def is_running(self) -> bool:
        return self.process.is_running

    def used_up(self) -> str | None:
        """As in the protocol. Also known after `end`, which removes the cgroup."""
        if self.cgroup is not None and (excess := self.cgroup.exceeded()):
            return excess
        excess, self._last_excess = self._last_excess, None
        return excess

    async def was_killed_from_outside(self) -> bool:
        """As in the protocol. Ask before `end`, which kills it, and after `used_up`: the kernel kills by SIGKILL too."""
        try:
            async with asyncio.timeout(LAST_MOMENT_SECONDS):
                code = await self.process.exit_code()
        except TimeoutError:
            return False
        # The agent's processes see neither the launcher nor bwrap or runsc, and pid 1 takes no SIGKILL from inside. So
        # a signal that ended them was sent from outside. The runner itself only ever exits with a code below 128.
        return code is None or code < 0 or code == 128 + signal.SIGKILL

    def was_starved(self, last_seconds: float) -> bool:
        """As in the protocol."""
        silent = self._witness.silent_seconds(last_seconds) if self._witness is not None else 0.0
        return silent >= STARVED_SHARE * last_seconds

    @property
    def enters_by_itself(self) -> bool:
        """Whether its first process was given a way into its cgroup."""
        return self.cgroup is None or self.cgroup.home.version == 1

    async def adopt(self) -> bool:
        """Move the processes that are not yet in the cgroup into it. False when there were none."""
        strangers = descendants(self.process.pid) - self.cgroup.members() if self.cgroup is not None else set()
        if self.cgroup is None or not strangers:
            return False
        # In a thread: the kernel may take 20 ms for it.
        await asyncio.to_thread(self.cgroup.adopt, strangers)
        return True

    async def adopt_all(self) -> None:
        """Until all are in the cgroup: a process that was forked between listing and moving is not."""
        for _ in range(ADOPTIONS_MAX):
            if not await self.adopt():
                return
        raise SandboxFailed("a process of the sandbox is not in its cgroup")

    async def end(self) -> None:
        """Kill all processes. With a cgroup, returns after all have ended; without one, some may end a moment later."""
        # Before the parent is killed: afterwards its children are reparented and cannot be found.
        if self.cgroup is None and self.is_running:
            kill(descendants(self.process.pid))
        self.process.kill()
        await self.process.wait()
        if self.cgroup is not None:
            # Read before the sweep, which removes the counters with the group. What others caused is no excess of its
            # own, and the sandbox ends either way.
            with contextlib.suppress(SandboxFailed):
                self._last_excess = self.cgroup.exceeded() or self._last_excess
            try:
                await self.cgroup.sweep()
            except TimeoutError:
                logger.error("process_not_killed", extra={"cgroup": str(self.cgroup.folders[0])})
        self.process.release()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def has_failed(task: asyncio.Task[Bundle]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def settle_in(sandbox: RunnerSandbox, enclosure: EnclosedProcesses, bundle: Bundle) -> None:
    """Send limits and tools to the runner while its processes move into the cgroup. Agent code runs only after both."""
    # At once where processes cannot enter by themselves: the first move may take as long as the start.
    adopting = None if enclosure.enters_by_itself else asyncio.create_task(enclosure.adopt_all())
    try:
        await sandbox.greet(bundle.tools)
        if adopting is not None:
            await adopting
        # Again: what was forked since is in the group only if its parent was.
        await enclosure.adopt_all()
    except BaseException:
        # Awaited before the group is removed: a thread may still be writing into it.
        if adopting is not None:
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
