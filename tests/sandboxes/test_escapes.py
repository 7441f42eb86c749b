"""Every attempt to get out or to reach the next lease, on every isolation here; and that each can succeed."""

import os
import struct
from collections.abc import AsyncIterator

import msgspec
import pytest

from replayground.sandboxes import seccomp
from replayground.sandboxes.backends import lacking
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import Overhead
from replayground.sandboxes.backends.processes import Launch
from replayground.sandboxes.limits import MEBIBYTE
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Sandbox
from replayground.sandboxes.tools.registry import SHIPPED
from replayground.sandboxes.worlds.world import WORLD_TOOLS
from tests.sandboxes.attempts import ATTEMPTS
from tests.sandboxes.escapes import FIRST_UID, LIMITS, Host, Place, forget, guarded_host, judged, place_of, pools
from tests.sandboxes.mutations import play

BY_NAME = {attempt.name: attempt for attempt in ATTEMPTS}
ON_BUBBLEWRAP = [attempt.name for attempt in ATTEMPTS if "bubblewrap" in attempt.isolations]
# A sandbox of gVisor takes long to open, so here are only those that gVisor stops in its own way; `make escapes` has all.
ON_GVISOR = [
    *("host file", "signals to the runner", "reach the broker", "symlink to a folder"),
    *("fork bomb", "memory of many processes", "output flood", "names of processes"),
]


@pytest.fixture(scope="module")
async def host() -> AsyncIterator[Host]:
    """The host before and after: whatever an attempt left behind fails the last test."""
    async with guarded_host() as host:
        yield host


@pytest.fixture(scope="module")
async def field(request: pytest.FixtureRequest, host: Host) -> AsyncIterator[dict[Place, Pool]]:
    if reason := lacking(request.param):
        pytest.skip(reason)
    async with pools(request.param) as field:
        yield field
    assert await host.complaints() == []


@pytest.mark.parametrize(
    ("field", "name"),
    [*(("bubblewrap", name) for name in ON_BUBBLEWRAP), *(("gvisor", name) for name in ON_GVISOR)],
    indirect=["field"],
)
async def test_attempt_is_contained_and_reported_as_what_it_was(
    field: dict[Place, Pool], host: Host, name: str
) -> None:
    verdict = await judged(field[place_of(BY_NAME[name])], BY_NAME[name], host)
    assert (verdict.word, verdict.text) == ("contained", verdict.text)


@pytest.mark.parametrize("field", ["bubblewrap"], indirect=True)
async def test_the_host_knows_processes_in_bubblewrap_by_names_of_the_agent(
    field: dict[Place, Pool], host: Host
) -> None:
    """What docs/threat_model.md says is open there, and the control of the attempt in gVisor."""
    verdict = await judged(field["ordinary"], BY_NAME["names of processes"], host)
    assert verdict.word == "SUCCEEDED"


def test_there_are_enough_attempts() -> None:
    assert len(BY_NAME) == len(ATTEMPTS) >= 40


class Weakened(BubblewrapBackend):
    """A sandbox with a hole."""

    def __init__(
        self,
        *,
        without: tuple[str, ...] = (),
        added: tuple[str, ...] = (),
        filtered: bool = True,
        runner: tuple[tuple[str, str], ...] = (),
        host_environment: bool = False,
        overhead: Overhead | None = None,
        leases: int = 1,
        shows_inodes_of_the_host: bool = False,
    ) -> None:
        super().__init__(SHIPPED, LIMITS, leases, first_uid=FIRST_UID + 12)
        self._shows_inodes_of_the_host = shows_inodes_of_the_host
        self._without, self._added, self._host_environment = without, added, host_environment
        self.overhead = overhead or self.overhead
        if not filtered:
            self._seccomp_program = struct.pack("<HBBI", seccomp.RETURN, 0, 0, seccomp.RETURN_ALLOW)
        for text, other in runner:
            assert text in self.runner_source, text
            self.runner_source = self.runner_source.replace(text, other)

    def _launch(self, slot: int) -> Launch:
        launch = super()._launch(slot)
        words = [word for word in launch.command if word not in self._without]
        if self._shows_inodes_of_the_host:
            words = [word.removeprefix("/mnt") if word.startswith(("/mnt/usr", "/mnt/dev")) else word for word in words]
        at = words.index("--seccomp")
        return msgspec.structs.replace(
            launch,
            command=[*words[:at], *self._added, *words[at:]],
            environment=dict(os.environ) if self._host_environment else launch.environment,
        )


KEEPS_THE_SESSION = (
    ("        self.end_all_sessions()\n        self.numbers.clear()\n        for path", "        for path"),
    NEVER_DIRTY := ("if os.listdir(path) or", "if False and"),
)
HOLES: dict[str, tuple[list[str], dict[str, object]]] = {
    "no system call is refused": (
        [
            *(
                "keyctl",
                "shared memory",
                "memfd",
                "netlink socket",
                "watch",
                "watch by dnotify",
                "lock",
                "open file lock",
            ),
            *("drop pages", "load pages", "probe pages by mincore"),
        ],
        {"filtered": False},
    ),
    "user namespaces are allowed": (["user namespace"], {"filtered": False, "without": ("--disable-userns",)}),
    "the host's network": (["reach the broker", "abstract socket"], {"filtered": False, "added": ("--share-net",)}),
    "the host's files": (["host file"], {"added": ("--ro-bind", "/etc", "/etc")}),
    "the host's inodes": (["POSIX lock", "probe pages"], {"shows_inodes_of_the_host": True, "filtered": False}),
    "the host's environment": (["host environment"], {"without": ("--clearenv",), "host_environment": True}),
    "a writable root": (["write to the root"], {"without": ("--remount-ro", "/")}),
    "a readable runner": (["runner's memory"], {"runner": (("set_dumpable(False)", "set_dumpable(True)"),)}),
    "a runner with a signal handler": (
        ["signals to the runner"],
        {
            "runner": (
                ("_signal.signal(_signal.SIGINT, _signal.SIG_DFL)", "_signal.signal(15, lambda *_: os._exit(1))"),
            )
        },
    ),
    "a collector that follows links": (
        ["symlink to a folder"],
        {"runner": (("os.O_NOFOLLOW", "0"), ("if not os.path.samestat(before, os.fstat(descriptor))", "if False"))},
    ),
    "a disk that is not wiped": (
        ["files left"],
        {"runner": (("            wipe(path)", "            pass"), NEVER_DIRTY), "leases": 200},
    ),
    "a session that lives on": (["surviving daemon", "names left"], {"runner": KEEPS_THE_SESSION, "leases": 200}),
    "a sandbox that is used again": (["numbers of processes", "numbers of inodes"], {"leases": 200}),
    "limits that can be raised": (
        ["raise a limit"],
        {"runner": (('        (resource.RLIMIT_NPROC, limits["processes_max"]),\n', ""),)},
    ),
    "no limit for all processes together": (
        ["memory of many processes"],
        {"overhead": Overhead(memory_bytes=4096 * MEBIBYTE, processes=4)},
    ),
}


@pytest.mark.parametrize("hole", HOLES)
async def test_attempts_do_succeed_without_the_wall(host: Host, hole: str) -> None:
    if reason := lacking("bubblewrap"):
        pytest.skip(reason)
    names, weakening = HOLES[hole]
    backend = Weakened(**weakening)  # type: ignore[arg-type]
    async with Pool(backend, size=1, warm=0) as pool:
        verdicts = {name: await judged(pool, BY_NAME[name], host) for name in names}
    forget(backend)
    assert {name: verdict.word for name, verdict in verdicts.items()} == dict.fromkeys(names, "SUCCEEDED")


class OneRoom(Pool):
    """What should run apart runs beside the agent's code."""

    async def open_sandbox(self, number: int, apart: bool) -> Sandbox:
        return await super().open_sandbox(number % self.size, False)


async def test_attempts_on_the_world_do_succeed_when_nothing_is_apart(host: Host) -> None:
    if reason := lacking("bubblewrap"):
        pytest.skip(reason)
    beside = {name: msgspec.structs.replace(tool, apart=False) for name, tool in SHIPPED.items()}
    backend = BubblewrapBackend(beside | WORLD_TOOLS, LIMITS, first_uid=FIRST_UID + 12)
    async with OneRoom(backend, size=1, warm=0) as pool:
        words = [(await judged(pool, attempt, host)).word for attempt in ATTEMPTS if attempt.has_world]
    forget(backend)
    assert words == ["SUCCEEDED", "SUCCEEDED"]


async def test_mutants_gain_nothing(host: Host) -> None:
    """A few of those that `make torture escapes` makes for an hour; the same ones each time."""
    if reason := lacking("bubblewrap"):
        pytest.skip(reason)
    played, findings = await play(host, "bubblewrap", 17, range(12), float("inf"))
    assert ([str(finding) for finding in findings], played) == ([], 12)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_filter_is_well_formed(machine: str) -> None:
    program = seccomp.filter_program(machine)
    assert len(program) % 8 == 0
    assert len(program) // 8 < 4096
    numbers = seccomp.allowed_numbers(machine)
    assert len(numbers) == len(set(numbers))
    assert 435 not in numbers  # clone3


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="no seccomp table for riscv64"):
        seccomp.filter_program("riscv64")
