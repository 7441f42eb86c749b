"""What is looked at in the sandboxes when the agents of a rollout have ended: changed tables, files, commands such as tests.

The results are stored with the attempt, so scorers can use them whenever it is judged again. Agents never see a check:
it is part of the world, and nothing of it is in a sandbox before they have ended. It runs in a session of its own, after
all processes of theirs, and of an earlier check, were ended. Not covered: a command that runs the agent's code (as tests
do) lets that code decide how the command ends. For what an agent must not be able to fake, compare the output with what
only the scorer knows.
"""

from typing import Annotated, Any, Literal

import msgspec

from replayground.sandboxes.tools.tool import Tool, ToolError, tool

TIMEOUT_SECONDS_MAX = 120
TEXT_BYTES_MAX = 8_000
"of a result: it is part of an event, and all of it is kept"

type CheckKind = Literal["tables", "file", "command"]


class Binary(msgspec.Struct, frozen=True):
    """A file that is not text. In JSON it is {"base64": "…"}."""

    base64: bytes


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One look at what an attempt has left behind.

    tables: which rows the tables of the world have lost and gained
    file: the content of the file at `path`, relative to /work
    command: exit code and output of `command`, in bash in /work, after `files` were put there
    """

    name: str
    kind: CheckKind
    path: str = ""
    command: str = ""
    files: dict[str, str | Binary] = {}
    timeout_seconds: int = 30

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a check needs a name")
        if (self.kind == "file") != bool(self.path) or (self.kind == "command") != bool(self.command):
            raise ValueError(f"the check {self.name}: a file has a path, a command a command, tables neither")
        if self.files and self.kind != "command":
            raise ValueError(f"the check {self.name}: files are for a command")
        if not 1 <= self.timeout_seconds <= TIMEOUT_SECONDS_MAX:
            raise ValueError(f"the check {self.name}: timeout_seconds is from 1 to {TIMEOUT_SECONDS_MAX}")
        for path in (*self.files, self.path):
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"the check {self.name}: the path {path!r} leaves /work")


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a check has found."""

    name: str
    kind: CheckKind
    content: str = ""
    """tables: JSON {table: {"added": [row, …], "removed": [row, …]}} of the tables that changed; file: its text; command: the
    end of its output."""
    exit_code: int | None = None
    """Of a command."""
    problem: str | None = None
    """Why there is no result, such as a file that does not exist. What the agents left behind is the cause."""


class CommandEnd(msgspec.Struct, frozen=True):
    """What `run_command` returns."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)]
    output: str


@tool
def changed_tables(before: dict[str, Any]) -> str:
    """Compare the tables of the world with what they were. Called by the workbench, never listed to an agent."""
    import json
    import sqlite3
    from collections import Counter

    changes = {}
    try:
        connection = sqlite3.connect("file:/work/world.sqlite?mode=ro", uri=True)
        found = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for name in sorted(found | set(before)):
            quoted = '"' + name.replace('"', '""') + '"'
            rows = connection.execute(f"SELECT * FROM {quoted}") if name in found else ()
            # As JSON: 1, 1.0 and '1' are different values, and equal rows count as often as they are there.
            now = Counter(json.dumps(row, default=repr) for row in rows)
            was = Counter(json.dumps(row) for row in before.get(name, {}).get("rows", []))
            added, removed = sorted((now - was).elements()), sorted((was - now).elements())
            if added or removed:
                changes[name] = {"added": [*map(json.loads, added)], "removed": [*map(json.loads, removed)]}
        connection.close()
    except (OSError, sqlite3.Error, sqlite3.Warning, UnicodeError) as error:
        raise ToolError(f"the tables cannot be read: {error}") from None
    text = json.dumps(changes)
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise ToolError(f"more rows have changed than the {TEXT_BYTES_MAX} bytes of a result can hold")
    return text


@tool(call_timeout_seconds=TIMEOUT_SECONDS_MAX + 10)
def run_command(command: str, files: dict[str, Any], timeout_seconds: int) -> dict[str, Any]:
    """Put files into /work, run a command there, and return its exit code and the end of its output. Called by the
    workbench, never listed to an agent."""
    import base64
    import os
    import signal
    import subprocess
    import tempfile

    try:
        for path, content in files.items():
            os.makedirs(os.path.dirname(f"/work/{path}"), exist_ok=True)
            # Not through a link: an agent may have put one there to keep the file from being written.
            if os.path.islink(f"/work/{path}"):
                os.unlink(f"/work/{path}")
            with open(f"/work/{path}", "wb") as file:
                file.write(content.encode() if isinstance(content, str) else base64.b64decode(content["base64"]))
        # An empty home: in /work, Python would run what an agent left as .local/lib/…/usercustomize.py, and git and
        # others would read their settings there.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            process = subprocess.Popen(
                ["/bin/bash", "--noprofile", "--norc", "-c", command],
                cwd="/work",
                env={**os.environ, "HOME": home},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise ToolError(f"the command has not ended after {timeout_seconds} s") from None
            output.seek(max(0, output.seek(0, 2) - TEXT_BYTES_MAX // 2))
            text = output.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise ToolError(f"the command cannot be run: {error}") from None
    return {"exit_code": code if code >= 0 else 128 - code, "output": text}


def text_of(data: bytes) -> str:
    """A file as text. ValueError when it is too long, or none."""
    if len(data) > TEXT_BYTES_MAX:
        raise ValueError(f"{len(data)} bytes, and a result holds {TEXT_BYTES_MAX}")
    return data.decode()


CHECK_TOOLS: dict[str, Tool] = {
    each.name: msgspec.structs.replace(each, sets_up=True) for each in (changed_tables, run_command)
}
