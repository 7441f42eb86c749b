"""The runs of a field as the trace store has them: the list of runs, the state of each, and its job.

Everything about a run comes from its events on topic `runs` (streams.rules.runs), not from the settings of this
program.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.clickhouse.store import QueryResult
from replayground.consumers.reports.evaluations import evaluations_of, newest_pass_at_1
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Event, Meta, RunEnded, RunResumed, RunStarted
from replayground.schemas.run import JobSettings
from replayground.streams.rules.runs import RunState, fold

State = Literal["running", "finished", "stopped", "failed", "taken_over", "lost"]

# A run without a heartbeat for this long is lost.
_LOST_MICROSECONDS = 30_000_000
_NEAREST = 3
_FACTS: dict[str, type[Event]] = {"RunStarted": RunStarted, "RunResumed": RunResumed, "RunEnded": RunEnded}
_RUN_FACTS = CachedQuery(queries.RUN_FACTS, tuple(_FACTS))
_KINDS = ("StepTaken", "WeightsPublished", "TaskSubmitted", "TrajectoryAssembled", "RewardAssigned", "ControlIssued")
"kinds of events from which the figures of a run in the list are computed"
_COUNTS = CachedQuery(queries.COUNTS_BY_RUN, (*_KINDS, "WorkerSeen"), seconds=2.0)


class UnknownRun(BadInput):
    """The store has no such run, or no such trajectory."""


class RunEntry(Struct, frozen=True, kw_only=True):
    """One run in the list of runs. Times are microseconds since the epoch; null = unknown."""

    run_id: str
    job: str
    "module of the job"
    kind: str
    seed: int
    state: State
    started_at: int
    ended_at: int | None
    steps: int
    steps_target: int
    "0 = until stopped"
    version: int | None
    reward_mean: float | None
    "of the newest batch"
    pass_at_1: float | None
    "of the newest complete evaluation at temperature 1"
    started_by: str


class _Figures(Struct, frozen=True, kw_only=True):
    steps: int = 0
    reward_mean: float | None = None
    version: int | None = None
    pass_at_1: float | None = None


def state_of(run: RunState, newest_heartbeat: int, now: int) -> State:
    """The reason of its RunEnded, else `running`, or `lost` without a heartbeat for half a minute."""
    if run.reason is not None:
        return run.reason
    # The start counts as a sign of life: a run that was just resumed has no new heartbeat yet.
    return "running" if max(newest_heartbeat, run.resumed_at) >= now - _LOST_MICROSECONDS else "lost"


def job_of(run: RunState) -> JobSettings:
    """The job of a run. Raises BadInput when its config cannot be read."""
    # Unknown fields are skipped: the run may have been started by another release.
    try:
        told = msgspec.json.decode(run.config, type=dict[str, Any]).get("job", {})
        known = {name: told[name] for name in JobSettings.__struct_fields__ if name in told}
        return msgspec.convert(known, JobSettings)
    except (msgspec.MsgspecError, TypeError) as error:
        raise BadInput(f"the config of run {run.run_id} cannot be read: {error}") from error


class Runs:
    """The runs in the store. Belongs to one thread at a time. Methods block for their queries and raise StoreFailed."""

    def __init__(self, answers: QueryCache) -> None:
        self._answers = answers
        self._figures: dict[str, tuple[tuple[int, ...], _Figures]] = {}
        self._folded: tuple[QueryResult | None, dict[str, RunState]] = (None, {})

    def states(self) -> dict[str, RunState]:
        """All runs by id, in the order in which they started."""
        answer = self._answers.ask(_RUN_FACTS, {})
        # The cache returns the same object until there are new facts: then the fold is still right.
        if answer is not self._folded[0]:
            self._folded = (answer, fold(_facts(answer.rows)))
        return self._folded[1]

    def find(self, run_id: str | None) -> RunState:
        """The run with this id, or the newest one. Raises UnknownRun."""
        states = self.states()
        if not states:
            raise UnknownRun("there is no run on this field yet")
        if not run_id:
            return list(states.values())[-1]
        if run_id not in states:
            raise UnknownRun(
                f"there is no run {run_id} here; the nearest are {', '.join(_nearest(run_id, list(states)))}"
            )
        return states[run_id]

    def list_runs(self, now: int) -> list[RunEntry]:
        """All runs, newest first."""
        states = self.states()
        counts: dict[str, dict[str, int]] = {}
        heartbeats: dict[str, int] = {}
        for run_id, kind, events, newest in self._answers.ask(_COUNTS, {}).rows:
            counts.setdefault(run_id, {})[kind] = events
            if kind == "WorkerSeen":
                heartbeats[run_id] = newest
        figures = self._figures_of(list(states), counts, now)
        return [
            RunEntry(
                run_id=run.run_id,
                job=run.job,
                kind=run.kind,
                seed=run.seed,
                state=state_of(run, heartbeats.get(run.run_id, 0), now),
                started_at=run.started_at,
                ended_at=run.ended_at,
                steps_target=run.steps_target,
                started_by=run.started_by,
                **msgspec.structs.asdict(figures[run.run_id]),
            )
            for run in reversed(states.values())
        ]

    def _figures_of(
        self, run_ids: Sequence[str], counts: Mapping[str, dict[str, int]], now: int
    ) -> dict[str, _Figures]:
        """Figures by run. Queries only runs whose row counts changed since the last call: old runs cost nothing."""
        rests_on = {run_id: tuple(counts.get(run_id, {}).get(kind, 0) for kind in _KINDS) for run_id in run_ids}
        changed = [run_id for run_id in run_ids if self._figures.get(run_id, ((), None))[0] != rests_on[run_id]]
        if changed:
            found = self._ask_figures(changed, now)
            self._figures |= {run_id: (rests_on[run_id], found[run_id]) for run_id in changed}
        return {run_id: self._figures[run_id][1] for run_id in run_ids}

    def _ask_figures(self, run_ids: Sequence[str], now: int) -> dict[str, _Figures]:
        asked = {"runs": list(run_ids)}
        store = self._answers.store
        steps = {run_id: (count, reward) for run_id, count, reward in store.ask(queries.STEPS_OF_RUNS, asked).rows}
        versions: dict[str, int] = dict(store.ask(queries.VERSIONS_OF_RUNS, asked).rows)
        released: dict[str, set[int]] = {}
        for run_id, version in store.ask(queries.RELEASED_OF_RUNS, asked).rows:
            released.setdefault(run_id, set()).add(version)
        sessions: dict[str, list[dict[str, Any]]] = {}
        for row in store.ask(queries.SESSIONS_OF_RUNS, asked).dicts():
            sessions.setdefault(row["run_id"], []).append(row)
        return {
            run_id: _Figures(
                steps=steps.get(run_id, (0, None))[0],
                reward_mean=steps.get(run_id, (0, None))[1],
                version=versions.get(run_id),
                pass_at_1=newest_pass_at_1(
                    evaluations_of(sessions.get(run_id, []), released.get(run_id, set()), now), "sampled"
                ),
            )
            for run_id in run_ids
        }


def _facts(rows: Iterable[Sequence[Any]]) -> Iterator[Event]:
    """The rows of queries.RUN_FACTS as events, in the order of the log."""
    # Offsets give the order over all runs, because topic runs has one partition.
    facts = [(*fact, run_id) for run_id, told in rows for fact in told]
    for _, kind, event_id, sender, timestamp, body, run_id in sorted(facts, key=lambda fact: fact[0]):
        if kind in _FACTS:
            meta = Meta(id=event_id, run_id=run_id, category="run", topic="runs", sender=sender, timestamp=timestamp)
            yield msgspec.convert({"meta": meta, **msgspec.json.decode(body)}, _FACTS[kind])


def _nearest(run_id: str, known: Sequence[str]) -> list[str]:
    """Known ids that are similar; the newest ones when none is."""
    return difflib.get_close_matches(run_id, known, _NEAREST, 0.3) or list(reversed(known))[:_NEAREST]
