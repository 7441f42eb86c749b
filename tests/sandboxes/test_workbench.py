"""The contract of tools outside the sandbox, as a rollout meets it, on a small provider of one's own."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest

from replayground.sandboxes.outside import calls
from replayground.sandboxes.outside.calls import OutsideCalls
from replayground.sandboxes.outside.config import McpSettings, ToolsSettings
from replayground.sandboxes.outside.contract import (
    MethodSession,
    OutsideFailed,
    OutsideTool,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
    method_tools,
    tool_method,
)
from replayground.sandboxes.outside.providers import Outside, require_tools
from replayground.sandboxes.protocol import SandboxFailed
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.tools.tool import ToolError
from replayground.sandboxes.worlds.perturbations import Rule
from replayground.sandboxes.worlds.world import World
from tests.sandboxes.outside_rollout import rollout_of


class Till:
    """Counts money, and everything that happens to it."""

    def __init__(self) -> None:
        self.tools: Mapping[str, OutsideTool] = method_tools(TillSession, self, "till", call_timeout_seconds=30.0)
        self.happened: list[str] = []
        self.failures_to_come = 0
        self.is_closing, self.may_close, self.is_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_close.set()

    async def start(self) -> None:
        self.happened.append("start")

    async def open(self, rollout_handle: RolloutHandle) -> "TillSession":
        self.happened.append(f"open for {rollout_handle.owner} in {rollout_handle.world.name}")
        return TillSession(self, rollout_handle)

    async def prove_health(self) -> None:
        self.happened.append("prove")
        self.fail_if_told()

    async def close(self) -> None:
        self.happened.append("end")

    def fail_if_told(self) -> None:
        if self.failures_to_come:
            self.failures_to_come -= 1
            raise OutsideFailed("the till is on fire")


class TillSession(MethodSession):
    def __init__(self, till: Till, rollout_handle: RolloutHandle) -> None:
        self._till = till
        self._rollout_handle = rollout_handle

    async def close(self) -> None:
        self._till.is_closing.set()
        await self._till.may_close.wait()
        self._till.happened.append("close")
        self._till.is_closed.set()

    @tool_method(is_idempotent=False)
    async def pay(self, coins: int) -> ToolOutput:
        """Put coins into the till.

        coins: how many
        """
        self._till.happened.append(f"pay {coins}")
        self._till.fail_if_told()
        if coins < 0:
            raise ToolError("coins cannot be taken out")
        if coins == 13:
            raise ToolFailed("the drawer is stuck")
        if coins == 666:
            raise ZeroDivisionError("a bug")
        return ToolOutput(f"{coins} paid")

    @tool_method(is_idempotent=True)
    async def count(self) -> ToolOutput:
        """Count the coins."""
        self._till.happened.append("count")
        self._till.fail_if_told()
        return ToolOutput("x" * 20_000)

    @tool_method(is_idempotent=True)
    async def ponder(self) -> ToolOutput:
        """Never come to an end."""
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    @tool_method(is_idempotent=True)
    async def audit(self, path: str) -> ToolOutput:
        """Read a file of the sandbox."""
        return ToolOutput((await self._rollout_handle.get_file(path)).decode())


@pytest.fixture
def till(monkeypatch: pytest.MonkeyPatch) -> Till:
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)
    return Till()


def test_a_method_is_described_as_a_tool_is(till: Till) -> None:
    assert till.tools["pay"].specification() == {
        "type": "function",
        "function": {
            "name": "pay",
            "description": "Put coins into the till.",
            "parameters": {
                "type": "object",
                "properties": {"coins": {"type": "integer", "description": "how many"}},
                "required": ["coins"],
                "additionalProperties": False,
            },
        },
    }


async def test_it_is_opened_at_the_first_call_and_closed_with_the_rollout(till: Till) -> None:
    async with rollout_of(till, World(name="fair")) as rollout:
        assert (await rollout.call("pay")).content.startswith("error: missing argument 'coins'")
        assert till.happened == []
        assert await rollout.text("pay", coins=2) == "2 paid"
        assert await rollout.text("pay", coins=2) == "2 paid"
        assert till.happened == ["open for test in fair", "pay 2", "pay 2"]
        assert rollout.sandboxes == []
    assert till.happened[-1] == "close"


async def test_errors_are_classed(till: Till) -> None:
    async with rollout_of(till) as rollout:
        mine = await rollout.call("pay", coins=-1)
        assert (mine.error_kind, mine.content) == ("agent", "error: coins cannot be taken out")
        its = await rollout.call("pay", coins=13)
        assert (its.error_kind, its.content) == ("tool", "error: the drawer is stuck")
        bug = await rollout.call("pay", coins=666)
        assert (bug.error_kind, bug.content) == ("tool", "error: ZeroDivisionError: a bug")
        till.failures_to_come = 2
        with pytest.raises(SandboxFailed, match="on fire"):
            await rollout.call("pay", coins=1)


async def test_a_call_that_fails_where_others_succeed_is_no_infra_error(till: Till) -> None:
    """An agent that knows such a call could else have its bad attempts repeated."""
    async with rollout_of(till, World(name="fair")) as rollout:
        till.failures_to_come = 1
        failed = await rollout.call("pay", coins=1)
        assert failed.error_kind == "tool"
        assert failed.content == "error: the till is on fire. Other calls work, in a new session"
        assert till.happened[-4:] == ["pay 1", "prove", "close", "open for test in fair"]
        assert await rollout.text("pay", coins=2) == "2 paid"


async def test_only_what_is_idempotent_is_repeated_and_not_for_ever(till: Till) -> None:
    async with rollout_of(till) as rollout:
        till.failures_to_come = 2
        assert not (await rollout.call("count")).is_error
        assert till.happened.count("count") == 3
        till.failures_to_come = 100
        with pytest.raises(OutsideFailed):
            await rollout.call("count")
        assert till.happened.count("count") == 3 + calls.ATTEMPTS_MAX
        with pytest.raises(OutsideFailed):
            await rollout.call("pay", coins=1)
        assert till.happened.count("pay 1") == 1


async def test_a_key_is_answered_once(till: Till) -> None:
    async def no_file(path: str, data: bytes = b"") -> bytes:
        raise FileNotFoundError(path)

    outside = OutsideCalls(RolloutHandle(owner="me", world=World(name="w"), get_file=no_file, put_file=no_file))  # type: ignore[arg-type]
    first = await outside.call(till.tools["pay"], {"coins": 5}, "key")
    assert await outside.call(till.tools["pay"], {"coins": 5}, "key") is first
    assert till.happened.count("pay 5") == 1
    await outside.close()
    await outside.close()
    assert till.happened.count("close") == 1


async def test_time_and_length_are_bounded(till: Till, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALL_TIMEOUT_SECONDS", 0.05)
    tools = {name: msgspec.structs.replace(tool, call_timeout_seconds=None) for name, tool in till.tools.items()}
    async with rollout_of(till, tools=tools) as rollout:
        late = await rollout.call("ponder")
        assert (late.error_kind, late.content) == ("tool", "error: ponder did not answer within 0.05 s")
        long = await rollout.text("count")
        assert long.endswith("x\n[truncated: 20000 bytes in all, the first 16384 are shown]")


async def test_it_reads_files_of_the_sandbox_with_the_world_in_it(till: Till) -> None:
    async with rollout_of(till, World(name="w", files={"ledger.txt": "1"})) as rollout:
        missing = await rollout.call("audit", path="ledger.txt")
        assert (missing.error_kind, len(rollout.sandboxes)) == ("tool", 1)
        await rollout.sandboxes[0].put("ledger.txt", b"42 coins")
        assert await rollout.text("audit", path="ledger.txt") == "42 coins"


async def test_weather_falls_on_it(till: Till) -> None:
    rules = (Rule(kind="stale", tools=("pay",)),)
    async with rollout_of(till, World(name="w", perturbations=rules)) as rollout:
        paid = await rollout.call("pay", coins=7)
        assert paid.content != "7 paid"
        assert paid.perturbation == {"applied": [{"rule": 0, "kind": "stale"}], "original": "7 paid"}


async def test_a_cancelled_rollout_closes_what_it_opened(till: Till) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), rollout_of(till) as rollout:
            await rollout.call("ponder")
    assert till.happened[-1] == "close"


async def test_a_rollout_that_is_cancelled_while_it_closes_is_closed_all_the_same(till: Till) -> None:
    async def play() -> None:
        async with rollout_of(till) as rollout:
            await rollout.call("pay", coins=1)

    till.may_close.clear()
    playing = asyncio.create_task(play())
    async with asyncio.timeout(60):
        await till.is_closing.wait()
        playing.cancel()
        await asyncio.wait({playing})
        till.may_close.set()
        await till.is_closed.wait()


async def test_providers_of_the_settings_and_of_a_job(till: Till) -> None:
    async with Outside(ToolsSettings(), till.tools.values()) as outside:
        assert till.happened == ["start"]
        own = [*till.tools.values(), *outside.tools]
        chosen = toolset(["python", "search", "till", "browser"], own)
        assert list(chosen)[:7] == ["python", "search", "search_read", "pay", "count", "ponder", "audit"]
        assert {"browser_open", "browser_screenshot"} < set(chosen)
        with pytest.raises(ValueError, match=r"there is no tool 'ask_image'; known tools: .*browser"):
            toolset(["ask_image"], own)
    assert till.happened == ["start", "end"]


async def test_a_provider_that_does_not_start_is_named_and_the_others_are_closed(till: Till) -> None:
    settings = ToolsSettings(mcp={"clock": McpSettings(command=("/usr/bin/python3", "/nowhere"))})
    with pytest.raises(OutsideFailed, match="the MCP server clock failed"):
        async with Outside(settings, till.tools.values()):
            pass
    assert till.happened[-1] == "end"


def test_names_are_checked_without_asking_anybody() -> None:
    require_tools(["python", "browser", "search", "mcp.clock", "ask_image"])
    with pytest.raises(ValueError, match=r"there is no tool 'brwser'; known tools: .*python.*, browser, .*mcp.NAME"):
        require_tools(["brwser"])
