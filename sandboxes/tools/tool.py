"""What a tool is, and `@tool`, which makes one of a typed function.

The function's source is shipped into the sandbox and runs there, by the system's Python. The functions, classes and
constants of its file that it uses go with it (sandboxes.tools.shipping); modules it imports inside its body. It returns
a str (or something JSON can say). `globals()` inside it lives as long as the session, if it wants to remember something.
What it prints comes before what it returns. `raise ToolError("not found")` answers `error: not found`, an agent error
that should help the agent: what was wrong, and what to do next. Any other exception is an error of the tool.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, overload

import msgspec

from sandboxes.tools.schema import parameters_of
from sandboxes.tools.shipping import shipped_source

EVERYTHING = frozenset({"files", "tables", "keys"})


class ToolError(Exception):
    """Raised inside a tool to answer `error: <text>`. The runner has its own class of this name in the sandbox."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool: how the agent sees it (name, description, parameters) and what runs in the sandbox (source)."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    source: str
    """Python that defines a function of the tool's name."""
    needs: frozenset[str] = EVERYTHING
    """Parts of the world that must be in the sandbox before the first call: files, tables, keys."""
    call_timeout_seconds: float | None = None
    """Wall time of a call, if other than the sandbox's limit."""
    apart: bool = False
    """Runs in a sandbox where no code of the agent ever runs. The tables or keys that it needs are only there, so that
    the agent reaches them by such tools alone."""

    def specification(self) -> dict[str, Any]:
        """The form in which chat templates list tools."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@overload
def tool(function: Callable[..., Any]) -> Tool: ...
@overload
def tool(
    *, needs: frozenset[str] = ..., call_timeout_seconds: float | None = ..., apart: bool = ...
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None,
    *,
    needs: frozenset[str] = EVERYTHING,
    call_timeout_seconds: float | None = None,
    apart: bool = False,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a Tool of a function: schema from its signature, description from its docstring.

    The docstring's first paragraph describes the tool; a later line `name: text` describes that argument. TypeError for
    an argument whose type has no JSON schema here, and for a name that would be missing in the sandbox."""

    def make(function: Callable[..., Any]) -> Tool:
        documentation = inspect.getdoc(function) or ""
        return Tool(
            name=function.__name__,
            description=" ".join(documentation.split("\n\n")[0].split()),
            parameters=parameters_of(function, documentation),
            source=shipped_source(function),
            needs=needs,
            call_timeout_seconds=call_timeout_seconds,
            apart=apart,
        )

    return make if function is None else make(function)


def parts_apart(tools: Iterable[Tool]) -> frozenset[str]:
    """Parts of the world that an agent with these tools can only reach by one. Files are for all."""
    return frozenset().union(*(tool.needs for tool in tools if tool.apart)) - {"files"}
