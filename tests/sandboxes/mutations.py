"""`make torture escapes`: known attempts recombined and mutated, random system calls between them, for as long as asked.

    python -m tests.sandboxes.mutations [--minutes 60] [--seed N] [--only NUMBER]

What the code prints proves nothing here, since a mutant may print anything. Judged is what the host sees: its listeners,
its signals, its secrets in an output, a sandbox that fails (an agent must never cause an infra error), a next lease
that is not clean, a tool apart that answers something else, and the health of the host before and after. A mutant is a
function of seed and number, so that `--seed S --only N` makes a finding again.
"""

import argparse
import asyncio
import itertools
import os
import random
import re
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from replayground.sandboxes.backends import lacking, open_backend
from replayground.sandboxes.pool import Lease, Pool
from replayground.sandboxes.protocol import SandboxFailed, ToolResult
from replayground.sandboxes.tools.registry import SHIPPED
from replayground.sandboxes.worlds.world import WORLD_TOOLS
from tests.sandboxes.attempts import ATTEMPTS
from tests.sandboxes.escapes import BRIEF, FIRST_UID, Host, HostTooBusy, forget, guarded_host

INGREDIENTS = tuple(attempt.code for attempt in ATTEMPTS if "bubblewrap" in attempt.isolations)
NUMBERS = (0, 1, -1, 2, 3, 100, 255, 4095, 4096, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63))
PATHS = (
    *("/work", "/tmp", "/usr", "/usr/bin/id", "/dev/null", "/proc/self/mem", "/proc/1/root", "/proc/self/fd/3"),
    *("/proc/self/ns/user", "/runner.pyc", "/opt/libraries", "/proc/self/oom_score_adj", "/proc/self/comm", "/"),
)
SYSTEM_CALLS_MAX = 470
# Each runs the parts in another way; %s stands for them, indented.
WRAPPERS = (
    "if True:\n%s",
    "if os.fork() == 0:\n%s",
    "def run():\n%s\nimport threading\nthreading.Thread(target=run, daemon=True).start()",
    "try:\n%s\nfinally: signal.alarm(1)",
    "for _ in range(3):\n%s",
)
LOOK = """
import os
strangers = [name for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())]
print("clean" if not strangers and not os.listdir("/work") and not os.listdir("/tmp") else "unclean")"""
LEASES_PER_SANDBOX = 20
FINDINGS_MAX = 20


class Finding(msgspec.Struct, frozen=True):
    """One mutant that gained something."""

    seed: int
    number: int
    gains: tuple[str, ...]

    def __str__(self) -> str:
        again = f"python -m tests.sandboxes.mutations --seed {self.seed} --only {self.number}"
        return f"{'; '.join(self.gains)[:300]} (again: {again})"


def mutant(seed: int, number: int) -> str:
    """The code of one mutant. The same for the same seed and number."""
    draw = random.Random(f"{seed}/{number}")
    parts = [draw.choice((ingredient, system_calls))(draw) for _ in range(draw.randint(1, 4))]
    return "\n".join(guarded(wrapped(draw, part)) for part in parts)


def ingredient(draw: random.Random) -> str:
    """One known attempt, with some of its numbers and paths exchanged."""
    code = draw.choice(INGREDIENTS)
    code = re.sub(r"\b\d+\b", lambda found: str(draw.choice(NUMBERS)) if draw.random() < 0.15 else found[0], code)
    return re.sub(
        r'"/[a-z0-9/._]*"', lambda found: f'"{draw.choice(PATHS)}"' if draw.random() < 0.2 else found[0], code
    )


def system_calls(draw: random.Random) -> str:
    """Some system calls with arguments that are numbers, paths or memory."""
    lines = []
    for _ in range(draw.randint(1, 30)):
        arguments = ", ".join(argument(draw) for _ in range(draw.randint(0, 6)))
        lines.append(f"libc.syscall({draw.randrange(SYSTEM_CALLS_MAX)}{', ' if arguments else ''}{arguments})")
    return "\n".join(lines)


def argument(draw: random.Random) -> str:
    kind = draw.randrange(4)
    if kind == 0:
        return f"ctypes.c_long({draw.choice(NUMBERS)})"
    if kind == 1:
        return f"ctypes.c_long({draw.randrange(12)})"
    if kind == 2:
        return repr(draw.choice(PATHS).encode())
    return f"ctypes.create_string_buffer({draw.randbytes(16)!r}, {draw.choice((16, 64, 4096))})"


def wrapped(draw: random.Random, code: str) -> str:
    indented = "\n".join(f"    {line}" for line in ("pass", *code.splitlines()))
    return draw.choice(WRAPPERS) % indented


def guarded(code: str) -> str:
    """The part as a string that is executed: one that is no Python any more must not spoil the others."""
    return f"try: exec({code!r})\nexcept BaseException as error: print(type(error).__name__)"


class Outcome(msgspec.Struct, frozen=True):
    """What came of all mutants."""

    played: int
    findings: list[Finding]
    complaints: list[str]
    """What is not as it was on the host."""


async def mutate(minutes: float, seed: int, isolation: str = "bubblewrap", only: int | None = None) -> Outcome:
    """Plays mutants, or only one of them, until the time is over."""
    if reason := lacking(isolation):
        raise RuntimeError(reason)
    async with guarded_host() as host:
        before = own_health()
        numbers: Iterable[int] = itertools.count() if only is None else (only,)
        played, findings = await play(host, isolation, seed, numbers, time.monotonic() + minutes * 60)
        complaints = await host.complaints()
        complaints += [
            f"{name} is {now}, was {before[name]}" for name, now in own_health().items() if now > before[name]
        ]
    return Outcome(played, findings, complaints)


async def play(
    host: Host, isolation: str, seed: int, numbers: Iterable[int], ends_at: float
) -> tuple[int, list[Finding]]:
    backends = [
        open_backend(
            isolation, SHIPPED | WORLD_TOOLS, BRIEF, first_uid=FIRST_UID + 2 * index, leases_per_sandbox_max=leases
        )
        for index, leases in enumerate((1, LEASES_PER_SANDBOX))
    ]
    findings: list[Finding] = []
    played = 0
    async with Pool(backends[0], size=1, warm=0) as fresh, Pool(backends[1], size=1, warm=0) as reused:
        for number in numbers:
            if time.monotonic() >= ends_at or len(findings) >= FINDINGS_MAX:
                break
            try:
                gains = await gained(reused if number % 2 else fresh, host, mutant(seed, number))
            except HostTooBusy as error:
                print(f"mutant {number}: left out, the machine is too busy: {error}", flush=True)
                continue
            played += 1
            if gains:
                findings.append(Finding(seed, number, tuple(gains)))
                print(f"mutant {number}: {findings[-1]}", flush=True)
    for backend in backends:
        forget(backend)
    return played, findings


def own_health() -> dict[str, int]:
    """Numbers of this process and of the kernel that must not grow."""
    return {
        "open descriptors": len(os.listdir("/proc/self/fd")),
        "taint of the kernel": int(Path("/proc/sys/kernel/tainted").read_text()),
    }


async def gained(pool: Pool, host: Host, code: str) -> list[str]:
    """What the host saw of one mutant."""
    gains: list[str] = []
    try:
        async with pool.reserve(owner="mutant", seconds=120) as lease:
            gains += await in_a_lease(lease, host, code)
        await pool.settle()
        async with pool.lease(owner="after a mutant", seconds=120) as sandbox:
            after = await sandbox.call("python", {"code": LOOK}, "look")
            gains += [] if after.content.strip() == "clean" else [f"the next lease: {after.content[:100]}"]
        await pool.settle()
    except SandboxFailed as error:
        gains.append(f"an infra error: {error}")
    gains += [f"the listener {name} was reached" for name in host.connections()]
    if host.signals:
        gains.append(f"the host got {len(host.signals)} signals")
        host.signals.clear()
    return gains


async def in_a_lease(lease: Lease, host: Host, code: str) -> list[str]:
    sandbox, apart = await lease.sandbox(), await lease.sandbox(apart=True)
    await host.set_up_world(apart)
    result = await sandbox.call("python", {"code": host.filled(code, sandbox.isolation, with_secrets=False)}, "mutant")
    after = await sandbox.call("python", {"code": "1 + 1"}, "after")
    return [*told(host, result), *told(host, after), *await host.changes_of_world(apart)]


def told(host: Host, result: ToolResult) -> list[str]:
    leaked = [f"it found {name}" for name, secret in host.secrets().items() if secret in result.content]
    # A tool error is the agent's own: its code shares the process with its tools.
    return leaked + (["it counts as an infra error"] if result.error_kind == "infra" else [])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make torture escapes", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (60)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the mutants; drawn if not given")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one mutant, to make a finding again")
    parser.add_argument("--isolation", default="bubblewrap", choices=("bubblewrap", "gvisor"))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    if arguments.only is not None:
        print(mutant(arguments.seed, arguments.only))
    outcome = asyncio.run(mutate(arguments.minutes, arguments.seed, arguments.isolation, arguments.only))
    print(f"host: {'; '.join(outcome.complaints) or 'healthy'}")
    print(f"{outcome.played} mutants, {len(outcome.findings)} gained something")
    return 1 if outcome.findings or outcome.complaints or not outcome.played else 0


if __name__ == "__main__":
    sys.exit(main())
