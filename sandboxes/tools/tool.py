"""The class Tool, and the decorator `@tool`, which makes a tool of a typed function.

The source of the function is sent into the sandbox and runs there, by the system's Python. The functions, classes and
constants of its file that it uses are sent too (sandboxes.tools.shipping); it imports modules inside its body. It
returns a str, or a value that JSON can represent. Its `globals()` live as long as the tool process and can keep state.
What it prints comes before what it returns. `raise ToolError("not found")` returns `error: not found`, an agent error;
the text should tell the agent what was wrong and what to do next. Any other exception is a tool error.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, overload

import msgspec

from replayground.sandboxes.tools.schema import parameters_of
from replayground.sandboxes.tools.shipping import shipped_source

EVERYTHING = frozenset({"files", "tables", "keys"})


class ToolError(Exception):
    """Raised inside a tool to return `error: <text>` as an agent error. Inside the sandbox it is that of runner.py."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool: what the agent sees (name, description, parameters) and what runs in the sandbox (source)."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""
    source: str
    """Python source that defines a function of the tool's name."""
    needs: frozenset[str] = EVERYTHING
    """Parts of the world that are set up in the sandbox before the first call: files, tables, keys."""
    call_timeout_seconds: float | None = None
    """Wall time of a call; None = the limit of the sandbox."""
    apart: bool = False
    """Runs in a sandbox where no code of the agent ever runs. The tables or keys that it needs exist only there, so
    that the agent reaches them only through such tools."""
    sets_up: bool = False
    """Called by the workbench in both kinds of sandbox, never by an agent."""

    def specification(self) -> dict[str, Any]:
        """The tool in the format that chat templates expect."""
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
    """Make a Tool of a function: the schema from its signature, the description from its docstring.

    The first paragraph of the docstring describes the tool; a later line `name: text` describes that argument.
    TypeError for an argument whose type has no JSON schema here, and for a name that is missing in the sandbox."""

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
    """Parts of the world that only tools apart can reach in this toolset. Files are never kept apart."""
    return frozenset().union(*(tool.needs for tool in tools if tool.apart)) - {"files"}
