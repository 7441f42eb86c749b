"""The calls of one rollout to tools outside the sandbox: opens sessions at the first call, bounds the time of a call,
sorts errors by kind, and retries idempotent tools."""

import asyncio
import itertools
import logging
import time

from replayground.sandboxes.limits import Limits
from replayground.sandboxes.outside.contract import (
    OutsideFailed,
    OutsideTool,
    Provider,
    RateLimited,
    RolloutHandle,
    ToolFailed,
    ToolOutput,
    ToolSession,
)
from replayground.sandboxes.protocol import Arguments, ErrorKind, SandboxFailed, ToolResult
from replayground.sandboxes.tools.tool import ToolError

logger = logging.getLogger(__name__)

CALL_TIMEOUT_SECONDS = 60.0
CLOSE_TIMEOUT_SECONDS = 30.0
ATTEMPTS_MAX = 3
FIRST_WAIT_SECONDS = 0.5
KEYS_REMEMBERED_MAX = 64


class OutsideCalls:
    """The tool sessions of one rollout, one for each provider that it uses."""

    def __init__(self, rollout_handle: RolloutHandle, output_bytes_max: int = Limits().output_bytes_max) -> None:
        self._rollout_handle = rollout_handle
        self._output_bytes_max = output_bytes_max
        self._sessions: dict[int, tuple[Provider, ToolSession]] = {}
        "by id(): a provider need not be hashable; the provider is kept so that its id is not reused"
        self._results: dict[str, ToolResult] = {}
        self._closing: asyncio.Task[None] | None = None

    async def call(self, tool: OutsideTool, arguments: Arguments, key: str) -> ToolResult:
        """Call a tool. A repeated `key` returns the first result and runs nothing. Raises SandboxFailed only."""
        if key not in self._results:
            self._remember(key, await self._result(tool, arguments))
        return self._results[key]

    async def close(self) -> None:
        """Close all sessions. Idempotent. A session that does not close in time is logged and left to its provider."""
        sessions, self._sessions = [session for _, session in self._sessions.values()], {}
        if sessions:
            # A task of its own, shielded: if the rollout is cancelled meanwhile, the closing goes on in the background.
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
        # Logged: when nobody but the operator can do something about it, only the log says so.
        except RateLimited as error:
            logger.warning("tool_rate_limited", extra={"tool": tool.name, "reason": str(error)})
            return result(f"error: too many requests: {error}. Try again later", "tool")
        except TimeoutError:
            return result(f"error: {tool.name} did not answer within {self._seconds(tool):g} s", "tool")
        # Includes OutsideFailed.
        except SandboxFailed:
            raise
        # A bug of a provider must not end the rollout, and is not the agent's error.
        except Exception as error:
            logger.exception("tool_failed", extra={"tool": tool.name})
            return result(f"error: {type(error).__name__}: {error}", "tool")
        return result(answer.content, None, answer)

    async def _attempts(self, tool: OutsideTool, arguments: Arguments) -> ToolOutput:
        """Call once. An idempotent tool is called again after an infra error, ATTEMPTS_MAX times in all."""
        # Outside of the time limit: opening may have to wait for a free browser.
        session = await self._session(tool.provider)
        for attempt in itertools.count(1):
            try:
                async with asyncio.timeout(self._seconds(tool)):
                    return await session.call(tool.name, arguments)
            except OutsideFailed as error:
                if not tool.is_idempotent or attempt == ATTEMPTS_MAX:
                    # Raises OutsideFailed, which ends the rollout, when the provider is not well.
                    await tool.provider.prove_health()
                    await self._reopen(tool.provider)
                    raise ToolFailed(f"{error}. Other calls work, in a new session") from error
                logger.warning("tool_call_retried", extra={"tool": tool.name, "attempt": attempt, "reason": str(error)})
            await asyncio.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        # itertools.count never ends; mypy does not know.
        raise AssertionError("unreachable")

    async def _session(self, provider: Provider) -> ToolSession:
        if id(provider) not in self._sessions:
            self._sessions[id(provider)] = provider, await provider.open(self._rollout_handle)
        return self._sessions[id(provider)][1]

    async def _reopen(self, provider: Provider) -> None:
        """Open another session instead of the one that failed. Raises OutsideFailed when the provider itself fails."""
        _, failed = self._sessions.pop(id(provider))
        await self._close_all([failed])
        await self._session(provider)

    def _seconds(self, tool: OutsideTool) -> float:
        return tool.call_timeout_seconds or CALL_TIMEOUT_SECONDS

    def _shorten(self, content: str) -> str:
        # Replaced, not only for measuring: half a surrogate pair of a web page cannot be written to the log.
        encoded = content.encode(errors="replace")
        if len(encoded) <= self._output_bytes_max:
            return encoded.decode()
        kept = encoded[: self._output_bytes_max].decode(errors="ignore")
        return f"{kept}\n[truncated: {len(encoded)} bytes in all, the first {self._output_bytes_max} are shown]"

    def _remember(self, key: str, result: ToolResult) -> None:
        self._results[key] = result
        if len(self._results) > KEYS_REMEMBERED_MAX:
            del self._results[next(iter(self._results))]
