"""Curves of a run: the figures of their steps, and pass@1 of their evaluations with intervals."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.reports.evaluations import Evaluation, evaluations_of

POINTS_MAX = 240
"points of one curve: as many as a plot can tell apart"
_Z = 1.959964
"of the normal distribution, for 95 %"

# Neighbouring versions share a point when there are more of them than points.
_STEPS = CachedQuery(
    """
SELECT max(assumeNotNull(version)) AS newest, avgMap(metrics) AS metrics, avgMap(stage_seconds) AS seconds,
       min(timestamp) AS timestamp
FROM events AS steps WHERE run_id = {run:String} AND type = 'StepTaken' AND kind = 'grpo'
GROUP BY intDiv(version, {width:UInt32}) ORDER BY newest
""",
    ("StepTaken",),
)
# The same queries as of the overview: one result serves both.
_NEWEST_VERSION = CachedQuery(queries.NEWEST_VERSION, ("WeightsPublished",))
_RELEASED = CachedQuery(queries.RELEASED, ("ControlIssued",))
_SESSIONS = CachedQuery(queries.SESSIONS, ("TaskSubmitted", "TrajectoryAssembled", "RewardAssigned"), seconds=3.0)


@dataclass(frozen=True)
class StepPoint:
    """The figures of a step, or the mean of neighbouring ones; `version` is the newest that they made."""

    version: int
    timestamp: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class RunCurves:
    """What is drawn of one run."""

    steps: Sequence[StepPoint]
    evaluations: Sequence[Evaluation]

    def points(self, metric: str) -> list[tuple[float, float]]:
        return [(float(step.version), step.metrics[metric]) for step in self.steps if metric in step.metrics]

    def pass_at_1(self, kind: str) -> list[tuple[float, float]]:
        return [(float(one.version), one.pass_at_1) for one in self.complete(kind)]

    def intervals(self, kind: str) -> list[tuple[float, float, float]]:
        return [(float(one.version), *interval(one.pass_at_1, one.ended)) for one in self.complete(kind)]

    def complete(self, kind: str) -> list[Evaluation]:
        return [one for one in self.evaluations if one.kind == kind and one.complete]


def curves_of(answers: QueryCache, run_id: str, now: int) -> RunCurves:
    """The curves of a run. Raises StoreFailed."""
    asked = {"run": run_id}
    newest = answers.ask(_NEWEST_VERSION, asked).rows
    width = max(1, -(-(newest[0][0] if newest else 1) // POINTS_MAX))
    steps = [
        StepPoint(row["newest"], row["timestamp"], row["metrics"], row["seconds"])
        for row in answers.ask(_STEPS, asked | {"width": width}).dicts()
    ]
    released = {version for (version,) in answers.ask(_RELEASED, asked).rows}
    return RunCurves(steps, evaluations_of(answers.ask(_SESSIONS, asked).dicts(), released, now))


def interval(share: float, attempts: int) -> tuple[float, float]:
    """The 95 % interval of a share by Wilson's formula, which also holds near 0 and 1 and for few attempts."""
    if attempts == 0:
        return 0.0, 1.0
    z2 = _Z * _Z / attempts
    middle = (share + z2 / 2) / (1 + z2)
    reach = _Z * math.sqrt(share * (1 - share) / attempts + z2 / (4 * attempts)) / (1 + z2)
    return max(0.0, middle - reach), min(1.0, middle + reach)
