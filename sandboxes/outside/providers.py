"""From the settings to the tools outside the sandbox. What is not configured, or not used, is not imported.

async with Outside(settings) as outside:
    tools = toolset(["python", "browser", "mcp.clock"], outside.tools)
"""

import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Self

from sandboxes.outside.config import ToolsSettings
from sandboxes.outside.contract import OutsideTool, Provider
from sandboxes.tools.registry import toolset
from sandboxes.tools.tool import Tool

logger = logging.getLogger(__name__)

FAMILIES = ("browser", "search", "ask_image", "transcribe_audio")
MCP_PREFIX = "mcp."


class Outside:
    """All providers of a program: those of its settings, and those behind tools of its own that work outside."""

    def __init__(self, settings: ToolsSettings, own: Iterable[Tool] = ()) -> None:
        theirs = {id(tool.provider): tool.provider for tool in own if isinstance(tool, OutsideTool)}
        self._others = tuple(theirs.values())
        self._providers = providers_of(settings)

    @property
    def tools(self) -> tuple[OutsideTool, ...]:
        """Those of the settings, known once it is entered."""
        return tuple(tool for provider in self._providers for tool in provider.tools.values())

    async def __aenter__(self) -> Self:
        """Raises OutsideFailed when a provider does not start: an MCP server that is not there, say."""
        try:
            for provider in (*self._providers, *self._others):
                await provider.start()
        except BaseException:
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
    """One provider a family, in the order of the settings."""
    from sandboxes.outside.browser import Browser
    from sandboxes.outside.endpoints import ModelEndpoint, SpeechSession, VisionSession
    from sandboxes.outside.search import Search

    providers: list[Provider] = [Browser(settings.browser), Search(settings.search)]
    if settings.ask_image.url is not None:
        providers.append(ModelEndpoint(settings.ask_image, VisionSession))
    if settings.transcribe_audio.url is not None:
        providers.append(ModelEndpoint(settings.transcribe_audio, SpeechSession))
    if settings.mcp:
        from sandboxes.outside.mcp import McpServer

        providers += [McpServer(name, server) for name, server in settings.mcp.items()]
    return tuple(providers)


def require_tools(names: Iterable[str], own: Iterable[Tool] = ()) -> None:
    """ValueError, with all that is known, for a name that no tool and no family has. Asks no server: of what is outside,
    only the family is checked, and of MCP servers that they are called so."""
    inside = [name for name in names if name not in FAMILIES and not name.startswith(MCP_PREFIX)]
    try:
        toolset(inside, own)
    except ValueError as error:
        raise ValueError(f"{error}, {', '.join(FAMILIES)}, {MCP_PREFIX}NAME") from None
