"""Ways out, tried from inside as the agent's code would, and ways to reach the next lease."""

import os
from pathlib import Path

import pytest

from sandboxes import seccomp
from sandboxes.backends.bubblewrap import BubblewrapBackend, BubblewrapSandbox
from tests.sandboxes.conftest import Run

SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return "done" if result >= 0 else os.strerror(ctypes.get_errno())
"""
REFUSED_PATH = "not under /work|not a plain file|symbolic links|Not a directory|Is a directory|No such"
REFUSED = ("'Operation not permitted'", "'Function not implemented'")


async def test_host_files_are_not_there(run: Run) -> None:
    paths = [str(Path(__file__).parent), "/etc/passwd", "/root", "/home", "/var", "/sys", "/run", "/boot", "/mnt"]
    assert await run(f"import os; [p for p in {paths} if os.path.exists(p)]") == "[]"


async def test_only_the_known_is_at_the_top(run: Run) -> None:
    known = {"bin", "dev", "lib", "lib32", "lib64", "libx32", "proc", "runner.py", "sbin", "tmp", "usr", "work"}
    assert await run(f"import os; set(os.listdir('/')) - {known}") == "set()"


async def test_environment_is_ours(run: Run, monkeypatch: pytest.MonkeyPatch, backend: BubblewrapBackend) -> None:
    monkeypatch.setenv("CANARY_OF_THE_HOST", "secret")
    second = await backend.open(1)
    try:
        code = "import os, glob; 'CANARY' in str(os.environ) + open('/proc/self/environ').read()"
        assert (await second.call("python", {"code": code}, "k")).content == "False"
    finally:
        await second.close()


@pytest.mark.parametrize("name", ["environ", "mem", "maps", "root/usr", "cwd/usr", "fd/100", "exe", "oom_score_adj"])
async def test_runner_is_unreadable(run: Run, name: str) -> None:
    mode = "w" if name == "oom_score_adj" else "r"
    assert "PermissionError" in await run(f"open('/proc/1/{name}', {mode!r})")


async def test_runner_takes_no_signals(sandbox: BubblewrapSandbox, run: Run) -> None:
    code = "import os, signal\nfor n in range(1, 65):\n    try: os.kill(1, n)\n    except OSError: pass"
    assert await run(code) == ""
    assert await run("1 + 1") == "2"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("ptrace", "101, 16, 1, 0, 0"),
        ("process_vm_readv", "310, 1, 0, 0, 0, 0, 0"),
        ("unshare user", "272, 0x10000000"),
        ("unshare mount", "272, 0x20000"),
        ("setns", "308, 0, 0"),
        ("clone newuser", "56, 0x10000011, 0, 0, 0, 0"),
        ("clone3", "435, 0, 0"),
        ("mount", "165, b'none', b'/tmp', b'tmpfs', 0, 0"),
        ("new mount api", "430, b'tmpfs', 0"),
        ("open_tree", "428, -100, b'/', 1"),
        ("pivot_root", "155, b'/tmp', b'/tmp'"),
        ("chroot", "161, b'/tmp'"),
        ("keyctl", "250, 0, -3, 0"),
        ("add_key", "248, b'user', b'a', b'b', 1, -3"),
        ("bpf", "321, 0, 0, 0"),
        ("perf_event_open", "298, 0, 0, -1, -1, 0"),
        ("userfaultfd", "323, 0"),
        ("io_uring_setup", "425, 8, 0"),
        ("shmget", "29, 77, 4096, 0o1600"),
        ("msgget", "68, 77, 0o1600"),
        ("semget", "64, 77, 1, 0o1600"),
        ("mq_open", "240, b'q', 0o102, 0o600, 0"),
        ("memfd_create", "319, b'm', 0"),
        ("personality", "135, 0x0400000"),
        ("prlimit of pid 1", "302, 1, 7, 0, 0"),
        ("setpriority of pid 1", "141, 0, 1, 19"),
        ("sched_setaffinity of pid 1", "203, 1, 8, b'\\x01' * 8"),
        ("setxattr", "188, b'/work', b'user.a', b'x', 1, 0"),
        ("inet socket", "41, 2, 1, 0"),
        ("netlink socket", "41, 16, 3, 0"),
        ("vsock socket", "41, 40, 1, 0"),
        ("packet socket", "41, 17, 3, 0"),
        ("TIOCSTI", "16, 0, 0x5412, b'x'"),
        ("TIOCSTI, high bits", "16, 0, 0x100005412, b'x'"),
        ("kexec_load", "246, 0, 0, 0, 0"),
        ("init_module", "175, 0, 0, b''"),
        ("x32 getpid", "0x40000027"),
        ("pidfd_getfd", "438, 3, 0, 0"),
        ("name_to_handle_at", "303, -100, b'/usr', 0, 0, 0"),
    ],
)
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86_64")
async def test_refused_system_calls(run: Run, name: str, arguments: str) -> None:
    assert await run(f"{SYSCALL}\ncall({arguments})") in REFUSED


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


async def test_no_capability_and_no_new_privileges(run: Run) -> None:
    status = await run("print(open('/proc/self/status').read())")
    for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"):
        assert line in status


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can choose a uid")
async def test_host_uid_is_unprivileged(sandbox: BubblewrapSandbox) -> None:
    for status in statuses_of_family(sandbox._process.pid):
        assert "Uid:\t300000\t300000\t300000\t300000" in status


def statuses_of_family(pid: int) -> list[str]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{member}/status").read_text() for member in (str(pid), *children)]


async def test_network_is_empty(run: Run) -> None:
    assert await run("[line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]]") == "['lo']"


async def test_no_descriptor_is_inherited(run: Run) -> None:
    """0 null, 1 and 2 the output, 3 the session's own socket, and the listing itself."""
    assert await run("import os; sorted(int(f) for f in os.listdir('/proc/self/fd'))[:4]") == "[0, 1, 2, 3]"
    assert await run("import os; len(os.listdir('/proc/self/fd'))") == "5"
    assert await run("import os; sum('memfd' in os.readlink(f'/proc/self/fd/{n}') for n in range(4))") == "0"


@pytest.mark.parametrize("path", ["/", "/dev", "/usr", "/usr/local", "/proc", "/proc/sys/kernel"])
async def test_nothing_else_is_writable(run: Run, path: str) -> None:
    said = await run(f"open('{path}/new', 'w')")
    assert said.startswith(("error: OSError: [Errno 30]", "error: PermissionError", "error: FileNotFoundError"))


async def test_runner_file_cannot_be_replaced(run: Run) -> None:
    assert "Error" in await run("open('/runner.py', 'a')")
    assert "Error" in await run("import os; os.rename('/runner.py', '/tmp/x')")


async def test_get_follows_no_link_and_takes_plain_files_only(sandbox: BubblewrapSandbox, run: Run) -> None:
    await run("import os; os.symlink('/runner.py', 'a'); os.symlink('/', 'b'); os.mkfifo('c'); os.mkdir('d')")
    await run("open('e', 'w').close(); os.link('e', 'f')")
    for path in (
        "a",
        "b/runner.py",
        "c",
        "d",
        "e",
        "f",
        "../runner.py",
        "/runner.py",
        "/work/../runner.py",
        "",
        "missing",
    ):
        with pytest.raises(OSError, match=REFUSED_PATH):
            await sandbox.get(path)
    for path in ("a", "b/tmp/x", "c", "d", "../x", "/tmp/x", ""):
        with pytest.raises(OSError, match=REFUSED_PATH):
            await sandbox.put(path, b"x")


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
async def test_nothing_on_disk_reaches_the_next_lease(sandbox: BubblewrapSandbox, run: Run, name: str) -> None:
    assert "error" not in await run(HOSTILE_TREES[name])
    assert await sandbox.reset()
    look = "import os; s = os.stat('/work'); (os.listdir('/work'), os.listdir('/tmp'), oct(s.st_mode), int(s.st_mtime))"
    assert await run(look) == "([], [], '0o40755', 0)"


async def test_no_process_reaches_the_next_lease(sandbox: BubblewrapSandbox, run: Run) -> None:
    daemon = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            open('/work/alive', 'a').write('x'); time.sleep(0.01)
    os._exit(0)
"""
    await run(daemon)
    assert await sandbox.reset()
    assert await run("import os, time; time.sleep(0.1); os.path.exists('/work/alive')") == "False"
    assert await run("[p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]") == "[]"


async def test_no_name_reaches_the_next_lease(sandbox: BubblewrapSandbox, run: Run) -> None:
    await run("import builtins, json; builtins.left = 1; json.left = 1; x = 1")
    assert await sandbox.reset()
    assert await run("import builtins, json; (hasattr(builtins, 'left'), hasattr(json, 'left'), 'x' in dir())") == (
        "(False, False, False)"
    )
