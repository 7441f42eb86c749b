"""The tool `sql`: questions to the SQLite database of the world, /work/world.sqlite."""

from sandboxes.tools.tool import ToolError, tool


@tool(needs=frozenset({"files", "tables"}))
def sql(query: str) -> str:
    """Ask the SQLite database one question in SQL. Read-only. One row a line, columns separated by |.

    query: one SQL SELECT statement
    """
    import os
    import sqlite3

    path, rows_max = "/work/world.sqlite", 10_000
    if not os.path.exists(path):
        raise ToolError("there is no database in this world")
    connection = globals().get("connection")
    if connection is None:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)
        forbidden = (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH, sqlite3.SQLITE_TRANSACTION)
        connection.set_authorizer(
            lambda action, *names: sqlite3.SQLITE_DENY if action in forbidden else sqlite3.SQLITE_OK
        )
        globals()["connection"] = connection
    try:
        rows = connection.execute(query).fetchmany(rows_max)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise ToolError(str(error)) from None
    if all(value is None for row in rows for value in row):
        raise ToolError("not found")
    return "\n".join("|".join("NULL" if value is None else str(value) for value in row) for row in rows)
