"""The tools of any MCP server, by the official client: a program started in a jail (stdio), or a URL (HTTP).

Each rollout has its own server process or HTTP session, which ends with it, so rollouts do not see each other's state.
The list of tools is requested once, when the program starts; the tool `now` of the server `clock` is called clock_now.
Arguments are validated against the tool's full JSON schema before they are sent, in a process of its own that is ended
when a check takes too long (schema_check.py). Of what a server writes to stderr the last lines are kept in memory.

* `isError` is an agent error: the protocol means it for the model to read and correct.
* A protocol error is an agent error if it is about the arguments (INVALID_PARAMS), otherwise a tool error.
* A server that dies, cannot be reached or does not become ready is an infra error; one that has had too many requests
  (429) is a tool error.

Not covered: requests of a server to its client (sampling, elicitation, roots) are refused; tools that come and go while
the program runs; a stdio server that writes an endless line is bounded only by the memory of this program; with
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

import httpx2
import mcp_types
import msgspec
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from replayground.sandboxes import seccomp
from replayground.sandboxes.outside.complaints import Complaints
from replayground.sandboxes.outside.config import MEBIBYTE, McpSettings
from replayground.sandboxes.outside.contract import (
    OutsideFailed,
    OutsideTool,
    RateLimited,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
)
from replayground.sandboxes.outside.jail import Jail
from replayground.sandboxes.outside.schema_process import SchemaProcess
from replayground.sandboxes.protocol import Arguments, Blob
from replayground.sandboxes.tools.tool import ToolError

TOOLS_MAX = 256
NAME_CHARACTERS_MAX = 64
SERVER_WORDS_MAX = 2000
CLOSE_TIMEOUT_SECONDS = 20.0
BASE64_OVERHEAD = 4 / 3


class McpServer:
    """The provider of the tools of one server."""

    def __init__(self, name: str, settings: McpSettings) -> None:
        self.name = name
        self.settings = settings
        self.tools: Mapping[str, OutsideTool] = {}
        self.original_names: dict[str, str] = {}
        "names of the tools at the server, by the name that the agent uses"
        self.schema_process = SchemaProcess()

    async def start(self) -> None:
        """List the tools of the server, in a session that is closed at once. Raises OutsideFailed."""
        session = await self._open_session()
        try:
            async with asyncio.timeout(self.settings.start_timeout_seconds):
                listed = await session.list_tools()
        except (MCPError, TimeoutError) as error:
            raise OutsideFailed(f"the MCP server {self.name} did not list its tools: {error!r}") from error
        finally:
            await session.close()
        await self._offer([tool for tool in listed if not self.settings.tools or tool.name in self.settings.tools])

    async def open(self, rollout_handle: RolloutHandle) -> "McpSession":
        return await self._open_session()

    async def prove_health(self) -> None:
        """Does nothing: a server that opens another session is well."""

    async def close(self) -> None:
        """Every session ends with its rollout; what is left is the process that checks arguments."""
        await self.schema_process.close()

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

    async def _offer(self, listed: list[mcp_types.Tool]) -> None:
        unknown = set(self.settings.tools) - {tool.name for tool in listed}
        if unknown:
            raise OutsideFailed(f"the MCP server {self.name} has no tool {', '.join(sorted(unknown))}")
        tools = {}
        for tool in listed:
            # The characters and length that model APIs accept as a function name.
            name = re.sub(r"[^A-Za-z0-9_-]", "_", f"{self.name}_{tool.name}")[:NAME_CHARACTERS_MAX]
            if name in tools:
                raise OutsideFailed(f"two tools of the MCP server {self.name} would be called {name}")
            self.original_names[name] = tool.name
            tools[name] = await self._tool(name, tool)
        self.tools = tools

    async def _tool(self, name: str, tool: mcp_types.Tool) -> OutsideTool:
        try:
            fault = await self.schema_process.fault(tool.input_schema)
        except ToolError as error:
            fault = str(error)
        if fault is not None:
            raise OutsideFailed(f"the input schema of the MCP tool {name} is invalid: {fault}")
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
    """One rollout's connection to the server."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._settings = server.settings
        self._client: Client | None = None
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._last_status = 0
        """The status code of the last HTTP response; the client library tells only that a request failed."""

    async def start(self) -> None:
        """Wait until the server is initialised. Raises OutsideFailed."""
        # A task of its own: the client uses anyio cancel scopes, which must be left in the task that entered them.
        self._task = asyncio.create_task(self._live())
        await asyncio.shield(self._ready)

    async def list_tools(self) -> list[mcp_types.Tool]:
        assert self._client is not None
        tools: list[mcp_types.Tool] = []
        cursor = None
        # A server may return pages without end.
        while len(tools) < TOOLS_MAX:
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools[:TOOLS_MAX]

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        refusal = await self._server.schema_process.complaint(self._server.tools[tool].parameters, arguments)
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
        """Leave the client, which stops the server: it closes stdin, then sends SIGTERM, then SIGKILL. Idempotent."""
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

    async def _note_status(self, response: httpx2.Response) -> None:
        self._last_status = response.status_code

    async def _live(self) -> None:
        with contextlib.closing(Complaints()) as complaints:
            try:
                async with self._connect(complaints) as client:
                    self._client = client
                    self._ready.set_result(None)
                    await self._ending.wait()
            # The library raises many types, often in groups; all mean that there is no server.
            except Exception as error:
                kind = RateLimited if self._last_status == httpx2.codes.TOO_MANY_REQUESTS else OutsideFailed
                failure = kind(f"the MCP server {self._server.name} failed: {describe_failure(error, complaints)}")
                if not self._ready.done():
                    self._ready.set_exception(failure)
                    # Marks it as retrieved: if the waiter was cancelled, asyncio would log it.
                    self._ready.exception()
            finally:
                self._client = None

    @contextlib.asynccontextmanager
    async def _connect(self, complaints: Complaints) -> AsyncIterator[Client]:
        async with contextlib.AsyncExitStack() as held:
            if self._settings.url is not None:
                http = await held.enter_async_context(
                    # No HTTP timeout: the call has one, and a stream of events may be silent for long.
                    httpx2.AsyncClient(
                        headers=headers_of(self._settings), timeout=None, event_hooks={"response": [self._note_status]}
                    )
                )
                # Blobs arrive as base64 inside one event, with some JSON around them.
                event_bytes_max = int(self._settings.blob_bytes_max * BASE64_OVERHEAD) + MEBIBYTE
                transport = streamable_http_client(
                    self._settings.url, http_client=http, max_sse_event_size=event_bytes_max
                )
            else:
                command = await held.enter_async_context(jailed_command(self._server.name, self._settings))
                # In a jail the environment is set inside: a variable such as LD_PRELOAD must not reach the programs
                # that build the jail.
                environment = None if self._settings.jailed else self._settings.environment
                parameters = StdioServerParameters(command=command[0], args=command[1:], env=environment, cwd="/")
                transport = stdio_client(parameters, errlog=complaints.file)
            yield await held.enter_async_context(Client(transport))


@contextlib.asynccontextmanager
async def jailed_command(name: str, settings: McpSettings) -> AsyncIterator[list[str]]:
    """Yields the command line of the server, in its jail if it has one. Leaving the block kills what is left in the
    cgroup of the jail."""
    if not settings.jailed:
        yield list(settings.command)
        return
    with tempfile.NamedTemporaryFile() as filter_file:
        filter_file.write(seccomp.filter_program(runs_agents_code=False))
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


def answer_of(result: mcp_types.CallToolResult, blob_bytes_max: int) -> ToolOutput:
    """Texts joined as content; images, audio and files as blobs, up to `blob_bytes_max` bytes in all."""
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
    # Servers repeat structured content as text, so it is needed only without any.
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


def describe_failure(error: BaseException, complaints: Complaints) -> str:
    """The innermost error, and the end of what the server wrote to stderr."""
    # anyio's task groups wrap the error, sometimes several times.
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    said = complaints.text(SERVER_WORDS_MAX)
    return f"{type(error).__name__}: {error}{f'; it said: {said}' if said else ''}"
