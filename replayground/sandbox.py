"""Tools in a sandbox, called by hand: with the same pool, world and checks as in a rollout."""

import contextlib
from types import TracebackType
from typing import Any, Self

from replayground.sandboxes.backends.bubblewrap import BubblewrapBackend
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.sandboxes.worlds.world import WORLD_TOOLS, World


class Sandbox:
    """A bubblewrap sandbox with these tools: your own, or names of built-in ones ("python", "files", "sql" …).

    Files and names that a call leaves behind exist for the next one, until the block ends. Tools that run outside of
    the sandbox (browser, search, MCP servers) are not available here.

        async with Sandbox("python", world=World(name="w", files={"a.txt": "7"})) as sandbox:
            observation = await sandbox.call("python", code="open('a.txt').read()")
    """

    def __init__(self, *tools: Tool | str, world: World | None = None, seed: int = 0) -> None:
        """`seed` draws the perturbations of the world. Raises ValueError for an unknown tool, and for tools that
        cannot be combined."""
        own = [tool for tool in tools if isinstance(tool, Tool)]
        self._tools = toolset([tool if isinstance(tool, str) else tool.name for tool in tools], own)
        self._world = world
        self._seed = seed
        # Closes in reverse order: the workbench gives its sandbox back before the pool ends.
        self._open = contextlib.AsyncExitStack()
        self._bench: Workbench | None = None

    async def __aenter__(self) -> Self:
        # WORLD_TOOLS: the workbench sets up the world by a tool call inside the sandbox.
        backend = BubblewrapBackend(self._tools | WORLD_TOOLS)
        pool = await self._open.enter_async_context(Pool(backend, size=1))
        bench = Workbench(pool, self._tools, self._world, seed=self._seed, owner="by hand")
        self._bench = await self._open.enter_async_context(bench)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # First, so that a call during the shutdown fails with a clear message.
        self._bench = None
        await self._open.__aexit__(kind, error, traceback)

    async def call(self, tool: str, /, **arguments: Any) -> Observation:
        """The observation that an agent would get. A wrong call and an error of the tool are observations too. Raises
        RuntimeError outside of the `async with` block."""
        if self._bench is None:
            raise RuntimeError("the sandbox is not open: use `async with Sandbox(…) as sandbox`")
        return await self._bench.call(tool, arguments)
