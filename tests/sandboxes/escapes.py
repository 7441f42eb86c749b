"""`make escapes`: every attempt of tests.sandboxes.attempts on every isolation that this machine has.

    python -m tests.sandboxes.escapes [--isolation bubblewrap] [NAME …]

One line an attempt, then the health of the host, then `N attempts, M succeeded`. Exit code 1 when one succeeded, was
reported as something else, or left something on the host.
"""

import argparse
import asyncio
import contextlib
import io
import os
import re
import secrets
import signal
import socket
import string
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec

from replayground.sandboxes.backends import lacking, open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import descendants, group_prefix
from replayground.sandboxes.backends.enclosed import EnclosedBackend, EnclosedProcesses
from replayground.sandboxes.backends.gvisor import GvisorBackend
from replayground.sandboxes.limits import MEBIBYTE, Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Backend, Sandbox, SandboxFailed, ToolResult
from replayground.sandboxes.tools.registry import SHIPPED
from replayground.sandboxes.worlds.world import WORLD_TOOLS, Table, World, set_up_world
from tests.sandboxes.attempts import ATTEMPTS, EVERYWHERE, PRELUDE, TIMED_OUT, Attempt
from tests.sandboxes.conftest import LIMITS as TIGHT_LIMITS

FIRST_UID = 1_000_000 + 16 * os.getpid()  # nobody else on this machine has these
LIMITS = msgspec.structs.replace(TIGHT_LIMITS, cpu_seconds=5, call_timeout_seconds=60.0)
BRIEF = msgspec.structs.replace(LIMITS, call_timeout_seconds=2.0)
"""For attempts that never end by themselves."""
ASKED_TIMES_MAX = 10
type Place = Literal["ordinary", "endless", "reused"]


class Verdict(msgspec.Struct, frozen=True):
    """What came of an attempt."""

    attempt: Attempt
    succeeded: bool
    is_reported: bool
    text: str

    @property
    def word(self) -> str:
        return "SUCCEEDED" if self.succeeded else "contained" if self.is_reported else "MISREPORTED"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make escapes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attempts to make; all if none is named")
    parser.add_argument("--isolation", action="append", choices=EVERYWHERE, help="only on this one")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {attempt.name for attempt in ATTEMPTS}
    if unknown:
        parser.error(f"there is no attempt {min(unknown)!r}")
    chosen = [attempt for attempt in ATTEMPTS if not arguments.names or attempt.name in arguments.names]
    return asyncio.run(show(chosen, arguments.isolation or list(EVERYWHERE)))


async def show(attempts: list[Attempt], isolations: list[str]) -> int:
    verdicts: list[Verdict] = []
    complaints: list[str] = []
    for isolation in isolations:
        if reason := lacking(isolation):
            print(f"{isolation}: not here ({reason})")
            continue
        async with guarded_host() as host:
            async with pools(isolation) as field:
                for attempt in (attempt for attempt in attempts if isolation in attempt.isolations):
                    verdict = await judged(field[place_of(attempt)], attempt, host)
                    verdicts.append(verdict)
                    print(f"{isolation:<11} {attempt.name:<29} {verdict.word}: {verdict.text}", flush=True)
            found = await host.complaints()
            complaints += found
            print(f"{isolation:<11} host: {'; '.join(found) or 'healthy'}", flush=True)
    succeeded = sum(verdict.succeeded for verdict in verdicts)
    misreported = sum(verdict.word == "MISREPORTED" for verdict in verdicts)
    if misreported:
        print(f"{misreported} not reported as what they were")
    print(f"{len(verdicts)} attempts, {succeeded} succeeded")
    return 1 if succeeded or misreported or complaints or not verdicts else 0


@contextlib.asynccontextmanager
async def pools(isolation: str) -> AsyncIterator["dict[Place, Pool]"]:
    """Of one slot each, by what the attempts in it need. Nothing is left of them afterwards."""
    kinds: dict[Place, tuple[Limits, int | None]] = {
        "ordinary": (LIMITS, None),
        "endless": (BRIEF, None),
        "reused": (LIMITS, 200),
    }
    backends = {
        place: open_backend(
            isolation,
            SHIPPED | WORLD_TOOLS,
            limits,
            first_uid=FIRST_UID + 4 * number,
            # gVisor cannot be reused without leaving some things behind, as its docstring says.
            leases_per_sandbox_max=leases if isolation == "bubblewrap" else None,
        )
        for number, (place, (limits, leases)) in enumerate(kinds.items())
    }
    async with contextlib.AsyncExitStack() as stack:
        yield {
            place: await stack.enter_async_context(Pool(backend, size=1, warm=0)) for place, backend in backends.items()
        }
    for backend in backends.values():
        forget(backend)


def place_of(attempt: Attempt) -> Place:
    return "endless" if attempt.is_endless else "reused" if attempt.is_reused else "ordinary"


async def judged(pool: Pool, attempt: Attempt, host: "Host") -> Verdict:
    """Run it, ask the witness, look at the next lease. A sandbox that fails under an attempt has been harmed by it."""
    gains: list[str] = []
    try:
        async with pool.reserve(owner=attempt.name, seconds=120) as place:
            sandbox = await place.sandbox()
            if attempt.has_world:
                await host.set_up_world(await place.sandbox(apart=True))
            result = await sandbox.call("python", {"code": host.filled(attempt.code, sandbox.isolation)}, "attempt")
            gains += claimed(result)
            if attempt.beside is not None:
                gains += await seen_beside(pool, host.filled(attempt.beside, sandbox.isolation))
            # Without a limit that was exceeded: the agent has brought down the runner itself.
            gains += re.findall("the sandbox has ended: it (?:ended|did not answer in time)", result.content)
            if attempt.has_world:
                gains += await host.changes_of_world(await place.sandbox(apart=True))
            if attempt.witness is not None:
                gains += await WITNESSES[attempt.witness](host, sandbox, result)
        await pool.settle()
        if attempt.then is not None:
            async with pool.lease(owner=f"after {attempt.name}", seconds=120) as sandbox:
                after = await sandbox.call("python", {"code": host.filled(attempt.then, sandbox.isolation)}, "then")
                gains += claimed(after) or ([] if "refused:" in after.content else [f"the next lease: {after.content}"])
    except SandboxFailed as error:
        return Verdict(attempt, True, False, f"the sandbox failed: {error}")
    if gains:
        return Verdict(attempt, True, False, first_line("; ".join(gains)))
    reported = re.search(attempt.reported, result.content, re.MULTILINE)
    return Verdict(
        attempt, False, reported is not None, first_line(result.content[reported.start() if reported else 0 :])
    )


async def seen_beside(pool: Pool, code: str) -> list[str]:
    """What another sandbox sees while the lease goes on."""
    # The slot of the pool has the numbers 0 and 1.
    neighbour = await pool.backend.open(2 * pool.size)
    try:
        seen = await neighbour.call("python", {"code": code}, "beside")
    finally:
        await neighbour.close()
    return claimed(seen) or ([] if "refused:" in seen.content else [f"the neighbour: {seen.content}"])


def claimed(result: ToolResult) -> list[str]:
    return [line for line in result.content.splitlines() if line.startswith("ESCAPED")]


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:150] if text.strip() else "(nothing)"


def forget(backend: Backend) -> None:
    """End the backend's launcher, so that the host can be compared with what it was before."""
    if isinstance(backend, EnclosedBackend):
        backend.close()


class HostTooBusy(Exception):
    """The machine did not let an honest call come to its end in time."""


class Host:
    """Things of the host that an attempt may try to reach, and what the host looked like before."""

    def __init__(self, folder: Path, listeners: dict[str, socket.socket], signals: list[int]) -> None:
        self.signals = signals
        self._listeners = listeners
        self._secret = os.environ["CANARY_OF_THE_HOST"]
        self._canary = folder / "canary"
        self._canary.write_text(self._secret)
        self._reference_answer = secrets.token_hex(16)
        self._world_secret = secrets.token_hex(16)
        self.process_name = f"named-{secrets.token_hex(4)}"
        self._folder = folder
        self._before = self._looks()

    def secrets(self) -> dict[str, str]:
        """What no code inside can know: by name."""
        return {
            "the host's secret": self._secret,
            "the reference answer": self._reference_answer,
            "the world's secret": self._world_secret,
        }

    def filled(self, code: str, isolation: str, with_secrets: bool = True) -> str:
        """The attempt's code with what it needs to know of this host; without secrets, whoever shows one found it."""
        ports = {f"{name}_port": str(self._listeners[name].getsockname()[1]) for name in PORTS}
        known = {
            "canary_file": str(self._canary),
            "canary_folder": str(self._folder),
            "canary_secret": self._secret[:8] + '" "' + self._secret[8:],  # joined only when it runs
            "reference_answer": self._reference_answer[:8] + '" b"' + self._reference_answer[8:],
            "world_secret": f"{self._world_secret[:8]}[{self._world_secret[8]}]{self._world_secret[9:]}",  # a pattern
            "host_pid": str(os.getpid()),
            "host_address": own_address(),
            "abstract_name": abstract_name(self._listeners["abstract"]),
            "socket_file": str(self._folder / "socket"),
            "isolation": isolation,
            "process_name": self.process_name,
        }
        if not with_secrets:
            known |= dict.fromkeys(("canary_secret", "reference_answer", "world_secret"), "unknown")
        return PRELUDE + string.Template(code).safe_substitute(known | ports)

    def connections(self) -> list[str]:
        """Names of the listeners that somebody has reached since this was last asked."""
        return [name for name, listener in self._listeners.items() if accepts(listener)]

    async def set_up_world(self, apart: Sandbox) -> None:
        """Raises HostTooBusy: no code of an attempt has run yet, so nothing but the machine can have kept it."""
        parts = World(name="kept", tables={"kept": Table(("secret",), ((self._world_secret,),))}).part("tables")
        result = await apart.call(set_up_world.name, {"tables": parts}, "world")
        if result.is_error or (changes := await self.changes_of_world(apart)):
            raise HostTooBusy(result.content or changes[0])

    async def changes_of_world(self, apart: Sandbox) -> list[str]:
        for _ in range(ASKED_TIMES_MAX):
            answer = await apart.call("sql", {"query": "SELECT secret FROM kept"}, secrets.token_hex(8))
            if answer.content == self._world_secret:
                return []
            # No answer in time is not another answer: on a busy machine a call without a flaw may take too long.
            if re.match(TIMED_OUT, answer.content) is None:
                break
        return [f"the tool apart answers {answer.content}"]

    async def complaints(self) -> list[str]:
        """What is not as it was. Processes get a moment to end."""
        for _ in range(200):
            found = [
                f"{name}: {sorted(now - self._before[name])[:3]}"
                for name, now in self._looks().items()
                if now - self._before[name]
            ]
            if not found:
                break
            await asyncio.sleep(0.1)
        if self._canary.read_text() != self._secret:
            found.append("the canary file was changed")
        return found

    def _looks(self) -> dict[str, set[str]]:
        mounts = {line.split(" - ")[0].split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        owners = {f"{pid} of user {user}" for pid, user in users_of_processes() if FIRST_UID <= user < FIRST_UID + 16}
        return {
            "processes": {str(pid) for pid in descendants(os.getpid())} | owners,
            "mounts": mounts,
            "files": {str(path) for path in Path(tempfile.gettempdir()).glob(f"replayground-gvisor-{os.getpid()}-*")},
            "cgroups": {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{group_prefix(os.getpid())}*")},
        }


PORTS = ("broker", "registry", "server")


@contextlib.asynccontextmanager
async def guarded_host() -> AsyncIterator[Host]:
    """Listeners, a canary file, a canary variable and a signal handler; all gone afterwards."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(open_folder())
        listeners = {name: stack.enter_context(listening(socket.AF_INET, ("0.0.0.0", 0))) for name in PORTS}
        listeners["file"] = stack.enter_context(listening(socket.AF_UNIX, str(folder / "socket")))
        listeners["abstract"] = stack.enter_context(listening(socket.AF_UNIX, f"\0escapes-{secrets.token_hex(8)}"))
        stack.enter_context(environment("CANARY_OF_THE_HOST", secrets.token_hex(16)))
        signals = stack.enter_context(counted_signals())
        yield Host(folder, listeners, signals)


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that every user of the host may enter: only the sandbox stands between."""
    with tempfile.TemporaryDirectory(prefix="escapes-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def listening(family: int, address: object) -> socket.socket:
    listener = socket.socket(family)
    listener.bind(address)  # type: ignore[arg-type]
    if isinstance(address, str) and not address.startswith("\0"):
        os.chmod(address, 0o777)
    listener.listen(8)
    listener.setblocking(False)
    return listener


def accepts(listener: socket.socket) -> bool:
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


@contextlib.contextmanager
def counted_signals() -> Iterator[list[int]]:
    """SIGUSR1 to this process is counted, not deadly."""
    received: list[int] = []

    def count(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = signal.signal(signal.SIGUSR1, count)
    try:
        yield received
    finally:
        signal.signal(signal.SIGUSR1, before)


def abstract_name(listener: socket.socket) -> str:
    name = listener.getsockname()
    return (name if isinstance(name, bytes) else name.encode()).lstrip(b"\0").decode()


def own_address() -> str:
    """The host's address towards the network; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def users_of_processes() -> Iterator[tuple[int, int]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), entry.stat().st_uid


def names_of_processes() -> set[str]:
    """Of all threads that the host knows."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/task/*/comm"):
        with contextlib.suppress(OSError):
            names.add(path.read_text().strip())
    return names


# ------------------------------------------------------------------------------------------------------ the witnesses
# Each returns what the attempt gained, as the host sees it.


async def answers(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    """The same sandbox must go on working, or say that the agent ended it."""
    after = await sandbox.call("python", {"code": "1 + 1"}, "after")
    works = after.content == "2" or (after.error_kind == "agent" and "the sandbox has ended" in after.content)
    return [] if works else [f"the sandbox is crippled: {after.content}"]


async def reached(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    return [f"the host's listener {name} was reached" for name in host.connections()]


async def signalled(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    return ["a process of the host got a signal"] if host.signals else []


async def named(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    gain = "the host knows a process by a name of the agent's choice"
    return [gain] if host.process_name in names_of_processes() else []


async def agents_error(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    return [] if result.error_kind == "agent" else [f"it counts as {result.error_kind}"]


async def collects(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    gains = []
    for path in ("collected", "folder/root/runner.pyc", "folder/root/usr/bin/id", "../runner.pyc", "/runner.pyc"):
        with contextlib.suppress(OSError):
            gains.append(f"{path} was collected: {len(await sandbox.get(path))} bytes")
    return gains


async def puts(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    gains = []
    for path in ("collected", "collected/left", "../left", "/tmp/left"):
        with contextlib.suppress(OSError):
            await sandbox.put(path, b"x")
            gains.append(f"{path} was written")
    return gains


async def snapshots(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(await sandbox.snapshot())) as archive:
        names = archive.getnames()
    return [] if names == ["plain"] else [f"the snapshot holds {names}"]


async def memory_stayed_below(host: Host, sandbox: Sandbox, result: ToolResult) -> list[str]:
    """By the cgroup's own high-water mark. Without a cgroup nobody kept it below.

    The kernel lets a process that it is about to end go a little beyond."""
    enclosure = getattr(sandbox, "enclosure", None)
    cgroup = enclosure.cgroup if isinstance(enclosure, EnclosedProcesses) else None
    if cgroup is None:
        return ["no cgroup counts the memory of the sandbox"]
    allowed = LIMITS.memory_bytes_max + LIMITS.disk_bytes_max + OVERHEAD[sandbox.isolation].memory_bytes + SLACK_BYTES
    peak = cgroup.memory_peak_bytes()
    return [] if peak <= allowed else [f"{peak / MEBIBYTE:.0f} MiB were used"]


SLACK_BYTES = 64 * MEBIBYTE
OVERHEAD = {backend.isolation: backend.overhead for backend in (BubblewrapBackend, GvisorBackend)}
WITNESSES: dict[str, Callable[[Host, Sandbox, ToolResult], Awaitable[list[str]]]] = {
    witness.__name__: witness
    for witness in (answers, reached, signalled, named, agents_error, collects, puts, snapshots, memory_stayed_below)
}


if __name__ == "__main__":
    sys.exit(main())
