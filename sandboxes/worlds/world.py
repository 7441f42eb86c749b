"""A world: the data that an agent finds in its sandbox, and the perturbation rules. It is sent in an event as JSON."""

import hashlib
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from replayground.sandboxes.tools.tool import Tool, ToolError, tool
from replayground.sandboxes.worlds.checks import CHECK_TOOLS, Binary, Check
from replayground.sandboxes.worlds.perturbations import Rule

type Cell = str | int | float | None


class Table(msgspec.Struct, frozen=True):
    """One SQL table. Every row has as many cells as there are columns; ValueError otherwise."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("a table needs a column")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} cells in a table of {len(self.columns)} columns: {row}")


class World(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All fields but the name may be empty. Paths of files are relative to /work."""

    name: str
    files: dict[str, str | Binary] = {}
    tables: dict[str, Table] = {}
    keys: dict[str, str | int | float] = {}
    pages: dict[str, str] = {}
    """Text by http or https URL, for the browser. The extension of the path gives the media type, by default HTML."""
    corpus: dict[str, str] = {}
    """Text by title: the documents that `search` finds."""
    perturbations: tuple[Rule, ...] = ()
    checks: tuple[Check, ...] = ()
    """What is looked at when the agents have ended."""

    def __post_init__(self) -> None:
        if len({check.name for check in self.checks}) != len(self.checks):
            raise ValueError("two checks have the same name")
        for key in self.keys:
            # Keys become file names below /work/kv.
            if not key or "/" in key or "\0" in key or key in (".", "..") or len(key.encode()) > 255:
                raise ValueError(f"the key {key!r} cannot be a file name")
        for path in self.files:
            if path.startswith("/") or ".." in path.split("/"):
                raise ValueError(f"the path {path!r} leaves /work")
        for url in self.pages:
            plain_url(url)

    def to_json(self) -> str:
        """Canonical JSON: keys sorted, no spaces, defaults left out. Equal worlds give equal text."""
        return msgspec.json.encode(self, order="deterministic").decode()

    @property
    def world_hash(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def part(self, name: str) -> dict[str, Any]:
        """The field `files`, `tables` or `keys` as plain values, to be sent into the sandbox."""
        return msgspec.to_builtins(getattr(self, name))  # type: ignore[no-any-return]


def plain_url(url: str) -> str:
    """Normalise a URL: lower-case host, a path, no default port, no fragment. ValueError unless it is http or https
    with a host and without a user name."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(f"the page {url!r} needs an address such as http://shop.example/")
    port = f":{parts.port}" if parts.port not in (None, 80 if parts.scheme == "http" else 443) else ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    # % stays as it is: the path may be quoted already.
    return urlunsplit((parts.scheme, host + port, quote(parts.path or "/", safe="/%:@!$&'()*+,;=~"), parts.query, ""))


def world_from_json(text: str | bytes) -> World:
    """Raises msgspec.ValidationError, with the path of the wrong field, when the text is not a world, and
    msgspec.DecodeError when it is not JSON."""
    return msgspec.json.decode(text, type=World)


@tool
def set_up_world(
    files: dict[str, Any] | None = None, tables: dict[str, Any] | None = None, keys: dict[str, Any] | None = None
) -> None:
    """Put parts of a world into the sandbox. Called by the workbench, never listed to an agent."""
    import base64
    import os
    import sqlite3

    try:
        for path, content in (files or {}).items():
            os.makedirs(os.path.dirname(f"/work/{path}"), exist_ok=True)
            with open(f"/work/{path}", "wb") as file:
                file.write(content.encode() if isinstance(content, str) else base64.b64decode(content["base64"]))
        if keys:
            os.makedirs("/work/kv", exist_ok=True)
            folder = os.open("/work/kv", os.O_RDONLY | os.O_DIRECTORY)
            for key, value in keys.items():
                descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644, dir_fd=folder)
                os.write(descriptor, str(value).encode())
                os.close(descriptor)
            os.close(folder)
        if tables:
            # No journal and no fsync: the disk of a sandbox is memory. isolation_level=None: the only transaction is
            # the explicit one below.
            connection = sqlite3.connect("/work/world.sqlite", isolation_level=None)
            connection.execute("PRAGMA journal_mode=OFF")
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            for name, table in tables.items():
                quoted = ['"' + column.replace('"', '""') + '"' for column in table["columns"]]
                quoted_name = '"' + name.replace('"', '""') + '"'
                connection.execute(f"CREATE TABLE {quoted_name} ({', '.join(quoted)})")
                marks = ", ".join("?" * len(quoted))
                connection.executemany(f"INSERT INTO {quoted_name} VALUES ({marks})", table["rows"])
            connection.execute("COMMIT")
            connection.close()
    except (OSError, sqlite3.Error) as error:
        raise ToolError(f"the world could not be set up: {error}") from None


WORLD_TOOLS: dict[str, Tool] = CHECK_TOOLS | {set_up_world.name: msgspec.structs.replace(set_up_world, sets_up=True)}
"""Tools of the workbench itself. A backend must be opened with these beside the agent's tools."""
