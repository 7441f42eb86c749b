"""The tool `sql`: questions to the SQLite database of the world, /work/world.sqlite."""

import sqlite3

from sandboxes.tools.tool import ToolError, tool

DATABASE = "/work/world.sqlite"
ROWS_MAX = 1_000
QUERY_SECONDS_MAX = 8.0
"""Less than the wall time of a call, so that a slow query ends by an error and not with the session."""


@tool(needs=frozenset({"tables"}), apart=True)
def sql(query: str) -> str:
    """Ask the SQLite database one question in SQL. Read-only. One row a line, columns separated by |.

    query: one SQL SELECT statement
    """
    import sqlite3
    import time

    connection = globals().get("connection") or open_database()
    globals()["deadline"] = time.monotonic() + QUERY_SECONDS_MAX
    try:
        rows = connection.execute(query).fetchmany(ROWS_MAX + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise ToolError(advice(str(error), connection)) from None
    if all(value is None for row in rows for value in row):
        raise ToolError("not found")
    lines = ["|".join("NULL" if value is None else str(value) for value in row) for row in rows]
    if len(rows) > ROWS_MAX:
        lines[ROWS_MAX] = f"[the first {ROWS_MAX} rows are shown: use WHERE, LIMIT or an aggregate]"
    return "\n".join(lines)


def open_database() -> sqlite3.Connection:
    """Opened once a session, so that ATTACH and transactions, which are refused, are all there is to leave behind."""
    import os
    import sqlite3
    import time

    if not os.path.exists(DATABASE):
        raise ToolError("there is no database in this world")
    connection = sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True, isolation_level=None)
    forbidden = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_TRANSACTION)
    connection.set_authorizer(lambda action, *names: sqlite3.SQLITE_DENY if action in forbidden else sqlite3.SQLITE_OK)
    connection.set_progress_handler(lambda: time.monotonic() > globals()["deadline"], 100_000)
    globals()["connection"] = connection
    return connection


def advice(error: str, connection: sqlite3.Connection) -> str:
    """SQLite's own words, and what to do next."""
    if error.startswith(("no such column", "no such table", "ambiguous column")):
        return f"{error}; {tables_and_columns(connection)}"
    if error == "interrupted":
        return f"the query took more than {QUERY_SECONDS_MAX:g} s: ask for less, or join on fewer rows"
    if error == "attempt to write a readonly database":
        return f"{error}: only SELECT is possible"
    return error


def tables_and_columns(connection: sqlite3.Connection) -> str:
    import sqlite3

    try:
        columns = connection.execute(
            "SELECT m.name, group_concat(c.name, ', ') FROM sqlite_master m, pragma_table_info(m.name) c "
            "WHERE m.type IN ('table', 'view') GROUP BY m.name ORDER BY m.name LIMIT 50"
        ).fetchall()
    except sqlite3.Error as error:
        return f"the tables cannot be listed: {error}"
    return f"the tables are {', '.join(f'{table}({names})' for table, names in columns) or 'none'}"[:2_000]
