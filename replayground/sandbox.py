"""Tools in a sandbox, tried by hand: the same pool, world and checks that a rollout has."""

import contextlib
from types import TracebackType
from typing import Any, Self

from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.pool import Pool
from sandboxes.tools.registry import toolset
from sandboxes.tools.tool import Tool
from sandboxes.workbench import Observation, Workbench
from sandboxes.worlds.world import WORLD_TOOLS, World


class Sandbox:
    """A bubblewrap sandbox with these tools: your own, or the names of those that ship ("python", "files", "sql" …).

    What a call leaves behind (files, names) is there for the next one, until the block ends. Tools that work outside of the
    sandbox (browser, search, MCP servers) are not offered here.

        async with Sandbox("python", world=World(name="w", files={"a.txt": "7"})) as sandbox:
            observation = await sandbox.call("python", code="open('a.txt').read()")
    """

    def __init__(self, *tools: Tool | str, world: World | None = None, seed: int = 0) -> None:
        """`seed` draws the perturbations of the world. Raises ValueError for a tool that does not exist."""
        own = [tool for tool in tools if isinstance(tool, Tool)]
        self._tools = toolset([tool if isinstance(tool, str) else tool.name for tool in tools], own)
        self._world = world
        self._seed = seed
        self._open = contextlib.AsyncExitStack()
        self._bench: Workbench | None = None

    async def __aenter__(self) -> Self:
        backend = BubblewrapBackend(self._tools | WORLD_TOOLS)
        pool = await self._open.enter_async_context(Pool(backend, size=1))
        bench = Workbench(pool, self._tools, self._world, seed=self._seed, owner="by hand")
        self._bench = await self._open.enter_async_context(bench)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bench = None
        await self._open.__aexit__(kind, error, traceback)

    async def call(self, tool: str, /, **arguments: Any) -> Observation:
        """What an agent would be shown of this call. A mistake in the call, or an error of the tool, is an observation too."""
        if self._bench is None:
            raise RuntimeError("the sandbox is not open: use `async with Sandbox(…) as sandbox`")
        return await self._bench.call(tool, arguments)
