"""The outside calls of one rollout: who serves it is opened at the first call, its errors are classed, its time bounded."""

import asyncio
import itertools
import logging
import time

from sandboxes.limits import Limits
from sandboxes.outside.contract import (
    OutsideFailed,
    OutsideTool,
    Provider,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
    ToolSession,
)
from sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, ToolResult
from sandboxes.tools.tool import ToolError

logger = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 30.0
ATTEMPTS_MAX = 3
FIRST_WAIT_SECONDS = 0.5
KEYS_REMEMBERED_MAX = 64


class OutsideCalls:
    """Sessions of one rollout, by provider."""

    def __init__(self, rollout_handle: RolloutHandle, output_bytes_max: int = Limits().output_bytes_max) -> None:
        self._rollout_handle = rollout_handle
        self._output_bytes_max = output_bytes_max
        self._sessions: dict[int, tuple[Provider, ToolSession]] = {}
        "by identity: a provider need not be hashable"
        self._results: dict[str, ToolResult] = {}
        self._closing: asyncio.Task[None] | None = None

    async def call(self, tool: OutsideTool, arguments: Arguments, key: str) -> ToolResult:
        """A repeated `key` returns the first result and runs nothing. Raises SandboxFailed."""
        if key not in self._results:
            self._remember(key, await self._result(tool, arguments))
        return self._results[key]

    async def close(self) -> None:
        """End all sessions. Idempotent; what cannot be ended in time is logged and left to its provider.

        A rollout that is cancelled while it closes does not stop the closing, which goes on behind its back."""
        sessions, self._sessions = [session for _, session in self._sessions.values()], {}
        if sessions:
            self._closing = asyncio.create_task(self._close_all(sessions))
            await asyncio.shield(self._closing)

    async def _close_all(self, sessions: list[ToolSession]) -> None:
        for session in sessions:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                    await session.close()
            except Exception:
                logger.exception(
                    "tool_session_not_closed",
                    extra={"session": type(session).__name__, "owner": self._rollout_handle.owner},
                )

    async def _result(self, tool: OutsideTool, arguments: Arguments) -> ToolResult:
        started = time.perf_counter()

        def result(content: str, kind: ErrorKind | None, answer: ToolOutput | None = None) -> ToolResult:
            milliseconds = (time.perf_counter() - started) * 1000
            blobs = answer.blobs if answer else ()
            return ToolResult(self._shorten(content), kind is not None, kind, milliseconds, blobs)

        try:
            answer = await self._attempts(tool, arguments)
        except ToolError as error:
            return result(f"error: {error}", "agent")
        except ToolFailed as error:
            return result(f"error: {error}", "tool")
        except TimeoutError:
            return result(f"error: {tool.name} did not answer within {self._seconds(tool):g} s", "tool")
        except SandboxFailed:
            raise
        except Exception as error:  # a bug of a provider must not end the rollout, and is not the agent's doing
            logger.exception("tool_failed", extra={"tool": tool.name})
            return result(f"error: {type(error).__name__}: {error}", "tool")
        return result(answer.content, None, answer)

    async def _attempts(self, tool: OutsideTool, arguments: Arguments) -> ToolOutput:
        """Once; after an infra error again, if to do it twice is the same as once."""
        session = await self._session(tool.provider)
        for attempt in itertools.count(1):
            try:
                async with asyncio.timeout(self._seconds(tool)):
                    return await session.call(tool.name, arguments)
            except OutsideFailed as error:
                if not tool.is_idempotent or attempt == ATTEMPTS_MAX:
                    raise
                logger.warning("tool_call_retried", extra={"tool": tool.name, "attempt": attempt, "reason": str(error)})
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        raise AssertionError("unreachable")

    async def _session(self, provider: Provider) -> ToolSession:
        if id(provider) not in self._sessions:
            self._sessions[id(provider)] = provider, await provider.open(self._rollout_handle)
        return self._sessions[id(provider)][1]

    def _seconds(self, tool: OutsideTool) -> float:
        return tool.call_timeout_seconds or CALL_TIMEOUT_SECONDS

    def _shorten(self, content: str) -> str:
        encoded = content.encode(errors="replace")
        if len(encoded) <= self._output_bytes_max:
            return content
        kept = encoded[: self._output_bytes_max].decode(errors="ignore")
        return f"{kept}\n[truncated: {len(encoded)} bytes in all, the first {self._output_bytes_max} are shown]"

    def _remember(self, key: str, result: ToolResult) -> None:
        self._results[key] = result
        if len(self._results) > KEYS_REMEMBERED_MAX:
            del self._results[next(iter(self._results))]
