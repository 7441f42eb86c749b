"""Where the groups of sandboxes are made, what is written there, and that nothing is left of them."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from sandboxes.backends import enclosed
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.backends.cgroups import (
    PREFIX,
    Cgroup,
    CgroupRoot,
    NoCgroups,
    Overhead,
    cgroup_root_in,
    find_cgroup_root,
    settings,
    started_at,
)
from sandboxes.backends.enclosed import EnclosedProcesses
from sandboxes.limits import MEBIBYTE, Limits
from sandboxes.tools.registry import SHIPPED
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
    with pytest.raises(NoCgroups, match="no cgroup controller memory is handed down"):
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
    dead = [folder / f"{PREFIX}-{2**22 + 1}-77-0" for folder in home.folders]
    open_sandbox = [folder / f"{PREFIX}-{os.getpid()}-{started_at(os.getpid())}-test" for folder in home.folders]
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


def test_without_cgroups_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nowhere() -> CgroupRoot:
        raise NoCgroups("nobody hands one down")

    monkeypatch.setattr(enclosed, "find_cgroup_root", nowhere)
    with caplog.at_level(logging.WARNING):
        backend = BubblewrapBackend(SHIPPED)
    assert backend.isolation_notes == (
        "no limit covers a bubblewrap sandbox as a whole: no cgroup, as nobody hands one down",
    )
    assert [vars(record)["reason"] for record in caplog.records] == list(backend.isolation_notes)
