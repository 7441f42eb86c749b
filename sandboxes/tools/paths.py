"""Paths of tools: relative to /work, with a hint when a file does not exist. Shipped into the sandbox with them."""

from replayground.sandboxes.tools.tool import ToolError


def work_path(path: str) -> str:
    """The absolute path for a path relative to /work, whatever the current directory of the agent's code is."""
    import os

    if not path or "\0" in path:
        raise ToolError("a path is a name such as notes/report.txt, relative to /work")
    return os.path.normpath(os.path.join("/work", path))


def existing_file(path: str) -> str:
    """The absolute path of a plain file. ToolError, with a similar path, when there is none."""
    import os
    import stat

    absolute = work_path(path)
    try:
        mode = os.stat(absolute).st_mode
    except OSError:
        raise ToolError(f"no file {path!r}{near_miss(absolute)}") from None
    if stat.S_ISDIR(mode):
        raise ToolError(f"{path!r} is a folder, not a file")
    # A pipe or a device such as /dev/zero would be read without end.
    if not stat.S_ISREG(mode):
        raise ToolError(f"{path!r} is not a plain file")
    return absolute


def existing_folder(path: str) -> str:
    """The absolute path of a folder. ToolError, with a similar path, when there is none."""
    import os

    absolute = work_path(path)
    if os.path.isfile(absolute):
        raise ToolError(f"{path!r} is a file, not a folder")
    if not os.path.isdir(absolute):
        raise ToolError(f"no folder {path!r}{near_miss(absolute)}")
    return absolute


def near_miss(absolute: str) -> str:
    """The end of an error message for a missing path: a similar path, or the first ten that exist."""
    import difflib
    import os

    known = [path for path, _ in walk("/work", 2000)]
    wanted = os.path.relpath(absolute, "/work")
    same_name = [path for path in known if os.path.basename(path) == os.path.basename(wanted)]
    # The same name in another folder is the best guess.
    close = same_name[:1] or difflib.get_close_matches(wanted, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are {', '.join(map(repr, known[:10]))}{' and more' if known[10:] else ''}" if known else ""


def walk(folder: str, entries_max: int) -> list[tuple[str, bool]]:
    """Paths below a folder, relative to /work and sorted, and whether each is a folder. Links are not followed."""
    import os

    found: list[tuple[str, bool]] = []
    for parent, folders, files in os.walk(folder):
        folders.sort()
        found.extend((os.path.relpath(os.path.join(parent, name), "/work"), True) for name in folders)
        found.extend((os.path.relpath(os.path.join(parent, name), "/work"), False) for name in files)
        if len(found) >= entries_max:
            break
    return sorted(found)[:entries_max]


def replace_file(absolute: str, data: bytes) -> None:
    """Write a file completely or leave it as it was. ToolError when it cannot be written, as on a full disk."""
    import os
    import stat

    # Beside the file, so that os.replace stays on one file system and is atomic.
    unfinished = f"{absolute}.unfinished~"
    try:
        mode = stat.S_IMODE(os.stat(absolute).st_mode) if os.path.exists(absolute) else 0o644
        if os.path.isdir(absolute):
            raise IsADirectoryError(21, "it is a folder")
        os.makedirs(os.path.dirname(absolute), exist_ok=True)
        try:
            with open(unfinished, "wb") as file:
                file.write(data)
            os.chmod(unfinished, mode)
            os.replace(unfinished, absolute)
        except OSError:
            if os.path.lexists(unfinished):
                os.unlink(unfinished)
            raise
    except OSError as error:
        raise ToolError(f"{absolute.removeprefix('/work/')} cannot be written: {error.strerror}") from None
