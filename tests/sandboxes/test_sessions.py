"""Agents that share a sandbox share its files and nothing else: none forges what another one sees."""

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from msgspec import structs

from replayground.sandboxes.backends import lacking, open_backend
from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.machine import can_confine_signals
from replayground.sandboxes.protocol import Sandbox
from replayground.sandboxes.tools.registry import SHIPPED
from tests.sandboxes.conftest import LIMITS

type Say = Callable[[str, str], Awaitable[str]]

UNASKED = "error: the session ended: something other than a tool wrote to its socket."
OLD_FRAME = 'struct.pack(">I", len(said)) + said'
NEXT_FRAME = 'struct.pack(">Q16sI", NUMBER, bytes(16), len(said)) + said'


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor"])
async def shared(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    if reason := lacking(request.param):
        pytest.skip(reason)
    backend = open_backend(request.param, SHIPPED, LIMITS, first_uid=317_000, leases_per_sandbox_max=1_000)
    sandbox = await backend.open(0)
    yield sandbox
    await sandbox.close()


@pytest.fixture
async def say(shared: Sandbox) -> AsyncIterator[Say]:
    calls = iter(range(1_000_000))

    async def run(session: str, code: str) -> str:
        return (await shared.call("python", {"code": code}, f"call-{next(calls)}", session)).content

    yield run
    assert await shared.reset()


def forged(frame: str) -> str:
    return f'import os, struct; said = struct.pack(">BQ", 0, 6) + b"forged"; os.write(3, {frame}); None'


@pytest.mark.parametrize("frame", [OLD_FRAME, NEXT_FRAME.replace("NUMBER", "1"), NEXT_FRAME.replace("NUMBER", "2")])
async def test_a_forged_frame_ends_the_session_and_shifts_nothing(say: Say, frame: str) -> None:
    assert (await say("", forged(frame))).startswith(UNASKED)
    assert await say("", "'honest'") == "'honest'"
    assert await say("", "6 * 7") == "42"


async def test_bytes_that_come_after_the_response_end_the_session(say: Say) -> None:
    late = "import os, threading, time; threading.Timer(0.2, lambda: os.write(3, bytes(64))).start(); 'now'"
    assert await say("", late) == "'now'"
    assert await say("", "import time; time.sleep(1)") != ""
    assert await say("", "6 * 7") == "42"


async def test_a_response_that_was_true_once_is_not_true_again(say: Say) -> None:
    """The tag can be read by code in the same process, while its own call runs."""
    steal = """
import os, struct, sys
frame = sys._getframe()
while "tag" not in frame.f_locals: frame = frame.f_back
number, tag = frame.f_locals["number"], frame.f_locals["tag"]
"""
    assert await say("", steal) == ""
    again = (
        'said = struct.pack(">BQ", 0, 6) + b"forged"; os.write(3, struct.pack(">Q16sI", NUMBER, tag, len(said)) + said)'
    )
    assert (await say("", again.replace("NUMBER", "number + 1"))).startswith(UNASKED)
    assert await say("", "6 * 7") == "42"


async def test_names_are_those_of_one_agent(say: Say) -> None:
    await say("writer", "x = 1; import builtins; builtins.abs = lambda _: 1_000")
    assert (await say("critic", "x")).startswith("error: NameError")
    assert await say("critic", "abs(-2)") == "2"
    assert await say("writer", "abs(-2)") == "1000"
    await say("writer", "open('draft', 'w').write('files are shared')")
    assert await say("critic", "open('draft').read()") == "'files are shared'"


async def test_nobody_reaches_the_memory_of_another_session(say: Say) -> None:
    critic = await say("critic", "import os; os.getpid()")
    tried = f"""
for name in ("mem", "fd/0", "fd/1", "fd/2", "fd/3"):
    for mode in ("rb", "r+b", "ab"):
        try:
            with open("/proc/{critic}/" + name, mode) as file:
                file.write(b"forged") if mode != "rb" else file.read(1)
            if name != "fd/0": print("reached", name, mode)
        except OSError: pass
"""
    assert await say("writer", "import os\n" + tried) == ""
    assert await say("critic", "6 * 7") == "42"


async def test_processes_of_others_stand_still_while_an_agent_is_at_work(say: Say) -> None:
    count = """
import os, time
if os.fork() == 0:
    os.setsid()
    n = 0
    while True:
        n += 1
        with open("count~", "w") as file: file.write(str(n))
        os.replace("count~", "count")
while not os.path.exists("count"): time.sleep(0.01)
"""
    look = "import time\nfirst = open('count').read(); time.sleep(0.5); (int(open('count').read()) - int(first))"
    assert await say("writer", count) == ""
    assert await say("critic", look) == "0"
    assert int(await say("writer", look)) > 0
    assert await say("critic", look) == "0"


HOLDS_MEMORY = """
import os, signal, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        # In a group of its own, which the end of its parent leaves without a tie to its session.
        os.setpgid(0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        n = 0
        while True:
            n += 1
            with open("counted~", "w") as file: file.write(str(n))
            os.replace("counted~", "counted")
    held = bytearray(b"x") * (HELD << 20)
    open("holds", "w").close()
    while True: time.sleep(1)
while not (os.path.exists("holds") and os.path.exists("counted")): time.sleep(0.01)
"""
TAKES_THE_REST = """
import os, time
taking = []
for _ in range(10):
    if (pid := os.fork()) == 0:
        taken = bytearray(b"y") * (PART << 20)
        time.sleep(2)
        os._exit(0)
    taking.append(pid)
for pid in taking: os.waitpid(pid, 0)
"""


async def test_memory_that_runs_out_wakes_nobody_for_long() -> None:
    """The kernel ends a stopped process of one agent for the memory that another takes, and so continues its children."""
    backend = BubblewrapBackend(SHIPPED, structs.replace(LIMITS, call_timeout_seconds=60.0), first_uid=317_200)
    if backend.isolation_notes:
        pytest.skip("no memory of processes together is limited")
    sandbox = await backend.open(0)
    mebibytes = LIMITS.memory_bytes_max >> 20
    look = "import time\nfirst = open('counted').read(); time.sleep(0.5); (int(open('counted').read()) - int(first))"
    hold = HOLDS_MEMORY.replace("HELD", str(mebibytes // 3))
    assert (await sandbox.call("python", {"code": hold}, "1", "writer")).content == ""
    take = TAKES_THE_REST.replace("PART", str(mebibytes // 7))
    assert "used more than" in (await sandbox.call("python", {"code": take}, "2", "critic")).content
    assert (await sandbox.call("python", {"code": look}, "3", "critic")).content == "0"
    await sandbox.close()


WAKES_ITSELF = """
import ctypes, os, signal, struct, time
libc = ctypes.CDLL(None)
def wake_every_10_milliseconds():
    # The kernel drops a SIGCONT that nobody handles.
    signal.signal(signal.SIGCONT, lambda *_: None)
    event, timer = struct.pack("qii", 0, signal.SIGCONT, 0) + bytes(48), ctypes.c_void_p()
    if libc.timer_create(1, ctypes.create_string_buffer(event), ctypes.byref(timer)) == 0:
        times = struct.pack("qqqq", 0, 10_000_000, 0, 10_000_000)
        libc.timer_settime(timer, 0, ctypes.create_string_buffer(times), None)
if os.fork() == 0:
    os.setsid()
    wake_every_10_milliseconds()
    while True:
        with open("wakes", "a") as file: file.write("x")
        time.sleep(0.002)
while not os.path.exists("wakes"): time.sleep(0.01)
"""
ENDS_BESIDE_OTHERS = """
import os, signal, time
def chain():
    # A group of its own: a child that stays, and its parent, which takes a while to end and then leaves it orphaned.
    os.setpgid(0, 0)
    if os.fork() == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        while True:
            with open("wakes", "a") as file: file.write("x")
            time.sleep(0.002)
    held = bytearray(100 << 20)
    for page in range(0, len(held), 4096): held[page] = 1
    os._exit(0)
if os.fork() == 0:
    os.setsid()
    while True:
        first = os.fork()
        if first == 0: chain()
        os.waitpid(first, 0)
        time.sleep(0.002)
        try: os.killpg(first, signal.SIGKILL)
        except OSError: pass
while not os.path.exists("wakes"): time.sleep(0.01)
"""
WAKES = "import os, time\nfirst = os.path.getsize('wakes'); time.sleep(0.05); os.path.getsize('wakes') - first"


@pytest.mark.parametrize("code", [WAKES_ITSELF, ENDS_BESIDE_OTHERS], ids=["timer", "orphaned group"])
async def test_the_kernel_wakes_nobody_while_another_agent_is_at_work(say: Say, code: str) -> None:
    assert await say("writer", code) == ""
    # Many times: a process is only sometimes about to end when it is stopped.
    for number in range(40):
        assert await say("critic", WAKES) == "0"
        await say("writer", f"time.sleep({number % 10 / 100})")


async def test_one_agent_that_loses_its_session_costs_no_other_its_own(say: Say) -> None:
    await say("critic", "kept = 42")
    assert "the session ended" in await say("writer", "import os\nif os.fork() == 0: os.setsid()\nos._exit(3)")
    assert await say("critic", "kept") == "42"
    assert "timed out" in await say("writer", "while True: pass")
    assert await say("critic", "kept") == "42"
    assert await say("writer", "1 + 1") == "2"


LEFT_RUNNING = """
import os, time
pid = os.fork()
if pid == 0:
    os.setsid()
    n = 0
    while True:
        n += 1
        with open("beats~", "w") as file: file.write(str(n))
        os.replace("beats~", "beats")
        time.sleep(0.01)
while not os.path.exists("beats"): time.sleep(0.01)
print(os.getpid(), pid)"""
BEATS = "import time\nfirst = int(open('beats').read()); time.sleep(0.5); int(open('beats').read()) - first"
SIGNALS = """
import ctypes, fcntl, os, platform, signal, socket, struct, time
libc = ctypes.CDLL(None)
tkill = (200, 130)[platform.machine() == "aarch64"]
ways = {
    "kill": lambda pid, number: libc.kill(pid, number),
    "kill a group": lambda pid, number: libc.kill(-pid, number),
    "tkill": lambda pid, number: libc.syscall(tkill, pid, number),
    "tgkill": lambda pid, number: libc.tgkill(pid, pid, number),
    "sigqueue": lambda pid, number: libc.sigqueue(pid, number, None),
}
for pid in PIDS:
    for name, send in ways.items():
        for number in (signal.SIGCONT, signal.SIGTERM, signal.SIGKILL):
            if send(pid, number) == 0: print(name, "sent", number, "to", pid)
    try: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGKILL); print("pidfd_send_signal reached", pid)
    except OSError: pass
    try: open(f"/proc/{pid}/mem", "r+b").close(); print("opened the memory of", pid)
    except OSError: pass
    pair = socket.socketpair()
    for request, value in ((0x8901, pid), (0x5452, 1)):  # FIOSETOWN, FIOASYNC: SIGIO, which ends a process
        try: fcntl.ioctl(pair[0], request, struct.pack("i", value))
        except OSError: pass
    pair[1].send(b"x")
try: os.kill(-1, signal.SIGKILL)
except OSError: pass
time.sleep(0.1)
"""


async def test_nobody_signals_the_processes_of_another_session(say: Say, shared: Sandbox) -> None:
    """Neither its tool process nor what it left running, by no call that sends a signal, and not to wake them either."""
    if shared.isolation == "bubblewrap" and not can_confine_signals():
        pytest.skip("this kernel cannot confine signals")
    await say("critic", "kept = 42")
    session, left_running = (await say("critic", LEFT_RUNNING)).split()
    attack = SIGNALS.replace("PIDS", f"({session}, {left_running})")
    assert await say("writer", attack) == ""
    assert await say("writer", BEATS) == "0"
    assert await say("critic", "kept") == "42"
    assert int(await say("critic", BEATS)) > 0


async def test_an_agent_still_signals_its_own_processes(say: Say) -> None:
    code = """
import os, signal, time
pid = os.fork()
if pid == 0:
    os.setsid()
    time.sleep(600)
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)[1]"""
    assert await say("writer", code) == "9"


async def test_without_the_wall_an_agent_reaches_the_session_of_another() -> None:
    """The control: the same attacks, where the runner leaves out those two lines."""
    if reason := lacking("bubblewrap"):
        pytest.skip(reason)
    backend = BubblewrapBackend(SHIPPED, LIMITS, first_uid=317_100)
    wall = "        set_dumpable(False)\n        confine_signals()\n"
    assert wall in backend.runner_source
    backend.runner_source = backend.runner_source.replace(wall, "        pass\n")
    sandbox = await backend.open(0)
    try:
        victim = (await sandbox.call("python", {"code": "import os; os.getpid()"}, "a", "critic")).content
        attack = {"code": SIGNALS.replace("PIDS", f"({victim},)")}
        memory = {"code": f"open('/proc/{victim}/mem', 'r+b').close(); 'opened'"}
        assert (await sandbox.call("python", memory, "m", "writer")).content == "'opened'"
        assert "kill sent 9" in (await sandbox.call("python", attack, "b", "writer")).content
        assert "the session ended" in (await sandbox.call("python", {"code": "1"}, "c", "critic")).content
    finally:
        await sandbox.close()
