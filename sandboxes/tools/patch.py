"""The tool `patch_file`: several changes of a text file at once, as a unified diff. All of them are made, or none.

In a diff that a model wrote, line numbers are often wrong and lines rarely are. So a hunk is applied where its lines
are found: at the line number it names, or else at the nearest match. Lines must match exactly except for their line
ends: new lines get those of the file, and the last line keeps its own.
"""

from replayground.sandboxes.tools.files import nearest_piece, text_lines
from replayground.sandboxes.tools.paths import existing_file, replace_file
from replayground.sandboxes.tools.tool import ToolError, tool

HUNK_HEADER = r"@@(?: -(\d+)(,0)?)?"


@tool(needs=frozenset({"files"}))
def patch_file(path: str, patch: str) -> str:
    """Change a text file in several places by a unified diff. If one place does not fit, nothing is changed.

    path: relative to /work, for example src/total.py
    patch: hunks, each with a header such as @@ -12,3 +12,4 @@ and lines that begin with a space (as it is), - or +
    """
    absolute = existing_file(path)
    lines = [line for line in text_lines(absolute, path, keep_ends=True) if line]
    end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    # A last line without an end gets one for the time of the patch, so that lines added after it start on their own.
    missing_end = "" if not lines or lines[-1].endswith("\n") else end
    lines[-1:] = [line + missing_end for line in lines[-1:]]
    hunks = hunks_of(patch)
    text = "".join(patched(lines, hunks, end, path))
    replace_file(absolute, text.removesuffix(missing_end).encode("utf-8", "surrogateescape"))
    return f"{path}: {len(hunks)} {'place' if len(hunks) == 1 else 'places'} changed"


def patched(lines: list[str], hunks: list[tuple[int, list[tuple[str, str]]]], end: str, path: str) -> list[str]:
    """The lines with all hunks applied, in order. ToolError for the first that does not fit."""
    bare = [line.rstrip("\r\n") for line in lines]
    result: list[str] = []
    # `shift`: how far the last hunk was from the line it named; the next one is expected to be off by as much. `done`:
    # lines of the file that are consumed.
    shift = done = 0
    for number, (expected, marked) in enumerate(hunks, 1):
        old = [text for mark, text in marked if mark != "+"]
        start = place_of(old, bare, done, expected + shift)
        if start is None:
            place = f"{path} after line {done}" if done else path
            raise ToolError(f"hunk {number} does not fit {place}{nearest_piece(''.join(lines), chr(10).join(old))}")
        shift = start - expected
        result += lines[done:start]
        done = start
        for mark, text in marked:
            result += [text + end] if mark == "+" else lines[done : done + 1] if mark == " " else []
            done += mark != "+"
    return result + lines[done:]


def hunks_of(patch: str) -> list[tuple[int, list[tuple[str, str]]]]:
    """For each hunk: the line index from its header, and its lines with their marks. ToolError when there is none."""
    import re

    hunks: list[tuple[int, list[tuple[str, str]]]] = []
    for line in patch.removesuffix("\n").split("\n"):
        line = line.removesuffix("\r")
        header = re.match(HUNK_HEADER, line)
        if header:
            # A hunk without old lines ("-4,0") names the line after which it inserts.
            hunks.append((max(0, int(header[1] or 1) - (not header[2])), []))
        elif hunks and not line.startswith("\\ No newline"):
            # Models often write an empty context line without its space.
            mark, text = (line[0], line[1:]) if line else (" ", "")
            if mark not in " +-":
                raise ToolError(f"a line of a hunk begins with a space, - or +, not {line[:60]!r}")
            hunks[-1][1].append((mark, text))
    if not any(marked for _, marked in hunks):
        raise ToolError("the patch has no hunk: begin each with a line such as @@ -12,3 +12,4 @@")
    return hunks


def place_of(old: list[str], lines: list[str], first: int, expected: int) -> int | None:
    """The index, at or after `first`, nearest to the expected one at which these lines are found; None if nowhere."""
    if not old:
        return min(max(expected, first), len(lines))
    starts = [start for start in range(first, len(lines) - len(old) + 1) if lines[start : start + len(old)] == old]
    return min(starts, key=lambda start: abs(start - expected), default=None)
