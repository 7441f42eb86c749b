"""What goes into the sandbox with a tool, what is refused when it is defined, and what a call promises."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.backends.channel import RunnerSandbox
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.protocol import Sandbox, SandboxFailed
from replayground.sandboxes.tools.paths import existing_file
from replayground.sandboxes.tools.python import python
from replayground.sandboxes.tools.registry import SHIPPED, toolset
from replayground.sandboxes.tools.tool import Tool, tool
from replayground.sandboxes.workbench import Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS
from tests.sandboxes.conftest import Call

PROJECT = Path(__file__).parents[2]
OFFSET = 40
SHIFTED: int = OFFSET + 1


def even(number: int) -> bool:
    return number == 0 or odd(number - 1)


def odd(number: int) -> bool:
    return number != 0 and even(number - 1)


class Counter:
    """Counts in steps of SHIFTED."""

    def __init__(self) -> None:
        self.total = 0

    def add(self) -> int:
        self.total += SHIFTED
        return self.total


@tool
def uses_its_file(number: int) -> str:
    """Use functions that call each other, a class and a constant made of another constant."""
    path: Path | None = None  # a name of an annotation is not needed inside
    return f"{even(number)} {Counter().add()} {path}"


@pytest.fixture
def own() -> dict[str, Tool]:
    return {uses_its_file.name: uses_its_file}


async def test_what_a_tool_uses_of_its_file_goes_with_it(own: dict[str, Tool]) -> None:
    sandbox = await BubblewrapBackend(own, first_uid=311_000).open(0)
    try:
        assert (await sandbox.call("uses_its_file", {"number": 10}, "a")).content == "True 41 None"
    finally:
        await sandbox.close()


def test_only_what_is_used_is_shipped() -> None:
    names = ("OFFSET", "SHIFTED", "def even", "def odd", "class Counter", "def uses_its_file")
    assert all(uses_its_file.source.count(f"\n{name}") == 1 for name in names)
    assert "PROJECT" not in uses_its_file.source
    assert "@tool" not in uses_its_file.source


def test_a_module_must_be_imported_inside() -> None:
    with pytest.raises(
        TypeError, match="bad uses json, which its file imports at the top: import it inside the function"
    ):

        @tool
        def bad(text: str) -> str:
            return json.dumps(text)


def test_a_function_of_another_package_is_not_shipped() -> None:
    with pytest.raises(TypeError, match="bad uses existing_file, which its file imports at the top"):

        @tool
        def bad(path: str) -> str:
            return existing_file(path)


def test_what_the_function_around_knows_stays_outside() -> None:
    secret = "x"
    with pytest.raises(TypeError, match="bad uses secret of the enclosing function"):

        @tool
        def bad() -> str:
            return secret


def test_a_coroutine_is_refused() -> None:
    with pytest.raises(TypeError, match="bad is not a plain function"):

        @tool
        async def bad() -> str:
            return ""


def test_the_example_shows_its_schema_and_runs() -> None:
    example = PROJECT / "examples/own_tool/tool.py"
    assert len(example.read_text().splitlines()) < 60
    shown = subprocess.run(
        [sys.executable, str(example)], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout
    schema, end = json.JSONDecoder().raw_decode(shown)
    assert schema["function"]["name"] == "convert_length"
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "amount": {"type": "number", "description": "how many of the unit"},
            "unit": {"type": "string", "description": "mm, cm, m, km, inch, foot or mile"},
            "into": {"type": "string", "description": "the unit of the answer"},
            "style": {"type": "string", "enum": ["plain", "scientific"], "description": "how the number is written"},
        },
        "required": ["amount", "unit", "into"],
        "additionalProperties": False,
    }
    assert shown[end:] == "\n42.1648128 km\nerror: there is no unit 'miel'; did you mean 'mile'?\n"


async def test_a_repeated_key_runs_nothing(equipped_sandbox: RunnerSandbox, call: Call) -> None:
    once = {"path": "log", "content": "x", "append": True}
    first = await equipped_sandbox.call("write_file", once, "same")
    assert await equipped_sandbox.call("write_file", once, "same") == first
    assert await equipped_sandbox.get("log") == b"x"
    await equipped_sandbox.call("write_file", once, "other")
    assert await equipped_sandbox.get("log") == b"xx"


class CountingBackend(BubblewrapBackend):
    opened = 0

    async def open(self, slot: int, apart: bool = False) -> RunnerSandbox:
        self.opened += 1
        return await super().open(slot, apart)


def running(mark: str) -> bool:
    """Whether a process of this machine, in a sandbox or not, has the mark in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                return True
        except OSError:  # it has just ended
            continue
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0.05)


async def test_a_call_that_the_sandbox_did_not_survive_is_not_made_again() -> None:
    """Nobody knows what it did before: the rollout ends by infra_error, and whoever plays it again begins anew."""
    mark = f"81726{os.getpid()}"
    backend = CountingBackend({"terminal": SHIPPED["terminal"]} | WORLD_TOOLS, first_uid=312_000)
    async with (
        Pool(backend, size=1) as pool,
        Workbench(pool, toolset(["terminal"]), seed=1, owner="test") as bench,
    ):
        under_way = asyncio.create_task(bench.call("terminal", {"command": f"sleep {mark}"}))
        await until(lambda: running(f"sleep\0{mark}"))
        (sandbox,) = pool._sandboxes.values()
        await sandbox.close()
        with pytest.raises(SandboxFailed):
            await under_way
        await until(lambda: not running(f"sleep\0{mark}"))
    assert backend.opened == 1


async def test_a_tool_without_its_library_is_a_tool_error() -> None:
    """The operator's business, not the agent's: it is told, and nobody is blamed."""
    sandbox = await BubblewrapBackend(SHIPPED, first_uid=313_000).open(0)
    try:
        result = await sandbox.call("audio_info", {"path": "/runner.py"}, "a")
        assert (result.content, result.error_kind) == (
            "error: ModuleNotFoundError: No module named 'miniaudio'",
            "tool",
        )
    finally:
        await sandbox.close()


async def test_memory_used_up_is_the_agents_error(call: Call, equipped_sandbox: Sandbox) -> None:
    if equipped_sandbox.isolation == "gvisor":
        pytest.skip("gVisor limits what is used, not what is asked for: its cgroup ends the session")
    await call("python", code="open('lines.txt', 'w').write('\\n' * (24 << 20))")
    result = await call("read_file", path="lines.txt")
    assert result.content == "error: the memory of the sandbox is used up: work on less at once"
    assert result.error_kind == "agent"
    assert (await call("calculator", expression="1 + 1")).content == "2"


async def test_a_call_that_takes_too_long_is_the_agents_error() -> None:
    slow = msgspec.structs.replace(python, call_timeout_seconds=0.5)
    sandbox = await BubblewrapBackend({"python": slow}, first_uid=314_000).open(0)
    try:
        result = await sandbox.call("python", {"code": "while True: pass"}, "a")
        assert result.error_kind == "agent"
        assert result.content.startswith("error: timed out after 0.5 s.")
    finally:
        await sandbox.close()
