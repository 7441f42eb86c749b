"""What an agent's code can use up, and that the sandbox is as good as new afterwards."""

import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.limits import Limits
from replayground.sandboxes.tools.registry import SHIPPED
from tests.sandboxes.conftest import LIMITS, Run


async def test_endless_loop_is_the_agents_timeout_and_the_next_session_is_fresh(
    sandbox: RunnerSandbox, run: Run
) -> None:
    await run("x = 1; open('kept', 'w').write('y')")
    result = await sandbox.call("python", {"code": "while True: pass"}, "loop")
    assert result.content.startswith("error: timed out after 2 s. The next call starts a fresh session")
    assert result.error_kind == "agent"
    assert await run("x") == "error: NameError: name 'x' is not defined"
    assert await run("open('kept').read()") == "'y'"


async def test_ignoring_signals_does_not_help(sandbox: RunnerSandbox) -> None:
    code = """
import os, signal, time
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for _ in range(3):
    if os.fork() == 0: os.setsid()
while True: time.sleep(1)
"""
    assert (await sandbox.call("python", {"code": code}, "stubborn")).content.startswith("error: timed out")
    assert await processes(sandbox) == "[]"


async def test_fork_bomb_ends_with_the_lease(sandbox: RunnerSandbox, run: Run) -> None:
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError as error: last = error"
    said = await run(code)
    assert said.startswith(("error: timed out", "error: the session ended"))
    assert await sandbox.reset()
    assert await processes(sandbox) == "[]"


async def test_processes_are_counted(run: Run) -> None:
    code = """
import os, signal
children = []
try:
    while len(children) < 1000:
        child = os.fork()
        if child == 0:
            signal.pause()
        children.append(child)
except OSError as error:
    print(len(children) <= 24, error.errno)
for child in children:
    os.kill(child, 9)
"""
    assert await run(code) == "True 11\n"


async def test_memory(run: Run) -> None:
    assert await run("len(b'x' * 400_000_000)") == "error: MemoryError"
    assert await run("1 + 1") == "2"


async def test_disk_and_inodes(sandbox: RunnerSandbox, run: Run) -> None:
    fill = "import os\nfor n in range(20):\n    with open(f'f{n}', 'wb') as f: f.write(b'x' * 1_000_000)"
    assert "No space left on device" in await run(fill)
    assert await run("1 + 1") == "2"
    assert await sandbox.reset()
    assert "No space left on device" in await run("for n in range(5000): open(f'f{n}', 'w').close()")
    assert await run("2 + 2") == "4"


async def test_longest_file(run: Run) -> None:
    assert "File too large" in await run("f = open('sparse', 'wb'); f.truncate(9_000_000)")


async def test_output_flood_is_cut_and_says_so(run: Run) -> None:
    said = await run("print('x' * 1_000_000)")
    assert len(said) < LIMITS.output_bytes_max + 100
    assert said.endswith("[truncated: 1000001 bytes in all, the first 2000 are shown]")
    assert await run("1 + 1") == "2"


async def test_endless_output_ends_at_the_disk_limit(run: Run) -> None:
    said = await run("while True: print('y' * 100_000)")
    assert "OSError" in said
    assert len(said) < LIMITS.output_bytes_max + 100


async def test_long_value_is_cut(run: Run) -> None:
    assert "[truncated: 50002 bytes" in await run("'z' * 50_000")


async def test_cpu_time() -> None:
    limits = Limits(cpu_seconds=1, call_timeout_seconds=60.0)
    sandbox = await BubblewrapBackend(SHIPPED, limits, first_uid=308_000).open(0)
    try:
        result = await sandbox.call("python", {"code": "while True: pass"}, "burn")
    finally:
        await sandbox.close()
    assert result.content.startswith("error: the session ended: it used more than 1 s of CPU.")
    assert result.error_kind == "agent"


async def test_limits_cannot_be_raised(run: Run) -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_NPROC, (1000, 1000))"
    assert "not allowed to raise maximum limit" in await run(code)


async def test_death_of_the_session_is_told(run: Run) -> None:
    assert (await run("import os; os._exit(3)")).startswith("error: the session ended: it exited with status 3.")
    assert (await run("import os; os.kill(os.getpid(), 11)")).startswith(
        "error: the session ended: it was killed by SIGSEGV"
    )
    assert await run("1 + 1") == "2"


async def test_child_that_keeps_the_socket_open_blocks_nobody(run: Run) -> None:
    said = await run("import os, time\nif os.fork() == 0: time.sleep(60)\nos._exit(5)")
    assert said.startswith("error: the session ended: it exited with status 5.")


@pytest.mark.parametrize(
    "garbage", ["b'x' * 100", r"b'\xff\xff\xff\xff'", r"b'\x00\x00\x00\x02{}'", r"b'\x00\x00\x00\x04null'"]
)
async def test_forged_answers_are_the_agents_error(sandbox: RunnerSandbox, garbage: str) -> None:
    code = f"import os, time; os.write(3, {garbage}); time.sleep(0.05)"
    result = await sandbox.call("python", {"code": code}, "forge")
    assert result.error_kind == "agent"


async def test_forged_infra_error_is_not_believed(sandbox: RunnerSandbox) -> None:
    code = """
import json, os, struct
answer = json.dumps({"content": "x", "bytes_total": 1, "error": "infra"}).encode()
os.write(3, struct.pack(">I", len(answer)) + answer)
"""
    assert (await sandbox.call("python", {"code": code}, "forge")).error_kind == "agent"


async def processes(sandbox: RunnerSandbox) -> str:
    """Processes in the sandbox beside pid 1 and the session that asks."""
    code = "import os; [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())]"
    return (await sandbox.call("python", {"code": code}, f"processes-{id(code)}")).content
