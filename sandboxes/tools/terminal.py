"""The tool `terminal`: a shell whose working directory and exported variables last from call to call.

Each call starts a new bash with the directory and variables of the last one. So a call does not hang when a command
leaves something running, and killing a command loses no state. Not covered: shell functions, aliases and variables that
are not exported are forgotten; a process that leaves its process group survives a timeout until the lease ends.
"""

from typing import IO, Any

from replayground.sandboxes.tools.tool import ToolError, tool

TIMEOUT_SECONDS_MAX = 120
SHOWN_BYTES_MAX = 12_000

# However the shell exits, the trap writes its directory and exported variables, separated by NUL; the exit code stays
# that of the command. On one line, so that bash counts the lines of the command from 1.
SHELL = """trap '{ printf "%s\\0" "$PWD"; /usr/bin/env -0; } >&DESCRIPTOR' EXIT; eval "$1" """


@tool(call_timeout_seconds=TIMEOUT_SECONDS_MAX + 10)
def terminal(command: str, timeout_seconds: int = 30) -> str:
    """Run a command in bash. The working directory and exported variables stay for later calls. Shows what the command
    writes (stdout and stderr together, as on a screen) and its exit code.

    command: one or more lines of bash; nothing can be typed into it while it runs
    timeout_seconds: when it is over, the command and what it started are killed; at most 120
    """
    import os
    import tempfile

    if not 1 <= timeout_seconds <= TIMEOUT_SECONDS_MAX:
        raise ToolError(f"timeout_seconds is from 1 to {TIMEOUT_SECONDS_MAX}")
    state = globals().setdefault("shell_state", {"folder": "/work", "variables": {**os.environ, "TERM": "dumb"}})
    try:
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as after:
            exit_code = run_shell(command, timeout_seconds, state, output, after)
            shown = middle_cut(output)
            if exit_code is None:
                kept = "The working directory and variables are as before."
                raise ToolError(f"stopped after {timeout_seconds} s. {kept} It wrote:\n{shown}")
            remember_state(state, after)
    except OSError as error:
        raise ToolError(start_failure(error, state)) from None
    except ValueError:
        raise ToolError("a command cannot hold the character NUL") from None
    return f"{shown}{'' if shown.endswith(chr(10)) or not shown else chr(10)}[exit code {exit_code}]"


def run_shell(
    command: str, timeout_seconds: int, state: dict[str, Any], output: IO[bytes], after: IO[bytes]
) -> int | None:
    """Run the command; its exit code, 128 + N for signal N. None after a timeout: the process group was killed."""
    import os
    import signal
    import subprocess

    script = SHELL.replace("DESCRIPTOR", str(after.fileno()))
    # Files, not pipes: a background process that keeps its output open does not keep the call waiting.
    process = subprocess.Popen(
        ["/bin/bash", "--noprofile", "--norc", "-c", script, "bash", command],
        cwd=state["folder"],
        env=state["variables"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        pass_fds=(after.fileno(),),
        start_new_session=True,
    )
    try:
        code = process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        # start_new_session made the shell the leader of its own process group.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return code if code >= 0 else 128 - code


def middle_cut(output: IO[bytes]) -> str:
    """The output; if it is too long, its beginning and end with a note between them."""
    size = output.seek(0, 2)
    output.seek(0)
    if size <= SHOWN_BYTES_MAX:
        whole = output.read().decode("utf-8", "replace")
        # A byte that is not UTF-8 is shown as a character of three, so the text can be longer than the output.
        if len(whole.encode()) <= SHOWN_BYTES_MAX:
            return whole
    half = SHOWN_BYTES_MAX // 2
    output.seek(0)
    begin = output.read(half)
    begin = begin[: bytes_shown(begin)]
    output.seek(max(0, size - half))
    end = output.read()
    end = end[-bytes_shown(end) :]
    left_out = f"{size - len(begin) - len(end)} of {size} bytes are left out here"
    advice = "send the output to a file and read the part you need"
    return f"{begin.decode('utf-8', 'replace')}\n[… {left_out}: {advice} …]\n{end.decode('utf-8', 'replace')}"


def bytes_shown(part: bytes) -> int:
    """How many bytes of this half can be shown: a third, if they are not UTF-8."""
    half = SHOWN_BYTES_MAX // 2
    return len(part) if len(part.decode("utf-8", "replace").encode()) <= half else half // 3


def remember_state(state: dict[str, Any], after: IO[bytes]) -> None:
    """Keep directory and variables for the next call, unless the shell was killed before it could write them."""
    import os

    after.seek(0)
    # Everything ends in NUL, so the last piece is empty.
    folder, *variables = after.read().split(b"\0")[:-1] or [b""]
    if not folder:
        return
    state["folder"] = os.fsdecode(folder)
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    # bash sets _ and SHLVL itself.
    state["variables"] = {name: value for name, _, value in pairs if name not in ("_", "SHLVL")}


def start_failure(error: OSError, state: dict[str, Any]) -> str:
    import errno
    import os

    if not os.path.isdir(state["folder"]):
        lost, state["folder"] = state["folder"], "/work"
        return f"the working directory {lost} is gone; the next command starts in /work"
    # Linux returns E2BIG, gVisor ENAMETOOLONG.
    if error.errno in (errno.E2BIG, errno.ENAMETOOLONG):
        return "the command or the exported variables are too long: write the command into a file and run that"
    return f"the shell could not be started: {error.strerror}"
