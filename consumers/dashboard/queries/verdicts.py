"""Attempts of one run that wait for a person, and what people have said."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from replayground.consumers.clickhouse.store import Store
from replayground.schemas.events import Address, HumanQuestion
from replayground.streams.rules.agreement import Level, alpha

QUEUE = 200
"attempts of a queue that are looked at at once"
_VERDICTS_MAX = 100_000
LEVELS: tuple[Level, ...] = ("nominal", "ordinal", "interval")

_ASKED = """
run_id = {run:String} AND type = 'TrajectoryAssembled' AND has(asked_scorers, {scorer:String})
AND ended_by NOT IN ('infra_error', 'cancelled') AND ifNull(purpose, '') != 'demonstrate'
"""
_JUDGED = """
SELECT ifNull(attempt_id, '') FROM events
WHERE run_id = {run:String} AND type = 'JudgementMade' AND scorer = {scorer:String} AND scorer_version = {version:String}
"""
_GIVEN = """
SELECT ifNull(attempt_id, '') FROM events
WHERE run_id = {run:String} AND type = 'VerdictGiven' AND scorer = {scorer:String} AND scorer_version = {version:String}
  AND annotator = {annotator:String}
"""
_WAITING = f"""
SELECT assumeNotNull(trajectory_id) AS id, ifNull(attempt_id, '') AS attempt
FROM events WHERE {_ASKED}
  AND ({{is_chosen:UInt8}} = 0 OR trajectory_id IN {{chosen:Array(String)}})
  AND ifNull(attempt_id, '') NOT IN ({_JUDGED}) AND ifNull(attempt_id, '') NOT IN ({_GIVEN})
ORDER BY if({{is_chosen:UInt8}} = 0, 0, indexOf({{chosen:Array(String)}}, trajectory_id)), timestamp, partition, offset
LIMIT 1 BY attempt_id LIMIT {QUEUE}
"""
_COUNTS = f"""
SELECT uniqExact(attempt_id) AS asked, uniqExactIf(attempt_id, ifNull(attempt_id, '') IN ({_JUDGED})) AS judged
FROM events WHERE {_ASKED}
"""
_VERDICTS = f"""
SELECT ifNull(attempt_id, '') AS attempt, annotator, argMax(score, timestamp) AS score
FROM events WHERE run_id = {{run:String}} AND type = 'VerdictGiven' AND scorer = {{scorer:String}}
  AND scorer_version = {{version:String}} AND isNotNull(events.score)
GROUP BY attempt, annotator LIMIT {_VERDICTS_MAX}
"""
_ADDRESS = """
SELECT topic, partition, offset FROM events
WHERE run_id = {run:String} AND type = 'TrajectoryAssembled' AND trajectory_id = {id:String}
  AND ifNull(attempt_id, '') = {attempt:String}
ORDER BY offset LIMIT 1
"""


@dataclass(frozen=True)
class Agreement:
    """How far people agree on the questions of one scorer."""

    levels: Mapping[Level, float | None]
    scores: Mapping[str, Sequence[float]]
    "of each annotator"
    shared: int
    "attempts that more than one has judged"


def waiting(
    store: Store, run_id: str, question: HumanQuestion, annotator: str, chosen: Sequence[str] | None
) -> list[dict[str, Any]]:
    """Attempts without a judgement, nor a verdict of this person, in the order of the queue. Raises StoreFailed."""
    asked = _parameters(run_id, question) | {"annotator": annotator}
    return store.ask(_WAITING, asked | {"is_chosen": int(chosen is not None), "chosen": list(chosen or ())}).dicts()


def counts(store: Store, run_id: str, question: HumanQuestion) -> dict[str, int]:
    """How many attempts are asked about, and how many of them have a judgement."""
    return store.ask(_COUNTS, _parameters(run_id, question)).dicts()[0]


def agreement(store: Store, run_id: str, question: HumanQuestion) -> Agreement:
    """Over the newest verdict of each person on each attempt."""
    units: defaultdict[str, dict[str, float]] = defaultdict(dict)
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for attempt, annotator, score in store.ask(_VERDICTS, _parameters(run_id, question)).rows:
        if question.scale_low <= score <= question.scale_high:
            units[attempt][annotator] = score
            scores[annotator].append(score)
    levels = {level: alpha(units.values(), level) for level in LEVELS}
    return Agreement(levels, dict(sorted(scores.items())), sum(len(unit) > 1 for unit in units.values()))


def address_of(store: Store, run_id: str, trajectory_id: str, attempt_id: str) -> Address | None:
    """Where an attempt stands on the log; None when the store does not know it."""
    rows = store.ask(_ADDRESS, {"run": run_id, "id": trajectory_id, "attempt": attempt_id}).rows
    return Address(*rows[0]) if rows else None


def _parameters(run_id: str, question: HumanQuestion) -> dict[str, Any]:
    return {"run": run_id, "scorer": question.scorer, "version": question.scorer_version}
