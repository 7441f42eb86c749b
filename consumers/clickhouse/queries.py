"""Every question we ask of the trace store ourselves. `{run:String}` is the run.

A trajectory counts once, by the first attempt that ended other than by infra_error, as everywhere on the log.
"""

COUNTS_BY_TYPE = """
SELECT type, count() AS events FROM events WHERE run_id = {run:String} GROUP BY type ORDER BY type
"""

# Where the store stands on every partition of the log, and how many rows it has of it, at one moment.
STANDING = """
SELECT topic, partition, max(offset) + 1 AS following, count() AS rows FROM events GROUP BY topic, partition
"""

LAST_EVENTS = """
SELECT topic, partition, max(offset) AS last, argMax(id, offset) AS id FROM events
WHERE type != 'undecodable' GROUP BY topic, partition
"""

STEPS = """
SELECT version, body, timestamp FROM events
WHERE run_id = {run:String} AND type = 'StepTaken' ORDER BY version
"""

# A trajectory that was cancelled, or whose reward is excluded, counts as failed: the strict figure.
SESSIONS = """
SELECT session, tasks, newest_task, ended, if(ended = 0, 0, passed / ended) AS pass_at_1
FROM
(
    SELECT ifNull(session_id, '') AS session, count() AS tasks, max(timestamp) AS newest_task
    FROM events WHERE run_id = {run:String} AND type = 'TaskSubmitted' GROUP BY session
) AS submitted
LEFT JOIN
(
    SELECT ifNull(session_id, '') AS session, uniqExact(trajectory_id) AS ended
    FROM events WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND ended_by != 'infra_error' GROUP BY session
) AS finished USING (session)
LEFT JOIN
(
    SELECT session, sum(first_score) AS passed
    FROM
    (
        SELECT session, trajectory_id, argMin(attempt_score, timestamp) AS first_score
        FROM
        (
            SELECT ifNull(session_id, '') AS session, trajectory_id, attempt_id, min(events.timestamp) AS timestamp,
                   avg(if(verdict = 'scored', ifNull(score, 0), 0)) AS attempt_score
            FROM events
            WHERE run_id = {run:String} AND type = 'RewardAssigned' AND ended_by != 'infra_error'
            GROUP BY session, trajectory_id, attempt_id
        )
        GROUP BY session, trajectory_id
    )
    GROUP BY session
) AS judged USING (session)
ORDER BY session
"""

RELEASED = """
SELECT DISTINCT version FROM control WHERE run_id = {run:String} AND command = 'release'
"""

TOKENS_SINCE = """
SELECT sum(tokens) AS tokens FROM events
WHERE run_id = {run:String} AND type = 'TurnGenerated' AND timestamp >= {since:Int64}
"""

SERVED = """
SELECT JSONExtractString(body, 'server') AS server,
       argMaxIf(version, timestamp, JSONExtractString(body, 'refusal') = '') AS version,
       argMax(JSONExtractString(body, 'refusal'), timestamp) AS refusal
FROM events WHERE run_id = {run:String} AND type = 'WeightsLoaded' GROUP BY server ORDER BY server
"""

NEWEST_VERSION = """
SELECT max(version) AS version FROM events WHERE run_id = {run:String} AND type = 'WeightsPublished'
"""

WORKERS = """
SELECT sender AS worker, argMax(body, timestamp) AS body, max(timestamp) AS seen FROM events
WHERE run_id = {run:String} AND type = 'WorkerSeen' AND timestamp >= {since:Int64} GROUP BY sender ORDER BY sender
"""

REJECTED = """
SELECT count() AS rejected FROM events WHERE type IN ('EventRejected', 'undecodable')
"""

# --- the summary at the end of a run

BEGINNING = """
SELECT min(timestamp) AS first, maxIf(timestamp, type != 'WorkerSeen') AS last,
       minIf(timestamp, type = 'RolloutStarted') AS first_rollout
FROM events WHERE run_id = {run:String}
"""

TRAJECTORIES = """
SELECT uniqExact(id) AS trajectories, uniqExactIf(id, ended_by = 'infra_error') AS infra_error
FROM events WHERE run_id = {run:String} AND type = 'TrajectoryAssembled'
"""

GROUPS = """
SELECT count() AS completed FROM groups WHERE run_id = {run:String}
"""

GROUPS_BY_REASON = """
SELECT dropped_because AS reason, count() AS dropped FROM groups
WHERE run_id = {run:String} AND dropped_because IS NOT NULL GROUP BY reason ORDER BY reason
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

# A program that restarts counts from nothing again, so its seconds are summed by growth, not by difference of ends.
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

# The cold start has no session: it lasts from the last demonstration to the step that ends it.
PHASES = """
SELECT assumeNotNull(session_id) AS phase, min(timestamp) AS first, max(timestamp) AS last FROM events
WHERE run_id = {run:String} AND session_id IS NOT NULL AND type IN ('RolloutStarted', 'RewardAssigned') GROUP BY phase
UNION ALL
SELECT 'cold start' AS phase, maxIf(timestamp, session_id = 'demonstrations') AS first,
       maxIf(timestamp, type = 'StepTaken' AND JSONExtractString(body, 'kind') = 'sft') AS last FROM events
WHERE run_id = {run:String} AND type IN ('RewardAssigned', 'StepTaken') HAVING first > 0 AND last > first
"""

# --- transcripts

# The join is by id and not by time: a reward names the trajectory it judged by trajectory and attempt.
TRANSCRIPTS = """
SELECT trajectory_id, attempt_id, session_id, purpose, policy_version, ended_by, timestamp, score
FROM
(
    SELECT trajectory_id, attempt_id, any(session_id) AS session_id, any(purpose) AS purpose,
           any(policy_version) AS policy_version, any(ended_by) AS ended_by, max(timestamp) AS timestamp,
           avg(score) AS score
    FROM events
    WHERE run_id = {run:String} AND type = 'RewardAssigned'
    GROUP BY trajectory_id, attempt_id
)
WHERE ({purpose:String} = '' OR purpose = {purpose:String})
  AND ({outcome:String} = '' OR ({outcome:String} = 'passed') = (score >= 0.5))
  AND ({session:String} = '' OR session_id = {session:String})
ORDER BY timestamp DESC LIMIT {rows:UInt32}
"""

TRANSCRIPT = """
SELECT body, session_id, purpose, policy_version, ended_by, timestamp, attempt_id FROM events
WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id = {trajectory:String}
ORDER BY ended_by = 'infra_error', timestamp LIMIT 1
"""

REWARDS_OF = """
SELECT DISTINCT JSONExtractString(body, 'scorer') AS scorer, score, verdict, JSONExtractString(body, 'evidence') AS evidence,
       attempt_id
FROM events WHERE run_id = {run:String} AND type = 'RewardAssigned' AND trajectory_id = {trajectory:String}
"""

# Of the trajectories of one session, those with the most turns tell the most; ties by id, so the choice is the same again.
TELLING = """
SELECT trajectory_id FROM
(
    SELECT trajectory_id, avg(score) AS mean_score, any(ended_by) AS ending FROM events
    WHERE run_id = {run:String} AND type = 'RewardAssigned' AND session_id = {session:String} AND verdict = 'scored'
    GROUP BY trajectory_id
) AS judged
LEFT JOIN
(
    SELECT trajectory_id, count() AS turns FROM events
    WHERE run_id = {run:String} AND type = 'TurnGenerated' AND session_id = {session:String} GROUP BY trajectory_id
) AS said USING (trajectory_id)
WHERE ({passed:UInt8} = 1) = (mean_score >= 0.5) AND ending != 'cancelled'
ORDER BY turns DESC, trajectory_id LIMIT 1
"""
