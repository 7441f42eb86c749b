"""The tool `python`: a notebook cell in the sandbox."""

import traceback
from typing import Any

from replayground.sandboxes.tools.tool import ToolError, tool

MESSAGE_CHARACTERS_MAX = 2_000
FRAMES_MAX = 6


@tool(needs=frozenset({"files"}))
def python(code: str) -> str:
    """Run Python code. Names stay defined for later calls; shows what is printed and the value of the last expression.

    code: Python source, one or more lines
    """
    # Not ast, whose import takes as long as a sandbox takes to open.
    import _ast

    # The tool's globals live as long as the tool process, so names stay from call to call. The agent's code gets a
    # namespace of its own, without this tool's functions.
    namespace = globals().setdefault("cell_namespace", {"__name__": "__main__"})
    cells = globals().setdefault("cells", {})
    cell = f"<cell {len(cells) + 1}>"
    cells[cell] = code
    try:
        # dont_inherit: the __future__ import of the shipped source must not apply to the agent's code.
        tree: Any = compile(code, cell, "exec", _ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, cell, "exec", dont_inherit=True), namespace)
        if last is None:
            return ""
        value = eval(compile(_ast.Expression(last.value), cell, "eval", dont_inherit=True), namespace)
        return "" if value is None else repr(value)
    # SystemExit too: exit() in a cell must not end the tool process.
    except BaseException as error:
        raise ToolError(explanation(error, cell, cells, namespace)) from None


def explanation(error: BaseException, cell: str, cells: dict[str, str], namespace: dict[str, object]) -> str:
    """The error message of Python, then the lines of cells that led to it. A cell of one line is not repeated."""
    try:
        text = str(error.msg if isinstance(error, SyntaxError) else error)[:MESSAGE_CHARACTERS_MAX]
    # __str__ of the agent's own class may raise.
    except BaseException:
        text = "(its text cannot be shown)"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    said += similar_name(error, namespace)
    if isinstance(error, SyntaxError) and error.filename == cell:
        return f"{said}\n  line {error.lineno}: {(error.text or '').strip()}"
    frames = frames_of_cells(error, cells)
    if len(frames) == 1 and len(cells[cell].strip().splitlines()) == 1:
        return said
    lines = [frame_line(frame, cell) for frame in frames]
    if len(lines) > FRAMES_MAX:
        # Of a deep recursion the first two and the last four frames are shown.
        lines[2 : 2 - FRAMES_MAX] = [f"  … {len(lines) - FRAMES_MAX} more"]
    return "\n".join([said, *lines])


def frames_of_cells(error: BaseException, cells: dict[str, str]) -> list[traceback.FrameSummary]:
    """The frames in cells of the agent, with their source lines. Frames of libraries and of this tool are left out."""
    import linecache
    import traceback

    for cell, code in cells.items():
        # traceback takes source lines from linecache, and cells are not files.
        linecache.cache[cell] = (len(code), None, code.splitlines(keepends=True), cell)
    return [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in cells]


def frame_line(frame: traceback.FrameSummary, cell: str) -> str:
    place = f"line {frame.lineno}" if frame.filename == cell else f"line {frame.lineno} of {frame.filename.strip('<>')}"
    inside = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"  {place}{inside}: {(frame.line or '')[:200]}"


def similar_name(error: BaseException, namespace: dict[str, object]) -> str:
    """`; did you mean 'total'?` for an undefined name that is similar to a defined one; empty otherwise."""
    if not isinstance(error, NameError) or not isinstance(error.name, str):
        return ""
    import builtins
    import difflib

    close = difflib.get_close_matches(error.name, [*namespace, *dir(builtins)], 1)
    return f"; did you mean {close[0]!r}?" if close else ""
