"""The host's end of a sandbox with a runner (runner.py) inside, the same for bubblewrap and gVisor.

Requests are answered in order. A request that is cut short or answered malformed closes the sandbox. What a tool
process returns is not trusted: the runner passes its bytes on, and only lengths and numbers of a closed list are read
from them. So agent code can forge an agent error or a tool error, but never an infra error.

Nor can it cause one: from the first call of a lease on, a sandbox that is lost was lost by the agent, unless the host
has evidence of its own that it was not (`RunnerSandbox._blame`).
"""

import asyncio
import contextlib
import errno
import itertools
import logging
import marshal
import struct
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from replayground.sandboxes.limits import Limits
from replayground.sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, SandboxUnavailable, ToolResult
from replayground.sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

# These formats and STATUSES are repeated in runner.py, which cannot import them, and must stay equal there.
REQUEST = struct.Struct(">II")
ANSWER = struct.Struct(">BiII")
STATUSES = ("ok", "timeout", "died", "failed", "os_error", "dirty")
SAID = struct.Struct(">BQ")
ERRORS: tuple[ErrorKind | None, ...] = (None, "agent", "tool")
# Every Python since 3.4 reads it; the Python inside is not the one here. The host itself never unmarshals: marshal is
# not safe for untrusted bytes.
MARSHAL_VERSION = 4
SENTENCE_BYTES_MAX = 1 << 20
# Long, because many sandboxes may start at once on a busy machine.
START_TIMEOUT_SECONDS = 60.0
# Added to the time of a call, so that the timeout of the runner, which keeps the sandbox, comes first.
GRACE_SECONDS = 5.0
# A timer that fires later than this was held up: the response may be here, unread.
LATE_SECONDS_MIN = 0.1
LATE_READING_SECONDS = 1.0
KEYS_REMEMBERED_MAX = 64
# As in Linux. The runner would refuse a longer path as well, and repeat it in what it says.
PATH_BYTES_MAX = 4096
# Statuses that say that the runner itself could not run a call.
NOT_RUN = ("failed", "os_error")
FRESH_SESSION = "The next call starts a fresh session: names are forgotten, files are kept."


class RunnerResponse(NamedTuple):
    """The runner's response to one request."""

    status: str
    detail: str
    errno: int
    body: bytes


class Enclosure(Protocol):
    """The processes of one sandbox, seen from outside."""

    @property
    def is_running(self) -> bool: ...

    def used_up(self) -> str | None:
        """A sentence when the sandbox exceeded one of its limits since the last call; None otherwise."""
        ...

    async def was_killed_from_outside(self) -> bool:
        """Whether there is evidence that a signal from outside ended it. Waits a moment for its end."""
        ...

    def was_starved(self, last_seconds: float) -> bool:
        """Whether there is evidence that the host let no sandbox run for most of this time, whatever its agent did."""
        ...

    async def end(self) -> None:
        """Kill every process and remove what was made for the sandbox. Idempotent."""
        ...


class EndedByAgent(Exception):
    """The agent brought the sandbox down; the text says how."""


class RunnerSandbox:
    """A `Sandbox` that talks over a stream to the runner inside."""

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
        self._calls_made = 0
        """In this lease. From the first one on, code of the agent may have run."""
        self._ended_by_agent: str | None = None

    @property
    def is_alive(self) -> bool:
        return not self._closed and self.enclosure.is_running and not self._reader.at_eof()

    async def greet(self, compiled_tools: bytes) -> None:
        """Send limits and tools. SandboxUnavailable when the runner refuses them, SandboxFailed without a response."""
        header = {"op": "hello", "limits": msgspec.to_builtins(self._limits)}
        answer = await self._request(header, compiled_tools, START_TIMEOUT_SECONDS)
        if answer.status != "ok":
            await self.close()
            raise SandboxUnavailable(answer.detail)

    async def call(self, tool: str, arguments: Arguments, key: str, session: str = "") -> ToolResult:
        if key in self._results:
            return self._results[key]
        if tool not in self._tools:
            raise SandboxFailed(f"this sandbox was opened without the tool {tool}; it has {', '.join(self._tools)}")
        try:
            body = marshal.dumps((tool, msgspec.to_builtins(arguments)), MARSHAL_VERSION)
        # Nested too deeply. The workbench refuses such arguments before.
        except (ValueError, RecursionError) as error:
            return failure(f"error: the arguments cannot be sent: {error}", "agent", 0.0)
        result = await self._run(tool, body, session)
        self._remember(key, result)
        return result

    async def _run(self, tool: str, body: bytes, session: str) -> ToolResult:
        timeout_seconds = self._tools[tool].call_timeout_seconds or self._limits.call_timeout_seconds
        header = {
            "op": "call",
            "session": session,
            "timeout_seconds": timeout_seconds,
            # One byte more than may be shown, so that a cut is noticed.
            "answer_bytes_max": SAID.size + self._limits.output_bytes_max + 1,
        }
        # Counted before it is made: its own code may be what brings the sandbox down.
        is_first, self._calls_made = self._calls_made == 0, self._calls_made + 1
        started = time.perf_counter()
        try:
            answer = await self._request(header, body, timeout_seconds + GRACE_SECONDS)
        except EndedByAgent as ended:
            return failure(f"error: the sandbox has ended: {ended}", "agent", 0.0)
        milliseconds = (time.perf_counter() - started) * 1000
        # Also when the call succeeded: a child process of it may have been killed or refused.
        excess = self.enclosure.used_up()
        if answer.status in NOT_RUN and is_first:
            raise SandboxFailed(f"the runner could not run the call: {answer.detail or answer.status}")
        result = result_of(explain(answer, excess), milliseconds, self._limits.output_bytes_max)
        if excess is not None and answer.status == "ok":
            content = f"{result.content.rstrip()}\n[a process was ended or refused: {excess}]".lstrip()
            result = msgspec.structs.replace(result, content=content)
        return result

    async def put(self, path: str, data: bytes) -> None:
        check_path(path)
        # Refused here: the runner would have to hold all of it in its memory.
        if len(data) > self._limits.disk_bytes_max:
            raise OSError(errno.ENOSPC, f"longer than the disk, which has {self._limits.disk_bytes_max} bytes", path)
        await self._request_file({"op": "put", "path": path}, data, GRACE_SECONDS)

    async def get(self, path: str) -> bytes:
        check_path(path)
        return await self._request_file({"op": "get", "path": path}, b"", GRACE_SECONDS)

    async def snapshot(self) -> bytes:
        header = {"op": "snapshot", "bytes_max": self._limits.snapshot_bytes_max}
        return await self._request_file(header, b"", self._limits.call_timeout_seconds + GRACE_SECONDS)

    async def restore(self, snapshot: bytes) -> None:
        if len(snapshot) > self._limits.snapshot_bytes_max:
            raise OSError(f"the snapshot is longer than {self._limits.snapshot_bytes_max} bytes")
        timeout_seconds = self._limits.call_timeout_seconds + GRACE_SECONDS
        await self._request_file({"op": "restore"}, snapshot, timeout_seconds)

    async def end_processes(self) -> None:
        await self._request_file({"op": "end_processes"}, b"", GRACE_SECONDS)

    async def reset(self) -> bool:
        # Keys are unique within a lease only.
        self._results.clear()
        self._leases_left -= 1
        if self._leases_left <= 0 or self._closed:
            return False
        try:
            answer = await self._request({"op": "reset"}, b"", GRACE_SECONDS)
        except EndedByAgent as ended:
            answer = RunnerResponse("failed", str(ended), 0, b"")
        # Discards what the last lease exceeded, so that the next one is not told about it.
        self.enclosure.used_up()
        self._calls_made = 0
        if answer.status != "ok":
            logger.warning("sandbox_not_clean", extra={"sandbox": self.sandbox_id, "reason": answer.detail})
        return answer.status == "ok"

    async def close(self) -> None:
        self._closed = True
        # End of input makes the runner exit by itself.
        self._writer.close()
        await self.enclosure.end()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _request_file(self, header: dict[str, Any], body: bytes, timeout_seconds: float) -> bytes:
        """As `_request`, for operations on files: what the agent is to blame for is an OSError."""
        try:
            answer = await self._request(header, body, timeout_seconds)
        except EndedByAgent as ended:
            raise OSError(errno.EIO, f"the sandbox has ended: {ended}") from ended
        if answer.status != "ok":
            raise OSError(answer.errno, answer.detail)
        return answer.body

    async def _request(self, header: dict[str, Any], body: bytes, timeout_seconds: float) -> RunnerResponse:
        """Send one frame, read one frame. On failure or timeout, closes the sandbox and raises SandboxFailed, or
        EndedByAgent when that was the agent's doing, also for every later request."""
        async with self._turn:
            if self._ended_by_agent is not None:
                raise EndedByAgent(self._ended_by_agent)
            if self._closed:
                raise SandboxFailed(f"{self.sandbox_id} is closed")
            try:
                async with reading_timeout(timeout_seconds):
                    return await self._exchange(header, body)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                self._ended_by_agent = await self._blame(error)
                await self.close()
                if self._ended_by_agent is not None:
                    raise EndedByAgent(self._ended_by_agent) from error
                reason = "did not answer in time" if isinstance(error, TimeoutError) else f"died ({error!r})"
                raise SandboxFailed(f"{self.sandbox_id} {reason} on {header['op']}") from error
            # Cancelled in the middle: the response would be read as that of the next request.
            except BaseException:
                await self.close()
                raise

    async def _blame(self, error: Exception) -> str | None:
        """How the agent brought the sandbox down. None when no code of it has run here, or when there is evidence from
        outside of the sandbox that it was not the agent. Without such evidence it was: an agent that can bring about an
        infra error has its bad attempts retried instead of scored."""
        # The pool closed it meanwhile: the lease expired, or the worker stops.
        if self._calls_made == 0 or self._closed:
            return None
        # First: the kernel ends a process that used up the memory by a signal as well.
        if (excess := self.enclosure.used_up()) is not None:
            return excess
        # Every timeout ends with GRACE_SECONDS in which a runner that gets any CPU time answers.
        if isinstance(error, TimeoutError):
            return None if self.enclosure.was_starved(GRACE_SECONDS) else "it did not answer in time"
        return None if await self.enclosure.was_killed_from_outside() else "it ended"

    async def _exchange(self, header: dict[str, Any], body: bytes) -> RunnerResponse:
        encoded = marshal.dumps(header, MARSHAL_VERSION)
        self._writer.write(REQUEST.pack(len(encoded), len(body)) + encoded + body)
        await self._writer.drain()
        number, errno, sentence_length, body_length = ANSWER.unpack(await self._reader.readexactly(ANSWER.size))
        # Checked before the rest is read: a wrong length would make the host allocate up to 4 GiB.
        if number >= len(STATUSES) or sentence_length > SENTENCE_BYTES_MAX or body_length > self._answer_bytes_max():
            raise EOFError(f"malformed response: status {number}, {sentence_length} + {body_length} bytes")
        sentence = (await self._reader.readexactly(sentence_length)).decode(errors="replace")
        return RunnerResponse(STATUSES[number], sentence, errno, await self._reader.readexactly(body_length))

    def _answer_bytes_max(self) -> int:
        return self._limits.snapshot_bytes_max + self._limits.output_bytes_max + SAID.size + 1

    def _remember(self, key: str, result: ToolResult) -> None:
        self._results[key] = result
        for oldest in list(itertools.islice(self._results, max(0, len(self._results) - KEYS_REMEMBERED_MAX))):
            del self._results[oldest]


@contextlib.asynccontextmanager
async def reading_timeout(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout. But when this program itself could not run at that time, it first reads what has come."""
    loop = asyncio.get_running_loop()
    due = loop.time() + seconds

    def expire() -> None:
        now = loop.time()
        limit.reschedule(now + LATE_READING_SECONDS if now - due > LATE_SECONDS_MIN else now)

    async with asyncio.timeout(None) as limit:
        timer = loop.call_at(due, expire)
        try:
            yield
        finally:
            timer.cancel()


def explain(answer: RunnerResponse, excess: str | None) -> RunnerResponse:
    """The response with the limit that was exceeded, if any, in its detail."""
    if excess is None:
        return answer
    return answer._replace(detail=excess if answer.status == "died" else f"{answer.detail}; {excess}")


def result_of(answer: RunnerResponse, milliseconds: float, output_bytes_max: int) -> ToolResult:
    """The result that the agent sees, from the runner's status and the bytes of the tool process."""
    if answer.status == "ok":
        try:
            error_number, bytes_total = SAID.unpack_from(answer.body)
            content = answer.body[SAID.size :].decode(errors="replace")
            error = ERRORS[error_number]
        # The agent's code wrote to the tool process's socket itself.
        except (struct.error, IndexError):
            return failure("error: the session gave no readable answer", "agent", milliseconds)
        return ToolResult(shorten(content, bytes_total, output_bytes_max), error is not None, error, milliseconds)
    if answer.status == "timeout":
        return failure(f"error: {answer.detail}. {FRESH_SESSION}", "agent", milliseconds)
    if answer.status == "died":
        return failure(f"error: the session ended: {answer.detail}. {FRESH_SESSION}", "agent", milliseconds)
    # Not the first call of the lease: earlier ones left the sandbox in a state in which it cannot be run.
    return failure(f"error: the session could not be started: {answer.detail}", "agent", milliseconds)


def failure(content: str, kind: ErrorKind, milliseconds: float) -> ToolResult:
    return ToolResult(content, True, kind, milliseconds)


def shorten(content: str, bytes_total: int, output_bytes_max: int) -> str:
    """At most `output_bytes_max` bytes of the content, followed by a note with the true length if it was cut."""
    encoded = content.encode()
    if len(encoded) <= output_bytes_max and bytes_total <= output_bytes_max:
        return content
    kept = encoded[:output_bytes_max].decode(errors="ignore")
    total = max(bytes_total, len(encoded))
    return f"{kept}\n[truncated: {total} bytes in all, the first {output_bytes_max} are shown]"


def check_path(path: str) -> None:
    """OSError for a path that no file can have."""
    if len(path.encode(errors="surrogatepass")) > PATH_BYTES_MAX:
        raise OSError(errno.ENAMETOOLONG, f"a path has at most {PATH_BYTES_MAX} bytes", path[:80])
