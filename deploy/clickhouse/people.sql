-- The user that SQL of people runs as on a ClickHouse server: it may SELECT from the traces and do nothing else.
-- An administrator of the server runs this once, with another password:
--     clickhouse-client --multiquery < deploy/clickhouse/people.sql
-- Then: [traces] sql_dsn = "clickhouse://replayground_people:PASSWORD@HOST:8123". If [traces] database has another name,
-- it takes the place of `replayground` below.

-- readonly = 2 lets a statement be narrowed to one run (additional_table_filters) and forbids everything that writes. What
-- protects the server is CONST, and the highest values (MAX) of what a question may ask for.
CREATE SETTINGS PROFILE IF NOT EXISTS replayground_people SETTINGS
    readonly = 2 CONST,
    allow_ddl = 0 CONST,
    allow_introspection_functions = 0 CONST,
    max_execution_time = 20 MAX 20,
    timeout_overflow_mode = 'throw' CONST,
    max_memory_usage = 1000000000 MAX 1000000000,
    max_memory_usage_for_user = 4000000000 MAX 4000000000,
    max_concurrent_queries_for_user = 4 MAX 4,
    max_result_bytes = 67108864 MAX 67108864,
    result_overflow_mode = 'throw' CONST,
    max_threads = 2 MAX 4,
    max_parser_depth = 1000 MAX 1000,
    max_query_size = 262144 MAX 262144;

CREATE USER IF NOT EXISTS replayground_people
    IDENTIFIED WITH sha256_password BY 'CHANGE-ME'
    DEFAULT DATABASE replayground
    SETTINGS PROFILE 'replayground_people';

CREATE QUOTA IF NOT EXISTS replayground_people KEYED BY user_name
    FOR INTERVAL 1 minute MAX queries = 600, errors = 600
    TO replayground_people;

-- No grant of SOURCES (FILE, URL, S3, REMOTE …), of CREATE TEMPORARY TABLE or of dictGet: these stay refused.
REVOKE ALL ON *.* FROM replayground_people;
GRANT SELECT ON replayground.* TO replayground_people;
