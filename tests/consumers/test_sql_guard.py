"""SQL of people: what is useful is answered, what is dangerous is refused with a reason."""

from collections.abc import Iterator

import pytest

from replayground.consumers.clickhouse.migrations import TABLES
from replayground.consumers.clickhouse.sql_guard import check_sql
from replayground.consumers.clickhouse.store import Store
from replayground.schemas.errors import BadInput

USEFUL = (
    "SELECT type, count() AS n FROM events GROUP BY type ORDER BY n DESC LIMIT 5",
    "SELECT avg(score) FILTER (WHERE verdict = 'scored') FROM rewards",
    "WITH best AS (SELECT trajectory_id, max(score) AS s FROM rewards GROUP BY trajectory_id) SELECT countIf(s = 1) FROM best",
    "SELECT session_id, quantile(0.5)(milliseconds) FROM turns GROUP BY session_id",
    "SELECT toStartOfInterval(time, INTERVAL 1 MINUTE) AS t, sum(tokens) FROM turns GROUP BY t ORDER BY t",
    "SELECT * FROM turns WHERE trajectory_id IN (SELECT trajectory_id FROM rewards WHERE score = 1) LIMIT 3",
    "SELECT metrics['reward_mean'] FROM steps WHERE kind = 'grpo'",
    "SELECT m FROM (SELECT JSONExtractArrayRaw(body, 'members') AS a FROM events) ARRAY JOIN a AS m",
    "SELECT row_number() OVER (PARTITION BY run_id ORDER BY timestamp) FROM events",
    "SELECT dateDiff('second', min(time), max(time)) FROM events",
    "SELECT t.text FROM turns AS t JOIN rewards AS r ON t.trajectory_id = r.trajectory_id LIMIT 1 BY t.run_id",
    "SELECT 1 UNION ALL SELECT 2 -- a remark",
    "SELECT text FROM turns WHERE text LIKE '%file(%'",
)

DANGEROUS = (
    "SELECT file('/etc/passwd')",
    "SELECT `file`('/etc/passwd')",
    "SELECT \"file\"('/etc/passwd')",
    "SELECT file /* x */ ('/etc/passwd')",
    "SELECT * FROM file('/etc/passwd')",
    "SELECT * FROM url('http://127.0.0.1/')",
    "SELECT * FROM (SELECT * FROM s3('http://x'))",
    "WITH x AS (SELECT * FROM remote('a', 'b')) SELECT * FROM x",
    "SELECT 1 INTO OUTFILE '/tmp/x'",
    "BACKUP TABLE events TO S3('http://x')",
    "DESCRIBE url('http://x')",
    "SELECT * FROM system.users",
    "SELECT * FROM events, system.one",
    "SELECT * FROM events WHERE id IN system.users",
    "SELECT * FROM events WHERE id IN (secrets)",
    "SELECT * FROM default.events",
    "KILL QUERY WHERE 1",
    "SYSTEM STOP MERGES",
    "SELECT 1; SELECT 2",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT * FROM (SELECT 1 SETTINGS readonly = 0)",
    "SELECT 1 FORMAT Null",
    "SET readonly = 0",
    "INSERT INTO events SELECT 1",
    "DROP TABLE events",
    "ALTER TABLE events DELETE WHERE 1",
    "EXPLAIN SELECT 1",
    "SELECT getSetting('readonly')",
    "SELECT hostName()",
    "SELECT sleep(3)",
    "SELECT dictGet('a', 'b', 1)",
    "SELECT {name:String}",
    "SELECT * FROM {name:Identifier}",
    "SELECT * REPLACE (file('x') AS id) FROM events",
    "SELECT 1 AS `a\\``, file('x')",
    'SELECT 1 AS "a""b"',
    "SELECT * FROM numbers(1000000000000)",
    "",
    ";",
    "hello",
    "SELECT " + "(" * 3000,
    "SELECT " + "1," * 20_000,
)

TEXTS = (
    "a\\",
    "it's",
    "\\'",
    "x\\' || file('/etc/passwd') || \\'",
    "line\nline",
    "\\d+",
    "''",
    "\\\\'",
    "`",
    '"',
    "--",
    "/*",
    "#",
    "é😀",
    "\t",
)


@pytest.fixture(scope="module")
def store(chdb_dsn: str) -> Iterator[Store]:
    opened = Store(chdb_dsn, "guard", threads=1)
    yield opened
    opened.close()


@pytest.mark.parametrize("statement", USEFUL)
def test_useful_statements_are_answered(statement: str, store: Store) -> None:
    store.ask_guarded(check_sql(statement), {"readonly": 1, "max_execution_time": 5})


@pytest.mark.parametrize("table", TABLES)
def test_every_table_can_be_asked_about(table: str, store: Store) -> None:
    store.ask_guarded(check_sql(f"SELECT * FROM {table} LIMIT 1"), {"readonly": 1})


@pytest.mark.parametrize("statement", DANGEROUS)
def test_dangerous_statements_are_refused_in_one_line(statement: str) -> None:
    with pytest.raises(BadInput) as refused:
        check_sql(statement)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", TEXTS)
def test_clickhouse_reads_a_rewritten_text_as_we_do(text: str, store: Store) -> None:
    quoted = text.replace("\\", "\\\\").replace("'", "\\'")
    statement = check_sql(f"SELECT '{quoted}' AS a, 'end' AS b")
    assert store.ask_guarded(statement, {}).rows == [(text, "end")]
