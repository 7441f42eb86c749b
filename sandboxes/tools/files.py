"""The tools `read_file`, `write_file`, `edit_file`, `list_files` and `search_files`: text files of the sandbox.

Several small tools and not one with an `action`, so that each schema says exactly what its call needs (docs/tools.md).
"""

import re
from collections.abc import Iterator

from replayground.sandboxes.tools.paths import existing_file, existing_folder, replace_file, walk, work_path
from replayground.sandboxes.tools.tool import ToolError, tool

LINES_MAX = 500
CHARACTERS_MAX = 12_000
LINE_CHARACTERS_MAX = 1_000
ENTRIES_MAX = 300
MATCHES_MAX = 100


@tool(needs=frozenset({"files"}))
def read_file(path: str, first_line: int = 1, last_line: int | None = None) -> str:
    """Read a text file, with line numbers.

    path: relative to /work, for example notes/report.txt
    first_line: where to begin; the first line is 1
    last_line: where to end; at most 500 lines are shown at once
    """
    lines = text_lines(existing_file(path), path)
    if first_line < 1 or (last_line is not None and last_line < first_line):
        raise ToolError("line numbers begin at 1, and last_line is not before first_line")
    if lines and first_line > len(lines):
        raise ToolError(f"{path} has only {len(lines)} lines")
    wanted = lines[first_line - 1 : last_line]
    shown: list[str] = []
    characters = 0
    for number, line in enumerate(wanted[:LINES_MAX], first_line):
        shown.append(f"{number:6}\t{shortened(line)}")
        characters += len(shown[-1])
        if characters > CHARACTERS_MAX:
            break
    if len(shown) < len(wanted):
        following = first_line + len(shown)
        shown.append(
            f"[lines {first_line} to {following - 1} of {len(lines)} are shown; go on with first_line={following}]"
        )
    return "\n".join(shown) or "[the file is empty]"


@tool(needs=frozenset({"files"}))
def write_file(path: str, content: str, append: bool = False) -> str:
    """Write a text file, making its folders. What was in the file is replaced unless append is true.

    path: relative to /work, for example notes/report.txt
    content: the whole text
    append: true adds the content to the end of the file
    """
    import os

    absolute = work_path(path)
    data = content.encode()
    # Rewritten as a whole: an append that meets a full disk would leave half of the content.
    if append and os.path.exists(absolute):
        with open(existing_file(path), "rb") as file:
            data = file.read() + data
    replace_file(absolute, data)
    return f"{path} now has {len(data.splitlines())} lines, {len(data)} bytes"


@tool(needs=frozenset({"files"}))
def edit_file(path: str, old: str, new: str, replace_all: bool = False) -> str:
    """Replace an exact piece of a text file. The piece must occur once, unless replace_all is true.

    path: relative to /work, for example notes/report.txt
    old: the piece as it stands in the file, spaces and line ends included, without line numbers
    new: what takes its place; empty removes the piece
    replace_all: true replaces every occurrence
    """
    absolute = existing_file(path)
    text = "".join(text_lines(absolute, path, keep_ends=True))
    if not old:
        raise ToolError("old is empty: give the piece to replace, or use write_file")
    if old == new:
        raise ToolError("old and new are the same")
    starts = occurrences(text, old)
    if not starts:
        raise ToolError(f"the piece is not in {path}{nearest_piece(text, old)}")
    numbers = ", ".join(str(text.count("\n", 0, start) + 1) for start in starts[:10])
    if len(starts) > 1 and not replace_all:
        advice = "give more of the text around it, or set replace_all"
        raise ToolError(f"the piece occurs {len(starts)} times in {path}, at lines {numbers}: {advice}")
    # surrogateescape on both ways: bytes that are not UTF-8 stay as they are.
    replace_file(absolute, text.replace(old, new).encode("utf-8", "surrogateescape"))
    return f"replaced at line {numbers} of {path}"


@tool(needs=frozenset({"files"}))
def list_files(folder: str = ".", pattern: str = "*") -> str:
    """List the files and folders below a folder, with sizes in bytes.

    folder: relative to /work; the default is /work itself
    pattern: only names like this, for example *.csv
    """
    import fnmatch
    import os

    listed: list[str] = []
    for path, is_folder in walk(existing_folder(folder), 10_000):
        if fnmatch.fnmatch(os.path.basename(path), pattern) and not (is_folder and pattern != "*"):
            size = 0 if is_folder else os.lstat(os.path.join("/work", path)).st_size
            listed.append(f"{path}/" if is_folder else f"{path}\t{size}")
    if len(listed) > ENTRIES_MAX:
        note = f"[{len(listed) - ENTRIES_MAX} more: name a deeper folder or a narrower pattern]"
        listed[ENTRIES_MAX:] = [note]
    return "\n".join(listed) or "[nothing]"


@tool(needs=frozenset({"files"}))
def search_files(pattern: str, folder: str = ".", files: str = "*", ignore_case: bool = False) -> str:
    """Search text files for a regular expression, line by line. Shows path:line: text.

    pattern: a regular expression of Python, for example def \\w+_total
    folder: where to search, relative to /work; a single file may be named too
    files: only files with names like this, for example *.py
    ignore_case: true finds capital and small letters alike
    """
    import itertools
    import re

    try:
        expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as error:
        raise ToolError(f"not a regular expression: {error}; write \\ before a character meant as itself") from None
    paths = searched_files(folder, files)
    # One more than shown, to know whether there are more.
    matches = list(itertools.islice(matching_lines(paths, expression), MATCHES_MAX + 1))
    if len(matches) > MATCHES_MAX:
        matches[MATCHES_MAX] = f"[the first {MATCHES_MAX} matches are shown: name a folder or a file, or be narrower]"
    return "\n".join(matches) or f"[no match in {len(paths)} files]"


def matching_lines(paths: list[str], expression: re.Pattern[str]) -> Iterator[str]:
    """`path:line: text` for every line that matches. Binary files are skipped."""
    import os

    for path in paths:
        with open(os.path.join("/work", path), encoding="utf-8", errors="replace") as file:
            for number, line in enumerate(file, 1):
                # A zero byte in the first line marks a binary file.
                if number == 1 and "\0" in line:
                    break
                if expression.search(line):
                    yield f"{path}:{number}: {shortened(line.rstrip())}"


def text_lines(absolute: str, path: str, keep_ends: bool = False) -> list[str]:
    """The lines of a text file. ToolError, with the tools to use instead, when it is not text.

    With `keep_ends` the lines joined give the file back byte by byte, by surrogateescape."""
    with open(absolute, "rb") as file:
        data = file.read()
    if b"\0" in data[:8192]:
        hint = "read_document reads pdf, docx, pptx, csv and html; excel, image and audio have tools of their own"
        raise ToolError(f"{path} is not a text file ({len(data)} bytes); {hint}")
    text = data.decode("utf-8", "replace" if not keep_ends else "surrogateescape")
    # Not splitlines, which also splits at form feeds: line numbers would differ from those of other programs.
    lines = text.split("\n")
    if not keep_ends:
        return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    return [line + "\n" for line in lines[:-1]] + lines[-1:]


def shortened(line: str) -> str:
    if len(line) <= LINE_CHARACTERS_MAX:
        return line
    return f"{line[:LINE_CHARACTERS_MAX]} [{len(line) - LINE_CHARACTERS_MAX} more characters in this line]"


def occurrences(text: str, piece: str) -> list[int]:
    """Where the piece begins; matches do not overlap, as in str.replace."""
    found: list[int] = []
    start = text.find(piece)
    while start >= 0:
        found.append(start)
        start = text.find(piece, start + len(piece))
    return found


def nearest_piece(text: str, piece: str) -> str:
    """The end of an error message: the lines most similar to the piece, with their numbers, for the agent to copy."""
    import difflib

    if "\r\n" in text and piece.replace("\n", "\r\n") in text:
        return r": the lines of the file end in \r\n, those of the piece in \n"
    # difflib takes quadratic time; the limits here and below keep a call short.
    lines, wanted = text.splitlines()[:5_000], piece.strip("\n").splitlines()
    likely = difflib.get_close_matches(wanted[0] if wanted else "", set(lines), 3, 0.4)
    starts = [number for number, line in enumerate(lines) if line in likely][:200]
    if not starts:
        return ": no line is like it; read the file first"

    def likeness(start: int) -> float:
        return difflib.SequenceMatcher(None, "\n".join(lines[start : start + len(wanted)]), piece).ratio()

    start = max(starts, key=likeness)
    near = [f"{number:6}\t{line}" for number, line in enumerate(lines, 1)][start : start + min(len(wanted), 20)]
    return ". Nearest are these lines:\n" + "\n".join(near)


def searched_files(folder: str, pattern: str) -> list[str]:
    """Paths of plain files below a folder, relative to /work. The folder may be the path of one file."""
    import fnmatch
    import os

    absolute = work_path(folder)
    if os.path.isfile(absolute):
        return [os.path.relpath(absolute, "/work")]
    names = [path for path, is_folder in walk(existing_folder(folder), 10_000) if not is_folder]
    names = [path for path in names if fnmatch.fnmatch(os.path.basename(path), pattern)]
    # Opening a pipe would block.
    return [path for path in names if os.path.isfile(os.path.join("/work", path))]
