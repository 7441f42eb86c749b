"""Tables and views of the trace store. Every statement is idempotent: it can run again on an existing store.

One table holds the events of all runs. It is ordered by run, so a query about one run reads no rows of the others.
Projections are small tables inside each part, which ClickHouse maintains and chooses by itself: the queries that run at
every start and every second read a few rows, however large the store is.
"""

from replayground.streams.rules.reward import (
    ATTEMPT_PASSED_SQL,
    ATTEMPT_REWARD_SQL,
    ATTEMPT_VALID_SQL,
    DECISION_SQL,
    VALID_SQL,
)

# IF NOT EXISTS leaves an existing table as it is: a column that is added here also needs an ALTER TABLE in STATEMENTS.
# non_replicated_deduplication_window = how many insert tokens ClickHouse remembers. Without it, an insert that is
# repeated after a crash would add its rows again (Store.insert).
_EVENTS = """
CREATE TABLE IF NOT EXISTS events
(
    topic           LowCardinality(String),
    partition       Int32,
    offset          Int64,
    type            LowCardinality(String)           COMMENT 'class of the event, or undecodable',
    id              String,
    run_id          LowCardinality(String),
    session_id      LowCardinality(Nullable(String)) COMMENT 'demonstrations, train, or one evaluation',
    task_id         Nullable(String),
    group_id        Nullable(String),
    trajectory_id   Nullable(String),
    attempt_id      Nullable(String),
    seq             Nullable(Int32),
    category        LowCardinality(String),
    sender          LowCardinality(String),
    receiver        LowCardinality(Nullable(String)),
    caller          LowCardinality(Nullable(String)),
    priority        Int32,
    headers         Map(String, String),
    timestamp       Int64                            COMMENT 'microseconds since the epoch, event time',
    time            DateTime64(6, 'UTC') ALIAS fromUnixTimestamp64Micro(timestamp, 'UTC'),
    correlation_id  Nullable(String),
    causation_id    Nullable(String),
    idempotency_key Nullable(String),
    purpose         LowCardinality(Nullable(String)),
    policy_version  Nullable(Int64),
    tokens          UInt32                           COMMENT 'sampled tokens of a TurnGenerated',
    score           Nullable(Float64)                COMMENT 'of a RewardAssigned',
    verdict         LowCardinality(String)           COMMENT 'of a RewardAssigned',
    ended_by        LowCardinality(String)           COMMENT 'of a RolloutEnded, TrajectoryAssembled or RewardAssigned',
    version         Nullable(Int64)                  COMMENT 'weights made, published, loaded or held',
    body            String                           COMMENT 'the event as JSON without its envelope; bytes in base64',
    INDEX by_trajectory trajectory_id TYPE bloom_filter GRANULARITY 4
)
ENGINE = MergeTree
ORDER BY (run_id, type, topic, partition, offset)
SETTINGS non_replicated_deduplication_window = 10000
"""

SORTING_KEY = "run_id, type, topic, partition, offset"
"a store whose table has another order was made by another release and is refused"

# The condition is inside the aggregate, not in WHERE: projection `standing` has no column `type`, so with a WHERE on it
# ClickHouse would read the table instead.
LAST_OFFSET = "maxIf(offset, type != 'undecodable')"
LAST_ID = "argMaxIf(id, offset, type != 'undecodable')"

# All facts of a run in one row of the projection. The condition is inside the aggregate for the same reason.
RUN_FACTS = "groupArrayIf((offset, type, id, sender, timestamp, body), topic = 'runs')"


def _of_rewards(extracted: str, otherwise: str) -> str:
    """An expression that is not computed for other events: their bodies may be long, and each insert would parse them."""
    return f"if(type = 'RewardAssigned', {extracted}, {otherwise})"


# What decides about passing, by far the most frequent question. MATERIALIZED: computed from the body at each insert,
# and while reading for the rows that an older release has inserted.
_COLUMNS = tuple(
    f"ALTER TABLE events ADD COLUMN IF NOT EXISTS {name} {kind} MATERIALIZED {expression} COMMENT '{comment}'"
    for name, kind, expression, comment in (
        (
            "scorer_set",
            "LowCardinality(String)",
            _of_rewards("JSONExtractString(body, 'scorer_set')", "''"),
            "of a RewardAssigned; empty in older events",
        ),
        (
            "weight",
            "Nullable(Float64)",
            # Null for what JSON cannot hold: infinity and NaN. Older events have no weight.
            _of_rewards("if(JSONHas(body, 'weight'), JSONExtract(body, 'weight', 'Nullable(Float64)'), 1)", "NULL"),
            "of a RewardAssigned",
        ),
        (
            "passed",
            "Nullable(Bool)",
            _of_rewards("JSONExtract(body, 'passed', 'Nullable(Bool)')", "NULL"),
            "of a RewardAssigned",
        ),
        (
            "scorers",
            "UInt16",
            _of_rewards("toUInt16(JSONLength(body, 'scorers'))", "0"),
            "how many scorers judge the attempt of a RewardAssigned",
        ),
    )
)

_PROJECTIONS = (
    # By default ClickHouse refuses DELETE on a table with projections. reconcile deletes rows, and `rebuild` makes the
    # projections of the parts that it touches again.
    "ALTER TABLE events MODIFY SETTING lightweight_mutation_projection_mode = 'rebuild'",
    # How far the store is on each partition, and its last event there: read at every start (TraceWriter).
    f"""ALTER TABLE events ADD PROJECTION IF NOT EXISTS standing
        (SELECT topic, partition, max(offset), count(), {LAST_OFFSET}, {LAST_ID} GROUP BY topic, partition)""",
    # Rows by address instead of by run: for counting rows against the messages of a partition.
    """ALTER TABLE events ADD PROJECTION IF NOT EXISTS by_place
        (SELECT topic, partition, offset ORDER BY topic, partition, offset)""",
    # For the list of runs and the counters of the page, which are refreshed every few seconds.
    """ALTER TABLE events ADD PROJECTION IF NOT EXISTS by_run
        (SELECT run_id, type, count(), min(timestamp), max(timestamp), max(version) GROUP BY run_id, type)""",
    f"ALTER TABLE events ADD PROJECTION IF NOT EXISTS run_facts (SELECT run_id, {RUN_FACTS} GROUP BY run_id)",
)

_WHERE = (
    "run_id, session_id, task_id, group_id, trajectory_id, attempt_id, seq, time, timestamp, purpose, policy_version, "
    "partition, offset"
)


def _view(name: str, kind: str, columns: str, derived: bool = False) -> str:
    """A typed view of one kind of event. A derived event may be on the log twice with one id; it is shown once."""
    once = " LIMIT 1 BY id" if derived else ""
    return f"CREATE OR REPLACE VIEW {name} AS SELECT id, {_WHERE}, {columns} FROM events WHERE type = '{kind}'{once}"


_TASK = """
    JSONExtractString(body, 'task', 'prompt') AS prompt,
    JSONExtractString(body, 'task', 'reference') AS reference,
    JSONExtractString(body, 'task', 'split') AS split,
    JSONExtract(body, 'task', 'tags', 'Map(String, String)') AS tags
"""

# The same fold as streams.rules.runs: the newest start counts, and only a RunEnded of that start ends the run. Of two
# events with the same number the first on the log counts, hence argMin by offset. RunStarted has no field `start`,
# which JSONExtractInt reads as 0.
_RUNS = """
CREATE OR REPLACE VIEW runs AS
SELECT run_id,
       JSONExtractString(first, 'kind') AS kind,
       JSONExtractString(JSONExtractString(first, 'config'), 'job', 'module') AS job,
       JSONExtractInt(first, 'seed') AS seed,
       JSONExtractString(newest, 'started_by') AS started_by,
       fromUnixTimestamp64Micro(started, 'UTC') AS started_at,
       if(ended = 0, NULL, fromUnixTimestamp64Micro(ended, 'UTC')) AS ended_at,
       if(ended = 0, NULL, JSONExtractString(end, 'reason')) AS reason,
       JSONExtractString(end, 'detail') AS detail,
       JSONExtractString(newest, 'code_version') AS code_version,
       starts,
       JSONExtractString(first, 'config') AS config
FROM
(
    SELECT run_id, any(newest_start) AS starts,
           argMinIf(body, offset, type = 'RunStarted') AS first,
           minIf(timestamp, type = 'RunStarted') AS started,
           argMinIf(body, offset, number = newest_start AND type != 'RunEnded') AS newest,
           argMinIf(body, offset, number = newest_start AND type = 'RunEnded') AS end,
           argMinIf(timestamp, offset, number = newest_start AND type = 'RunEnded') AS ended
    FROM
    (
        SELECT run_id, type, offset, timestamp, body, JSONExtractInt(body, 'start') AS number,
               max(if(type = 'RunResumed', number, 0)) OVER (PARTITION BY run_id) AS newest_start
        FROM events WHERE type IN ('RunStarted', 'RunResumed', 'RunEnded')
    )
    GROUP BY run_id
    HAVING countIf(type = 'RunStarted') > 0
)
"""

_IDS = ("session_id", "task_id", "group_id", "trajectory_id", "purpose", "policy_version", "ended_by")


def outcomes(where: str = "1") -> str:
    """A SELECT of what the scorers made of each attempt, one row for each attempt and scorer set, once all of its
    scorers have judged it. `where` is a condition over columns of RewardAssigned."""
    # Conditions of a query to the view reach the table only by the keys of its GROUP BY; other ones are given here.
    shown = ", ".join(f"any(judged.{name}) AS {name}" for name in _IDS)
    return f"""
SELECT run_id, attempt_id, scorer_set, {shown}, min(judged.timestamp) AS timestamp,
       fromUnixTimestamp64Micro(min(judged.timestamp), 'UTC') AS time,
       {ATTEMPT_REWARD_SQL} AS reward, {ATTEMPT_PASSED_SQL} AS passed, 1 - {ATTEMPT_VALID_SQL} AS excluded
FROM
(
    SELECT run_id, attempt_id, scorer_set, {", ".join(_IDS)}, timestamp, id, score, weight, scorers,
           {VALID_SQL} AS valid, {DECISION_SQL} AS decision
    FROM events WHERE type = 'RewardAssigned' AND ({where})
) AS judged
GROUP BY run_id, attempt_id, scorer_set
HAVING uniqExact(id) >= max(scorers)
"""


_VIEWS = (
    _RUNS,
    f"CREATE OR REPLACE VIEW outcomes AS {outcomes()}",
    _view("tasks", "TaskSubmitted", f"{_TASK}, JSONExtractInt(body, 'task', 'group_size') AS group_size"),
    _view(
        "turns",
        "TurnGenerated",
        """tokens, JSONExtractString(body, 'agent') AS agent, JSONExtractString(body, 'text') AS text,
        JSONExtractString(body, 'finish_reason') AS finish_reason, JSONExtractFloat(body, 'milliseconds') AS milliseconds,
        JSONExtractRaw(body, 'versions') AS versions""",
    ),
    _view(
        "calls",
        "ToolCalled",
        """JSONExtractString(body, 'call_id') AS call_id, JSONExtractString(body, 'tool') AS tool,
        JSONExtractString(body, 'arguments') AS arguments""",
    ),
    _view(
        "observations",
        "ToolObserved",
        """JSONExtractString(body, 'call_id') AS call_id, JSONExtractString(body, 'tool') AS tool,
        JSONExtractString(body, 'content') AS content, JSONExtractBool(body, 'is_error') AS is_error,
        JSONExtract(body, 'error_kind', 'Nullable(String)') AS error_kind,
        JSONExtract(body, 'perturbation', 'Nullable(String)') AS perturbation,
        JSONExtractFloat(body, 'milliseconds') AS milliseconds""",
    ),
    # After `calls` and `observations`, which it selects from. ANY: one row for each observation, whatever `calls` has.
    """CREATE OR REPLACE VIEW tool_calls AS
        SELECT observed.*, called.arguments AS arguments FROM observations AS observed
        LEFT ANY JOIN calls AS called
        ON observed.attempt_id = called.attempt_id AND observed.call_id = called.call_id""",
    _view(
        "ends",
        "RolloutEnded",
        """ended_by, JSONExtract(body, 'answer', 'Nullable(String)') AS answer,
        JSONExtract(body, 'reason', 'Nullable(String)') AS reason, JSONExtractInt(body, 'turns') AS turns,
        JSONExtractInt(body, 'tokens_sampled') AS tokens_sampled, JSONExtractInt(body, 'tokens_read') AS tokens_read,
        JSONExtractFloat(body, 'milliseconds') AS milliseconds, JSONExtractFloat(body, 'cost') AS cost""",
    ),
    _view(
        "trajectories",
        "TrajectoryAssembled",
        f"""ended_by, JSONExtractInt(body, 'index') AS index, JSONExtract(body, 'answer', 'Nullable(String)') AS answer,
        JSONExtract(body, 'reason', 'Nullable(String)') AS reason, JSONExtractInt(body, 'turns') AS turns,
        JSONExtractInt(body, 'tokens_sampled') AS tokens_sampled,
        JSONExtract(body, 'policy_version_oldest', 'Nullable(Int64)') AS policy_version_oldest, {_TASK},
        JSONExtractRaw(body, 'transcript') AS transcript, JSONExtractFloat(body, 'cost') AS cost""",
        derived=True,
    ),
    _view(
        "attempts",
        "AttemptEnded",
        """ended_by, JSONExtractInt(body, 'index') AS index, JSONExtractInt(body, 'group_size') AS group_size,
        JSONExtract(body, 'reason', 'Nullable(String)') AS reason, JSONExtractInt(body, 'tokens_sampled') AS tokens_sampled,
        JSONExtract(body, 'policy_version_oldest', 'Nullable(Int64)') AS policy_version_oldest""",
        derived=True,
    ),
    _view(
        "rewards",
        "RewardAssigned",
        """score, verdict, ended_by, JSONExtractString(body, 'scorer') AS scorer,
        JSONExtractString(body, 'scorer_version') AS scorer_version, JSONExtractInt(body, 'index') AS index,
        JSONExtract(body, 'parts', 'Map(String, Float64)') AS parts, JSONExtractString(body, 'evidence') AS evidence,
        JSONExtract(body, 'excluded_because', 'Nullable(String)') AS excluded_because,
        JSONExtractInt(body, 'tokens_sampled') AS tokens_sampled,
        scorer_set, weight, passed""",
        derived=True,
    ),
    _view(
        "selections",
        "TrajectoriesSelected",
        """JSONExtractString(body, 'name') AS name, JSONExtract(body, 'runs', 'Array(String)') AS runs,
        JSONExtractString(body, 'where') AS where_sql, JSONExtractInt(body, 'trajectories') AS trajectories,
        JSONExtractString(body, 'sha256') AS sha256""",
    ),
    _view(
        "groups",
        "GroupCompleted",
        """JSONExtractString(body, 'scorer_set') AS scorer_set, JSONExtractFloat(body, 'reward_mean') AS reward_mean,
        JSONExtractFloat(body, 'reward_deviation') AS reward_deviation,
        JSONExtract(body, 'dropped_because', 'Nullable(String)') AS dropped_because,
        JSONLength(body, 'members') AS members""",
        derived=True,
    ),
    _view(
        "batches",
        "BatchCut",
        """JSONExtractInt(body, 'index') AS index, JSONExtractInt(body, 'base_version') AS base_version,
        JSONExtractInt(body, 'policy_floor') AS policy_floor, JSONExtractInt(body, 'tokens_sampled') AS tokens_sampled,
        JSONLength(body, 'members') AS members, JSONLength(body, 'groups') AS groups,
        JSONLength(body, 'groups_stale') + JSONExtractInt(body, 'groups_stale_unnamed') AS groups_stale,
        JSONExtract(body, 'groups_dropped', 'Map(String, Int64)') AS groups_dropped""",
    ),
    _view(
        "steps",
        "StepTaken",
        """JSONExtractString(body, 'kind') AS kind, JSONExtract(body, 'base_version', 'Nullable(Int64)') AS base_version,
        version AS new_version, JSONExtract(body, 'batch_id', 'Nullable(String)') AS batch_id,
        JSONExtract(body, 'metrics', 'Map(String, Float64)') AS metrics,
        JSONExtract(body, 'seconds', 'Map(String, Float64)') AS seconds,
        JSONExtractString(body, 'code_hash') AS code_hash, JSONExtractString(body, 'config_hash') AS config_hash""",
    ),
    _view(
        "weights",
        "WeightsPublished",
        """version, JSONExtract(body, 'base_version', 'Nullable(Int64)') AS base_version,
        JSONExtractString(body, 'kind') AS kind,
        arraySum(arrayMap(file -> JSONExtractInt(file, 'size_bytes'), JSONExtractArrayRaw(body, 'files'))) AS size_bytes""",
    ),
    _view(
        "serving",
        "WeightsLoaded",
        """version, JSONExtractString(body, 'server') AS server, JSONExtractString(body, 'digest') AS digest,
        JSONExtract(body, 'probe_gap', 'Nullable(Float64)') AS probe_gap, JSONExtractFloat(body, 'seconds') AS seconds,
        JSONExtract(body, 'refusal', 'Nullable(String)') AS refusal""",
    ),
    _view(
        "control",
        "ControlIssued",
        """version, JSONExtractString(body, 'command') AS command, JSONExtractString(body, 'requested_by') AS requested_by,
        JSONExtractString(body, 'reason') AS reason""",
    ),
    _view(
        "workers",
        "WorkerSeen",
        """JSONExtractString(body, 'worker') AS worker, JSONExtractString(body, 'role') AS role,
        JSONExtract(body, 'load', 'Map(String, Float64)') AS load""",
    ),
    _view(
        "snapshots",
        "SnapshotTaken",
        """JSONExtractString(body, 'program') AS program, JSONExtractString(body, 'code_version') AS code_version,
        JSONExtractInt(body, 'size_bytes') AS size_bytes, JSONExtractRaw(body, 'positions') AS positions""",
    ),
    _view(
        "rejects",
        "EventRejected",
        """JSONExtractString(body, 'stage') AS stage, JSONExtractString(body, 'reason') AS reason,
        JSONExtractString(body, 'origin', 'topic') AS origin_topic,
        JSONExtractInt(body, 'origin', 'partition') AS origin_partition,
        JSONExtractInt(body, 'origin', 'offset') AS origin_offset""",
    ),
)

TABLE: str = _EVENTS
STATEMENTS: tuple[str, ...] = (*_COLUMNS, *_PROJECTIONS, *_VIEWS)
"run after TABLE"
TABLES: tuple[str, ...] = (
    *("events", "runs", "tasks", "turns", "calls", "observations", "tool_calls", "ends", "trajectories", "attempts"),
    *(
        "rewards",
        "outcomes",
        "selections",
        "groups",
        "batches",
        "steps",
        "weights",
        "serving",
        "control",
        "workers",
        "snapshots",
        "rejects",
    ),
)
"what the SQL of a user may read (sql_guard)"
