"""Where the groups of sandboxes are made, what is written there, and that nothing is left of them."""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from replayground.sandboxes.backends import enclosed
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.cgroups import (
    PREFIX,
    Cgroup,
    CgroupRoot,
    NoCgroups,
    Overhead,
    ParentGroup,
    cgroup_root_in,
    descendants,
    disk_of,
    find_cgroup_root,
    group_prefix,
    members_of,
    memory_bytes_of,
    number_in,
    settings,
)
from replayground.sandboxes.backends.enclosed import EnclosedProcesses
from replayground.sandboxes.limits import MEBIBYTE, Limits, Totals
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.registry import SHIPPED
from tests.sandboxes.test_processes import wait_until_gone

OVERHEAD = Overhead(memory_bytes=MEBIBYTE, processes=2)
VERSION_1 = """24 23 0:21 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro
25 24 0:22 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct
26 24 0:23 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
27 24 0:24 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids
28 24 0:25 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


@pytest.fixture
def home() -> CgroupRoot:
    try:
        return find_cgroup_root()
    except (NoCgroups, OSError) as error:
        pytest.skip(f"no cgroups here: {error}")


def test_version_1_is_found_below_the_group_of_this_program() -> None:
    own = "4:memory:/jobs/one\n3:pids:/\n2:cpu,cpuacct:/jobs\n0::/\n"
    below = Path("/sys/fs/cgroup")
    assert cgroup_root_in(VERSION_1, own) == CgroupRoot(
        1, (below / "memory/jobs/one", below / "pids", below / "cpu,cpuacct/jobs")
    )


def test_version_2_is_found_where_the_controllers_are_handed_down(tmp_path: Path) -> None:
    mounts = f"30 23 0:26 / {tmp_path} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    own = tmp_path / "user.slice/app.service"
    own.mkdir(parents=True)
    for folder, handed_down in ((own, ""), (own.parent, "cpu memory pids"), (tmp_path, "cpu memory pids io")):
        (folder / "cgroup.subtree_control").write_text(handed_down)
    assert cgroup_root_in(mounts, "0::/user.slice/app.service\n") == CgroupRoot(2, (own.parent,))
    (own.parent / "cgroup.subtree_control").write_text("cpu")
    assert cgroup_root_in(mounts, "0::/user.slice/app.service\n") == CgroupRoot(2, (tmp_path,))
    (tmp_path / "cgroup.subtree_control").write_text("")
    with pytest.raises(NoCgroups, match="the cgroup controller memory is not delegated"):
        cgroup_root_in(mounts, "0::/user.slice/app.service\n")


def test_both_versions_get_the_same_limits() -> None:
    limits = Limits(memory_bytes_max=10 * MEBIBYTE, disk_bytes_max=MEBIBYTE, processes_max=7, cpu_cores_max=0.5)
    memory = str(12 * MEBIBYTE)
    assert settings(2, limits, OVERHEAD) == [("memory.max", memory), ("pids.max", "9"), ("cpu.max", "50000 100000")]
    assert dict(settings(1, limits, OVERHEAD)) == {
        "memory.limit_in_bytes": memory,
        "pids.max": "9",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
    }


async def test_sweep_kills_what_is_left_and_removes_the_group(home: CgroupRoot) -> None:
    cgroup = Cgroup(home, Limits(), OVERHEAD)
    process = await asyncio.create_subprocess_exec("sleep", "600")
    cgroup.adopt([process.pid, 2**22 + 1])  # the second is nobody
    assert cgroup.members() == {process.pid}
    await cgroup.sweep()
    assert await process.wait() == -9
    assert not any(folder.exists() for folder in cgroup.folders)


def test_groups_of_the_dead_are_removed_and_those_of_the_living_stay(home: CgroupRoot) -> None:
    dead = [folder / f"{group_prefix(2**22 + 1)}0123abcd" for folder in home.folders]
    open_sandbox = [folder / f"{group_prefix(os.getpid())}0123abcd" for folder in home.folders]
    for folder in (*dead, *open_sandbox):
        folder.mkdir()
    try:
        find_cgroup_root()
        assert not any(folder.exists() for folder in dead)
        assert all(folder.exists() for folder in open_sandbox)
    finally:
        for folder in open_sandbox:
            folder.rmdir()


async def test_every_process_of_a_sandbox_is_in_its_group(home: CgroupRoot) -> None:
    sandbox = await BubblewrapBackend(SHIPPED, first_uid=309_200).open(0)
    enclosure = sandbox.enclosure
    assert isinstance(enclosure, EnclosedProcesses)
    assert enclosure.cgroup is not None
    try:
        await sandbox.call(
            "python", {"code": "import os, time\nfor _ in range(3):\n    os.fork() or time.sleep(600)"}, "a"
        )
    finally:
        members = enclosure.cgroup.members()
        await sandbox.close()
    assert len(members) >= 3  # bwrap, the runner and the session, at least
    assert not any(folder.exists() for folder in enclosure.cgroup.folders)
    await asyncio.to_thread(wait_until_gone, members)


async def test_memory_of_all_processes_together_is_reported(home: CgroupRoot) -> None:
    limits = Limits(memory_bytes_max=64 * MEBIBYTE, disk_bytes_max=MEBIBYTE, call_timeout_seconds=120)
    sandbox = await BubblewrapBackend(SHIPPED, limits, first_uid=309_300).open(0)
    code = """
import os
def hold():
    held = bytearray(b"x" * (20 << 20))
    os.read(os.open("/work/never", os.O_RDWR), 1)
os.mkfifo("/work/never")
children = [pid for pid in (os.fork() for _ in range(1)) if pid]
if not children: hold()
more = []
while True:
    pid = os.fork()
    if pid == 0: hold()
    more.append(pid)
    done, status = os.waitpid(-1, os.WNOHANG)
    if done: break
status"""
    try:
        result = await sandbox.call("python", {"code": code}, "a")
    finally:
        await sandbox.close()
    assert "it used more than 64 MiB of memory" in result.content


TOGETHER_BYTES = 320 * MEBIBYTE
EACH = Limits(memory_bytes_max=256 * MEBIBYTE, disk_bytes_max=MEBIBYTE, call_timeout_seconds=120)
HOLD = """
import os, time
reading, writing = os.pipe()
if os.fork() == 0:
    held = bytearray({mebibytes} << 20); held[::4096] = b"x" * len(held[::4096])
    os.write(writing, b"held"); time.sleep(600)
os.close(writing); os.read(reading, 4).decode()"""


@pytest.fixture
async def bounded(home: CgroupRoot) -> AsyncIterator[BubblewrapBackend]:
    """A backend whose sandboxes have 320 MiB together, in a parent group of this test."""
    backend = BubblewrapBackend(SHIPPED, EACH, first_uid=309_800)
    totals = Totals(memory_share=TOGETHER_BYTES / memory_bytes_of(home), cpu_share=0.9, processes_max=100)
    backend.parent = ParentGroup(home, totals, name=f"{PREFIX}-test{os.getpid()}")
    yield backend
    folders = backend.parent.root.folders
    backend.close()
    assert not any(folder.exists() for folder in folders)


async def test_all_sandboxes_together_stay_below_their_total(bounded: BubblewrapBackend) -> None:
    """Each within its own limit; the one that the kernel ends had more than its share, so it is the agent's error."""
    assert bounded.parent is not None
    sandboxes = [await bounded.open(slot) for slot in range(2)]
    try:
        results = [await sandbox.call("python", {"code": HOLD.format(mebibytes=200)}, "a") for sandbox in sandboxes]
        again = [await sandbox.call("python", {"code": "'goes on'"}, "b") for sandbox in sandboxes]
        peak = number_in(bounded.parent.root.folders[0] / "memory.max_usage_in_bytes") or number_in(
            bounded.parent.root.folders[0] / "memory.peak"
        )
    finally:
        for sandbox in sandboxes:
            await sandbox.close()
    assert 200 * MEBIBYTE < peak <= TOGETHER_BYTES
    told = " ".join(result.content for result in (*results, *again))
    assert "while the memory of all sandboxes together was used up" in told


async def test_who_kept_to_its_share_is_not_blamed(bounded: BubblewrapBackend, home: CgroupRoot) -> None:
    """A process of the host fills what all have together; the kernel ends the sandbox's, which had little."""
    sandbox, unasked = await bounded.open(0), await bounded.open(1)
    for each in (sandbox, unasked):
        assert (await each.call("python", {"code": HOLD.format(mebibytes=40)}, "a")).content == "'held'"
    others = Cgroup(home, msgspec.structs.replace(EACH, memory_bytes_max=1024 * MEBIBYTE), OVERHEAD, bounded.parent)
    hold = "held = bytearray(290 << 20); held[::4096] = b'x' * (290 << 8)"
    hog = f"import sys; sys.stdin.read(1); {hold}; print('held', flush=True); sys.stdin.read()"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", hog), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        others.adopt([process.pid])
        process.stdin.write(b"x")
        assert await process.stdout.readline() == b"held\n"
        with pytest.raises(SandboxFailed, match="used up by others"):
            await sandbox.call("python", {"code": "1 + 1"}, "b")
    finally:
        await others.sweep()
        await process.wait()
        await sandbox.close()
        await unasked.close()


async def test_a_lease_waits_while_there_is_no_room(bounded: BubblewrapBackend) -> None:
    has_asked = asyncio.Event()

    class Watched(Pool):
        async def _take(self) -> int:
            has_asked.set()
            return await super()._take()

    async with Watched(bounded, size=2, warm=0) as pool:

        async def second() -> str:
            async with pool.lease(owner="second", seconds=600) as sandbox:
                assert "first" not in pool.leased.values()
                return (await sandbox.call("python", {"code": "1 + 1"}, "a")).content

        async with pool.lease(owner="first", seconds=600) as sandbox:
            assert (await sandbox.call("python", {"code": HOLD.format(mebibytes=100)}, "a")).content == "'held'"
            assert not bounded.has_room()
            has_asked.clear()
            waiting = asyncio.create_task(second())
            await has_asked.wait()
        assert await waiting == "2"


async def test_a_program_that_closes_leaves_the_others_their_parent(
    bounded: BubblewrapBackend, home: CgroupRoot
) -> None:
    """Whoever closes last removes it; whoever opens after that makes it again."""
    assert bounded.parent is not None
    other = ParentGroup(home, bounded.parent.totals, name=bounded.parent.root.folders[0].name)
    other.remove()
    sandbox = await bounded.open(0)
    other.remove()
    assert all(folder.exists() for folder in (*other.root.folders, other.root.reads or other.root.folders[0]))
    if other.root.reads is not None:
        assert members_of(other.root.reads) >= descendants(sandbox.enclosure.process.pid)  # type: ignore[attr-defined]
    await sandbox.close()


def test_reads_are_limited_for_the_disk_of_the_system(home: CgroupRoot) -> None:
    if home.reads is None or disk_of("/usr") is None:
        pytest.skip("no block device, or no controller for it")
    parent = ParentGroup(home, Totals(disk_read_bytes_per_second_max=MEBIBYTE), name=f"{PREFIX}-reads{os.getpid()}")
    assert parent.root.reads is not None
    limit = (parent.root.reads / "blkio.throttle.read_bps_device").read_text()
    parent.remove()
    assert limit == f"{disk_of('/usr')} {MEBIBYTE}\n"
    assert not parent.root.reads.exists()


async def test_names_of_groups_and_mounts_tell_nothing_of_the_host() -> None:
    backend = BubblewrapBackend(SHIPPED, first_uid=309_900, libraries=Path(__file__).parent)
    sandbox = await backend.open(0)
    code = "print(open('/proc/self/cgroup').read(), open('/proc/self/mountinfo').read())"
    shown = (await sandbox.call("python", {"code": code}, "a")).content
    await sandbox.close()
    backend.close()
    assert str(os.getpid()) not in shown
    assert str(Path(__file__).parent) not in shown


def test_without_cgroups_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nowhere() -> CgroupRoot:
        raise NoCgroups("nobody hands one down")

    monkeypatch.setattr(enclosed, "find_cgroup_root", nowhere)
    with caplog.at_level(logging.WARNING):
        backend = BubblewrapBackend(SHIPPED)
    assert backend.isolation_notes[0] == (
        "limits of a bubblewrap sandbox hold for each process only, because there is no cgroup: nobody hands one down"
    )
    assert [vars(record)["reason"] for record in caplog.records] == list(backend.isolation_notes)
