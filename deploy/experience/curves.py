"""Curves of runs from the log, for TensorBoard and W&B: figures of optimizer steps, and pass@1 of evaluations.

    FOLDER/tensorboard/RUN/events.out.tfevents.…        `tensorboard --logdir FOLDER/tensorboard`
    FOLDER/wandb/offline-run-…-RUN/run-RUN.wandb        `wandb sync FOLDER/wandb/offline-run-*`

The step of a point is the weight version. pass@1 is the share of trajectories that passed, each by its first attempt
that did not end by infra_error, of those whose scorers have all judged.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from replayground.deploy.experience.curve_files import Point, tensorboard_file, wandb_file
from replayground.deploy.local.folder import write_whole
from replayground.schemas.events import Event, RewardAssigned, StepTaken
from replayground.streams.log.protocol import Log
from replayground.streams.rules.reward import has_passed

FORMATS = ("tensorboard", "wandb")
_POLL_EVENTS_MAX, _POLL_SECONDS = 1000, 1.0
_EVALUATION = re.compile(r"eval-v(\d+)-(sampled|greedy)")
_INFRA = "infra_error"

Curves = Mapping[str, Sequence[Point]]
"points of each run, by growing version"


def export_curves(
    log: Log, folder: Path, forms: Sequence[str], runs: frozenset[str], progress: Callable[[int, int], None]
) -> int:
    """Writes the curves of these runs, of all without any; returns of how many. Files of an earlier export are replaced.
    Raises LogUnavailable."""
    curves = curves_on(log, runs, progress)
    for run_id, points in curves.items():
        if "tensorboard" in forms:
            # The name is the same every time, so that a repeated export adds no second file to the run.
            _write(
                folder / "tensorboard" / run_id / f"events.out.tfevents.{_second(points)}.replayground",
                tensorboard_file(points),
            )
        if "wandb" in forms:
            began = datetime.fromtimestamp(_second(points), UTC).strftime("%Y%m%d_%H%M%S")
            _write(
                folder / "wandb" / f"offline-run-{began}-{run_id}" / f"run-{run_id}.wandb",
                wandb_file(run_id, "replayground", points),
            )
    return len(curves)


def curves_on(log: Log, runs: frozenset[str], progress: Callable[[int, int], None]) -> Curves:
    """The curves of these runs on the log, of all without any; only of those that have points."""
    figures: dict[str, dict[int, tuple[float, dict[str, float]]]] = defaultdict(dict)
    evaluations = _Evaluations()
    for event in _events(log, runs, progress):
        if isinstance(event, StepTaken):
            _add(figures[event.meta.run_id], event.new_version, event.meta.timestamp, _of_step(event))
        elif isinstance(event, RewardAssigned):
            evaluations.take(event)
    for run_id, version, at, found in evaluations.figures():
        _add(figures[run_id], version, at, found)
    return {
        run_id: [Point(version, *of_run[version]) for version in sorted(of_run)] for run_id, of_run in figures.items()
    }


def _events(log: Log, runs: frozenset[str], progress: Callable[[int, int], None]) -> Iterator[Event]:
    topics = ["steps", "rewards"]
    total = sum(end.offset for end in log.end_positions(topics))
    read = 0
    reader = log.reader(topics, run_id=runs or None)
    try:
        while not reader.caught_up():
            deliveries = reader.poll(_POLL_EVENTS_MAX, _POLL_SECONDS)
            for event in (delivery.event for delivery in deliveries):
                if event is not None and (not runs or event.meta.run_id in runs):
                    yield event
            read += len(deliveries)
            progress(read, max(read, total))
    finally:
        reader.close()


def _of_step(event: StepTaken) -> dict[str, float]:
    group = "steps" if event.kind == "grpo" else event.kind
    return {f"{group}/{name}": value for name, value in event.metrics.items()} | {
        f"seconds/{name}": value for name, value in event.seconds.items()
    }


def _add(
    of_run: dict[int, tuple[float, dict[str, float]]], version: int, microseconds: int, found: dict[str, float]
) -> None:
    """Adds figures to a version. What is there stays: a step that is on the log twice counts once."""
    at, there = of_run.get(version, (microseconds / 1e6, {}))
    of_run[version] = at, found | there


class _Evaluations:
    """Rewards of evaluations, by run, session, scorer set, trajectory and attempt."""

    def __init__(self) -> None:
        self._rewards: dict[tuple[str, str, str], dict[str, dict[str, dict[str, RewardAssigned]]]] = {}

    def take(self, event: RewardAssigned) -> None:
        meta = event.meta
        if meta.session_id is None or not _EVALUATION.fullmatch(meta.session_id) or event.ended_by == _INFRA:
            return
        of_session = self._rewards.setdefault((meta.run_id, meta.session_id, event.scorer_set), {})
        of_trajectory = of_session.setdefault(meta.trajectory_id or "", {})
        of_trajectory.setdefault(meta.attempt_id or "", {})[meta.id] = event

    def figures(self) -> Iterator[tuple[str, int, int, dict[str, float]]]:
        """Run, version, time and figures of every evaluation."""
        sets = {run_id: {key[2] for key in self._rewards if key[0] == run_id} for run_id, _, _ in self._rewards}
        for (run_id, session, scorer_set), trajectories in self._rewards.items():
            match = _EVALUATION.fullmatch(session)
            assert match is not None
            judged = [rewards for attempts in trajectories.values() if (rewards := _first(attempts))]
            if not judged:
                continue
            # Named only where runs were judged by several.
            name = f"evaluation/pass_at_1_{match[2]}" + (f" {scorer_set}" if len(sets[run_id]) > 1 else "")
            at = min(reward.meta.timestamp for rewards in judged for reward in rewards)
            yield run_id, int(match[1]), at, {name: sum(map(has_passed, judged)) / len(judged)}


def _first(attempts: Mapping[str, Mapping[str, RewardAssigned]]) -> list[RewardAssigned]:
    """The rewards of the first attempt that all of its scorers have judged; none when there is no such attempt."""
    whole = [
        list(rewards.values())
        for rewards in attempts.values()
        if len(rewards) >= max(len(reward.scorers) for reward in rewards.values())
    ]
    return min(whole, key=lambda rewards: min(reward.meta.timestamp for reward in rewards), default=[])


def _second(points: Sequence[Point]) -> int:
    return int(points[0].at_seconds)


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, data)
