"""What one rollout works with: tools, world, perturbations, and sandboxes that are opened at the first call.

Tools *apart* (sql, kv) run in a second sandbox, in which no code of the agent ever runs. The tables or keys of the
world that they need exist only there: the agent's code cannot read them past the perturbations, nor change them.

A tool that runs outside the sandbox (sandboxes.outside) is validated and perturbed like any other. Its session is
opened at its first call. Leaving the workbench closes all sessions and returns the sandboxes.

    async with Workbench(pool, toolset(["sql", "kv", "python"]), world, seed=7, owner=trajectory_id) as bench:
        observation = await bench.call("sql", {"query": "select 1"})

An error of the agent or of a tool is an observation. `SandboxFailed` is raised: the rollout ends by infra_error. Nothing
that an agent writes into a call raises it: arguments are bounded in depth and length before anything else reads them.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from replayground.sandboxes.limits import MEBIBYTE
from replayground.sandboxes.outside.calls import OutsideCalls
from replayground.sandboxes.outside.contract import OutsideTool, RolloutHandle
from replayground.sandboxes.pool import Lease, Pool
from replayground.sandboxes.protocol import Blob, ErrorKind, Sandbox, SandboxFailed, ToolResult
from replayground.sandboxes.tools.schema import complaint
from replayground.sandboxes.tools.tool import Tool, parts_apart
from replayground.sandboxes.worlds import perturbations
from replayground.sandboxes.worlds.checks import (
    Check,
    CheckResult,
    CommandEnd,
    changed_tables,
    run_command,
    text_of,
)
from replayground.sandboxes.worlds.pattern_process import PatternProcess
from replayground.sandboxes.worlds.world import World, set_up_world

EMPTY_WORLD = World(name="empty")
_CHECK_SESSION = "(checks)"
"none of an agent's: in it runs what the checks start, and nothing else runs then"
# Far below where the encoders here and inside raise a RecursionError, which depends on who calls them.
ARGUMENTS_DEPTH_MAX = 100
ARGUMENTS_BYTES_MAX = 4 * MEBIBYTE


class Observation(msgspec.Struct, frozen=True):
    """What the agent reads after a call, and what the event records about it."""

    content: str
    is_error: bool
    error_kind: ErrorKind | None
    perturbation: dict[str, Any] | None
    milliseconds: float
    blobs: tuple[Blob, ...] = ()


class PreparedSandbox:
    """One of the two sandboxes of a rollout: which parts of the world it has, and whether the agent did anything in it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.parts_set_up: set[str] = set()
        self.is_touched = False
        """A call ran in it, or a tool outside put a file there under a name of the agent's choice."""


class Workbench:
    """The tools of one rollout. The caller makes one call at a time."""

    def __init__(
        self,
        pool: Pool,
        tools: Mapping[str, Tool],
        world: World | None = None,
        *,
        seed: int,
        owner: str,
        lease_seconds: float = 600.0,
    ) -> None:
        self.tools = dict(tools)
        self.world = world or EMPTY_WORLD
        self.sandbox_id: str | None = None
        self._pool = pool
        self._seed = seed
        self._owner = owner
        self._lease_seconds = lease_seconds
        self._lease = contextlib.AsyncExitStack()
        self._sandbox_lease: Lease | None = None
        self._prepared: dict[bool, PreparedSandbox] = {}
        """True: the sandbox apart. False: the one for the agent's code."""
        self._parts_apart = parts_apart(self.tools.values())
        self._calls = 0
        self._times_called: Counter[bytes] = Counter()
        rollout_handle = RolloutHandle(owner=owner, world=self.world, get_file=self._get_file, put_file=self._put_file)
        self._outside = OutsideCalls(rollout_handle)
        # Pushed before any lease: the stack unwinds in reverse, so the sandboxes are released first.
        self._lease.push_async_callback(self._outside.close)
        self._patterns = PatternProcess()
        self._lease.push_async_callback(self._patterns.close)

    @property
    def isolation(self) -> str:
        return self._pool.backend.isolation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return the sandboxes and close the tool sessions. After an exception the pool closes the sandboxes."""
        self._sandbox_lease = None
        self._prepared.clear()
        await self._lease.__aexit__(kind, error, traceback)

    async def call(self, tool: str, arguments: Mapping[str, Any], session: str = "") -> Observation:
        """Validate the call, draw its perturbation, run it, apply the perturbation. Raises SandboxFailed only.

        `session` is the agent that calls, where several share this workbench."""
        # The position of the call in the rollout, refused calls included: the draws and the key depend on it.
        index, self._calls = self._calls, self._calls + 1
        refusal = self._refusal(tool, arguments)
        if refusal is not None:
            return Observation(f"error: {refusal}", True, "agent", None, 0.0)
        found = await self._patterns_found(tool, arguments)
        trouble = perturbations.draw_perturbation(self.world.perturbations, self._seed, index, tool, found)
        await asyncio.sleep(trouble.wait_milliseconds / 1000)
        # A busy call never reaches the tool, so it opens no sandbox.
        if trouble.is_busy:
            perturbation = perturbations.record(trouble, (), None)
            return Observation(perturbations.BUSY_CONTENT, True, "tool", perturbation, trouble.wait_milliseconds)
        result = await self._run(tool, arguments, index, session)
        return self._observe(result, trouble, tool, arguments)

    async def _patterns_found(self, tool: str, arguments: Mapping[str, Any]) -> frozenset[str]:
        patterns = perturbations.patterns_for(self.world.perturbations, tool)
        if not patterns:
            return frozenset()
        # In another process: what the agent wrote could keep this one busy for hours.
        return await self._patterns.found(patterns, perturbations.searched_text(arguments))

    async def check_world(self) -> list[CheckResult]:
        """What the checks of the world find, now that the agents have ended. Raises SandboxFailed only."""
        return [await self._check(check) for check in self.world.checks]

    async def _check(self, check: Check) -> CheckResult:
        blank = CheckResult(name=check.name, kind=check.kind)
        try:
            if check.kind == "tables":
                return msgspec.structs.replace(blank, content=await self._changed_tables(check))
            if check.kind == "file":
                data = await (await self._open_without_agents()).get(check.path)
                return msgspec.structs.replace(blank, content=text_of(data))
            return msgspec.structs.replace(blank, **await self._run_command(check))
        # What agents left behind: no such file, a full disk, a database that is none.
        except (OSError, ValueError) as error:
            return msgspec.structs.replace(blank, problem=str(error))

    async def _changed_tables(self, check: Check) -> str:
        """Raises OSError when they cannot be read."""
        prepared = self._prepared.get("tables" in self._parts_apart)
        # Without a call of a tool that needs them, they were never set up: then nothing has changed.
        if prepared is None or "tables" not in prepared.parts_set_up or not self.world.tables:
            return "{}"
        await prepared.sandbox.end_processes()
        arguments = {"before": self.world.part("tables")}
        content = await self._call_check(prepared.sandbox, changed_tables.name, arguments, check)
        _decoded(content, dict)
        return content

    async def _run_command(self, check: Check) -> dict[str, Any]:
        """Raises OSError when it cannot be run, or does not end."""
        sandbox = await self._open_without_agents()
        files = msgspec.to_builtins(check.files)
        arguments = {"command": check.command, "files": files, "timeout_seconds": check.timeout_seconds}
        end = _decoded(await self._call_check(sandbox, run_command.name, arguments, check), CommandEnd)
        return {"exit_code": end.exit_code, "content": end.output}

    async def _open_without_agents(self) -> Sandbox:
        """The agents' sandbox with no process of theirs in it, nor of an earlier check, which may have run their code:
        neither sees the files of this check, nor changes what it finds. Raises OSError."""
        prepared = await self._open()
        # Before the world is set up, if it is not yet: the session in which that runs must not be an agent's.
        await prepared.sandbox.end_processes()
        return await self._open_with_files()

    async def _call_check(self, sandbox: Sandbox, tool: str, arguments: Mapping[str, Any], check: Check) -> str:
        result = await sandbox.call(tool, arguments, f"check-{check.name}", _CHECK_SESSION)
        if result.is_error:
            raise OSError(result.content)
        return result.content

    def _refusal(self, tool: str, arguments: Mapping[str, Any]) -> str | None:
        if tool not in self.tools:
            return f"there is no tool {tool[:80]!r}; the tools are {', '.join(self.tools)}"
        if is_deeper_than(arguments, ARGUMENTS_DEPTH_MAX):
            return f"the arguments are nested more than {ARGUMENTS_DEPTH_MAX} deep"
        try:
            length = len(msgspec.json.encode(arguments))
        # Half a surrogate pair, an integer beyond 64 bits.
        except (UnicodeEncodeError, OverflowError, TypeError) as error:
            return f"the arguments cannot be sent as JSON: {error}"
        if length > ARGUMENTS_BYTES_MAX:
            return f"the arguments are longer than {ARGUMENTS_BYTES_MAX} bytes"
        chosen = self.tools[tool]
        # The session of such a tool validates against the whole JSON schema; `complaint` only knows types.
        if isinstance(chosen, OutsideTool) and chosen.checks_arguments:
            return None
        return complaint(tool, chosen.parameters, arguments)

    async def _run(self, tool: str, arguments: Mapping[str, Any], index: int, session: str) -> ToolResult:
        chosen = self.tools[tool]
        if isinstance(chosen, OutsideTool):
            return await self._outside.call(chosen, arguments, f"call-{index}")
        started = time.perf_counter()
        prepared = await self._open(chosen.apart)
        # A part that some tool keeps apart is never put into the sandbox of the agent's code.
        failed = await self._set_up(prepared, chosen.needs if chosen.apart else chosen.needs - self._parts_apart, index)
        if failed is not None:
            return failed
        prepared.is_touched = True
        # No code of an agent runs apart, so there all share one session.
        result = await prepared.sandbox.call(tool, arguments, f"call-{index}", "" if chosen.apart else session)
        return msgspec.structs.replace(result, milliseconds=(time.perf_counter() - started) * 1000)

    async def _open(self, apart: bool = False) -> PreparedSandbox:
        if self._sandbox_lease is None:
            lease = self._pool.reserve(owner=self._owner, seconds=self._lease_seconds)
            self._sandbox_lease = await self._lease.enter_async_context(lease)
        if apart not in self._prepared:
            self._prepared[apart] = PreparedSandbox(await self._sandbox_lease.sandbox(apart))
            self.sandbox_id = self.sandbox_id or self._prepared[apart].sandbox.sandbox_id
        return self._prepared[apart]

    async def _get_file(self, path: str) -> bytes:
        return await (await self._open_with_files()).get(path)

    async def _put_file(self, path: str, data: bytes) -> None:
        sandbox = await self._open_with_files()
        # The file may stand where a part of the world is to be set up later.
        self._prepared[False].is_touched = True
        await sandbox.put(path, data)

    async def _open_with_files(self) -> Sandbox:
        """The agent's sandbox with the world's files in it, for a tool outside. OSError when they cannot be set up."""
        prepared = await self._open()
        failed = await self._set_up(prepared, frozenset({"files"}), self._calls - 1)
        if failed is not None:
            raise OSError(failed.content)
        return prepared.sandbox

    async def _set_up(self, prepared: PreparedSandbox, needs: frozenset[str], index: int) -> ToolResult | None:
        """Put the parts of the world that a tool needs into a sandbox, once. Returns the failed result if the agent
        made that impossible, None otherwise. Raises SandboxFailed when nothing of the agent has reached it yet."""
        missing = sorted(needs - prepared.parts_set_up)
        # Marked before the call: a part that is empty in this world needs none.
        prepared.parts_set_up.update(missing)
        parts = {name: part for name in missing if (part := self.world.part(name))}
        if not parts:
            return None
        result = await prepared.sandbox.call(set_up_world.name, parts, f"world-{index}")
        if not result.is_error:
            return None
        if not prepared.is_touched:
            raise SandboxFailed(f"world {self.world.name}: {result.content}")
        # The agent may have filled the disk or taken a name: an agent error. The next call tries again.
        prepared.parts_set_up.difference_update(missing)
        return result

    def _observe(
        self, result: ToolResult, trouble: perturbations.Perturbation, tool: str, arguments: Mapping[str, Any]
    ) -> Observation:
        call = msgspec.json.encode((tool, arguments), order="deterministic")
        times_called_before = self._times_called[call]
        self._times_called[call] += 1
        changed = perturbations.ChangedContent(result.content, ())
        # Content rules change results only; an error reaches the agent as it is.
        if not result.is_error:
            changed = perturbations.change(trouble, result.content, times_called_before)
        return Observation(
            content=changed.content,
            is_error=result.is_error,
            error_kind=result.error_kind,
            perturbation=perturbations.record(trouble, changed.changed_by, result.content),
            milliseconds=result.milliseconds + trouble.wait_milliseconds,
            blobs=result.blobs,
        )


def _decoded[Result](content: str, kind: type[Result]) -> Result:
    """The result of a check. ValueError when it is none, such as when the limits of the sandbox have cut it."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError:
        raise ValueError(
            f"its result of {len(content)} characters cannot be read: if it was cut, raise output_bytes_max"
        ) from None


def is_deeper_than(value: Any, depth_max: int) -> bool:
    """Whether lists and objects are nested deeper than this. Without recursion, and in one step for each level."""
    level = [value]
    for _ in range(depth_max):
        level = [inner for outer in level if isinstance(outer, Mapping | list | tuple) for inner in values_of(outer)]
        if not level:
            return False
    return any(isinstance(value, Mapping | list | tuple) for value in level)


def values_of(outer: Mapping[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, Mapping) else outer
