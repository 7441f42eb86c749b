"""The state of a run: one structure, computed from a few queries to the trace store.

Live view, web page and summary share `overview`, so that they never disagree.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.query_cache import CachedQuery, QueryCache
from replayground.consumers.reports.evaluations import Evaluation, complete_ones, evaluations_of
from replayground.consumers.reports.runs import State, job_of, state_of
from replayground.schemas.events import EVENTS
from replayground.schemas.run import FIELD, JobSettings
from replayground.streams.rules.runs import RunState

_RATE_SECONDS = 20
_HEARTBEAT_MICROSECONDS = 60_000_000
_CURVE_POINTS_MAX = 500

# Queries over few rows have no minimum age. The others read much of a run and would run at every insert.

_KINDS = tuple(kind.__name__ for kind in EVENTS)
_STEPS = CachedQuery(queries.STEPS, ("StepTaken",))
_STEP_CURVE = CachedQuery(queries.STEP_CURVE, ("StepTaken",))
_RELEASED = CachedQuery(queries.RELEASED, ("ControlIssued",))
_SERVED = CachedQuery(queries.SERVED, ("WeightsLoaded",))
_NEWEST_VERSION = CachedQuery(queries.NEWEST_VERSION, ("WeightsPublished",))
_COUNTS = CachedQuery(queries.COUNTS_BY_TYPE, _KINDS, seconds=3.0)
_SESSIONS = CachedQuery(queries.SESSIONS, ("TaskSubmitted", "TrajectoryAssembled", "RewardAssigned"), seconds=3.0)
_TOKENS = CachedQuery(queries.TOKENS_SINCE, ("TurnGenerated", "WorkerSeen"), seconds=3.0, moving=("since",))
_WORKERS = CachedQuery(queries.WORKERS, ("WorkerSeen",), seconds=3.0, moving=("since",))

Phase = State | Literal["starting", "demonstrations", "cold start", "evaluating", "training"]


class Step(Struct, frozen=True, kw_only=True):
    """One optimizer step of GRPO."""

    step: int
    version: int
    timestamp: int
    metrics: dict[str, float]
    seconds: dict[str, float]


class ProgramStatus(Struct, frozen=True, kw_only=True):
    """One program, as of its last heartbeat."""

    worker: str
    role: str
    seen: int
    load: dict[str, float]


class ServerStatus(Struct, frozen=True, kw_only=True):
    """What a server last loaded or refused."""

    server: str
    version: int | None
    refusal: str | None


class Overview(Struct, frozen=True, kw_only=True):
    """The state of a run. Times are microseconds since the epoch."""

    run_id: str
    job: str
    kind: str
    seed: int
    state: State
    detail: str
    "why it ended, in one sentence; empty while it has not"
    started_at: int
    ended_at: int | None
    started_by: str
    code_version: str
    starts: int
    "how often it was resumed"
    phase: Phase
    steps: int
    steps_target: int
    "0 = until stopped"
    reward_mean: float | None
    tokens_per_second: float
    rollouts_running: int
    version_published: int | None
    version_by_server: dict[str, int | None]
    servers: list[ServerStatus]
    rejects: int
    "messages that a stage of this run refused"
    rejects_field: int
    "messages on the field that belong to no run and could not be decoded"
    infra_error_alarm: float | None
    "share of the rollouts of the newest version that ended by infra_error, while a worker says that it rises"
    demonstrations: int
    demonstrations_target: int
    sft_progress: float
    finished: bool
    "the last step is taken and evaluated, or RunEnded says finished; a job without a last step needs the RunEnded"
    heldout_pass_at_1: list[Evaluation]
    curves: dict[str, list[dict[str, float]]]
    events: dict[str, int]
    lag: dict[str, int]
    "by stage; empty when it is not known, or the run is over"
    programs: list[ProgramStatus]


class _Sessions(Struct, frozen=True):
    evaluations: list[Evaluation]
    demonstrated: int


def overview(answers: QueryCache, run: RunState, lag: dict[str, int], now: int) -> Overview:
    """Queries the store. `now` is in microseconds; `lag` comes from whoever can ask the log. Raises StoreFailed, and
    BadInput when the config of the run cannot be read."""
    asked = {"run": run.run_id}
    job = job_of(run)
    steps = answers.ask(_STEP_CURVE, asked).dicts()
    sessions = _sessions(answers, run.run_id, now)
    programs = _programs(answers, run.run_id, now)
    servers = [
        ServerStatus(server=server, version=version, refusal=refusal)
        for server, version, refusal in answers.ask(_SERVED, asked).rows
    ]
    counts = answers.ask(_COUNTS, asked).dicts()
    events = {row["type"]: row["events"] for row in counts}
    newest_heartbeat = next((row["newest"] for row in counts if row["type"] == "WorkerSeen"), 0)
    # From both queries: programs that are silent for a minute are not in `programs`, and `counts` may be 3 s old.
    state = state_of(run, max([newest_heartbeat, *(program.seen for program in programs)]), now)
    tokens = _single(answers, _TOKENS, asked | {"since": now - _RATE_SECONDS * 1_000_000})
    finished = run.is_finished or _is_done(job, len(steps), sessions.evaluations)
    return Overview(
        run_id=run.run_id,
        job=run.job,
        kind=run.kind,
        seed=run.seed,
        state=state,
        detail=run.detail,
        started_at=run.started_at,
        ended_at=run.ended_at,
        started_by=run.started_by,
        code_version=run.code_version,
        starts=run.starts,
        phase=state if run.reason is not None else _phase(job, state, finished, bool(steps), sessions, events),
        steps=len(steps),
        steps_target=job.steps,
        reward_mean=steps[-1]["reward_mean"] if steps else None,
        tokens_per_second=float(tokens or 0) / _RATE_SECONDS,
        rollouts_running=int(_gauge(programs, "rollouts", "running")),
        version_published=_single(answers, _NEWEST_VERSION, asked),
        version_by_server={server.server: server.version for server in servers},
        servers=servers,
        rejects=events.get("EventRejected", 0),
        rejects_field=_rejects_of_field(answers),
        infra_error_alarm=_infra_error_alarm(programs),
        demonstrations=sessions.demonstrated,
        demonstrations_target=job.demonstrations,
        sft_progress=_sft_progress(job, bool(steps), sessions.evaluations, programs),
        finished=finished,
        heldout_pass_at_1=sessions.evaluations,
        curves=_curves(steps, sessions.evaluations),
        events=events,
        lag=lag,
        programs=programs,
    )


def grpo_steps(answers: QueryCache, run_id: str) -> list[Step]:
    """The optimizer steps of GRPO in order, with all their metrics."""
    rows = answers.ask(_STEPS, {"run": run_id}).dicts()
    return [_step(number, row) for number, row in enumerate(rows, start=1)]


def _step(number: int, row: dict[str, Any]) -> Step:
    return Step(
        step=number,
        version=row["version"],
        timestamp=row["timestamp"],
        metrics=row["metrics"],
        seconds=row["seconds"],
    )


def _sessions(answers: QueryCache, run_id: str, now: int) -> _Sessions:
    asked = {"run": run_id}
    released = {version for (version,) in answers.ask(_RELEASED, asked).rows}
    rows = answers.ask(_SESSIONS, asked).dicts()
    demonstrated = next((row["ended"] for row in rows if row["session"] == "demonstrations"), 0)
    return _Sessions(evaluations_of(rows, released, now), demonstrated)


def _programs(answers: QueryCache, run_id: str, now: int) -> list[ProgramStatus]:
    rows = answers.ask(_WORKERS, {"run": run_id, "since": now - _HEARTBEAT_MICROSECONDS}).dicts()
    return [ProgramStatus(**row) for row in rows]


def _rejects_of_field(answers: QueryCache) -> int:
    counts = answers.ask(_COUNTS, {"run": FIELD}).dicts()
    return next((row["events"] for row in counts if row["type"] == "EventRejected"), 0)


def _gauge(programs: Sequence[ProgramStatus], role: str, figure: str) -> float:
    return sum(program.load.get(figure, 0.0) for program in programs if program.role == role)


def _infra_error_alarm(programs: Sequence[ProgramStatus]) -> float | None:
    """The highest share of the workers that raise the alarm: each counts the rollouts that it played itself."""
    loads = [program.load for program in programs if program.load.get("infra_errors_rising", 0.0) > 0]
    return max((load.get("infra_error_share", 0.0) for load in loads), default=None)


def _is_done(job: JobSettings, steps: int, evaluations: Sequence[Evaluation]) -> bool:
    """Whether the last step is taken and both evaluations of its version are complete."""
    last = job.last_version
    if last is None:
        return False
    complete = {evaluation.kind for evaluation in evaluations if evaluation.version == last and evaluation.complete}
    return steps >= last - job.first_version and complete == {"sampled", "greedy"}


def _phase(
    job: JobSettings, state: State, finished: bool, has_steps: bool, sessions: _Sessions, events: dict[str, int]
) -> Phase:
    # From the end of a run to its start: the first condition that holds says how far it is.
    if finished:
        return "finished"
    if state != "running":
        return state
    if not all(evaluation.complete for evaluation in sessions.evaluations):
        return "evaluating"
    if has_steps or sessions.evaluations:
        return "training"
    if not events.get("TaskSubmitted"):
        return "starting"
    return "demonstrations" if sessions.demonstrated < job.demonstrations else "cold start"


def _sft_progress(
    job: JobSettings, has_steps: bool, evaluations: Sequence[Evaluation], programs: Sequence[ProgramStatus]
) -> float:
    # Once the cold start is over, a restarted trainer has no progress to report any more.
    is_over = has_steps or any(evaluation.version >= job.first_version for evaluation in evaluations)
    return 1.0 if is_over else _gauge(programs, "trainer", "progress")


def _curves(steps: Sequence[dict[str, Any]], evaluations: Sequence[Evaluation]) -> dict[str, list[dict[str, float]]]:
    def of_kind(kind: str) -> list[dict[str, float]]:
        return [{"x": e.version, "y": e.pass_at_1} for e in complete_ones(evaluations, kind)]

    return {
        "reward": _thinned([{"x": step["version"], "y": step["reward_mean"]} for step in steps]),
        "pass_at_1": _thinned(of_kind("sampled")),
        "pass_at_1_greedy": _thinned(of_kind("greedy")),
        "staleness": _thinned([{"x": step["version"], "y": step["staleness_max"]} for step in steps]),
    }


def _thinned(points: list[dict[str, float]]) -> list[dict[str, float]]:
    """At most _CURVE_POINTS_MAX points: neighbours become their mean, at the x of the last one."""
    # A run without an end has more points than a screen, and the page sends all of them at every refresh.
    width = -(-len(points) // _CURVE_POINTS_MAX)
    if width <= 1:
        return points
    stretches = [points[first : first + width] for first in range(0, len(points), width)]
    return [{"x": s[-1]["x"], "y": sum(point["y"] for point in s) / len(s)} for s in stretches]


def _single(answers: QueryCache, question: CachedQuery, asked: dict[str, Any]) -> Any:
    rows = answers.ask(question, asked).rows
    return rows[0][0] if rows else None
