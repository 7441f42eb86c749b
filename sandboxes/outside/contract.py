"""The contract of a tool that runs outside the agent's sandbox. For the agent it is a tool like any other.

A `Provider` lives as long as the program and offers tools. A `ToolSession` is one rollout's share of a provider: it is
opened at the rollout's first call and closed with the rollout. Nothing here blocks the event loop. Errors:

* agent: `ToolError`, with a text that helps the agent (an element that is not there, a file that is not an image).
* tool:  `ToolFailed`, any other exception (a bug), or no result in time.
* infra: `OutsideFailed` (a server that is unreachable, a browser that died). A tool that declares itself idempotent is
  retried a few times first; no other is repeated. Then the provider is tried with input that no agent chose
  (`prove_health`) and opens another session. If that fails too, the rollout ends by infra_error, as after the failure
  of a sandbox. If it succeeds, the call was at fault: a tool error. Otherwise an agent that knows a call which a
  provider fails at could have its bad attempts repeated whenever it likes.
* `RateLimited` (429) is a tool error, at a call and at that proof: agents can use up a limit of requests, alone or
  together, and a server that counts them is well.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from replayground.sandboxes.protocol import Arguments, Blob, SandboxFailed
from replayground.sandboxes.tools.schema import parameters_of
from replayground.sandboxes.tools.tool import Tool
from replayground.sandboxes.worlds.world import World


class OutsideFailed(SandboxFailed):
    """The server or process behind the tool failed, not the agent: it died, refused the request, or did not answer."""


class RateLimited(OutsideFailed):
    """The server is well and refuses more requests for now (429)."""


class ToolFailed(Exception):
    """The tool failed and the agent can do nothing about it. Returned as `error: <text>`, a tool error."""


class ToolOutput(msgspec.Struct, frozen=True):
    """What a tool session returns for a successful call."""

    content: str
    blobs: tuple[Blob, ...] = ()


class RolloutHandle(msgspec.Struct, frozen=True, kw_only=True):
    """What a tool session is given of its rollout."""

    owner: str
    world: World
    get_file: Callable[[str], Awaitable[bytes]]
    """Reads a file of the agent's sandbox; opens the sandbox if needed. OSError when there is no such file."""
    put_file: Callable[[str, bytes], Awaitable[None]]
    """Writes a file there. OSError when the path is refused or the disk is full."""


class ToolSession(Protocol):
    """One rollout's share of a provider. Its calls run one after another."""

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        """Run a tool. Raises as the module docstring says. Is cancelled when its time is over."""
        ...

    async def close(self) -> None:
        """Release everything that belongs to the rollout. Idempotent; never raises for what is dead already."""
        ...


class Provider(Protocol):
    """Serves one or more tools to many rollouts at once."""

    @property
    def tools(self) -> Mapping[str, "OutsideTool"]:
        """Tools by name, in the order in which they are listed. Known after `start`."""
        ...

    async def start(self) -> None:
        """Find out which tools there are. Raises OutsideFailed. Expensive work should wait for the first session."""
        ...

    async def open(self, rollout_handle: RolloutHandle) -> ToolSession:
        """Open a session for a rollout; may wait until one is free. Raises OutsideFailed or SandboxUnavailable."""
        ...

    async def prove_health(self) -> None:
        """Work on input that no agent can influence. Raises OutsideFailed when that fails. Called after a failed call,
        before another session is opened: where opening is the proof, there is nothing to do."""
        ...

    async def close(self) -> None:
        """Close everything. Idempotent."""
        ...


class OutsideTool(Tool, frozen=True, kw_only=True):
    """A tool without source, which its provider runs. It is not given to a backend."""

    source: str = ""
    needs: frozenset[str] = frozenset()
    family: str
    """A name for all tools of the provider, usable wherever tools are named."""
    provider: Provider
    is_idempotent: bool = False
    """True: calling it twice has the same effect as once, so it is retried after an infra error."""
    checks_arguments: bool = False
    """True: the session validates arguments by the full JSON schema; False: the workbench checks names and types."""


class MethodSession:
    """A tool session whose tools are its methods marked by `tool_method`. The tool has the name of the method."""

    async def call(self, tool: str, arguments: Arguments) -> ToolOutput:
        answer: ToolOutput = await getattr(self, tool)(**arguments)
        return answer


class ToolMethod(msgspec.Struct, frozen=True):
    """What `tool_method` attaches to a method."""

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
    # `parameters_of` reads signature and type hints: this function has those of the method without self.
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
