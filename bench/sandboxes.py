"""Sandboxes compared with bare bubblewrap and Python, gVisor beside them, 200 at once, and the memory of an idle one.

python -m bench sandboxes [--quick]
"""

import asyncio
import math
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.rounds import Figure, figure
from replayground.sandboxes.backends import lacking
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import descendants
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.enclosed import (
    CLEAN_ENVIRONMENT,
    EnclosedBackend,
    EnclosedProcesses,
    system_links,
)
from replayground.sandboxes.backends.gvisor import GvisorBackend
from replayground.sandboxes.limits import MEBIBYTE
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import SHIPPED
from replayground.sandboxes.worlds.world import WORLD_TOOLS

AT_ONCE = 200
# A machine at a load of 50 took six minutes to open them; it must not count as one that cannot.
CROWD_SECONDS_MAX = 1800
# Away from the uids of workers (1,000,000 and up) and the default of backends (200,000).
FIRST_UID = 700_000
CODE = "503 * 9 + 17"
# The fewest options with which bubblewrap still runs Python isolated from the host.
BARE = [
    *("/usr/bin/bwrap", "--unshare-all", "--cap-drop", "ALL", "--die-with-parent", "--ro-bind", "/usr", "/usr"),
    *(word for name in system_links() for word in ("--symlink", f"usr/{name}", f"/{name}")),
    *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--", "/usr/bin/python3", "-I", "-c", f"print({CODE})"),
]


def measure(quick: bool) -> dict[str, Figure]:
    """open_to_bare: lower is better, 1 = as fast as bwrap and Python alone. sandboxes_at_once: leases that worked.
    gvisor_…: the same of gVisor, in the same rounds, where it is installed."""
    return asyncio.run(_measure(*((3, 5, 1) if quick else (6, 10, 3))))


async def _measure(rounds: int, openings: int, crowds: int) -> dict[str, Figure]:
    # Kept after a lease, to weigh an idle one and to compare a lease in a used sandbox with one in a new sandbox.
    backend = BubblewrapBackend(SHIPPED | WORLD_TOOLS, leases_per_sandbox_max=10_000, first_uid=FIRST_UID)
    fresh = BubblewrapBackend(SHIPPED | WORLD_TOOLS, leases_per_sandbox_max=1, first_uid=FIRST_UID)
    gvisor = None if lacking("gvisor") else GvisorBackend(SHIPPED | WORLD_TOOLS)
    backends = [each for each in (backend, fresh, gvisor) if each is not None]
    try:
        # The first open compiles the tools and starts the launcher, once for all.
        for each in backends:
            await (await each.open(0)).close()
        opened = []
        for _ in range(rounds):
            found = await _opening(backend, openings)
            found["lease_ms"] = await _leases(fresh, openings)
            found["lease_in_a_used_sandbox_ms"] = await _leases(backend, openings)
            if gvisor is not None:
                beside = await _opening(gvisor, openings)
                found |= {f"gvisor_{name}": beside[name] for name in ("open_to_bare", "open_ms", "further_call_ms")}
            opened.append(found)
        crowded = [await _crowd(backend, AT_ONCE) for _ in range(crowds)]
    finally:
        for each in backends:
            each.close()
    return {name: figure(found[name] for found in opened) for name in opened[0]} | {
        name: figure(found[name] for found in crowded) for name in crowded[0]
    }


async def _opening(backend: EnclosedBackend, openings: int) -> dict[str, float]:
    """Medians of one round. Bare is bubblewrap, whatever the backend."""
    bare, opened, further = [], [], []
    for _ in range(openings):
        # Bare, then a sandbox, in turn: a slow moment of the machine then slows both.
        bare.append(await _seconds(_bare_start))
        began = time.perf_counter()
        sandbox = await backend.open(0)
        # With its first call: the bare start runs Python code too.
        await _call(sandbox, "first")
        opened.append(time.perf_counter() - began)
        further += [await _seconds(lambda: _call(sandbox, f"further-{number}")) for number in range(10)]  # noqa: B023
        await sandbox.close()
    return {
        "open_to_bare": statistics.median(opened) / statistics.median(bare),
        "open_ms": statistics.median(opened) * 1000,
        "bare_ms": statistics.median(bare) * 1000,
        "further_call_ms": statistics.median(further) * 1000,
    }


async def _leases(backend: BubblewrapBackend, leases: int) -> float:
    """Median milliseconds of a lease with one call, until the next can begin: opening, call, and reset or end."""
    taken = []
    async with Pool(backend, size=1, warm=0) as pool:
        for number in range(leases + 1):
            began = time.perf_counter()
            async with pool.lease(owner="bench", seconds=600) as sandbox:
                assert isinstance(sandbox, RunnerSandbox)
                await _call(sandbox, f"lease-{number}")
            await pool.settle()
            taken.append(time.perf_counter() - began)
    # Without the first, which opens the sandbox that is used again.
    return statistics.median(taken[1:]) * 1000


async def _crowd(backend: BubblewrapBackend, at_once: int) -> dict[str, float]:
    """Holds `at_once` leases at the same time, each with a successful call; then measures idle sandboxes."""
    # Each sandbox holds several descriptors on the host; the usual limit of 1,024 would be too low.
    _allow_descriptors(20 * at_once)
    all_here = asyncio.Event()
    arrived = 0
    async with Pool(backend, size=at_once, warm=0) as pool:

        async def visit(number: int) -> float:
            nonlocal arrived
            async with pool.lease(owner=f"visitor {number}", seconds=CROWD_SECONDS_MAX) as sandbox:
                assert isinstance(sandbox, RunnerSandbox)
                await _call(sandbox, "crowd")
                arrived += 1
                # Nobody leaves before all are here, so all leases really exist at the same time.
                if arrived == at_once:
                    all_here.set()
                async with asyncio.timeout(CROWD_SECONDS_MAX):
                    await all_here.wait()
                return _proportional_megabytes(sandbox)

        began = time.perf_counter()
        ends = await asyncio.gather(*(visit(number) for number in range(at_once)), return_exceptions=True)
        seconds = time.perf_counter() - began
        # Sandboxes reset in the background after a lease: only then are they idle.
        await pool.settle()
        idle = [_proportional_megabytes(sandbox) for sandbox in pool.open if isinstance(sandbox, RunnerSandbox)]
    failed = [end for end in ends if isinstance(end, BaseException)]
    if failed:
        print(f"{len(failed)} leases failed, the first by {failed[0]!r}")
    busy = [end for end in ends if isinstance(end, float)]
    # None are left on a machine too busy to open so many in time: the other figures must not be lost by it.
    return {
        "sandboxes_at_once": float(at_once - len(failed)),
        "sandboxes_at_once_seconds": seconds,
        "busy_sandbox_megabytes": statistics.median(busy) if busy else math.nan,
        "idle_sandbox_megabytes": statistics.median(idle) if idle else math.nan,
    }


async def _bare_start() -> None:
    process = await asyncio.create_subprocess_exec(*BARE, stdout=subprocess.PIPE, env=CLEAN_ENVIRONMENT)
    said, _ = await process.communicate()
    if said != b"4544\n":
        raise RuntimeError(f"bare bubblewrap did not run: {said!r}")


async def _call(sandbox: RunnerSandbox, key: str) -> None:
    result = await sandbox.call("python", {"code": CODE}, key)
    if result.content != "4544":
        raise RuntimeError(f"a call in the sandbox did not work: {result.content}")


async def _seconds(action: Callable[[], Awaitable[None]]) -> float:
    began = time.perf_counter()
    await action()
    return time.perf_counter() - began


def _proportional_megabytes(sandbox: RunnerSandbox) -> float:
    """Memory (PSS) of all processes of the sandbox, bwrap included, in mebibytes. Shared pages are divided."""
    assert isinstance(sandbox.enclosure, EnclosedProcesses)
    return sum(_proportional_bytes(pid) for pid in descendants(sandbox.enclosure.process.pid)) / MEBIBYTE


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _allow_descriptors(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))
