"""The process that runs one statement of a person, inside the wall (sql_wall), and ends.

It has chDB, a copy of the store that it can only read, and nothing else. One statement for each process: chDB was seen
to return rows of one statement with the next result, and whatever a statement leaves behind ends with it.

Descriptor 0 brings one line of JSON (Request). Descriptor 1 answers: the line `ready` once chDB is loaded, a line of
JSON, {"error": sentence} or {"bytes": n}, and then n bytes of the result as JSONCompact.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from replayground.consumers.clickhouse.sql_guard import refusal, too_long

SNAPSHOT = "/snapshot"
STORE = "/tmp/store"
# What chDB writes beside the parts; a part is found in the copy.
_DEPTH_OF_PARTS = 3
_ERROR_CHARACTERS_MAX = 400
OUTPUT = {
    "output_format_json_quote_64bit_integers": "0",
    # NaN and infinity, which JSON does not have.
    "output_format_json_quote_denormals": "1",
    "output_format_json_quote_decimals": "1",
    "output_format_json_validate_utf8": "1",
    # 26.9 overcounts when a query with a condition counts rows of a table with projections (store._EXACT).
    "optimize_use_implicit_projections": "0",
}

TABLES_OF_RUNS = """
SELECT t.name FROM system.tables AS t INNER JOIN system.columns AS c ON c.database = t.database AND c.table = t.name
WHERE t.database = currentDatabase() AND c.name = 'run_id' AND t.engine LIKE '%MergeTree'
"""


class Refused(Exception):
    """The statement is not run, or it failed; the message is one sentence."""


def main() -> None:
    answers = _own_output()
    # Loading takes most of the time: a process is started ahead and waits here for its statement.
    from chdb import _chdb

    answers.write(b"ready\n")
    answers.flush()
    request = json.loads(sys.stdin.buffer.readline())
    _limit(request["cpu_seconds_max"])
    try:
        session = SnapshotConnection(_chdb, request["database"])
        if request["is_guarded"]:
            session.require_question(request["sql"])
        session.limit(request["settings"], request["run_id"])
        result = session.run(request["sql"])
    except Refused as refused:
        answers.write(json.dumps({"error": str(refused)}).encode() + b"\n")
    else:
        answers.write(json.dumps({"bytes": len(result)}).encode() + b"\n")
        answers.write(result)
    answers.flush()
    # Without the end of chDB, which would wait for its threads.
    os._exit(0)


def _own_output() -> BinaryIO:
    """The answers' stream. What chDB and statements print goes nowhere: it must not be taken for an answer."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return answers


def _limit(seconds: int) -> None:
    """By the kernel, for what ClickHouse's own limits do not interrupt."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


class SnapshotConnection:
    """One connection to the copy of the store. A statement has one of its own."""

    def __init__(self, chdb: Any, database: str) -> None:
        _lay_out()
        self._connection = chdb.connect(STORE)
        # The copy is for questions alone.
        self.run("SYSTEM STOP MERGES")
        self.run(f"USE {database}")

    def require_question(self, sql: str) -> None:
        """The door. Raises Refused."""
        reason = too_long(sql)
        if reason is None:
            # Parsed as a value first: EXPLAIN would run what stands behind a semicolon.
            formatted = self.run(f"SELECT formatQuerySingleLine({quoted(sql)})", "RawBLOB")
            tree = self.run(f"EXPLAIN AST {sql}", "TSVRaw")
            reason = refusal(tree.decode(errors="replace"), formatted.decode(errors="replace"))
        if reason is not None:
            raise Refused(reason)

    def limit(self, settings: Mapping[str, str], run_id: str | None) -> None:
        wanted = OUTPUT | dict(settings)
        if run_id:
            wanted["additional_table_filters"] = filters_of(json.loads(self.run(TABLES_OF_RUNS))["data"], run_id)
        self.run("SET " + ", ".join(f"{name} = {value}" for name, value in wanted.items()))

    def run(self, sql: str, form: str = "JSONCompact") -> bytes:
        """Raises Refused."""
        try:
            found: bytes = self._connection.query(sql, form).bytes()
            return found
        # chDB raises RuntimeError for all that ClickHouse refuses.
        except Exception as error:
            raise Refused(f"ClickHouse refused: {sentence(str(error))}") from error


def filters_of(tables: list[list[str]], run_id: str) -> str:
    """Value of additional_table_filters. It hides the rows of other runs from the statement and from the views that it
    reads; the statement is not changed."""
    # Quoted twice: a condition in SQL inside a map literal.
    condition = quoted(f"run_id = {quoted(run_id)}")
    return "{" + ", ".join(f"{quoted(table)}: {condition}" for (table,) in tables) + "}"


def _lay_out() -> None:
    """Builds the folder of a store from the copy: folders of its own, since chDB writes into them, and links to parts."""
    for folder, folders, files in os.walk(SNAPSHOT):
        below = os.path.relpath(folder, SNAPSHOT)
        depth = 0 if below == "." else below.count("/") + 1
        os.makedirs(f"{STORE}/{below}", exist_ok=True)
        for name in list(folders):
            path = f"{folder}/{name}"
            if os.path.islink(path) or depth == _DEPTH_OF_PARTS:
                os.symlink(os.readlink(path) if os.path.islink(path) else path, f"{STORE}/{below}/{name}")
                folders.remove(name)
        for name in files:
            # Copied: chDB takes a link among its definitions for another database.
            with open(f"{folder}/{name}", "rb") as source, open(f"{STORE}/{below}/{name}", "wb") as target:
                target.write(source.read())


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def sentence(text: str) -> str:
    """An error of ClickHouse without its code, position in the source and version."""
    line = " ".join(text.split())
    for noise in ("Code: ", "DB::ErrnoException: ", "DB::Exception: "):
        line = line.partition(noise)[2] if noise in line[:60] and not noise.startswith("Code") else line
    return line.partition(" (version ")[0][:_ERROR_CHARACTERS_MAX]


if __name__ == "__main__":
    main()
