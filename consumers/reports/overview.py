"""How a run stands: one structure, asked of the trace store in a handful of queries.

`overview` is what the live view, the web page and the summary share, so that they never disagree.
"""

import re
from typing import Any, Literal

import msgspec
from msgspec import Struct

from consumers.clickhouse import queries
from consumers.clickhouse.answers import Answers, Question
from consumers.clickhouse.rows import UNDECODABLE
from schemas.events import EVENTS
from schemas.run import Run

_EVALUATION = re.compile(r"eval-v(\d+)-(sampled|greedy)")
_SETTLED_MICROSECONDS = 5_000_000
"an evaluation whose tasks are all ended may still be being submitted; after so long without a new task it is not"
_RATE_SECONDS = 20
_HEARTBEAT_MICROSECONDS = 60_000_000

_STEPS = Question(queries.STEPS, ("StepTaken",))
_RELEASED = Question(queries.RELEASED, ("ControlIssued",))
_SERVED = Question(queries.SERVED, ("WeightsLoaded",))
_NEWEST_VERSION = Question(queries.NEWEST_VERSION, ("WeightsPublished",))
_COUNTS = Question(queries.COUNTS_BY_TYPE, tuple(kind.__name__ for kind in EVENTS), seconds=3.0)
_REJECTED = Question(queries.REJECTED, ("EventRejected", UNDECODABLE))
_SESSIONS = Question(queries.SESSIONS, ("TaskSubmitted", "TrajectoryAssembled", "RewardAssigned"), seconds=3.0)
_TOKENS = Question(queries.TOKENS_SINCE, ("TurnGenerated", "WorkerSeen"), seconds=3.0)
_WORKERS = Question(queries.WORKERS, ("WorkerSeen",), seconds=3.0)

Phase = Literal["starting", "demonstrations", "cold start", "evaluating", "training", "finished"]


class Step(Struct, frozen=True, kw_only=True):
    """One optimizer step of GRPO."""

    step: int
    version: int
    timestamp: int
    metrics: dict[str, float]
    seconds: dict[str, float]


class Evaluation(Struct, frozen=True, kw_only=True):
    """One evaluation of one version."""

    version: int
    session: str
    kind: str
    pass_at_1: float
    tasks: int
    ended: int
    complete: bool


class Program(Struct, frozen=True, kw_only=True):
    """One program, as its last heartbeat tells."""

    worker: str
    role: str
    seen: int
    load: dict[str, float]


class Served(Struct, frozen=True, kw_only=True):
    """What a server last said."""

    server: str
    version: int | None
    refusal: str | None


class Overview(Struct, frozen=True, kw_only=True):
    """How the run stands."""

    run_id: str
    phase: Phase
    steps: int
    steps_target: int
    reward_mean: float | None
    tokens_per_second: float
    rollouts_running: int
    version_published: int | None
    version_by_server: dict[str, int | None]
    servers: list[Served]
    rejects: int
    demonstrations: int
    demonstrations_target: int
    sft_progress: float
    finished: bool
    heldout_pass_at_1: list[Evaluation]
    curves: dict[str, list[dict[str, float]]]
    events: dict[str, int]
    lag: dict[str, int]
    programs: list[Program]


def overview(answers: Answers, run: Run, lag: dict[str, int], now: int) -> Overview:
    """Asks the store. `now` is in microseconds; `lag` is told by whoever can ask the log."""
    asked = {"run": run.run_id}
    steps = grpo_steps(answers, run.run_id)
    evaluations, demonstrated = _sessions(answers, run, now)
    programs = _programs(answers, run.run_id, now)
    servers = [Served(**row) for row in answers.ask(_SERVED, asked).dicts()]
    events: dict[str, int] = dict(answers.ask(_COUNTS, asked).rows)
    tokens = _single(answers, _TOKENS, asked | {"since": now - _RATE_SECONDS * 1_000_000})
    finished = _finished(run, len(steps), evaluations)
    sft_progress = _gauge(programs, "trainer", "progress")
    return Overview(
        run_id=run.run_id,
        phase=_phase(run, finished, steps, evaluations, demonstrated, events),
        steps=len(steps),
        steps_target=run.job.steps,
        reward_mean=steps[-1].metrics.get("reward_mean") if steps else None,
        tokens_per_second=float(tokens or 0) / _RATE_SECONDS,
        rollouts_running=int(_gauge(programs, "rollouts", "running")),
        version_published=_single(answers, _NEWEST_VERSION, asked),
        version_by_server={server.server: server.version for server in servers},
        servers=servers,
        rejects=int(_single(answers, _REJECTED, asked) or 0),
        demonstrations=demonstrated,
        demonstrations_target=run.job.demonstrations,
        sft_progress=1.0 if steps or any(e.version >= run.job.first_version for e in evaluations) else sft_progress,
        finished=finished,
        heldout_pass_at_1=evaluations,
        curves=_curves(steps, evaluations),
        events=events,
        lag=lag,
        programs=programs,
    )


def grpo_steps(answers: Answers, run_id: str) -> list[Step]:
    """The optimizer steps of GRPO, in order. A step that stands on the log twice is counted once."""
    by_version: dict[int, dict[str, Any]] = {}
    for row in answers.ask(_STEPS, {"run": run_id}).dicts():
        body = msgspec.json.decode(row["body"])
        if body["kind"] == "grpo":
            by_version.setdefault(row["version"], body | {"timestamp": row["timestamp"]})
    return [
        Step(
            step=number,
            version=version,
            timestamp=body["timestamp"],
            metrics={name: value for name, value in body["metrics"].items() if value is not None},
            seconds={name: value for name, value in body["seconds"].items() if value is not None},
        )
        for number, (version, body) in enumerate(sorted(by_version.items()), start=1)
    ]


def _sessions(answers: Answers, run: Run, now: int) -> tuple[list[Evaluation], int]:
    """The evaluations in the order of versions, and how many demonstrations have ended."""
    asked = {"run": run.run_id}
    released = {version for (version,) in answers.ask(_RELEASED, asked).rows}
    evaluations: list[Evaluation] = []
    demonstrated = 0
    for row in answers.ask(_SESSIONS, asked).dicts():
        match = _EVALUATION.fullmatch(row["session"])
        if row["session"] == "demonstrations":
            demonstrated = row["ended"]
        if match is None:
            continue
        version = int(match[1])
        settled = version in released or row["newest_task"] < now - _SETTLED_MICROSECONDS
        evaluations.append(
            Evaluation(
                version=version,
                session=row["session"],
                kind=match[2],
                pass_at_1=row["pass_at_1"],
                tasks=row["tasks"],
                ended=row["ended"],
                complete=settled and row["ended"] >= row["tasks"],
            )
        )
    return sorted(evaluations, key=lambda evaluation: (evaluation.version, evaluation.kind)), demonstrated


def _programs(answers: Answers, run_id: str, now: int) -> list[Program]:
    rows = answers.ask(_WORKERS, {"run": run_id, "since": now - _HEARTBEAT_MICROSECONDS}).dicts()
    heartbeats = [(row["seen"], msgspec.json.decode(row["body"])) for row in rows]
    return [
        Program(worker=body["worker"], role=body["role"], seen=seen, load=_numbers(body["load"]))
        for seen, body in heartbeats
    ]


def _numbers(load: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in load.items() if value is not None}


def _gauge(programs: list[Program], role: str, figure: str) -> float:
    return sum(program.load.get(figure, 0.0) for program in programs if program.role == role)


def _finished(run: Run, steps: int, evaluations: list[Evaluation]) -> bool:
    """After the last step, when both evaluations of the last version are complete."""
    last = run.job.first_version + run.job.steps
    complete = {evaluation.kind for evaluation in evaluations if evaluation.version == last and evaluation.complete}
    return steps >= run.job.steps and complete == {"sampled", "greedy"}


def _phase(
    run: Run,
    finished: bool,
    steps: list[Step],
    evaluations: list[Evaluation],
    demonstrated: int,
    events: dict[str, int],
) -> Phase:
    if finished:
        return "finished"
    if evaluations and not all(evaluation.complete for evaluation in evaluations):
        return "evaluating"
    if steps or evaluations:
        return "training"
    if not events.get("TaskSubmitted"):
        return "starting"
    return "demonstrations" if demonstrated < run.job.demonstrations else "cold start"


def _curves(steps: list[Step], evaluations: list[Evaluation]) -> dict[str, list[dict[str, float]]]:
    def of_kind(kind: str) -> list[dict[str, float]]:
        return [{"x": e.version, "y": e.pass_at_1} for e in evaluations if e.kind == kind and e.complete]

    return {
        "reward": [{"x": step.version, "y": step.metrics.get("reward_mean", 0.0)} for step in steps],
        "pass_at_1": of_kind("sampled"),
        "pass_at_1_greedy": of_kind("greedy"),
        "staleness": [{"x": step.version, "y": step.metrics.get("staleness_max", 0.0)} for step in steps],
    }


def _single(answers: Answers, question: Question, asked: dict[str, Any]) -> Any:
    rows = answers.ask(question, asked).rows
    return rows[0][0] if rows else None
