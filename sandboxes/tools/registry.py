"""Tools by name: those of this package, and those that a program passes in."""

from collections.abc import Collection, Iterable

from replayground.sandboxes.outside.contract import OutsideTool
from replayground.sandboxes.tools.audio import audio_info, audio_text, audio_trim
from replayground.sandboxes.tools.calculator import calculator
from replayground.sandboxes.tools.documents import read_document
from replayground.sandboxes.tools.excel import excel_chart, excel_read, excel_write
from replayground.sandboxes.tools.files import edit_file, list_files, read_file, search_files, write_file
from replayground.sandboxes.tools.image import image_info, image_text
from replayground.sandboxes.tools.kv import kv
from replayground.sandboxes.tools.patch import patch_file
from replayground.sandboxes.tools.python import python
from replayground.sandboxes.tools.sql import sql
from replayground.sandboxes.tools.terminal import terminal
from replayground.sandboxes.tools.tool import EVERYTHING, Tool, parts_apart

FAMILIES: dict[str, tuple[Tool, ...]] = {
    "files": (read_file, write_file, edit_file, patch_file, list_files, search_files),
    "excel": (excel_read, excel_write, excel_chart),
    "documents": (read_document,),
    "image": (image_info, image_text),
    "audio": (audio_info, audio_trim, audio_text),
}
"""The name of a family can be used for all its tools wherever tools are named."""

SHIPPED: dict[str, Tool] = {
    tool.name: tool
    for tool in (sql, kv, python, terminal, calculator, *(tool for family in FAMILIES.values() for tool in family))
}


def toolset(names: Iterable[str], own: Iterable[Tool] = ()) -> dict[str, Tool]:
    """The named tools, in the order of the names; the name of a family adds all its tools. ValueError, with all known
    names, for an unknown one, and for tools that cannot be combined (`check_reach`)."""
    own = tuple(own)
    # Later entries win: a tool of a job may replace one of ours by using its name.
    known = {name: (tool,) for name, tool in SHIPPED.items()} | FAMILIES | {tool.name: (tool,) for tool in own}
    known |= families_outside(own)
    chosen: dict[str, Tool] = {}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no tool {name!r}; known tools: {', '.join(sorted(known))}")
        chosen.update({tool.name: tool for tool in known[name]})
    check_reach(chosen.values())
    return chosen


def check_reach(tools: Collection[Tool]) -> None:
    """ValueError for a tool that needs a part of the world which another tool keeps apart."""
    kept = parts_apart(tools)
    for tool in tools:
        # EVERYTHING is the default, not a demand: such a tool gets whatever is not kept apart.
        if not tool.apart and tool.needs != EVERYTHING and (missed := sorted(tool.needs & kept)):
            keeper = next(each.name for each in tools if each.apart and missed[0] in each.needs)
            raise ValueError(
                f"the tool {tool.name} needs the {missed[0]} of the world, which {keeper} keeps apart from the agent's "
                f"code: declare it @tool(apart=True), or leave {keeper} out"
            )


def families_outside(tools: Iterable[Tool]) -> dict[str, tuple[Tool, ...]]:
    """The tools outside the sandbox by family, which each carries: an MCP server lists its tools only when it runs."""
    outside = [tool for tool in tools if isinstance(tool, OutsideTool)]
    return {tool.family: tuple(each for each in outside if each.family == tool.family) for tool in outside}
