"""The tools of a real MCP server (mcp_server.py), started in a jail and by address."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web

from replayground.deploy.local.ports import choose_ports
from replayground.sandboxes.outside import calls
from replayground.sandboxes.outside.complaints import Complaints
from replayground.sandboxes.outside.config import McpSettings
from replayground.sandboxes.outside.contract import OutsideFailed
from replayground.sandboxes.outside.mcp import McpServer
from replayground.sandboxes.outside.schema_check import schema_complaint
from replayground.sandboxes.outside.schema_process import SchemaProcess
from replayground.sandboxes.tools.tool import ToolError
from tests.sandboxes.outside_rollout import Rollout, http_server, rollout_of

SERVER = Path(__file__).with_name("mcp_server.py")
BY_STDIO = McpSettings(
    command=(sys.executable, str(SERVER), "stdio"),
    readable=(sys.prefix, sys.base_prefix, str(SERVER)),
    environment={"PYTHONDONTWRITEBYTECODE": "1"},
    call_timeout_seconds=60.0,
)


class HttpServer:
    """The server as a process of its own, which a test may end."""

    def __init__(self) -> None:
        self.port = choose_ports({"mcp": 0})["mcp"]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        arguments = (sys.executable, str(SERVER), str(self.port))
        self.process = await asyncio.create_subprocess_exec(*arguments, stderr=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@pytest.fixture(scope="module")
async def by_stdio() -> AsyncIterator[McpServer]:
    server = McpServer("shop", BY_STDIO)
    await server.start()
    yield server
    await server.close()


@pytest.fixture(scope="module")
async def by_http() -> AsyncIterator[McpServer]:
    process = HttpServer()
    await process.start()
    server = McpServer("shop", McpSettings(url=f"http://127.0.0.1:{process.port}/mcp"))
    await server.start()
    yield server
    await server.close()
    await process.stop()


@pytest.fixture(params=["by_stdio", "by_http"])
def server(request: pytest.FixtureRequest) -> McpServer:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def only_own_children() -> Iterator[None]:
    """No server process of a rollout outlives it."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


async def test_its_tools_are_tools_of_the_rollout(server: McpServer) -> None:
    """One session for all of it: a server takes seconds to start."""
    assert list(server.tools)[:4] == ["shop_add", "shop_keep", "shop_fail", "shop_show"]
    add = server.tools["shop_add"]
    assert add.description == "Add two numbers."
    assert add.specification()["function"]["parameters"]["required"] == ["a", "b"]
    assert (add.is_idempotent, server.tools["shop_keep"].is_idempotent) == (True, False)
    async with rollout_of(server) as rollout:
        assert await rollout.text("shop_add", a=2, b=40) == "42"
        assert rollout.sandboxes == []
        await arguments_are_checked_by_the_whole_schema(rollout)
        await is_error_is_an_error(rollout)
        await images_and_resources_are_blobs(rollout)


async def arguments_are_checked_by_the_whole_schema(rollout: Rollout) -> None:
    missing = await rollout.call("shop_add", a=2)
    assert missing.error_kind == "agent"
    assert missing.content == "error: the arguments do not fit: 'b' is a required property"
    wrong = await rollout.text("shop_keep", piece={"name": "bolt", "size": "large"})
    assert wrong == "error: the arguments do not fit: piece.size: 'large' is not of type 'integer'"


async def is_error_is_an_error(rollout: Rollout) -> None:
    failed = await rollout.call("shop_fail", why="it rains")
    assert (failed.is_error, failed.error_kind) == (True, "agent")
    assert "because it rains" in failed.content


async def images_and_resources_are_blobs(rollout: Rollout) -> None:
    shown = await rollout.call("shop_show")
    image, file = shown.blobs
    assert (image.media_type, image.data[:4]) == ("image/png", b"\x89PNG")
    assert (file.name, file.media_type, file.data) == ("file:///parts.bin", "application/x-parts", b"parts")
    assert shown.content.splitlines() == [
        "look",
        f"[image-2: image/png, {len(image.data)} bytes]",
        "[file:///parts.bin: application/x-parts, 5 bytes]",
        "[resource manual: file:///manual.txt]",
    ]


async def test_a_stdio_server_is_one_rollouts_own_and_in_a_jail(
    by_stdio: McpServer, only_own_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
    reached: list[str] = []

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append("by the server")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener, rollout_of(by_stdio) as first, rollout_of(by_stdio) as second:
        assert await first.text("shop_keep", piece={"name": "bolt"}) == "bolt/1"
        assert await first.text("shop_keep", piece={"name": "nut", "size": 2}) == "bolt/1 nut/2"
        assert await second.text("shop_keep", piece={"name": "gear"}) == "gear/1"
        seen = json.loads(await first.text("shop_look_around", port=listener.sockets[0].getsockname()[1]))
    assert seen["network"] in ("ConnectionRefusedError", "PermissionError", "OSError")
    assert reached == []
    assert (seen["passwd"], seen["uid"]) == (False, 65534)
    assert set(seen["environment"]) <= {"PATH", "HOME", "TMPDIR", "LANG", "PWD", "PYTHONDONTWRITEBYTECODE"}
    assert seen["processes"] <= 3


async def test_a_server_that_is_late_or_dies(by_stdio: McpServer, only_own_children: None) -> None:
    late = msgspec.structs.replace(by_stdio.tools["shop_wait"], call_timeout_seconds=0.5)
    async with rollout_of(by_stdio, tools={**by_stdio.tools, "shop_wait": late}) as rollout:
        assert await rollout.text("shop_add", a=1, b=1) == "2"
        waited = await rollout.call("shop_wait", seconds=5)
        assert (waited.error_kind, waited.content) == ("tool", "error: shop_wait did not answer within 0.5 s")
        # The agent's call ended it: were that an infra error, the agent could have any attempt played again.
        died = await rollout.call("shop_die")
        assert died.error_kind == "tool"
        assert died.content.startswith("error: the MCP server shop is gone")
        assert await rollout.text("shop_add", a=1, b=1) == "2"


async def test_an_http_server_that_dies_is_an_infra_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_WAIT_SECONDS", 0.01)
    process = HttpServer()
    await process.start()
    server = McpServer("shop", McpSettings(url=f"http://127.0.0.1:{process.port}/mcp"))
    await server.start()
    async with rollout_of(server) as rollout:
        assert await rollout.text("shop_add", a=1, b=1) == "2"
        await process.stop()
        with pytest.raises(OutsideFailed, match="the MCP server shop"):
            await rollout.call("shop_keep", piece={"name": "bolt"})
    with pytest.raises(OutsideFailed, match="the MCP server shop failed"):
        async with rollout_of(server) as rollout:
            await rollout.call("shop_add", a=1, b=1)
    await server.close()


async def test_an_http_server_that_has_had_too_many_requests_is_a_tool_error() -> None:
    """Agents can use up its limit, so it must not end a rollout that would then be played again."""

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=429)

    process = HttpServer()
    await process.start()
    server = McpServer("shop", McpSettings(url=f"http://127.0.0.1:{process.port}/mcp"))
    await server.start()
    await process.stop()
    async with http_server({"/mcp": refuse}) as url:
        server.settings = McpSettings(url=f"{url}/mcp")
        async with rollout_of(server) as rollout:
            limited = await rollout.call("shop_add", a=1, b=1)
            assert (limited.error_kind, "too many requests: " in limited.content) == ("tool", True), limited.content
    await server.close()


async def test_a_server_that_does_not_start_says_why() -> None:
    missing = McpServer("gone", McpSettings(command=("/usr/bin/python3", "/nowhere/server.py")))
    with pytest.raises(OutsideFailed, match=r"the MCP server gone failed: .*No such file or directory"):
        await missing.start()
    unknown = McpServer("shop", msgspec.structs.replace(BY_STDIO, tools=("add", "fly")))
    with pytest.raises(OutsideFailed, match="has no tool fly"):
        await unknown.start()
    nobody = McpServer("away", McpSettings(url=f"http://127.0.0.1:{choose_ports({'mcp': 0})['mcp']}/mcp"))
    with pytest.raises(OutsideFailed, match="the MCP server away failed"):
        await nobody.start()


@pytest.fixture
def impatient() -> Iterator[None]:
    """Whoever does fetch gives up, so that the test fails instead of waiting."""
    socket.setdefaulttimeout(5)
    yield
    socket.setdefaulttimeout(None)


def test_a_schema_cannot_make_us_fetch(impatient: None) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.setblocking(False)
        schema = {"type": "object", "properties": {"a": {"$ref": f"http://127.0.0.1:{listener.getsockname()[1]}/s"}}}
        assert schema_complaint(schema, {"a": 1}) is None
        with pytest.raises(BlockingIOError):
            listener.accept()


SLOW_SCHEMAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pattern": ({"properties": {"a": {"pattern": "^(a|a)*$"}}}, {"a": "a" * 40 + "!"}),
    "patternProperties": ({"patternProperties": {"^(a|a)*$": {}}, "additionalProperties": False}, {"a" * 40 + "!": 1}),
    "uniqueItems": (
        {"properties": {"a": {"uniqueItems": True}}},
        {"a": [[n, str(n)] if n % 2 else {"n": n} for n in range(50_000)]},
    ),
}


@pytest.mark.parametrize("keyword", SLOW_SCHEMAS)
async def test_a_schema_that_takes_years_costs_the_agent_its_call_and_nobody_else(keyword: str) -> None:
    """The event loop goes on, and so does the next check."""
    process = SchemaProcess()
    schema, arguments = SLOW_SCHEMAS[keyword]
    turns_of_the_loop = 0

    async def count() -> None:
        nonlocal turns_of_the_loop
        while True:
            turns_of_the_loop += 1
            await asyncio.sleep(0.01)

    counting = asyncio.create_task(count())
    try:
        with pytest.raises(ToolError, match="take too long to check"):
            await process.complaint({"type": "object", **schema}, arguments)
        assert turns_of_the_loop > 3
        assert await process.complaint({"type": "object", "required": ["b"]}, {}) == (
            "the arguments do not fit: 'b' is a required property"
        )
    finally:
        counting.cancel()
        await process.close()


async def test_what_is_said_of_arguments_is_bounded() -> None:
    """Names in them are of the agent's choice, and an answer of the process is one line."""
    process = SchemaProcess()
    schema = {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}}}
    try:
        said = await process.complaint(schema, {"a" * 100_000: {"b": "c"}})
        assert said is not None
        assert len(said) < 1_500
    finally:
        await process.close()


async def test_arguments_nested_without_end_are_the_agents_error() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    tree = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}
    process = SchemaProcess()
    try:
        for depth in (500, 5_000):
            nested: list[Any] = []
            for _ in range(depth):
                nested = [nested]
            refusal = await process.complaint({"type": "object", "properties": {"a": tree}}, {"a": nested})
            assert refusal is None or "nested too deeply" in refusal
        assert "nested too deeply" in str(await process.complaint({"type": "object"}, {"a": deep}))
    finally:
        await process.close()
        while deep:  # Python frees deep lists by recursion
            (deep,) = deep


async def test_a_server_that_complains_without_end_fills_no_disk(only_own_children: None) -> None:
    loud = f"yes 'I complain' >&2 & exec {sys.executable} {SERVER} stdio"
    server = McpServer("shop", msgspec.structs.replace(BY_STDIO, command=("/bin/sh", "-c", loud)))
    await server.start()
    async with rollout_of(server) as rollout:
        assert await rollout.text("shop_add", a=2, b=40) == "42"
        files = [os.stat(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name)]
        assert max(status.st_size for status in files if stat.S_ISREG(status.st_mode)) < 10 * 1024 * 1024
        died = await rollout.call("shop_die")
        assert died.error_kind == "tool"
        assert "the MCP server shop is gone" in died.content
    await server.close()


def is_open(name: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{name}")


async def test_the_end_of_the_complaints_is_kept() -> None:
    complaints = Complaints()
    process = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the reason"), stdout=complaints.file
    )
    await process.wait()
    assert complaints.text(13) == "x\nthe reason"
    complaints.close()


def test_settings_name_one_way_to_the_server() -> None:
    with pytest.raises(ValueError, match="either a command or a url"):
        McpSettings()
    with pytest.raises(ValueError, match="either a command or a url"):
        McpSettings(command=("x",), url="http://127.0.0.1/mcp")
