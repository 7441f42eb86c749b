"""The contract of a tool that does its work outside the agent's sandbox. For the agent it is a tool like any other.

A `Provider` lives as long as the program and offers tools. A `ToolSession` is what one rollout has of a provider: it is
opened at the rollout's first call, and closed with the rollout. Nothing here blocks the event loop. Of errors:

* agent: `ToolError`, with a text that helps the agent (an element that is not there, a file that is no image).
* tool:  `ToolFailed`, or any other exception (a bug), or no answer in time.
* infra: `OutsideFailed` (a server that is away, a browser that died). It ends the rollout by infra_error, as the failure
  of a sandbox does. A tool that says it is idempotent is called again first, a few times; any other is never repeated.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from sandboxes.protocol import Arguments, Blob, SandboxFailed
from sandboxes.tools.schema import parameters_of
from sandboxes.tools.tool import Tool
from sandboxes.worlds.world import World


class OutsideFailed(SandboxFailed):
    """What serves the tool failed, not the agent: it died, refused us, or did not answer."""


class ToolFailed(Exception):
    """The tool could not do its work and the agent cannot help it. Answers `error: <text>`, a tool error."""


class ToolOutput(msgspec.Struct, frozen=True):
    """What a session says of a call that went well."""

    content: str
    blobs: tuple[Blob, ...] = ()


class RolloutHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a session may know of its rollout."""

    owner: str
    world: World
    get_file: Callable[[str], Awaitable[bytes]]
    """Reads a file of the agent's sandbox, which is opened for it. OSError when there is none such."""
    put_file: Callable[[str, bytes], Awaitable[None]]
    """Writes one. OSError when the path is refused or the disk is full."""


class ToolSession(Protocol):
    """One rollout's share of a provider. Its calls run one after another."""

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        """Do the work. Raises as the module says. It may be cancelled when its time is over."""
        ...

    async def close(self) -> None:
        """End all that belongs to the rollout. Idempotent; never raises for what is dead already."""
        ...


class Provider(Protocol):
    """Serves one or more tools to many rollouts at once."""

    @property
    def tools(self) -> Mapping[str, "OutsideTool"]:
        """By name, in the order in which they are listed. Known after `start`."""
        ...

    async def start(self) -> None:
        """Find out which tools there are. Raises OutsideFailed. What is expensive waits for the first session."""
        ...

    async def open(self, rollout_handle: RolloutHandle) -> ToolSession:
        """A session for a rollout. Raises OutsideFailed, or SandboxUnavailable when this machine cannot."""
        ...

    async def close(self) -> None:
        """End everything. Idempotent."""
        ...


class OutsideTool(Tool, frozen=True, kw_only=True):
    """A tool without source: its provider does the work. No backend is given it."""

    source: str = ""
    needs: frozenset[str] = frozenset()
    family: str
    """A name that stands for all tools of the provider wherever tools are named."""
    provider: Provider
    is_idempotent: bool = False
    """True: to call it twice is the same as once, so an infra error may be answered by another attempt."""
    checks_arguments: bool = False
    """True: the session checks them by the whole of JSON schema; otherwise the workbench does, by their types."""


class MethodSession:
    """A session whose tools are its methods that are marked by `tool_method`, by name."""

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        answer: ToolOutput = await getattr(self, tool)(**arguments)
        return answer


class ToolMethod(msgspec.Struct, frozen=True):
    """What `tool_method` leaves on a method."""

    is_idempotent: bool


def tool_method[Method: Callable[..., Awaitable[ToolOutput]]](*, is_idempotent: bool) -> Callable[[Method], Method]:
    """Marks a method of a MethodSession as a tool. Its signature and docstring describe it, as they do for `@tool`."""

    def mark(method: Method) -> Method:
        method.__dict__["offer"] = ToolMethod(is_idempotent)
        return method

    return mark


def method_tools(
    session: type[MethodSession], provider: Provider, family: str, call_timeout_seconds: float
) -> dict[str, OutsideTool]:
    """The tools of a session class, in the order of its methods."""
    return {
        name: method_tool(method, provider, family, call_timeout_seconds)
        for name, method in vars(session).items()
        if hasattr(method, "offer")
    }


def method_tool(
    method: Callable[..., Any], provider: Provider, family: str, call_timeout_seconds: float
) -> OutsideTool:
    documentation = inspect.getdoc(method) or ""
    signature = inspect.signature(method)
    without_self = functools.wraps(method)(lambda: None)
    without_self.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[parameter for name, parameter in signature.parameters.items() if name != "self"]
    )
    return OutsideTool(
        name=method.__name__,
        description=" ".join(documentation.split("\n\n")[0].split()),
        parameters=parameters_of(without_self, documentation),
        family=family,
        provider=provider,
        is_idempotent=vars(method)["offer"].is_idempotent,
        call_timeout_seconds=call_timeout_seconds,
    )
