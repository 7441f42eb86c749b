"""Linux namespaces by bubblewrap, with a trusted runner inside (runner.py) that serves many leases, one after another.

A start costs about 25 ms of CPU, a fork inside a running sandbox about one: so a sandbox is kept, and each lease gets a
fresh session child and an emptied disk. `leases_per_sandbox_max=1` gives every lease namespaces of its own.

Held by: user, pid, mount, network, ipc, uts and cgroup namespaces; no capability; no_new_privs; an allow-list of system
calls (sandboxes.seccomp); read-only /usr, nothing else of the host; an empty environment, also of bwrap itself; closed
descriptors; as root, an unprivileged uid of its own per slot, because root under --uid would still be host root.

Not covered:
* Memory is limited per process: processes_max times memory_bytes_max is the true ceiling. No cgroup yet.
* CPU is limited per process too; the wall time of a call bounds the rest.
* Without root there is no inode limit, and /work and /tmp get half of the disk limit each.
* The tools of a lease share one process with the agent's Python code, which can therefore forge what they answer *to
  itself*. Nothing that decides a reward may rest on what a session says.
* /usr is the host's: an agent sees which programs are installed. A bug in the kernel is a way out.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import socket
import struct
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from sandboxes import seccomp
from sandboxes.limits import Limits
from sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, SandboxUnavailable, ToolResult
from sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

FRAME = struct.Struct(">II")
HEADER_BYTES_MAX = 1 << 20
SYSTEM_PATH = "/usr/bin:/bin:/usr/sbin:/sbin"
CLEAN_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/work", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
DISK_MOUNT_POINT = "/mnt"  # only in the launcher's private mount namespace; the host's own /mnt is not touched
START_TIMEOUT_SECONDS = 30.0
GRACE_SECONDS = 5.0
KEYS_REMEMBERED_MAX = 64

# Runs as root before bwrap. One tmpfs for both writable folders, because bwrap's own cannot limit inodes.
ROOT_LAUNCH = f"""
mount -t tmpfs -o "$1" tmpfs {DISK_MOUNT_POINT} && cd {DISK_MOUNT_POINT} && mkdir work tmp && chown "$2:$2" work tmp &&
cd / && user=$2 && shift 2 &&
exec setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs -- "$@"
"""


class SessionAnswer(msgspec.Struct):
    """What a session child says of a call. Untrusted: it is read by type, and it cannot claim an infra error."""

    content: str
    bytes_total: int
    error: Literal["agent", "tool"] | None


class BubblewrapBackend:
    """Opens bubblewrap sandboxes that know the given tools."""

    isolation = "bubblewrap"

    def __init__(
        self,
        tools: Mapping[str, Tool],
        limits: Limits | None = None,
        leases_per_sandbox_max: int = 200,
        first_uid: int = 200_000,
    ) -> None:
        """As root, `first_uid` + slot is the host uid of a sandbox; programs on one machine should differ in it."""
        self.tools = dict(tools)
        self.limits = limits or Limits()
        self.leases_per_sandbox_max = leases_per_sandbox_max
        self.first_uid = first_uid
        self._runner_source = Path(__file__).with_name("runner.py").read_bytes()
        self._seccomp_program = seccomp.filter_program()

    async def open(self, slot: int) -> "BubblewrapSandbox":
        """Start bwrap and wait until the runner inside has compiled the tools."""
        check_installed(as_root=os.geteuid() == 0)
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as files:
            files.enter_context(theirs)
            runner = files.enter_context(memory_file("runner", self._runner_source))
            program = files.enter_context(memory_file("seccomp", self._seccomp_program))
            complaints = files.enter_context(memory_file("stderr", b""))
            process = await asyncio.create_subprocess_exec(
                *self._command(slot, runner.fileno(), program.fileno()),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                env=CLEAN_ENVIRONMENT,
                cwd="/",
                pass_fds=(runner.fileno(), program.fileno()),
            )
            theirs.close()  # else the end of the runner would not be the end of the stream
            reader, writer = await asyncio.open_connection(sock=ours)
            sandbox = BubblewrapSandbox(process, reader, writer, self)
            try:
                await sandbox.greet()
            except SandboxUnavailable:
                raise
            except SandboxFailed as error:
                complaints.seek(0)
                said = complaints.read(4096).decode(errors="replace").strip()
                raise SandboxFailed(f"bubblewrap did not start: {said or error}") from error
            return sandbox

    def _command(self, slot: int, runner_fd: int, seccomp_fd: int) -> list[str]:
        as_root = os.geteuid() == 0
        inner = bubblewrap_command(self.limits, runner_fd, seccomp_fd, disk_is_mounted=as_root)
        if not as_root:
            return inner
        options = f"size={self.limits.disk_bytes_max},nr_inodes={self.limits.inodes_max},mode=0755,nosuid,nodev"
        private = ["/usr/bin/unshare", "--mount", "--propagation", "private", "--"]
        return [*private, "/bin/sh", "-c", ROOT_LAUNCH, "launch", options, str(self.first_uid + slot), *inner]


class BubblewrapSandbox:
    """One running bwrap with its runner. Requests are answered in order; a doubt about the stream ends the sandbox."""

    isolation = "bubblewrap"

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        backend: BubblewrapBackend,
    ) -> None:
        self.sandbox_id = f"bubblewrap-{uuid.uuid4().hex[:16]}"
        self._process = process
        self._reader = reader
        self._writer = writer
        self._tools = backend.tools
        self._limits = backend.limits
        self._leases_left = backend.leases_per_sandbox_max
        self._turn = asyncio.Lock()
        self._closed = False
        self._results: dict[str, ToolResult] = {}

    @property
    def is_alive(self) -> bool:
        return not self._closed and self._process.returncode is None and not self._reader.at_eof()

    async def greet(self) -> None:
        """Hand over limits and tools. SandboxUnavailable when a tool does not compile inside."""
        sources = msgspec.json.encode({name: tool.source for name, tool in self._tools.items()})
        header = {"op": "hello", "limits": msgspec.to_builtins(self._limits)}
        answer, _ = await self._request(header, sources, START_TIMEOUT_SECONDS)
        if answer["status"] != "ok":
            await self.close()
            raise SandboxUnavailable(answer["detail"])

    async def call(self, tool: str, arguments: Arguments, key: str) -> ToolResult:
        if key in self._results:
            return self._results[key]
        if tool not in self._tools:
            raise SandboxFailed(f"this sandbox was opened without the tool {tool}; it has {', '.join(self._tools)}")
        timeout_seconds = self._tools[tool].call_timeout_seconds or self._limits.call_timeout_seconds
        header = {
            "op": "call",
            "timeout_seconds": timeout_seconds,
            "answer_bytes_max": 6 * self._limits.output_bytes_max + 4096,  # JSON may escape a byte into six
        }
        body = msgspec.json.encode({"tool": tool, "arguments": arguments})
        started = time.perf_counter()
        answer, payload = await self._request(header, body, timeout_seconds + GRACE_SECONDS)
        milliseconds = (time.perf_counter() - started) * 1000
        result = result_of(answer, payload, milliseconds, self._limits.output_bytes_max)
        self._remember(key, result)
        return result

    async def put(self, path: str, data: bytes) -> None:
        answer, _ = await self._request({"op": "put", "path": path}, data, GRACE_SECONDS)
        raise_os_error(answer)

    async def get(self, path: str) -> bytes:
        answer, data = await self._request({"op": "get", "path": path}, b"", GRACE_SECONDS)
        raise_os_error(answer)
        return data

    async def reset(self) -> bool:
        self._results.clear()
        self._leases_left -= 1
        if self._leases_left <= 0 or self._closed:
            return False
        answer, _ = await self._request({"op": "reset"}, b"", GRACE_SECONDS)
        if answer["status"] != "ok":
            logger.warning("%s is not clean and will be thrown away: %s", self.sandbox_id, answer["detail"])
        return bool(answer["status"] == "ok")

    async def close(self) -> None:
        """Kill bwrap; the runner dies with it, and with the runner every process of its namespace.

        The kernel does the second part on its own: it may end a moment after this returns."""
        self._closed = True
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _request(
        self, header: dict[str, Any], body: bytes, timeout_seconds: float
    ) -> tuple[dict[str, Any], bytes]:
        """One frame out, one frame in. When that is cut short, the stream is out of step: end the sandbox."""
        async with self._turn:
            if self._closed:
                raise SandboxFailed(f"{self.sandbox_id} is closed")
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await self._exchange(header, body)
            except (OSError, EOFError, TimeoutError, msgspec.DecodeError) as error:
                await self.close()
                reason = "did not answer in time" if isinstance(error, TimeoutError) else f"died ({error!r})"
                raise SandboxFailed(f"{self.sandbox_id} {reason} on {header['op']}") from error
            except BaseException:
                await self.close()
                raise

    async def _exchange(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        encoded = msgspec.json.encode(header)
        self._writer.write(FRAME.pack(len(encoded), len(body)) + encoded + body)
        await self._writer.drain()
        header_length, body_length = FRAME.unpack(await self._reader.readexactly(FRAME.size))
        if header_length > HEADER_BYTES_MAX or body_length > self._limits.disk_bytes_max + HEADER_BYTES_MAX:
            raise EOFError(f"a frame of {header_length} + {body_length} bytes")
        answer = msgspec.json.decode(await self._reader.readexactly(header_length), type=dict[str, Any])
        return answer, await self._reader.readexactly(body_length)

    def _remember(self, key: str, result: ToolResult) -> None:
        self._results[key] = result
        for oldest in list(itertools.islice(self._results, max(0, len(self._results) - KEYS_REMEMBERED_MAX))):
            del self._results[oldest]


def result_of(answer: dict[str, Any], payload: bytes, milliseconds: float, output_bytes_max: int) -> ToolResult:
    """What the agent sees of a call, from the runner's verdict and the session's own words."""
    status = answer["status"]
    if status == "ok":
        try:
            said = msgspec.json.decode(payload, type=SessionAnswer)
        except (msgspec.DecodeError, RecursionError):  # the agent's code wrote to the session's socket
            return failure("error: the session gave no readable answer", "agent", milliseconds)
        content = shorten(said.content, said.bytes_total, output_bytes_max)
        return ToolResult(content, said.error is not None, said.error, milliseconds)
    if status == "timeout":
        return failure(f"error: {answer['detail']}. {FRESH_SESSION}", "agent", milliseconds)
    if status == "died":
        return failure(f"error: the session ended: {answer['detail']}. {FRESH_SESSION}", "agent", milliseconds)
    raise SandboxFailed(f"the runner could not run the call: {answer.get('detail', status)}")


FRESH_SESSION = "The next call starts a fresh session: names are forgotten, files are kept."


def failure(content: str, kind: ErrorKind, milliseconds: float) -> ToolResult:
    return ToolResult(content, True, kind, milliseconds)


def shorten(content: str, bytes_total: int, output_bytes_max: int) -> str:
    """At most `output_bytes_max` bytes of the content, then a line that says how much there was."""
    encoded = content.encode()
    if len(encoded) <= output_bytes_max and bytes_total <= output_bytes_max:
        return content
    kept = encoded[:output_bytes_max].decode(errors="ignore")
    total = max(bytes_total, len(encoded))
    return f"{kept}\n[truncated: {total} bytes in all, the first {output_bytes_max} are shown]"


def raise_os_error(answer: dict[str, Any]) -> None:
    if answer["status"] != "ok":
        raise OSError(answer.get("errno") or 0, answer["detail"])


def check_installed(as_root: bool) -> None:
    """SandboxUnavailable, with what to do, when a program is missing."""
    packages = {"bwrap": "bubblewrap", "python3": "python3"}
    if as_root:
        packages |= {"unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
    for program, package in packages.items():
        if shutil.which(program, path=SYSTEM_PATH) is None:
            raise SandboxUnavailable(f"{package} is not installed: apt-get install {package}")


@contextlib.contextmanager
def memory_file(name: str, data: bytes) -> Any:
    """An anonymous file with this content, read from its start."""
    with open(os.memfd_create(name), "w+b") as file:
        file.write(data)
        file.flush()
        file.seek(0)
        yield file


def bubblewrap_command(limits: Limits, runner_fd: int, seccomp_fd: int, disk_is_mounted: bool) -> list[str]:
    """The bwrap command line. Order matters: mounts happen left to right, and a remount comes after its last child."""
    half = str(limits.disk_bytes_max // 2)
    disk = (
        ["--bind", f"{DISK_MOUNT_POINT}/work", "/work", "--bind", f"{DISK_MOUNT_POINT}/tmp", "/tmp"]
        if disk_is_mounted
        else ["--size", half, "--tmpfs", "/work", "--size", half, "--tmpfs", "/tmp"]
    )
    return [
        "/usr/bin/bwrap",
        *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--hostname", "sandbox"),
        *("--new-session", "--die-with-parent", "--as-pid-1", "--clearenv"),
        *(word for name, value in CLEAN_ENVIRONMENT.items() for word in ("--setenv", name, value)),
        *("--ro-bind", "/usr", "/usr", "--tmpfs", "/usr/local", "--remount-ro", "/usr/local"),
        *(word for name in system_links() for word in ("--symlink", f"usr/{name}", f"/{name}")),
        *("--tmpfs", "/dev"),
        *(word for name in DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        *("--symlink", "/proc/self/fd", "/dev/fd", "--remount-ro", "/dev"),
        *("--proc", "/proc"),
        *disk,
        *("--ro-bind-data", str(runner_fd), "/runner.py", "--remount-ro", "/"),
        *("--seccomp", str(seccomp_fd), "--chdir", "/"),
        *("--", "/usr/bin/python3", "-I", "/runner.py"),
    ]


DEVICES = ("null", "zero", "full", "random", "urandom")


def system_links() -> list[str]:
    """Top folders that are links into /usr on this machine, such as /lib64."""
    return [name for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32") if os.path.islink(f"/{name}")]
