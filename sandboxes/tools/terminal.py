"""The tool `terminal`: a shell whose working directory and exported variables last from call to call.

Each call is a bash of its own that starts where the last one ended: nothing hangs when a command leaves something running,
and a command that is killed takes no state with it. Not covered: shell functions, aliases and variables that are not
exported are forgotten; a process that leaves its process group survives a timeout until the episode ends.
"""

from typing import IO, Any

from sandboxes.tools.tool import ToolError, tool

TIMEOUT_SECONDS_MAX = 120
SHOWN_BYTES_MAX = 12_000

# However the shell leaves, it says where it was and what was exported; its exit code stays that of the command. On one
# line, so that bash counts the lines of the command from 1.
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
    """The exit code, as a shell counts; None when the time was over and the process group was killed."""
    import os
    import signal
    import subprocess

    script = SHELL.replace("DESCRIPTOR", str(after.fileno()))
    # Files, not pipes: what a command leaves running in the background cannot keep the call waiting.
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
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None
    return code if code >= 0 else 128 - code


def middle_cut(output: IO[bytes]) -> str:
    """What was written; of too much the beginning and the end, with a note between them."""
    size = output.seek(0, 2)
    output.seek(0)
    if size <= SHOWN_BYTES_MAX:
        return output.read().decode("utf-8", "replace")
    half = SHOWN_BYTES_MAX // 2
    begin = output.read(half).decode("utf-8", "replace")
    output.seek(size - half)
    end = output.read().decode("utf-8", "replace")
    advice = "send the output to a file and read the part you need"
    return f"{begin}\n[… {size - 2 * half} of {size} bytes are left out here: {advice} …]\n{end}"


def remember_state(state: dict[str, Any], after: IO[bytes]) -> None:
    """Take over folder and variables, unless the shell was ended so hard that it said nothing."""
    import os

    after.seek(0)
    folder, *variables = after.read().split(b"\0")[:-1] or [b""]
    if not folder:
        return
    state["folder"] = os.fsdecode(folder)
    pairs = (os.fsdecode(variable).partition("=") for variable in variables)
    state["variables"] = {name: value for name, _, value in pairs if name not in ("_", "SHLVL")}


def start_failure(error: OSError, state: dict[str, Any]) -> str:
    import errno
    import os

    if not os.path.isdir(state["folder"]):
        lost, state["folder"] = state["folder"], "/work"
        return f"the working directory {lost} is gone; the next command starts in /work"
    if error.errno in (errno.E2BIG, errno.ENAMETOOLONG):  # the kernel's word for it, and gVisor's
        return "the command or the exported variables are too long: write the command into a file and run that"
    return f"the shell could not be started: {error.strerror}"
