"""The queries of this program to the trace store. `{run:String}` is the id of the run; ClickHouse binds the parameters.

A trajectory counts once, by its first attempt that did not end by infra_error, as everywhere on the log.
"""

from replayground.consumers.clickhouse.columns import Table
from replayground.consumers.clickhouse.migrations import LAST_ID, LAST_OFFSET
from replayground.consumers.clickhouse.migrations import RUN_FACTS as _RUN_FACTS
from replayground.consumers.clickhouse.views import outcomes

# --- the field as a whole; answered by projections


def standing_of(table: Table) -> str:
    """Next offset and number of rows of every partition. One query, so that both figures belong to the same state of
    the store."""
    return (
        f"SELECT topic, partition, max(offset) + 1 AS following, count() AS rows FROM {table} GROUP BY topic, partition"
    )


STANDING = standing_of("events")

# The last decodable event of every partition: its id shows whether the store was filled from this log (TraceWriter).
LAST_EVENTS = f"""
SELECT topic, partition, {LAST_OFFSET} AS last, {LAST_ID} AS id FROM events
GROUP BY topic, partition HAVING id != ''
"""

# For compacted topics, where only some of the offsets are still on the log.
ROWS_AT = """
SELECT count() FROM events
WHERE topic = {topic:String} AND partition = {partition:Int32} AND offset IN {offsets:Array(Int64)}
"""

# HAVING leaves out ids that are no run: `field`, and the empty id of undecodable messages.
RUN_FACTS = f"SELECT run_id, {_RUN_FACTS} AS facts FROM payloads GROUP BY run_id HAVING notEmpty(facts)"

# `newest` of WorkerSeen is the newest heartbeat of a run, which tells a running run from a lost one.
COUNTS_BY_RUN = """
SELECT run_id, type, count() AS events, max(timestamp) AS newest FROM events GROUP BY run_id, type
"""

# --- several runs at once, for the list of runs

# uniqExact: a step that is on the log twice counts once.
STEPS_OF_RUNS = """
SELECT run_id, uniqExact(version) AS steps, argMax(reward, version) AS reward_mean FROM
(
    SELECT run_id, version, if(has(metrics, 'reward_mean'), metrics['reward_mean'], NULL) AS reward FROM events
    WHERE run_id IN {runs:Array(String)} AND type = 'StepTaken' AND kind = 'grpo'
)
GROUP BY run_id
"""

VERSIONS_OF_RUNS = """
SELECT run_id, max(version) AS version FROM events
WHERE run_id IN {runs:Array(String)} AND type = 'WeightsPublished' GROUP BY run_id
"""

# --- the state of one run

COUNTS_BY_TYPE = """
SELECT type, count() AS events, max(timestamp) AS newest FROM events WHERE run_id = {run:String} GROUP BY run_id, type
ORDER BY type
"""

# LIMIT 1 BY: a step that is on the log twice counts once.
STEPS = """
SELECT version, metrics, stage_seconds AS seconds, timestamp FROM events
WHERE run_id = {run:String} AND type = 'StepTaken' AND kind = 'grpo'
ORDER BY version, offset LIMIT 1 BY version
"""

# The figures of the live view alone: a missing one is 0.
STEP_CURVE = """
SELECT version, metrics['reward_mean'] AS reward_mean, metrics['staleness_max'] AS staleness_max
FROM events WHERE run_id = {run:String} AND type = 'StepTaken' AND kind = 'grpo'
ORDER BY version, offset LIMIT 1 BY version
"""

# Evaluations and demonstrations only: nobody waits for the end of training, and its session grows without bound. A
# trajectory that was cancelled, or whose reward is excluded, has not passed and counts: the strict figure. argMin by
# time chooses the first attempt that counts. Both joins are LEFT: a session counts from its first submitted task on.
_FINAL = "run_id IN {runs:Array(String)} AND ended_by != 'infra_error' AND purpose IN ('eval', 'demonstrate')"
SESSIONS_OF_RUNS = f"""
SELECT run_id, session, tasks, newest_task, ended, if(ended = 0, 0, solved / ended) AS pass_at_1
FROM
(
    SELECT run_id, ifNull(session_id, '') AS session, count() AS tasks, max(timestamp) AS newest_task
    FROM events
    WHERE run_id IN {{runs:Array(String)}} AND type = 'TaskSubmitted' AND purpose IN ('eval', 'demonstrate')
    GROUP BY run_id, session
) AS submitted
LEFT JOIN
(
    SELECT run_id, ifNull(session_id, '') AS session, uniqExact(trajectory_id) AS ended
    FROM events WHERE type = 'TrajectoryAssembled' AND {_FINAL} GROUP BY run_id, session
) AS finished USING (run_id, session)
LEFT JOIN
(
    SELECT run_id, session, sum(first_passed) AS solved
    FROM
    (
        SELECT run_id, ifNull(session_id, '') AS session, trajectory_id, argMin(passed, timestamp) AS first_passed
        FROM ({outcomes(_FINAL)})
        GROUP BY run_id, session, trajectory_id
    )
    GROUP BY run_id, session
) AS judged USING (run_id, session)
ORDER BY run_id, session
"""

# For one run, with parameter `run`: QueryCache looks it up to know whether rows of that run were inserted.
SESSIONS = SESSIONS_OF_RUNS.replace("IN {runs:Array(String)}", "= {run:String}")

RELEASED_OF_RUNS = """
SELECT DISTINCT run_id, version FROM control WHERE run_id IN {runs:Array(String)} AND command = 'release'
"""

RELEASED = """
SELECT DISTINCT version FROM control WHERE run_id = {run:String} AND command = 'release'
"""

TOKENS_SINCE = """
SELECT sum(tokens) AS tokens FROM events
WHERE run_id = {run:String} AND type = 'TurnGenerated' AND timestamp >= {since:Int64}
"""

# version = the last one that the server loaded and verified; refusal = that of its newest try, '' when it succeeded.
SERVED = """
SELECT server, argMaxIf(version, timestamp, ifNull(refusal, '') = '') AS version,
       argMax(ifNull(refusal, ''), timestamp) AS refused
FROM events WHERE run_id = {run:String} AND type = 'WeightsLoaded' GROUP BY server ORDER BY server
"""

NEWEST_VERSION = """
SELECT max(version) AS version FROM events WHERE run_id = {run:String} AND type = 'WeightsPublished' GROUP BY run_id, type
"""

WORKERS = """
SELECT argMax(worker, timestamp) AS worker, argMax(role, timestamp) AS role, argMax(load, timestamp) AS load,
       max(timestamp) AS seen FROM events
WHERE run_id = {run:String} AND type = 'WorkerSeen' AND timestamp >= {since:Int64} GROUP BY sender ORDER BY sender
"""

# --- the summary at the end of a run

# Heartbeats do not count for the end: programs also write them while they have nothing left to do.
BEGINNING = """
SELECT min(timestamp) AS first, maxIf(timestamp, type != 'WorkerSeen') AS last,
       minIf(timestamp, type = 'RolloutStarted') AS first_rollout
FROM events WHERE run_id = {run:String}
"""

TRAJECTORIES = """
SELECT uniqExact(id) AS trajectories, uniqExactIf(id, ended_by = 'infra_error') AS infra_error
FROM events WHERE run_id = {run:String} AND type = 'TrajectoryAssembled'
"""

# A share that rises from version to version means that the policy has found out how to be excused.
INFRA_ERRORS_BY_VERSION = """
SELECT policy_version_oldest AS sampled_by,
       uniqExactIf(id, ended_by = 'infra_error') / uniqExact(id) AS share
FROM events WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND sampled_by IS NOT NULL
GROUP BY sampled_by ORDER BY sampled_by
"""

GROUPS = """
SELECT uniqExact(id) AS completed FROM events WHERE run_id = {run:String} AND type = 'GroupCompleted'
"""

GROUPS_BY_REASON = """
SELECT dropped_because, uniqExact(id) AS dropped FROM events
WHERE run_id = {run:String} AND type = 'GroupCompleted' AND dropped_because IS NOT NULL
GROUP BY dropped_because ORDER BY dropped_because
"""

BATCHES = """
SELECT index, base_version, policy_floor, members, groups_stale, timestamp FROM batches
WHERE run_id = {run:String} ORDER BY index
"""

LOADED_BY_SERVER = """
SELECT server, groupUniqArrayIf(version, refusal IS NULL) AS loaded FROM serving
WHERE run_id = {run:String} GROUP BY server ORDER BY server
"""

REFUSALS = """
SELECT server, version, refusal, count() AS times FROM serving
WHERE run_id = {run:String} AND refusal IS NOT NULL GROUP BY server, version, refusal ORDER BY server, version
"""

PUBLISHED = """
SELECT uniqExact(version) AS published FROM events WHERE run_id = {run:String} AND type = 'WeightsPublished'
"""

SAMPLED = """
SELECT sum(tokens) AS tokens, min(timestamp) AS first, max(timestamp) AS last FROM events
WHERE run_id = {run:String} AND type = 'TurnGenerated' AND purpose != 'demonstrate'
"""

# busy_seconds starts from 0 again when a program restarts, so the growth between heartbeats is summed: last minus first
# would be wrong or negative.
BUSY_SECONDS = """
SELECT role, sum(growth) AS busy
FROM
(
    SELECT worker, role, timestamp, load['busy_seconds'] AS busy,
           lagInFrame(busy, 1, busy) OVER (PARTITION BY worker ORDER BY timestamp ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)
               AS before,
           if(busy >= before, busy - before, busy) AS growth
    FROM workers WHERE run_id = {run:String} AND timestamp BETWEEN {first:Int64} AND {last:Int64}
)
GROUP BY role
"""

PEAK_MEMORY = """
SELECT role, max(greatest(load['memory_bytes_peak'], load['memory_bytes'])) AS peak FROM workers
WHERE run_id = {run:String} GROUP BY role ORDER BY role
"""

# The cold start has no session: it lasts from the last reward of a demonstration to the SFT step.
PHASES = """
SELECT assumeNotNull(session_id) AS phase, min(timestamp) AS first, max(timestamp) AS last FROM events
WHERE run_id = {run:String} AND session_id IS NOT NULL AND type IN ('RolloutStarted', 'RewardAssigned') GROUP BY phase
UNION ALL
SELECT 'cold start' AS phase, maxIf(timestamp, session_id = 'demonstrations') AS first,
       maxIf(timestamp, type = 'StepTaken' AND kind = 'sft') AS last FROM events
WHERE run_id = {run:String} AND type IN ('RewardAssigned', 'StepTaken') HAVING first > 0 AND last > first
"""

# --- transcripts

# From rewards alone: they carry everything that the list shows, so that no join with trajectories is needed.
TRANSCRIPTS = f"""
SELECT trajectory_id, attempt_id, session_id, purpose, policy_version, ended_by, timestamp, reward, passed
FROM ({outcomes("run_id = {run:String}")})
WHERE ({{purpose:String}} = '' OR purpose = {{purpose:String}})
  AND ({{outcome:String}} = '' OR ({{outcome:String}} = 'passed') = (passed = 1))
  AND ({{session:String}} = '' OR session_id = {{session:String}})
ORDER BY timestamp DESC LIMIT {{rows:UInt32}}
"""

# Of several attempts, the one that counts: the first that did not end by infra_error, else the first.
TRANSCRIPT = """
SELECT prompt, reference, answer, reason, turns, tokens_sampled, policy_version_oldest AS version, transcript, session_id,
       purpose, ended_by, timestamp, attempt_id FROM payloads
WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id = {trajectory:String}
ORDER BY ended_by = 'infra_error', timestamp LIMIT 1
"""

# DISTINCT: a reward that is on the log twice is shown once.
REWARDS_OF = """
SELECT DISTINCT scorer, score, verdict, evidence, attempt_id FROM payloads
 WHERE run_id = {run:String} AND type = 'RewardAssigned' AND trajectory_id = {trajectory:String}
"""

# The example of a report: the trajectory with the most turns, which shows the most. Ties are broken by id, so that the
# same store gives the same report.
TELLING = f"""
SELECT trajectory_id FROM
(
    SELECT trajectory_id, argMin(passed, timestamp) AS first_passed, any(ended_by) AS ending
    FROM ({outcomes("run_id = {run:String} AND session_id = {session:String} AND ended_by != 'infra_error'")})
    WHERE excluded = 0 GROUP BY trajectory_id
) AS judged
LEFT JOIN
(
    SELECT trajectory_id, count() AS turns FROM events
    WHERE run_id = {{run:String}} AND type = 'TurnGenerated' AND session_id = {{session:String}} GROUP BY trajectory_id
) AS said USING (trajectory_id)
WHERE {{passed:UInt8}} = first_passed AND ending != 'cancelled'
ORDER BY turns DESC, trajectory_id LIMIT 1
"""

# --- lineage

# A step that is on the log twice counts once.
STEPS_TO_VERSION = """
SELECT version, kind, base_version, batch_id, toUInt64(metrics['groups']) AS groups_taken,
       toUInt64(metrics['trajectories']) AS trajectories_taken, code_hash, config_hash, timestamp
FROM events WHERE run_id = {run:String} AND type = 'StepTaken' AND version <= {version:Int64}
ORDER BY version, offset LIMIT 1 BY version
"""

WEIGHTS_FILES = """
SELECT JSONExtractRaw(body, 'files') AS weights FROM payloads
WHERE run_id = {run:String} AND type = 'WeightsPublished' AND offset IN
(
    SELECT offset FROM events
    WHERE run_id = {run:String} AND type = 'WeightsPublished' AND version = {version:Int64} ORDER BY offset LIMIT 1
)
"""

BATCH = """
SELECT id, run_id, causation_id, timestamp, `index`, base_version, scorer_sets,
       arrayZip(member_trajectories, member_groups, member_partitions, member_offsets, member_rewards, member_advantages,
                member_passed) AS named
FROM events WHERE run_id = {run:String} AND type = 'BatchCut' AND id = {batch:String} ORDER BY offset LIMIT 1
"""

GROUPS_NAMED = """
SELECT group_id, task_id, scorer_set, reward_mean, reward_deviation FROM events
WHERE run_id = {run:String} AND type = 'GroupCompleted' AND group_id IN {groups:Array(String)}
ORDER BY partition, offset LIMIT 1 BY id
"""

PLAYED = """
SELECT run_id, partition, offset, trajectory_id, group_id, task_id, attempt_id, purpose, ended_by,
       policy_version_oldest AS sampled_by, answer, prompt
FROM payloads WHERE run_id IN {runs:Array(String)} AND type = 'TrajectoryAssembled'
"""

JUDGED = """
SELECT run_id, attempt_id, scorer, scorer_version, score, ifNull(weight, 0) AS part, verdict,
       substring(evidence, 1, 300) AS told
FROM payloads
WHERE run_id IN {runs:Array(String)} AND type = 'RewardAssigned' AND trajectory_id IN {trajectories:Array(String)}
ORDER BY partition, offset LIMIT 1 BY id
"""

# The first attempt that did not end by infra_error counts, and one that was given up is not learned from (trainer.sft).
DEMONSTRATIONS = """
SELECT min(partition) AS place, min(offset) AS first FROM events
WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND purpose = 'demonstrate' AND ended_by != 'infra_error'
GROUP BY trajectory_id HAVING argMin(ended_by, offset) != 'cancelled' ORDER BY trajectory_id
"""

BATCHES_WITH = """
SELECT run_id, id, base_version, indexOf(member_trajectories, {trajectory:String}) AS at, member_partitions[at] AS place,
       member_offsets[at] AS first, member_rewards[at] AS reward, member_advantages[at] AS advantage
FROM events WHERE type = 'BatchCut' AND has(member_trajectories, {trajectory:String})
ORDER BY offset LIMIT 1 BY id
"""

STEPS_OF_BATCHES = """
SELECT run_id, version, batch_id FROM events
WHERE run_id IN {runs:Array(String)} AND type = 'StepTaken' AND version IN {versions:Array(Int64)}
ORDER BY offset LIMIT 1 BY run_id, version
"""

# Grouped by type too, so that the projection by_run answers it.
NEWEST_VERSIONS = """
SELECT run_id, max(version) AS newest FROM events
WHERE run_id IN {runs:Array(String)} AND type = 'WeightsPublished' GROUP BY run_id, type
"""

SFT_STEPS = """
SELECT run_id, version FROM events
WHERE run_id IN {runs:Array(String)} AND type = 'StepTaken' AND kind = 'sft'
ORDER BY offset LIMIT 1 BY run_id, version
"""
