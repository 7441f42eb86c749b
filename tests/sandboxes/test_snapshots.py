"""Snapshots: what is in them, what never is, and a lease that begins with one."""

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.limits import Limits
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import SHIPPED
from tests.sandboxes.conftest import Run

MAKE = r"""
import os
os.makedirs('a/b/empty'); open('a/b/f', 'wb').write(bytes(range(256))); open('run', 'w').close(); os.chmod('run', 0o755)
open(b'odd \xff\n', 'w').write('é'); os.symlink('/runner.pyc', 'link'); os.mkfifo('pipe'); os.link('a/b/f', 'second name')
"""
LOOK = """
import os
paths = [os.path.join(folder, name) for folder, below, names in os.walk(b'/work') for name in below + names]
sorted((path, oct(os.stat(path).st_mode)) for path in paths)"""


async def test_snapshot_of_a_tree(sandbox: RunnerSandbox, run: Run) -> None:
    await run(MAKE)
    await run("os.unlink('second name')")
    snapshot = await sandbox.snapshot()
    await run("os.unlink('link'); os.unlink('pipe')")
    before = await run(LOOK)
    assert await sandbox.reset()
    await sandbox.restore(snapshot)
    assert await run(LOOK) == before
    assert await sandbox.get("a/b/f") == bytes(range(256))


async def test_snapshot_into_a_new_lease() -> None:
    async with Pool(BubblewrapBackend(SHIPPED, Limits(), first_uid=309_700), size=1) as pool:
        async with pool.lease(owner="a", seconds=60) as sandbox:
            await sandbox.call("python", {"code": "open('kept', 'w').write('x')"}, "a")
            snapshot = await sandbox.snapshot()
        async with pool.lease(owner="b", seconds=60, snapshot=snapshot) as sandbox:
            assert (await sandbox.call("python", {"code": "open('kept').read()"}, "a")).content == "'x'"
            assert (await sandbox.call("python", {"code": "open('kept', 'a').write('y')"}, "b")).content == "1"
        with pytest.raises(OSError, match="cannot be read"):
            async with pool.lease(owner="c", seconds=60, snapshot=b"x" * 2000):
                pass
        async with pool.lease(owner="d", seconds=60) as sandbox:
            assert (await sandbox.call("python", {"code": "__import__('os').listdir('.')"}, "a")).content == "[]"


async def test_snapshot_is_bounded_both_ways(sandbox: RunnerSandbox, run: Run) -> None:
    await run("for n in range(3):\n    with open(f'sparse{n}', 'wb') as f: f.truncate(7_000_000)")
    with pytest.raises(OSError, match="would be longer than"):
        await sandbox.snapshot()
    assert await run("1 + 1") == "2"
    with pytest.raises(OSError, match="longer than"):
        await sandbox.restore(b"\0" * 50_000_000)
    assert await run("1 + 1") == "2"


async def test_a_full_disk_refuses_the_rest_of_a_snapshot(sandbox: RunnerSandbox, run: Run) -> None:
    await run("open('most', 'wb').write(b'x' * 6_000_000)")
    snapshot = await sandbox.snapshot()
    assert await sandbox.reset()
    await run("open('/tmp/taken', 'wb').write(b'x' * 4_000_000)")
    with pytest.raises(OSError, match="No space left"):
        await sandbox.restore(snapshot)
