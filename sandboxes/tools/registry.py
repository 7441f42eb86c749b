"""Tools by name: those that ship, and those of one's own that a program passes in."""

from collections.abc import Iterable

from sandboxes.tools.kv import kv
from sandboxes.tools.python import python
from sandboxes.tools.sql import sql
from sandboxes.tools.tool import Tool

SHIPPED: dict[str, Tool] = {tool.name: tool for tool in (sql, kv, python)}


def toolset(names: Iterable[str], own: Iterable[Tool] = ()) -> dict[str, Tool]:
    """The named tools, in the order of the names. ValueError, with all known names, for one that does not exist."""
    known = SHIPPED | {tool.name: tool for tool in own}
    chosen: dict[str, Tool] = {}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no tool {name!r}; known tools: {', '.join(sorted(known))}")
        chosen[name] = known[name]
    return chosen
