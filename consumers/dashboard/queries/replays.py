"""Replays from the store: how far one is, and how its rewards differ from those of its sources."""

from collections.abc import Sequence
from typing import Any

import msgspec

from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.clickhouse.views import outcomes
from replayground.schemas.run import FIELD
from replayground.streams.replay.request import RescoreRequest
from replayground.streams.rules.runs import RunState

CHANGES = 20
_JUDGED = """
SELECT uniqExact(attempt_id) FROM events WHERE run_id = {run:String} AND type = 'RewardAssigned'
"""
_TO_JUDGE = """
SELECT uniqExact(attempt_id) FROM events
WHERE run_id IN {sources:Array(String)} AND type = 'TrajectoryAssembled' AND offset < {ends:Array(Int64)}[partition + 1]
"""
_SELECTED = """
SELECT max(trajectories) FROM events WHERE run_id = {field:String} AND type = 'TrajectoriesSelected' AND id = {id:String}
"""


def _judged_by(where: str) -> str:
    return f"""
SELECT attempt_id, any(told.trajectory_id) AS trajectory_id, any(told.group_id) AS group_id,
       argMin(told.reward, told.timestamp) AS reward, argMin(told.passed, told.timestamp) AS passed,
       argMin(told.excluded, told.timestamp) AS excluded
FROM ({outcomes(where)}) AS told GROUP BY attempt_id
"""


_PAIRS = f"""
SELECT attempt_id, old.trajectory_id AS trajectory_id, old.group_id AS group_id, old.reward AS reward_before,
       new.reward AS reward_after, old.passed AS passed_before, new.passed AS passed_after,
       old.excluded AS excluded_before, new.excluded AS excluded_after
FROM ({_judged_by("run_id IN {sources:Array(String)}")}) AS old
INNER JOIN ({_judged_by("run_id = {run:String}")}) AS new USING (attempt_id)
"""
_SIDES = ", ".join(
    f"sum(pairs.{name}_{side}) AS {name}_{side}"
    for name in ("reward", "passed", "excluded")
    for side in ("before", "after")
)
_DIFFERENCES = f"""
SELECT count() AS attempts, countIf(pairs.passed_before = pairs.passed_after) AS agreed,
       countIf(pairs.passed_after > pairs.passed_before) AS to_passed,
       countIf(pairs.passed_after < pairs.passed_before) AS to_failed,
       countIf(pairs.reward_before != pairs.reward_after OR pairs.passed_before != pairs.passed_after
               OR pairs.excluded_before != pairs.excluded_after) AS changed, {_SIDES}
FROM ({_PAIRS}) AS pairs
"""
_GROUPS = f"""
SELECT count() AS groups, countIf(signal_after AND NOT signal_before) AS groups_gained,
       countIf(signal_before AND NOT signal_after) AS groups_lost
FROM
(
    SELECT group_id, min(reward_before) != max(reward_before) AS signal_before,
           min(reward_after) != max(reward_after) AS signal_after
    FROM ({_PAIRS}) WHERE excluded_before = 0 AND excluded_after = 0 GROUP BY group_id HAVING count() > 1
)
"""
_CHANGED = f"""
SELECT * FROM ({_PAIRS})
WHERE reward_before != reward_after OR passed_before != passed_after
ORDER BY abs(reward_after - reward_before) DESC, trajectory_id LIMIT {CHANGES}
"""


def progress(store: Store, run: RunState) -> tuple[int, int]:
    """Attempts that a replay has judged, and how many it is to judge; 0 where that is not known."""
    judged = int(store.ask(_JUDGED, {"run": run.run_id}).rows[0][0])
    try:
        request = msgspec.json.decode(run.request, type=RescoreRequest)
    except msgspec.MsgspecError:  # of another release
        return judged, 0
    if request.selection:
        (chosen,) = store.ask(_SELECTED, {"field": FIELD, "id": request.selection}).rows[0]
        return judged, int(chosen or 0)
    ends = {end.partition: end.offset for end in request.end}
    asked = {
        "sources": list(run.sources),
        "ends": [ends.get(partition, 0) for partition in range(max(ends, default=0) + 1)],
    }
    return judged, int(store.ask(_TO_JUDGE, asked).rows[0][0])


def differences(answers: QueryCache, run_id: str, sources: Sequence[str]) -> dict[str, float]:
    """Sums over all attempts that both sides judged, by the names of streams.rules.comparison. Raises StoreFailed."""
    asked = {"run": run_id, "sources": list(sources)}
    sums, groups = (answers.ask(_cached(sql), asked).dicts()[0] for sql in (_DIFFERENCES, _GROUPS))
    return sums | groups


def greatest_changes(answers: QueryCache, run_id: str, sources: Sequence[str]) -> list[dict[str, Any]]:
    """The attempts whose reward changed most. Raises StoreFailed."""
    return answers.ask(_cached(_CHANGED), {"run": run_id, "sources": list(sources)}).dicts()


def _cached(sql: str) -> CachedQuery:
    # All attempts of both sides are read: while the replay goes on, not at every look.
    return CachedQuery(sql, ("RewardAssigned",), seconds=5.0)
