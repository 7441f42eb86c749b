"""gVisor by `runsc`: the agent's code talks to a kernel of its own, written in Go, and hardly ever to the host's.

The same runner as in bubblewrap is inside, and the same tools. A start takes some 200 ms, a call some milliseconds.

Held by: gVisor's kernel, itself in namespaces with an empty root and a narrow seccomp filter; no capability;
no_new_privs; no network but a loopback of its own; read-only /usr, nothing else of the host; an empty environment; a
cgroup for memory, processes and CPU, gVisor's own use included; rlimits for each process.

Not covered:
* Root is needed, and the ptrace platform of Debian's runsc is slow with system calls.
* Where no cgroup can be made, nothing limits the number of processes and memory is limited per process only.
* The number of files is not limited, only their bytes. /work and /tmp get half of the disk limit each.
* Messages and shared memory of System V outlive a session inside the same sandbox; so by default every lease gets a new
  one (`leases_per_sandbox_max=1`).
* The tools of a lease share one process with the agent's Python code, as in bubblewrap.
* /usr is the host's: an agent sees which programs are installed. A bug in gVisor and one in the kernel are a way out.
"""

import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sandboxes.backends.bundle import SYSTEM_PYTHON, Bundle
from sandboxes.backends.cgroups import Overhead
from sandboxes.backends.enclosed import CLEAN_ENVIRONMENT, LIBRARIES, EnclosedBackend, StartedProcess, system_links
from sandboxes.backends.processes import Launch, Launcher
from sandboxes.limits import MEBIBYTE, Limits
from sandboxes.protocol import SandboxUnavailable
from sandboxes.tools.tool import Tool

SESSION_USER = 65534
# The runner is root of gVisor's own kernel, so that sessions can be someone else; on the host that is nobody.
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE")


class GvisorBackend(EnclosedBackend):
    """Opens gVisor sandboxes that know the given tools."""

    isolation = "gvisor"
    leases_per_sandbox_max = 1
    programs = {"runsc": "runsc", "python3": "python3"}
    overhead = Overhead(memory_bytes=384 * MEBIBYTE, processes=256)

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None = None,
        leases_per_sandbox_max: int | None = None,
        libraries: Path | None = None,
        cgroups: bool = True,
        platform: str = "ptrace",
    ) -> None:
        super().__init__(tools, limits, leases_per_sandbox_max, libraries, cgroups)
        self.platform = platform

    def check_machine(self) -> None:
        super().check_machine()
        if os.geteuid() != 0:
            raise SandboxUnavailable("runsc needs root here; without root use bubblewrap")

    async def start(
        self, launcher: Launcher, slot: int, bundle: Bundle, connection: socket.socket, complaints: BinaryIO
    ) -> StartedProcess:
        folder = Path(tempfile.mkdtemp(prefix=f"replayground-gvisor-{os.getpid()}-"))
        try:
            write_bundle(folder, bundle, oci_configuration(self.limits, self.libraries))
            launch = Launch(command=self._command(folder), environment=CLEAN_ENVIRONMENT)
            process = await launcher.start(launch, [connection.fileno(), complaints.fileno()])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return StartedProcess(process, folder)

    def _command(self, folder: Path) -> list[str]:
        isolation = ("--platform", self.platform, "--network", "none", "--ignore-cgroups")
        name = f"replayground-{uuid.uuid4().hex[:16]}"
        runsc = shutil.which("runsc", path="/usr/bin:/usr/local/bin") or "/usr/bin/runsc"
        return [runsc, "--root", str(folder / "state"), *isolation, "run", "--bundle", str(folder), name]


def write_bundle(folder: Path, bundle: Bundle, configuration: dict[str, Any]) -> None:
    """An OCI bundle: the configuration and an almost empty root."""
    root = folder / "root"
    for name in ("work", "tmp", "proc", "dev", "usr", "sys", LIBRARIES.strip("/")):
        (root / name).mkdir(parents=True)
    for name in system_links():
        (root / name).symlink_to(f"usr/{name}")
    (root / "runner.pyc").write_bytes(bundle.runner)
    (folder / "config.json").write_bytes(msgspec.json.encode(configuration))


def oci_configuration(limits: Limits, libraries: Path | None) -> dict[str, Any]:
    """What runsc is told of the container."""
    disk = [f"size={limits.disk_bytes_max // 2}", "mode=0755", f"uid={SESSION_USER}", f"gid={SESSION_USER}"]
    process = {
        "user": {"uid": 0, "gid": 0},
        "args": [SYSTEM_PYTHON, "-I", "-S", "/runner.pyc"],
        "env": [f"{name}={value}" for name, value in CLEAN_ENVIRONMENT.items()],
        "cwd": "/",
        "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), CAPABILITIES),
        "noNewPrivileges": True,
    }
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        read_only("/usr", "/usr"),
        {"destination": "/usr/local", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]},
        *({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": disk} for path in ("/work", "/tmp")),
        *([read_only(str(libraries), LIBRARIES)] if libraries is not None else []),
    ]
    return {
        "ociVersion": "1.0.0",
        "process": process,
        "root": {"path": "root", "readonly": True},
        "hostname": "sandbox",
        "mounts": mounts,
        "linux": {"namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount")]},
    }


def read_only(source: str, destination: str) -> dict[str, Any]:
    return {"destination": destination, "type": "bind", "source": source, "options": ["rbind", "ro"]}
