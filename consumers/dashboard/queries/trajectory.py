"""One trajectory: its attempts, the messages of one of them piece by piece, and what the scorers said of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replayground.consumers.clickhouse.store import Store
from replayground.streams.rules.runs import RunState

MESSAGES = 60
"messages of one page"
TEXT_MAX = 4000
"characters of one text on the page; the raw event has all of it"
_MESSAGE_KINDS = "('RolloutStarted', 'TurnGenerated', 'ToolCalled', 'ToolObserved', 'AgentMessaged', 'RolloutEnded')"

_ATTEMPTS = f"""
SELECT run_id, attempt_id, min(timestamp) AS began, max(timestamp) AS newest, max(seq) AS last_seq,
       anyIf(ended_by, type = 'RolloutEnded') AS ended_by, anyIf(reason, type = 'RolloutEnded') AS reason,
       anyIf(turns, type = 'RolloutEnded') AS turns, anyIf(tokens_sampled, type = 'RolloutEnded') AS tokens_sampled,
       anyIf(cost, type = 'RolloutEnded') AS cost, any(group_id) AS group_id, any(task_id) AS task_id,
       any(session_id) AS session_id, any(purpose) AS purpose, min(policy_version) AS policy_version,
       anyIf(worker, type = 'RolloutStarted') AS worker, anyIf(isolation, type = 'RolloutStarted') AS isolation,
       anyIf(seed, type = 'RolloutStarted') AS seed
FROM events WHERE run_id IN {{runs:Array(String)}} AND type IN {_MESSAGE_KINDS} AND trajectory_id = {{id:String}}
GROUP BY run_id, attempt_id ORDER BY began LIMIT 100
"""
# A page reads its own stretch of seq alone, wherever in the attempt it is.
_MESSAGES_BETWEEN = f"""
SELECT type, topic, partition, offset, seq, timestamp, sender, agent, kind, tool, call_id, is_error, error_kind, perturbation,
       milliseconds, tokens, tokens_sampled, finish_reason, context, policy_version, ended_by, reason, turns,
       substringUTF8(multiIf(type = 'TurnGenerated', text, type = 'ToolCalled', arguments, content), 1, {TEXT_MAX}) AS said,
       lengthUTF8(multiIf(type = 'TurnGenerated', text, type = 'ToolCalled', arguments, content)) AS said_length,
       substringUTF8(ifNull(answer, ''), 1, {TEXT_MAX}) AS answer,
       if(type = 'ToolObserved', JSONExtract(body, 'blobs', 'Array(String)'), []) AS blobs
FROM payloads
WHERE run_id = {{run:String}} AND type IN {_MESSAGE_KINDS} AND trajectory_id = {{id:String}}
  AND attempt_id = {{attempt:String}} AND seq BETWEEN {{first:Int32}} AND {{last:Int32}}
ORDER BY seq, offset LIMIT 1 BY seq LIMIT {MESSAGES}
"""
# Of one message: only this kind has the task of an attempt that may still be running.
_TASK = f"""
SELECT substringUTF8(JSONExtractString(body, 'task', 'prompt'), 1, {TEXT_MAX}) AS prompt,
       substringUTF8(JSONExtractString(body, 'task', 'reference'), 1, {TEXT_MAX}) AS reference
FROM payloads WHERE run_id = {{run:String}} AND type = 'RolloutStarted' AND trajectory_id = {{id:String}} LIMIT 1
"""
_END = f"""
SELECT substringUTF8(ifNull(answer, ''), 1, {TEXT_MAX}) AS answer, isNotNull(answer) AS answered
FROM payloads WHERE run_id = {{run:String}} AND type = 'RolloutEnded' AND trajectory_id = {{id:String}}
  AND attempt_id = {{attempt:String}} LIMIT 1
"""
_REWARDS = f"""
SELECT type, topic, partition, offset, run_id, timestamp, scorer, scorer_version, score, weight, passed, verdict,
       excluded_because, parts, substringUTF8(if(type = 'VerdictGiven', comment, evidence), 1, {TEXT_MAX}) AS evidence,
       annotator, model, attempt_id
FROM payloads
WHERE run_id IN {{runs:Array(String)}} AND type IN ('RewardAssigned', 'JudgementMade', 'VerdictGiven')
  AND trajectory_id = {{id:String}}
ORDER BY timestamp, offset LIMIT 1 BY id LIMIT 100
"""
_ADVANTAGE = """
SELECT member_advantages[indexOf(member_trajectories, {id:String})] AS advantage, index, base_version FROM events
WHERE run_id = {run:String} AND type = 'BatchCut' AND has(member_trajectories, {id:String}) ORDER BY offset LIMIT 1
"""


@dataclass(frozen=True)
class FoundTrajectory:
    """A trajectory with all its attempts; `run_id` is the run that played it, which in a replay is another one."""

    trajectory_id: str
    attempts: Sequence[dict[str, Any]]
    attempt: dict[str, Any]
    "the one that is shown"

    @property
    def run_id(self) -> str:
        return str(self.attempt["run_id"])

    @property
    def messages(self) -> int:
        return int(self.attempt["last_seq"] or 0) + 1


def find_trajectory(store: Store, run: RunState, trajectory_id: str, attempt_id: str) -> FoundTrajectory | None:
    """The trajectory with this attempt, or with the one that counts; None when no message of it is in the store."""
    asked = {"runs": [run.run_id, *run.sources], "id": trajectory_id}
    attempts = store.ask(_ATTEMPTS, asked).dicts()
    if not attempts:
        return None
    # The first one that did not end by infra_error counts, else the first.
    counting = next((one for one in attempts if one["ended_by"] != "infra_error"), attempts[0])
    chosen = next((one for one in attempts if one["attempt_id"] == attempt_id), counting)
    return FoundTrajectory(trajectory_id, attempts, chosen)


def messages_of(store: Store, found: FoundTrajectory, first: int) -> list[dict[str, Any]]:
    """The messages from this seq on, one page of them."""
    asked = _parameters(found) | {"first": first, "last": first + MESSAGES - 1}
    return store.ask(_MESSAGES_BETWEEN, asked).dicts()


def task_of(store: Store, found: FoundTrajectory) -> dict[str, Any]:
    """Prompt, reference and, once the attempt has ended, its answer."""
    task = store.ask(_TASK, _parameters(found)).dicts()
    end = store.ask(_END, _parameters(found)).dicts()
    return (
        {"prompt": "", "reference": "", "answer": "", "answered": 0}
        | (task[0] if task else {})
        | (end[0] if end else {})
    )


def rewards_of(store: Store, run: RunState, found: FoundTrajectory) -> list[dict[str, Any]]:
    """What scorers, judges and people said of the attempt, in the run and in the one that played it."""
    rows = store.ask(_REWARDS, {"runs": sorted({run.run_id, found.run_id}), "id": found.trajectory_id}).dicts()
    return [row for row in rows if row["attempt_id"] in (None, found.attempt["attempt_id"])]


def place_in_batch(store: Store, run: RunState, found: FoundTrajectory) -> dict[str, Any] | None:
    """Advantage and batch, when it was trained on."""
    rows = store.ask(_ADVANTAGE, {"run": run.run_id, "id": found.trajectory_id}).dicts()
    return rows[0] if rows else None


def _parameters(found: FoundTrajectory) -> dict[str, Any]:
    return {"run": found.run_id, "id": found.trajectory_id, "attempt": found.attempt["attempt_id"]}
