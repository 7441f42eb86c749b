"""The host's end of a sandbox with a runner (runner.py) inside: bubblewrap and gVisor differ only in how it is started.

Requests are answered in order. A doubt about the stream ends the sandbox. Nothing that a session says is believed: its
answer is read by length and type, and it cannot claim an infra error.
"""

import asyncio
import contextlib
import itertools
import logging
import marshal
import struct
import time
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from sandboxes.limits import Limits
from sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, SandboxUnavailable, ToolResult
from sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

REQUEST = struct.Struct(">II")
ANSWER = struct.Struct(">BiII")
STATUSES = ("ok", "timeout", "died", "failed", "os_error", "dirty")
SAID = struct.Struct(">BQ")
ERRORS: tuple[ErrorKind | None, ...] = (None, "agent", "tool")
MARSHAL_VERSION = 4  # what every Python since 3.4 reads
SENTENCE_BYTES_MAX = 1 << 20
START_TIMEOUT_SECONDS = 60.0
GRACE_SECONDS = 5.0
KEYS_REMEMBERED_MAX = 64
FRESH_SESSION = "The next call starts a fresh session: names are forgotten, files are kept."


class RunnerResponse(NamedTuple):
    """What the runner says of a request."""

    status: str
    detail: str
    errno: int
    body: bytes


class Enclosure(Protocol):
    """The processes of one sandbox, seen from outside."""

    @property
    def is_running(self) -> bool: ...

    def used_up(self) -> str | None:
        """What the sandbox ran out of since this was last asked, in words; None when it did not."""
        ...

    async def end(self) -> None:
        """Kill every process and remove every trace. Idempotent."""
        ...


class RunnerSandbox:
    """A `Sandbox` by a stream to a runner inside an enclosure."""

    def __init__(
        self,
        isolation: str,
        enclosure: Enclosure,
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        tools: Mapping[str, Tool],
        limits: Limits,
        leases_max: int,
    ) -> None:
        self.isolation = isolation
        self.sandbox_id = f"{isolation}-{uuid.uuid4().hex[:16]}"
        self.enclosure = enclosure
        self._reader, self._writer = stream
        self._tools = tools
        self._limits = limits
        self._leases_left = leases_max
        self._turn = asyncio.Lock()
        self._closed = False
        self._results: dict[str, ToolResult] = {}
        self._ended_by_agent: str | None = None

    @property
    def is_alive(self) -> bool:
        return not self._closed and self.enclosure.is_running and not self._reader.at_eof()

    async def greet(self, compiled_tools: bytes) -> None:
        """Hand over limits and tools. SandboxUnavailable when the runner does not take them."""
        header = {"op": "hello", "limits": msgspec.to_builtins(self._limits)}
        answer = await self._request(header, compiled_tools, START_TIMEOUT_SECONDS)
        if answer.status != "ok":
            await self.close()
            raise SandboxUnavailable(answer.detail)

    async def call(self, tool: str, arguments: Arguments, key: str) -> ToolResult:
        if key in self._results:
            return self._results[key]
        if tool not in self._tools:
            raise SandboxFailed(f"this sandbox was opened without the tool {tool}; it has {', '.join(self._tools)}")
        if self._ended_by_agent is not None:
            return failure(f"error: the sandbox has ended: {self._ended_by_agent}", "agent", 0.0)
        timeout_seconds = self._tools[tool].call_timeout_seconds or self._limits.call_timeout_seconds
        header = {
            "op": "call",
            "timeout_seconds": timeout_seconds,
            "answer_bytes_max": SAID.size + self._limits.output_bytes_max + 1,
        }
        body = marshal.dumps((tool, msgspec.to_builtins(arguments)), MARSHAL_VERSION)
        started = time.perf_counter()
        try:
            answer = await self._request(header, body, timeout_seconds + GRACE_SECONDS)
        except SandboxFailed:  # the whole sandbox fell; when its own limits ended it, that was the agent's doing
            reason = self.enclosure.used_up()
            if reason is None:
                raise
            self._ended_by_agent = reason
            return failure(f"error: the sandbox has ended: {reason}", "agent", 0.0)
        milliseconds = (time.perf_counter() - started) * 1000
        excess = self.enclosure.used_up()
        result = result_of(explain(answer, excess), milliseconds, self._limits.output_bytes_max)
        if excess is not None and answer.status == "ok":
            content = f"{result.content.rstrip()}\n[a process was ended or refused: {excess}]".lstrip()
            result = msgspec.structs.replace(result, content=content)
        self._remember(key, result)
        return result

    async def put(self, path: str, data: bytes) -> None:
        raise_os_error(await self._request({"op": "put", "path": path}, data, GRACE_SECONDS))

    async def get(self, path: str) -> bytes:
        answer = await self._request({"op": "get", "path": path}, b"", GRACE_SECONDS)
        raise_os_error(answer)
        return answer.body

    async def snapshot(self) -> bytes:
        header = {"op": "snapshot", "bytes_max": self._limits.snapshot_bytes_max}
        answer = await self._request(header, b"", self._limits.call_timeout_seconds + GRACE_SECONDS)
        raise_os_error(answer)
        return answer.body

    async def restore(self, snapshot: bytes) -> None:
        if len(snapshot) > self._limits.snapshot_bytes_max:
            raise OSError(f"the snapshot is longer than {self._limits.snapshot_bytes_max} bytes")
        timeout_seconds = self._limits.call_timeout_seconds + GRACE_SECONDS
        raise_os_error(await self._request({"op": "restore"}, snapshot, timeout_seconds))

    async def reset(self) -> bool:
        self._results.clear()
        self._leases_left -= 1
        if self._leases_left <= 0 or self._closed:
            return False
        answer = await self._request({"op": "reset"}, b"", GRACE_SECONDS)
        self.enclosure.used_up()  # forgotten: it was the last lease's doing
        if answer.status != "ok":
            logger.warning("sandbox_not_clean", extra={"sandbox": self.sandbox_id, "reason": answer.detail})
        return answer.status == "ok"

    async def close(self) -> None:
        self._closed = True
        self._writer.close()
        await self.enclosure.end()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _request(self, header: dict[str, Any], body: bytes, timeout_seconds: float) -> RunnerResponse:
        """One frame out, one frame in. When that is cut short, the stream is out of step: end the sandbox."""
        async with self._turn:
            if self._closed:
                raise SandboxFailed(f"{self.sandbox_id} is closed")
            try:
                async with asyncio.timeout(timeout_seconds):
                    return await self._exchange(header, body)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                await self.close()
                reason = "did not answer in time" if isinstance(error, TimeoutError) else f"died ({error!r})"
                raise SandboxFailed(f"{self.sandbox_id} {reason} on {header['op']}") from error
            except BaseException:
                await self.close()
                raise

    async def _exchange(self, header: dict[str, Any], body: bytes) -> RunnerResponse:
        encoded = marshal.dumps(header, MARSHAL_VERSION)
        self._writer.write(REQUEST.pack(len(encoded), len(body)) + encoded + body)
        await self._writer.drain()
        number, errno, sentence_length, body_length = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
        if number >= len(STATUSES) or sentence_length > SENTENCE_BYTES_MAX or body_length > self._answer_bytes_max():
            raise EOFError(f"an answer {number} of {sentence_length} + {body_length} bytes")
        sentence = (await self._reader.readexactly(sentence_length)).decode()
        return RunnerResponse(STATUSES[number], sentence, errno, await self._reader.readexactly(body_length))

    def _answer_bytes_max(self) -> int:
        return self._limits.snapshot_bytes_max + self._limits.output_bytes_max + SAID.size + 1

    def _remember(self, key: str, result: ToolResult) -> None:
        self._results[key] = result
        for oldest in list(itertools.islice(self._results, max(0, len(self._results) - KEYS_REMEMBERED_MAX))):
            del self._results[oldest]


def explain(answer: RunnerResponse, excess: str | None) -> RunnerResponse:
    """The answer of a session that ended or fell silent, with what it ran out of."""
    if excess is None:
        return answer
    return answer._replace(detail=excess if answer.status == "died" else f"{answer.detail}; {excess}")


def result_of(answer: RunnerResponse, milliseconds: float, output_bytes_max: int) -> ToolResult:
    """What the agent sees of a call, from the runner's verdict and the session's own words."""
    if answer.status == "ok":
        try:
            error_number, bytes_total = SAID.unpack_from(answer.body)
            content = answer.body[SAID.size :].decode(errors="replace")
            error = ERRORS[error_number]
        except (struct.error, IndexError):  # the agent's code wrote to the session's socket
            return failure("error: the session gave no readable answer", "agent", milliseconds)
        return ToolResult(shorten(content, bytes_total, output_bytes_max), error is not None, error, milliseconds)
    if answer.status == "timeout":
        return failure(f"error: {answer.detail}. {FRESH_SESSION}", "agent", milliseconds)
    if answer.status == "died":
        return failure(f"error: the session ended: {answer.detail}. {FRESH_SESSION}", "agent", milliseconds)
    raise SandboxFailed(f"the runner could not run the call: {answer.detail or answer.status}")


def failure(content: str, kind: ErrorKind, milliseconds: float) -> ToolResult:
    return ToolResult(content, True, kind, milliseconds)


def shorten(content: str, bytes_total: int, output_bytes_max: int) -> str:
    """At most `output_bytes_max` bytes of the content, then a line that says how much there was."""
    encoded = content.encode()
    if len(encoded) <= output_bytes_max and bytes_total <= output_bytes_max:
        return content
    kept = encoded[:output_bytes_max].decode(errors="ignore")
    total = max(bytes_total, len(encoded))
    return f"{kept}\n[truncated: {total} bytes in all, the first {output_bytes_max} are shown]"


def raise_os_error(answer: RunnerResponse) -> None:
    if answer.status != "ok":
        raise OSError(answer.errno, answer.detail)
