"""The trajectories of a run with what the scorers made of them, filtered and counted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.clickhouse.views import outcomes

ROWS = 50
_REWARDS_MAX = 20_000
"different rewards, rounded, that the histogram is made of"
_SCORERS_MAX = 16
"rewards of one attempt, for the number of rewards in which a page of attempts is found"
_FOUND_MAX = 2_000
"trajectories that a search for words returns"
_OF_OUTCOMES = ("RewardAssigned",)

# Conditions over columns of RewardAssigned: they are applied before the rows are grouped.
_OF_ROWS = """run_id = {run:String}
  AND ({purpose:String} = '' OR purpose = {purpose:String})
  AND ({session:String} = '' OR session_id = {session:String})
  AND ({ended:String} = '' OR ended_by = {ended:String})
  AND ({group:String} = '' OR group_id = {group:String})
  AND ({version:Int64} < 0 OR policy_version = {version:Int64})
  AND ({restricted:UInt8} = 0 OR trajectory_id IN (SELECT arrayJoin(splitByChar(',', {ids:String}))))"""
_OF_OUTCOME = """({outcome:String} = ''
  OR multiIf(excluded = 1, 'excluded', passed = 1, 'passed', 'failed') = {outcome:String})"""
_BETWEEN = "reward >= {low:Float64} AND reward <= {high:Float64}"

_LIST = f"""
SELECT trajectory_id, attempt_id, group_id, session_id, purpose, policy_version, ended_by, timestamp, reward, passed, excluded
FROM ({outcomes(_OF_ROWS)}) WHERE {_OF_OUTCOME} AND {_BETWEEN}
ORDER BY timestamp DESC, attempt_id LIMIT {{limit:UInt32}} OFFSET {{offset:UInt64}}
"""
# Without a condition on outcomes the newest attempts are found first: only their rewards are put together.
_NEWEST = (
    f"attempt_id IN (SELECT attempt_id FROM events WHERE type = 'RewardAssigned' AND {_OF_ROWS} "
    "ORDER BY timestamp DESC LIMIT {scanned:UInt64})"
)
_LIST_OF_NEWEST = _LIST.replace(_OF_ROWS, f"{_OF_ROWS} AND {_NEWEST}")
_HISTOGRAM = CachedQuery(
    f"""
SELECT round(reward, 2) AS rounded, count() AS attempts, countIf(passed = 1 AND excluded = 0) AS passed_attempts,
       countIf(excluded = 1) AS excluded_attempts
FROM ({outcomes(_OF_ROWS)}) WHERE {_OF_OUTCOME}
GROUP BY rounded ORDER BY rounded LIMIT {_REWARDS_MAX}
""",
    _OF_OUTCOMES,
    seconds=5.0,
)
_SESSIONS = CachedQuery(
    """
SELECT ifNull(session_id, '') AS session FROM events WHERE run_id = {run:String} AND type = 'RewardAssigned'
GROUP BY session ORDER BY max(timestamp) DESC LIMIT 200
""",
    _OF_OUTCOMES,
    seconds=5.0,
)
# What the list shows besides: only of the rows of one page.
_DETAILS = """
SELECT attempt_id, substringUTF8(prompt, 1, 160) AS prompt, substringUTF8(ifNull(answer, ''), 1, 80) AS answer, turns
FROM payloads WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id IN {ids:Array(String)}
"""
_SEARCH = f"""
SELECT DISTINCT assumeNotNull(trajectory_id) FROM payloads
WHERE run_id = {{run:String}} AND type = 'TrajectoryAssembled'
  AND (positionCaseInsensitive(transcript, {{word:String}}) > 0
       OR positionCaseInsensitive(ifNull(answer, ''), {{word:String}}) > 0)
LIMIT {_FOUND_MAX}
"""
_OF_STEP = """
SELECT member_trajectories FROM events
WHERE run_id = {run:String} AND type = 'BatchCut' AND base_version = {step:Int64} - 1 ORDER BY offset LIMIT 1
"""


@dataclass(frozen=True)
class TrajectoryFilter:
    """Which trajectories of a run are meant; empty = all."""

    run_id: str
    purpose: str = ""
    session: str = ""
    ended_by: str = ""
    outcome: str = ""
    group_id: str = ""
    version: int | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""
    step: int | None = None
    "made by this version's step: the members of its batch"

    def parameters(self, ids: Sequence[str] | None) -> dict[str, Any]:
        return {
            "run": self.run_id,
            "purpose": self.purpose,
            "session": self.session,
            "ended": self.ended_by,
            "outcome": self.outcome,
            "group": self.group_id,
            "version": -1 if self.version is None else self.version,
            "restricted": int(ids is not None),
            "ids": ",".join(ids or ()),
        }


@dataclass(frozen=True)
class FoundTrajectories:
    """One page of trajectories, newest first, and how the rewards of all of them are spread."""

    rows: Sequence[Mapping[str, Any]]
    more: bool
    rewards: Sequence[tuple[float, int]]
    "rounded reward and how many attempts have it"
    passed: int
    excluded: int

    @property
    def attempts(self) -> int:
        return sum(attempts for _, attempts in self.rewards)


def find_trajectories(answers: QueryCache, asked: TrajectoryFilter, page: int) -> FoundTrajectories:
    """Raises StoreFailed."""
    store = answers.store
    parameters = asked.parameters(_restriction(answers, asked))
    counted = answers.ask(_HISTOGRAM, parameters).rows
    between = {
        "low": -1e308 if asked.low is None else asked.low,
        "high": 1e308 if asked.high is None else asked.high,
        "limit": ROWS + 1,
        "offset": page * ROWS,
        "scanned": (page + 1) * (ROWS + 1) * _SCORERS_MAX,
    }
    any_outcome = not asked.outcome and asked.low is None and asked.high is None
    rows = store.ask(_LIST_OF_NEWEST if any_outcome else _LIST, parameters | between).dicts()
    shown = rows[:ROWS]
    ids = sorted({row["trajectory_id"] for row in shown if row["trajectory_id"]})
    details = {row["attempt_id"]: row for row in store.ask(_DETAILS, {"run": asked.run_id, "ids": ids}).dicts()}
    return FoundTrajectories(
        rows=[row | details.get(row["attempt_id"], {}) for row in shown],
        more=len(rows) > ROWS,
        rewards=[(reward, attempts) for reward, attempts, _, _ in counted],
        passed=sum(row[2] for row in counted),
        excluded=sum(row[3] for row in counted),
    )


def sessions_of(answers: QueryCache, run_id: str) -> list[str]:
    return [session for (session,) in answers.ask(_SESSIONS, {"run": run_id}).rows if session]


def _restriction(answers: QueryCache, asked: TrajectoryFilter) -> list[str] | None:
    """Ids of the trajectories with these words or of this step; None = all."""
    found: set[str] | None = None
    if asked.step is not None:
        rows = answers.store.ask(_OF_STEP, {"run": asked.run_id, "step": asked.step}).rows
        found = set(rows[0][0]) if rows else set()
    for word in asked.text.split():
        # Transcripts are JSON: the word as it stands there.
        needle = json.dumps(word, ensure_ascii=False)[1:-1]
        of_word = {row[0] for row in answers.store.ask(_SEARCH, {"run": asked.run_id, "word": needle}).rows}
        found = of_word if found is None else found & of_word
    return None if found is None else sorted(found)
