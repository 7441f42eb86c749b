"""Makes the providers of the settings, and starts and closes them. mcp is imported only if a server is configured.

async with Outside(settings) as outside:
    tools = toolset(["python", "browser", "mcp.clock"], outside.tools)
"""

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from replayground.sandboxes.outside.config import ToolsSettings
from replayground.sandboxes.outside.contract import OutsideTool, Provider
from replayground.sandboxes.tools.registry import toolset
from replayground.sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

FAMILIES = ("browser", "search", "ask_image", "transcribe_audio")
MCP_PREFIX = "mcp."


class Outside:
    """All providers of a program: those of its settings, and those of its own tools outside the sandbox."""

    def __init__(self, settings: ToolsSettings, own: Iterable[Tool] = ()) -> None:
        theirs = {id(tool.provider): tool.provider for tool in own if isinstance(tool, OutsideTool)}
        self._others = tuple(theirs.values())
        self._providers = providers_of(settings)

    @property
    def tools(self) -> tuple[OutsideTool, ...]:
        """The tools of the providers in the settings, known after entering."""
        return tuple(tool for provider in self._providers for tool in provider.tools.values())

    async def __aenter__(self) -> Self:
        """Start all providers. Raises OutsideFailed when one does not start, such as an MCP server that is missing."""
        try:
            for provider in (*self._providers, *self._others):
                await provider.start()
        except BaseException:
            # Also those that have started already.
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        for provider in (*self._providers, *self._others):
            try:
                await provider.close()
            except Exception:
                logger.exception("provider_not_closed", extra={"provider": type(provider).__name__})


def providers_of(settings: ToolsSettings) -> tuple[Provider, ...]:
    """One provider for each family, in the order of the settings."""
    # Imported here: Playwright, httpx and the MCP client are slow to load, and `require_tools` needs none of them.
    from replayground.sandboxes.outside.browser import Browser
    from replayground.sandboxes.outside.endpoints import ModelEndpoint, SpeechSession, VisionSession
    from replayground.sandboxes.outside.search import Search

    providers: list[Provider] = [Browser(settings.browser), Search(settings.search)]
    if settings.ask_image.url is not None:
        providers.append(ModelEndpoint(settings.ask_image, VisionSession))
    if settings.transcribe_audio.url is not None:
        providers.append(ModelEndpoint(settings.transcribe_audio, SpeechSession))
    if settings.mcp:
        from replayground.sandboxes.outside.mcp import McpServer

        providers += [McpServer(name, server) for name, server in settings.mcp.items()]
    return tuple(providers)


def require_tools(names: Iterable[str], own: Iterable[Tool] = ()) -> None:
    """ValueError, with all known names, for a name that is neither a tool nor a family. Starts and asks nothing: of
    tools outside, only the name of the family is checked, and of MCP servers only the prefix."""
    inside = [name for name in names if name not in FAMILIES and not name.startswith(MCP_PREFIX)]
    try:
        toolset(inside, own)
    except ValueError as error:
        raise ValueError(f"{error}, {', '.join(FAMILIES)}, {MCP_PREFIX}NAME") from None
