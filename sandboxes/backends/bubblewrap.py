"""Linux namespaces by bubblewrap, with a trusted runner inside (runner.py).

Every lease gets a sandbox of its own, with new namespaces and a new disk (`leases_per_sandbox_max=1`): numbers of
processes and inodes count up as long as these live, and would tell a lease what the one before did. A start costs about
25 ms of CPU, a fork inside a running sandbox about 1 ms: with a higher `leases_per_sandbox_max` a sandbox is kept, and
each lease gets a new tool process and an emptied disk.

Isolated by: user, pid, mount, network, ipc, uts and cgroup namespaces; no capabilities; no_new_privs; an allow-list of
system calls (sandboxes.seccomp); read-only /usr and nothing else of the host; an empty environment, also of bwrap
itself; no inherited descriptors; as root, an unprivileged uid for each slot; a cgroup for memory, processes and CPU of
the whole sandbox (sandboxes.backends.cgroups); rlimits for each process.

Not covered:
* Where no cgroup can be made (reported in `isolation_notes` and logged once), memory and CPU are limited per process
  only: the total can reach processes_max times memory_bytes_max.
* Without root there is no inode limit, and /work and /tmp get half of the disk limit each. /usr and the devices have
  the host's own inodes then: a POSIX lock on them is seen in the other sandboxes while it is held. The path of the
  libraries is in /proc/self/mountinfo.
* Where several agents share a sandbox, they share its files and its limits: one can fill the disk or use up the memory
  of all. Before Linux 6.12 (reported in `isolation_notes`) they can end each other's processes, too.
* Files of /usr share the host's page cache: how long a read takes tells whether somebody has read there before.
* The tools of a lease share one process with the agent's Python code, which can therefore forge their results *for
  itself*. Nothing that decides a reward may depend on what a tool process returns.
* /usr is the host's: an agent sees which programs are installed. A kernel bug is a way out.
"""

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from replayground.sandboxes import seccomp
from replayground.sandboxes.backends.bundle import SYSTEM_PYTHON, Bundle
from replayground.sandboxes.backends.cgroups import Overhead
from replayground.sandboxes.backends.enclosed import (
    CLEAN_ENVIRONMENT,
    LIBRARIES,
    EnclosedBackend,
    StartedProcess,
    memory_file,
    system_links,
)
from replayground.sandboxes.backends.launcher import DISK_MOUNT_POINT, RUNNER_FD, SECCOMP_FD
from replayground.sandboxes.backends.processes import Launch, Launcher
from replayground.sandboxes.limits import MEBIBYTE, Limits, Totals
from replayground.sandboxes.machine import DEVICES, can_confine_signals
from replayground.sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)


class BubblewrapBackend(EnclosedBackend):
    """Opens bubblewrap sandboxes that know the given tools."""

    isolation = "bubblewrap"
    leases_per_sandbox_max = 1
    programs = {"bwrap": "bubblewrap", "python3": "python3"}
    # bwrap and the runner are in the same cgroup as the agent's processes.
    overhead = Overhead(memory_bytes=32 * MEBIBYTE, processes=4)

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None = None,
        leases_per_sandbox_max: int | None = None,
        first_uid: int = 200_000,
        libraries: Path | None = None,
        cgroups: bool = True,
        totals: Totals | None = None,
    ) -> None:
        """As root, `first_uid` + slot is the host uid of a sandbox. Programs on one machine should use
        ranges that do not overlap."""
        super().__init__(tools, limits, leases_per_sandbox_max, libraries, cgroups, totals)
        self.first_uid = first_uid
        self._seccomp_program = seccomp.filter_program()
        if not can_confine_signals():
            note = "agents that share a sandbox can end each other's processes: this kernel cannot confine signals"
            self.isolation_notes += (f"{note} (Landlock of Linux 6.12)",)
            logger.warning("signals_not_confined", extra={"reason": self.isolation_notes[-1]})

    async def start(
        self,
        launcher: Launcher,
        slot: int,
        bundle: Bundle,
        connection: socket.socket,
        complaints: BinaryIO,
        entrances: tuple[str, ...],
    ) -> StartedProcess:
        with (
            memory_file("runner", bundle.runner) as runner,
            memory_file("seccomp", self._seccomp_program) as program,
        ):
            # The order that launcher.py expects: CONNECTION, COMPLAINTS, RUNNER, SECCOMP.
            files = (connection, complaints, runner, program)
            launch = msgspec.structs.replace(self._launch(slot), cgroup_entrances=entrances)
            return StartedProcess(await launcher.start(launch, [file.fileno() for file in files]))

    def _launch(self, slot: int) -> Launch:
        as_root = os.geteuid() == 0
        outside = str(self.libraries or "")
        # As root the launcher mounts the libraries below the disk, where the unprivileged uid can reach them.
        inside = f"{DISK_MOUNT_POINT}/libraries" if outside and as_root else outside
        return Launch(
            command=bubblewrap_command(self.limits, inside, disk_is_mounted=as_root),
            environment=CLEAN_ENVIRONMENT,
            # bwrap --uid only maps the uid inside: started by root, the processes would be root for the host kernel.
            user=self.first_uid + slot if as_root else None,
            disk_options=f"size={self.limits.disk_bytes_max},nr_inodes={self.limits.inodes_max},mode=0755",
            libraries=outside,
            devices=DEVICES,
        )


def bubblewrap_command(limits: Limits, libraries: str, disk_is_mounted: bool) -> list[str]:
    """The bwrap command line. bwrap mounts from left to right, so a remount-ro comes after the last mount below it."""
    half = str(limits.disk_bytes_max // 2)
    # The launcher's tmpfs limits bytes and inodes of both folders together; bwrap's own cannot limit inodes.
    disk = (
        ["--bind", f"{DISK_MOUNT_POINT}/work", "/work", "--bind", f"{DISK_MOUNT_POINT}/tmp", "/tmp"]
        if disk_is_mounted
        else ["--size", half, "--tmpfs", "/work", "--size", half, "--tmpfs", "/tmp"]
    )
    # Mounted by the launcher through inodes of this sandbox alone; without root they are the host's own.
    host = DISK_MOUNT_POINT if disk_is_mounted else ""
    # bwrap's own --dev would add terminals and a writable /dev/shm. --remount-ro forbids devices too, but not in mounts
    # below; the launcher's folder is read-only already.
    devices = (
        ["--dev-bind", f"{host}/dev", "/dev"]
        if disk_is_mounted
        else [
            *("--tmpfs", "/dev", "--symlink", "/proc/self/fd", "/dev/fd"),
            *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
            *("--remount-ro", "/dev"),
        ]
    )
    return [
        "/usr/bin/bwrap",
        # --unshare-all only tries to make a user namespace; --disable-userns needs one.
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        # --new-session: no controlling terminal to type into. --as-pid-1: the runner itself must be pid 1, which takes
        # no signals from inside and reaches every process by kill(-1).
        *("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"),
        *(word for name, value in CLEAN_ENVIRONMENT.items() for word in ("--setenv", name, value)),
        # /usr/local holds what the operator installed by hand; it is not shown.
        *("--ro-bind", f"{host}/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"),
        *(word for name in system_links() for word in ("--symlink", f"usr/{name}", f"/{name}")),
        *devices,
        *("--proc", "/proc"),
        *(("--ro-bind", libraries, LIBRARIES) if libraries else ()),
        *disk,
        # The root itself becomes read-only last, after every mount point in it exists.
        *("--ro-bind-data", str(RUNNER_FD), "/runner.pyc", "--remount-ro", "/"),
        *("--seccomp", str(SECCOMP_FD), "--chdir", "/"),
        *("--", SYSTEM_PYTHON, "-I", "-S", "/runner.pyc"),
    ]
