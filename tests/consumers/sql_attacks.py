"""Statements that aim at more than the traces: files, connections, other databases, the process, the store.

{secret} is a file outside, {written} one that must not appear, {port} a port that somebody listens on.
"""

READS = (
    "SELECT file('{secret}')",
    "SELECT `file`('{secret}')",
    "SELECT \"file\"('{secret}')",
    "SELECT file /* x */ ('{secret}')",
    "SELECT file\u200b('{secret}')",
    "SELECT * FROM file('{secret}', 'LineAsString')",
    "SELECT * FROM file('{secret}', LineAsString, 'x String')",
    "SELECT arrayMap(file, ['{secret}'])",
    "SELECT arrayMap(x -> file(x), ['{secret}'])",
    "WITH '{secret}' AS p SELECT file(p)",
    "SELECT * FROM (SELECT file('{secret}') AS x) WHERE x != ''",
    "SELECT dateDiff(file('{secret}'), now(), now())",
    "SELECT file('..{secret}')",
    "SELECT file('../../../../../../../../../..{secret}')",
    "SELECT * FROM fileCluster('default', '{secret}', 'LineAsString')",
    "DESCRIBE file('{secret}', 'CSV')",
    "SELECT 1 // comment\n, file('{secret}')",
    "SELECT * FROM view(SELECT file('{secret}'))",
    "EXPLAIN SYNTAX SELECT file('{secret}')",
    "SELECT 1; SELECT file('{secret}')",
    "CREATE TABLE stolen (x String) ENGINE = File(LineAsString, '{secret}')",
    "INSERT INTO FUNCTION file('{written}', 'CSV', 'x String') SELECT file('{secret}')",
    "SELECT * FROM sqlite('{secret}', 'x')",
    "SELECT * FROM filesystem('{secret}')",
    "SELECT content FROM filesystem('/')",
)
"what brings a file back"

WRITES = (
    "SELECT 1 INTO OUTFILE '{written}'",
    "SELECT 1 INTO OUTFILE '{written}' APPEND FORMAT CSV",
    "INSERT INTO FUNCTION file('{written}', 'CSV', 'x Int8') SELECT 1",
    "BACKUP TABLE events TO File('{written}')",
    "BACKUP DATABASE {database} TO Disk('default', '{written}')",
    "CREATE DATABASE d ENGINE = Filesystem('{folder}')",
    "CREATE FUNCTION f AS x -> x",
)

CONNECTIONS = (
    "SELECT * FROM url('http://127.0.0.1:{port}/', 'LineAsString')",
    "DESCRIBE url('http://127.0.0.1:{port}/', 'CSV')",
    "SELECT * FROM s3('http://127.0.0.1:{port}/b/k', 'x', 'y', 'CSV')",
    "SELECT * FROM remote('127.0.0.1:{port}', 'system', 'one')",
    "SELECT * FROM remoteSecure('127.0.0.1:{port}', 'system', 'one')",
    "SELECT * FROM mysql('127.0.0.1:{port}', 'd', 't', 'u', 'p')",
    "SELECT * FROM postgresql('127.0.0.1:{port}', 'd', 't', 'u', 'p')",
    "SELECT * FROM redis('127.0.0.1:{port}', 'k', 'k String, v String')",
    "INSERT INTO FUNCTION url('http://127.0.0.1:{port}/', 'CSV', 'x String') SELECT body FROM payloads",
    "BACKUP TABLE events TO S3('http://127.0.0.1:{port}/b', 'x', 'y')",
    "SELECT * FROM executable('curl http://127.0.0.1:{port}/', 'TSV', 'x String')",
    "CREATE DICTIONARY d (k UInt64, v String) PRIMARY KEY k SOURCE(HTTP(URL 'http://127.0.0.1:{port}/' FORMAT 'CSV')) "
    "LIFETIME(0) LAYOUT(FLAT())",
)

ON_THE_STORE = (
    "DROP TABLE events",
    "DROP TABLE events SYNC",
    "TRUNCATE TABLE events",
    "ALTER TABLE events DELETE WHERE 1",
    "DELETE FROM events WHERE 1",
    "ALTER TABLE events DROP PARTITION ID 'all'",
    "ALTER TABLE events FREEZE",
    "ALTER TABLE events UPDATE body = 'x' WHERE 1",
    "INSERT INTO events (id) VALUES ('x')",
    "OPTIMIZE TABLE events FINAL",
    "RENAME TABLE events TO gone",
    "DETACH TABLE events PERMANENTLY",
    "SYSTEM STOP MERGES",
    "SYSTEM DROP MARK CACHE",
    "KILL QUERY WHERE 1",
    "KILL MUTATION WHERE 1",
    "SET readonly = 0",
    "SET max_memory_usage = 0, max_execution_time = 0",
)

ELSEWHERE = (
    "SELECT * FROM system.users",
    "SELECT * FROM `system`.`users`",
    "SELECT * FROM system . one",
    "SELECT * FROM events, system.settings",
    "SELECT 1 IN system.one",
    "SELECT in(1, system.one)",
    "SELECT notIn(1, system.one)",
    "WITH system AS (SELECT 1) SELECT * FROM system.users",
    "SELECT * FROM merge('system', 'one')",
    "SELECT * FROM cluster('default', system.one)",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM dictionary('d')",
    "SELECT dictGet('d', 'a', 1)",
    "SELECT joinGet('t', 'a', 1)",
    "SELECT sleep(1)",
    "SELECT sleepEachRow(0.1) FROM numbers(10)",
    "SELECT getSetting('readonly')",
    "SELECT 1 SETTINGS max_memory_usage = 0",
    "SELECT * FROM (SELECT 1 SETTINGS readonly = 0)",
    "SELECT 1 FORMAT CSV",
    "SELECT 1; DROP TABLE events",
    "SELECT x.'text'('a')",
    "EXPLAIN INSERT INTO events (id) VALUES ('x')",
    "SELECT {{a:Identifier}} FROM events",
    "SHOW PROCESSLIST",
    "USE system",
    "",
    ";",
    "hello",
)
"no harm, and not about the traces: the door says so"

WAITING = ("DROP DATABASE {database} SYNC",)
"waits for what its own connection holds"

WITHOUT_BOUND = (
    "SELECT hasAll(range(30000000), arrayMap(x -> x + 1, range(30000000)))",
    "SELECT length(groupArray(repeat(toString(number), 100000))) FROM numbers(100000000)",
    "SELECT count() FROM numbers(100000000000) AS a WHERE NOT ignore(sipHash128(number))",
    "SELECT repeat('x', 1000000) FROM numbers(9000)",
    "SELECT position(repeat('ab', 5000000), concat(repeat('ba', 200000), 'c')) FROM numbers(1000)",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r) SELECT count() FROM r",
)
"time and memory; limits of ClickHouse do not interrupt all of these"


def filled(statement: str, **names: object) -> str:
    return statement.format(**names)
