"""A rollout that has tools outside the sandbox, for their tests: a workbench over a scripted sandbox."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from aiohttp import web

from replayground.sandboxes.backends.scripted import ScriptedBackend, ScriptedSandbox
from replayground.sandboxes.outside.contract import Provider
from replayground.sandboxes.pool import Pool
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.workbench import Observation, Workbench
from replayground.sandboxes.worlds.world import World


class Rollout:
    """What an agent does: `await rollout.call("search", query="lamps")`."""

    def __init__(self, bench: Workbench, backend: ScriptedBackend) -> None:
        self.bench = bench
        self._backend = backend

    async def call(self, tool: str, **arguments: object) -> Observation:
        return await self.bench.call(tool, arguments)

    async def text(self, tool: str, **arguments: object) -> str:
        return (await self.call(tool, **arguments)).content

    @property
    def sandboxes(self) -> list[ScriptedSandbox]:
        return self._backend.opened


@contextlib.asynccontextmanager
async def rollout_of(
    provider: Provider, world: World | None = None, tools: Mapping[str, Tool] | None = None
) -> AsyncIterator[Rollout]:
    """`tools` takes the place of all that the provider offers."""
    backend = ScriptedBackend({"set_up_world": lambda arguments: ""})
    async with (
        Pool(backend, size=1, warm=0) as pool,
        Workbench(pool, tools or provider.tools, world, seed=1, owner="test") as bench,
    ):
        yield Rollout(bench, backend)


type Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def http_server(routes: Mapping[str, Handler]) -> AsyncIterator[str]:
    """A real server on a free port of loopback; its base address. Any method of a path goes to its handler."""
    application = web.Application(client_max_size=64 * 1024 * 1024)
    for path, handler in routes.items():
        application.router.add_route("*", path, handler)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
