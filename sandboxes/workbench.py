"""What one rollout works with: its tools, its world, its weather, and sandboxes that open at the first call.

Tools *apart* (sql, kv) run in a sandbox of their own, in which no code of the agent ever runs. The tables or keys of the
world that they need are there and nowhere else: the agent cannot read them around the weather, or change what is answered.

A tool that works outside the sandbox (sandboxes.outside) is called, checked and perturbed like any other; who serves it
is opened at its first call too, and all are closed together.

    async with Workbench(pool, toolset(["sql", "kv", "python"]), world, seed=7, owner=trajectory_id) as bench:
        observation = await bench.call("sql", {"query": "select 1"})

An error of the agent or of a tool is an observation. `SandboxFailed` is raised: the rollout has ended by infra_error.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from sandboxes.outside.calls import OutsideCalls
from sandboxes.outside.contract import OutsideTool, RolloutHandle
from sandboxes.pool import Lease, Pool
from sandboxes.protocol import Blob, ErrorKind, Sandbox, SandboxFailed, ToolResult
from sandboxes.tools.schema import complaint
from sandboxes.tools.tool import Tool, parts_apart
from sandboxes.worlds import perturbations
from sandboxes.worlds.world import World, set_up_world

EMPTY_WORLD = World(name="empty")


class Observation(msgspec.Struct, frozen=True):
    """What the agent is shown of a call, and what an event records of it."""

    content: str
    is_error: bool
    error_kind: ErrorKind | None
    perturbation: dict[str, Any] | None
    milliseconds: float
    blobs: tuple[Blob, ...] = ()


class PreparedSandbox:
    """One of the two sandboxes of a rollout, and what has happened in it."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.parts_set_up: set[str] = set()
        self.calls_run = 0


class Workbench:
    """The tools of one rollout. Calls are made one after another."""

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
        """The room apart, and the agent's own."""
        self._parts_apart = parts_apart(self.tools.values())
        self._calls = 0
        self._times_called: Counter[bytes] = Counter()
        rollout_handle = RolloutHandle(owner=owner, world=self.world, get_file=self._get_file, put_file=self._put_file)
        self._outside = OutsideCalls(rollout_handle)
        self._lease.push_async_callback(self._outside.close)

    @property
    def isolation(self) -> str:
        return self._pool.backend.isolation

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give the sandboxes back. After an exception the pool throws them away."""
        self._sandbox_lease = None
        self._prepared.clear()
        await self._lease.__aexit__(kind, error, traceback)

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> Observation:
        """Validate, draw the weather, run, change. Raises SandboxFailed only."""
        index, self._calls = self._calls, self._calls + 1
        refusal = self._refusal(tool, arguments)
        if refusal is not None:
            return Observation(f"error: {refusal}", True, "agent", None, 0.0)
        trouble = perturbations.draw_perturbation(self.world.perturbations, self._seed, index, tool, arguments)
        await asyncio.sleep(trouble.wait_milliseconds / 1000)
        if trouble.is_busy:
            perturbation = perturbations.record(trouble, (), None)
            return Observation(perturbations.BUSY_CONTENT, True, "tool", perturbation, trouble.wait_milliseconds)
        result = await self._run(tool, arguments, index)
        return self._observe(result, trouble, tool, arguments)

    def _refusal(self, tool: str, arguments: Mapping[str, Any]) -> str | None:
        if tool not in self.tools:
            return f"there is no tool {tool!r}; the tools are {', '.join(self.tools)}"
        try:
            msgspec.json.encode(arguments)
        except (UnicodeEncodeError, OverflowError, RecursionError, TypeError) as error:  # half a surrogate pair
            return f"the arguments cannot be sent as JSON: {error}"
        chosen = self.tools[tool]
        if isinstance(chosen, OutsideTool) and chosen.checks_arguments:
            return None
        return complaint(tool, chosen.parameters, arguments)

    async def _run(self, tool: str, arguments: Mapping[str, Any], index: int) -> ToolResult:
        chosen = self.tools[tool]
        if isinstance(chosen, OutsideTool):
            return await self._outside.call(chosen, arguments, f"call-{index}")
        started = time.perf_counter()
        prepared = await self._open(chosen.apart)
        failed = await self._set_up(prepared, chosen.needs if chosen.apart else chosen.needs - self._parts_apart, index)
        if failed is not None:
            return failed
        prepared.calls_run += 1
        result = await prepared.sandbox.call(tool, arguments, f"call-{index}")
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
        await (await self._open_with_files()).put(path, data)

    async def _open_with_files(self) -> Sandbox:
        """The sandbox with the world's files in it, for a tool outside. OSError when the agent spoilt it."""
        prepared = await self._open()
        failed = await self._set_up(prepared, frozenset({"files"}), self._calls - 1)
        if failed is not None:
            raise OSError(failed.content)
        return prepared.sandbox

    async def _set_up(self, prepared: PreparedSandbox, needs: frozenset[str], index: int) -> ToolResult | None:
        """Put what a tool needs of the world into a room, once. The failed result, if the agent spoilt it."""
        missing = sorted(needs - prepared.parts_set_up)
        prepared.parts_set_up.update(missing)
        parts = {name: part for name in missing if (part := self.world.part(name))}
        if not parts:
            return None
        result = await prepared.sandbox.call(set_up_world.name, parts, f"world-{index}")
        if not result.is_error:
            return None
        if prepared.calls_run == 0:
            raise SandboxFailed(f"world {self.world.name}: {result.content}")
        prepared.parts_set_up.difference_update(missing)
        return result  # code of the agent ran before, and may have filled the disk: its own doing

    def _observe(
        self, result: ToolResult, trouble: perturbations.Perturbation, tool: str, arguments: Mapping[str, Any]
    ) -> Observation:
        call = msgspec.json.encode((tool, arguments), order="deterministic")
        times_called_before = self._times_called[call]
        self._times_called[call] += 1
        changed = perturbations.ChangedContent(result.content, ())
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
