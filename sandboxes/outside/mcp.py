"""The tools of any MCP server, by the official client: started as a program in a jail (stdio), or by address (HTTP).

Each rollout has a server process, or an HTTP session, of its own, which ends with it: what one rollout did there, no
other sees. Which tools there are is asked once, when the program starts; a tool `now` of the server `clock` is called
clock_now. Arguments are checked by the whole of the tool's JSON schema before they are sent.

* `isError` is an agent error: by the protocol it is meant for the model to read and to do better.
* An error of the protocol is an agent error if it speaks of the arguments, otherwise a tool error.
* A server that dies, cannot be reached or does not become ready is an infra error.

Not covered: servers that ask back (sampling, elicitation, roots) are told that nobody is there; tools that come and go
while the program runs; a stdio server that writes a line without end is held by this program's memory alone; with
`network` or without `jailed`, what the server itself can reach.
"""

import asyncio
import base64
import binascii
import contextlib
import os
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Any, TextIO

import httpx2
import jsonschema
import mcp_types
import msgspec
import referencing
import referencing.exceptions
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from sandboxes import seccomp
from sandboxes.outside.config import MEBIBYTE, McpSettings
from sandboxes.outside.contract import OutsideFailed, OutsideTool, RolloutHandle, ToolFailed, ToolOutput
from sandboxes.outside.jail import Jail
from sandboxes.protocol import Arguments, Blob
from sandboxes.tools.tool import ToolError

TOOLS_MAX = 256
NAME_CHARACTERS_MAX = 64
SERVER_WORDS_MAX = 2000
CLOSE_TIMEOUT_SECONDS = 20.0
BASE64_OVERHEAD = 4 / 3
NOTHING_TO_FETCH: referencing.Registry[Any] = referencing.Registry()
"""Without it a schema could make this program fetch any address."""


class McpServer:
    """Offers the tools of one server."""

    def __init__(self, name: str, settings: McpSettings) -> None:
        self.name = name
        self.settings = settings
        self.tools: Mapping[str, OutsideTool] = {}
        self.original_names: dict[str, str] = {}
        "of tools, as the server calls them, by the name that the agent uses"

    async def start(self) -> None:
        """Ask the server for its tools, by a session that ends at once."""
        session = await self._open_session()
        try:
            async with asyncio.timeout(self.settings.start_timeout_seconds):
                listed = await session.list_tools()
        except (MCPError, TimeoutError) as error:
            raise OutsideFailed(f"the MCP server {self.name} does not list its tools: {error!r}") from error
        finally:
            await session.close()
        self._offer([tool for tool in listed if not self.settings.tools or tool.name in self.settings.tools])

    async def open(self, rollout_handle: RolloutHandle) -> "McpSession":
        return await self._open_session()

    async def close(self) -> None:
        """Nothing outlives a rollout."""

    async def _open_session(self) -> "McpSession":
        session = McpSession(self)
        try:
            async with asyncio.timeout(self.settings.start_timeout_seconds):
                await session.start()
        except TimeoutError:
            await session.close()
            seconds = self.settings.start_timeout_seconds
            raise OutsideFailed(f"the MCP server {self.name} was not ready in {seconds:g} s") from None
        except BaseException:
            await session.close()
            raise
        return session

    def _offer(self, listed: list[mcp_types.Tool]) -> None:
        unknown = set(self.settings.tools) - {tool.name for tool in listed}
        if unknown:
            raise OutsideFailed(f"the MCP server {self.name} has no tool {', '.join(sorted(unknown))}")
        tools = {}
        for tool in listed:
            name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.name}_{tool.name}")[:NAME_CHARACTERS_MAX]
            if name in tools:
                raise OutsideFailed(f"two tools of the MCP server {self.name} would be called {name}")
            self.original_names[name] = tool.name
            tools[name] = self._tool(name, tool)
        self.tools = tools

    def _tool(self, name: str, tool: mcp_types.Tool) -> OutsideTool:
        try:
            jsonschema.Draft202012Validator.check_schema(tool.input_schema)
        except jsonschema.exceptions.SchemaError as error:
            raise OutsideFailed(f"the schema of {name} of the MCP server is no schema: {error.message}") from error
        hints = tool.annotations
        return OutsideTool(
            name=name,
            description=tool.description or tool.title or tool.name,
            parameters=tool.input_schema,
            family=f"mcp.{self.name}",
            provider=self,
            checks_arguments=True,
            is_idempotent=bool(hints and (hints.read_only_hint or hints.idempotent_hint)),
            call_timeout_seconds=self.settings.call_timeout_seconds,
        )


class McpSession:
    """A connection to the server. It lives in a task of its own, because the client must be left where it was entered."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._settings = server.settings
        self._client: Client | None = None
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the server has introduced itself. Raises OutsideFailed."""
        self._task = asyncio.create_task(self._live())
        await asyncio.shield(self._ready)

    async def list_tools(self) -> list[mcp_types.Tool]:
        assert self._client is not None
        tools: list[mcp_types.Tool] = []
        cursor = None
        while len(tools) < TOOLS_MAX:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools[:TOOLS_MAX]

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        refusal = schema_complaint(self._server.tools[tool].parameters, arguments)
        if refusal is not None:
            raise ToolError(refusal)
        if self._client is None or self._task is None or self._task.done():
            raise OutsideFailed(f"the MCP server {self._server.name} is gone")
        try:
            result = await self._client.call_tool(self._server.original_names[tool], dict(arguments))
        except MCPError as error:
            raise self._translate_error(error) from error
        except (OSError, httpx2.HTTPError) as error:
            raise OutsideFailed(f"the MCP server {self._server.name} cannot be reached: {error!r}") from error
        answer = answer_of(result, self._settings.blob_bytes_max)
        if result.is_error:
            raise ToolError(answer.content or "the tool says that it failed, and not why")
        return answer

    async def close(self) -> None:
        """Leave the client, which stops the server: stdin closed, then SIGTERM, then SIGKILL. Idempotent."""
        self._ending.set()
        if self._task is None:
            return
        _, running = await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_SECONDS)
        if running:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT_SECONDS)
        self._task = None

    def _translate_error(self, error: MCPError) -> Exception:
        if error.code in (mcp_types.CONNECTION_CLOSED, mcp_types.REQUEST_TIMEOUT):
            return OutsideFailed(f"the MCP server {self._server.name} is gone: {error}")
        if error.code == mcp_types.INVALID_PARAMS:
            return ToolError(str(error))
        return ToolFailed(str(error))

    async def _live(self) -> None:
        with tempfile.TemporaryFile("w+", errors="replace") as complaints:
            try:
                async with self._connect(complaints) as client:
                    self._client = client
                    self._ready.set_result(None)
                    await self._ending.wait()
            except Exception as error:  # whatever the library raises, the server is not there
                failure = OutsideFailed(
                    f"the MCP server {self._server.name} failed: {describe_failure(error, complaints)}"
                )
                if not self._ready.done():
                    self._ready.set_exception(failure)
                    self._ready.exception()  # whoever waits learns it; if nobody does any more, nothing is lost
            finally:
                self._client = None

    @contextlib.asynccontextmanager
    async def _connect(self, complaints: TextIO) -> AsyncIterator[Client]:
        async with contextlib.AsyncExitStack() as held:
            if self._settings.url is not None:
                http = await held.enter_async_context(
                    httpx2.AsyncClient(headers=headers_of(self._settings), timeout=None)
                )
                event_bytes_max = int(self._settings.blob_bytes_max * BASE64_OVERHEAD) + MEBIBYTE
                transport = streamable_http_client(
                    self._settings.url, http_client=http, max_sse_event_size=event_bytes_max
                )
            else:
                command = await held.enter_async_context(jailed_command(self._server.name, self._settings))
                # in a jail it is set inside: a variable such as LD_PRELOAD must not reach what builds the jail
                environment = None if self._settings.jailed else self._settings.environment
                parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment, cwd="/")
                transport = stdio_client(parameters, errlog=complaints)
            yield await held.enter_async_context(Client(transport))


@contextlib.asynccontextmanager
async def jailed_command(name: str, settings: McpSettings) -> AsyncIterator[list[str]]:
    """The server's command line, as it is started here. Nothing of it is left when the block ends, if it is jailed."""
    if not settings.jailed:
        yield list(settings.command)
        return
    with tempfile.NamedTemporaryFile() as filter_file:
        filter_file.write(seccomp.filter_program())
        filter_file.flush()
        async with jail_of(name, settings, filter_file.name).launched(settings.command) as command:
            yield command


def jail_of(name: str, settings: McpSettings, seccomp_file: str) -> Jail:
    return Jail(
        hostname=re.sub(r"[^A-Za-z0-9-]", "-", name)[:60] or "mcp",
        readable=tuple((os.path.abspath(path), os.path.abspath(path)) for path in settings.readable),
        environment=settings.environment,
        network=settings.network,
        seccomp_file=None if settings.network else seccomp_file,
        memory_bytes_per_process_max=settings.memory_bytes_per_process_max,
        memory_bytes_max=settings.memory_bytes_max,
        cpu_cores_max=settings.cpu_cores_max,
        processes_max=settings.processes_max,
        disk_bytes_max=settings.disk_bytes_max,
    )


def headers_of(settings: McpSettings) -> dict[str, str]:
    if settings.key_environment is None:
        return settings.headers
    return settings.headers | {"Authorization": f"Bearer {os.environ.get(settings.key_environment, '')}"}


def schema_complaint(schema: Mapping[str, Any], arguments: Arguments) -> str | None:
    """What is wrong with arguments, in a sentence; None when they fit, or when the schema refers to others."""
    validator = jsonschema.Draft202012Validator(schema, registry=NOTHING_TO_FETCH)
    try:
        error = jsonschema.exceptions.best_match(validator.iter_errors(dict(arguments)))
    except referencing.exceptions.Unresolvable:
        return None  # the server will judge
    if error is None:
        return None
    where = ".".join(str(part) for part in error.absolute_path)
    return f"the arguments do not fit: {f'{where}: ' if where else ''}{error.message[:500]}"


def answer_of(result: mcp_types.CallToolResult, blob_bytes_max: int) -> ToolOutput:
    """Texts as content, one after another; images, audio and files as blobs, as long as there is room."""
    texts: list[str] = []
    blobs: list[Blob] = []
    room = blob_bytes_max
    for number, block in enumerate(result.content, 1):
        text, blob = content_of(block, number)
        if blob is not None and len(blob.data) > room:
            text, blob = f"[{blob.name} left out: it has {len(blob.data)} bytes, more than there is room for]", None
        if blob is not None:
            room -= len(blob.data)
            blobs.append(blob)
        texts.append(text)
    if not result.content and result.structured_content is not None:
        texts.append(msgspec.json.encode(result.structured_content).decode())
    return ToolOutput("\n".join(text for text in texts if text), tuple(blobs))


def content_of(block: mcp_types.ContentBlock, number: int) -> tuple[str, Blob | None]:
    match block:
        case mcp_types.TextContent(text=text):
            return text, None
        case (
            mcp_types.ImageContent(data=data, mime_type=media_type)
            | mcp_types.AudioContent(data=data, mime_type=media_type)
        ):
            return blob_of(data, f"{block.type}-{number}", media_type)
        case mcp_types.EmbeddedResource(resource=mcp_types.TextResourceContents(text=text)):
            return text, None
        case mcp_types.EmbeddedResource(resource=mcp_types.BlobResourceContents(blob=data) as resource):
            return blob_of(data, str(resource.uri), resource.mime_type or "application/octet-stream")
        case mcp_types.ResourceLink(uri=uri, name=name):
            return f"[resource {name}: {uri}]", None
    return f"[content of the kind {block.type}, which is not known here]", None


def blob_of(data: str, name: str, media_type: str) -> tuple[str, Blob | None]:
    try:
        decoded = base64.b64decode(data, validate=True)
    except binascii.Error:
        return f"[{name} could not be decoded]", None
    return f"[{name}: {media_type}, {len(decoded)} bytes]", Blob(name, media_type, decoded)


def describe_failure(error: BaseException, complaints: TextIO) -> str:
    """What went wrong, and the last words of the server."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    complaints.seek(0, os.SEEK_END)
    complaints.seek(max(0, complaints.tell() - SERVER_WORDS_MAX))
    said = complaints.read().strip()
    return f"{type(error).__name__}: {error}{f'; it said: {said}' if said else ''}"
