"""The tool `sql`: queries of the SQLite database of the world, /work/world.sqlite."""

import sqlite3

from replayground.sandboxes.tools.tool import ToolError, tool

DATABASE = "/work/world.sqlite"
ROWS_MAX = 1_000
QUERY_SECONDS_MAX = 8.0
"""Less than the wall time of a call, so that a slow query is an error and does not end the tool process."""
VALUE_BYTES_MAX = 10_000_000
READABLE = frozenset(
    {"sqlite_master", "sqlite_schema", "json_each", "json_tree", "pragma_table_info", "pragma_table_list"}
)
"""Tables that SQLite itself offers, beside those of the world."""
PRAGMAS = frozenset({"table_info", "table_list"})
FUNCTION_NAMES = """
abs acos acosh asin asinh atan atan2 atanh avg ceil ceiling char coalesce concat concat_ws cos cosh count
current_date current_time current_timestamp cume_dist date datetime degrees dense_rank exp first_value floor
format glob group_concat hex if ifnull iif instr json json_array json_array_length json_extract json_group_array
json_group_object json_insert json_object json_patch json_quote json_remove json_replace json_set json_type
json_valid julianday lag last_value lead length like likelihood likely ln log log10 log2 lower ltrim max min mod
nth_value ntile nullif octet_length percent_rank pi pow power printf quote radians random rank replace round
row_number rtrim sign sin sinh soundex sqrt strftime string_agg substr substring sum tan tanh time timediff
total trim trunc typeof unhex unicode unixepoch unlikely upper -> ->>
"""
FUNCTIONS = frozenset(FUNCTION_NAMES.split())
"""Functions without side effects. Not among them: load_extension, fts3_tokenizer, randomblob and zeroblob, and all that
speak of SQLite itself."""


@tool(needs=frozenset({"tables"}), apart=True)
def sql(query: str) -> str:
    """Ask the SQLite database one question in SQL. Read-only. One row a line, columns separated by |.

    query: one SQL SELECT statement
    """
    import sqlite3
    import time

    # The tool's globals live as long as the tool process, so the database is opened once.
    connection = globals().get("connection") or open_database()
    globals()["deadline"] = time.monotonic() + QUERY_SECONDS_MAX
    try:
        rows = connection.execute(query).fetchmany(ROWS_MAX + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
        raise ToolError(advice(str(error))) from None
    # No rows, or nothing but NULL, as aggregates return for no rows.
    if all(value is None for row in rows for value in row):
        raise ToolError("not found")
    lines = ["|".join("NULL" if value is None else str(value) for value in row) for row in rows]
    if len(rows) > ROWS_MAX:
        lines[ROWS_MAX] = f"[the first {ROWS_MAX} rows are shown: use WHERE, LIMIT or an aggregate]"
    return "\n".join(lines)


def open_database() -> sqlite3.Connection:
    """Open the database read-only and keep the connection for later calls. ToolError when the world has none."""
    import os
    import sqlite3
    import time

    if not os.path.exists(DATABASE):
        raise ToolError("there is no database in this world")
    connection = sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True, isolation_level=None)
    # Listed while everything is still allowed: afterwards these are all that can be read.
    globals()["tables"] = tables_and_columns(connection)
    names = frozenset(globals()["tables"]) | READABLE
    # SQLite makes such a table at its first use, by a statement that the authorizer would refuse.
    for name in ("json_each('[]')", "json_tree('[]')", "pragma_table_info('')", "pragma_table_list"):
        connection.execute(f"SELECT count(*) FROM {name}")
    modules = frozenset(name for (name,) in connection.execute("PRAGMA module_list")) - READABLE
    connection.set_authorizer(lambda action, first, second, *_: verdict(action, first, second, names, modules))
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_BYTES_MAX)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    # Checked every 100,000 instructions of the SQLite machine; true interrupts the query.
    connection.set_progress_handler(lambda: time.monotonic() > globals()["deadline"], 100_000)
    globals()["connection"] = connection
    return connection


def verdict(action: int, first: str | None, second: str | None, names: frozenset[str], modules: frozenset[str]) -> int:
    """Whether SQLite may do what a statement asks for, by its code of action and the names in it."""
    import sqlite3

    # An allow-list: one connection serves all calls. A temporary table would be found before the world's table of that
    # name, and some functions and pragmas reach memory of the process (fts3_tokenizer, hard_heap_limit).
    allowed = (
        action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
        or (action == sqlite3.SQLITE_READ and first in names)
        # count(*) of a WITH clause reads no column of a table that is no table. Code of SQLite can have such names too.
        or (action == sqlite3.SQLITE_READ and not second and not is_of_sqlite(first or "", modules))
        or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
        or (action == sqlite3.SQLITE_PRAGMA and (first or "").lower() in PRAGMAS)
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def is_of_sqlite(name: str, modules: frozenset[str]) -> bool:
    return name.lower().startswith(("sqlite_", "pragma_")) or name.lower() in modules


def advice(error: str) -> str:
    """The error message of SQLite, and what to do about it."""
    if error.startswith(("no such column", "no such table", "ambiguous column")):
        known = ", ".join(f"{table}({', '.join(columns)})" for table, columns in globals()["tables"].items())
        return f"{error}; the tables are {known or 'none'}"[:2_000]
    if error == "interrupted":
        return f"the query took more than {QUERY_SECONDS_MAX:g} s: ask for less, or join on fewer rows"
    if error.startswith(("not authorized", "authorization denied", "vtable constructor failed", "access to ")):
        return f"{error}: only SELECT is possible, on the tables of the world and with the usual functions"
    return error


def tables_and_columns(connection: sqlite3.Connection) -> dict[str, list[str]]:
    rows = connection.execute(
        "SELECT m.name, c.name FROM sqlite_master m, pragma_table_info(m.name) c "
        "WHERE m.type IN ('table', 'view') ORDER BY m.name, c.cid"
    )
    found: dict[str, list[str]] = {}
    for table, column in rows:
        found.setdefault(table, []).append(column)
    return found
