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
    "SELECT * FROM dictionary('nothing')",
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

LAKES = (
    "SELECT * FROM icebergLocal('{folder}/')",
    "SELECT * FROM iceberg('http://127.0.0.1:{port}/b/t', 'k', 's')",
    "SELECT * FROM icebergS3('http://127.0.0.1:{port}/b/t', 'k', 's')",
    "SELECT * FROM deltaLake('http://127.0.0.1:{port}/b/t', 'k', 's')",
    "SELECT * FROM deltaLakeLocal('{folder}/')",
    "SELECT * FROM hudi('http://127.0.0.1:{port}/b/t', 'k', 's')",
    "SELECT * FROM paimonLocal('{folder}/')",
    "SELECT * FROM gcs('http://127.0.0.1:{port}/b/k', 'x', 'y', 'CSV')",
    "SELECT * FROM mongodb('127.0.0.1:{port}', 'd', 'c', 'u', 'p', 'x String')",
    "CREATE DATABASE lake ENGINE = DataLakeCatalog('http://127.0.0.1:{port}/v1') SETTINGS catalog_type = "
    "'rest', warehouse = 'w'",
    "SELECT * FROM url('file://{secret}', 'LineAsString', 'x String')",
    "SELECT * FROM s3('file://{secret}', 'LineAsString', 'x String')",
)
"lakes, stores and databases elsewhere"

COLLECTIONS = (
    "CREATE NAMED COLLECTION n AS url = 'http://127.0.0.1:{port}/', format = 'LineAsString'; SELECT * FROM url(n)",
    "CREATE NAMED COLLECTION m AS path = '{secret}', format = 'LineAsString'; SELECT * FROM file(m)",
    "ALTER NAMED COLLECTION n SET url = 'x' OVERRIDABLE",
    "DROP NAMED COLLECTION n",
    "SELECT * FROM system.named_collections",
)
"addresses under a name"

PROGRAMS = (
    "SELECT '#!/bin/sh\ncat {secret}' INTO OUTFILE '/tmp/store/user_scripts/x.sh' FORMAT RawBLOB; SELECT * "
    "FROM executable('x.sh', 'LineAsString', 'x String')",
    "SELECT * FROM executable('../../../../../bin/cat {secret}', 'LineAsString', 'x String')",
    "SELECT * FROM executable('cat {secret}', LineAsString, 'x String', SETTINGS command_read_timeout = 1000)",
    "CREATE TABLE e (x String) ENGINE = Executable('cat', 'LineAsString'); SELECT * FROM e",
    "CREATE TABLE e (x String) ENGINE = ExecutablePool('cat', 'LineAsString')",
    "CREATE DICTIONARY d (k UInt64, v String) PRIMARY KEY k SOURCE(EXECUTABLE(COMMAND 'cat {secret}' FORMAT "
    "'CSV')) LIFETIME(0) LAYOUT(FLAT())",
    "SELECT * FROM Python(request)",
    "SYSTEM RELOAD FUNCTIONS",
)
"other programs, and Python"

DICTIONARIES = (
    "CREATE DICTIONARY d (k UInt64, v String) PRIMARY KEY k SOURCE(FILE(PATH '{secret}' FORMAT 'CSV')) "
    "LIFETIME(0) LAYOUT(FLAT()); SELECT dictGet('d', 'v', 1)",
    "CREATE DICTIONARY d2 (k UInt64, v String) PRIMARY KEY k SOURCE(CLICKHOUSE(HOST '127.0.0.1' PORT {port} "
    "DB 'system' TABLE 'one')) LIFETIME(0) LAYOUT(FLAT()); SELECT dictGet('d2', 'v', 1)",
    "CREATE DICTIONARY d3 (k UInt64, v String) PRIMARY KEY k SOURCE(MYSQL(HOST '127.0.0.1' PORT {port} USER "
    "'u' PASSWORD 'p' DB 'd' TABLE 't')) LIFETIME(1) LAYOUT(FLAT()); SELECT dictGet('d3', 'v', 1)",
    "SELECT dictGetOrNull('d', 'v', 1)",
)
"sources that are read in the background"

ENGINES = (
    "CREATE TABLE disked (x String) ENGINE = MergeTree ORDER BY x SETTINGS disk = disk(type = 'local', path = "
    "'{folder}/disk/')",
    "CREATE TABLE disked (x String) ENGINE = MergeTree ORDER BY x SETTINGS disk = disk(type = 's3', endpoint "
    "= 'http://127.0.0.1:{port}/b/', access_key_id = 'x', secret_access_key = 'y')",
    "ATTACH TABLE attached FROM '{folder}/' (x String) ENGINE = MergeTree ORDER BY x",
    "RESTORE TABLE events AS restored FROM File('{folder}')",
    "CREATE DATABASE b ENGINE = Backup('of_others', File('{folder}'))",
    "CREATE DATABASE s ENGINE = SQLite('{secret}')",
    "CREATE DATABASE m ENGINE = MySQL('127.0.0.1:{port}', 'd', 'u', 'p')",
    "CREATE DATABASE p ENGINE = PostgreSQL('127.0.0.1:{port}', 'd', 'u', 'p')",
    "CREATE TABLE l (x String) ENGINE = FileLog('{folder}', 'LineAsString')",
    "CREATE TABLE r (k String, v String) ENGINE = EmbeddedRocksDB(0, '{folder}/rocks') PRIMARY KEY k",
    "CREATE TABLE u (x String) ENGINE = URL('http://127.0.0.1:{port}/', 'CSV')",
    "CREATE TABLE q (x String) ENGINE = S3Queue('http://127.0.0.1:{port}/b/*', 'CSV') SETTINGS mode = 'unordered'",
    "CREATE TABLE re (k String, v String) ENGINE = Redis('127.0.0.1:{port}') PRIMARY KEY k",
    "CREATE TABLE di (x String) ENGINE = Distributed('default', 'system', 'one')",
    "CREATE MATERIALIZED VIEW v REFRESH EVERY 1 SECOND ENGINE = Memory AS SELECT * FROM "
    "url('http://127.0.0.1:{port}/', 'LineAsString')",
    "CREATE TABLE c AS of_others.events",
    "SELECT * FROM mergeTreeIndex(currentDatabase(), 'events')",
    "SELECT * FROM mergeTreeProjection(currentDatabase(), 'events', 'by_place') LIMIT 1",
    "SELECT * FROM mergeTreeAnalyzeIndexes(currentDatabase(), 'events')",
)
"engines and disks that lie elsewhere"

FORMATS = (
    "SELECT 1 FORMAT Template SETTINGS format_template_row = '{secret}'",
    "SELECT 1 FORMAT Template SETTINGS format_template_resultset = '{secret}'",
    "SELECT 1 AS x FORMAT CapnProto SETTINGS format_schema = '{secret}:M'",
    "SELECT 1 AS x FORMAT Protobuf SETTINGS output_format_schema = '{written}'",
    "SELECT 1 AS x FORMAT CapnProto SETTINGS output_format_schema = '{written}'",
    "SELECT * FROM format(Protobuf, 'x String', 'x') SETTINGS format_schema = '{secret}:M'",
    "SELECT * FROM format(CSV, 'x String', 'a') SETTINGS format_schema_source = 'query', format_schema = "
    "'SELECT file(''{secret}'')'",
    "SELECT * FROM format(AvroConfluent, 'x String', unhex('0000000001')) SETTINGS "
    "format_avro_schema_registry_url = 'http://127.0.0.1:{port}'",
    "SELECT * FROM format(TemplateIgnoreSpaces, 'x String', 'a') SETTINGS format_template_row = '{secret}'",
    "SELECT * FROM values('x String', (file('{secret}')))",
    "SELECT 1 INTO OUTFILE '{written}' TRUNCATE COMPRESSION 'zstd' FORMAT Parquet",
    "SELECT 1 INTO OUTFILE '{written}' AND STDOUT",
)
"formats that read and write schemas"

PATHS = (
    "SELECT file('/proc/self/root{secret}')",
    "SELECT file('/proc/1/root{secret}')",
    "SELECT file('/proc/self/cwd/../../..{secret}')",
    "SELECT file('/proc/self/task/1/root{secret}')",
    "SELECT * FROM file('{folder}/*', 'LineAsString', 'x String')",
    "SELECT * FROM file('{folder}/**', 'One', 'x String')",
    "SELECT _path, _size FROM file('{folder}/*', 'One')",
    "SELECT * FROM file('/snapshot/metadata/../..{secret}', 'LineAsString', 'x String')",
    "SELECT * FROM file('{secret} :: *', 'LineAsString', 'x String')",
    "SELECT * FROM fileCluster('x', '{secret}', 'LineAsString', 'x String')",
    "INSERT INTO FUNCTION file('/snapshot/metadata/{database}.sql', 'RawBLOB', 'x String') SELECT ''",
    "INSERT INTO FUNCTION file('/snapshot/written.csv', 'CSV', 'x String') SELECT 'x'",
    "INSERT INTO FUNCTION file('/program/written.csv', 'CSV', 'x String') SELECT 'x'",
)
"ways around to a path"

ABOUT_THE_PROCESS = (
    "SELECT * FROM system.processes",
    "SELECT * FROM system.query_log",
    "SELECT * FROM system.disks",
    "SELECT * FROM system.server_settings",
    "SELECT * FROM system.stack_trace",
    "SELECT * FROM system.asynchronous_metrics",
    "SELECT * FROM system.zookeeper WHERE path = '/'",
    "SELECT * FROM system.detached_parts",
    "SELECT * FROM system.parts",
    "SELECT * FROM system.user_directories",
    "SELECT * FROM system.environment",
    "SELECT * FROM (SELECT * FROM system.tables) WHERE database = 'of_others'",
    "SELECT name FROM system.databases WHERE name = 'of_others'",
    "SELECT * FROM `system` . `tables`",
    "SELECT * FROM INFORMATION_SCHEMA.TABLES",
    "SELECT hasColumnInTable('127.0.0.1:{port}', 'u', 'p', 'system', 'one', 'dummy')",
    "SELECT reverseDNSQuery('127.0.0.1')",
    "SELECT getSettingOrDefault('readonly', 1)",
    "SELECT getClientHTTPHeader('X')",
    "SELECT getOSKernelVersion(), hostName(), uptime(), serverUUID()",
    "SHOW SETTINGS LIKE '%'",
    "SHOW GRANTS",
    "SHOW ACCESS",
    "SHOW CLUSTERS",
    "SHOW ENGINES",
    "SHOW DATABASES",
    "SHOW MERGES",
    "SHOW TABLES FROM system",
    "SHOW FILESYSTEM CACHES",
    "DESCRIBE system.users",
    "DESCRIBE FILESYSTEM CACHE 'x'",
    "SHOW COLUMNS FROM one FROM system",
    "SHOW INDEXES FROM one FROM system",
    "SHOW DICTIONARIES",
    "SHOW PROFILES",
    "SHOW USERS",
)
"no harm: about the process, its machine and its catalogue"

SETTINGS_SET = (
    "SET readonly = 0; SELECT file('{secret}')",
    "SET allow_introspection_functions = 1; SELECT demangle('_ZN2DB')",
    "SELECT * FROM events SETTINGS additional_table_filters = {{}}",
    "EXPLAIN SELECT 1 SETTINGS readonly = 0",
    "SET profile = 'default'",
    "SET ROLE ALL",
    "SELECT 1 SETTINGS max_threads = 10000, max_memory_usage = 0",
    "SET param_x = 1; SELECT {{x:UInt8}}",
    "SELECT * FROM (SELECT 1 SETTINGS max_threads = 8) SETTINGS max_threads = 8",
    "SELECT * FROM view(SELECT 1 SETTINGS max_threads = 8)",
)
"limits that a statement would set itself"

EXPLAINED = (
    "EXPLAIN QUERY TREE SELECT file('{secret}')",
    "EXPLAIN PIPELINE graph = 1 SELECT * FROM url('http://127.0.0.1:{port}/', 'CSV', 'x String')",
    "EXPLAIN PLAN actions = 1 SELECT file('{secret}')",
    "EXPLAIN ESTIMATE SELECT * FROM file('{secret}', 'LineAsString', 'x String')",
    "EXPLAIN AST SELECT file('{secret}')",
    "EXPLAIN CURRENT TRANSACTION",
    "EXPLAIN TABLE OVERRIDE mysql('127.0.0.1:{port}', 'd', 't', 'u', 'p') PARTITION BY x",
    "EXPLAIN SYNTAX run_query_tree_passes = 1 SELECT file('{secret}')",
    "EXPLAIN PIPELINE INSERT INTO events SELECT * FROM events",
    "SELECT * FROM (EXPLAIN SELECT file('{secret}'))",
    "SELECT * FROM viewExplain('EXPLAIN SYNTAX', '', (SELECT file('{secret}')))",
)
"explanations that run what they explain"

ADMINISTRATION = (
    "CREATE USER u IDENTIFIED BY 'p'",
    "GRANT ALL ON *.* TO u",
    "CREATE ROLE r",
    "EXECUTE AS u SELECT 1",
    "CREATE ROW POLICY p ON events USING 1",
    "CREATE QUOTA q",
    "CREATE SETTINGS PROFILE p SETTINGS readonly = 0",
    "ALTER USER default SETTINGS readonly = 0",
    "DROP USER default",
    "CREATE TABLE t1 (x UInt8) ENGINE = Memory PARALLEL WITH CREATE TABLE t2 (x UInt8) ENGINE = Memory",
    "UPDATE events SET body = 'x' WHERE 1",
    "CHECK TABLE events",
    "CHECK ALL TABLES",
    "BEGIN TRANSACTION",
    "COMMIT",
    "UNDROP TABLE events",
    "EXCHANGE TABLES events AND payloads",
    "ALTER DATABASE {database} MODIFY SETTING x = 1",
    "CREATE OR REPLACE VIEW turns AS SELECT 1",
    "CREATE TEMPORARY TABLE t3 (x String)",
    "CREATE TEMPORARY TABLE t4 AS SELECT file('{secret}') AS x",
    "DROP VIEW turns",
    "ALTER TABLE events MODIFY SETTING fsync_after_insert = 0",
    "ALTER TABLE events MODIFY COMMENT 'x'",
    "ALTER TABLE events ATTACH PARTITION ID 'all' FROM payloads",
    "ALTER TABLE events FETCH PARTITION ID 'all' FROM '/x'",
    "SYSTEM FLUSH LOGS",
    "SYSTEM UNFREEZE WITH NAME 'x'",
    "SYSTEM LOAD PRIMARY KEY",
    "SYSTEM STOP FETCHES",
)
"users, rights, transactions and the definition of tables"

HANDED_ON = (
    "SELECT arrayMap(file, ['{secret}']) AS \"a\nb\"",
    "SELECT arrayMap(file, ['{secret}']) AS `a\n   ExpressionList`",
    "SELECT * APPLY(file) FROM (SELECT '{secret}' AS x)",
    "SELECT COLUMNS('x') APPLY(file) FROM (SELECT '{secret}' AS x)",
    "SELECT * APPLY(x -> file(x)) FROM (SELECT '{secret}' AS x)",
    "SELECT '{secret}' AS x, * REPLACE(file(x) AS x) FROM (SELECT '{secret}' AS x)",
    "SELECT arrayFold((a, x) -> file(x), ['{secret}'], '')",
    "SELECT mapApply((k, v) -> (k, file(v)), map('a', '{secret}'))",
    "SELECT arrayFilter(file, ['{secret}'])",
    "SELECT arraySort(file, ['{secret}'])",
    "SELECT arrayCount(file, ['{secret}'])",
    "SELECT FILE('{secret}')",
    "SELECT 1 AS x FROM events AS system, system.one",
    "SELECT if(1, file('{secret}'), '')",
    "SELECT * FROM numbers(toUInt64(length(file('{secret}'))))",
    "SELECT * FROM events LIMIT length(file('{secret}'))",
    "SELECT 1 ORDER BY file('{secret}')",
    "SELECT 1 WHERE file('{secret}') != ''",
    "SELECT sum(1) OVER (PARTITION BY file('{secret}'))",
    "SELECT 1 QUALIFY file('{secret}') != ''",
    "SELECT quantile(length(file('{secret}')))(1)",
    "SELECT * FROM values('x String', file('{secret}'))",
    "SELECT toTypeName(file('{secret}'))",
    "SELECT CAST(file('{secret}') AS String)",
    "SELECT file('{secret}')::String",
    "SELECT [file('{secret}')][1]",
    "SELECT (file('{secret}'), 1).1",
    "SELECT -length(file('{secret}'))",
    "SELECT INTERVAL length(file('{secret}')) DAY",
    "SELECT extract(file('{secret}'), '.*')",
    "SELECT trim(BOTH 'x' FROM file('{secret}'))",
    "SELECT * FROM system.one FINAL SAMPLE 1",
    "SELECT exists(SELECT * FROM system.one)",
    "SELECT 1 = ANY (SELECT dummy FROM system.one)",
    "(SELECT file('{secret}'))",
    "SELECT 1 UNION ALL (SELECT file('{secret}'))",
    "SELECT 1 LIMIT 1 BY file('{secret}')",
    "SELECT 1 AS a ORDER BY a WITH FILL FROM 1 TO length(file('{secret}'))",
    "INSERT INTO events SELECT 1",
    "SELECT * FROM events ARRAY JOIN [file('{secret}')] AS y",
)
"functions where one does not expect them, and names that look like a syntax tree"

UNSEEN = (
    "SELECT * FROM of_others.events",
    "SELECT * FROM loop('of_others', 'events') LIMIT 1",
    "SELECT * FROM format(Values, 'x String', '(file(''{secret}''))')",
    "SELECT * FROM format(CSV, 'x String DEFAULT file(''{secret}'')', 'a')",
    "SELECT * FROM values('x String DEFAULT file(''{secret}'')', 'a')",
    "SELECT * FROM generateRandom('x String DEFAULT file(''{secret}'')') LIMIT 1",
    "SHOW TABLES FROM of_others",
    "EXISTS DATABASE of_others",
    "SHOW CREATE DATABASE of_others",
    "EXPLAIN indexes = 1, json = 1 SELECT * FROM of_others.events",
    "CREATE VIEW v2 SQL SECURITY NONE AS SELECT * FROM of_others.events",
    "WITH file AS f SELECT arrayMap(f, ['{secret}'])",
    "SELECT apply(file, ['{secret}'])",
    "SELECT arrayReduce('file', ['{secret}'])",
    'SELECT * FROM "sys\ntem".one',
    "SELECT 1 IN (`system.one`)",
    "SELECT * FROM `system.one`",
)
"what the door cannot see in strings, and names that are not there: the wall alone"

GROUPS = (
    *(
        READS,
        WRITES,
        CONNECTIONS,
        ON_THE_STORE,
        ELSEWHERE,
        LAKES,
        COLLECTIONS,
        PROGRAMS,
        DICTIONARIES,
        ENGINES,
        FORMATS,
    ),
    *(PATHS, ABOUT_THE_PROCESS, SETTINGS_SET, EXPLAINED, ADMINISTRATION, HANDED_ON),
)
SEEN_BY_THE_DOOR = tuple(statement for group in GROUPS for statement in group)

WAITING = ("DROP DATABASE {database} SYNC",)
"waits for what its own connection holds"

WITHOUT_BOUND = (
    "SELECT hasAll(range(30000000), arrayMap(x -> x + 1, range(30000000)))",
    "SELECT length(groupArray(repeat(toString(number), 100000))) FROM numbers(100000000)",
    "SELECT count() FROM numbers(100000000000) AS a WHERE NOT ignore(sipHash128(number))",
    "SELECT repeat('x', 1000000) FROM numbers(9000)",
    "SELECT position(repeat('ab', 5000000), concat(repeat('ba', 200000), 'c')) FROM numbers(1000)",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r) SELECT count() FROM r",
    # Thirty megabytes of JSON, and twenty times as much in the process that would read it.
    "SELECT arrayResize([map()]::Array(Map(String, String)), 1000) FROM numbers(10000)",
    "SELECT finalizeAggregation(CAST(unhex('FFFFFFFFFFFFFFFF'), 'AggregateFunction(groupArray, String)'))",
    "SELECT * FROM file('/proc/self/fd/0', 'LineAsString', 'x String')",
    "SYSTEM SHUTDOWN",
    "SYSTEM KILL",
    "SYSTEM SUSPEND FOR 60 SECOND",
)
"time and memory; limits of ClickHouse do not interrupt all of these"


def filled(statement: str, **names: object) -> str:
    return statement.format(**names)
