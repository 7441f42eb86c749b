"""The views of the trace store by name: what people's SQL, the page and exports read. Made anew whenever it is opened.

No view parses JSON. Those that show texts read `payloads`, the others the light `events`. A derived event may be on the
log twice with one id and is shown once; `run_id` is part of what makes it one, so that a condition on the run reaches
the table and a question about one run reads no other.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from replayground.consumers.clickhouse.columns import MEANINGS, Table, columns_of
from replayground.streams.rules.reward import (
    ATTEMPT_PASSED_SQL,
    ATTEMPT_REWARD_SQL,
    ATTEMPT_VALID_SQL,
    DECISION_SQL,
    VALID_SQL,
)


@dataclass(frozen=True)
class ViewDefinition:
    """A view or table that people may query."""

    name: str
    rows: str
    "what a row is, one phrase"
    sql: str = ""
    "empty for a table"
    columns: Mapping[str, str] = field(default_factory=dict)
    "name and meaning of each column, in order"


_ENVELOPE = (
    *("id", "run_id", "session_id", "task_id", "group_id", "trajectory_id", "attempt_id", "seq", "time", "timestamp"),
    *("purpose", "policy_version", "topic", "partition", "offset"),
)
_PASS_AT = (1, 2, 3, 4, 5, 8, 10, 16, 32, 64)


def _meanings(names: Iterable[str], own: Mapping[str, str]) -> dict[str, str]:
    return {name: own.get(name) or MEANINGS[name] for name in names}


def _of_kind(
    name: str,
    rows: str,
    kind: str,
    table: Table,
    columns: str,
    *,
    renamed: Mapping[str, str] | None = None,
    meanings: Mapping[str, str] | None = None,
    derived: bool = False,
) -> ViewDefinition:
    """A view of one kind of event: its envelope and these columns. `renamed`: name in the view → name in the table."""
    renamed = renamed or {}
    names = columns.split()
    chosen = ", ".join(f"`{renamed[n]}` AS `{n}`" if n in renamed else f"`{n}`" for n in [*_ENVELOPE, *names])
    once = " LIMIT 1 BY run_id, id" if derived else ""
    stored = {n: MEANINGS[renamed[n]] for n in names if n in renamed}
    return ViewDefinition(
        name,
        rows,
        f"SELECT {chosen} FROM {table} WHERE type = '{kind}'{once}",
        _meanings([*_ENVELOPE, *names], {**stored, **(meanings or {})}),
    )


# The same fold as streams.rules.runs: the newest start counts, and only a RunEnded of that start ends the run. Of two
# events with the same number the first on the log counts, hence argMin by offset.
_RUNS = """
SELECT run_id,
       argMinIf(kind, offset, type = 'RunStarted') AS kind,
       argMinIf(job, offset, type = 'RunStarted') AS job,
       argMinIf(seed, offset, type = 'RunStarted') AS seed,
       argMinIf(started_by, offset, start = newest AND type != 'RunEnded') AS started_by,
       fromUnixTimestamp64Micro(minIf(timestamp, type = 'RunStarted'), 'UTC') AS started_at,
       if(countIf(is_end) = 0, NULL, fromUnixTimestamp64Micro(argMinIf(timestamp, offset, is_end), 'UTC')) AS ended_at,
       if(countIf(is_end) = 0, NULL, argMinIf(reason, offset, is_end)) AS reason,
       argMinIf(detail, offset, is_end) AS detail,
       argMinIf(code_version, offset, start = newest AND type != 'RunEnded') AS code_version,
       any(newest) AS starts,
       argMinIf(config, offset, type = 'RunStarted') AS config
FROM
(
    SELECT run_id, type, offset, timestamp, kind, job, seed, start, started_by, reason, detail, code_version, config,
           max(if(type = 'RunResumed', start, 0)) OVER (PARTITION BY run_id) AS newest,
           start = newest AND type = 'RunEnded' AS is_end
    FROM payloads WHERE type IN ('RunStarted', 'RunResumed', 'RunEnded')
)
GROUP BY run_id
HAVING countIf(type = 'RunStarted') > 0
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


# A trajectory counts once, by its first attempt that did not end by infra_error.
_FIRST_ATTEMPTS = """
SELECT run_id, session_id, scorer_set, task_id, trajectory_id, argMin(passed, timestamp) AS solved,
       argMin(ended_by, timestamp) AS ending, any(purpose) AS purpose
FROM outcomes WHERE ended_by != 'infra_error' GROUP BY run_id, session_id, scorer_set, task_id, trajectory_id
"""


def _pass_at(attempts: str) -> str:
    """pass@k of a task: 1 − C(n − c, k)/C(n, k), as a product that stays exact where the binomials are huge."""
    missed = f"({attempts} - successes - i) / ({attempts} - i)"
    return f"if({attempts} - successes < k, 1., 1. - arrayProduct(arrayMap(i -> {missed}, range(k))))"


def _pass_hat(attempts: str) -> str:
    """pass^k of a task: C(c, k)/C(n, k)."""
    return f"if(successes < k, 0., arrayProduct(arrayMap(i -> (successes - i) / ({attempts} - i), range(k))))"


_PASS_AT_K = f"""
SELECT run_id, session_id, scorer_set, any(purpose) AS purpose, toUInt8(k) AS k,
       avgIf({_pass_at("attempts")}, attempts >= k) AS pass_at_k,
       avgIf({_pass_hat("attempts")}, attempts >= k) AS pass_hat_k,
       countIf(attempts >= k) AS tasks, countIf(attempts < k) AS tasks_left_out,
       avgIf({_pass_at("members")}, members >= k) AS pass_at_k_strict,
       avgIf({_pass_hat("members")}, members >= k) AS pass_hat_k_strict,
       countIf(members >= k) AS tasks_strict, countIf(members < k) AS tasks_left_out_strict
FROM
(
    SELECT run_id, session_id, scorer_set, task_id, any(purpose) AS purpose, count() AS members,
           countIf(ending != 'cancelled') AS attempts, countIf(solved = 1 AND ending != 'cancelled') AS successes,
           arrayJoin({list(_PASS_AT)}) AS k
    FROM ({_FIRST_ATTEMPTS})
    GROUP BY run_id, session_id, scorer_set, task_id
)
GROUP BY run_id, session_id, scorer_set, k
HAVING tasks_strict > 0
"""

_COST_PER_SUCCESS = """
SELECT judged.run_id AS run_id, judged.session_id AS session_id, scorer_set, purpose, trajectories, successes,
       paid.attempts AS attempts, paid.cost AS cost_of_attempts, paid.judges AS cost_of_judges,
       cost_of_attempts + cost_of_judges AS cost, if(successes = 0, NULL, cost / successes) AS cost_per_success
FROM
(
    SELECT run_id, ifNull(session_id, '') AS session_id, scorer_set, any(purpose) AS purpose, count() AS trajectories,
           sum(solved) AS successes
    FROM first_attempts GROUP BY run_id, session_id, scorer_set
) AS judged
LEFT ANY JOIN
(
    SELECT run_id, session_id, sumIf(paid, type = 'TrajectoryAssembled') AS cost,
           sumIf(paid, type = 'JudgementMade') AS judges, countIf(type = 'TrajectoryAssembled') AS attempts
    FROM
    (
        SELECT run_id, type, ifNull(session_id, '') AS session_id, any(cost) AS paid FROM events
        WHERE type IN ('TrajectoryAssembled', 'JudgementMade') GROUP BY run_id, type, session_id, id
    )
    GROUP BY run_id, session_id
) AS paid ON judged.run_id = paid.run_id AND judged.session_id = paid.session_id
""".replace("first_attempts", f"({_FIRST_ATTEMPTS})")

_MEMBERS_OF_BATCHES = """
SELECT run_id, id AS batch_id, index AS batch, base_version, timestamp, policy_floor,
       member.1 AS trajectory_id, member.2 AS group_id, member.3 AS reward, member.4 AS advantage,
       member.5 AS trajectory_partition, member.6 AS trajectory_offset
FROM events
ARRAY JOIN arrayZip(member_trajectories, member_groups, member_rewards, member_advantages, member_partitions,
                    member_offsets) AS member
WHERE type = 'BatchCut'
"""

# By rewards of the same run: in a run of replay the trajectories themselves belong to other runs.
_STALENESS = f"""
SELECT cut.run_id AS run_id, cut.batch_id AS batch_id, any(cut.batch) AS batch, any(cut.base_version) AS version,
       fromUnixTimestamp64Micro(any(cut.timestamp), 'UTC') AS time, count() AS trajectories,
       avg(cut.base_version - judged.oldest) AS staleness_mean, max(cut.base_version - judged.oldest) AS staleness_max,
       countIf(isNull(judged.oldest)) AS unversioned,
       sumMap(map(toInt64(ifNull(cut.base_version - judged.oldest, -1)), toUInt64(1))) AS histogram
FROM ({_MEMBERS_OF_BATCHES}) AS cut
LEFT ANY JOIN
(
    SELECT run_id, assumeNotNull(trajectory_partition) AS at_partition, assumeNotNull(trajectory_offset) AS at_offset,
           any(policy_version_oldest) AS oldest
    FROM events WHERE type = 'RewardAssigned' GROUP BY run_id, at_partition, at_offset
) AS judged
ON cut.run_id = judged.run_id AND cut.trajectory_partition = judged.at_partition
   AND cut.trajectory_offset = judged.at_offset
GROUP BY run_id, batch_id
"""

_LINEAGE = f"""
SELECT cut.run_id AS run_id, cut.batch_id AS batch_id, cut.batch AS batch, cut.base_version AS base_version,
       step.new_version AS new_version, cut.group_id AS group_id, cut.trajectory_id AS trajectory_id,
       cut.trajectory_partition AS trajectory_partition, cut.trajectory_offset AS trajectory_offset,
       cut.reward AS reward, cut.advantage AS advantage, fromUnixTimestamp64Micro(cut.timestamp, 'UTC') AS time
FROM ({_MEMBERS_OF_BATCHES}) AS cut
LEFT ANY JOIN
(
    SELECT run_id, ifNull(batch_id, '') AS of_batch, version AS new_version FROM events WHERE type = 'StepTaken'
) AS step ON cut.run_id = step.run_id AND cut.batch_id = step.of_batch
"""

_SERVERS = """
SELECT run_id, server, argMaxIf(loaded.version, loaded.timestamp, isNull(loaded.refusal)) AS version,
       argMax(ifNull(loaded.refusal, ''), loaded.timestamp) AS refusal, countIf(isNull(loaded.refusal)) AS loads,
       countIf(isNotNull(loaded.refusal)) AS refusals, maxIf(loaded.load_seconds, isNull(loaded.refusal)) AS load_seconds_max,
       fromUnixTimestamp64Micro(max(loaded.timestamp), 'UTC') AS time
FROM events AS loaded WHERE type = 'WeightsLoaded' GROUP BY run_id, server
"""

_TOOL_LATENCY = """
SELECT run_id, tool, count() AS calls, countIf(is_error) AS errors, avg(milliseconds) AS mean_ms,
       quantile(0.5)(milliseconds) AS p50_ms, quantile(0.95)(milliseconds) AS p95_ms,
       quantile(0.99)(milliseconds) AS p99_ms, max(milliseconds) AS max_ms
FROM events WHERE type = 'ToolObserved' GROUP BY run_id, tool
"""

# ANY: one row for each observation, whatever calls there are.
_TOOL_CALLS = """
SELECT observed.*, called.arguments AS arguments FROM observations AS observed
LEFT ANY JOIN (SELECT run_id, attempt_id, call_id, arguments FROM calls) AS called
ON observed.run_id = called.run_id AND observed.attempt_id = called.attempt_id AND observed.call_id = called.call_id
"""

_OF_SCORERS = {
    "run_id": "the run",
    "session_id": "demonstrations, train, submitted, or one evaluation",
    "scorer_set": "names and versions of all scorers that judge together",
    "purpose": "train, eval, demonstrate or replay",
}
_OF_MEMBER = {
    "batch_id": "id of the BatchCut",
    "batch": "number of the batch: 0, 1, 2 …",
    "base_version": "weights that the batch trains on",
    "group_id": "the group that the trajectory came in",
    "trajectory_id": "the trajectory",
    "reward": "reward of the trajectory",
    "advantage": "what the trainer was told about it",
}


def _named(names: str, own: Mapping[str, str]) -> dict[str, str]:
    return _meanings(names.split(), own)


_OBSERVATIONS = _of_kind(
    "observations",
    "a result of a tool call",
    "ToolObserved",
    "payloads",
    "call_id tool content is_error error_kind perturbation milliseconds context",
)

VIEWS: tuple[ViewDefinition, ...] = (
    ViewDefinition(
        "events",
        "a message of the log: envelope and figures",
        columns={column.name: column.meaning for column in columns_of("events")},
    ),
    ViewDefinition(
        "payloads",
        "a message of the log with its texts; `body` is the whole event as JSON",
        columns={column.name: column.meaning for column in columns_of("payloads")},
    ),
    ViewDefinition(
        "runs",
        "a run: job, seed, who started it, when and why it ended",
        _RUNS,
        _named(
            "run_id kind job seed started_by started_at ended_at reason detail code_version starts config",
            {
                "kind": "practise, replay, retrain, sft or eval",
                "seed": "seed of the run",
                "started_by": "user and machine of the newest start",
                "started_at": "when it was started first",
                "ended_at": "when it ended; null while it has not",
                "reason": "finished, stopped, failed or taken_over; null while it has not ended",
                "code_version": "version of the code of the newest start",
                "starts": "how often it was resumed",
            },
        ),
    ),
    _of_kind(
        "tasks",
        "a task that was submitted",
        "TaskSubmitted",
        "payloads",
        "prompt reference agent split tags group_size",
    ),
    _of_kind(
        "turns",
        "a turn of the policy",
        "TurnGenerated",
        "payloads",
        "tokens agent text finish_reason milliseconds context versions",
    ),
    _of_kind("calls", "a call of a tool", "ToolCalled", "payloads", "call_id agent tool arguments"),
    _OBSERVATIONS,
    ViewDefinition(
        "tool_calls",
        "a result of a tool call, with the arguments of the call",
        _TOOL_CALLS,
        {**_OBSERVATIONS.columns, "arguments": MEANINGS["arguments"]},
    ),
    _of_kind(
        "agent_messages",
        "a message from one agent to another",
        "AgentMessaged",
        "payloads",
        "sender kind content context tokens_read",
        meanings={"kind": "hand-off, delegation or reply"},
    ),
    _of_kind(
        "ends",
        "the last message of an attempt",
        "RolloutEnded",
        "payloads",
        "ended_by answer reason turns tokens_sampled tokens_read milliseconds cost",
    ),
    _of_kind(
        "trajectories",
        "an attempt with its transcript",
        "TrajectoryAssembled",
        "payloads",
        "ended_by index answer reason turns tokens_sampled policy_version_oldest prompt reference agent split tags "
        "transcript cost",
        derived=True,
    ),
    _of_kind(
        "attempts",
        "the end of an attempt, without its tokens",
        "AttemptEnded",
        "events",
        "ended_by index group_size reason tokens_sampled policy_version_oldest",
        derived=True,
    ),
    _of_kind(
        "rewards",
        "the score of one scorer for one attempt; each scorer set has rows of its own",
        "RewardAssigned",
        "payloads",
        "score verdict ended_by scorer scorer_version index parts evidence excluded_because tokens_sampled "
        "policy_version_oldest scorer_set weight passed trajectory_partition trajectory_offset",
        derived=True,
    ),
    ViewDefinition(
        "outcomes",
        "reward and result of an attempt by one scorer set, once all its scorers have judged it",
        outcomes(),
        _named(
            f"run_id attempt_id scorer_set {' '.join(_IDS)} timestamp time reward passed excluded",
            {
                "reward": "weighted sum of the scores",
                "passed": "1 when every scorer that decides so says so, and at least one does",
                "excluded": "1 when a scorer could not judge it: then it has not passed",
                "timestamp": "of its first score, microseconds since the epoch",
                "time": "of its first score",
            },
        ),
    ),
    _of_kind(
        "judgements",
        "a judgement by a model, or by people together",
        "JudgementMade",
        "payloads",
        "scorer scorer_version judged_by verdict score excluded_because scores votes answers model tokens_in tokens_out "
        "cost milliseconds trajectory_partition trajectory_offset",
        derived=True,
    ),
    _of_kind(
        "verdicts",
        "the verdict of one person on one attempt",
        "VerdictGiven",
        "payloads",
        "scorer scorer_version annotator score comment trajectory_partition trajectory_offset",
    ),
    _of_kind(
        "groups",
        "a group of attempts, completed",
        "GroupCompleted",
        "events",
        "scorer_set reward_mean reward_deviation dropped_because members member_trajectories member_attempts "
        "member_rewards member_advantages member_valid member_passed",
        derived=True,
    ),
    _of_kind(
        "selections",
        "a choice of trajectories",
        "TrajectoriesSelected",
        "events",
        "name runs where_sql trajectories sha256",
        renamed={"runs": "source_runs"},
    ),
    _of_kind(
        "batches",
        "an optimizer batch",
        "BatchCut",
        "events",
        "index base_version policy_floor tokens_sampled members groups groups_stale groups_dropped scorer_sets",
    ),
    _of_kind(
        "steps",
        "an optimizer step",
        "StepTaken",
        "events",
        "kind base_version new_version batch_id metrics seconds code_hash config_hash",
        renamed={"new_version": "version", "seconds": "stage_seconds"},
        meanings={"kind": "initial, sft or grpo", "new_version": "weights that the step made"},
    ),
    _of_kind(
        "weights",
        "a weight version",
        "WeightsPublished",
        "events",
        "version base_version kind files size_bytes batches copied_from_run copied_from_version",
        meanings={"kind": "full, lora or delta", "base_version": "weights that these were made from"},
    ),
    _of_kind(
        "serving",
        "a weight version on a server, loaded or refused",
        "WeightsLoaded",
        "events",
        "version server digest probe_gap seconds refusal",
        renamed={"seconds": "load_seconds"},
    ),
    ViewDefinition(
        "servers",
        "a server of a run, as of its newest load",
        _SERVERS,
        _named(
            "run_id server version refusal loads refusals load_seconds_max time",
            {
                "version": "weights that it loaded and verified last",
                "refusal": "why it refused its newest weights; empty when it serves them",
                "loads": "weights loaded and verified",
                "refusals": "weights refused",
                "load_seconds_max": "longest load",
                "time": "of its newest load or refusal",
            },
        ),
    ),
    _of_kind("controls", "a command to a run", "ControlIssued", "events", "version command requested_by reason sender"),
    _of_kind(
        "alarms",
        "an alarm of a run, or its end",
        "AlarmRaised",
        "events",
        "alarm state detail",
        renamed={"alarm": "kind", "state": "command", "detail": "reason"},
        meanings={
            "alarm": "no_step, no_batch or serving_behind",
            "state": "raised or ended",
            "detail": "one sentence",
        },
    ),
    _of_kind("workers", "a heartbeat of a program", "WorkerSeen", "events", "worker role load"),
    _of_kind(
        "snapshots",
        "a snapshot of a program's state",
        "SnapshotTaken",
        "events",
        "program code_version size_bytes positions",
    ),
    _of_kind(
        "rejects",
        "a rejected message",
        "EventRejected",
        "events",
        "stage reason origin_topic origin_partition origin_offset",
    ),
    ViewDefinition(
        "pass_at_k",
        "pass@k and pass^k of a session by one scorer set, for one k",
        _PASS_AT_K,
        _OF_SCORERS
        | {
            "k": "how many attempts are drawn",
            "pass_at_k": "chance that one of k attempts passes, mean over tasks",
            "pass_hat_k": "chance that all of k attempts pass, mean over tasks",
            "tasks": "tasks with at least k attempts",
            "tasks_left_out": "tasks with fewer",
            "pass_at_k_strict": "the same where cancelled members count as failures",
            "pass_hat_k_strict": "the same where cancelled members count as failures",
            "tasks_strict": "tasks with at least k members, cancelled ones among them",
            "tasks_left_out_strict": "tasks with fewer",
        },
    ),
    ViewDefinition(
        "cost_per_success",
        "what a session cost, and cost for each success by one scorer set",
        _COST_PER_SUCCESS,
        _OF_SCORERS
        | {
            "trajectories": "trajectories that were judged, each by its first attempt that counts",
            "successes": "those that passed",
            "attempts": "attempts paid for, infra errors among them",
            "cost_of_attempts": "of all attempts, by the prices of the config",
            "cost_of_judges": "of all judgements",
            "cost": "of attempts and judges",
            "cost_per_success": "null without a success",
        },
    ),
    ViewDefinition(
        "staleness",
        "how old the trajectories of a batch are",
        _STALENESS,
        _named(
            "run_id batch_id batch version time trajectories staleness_mean staleness_max unversioned histogram",
            _OF_MEMBER
            | {
                "version": "weights that the batch trains on",
                "trajectories": "trajectories of the batch",
                "staleness_mean": "versions between the weights in training and the oldest that sampled a trajectory",
                "staleness_max": "of the oldest trajectory",
                "unversioned": "trajectories without a version",
                "histogram": "trajectories by staleness; -1 for those without a version",
            },
        ),
    ),
    ViewDefinition(
        "tool_latency",
        "calls, errors and milliseconds of one tool in one run",
        _TOOL_LATENCY,
        {
            "run_id": "the run",
            "tool": "name of the tool",
            "calls": "results of the tool",
            "errors": "results that are errors",
            "mean_ms": "mean milliseconds",
            "p50_ms": "median",
            "p95_ms": "95th percentile",
            "p99_ms": "99th percentile",
            "max_ms": "longest",
        },
    ),
    ViewDefinition(
        "lineage",
        "a trajectory in a batch: which step trained on it, and which weights came of that",
        _LINEAGE,
        _named(
            "run_id batch_id batch base_version new_version group_id trajectory_id trajectory_partition "
            "trajectory_offset reward advantage time",
            _OF_MEMBER
            | {"new_version": "weights that the step made; 0 while there is none", "time": "when the batch was cut"},
        ),
    ),
)

_ALIASES = {"control": "controls"}
"older names of views"

TABLES: tuple[str, ...] = (*(view.name for view in VIEWS), *_ALIASES)
"what the SQL of a user may read (sql_guard)"

SQL_BY_VIEW: dict[str, str] = {
    **{view.name: view.sql for view in VIEWS if view.sql},
    **{name: f"SELECT * FROM {view}" for name, view in _ALIASES.items()},
}
"""what makes each view, in an order in which they can be made"""
