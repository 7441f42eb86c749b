"""What one lease leaves to the next on disk: nothing, however hostile the tree; and whose processes they are."""

import os
from pathlib import Path

import pytest

from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.backends.enclosed import EnclosedProcesses
from tests.sandboxes.conftest import Run


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose a uid")
async def test_host_uid_is_unprivileged(sandbox: RunnerSandbox) -> None:
    assert isinstance(sandbox.enclosure, EnclosedProcesses)
    for status in statuses_of_family(sandbox.enclosure.process.pid):
        assert "Uid:\t300000\t300000\t300000\t300000" in status


def statuses_of_family(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{member}/status").read_text() for member in (str(pid), *children)]


HOSTILE_TREES = {
    "deep": """
import os
for _ in range(900):
    os.mkdir('d' * 200); os.chdir('d' * 200)
open('bottom', 'w').close()
""",
    "locked": """
import os
os.makedirs('a/b/c'); open('a/b/c/f', 'w').close()
for path in ('a/b/c/f', 'a/b/c', 'a/b', 'a', '/work', '/tmp'): os.chmod(path, 0)
""",
    "links": """
import os
os.symlink('/usr', 'usr'); os.symlink('.', 'self'); os.symlink('gone', 'dangling'); os.mkfifo('fifo')
os.mkdir('x'); os.symlink('/usr/bin', 'x/bin'); open('one', 'w').close(); os.link('one', 'x/two')
""",
    "names": r"""
import os
for name in (b'\xff\xfe', b'new\nline', b'-rf', b'wiped-0', b'wiped-1', b' ', b'*', b'"'):
    os.makedirs(b'/work/' + name + b'/' + name); open(b'/tmp/' + name, 'w').close()
""",
    "open and unlinked": """
import os
f = open('/tmp/ghost', 'w'); f.write('x' * 100000); f.flush(); os.unlink('/tmp/ghost')
""",
    "times": "import os; os.utime('/work', (5, 5)); os.chmod('/work', 0o700)",
}


@pytest.mark.parametrize("name", HOSTILE_TREES)
async def test_nothing_on_disk_reaches_the_next_lease(sandbox: RunnerSandbox, run: Run, name: str) -> None:
    assert "error" not in await run(HOSTILE_TREES[name])
    assert await sandbox.reset()
    look = "import os; s = os.stat('/work'); (os.listdir('/work'), os.listdir('/tmp'), oct(s.st_mode), int(s.st_mtime))"
    assert await run(look) == "([], [], '0o40755', 0)"
