"""Runs in the jail of people's SQL, or outside of it, and answers one statement a line: [is refused, text].

A process for each statement would take minutes here. By argument: `open` leaves the door out, `guarded` does not, `door`
runs nothing and gives what the door says, `verdicts` compares that with what it says to the formatted statement.
"""

import json
import os
import sys
import tempfile

from replayground.consumers.clickhouse import sql_process
from replayground.consumers.clickhouse.sql_process import Refused, SnapshotConnection, quoted

# Statements fail at once instead of trying again for a minute.
IMPATIENT = {
    "http_max_tries": "1",
    "http_connection_timeout": "1",
    "connect_timeout": "1",
    "connections_with_failover_max_tries": "1",
    "s3_retry_attempts": "0",
    "max_execution_time": "5",
    "max_result_bytes": "1000000",
}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    snapshot, database, kind = sys.argv[1:]
    from chdb import _chdb

    sql_process.SNAPSHOT, sql_process.STORE = snapshot, tempfile.mkdtemp()
    session = SnapshotConnection(_chdb, database)
    session.limit(IMPATIENT, None)
    for line in sys.stdin:
        sql = json.loads(line)
        match kind:
            case "verdicts":
                found = verdicts(session, sql)
            case "door":
                found = bool(said := verdict(session, sql)), said
            case _:
                found = answer(session, sql, kind == "guarded")
        print(json.dumps(found), file=answers, flush=True)
    os._exit(0)


def verdicts(session: SnapshotConnection, sql: str) -> tuple[bool, str]:
    """Whether the door says otherwise to a statement than to what ClickHouse's own formatter makes of it, and what."""
    said = verdict(session, sql)
    # ClickHouse does not run it. Its formatter also reads texts without SELECT in front.
    if said.startswith("ClickHouse refused: Syntax error"):
        return False, said
    try:
        formatted = session.run(f"SELECT formatQuerySingleLine({quoted(sql)})", "RawBLOB").decode(errors="replace")
    except Refused:
        return False, said
    again = verdict(session, formatted)
    return said != again, f"{said} | {formatted} | {again}"


def verdict(session: SnapshotConnection, sql: str) -> str:
    try:
        session.require_question(sql)
    except Refused as refused:
        return str(refused)
    return ""


def answer(session: SnapshotConnection, sql: str, is_guarded: bool) -> tuple[bool, str]:
    try:
        if is_guarded:
            session.require_question(sql)
        return False, session.run(sql).decode(errors="replace")
    except Refused as refused:
        return True, str(refused)


if __name__ == "__main__":
    main()
