"""What a weight version grew from, and which weight versions a trajectory influenced. Pure: consumers.reports.lineage
reads the facts from the trace store, and deploy.operate shows the result.

    version ─► step ─► batch ─► groups ─► rewards ─► trajectories ─► tasks
       └─► the version before ─► … ─► the first of the run ─► a copy of a version of another run ─► …

Only the step that made the version is told in full. Those before it are lines of a list: each is a version too, whose
lineage can be asked for.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Address,
    BatchCut,
    GroupCompleted,
    RunKind,
    StepKind,
    VersionAddress,
    WeightsFile,
)
from replayground.schemas.run import version_address
from replayground.streams.rules.runs import RunState


class LineageReward(Struct, frozen=True, kw_only=True):
    """What one scorer made of an attempt."""

    scorer: str
    scorer_version: str
    score: float | None
    "None for what is no number"
    weight: float
    verdict: str
    evidence: str


class LineageTrajectory(Struct, frozen=True, kw_only=True):
    """One member of a batch."""

    trajectory_id: str
    trajectory: Address
    reward: float
    advantage: float
    passed: bool | None
    run_id: str = ""
    "in which it was played"
    policy_version: int | None = None
    "the oldest weights that sampled it, of its run"
    ended_by: str = ""
    answer: str | None = None
    rewards: list[LineageReward] = []


class LineageGroup(Struct, frozen=True, kw_only=True):
    """Attempts at one task, whose rewards were compared with each other."""

    group_id: str
    task_id: str | None = None
    prompt: str = ""
    scorer_set: str = ""
    reward_mean: float | None = None
    reward_deviation: float | None = None
    trajectories: list[LineageTrajectory] = []


class LineageBatch(Struct, frozen=True, kw_only=True):
    """The batch of a step."""

    batch_id: str
    index: int
    judged_in: str
    "the run whose scorers judged it: for a retraining, the run whose batches it copied"
    scorer_sets: list[str]
    copied_from: str | None = None
    "id of the batch of the other run that it is a copy of"
    groups: list[LineageGroup] = []

    @property
    def trajectories(self) -> list[LineageTrajectory]:
        """All members, in the order of the groups."""
        return [trajectory for group in self.groups for trajectory in group.trajectories]


class LineageSelection(Struct, frozen=True, kw_only=True):
    """Trajectories that an SFT learned from: a selection, or the demonstrations of a run."""

    name: str
    "of the selection; empty for demonstrations"
    runs: list[str]
    where: str
    sha256: str
    trajectories: int
    addresses: list[Address] = []
    "the first ones, unless all are asked for"


class LineageStep(Struct, frozen=True, kw_only=True):
    """A step of the trainer, as one line of a list."""

    version: int
    base_version: int | None
    kind: StepKind
    batch_id: str | None
    groups: int
    trajectories: int
    code_hash: str
    config_hash: str
    timestamp: int


class LineageRun(Struct, frozen=True, kw_only=True):
    """The part of a lineage that one run contributed: its first version up to the one that was asked for or copied."""

    run_id: str
    kind: RunKind
    sources: list[str]
    "runs whose trajectories or batches it used"
    scorers: dict[str, str]
    code_version: str
    seed: int
    steps: list[LineageStep]
    "ascending"
    copied_from: VersionAddress | None = None
    "the version of another run that its first version is a copy of"


class VersionLineage(Struct, frozen=True, kw_only=True):
    """All that a weight version grew from."""

    version: VersionAddress
    files: list[WeightsFile]
    step: LineageStep
    batch: LineageBatch | None
    selection: LineageSelection | None
    runs: list[LineageRun]
    "the run of the version first, then the one that it was copied from, and so on"

    @property
    def steps(self) -> int:
        return sum(len(run.steps) for run in self.runs)

    @property
    def trajectories(self) -> int:
        """Of all steps; one that several steps learned from counts for each."""
        return sum(step.trajectories for run in self.runs for step in run.steps)


class InfluencedStep(Struct, frozen=True, kw_only=True):
    """A step that learned from a trajectory itself."""

    run_id: str
    version: int
    kind: StepKind
    batch_id: str | None = None
    reward: float | None = None
    advantage: float | None = None
    selection: str = ""
    "name of the selection that an SFT learned from"


class InfluencedRun(Struct, frozen=True, kw_only=True):
    """Weight versions of one run that would be others without the trajectory."""

    run_id: str
    kind: RunKind
    first_version: int
    last_version: int
    copied_from: VersionAddress | None = None
    "the influenced version that the run began with; None when the run learned from the trajectory itself"


class TrajectoryLineage(Struct, frozen=True, kw_only=True):
    """Where a trajectory came from, and which weights it influenced."""

    trajectory_id: str
    run_id: str
    trajectory: Address
    task_id: str | None
    group_id: str | None
    prompt: str
    answer: str | None
    ended_by: str
    purpose: str
    policy_version: int | None
    "the oldest weights that sampled it, of its run"
    rewards: dict[str, list[LineageReward]]
    "by the run that judged it"
    steps: list[InfluencedStep]
    runs: list[InfluencedRun]


class Lineage(Struct, frozen=True, kw_only=True):
    """The answer to a question about one of the two; the other is None."""

    version: VersionLineage | None = None
    trajectory: TrajectoryLineage | None = None


def copied_version(state: RunState) -> VersionAddress | None:
    """The version of another run that a run begins with."""
    # Only this field: another release may have written the rest.
    try:
        job = msgspec.json.decode(state.config, type=dict[str, Any]).get("job", {})
        told = job.get("weights_from") if isinstance(job, dict) else None
        return version_address(told) if told else None
    except (msgspec.MsgspecError, BadInput):
        return None


def judged_in(states: Mapping[str, RunState], run_id: str) -> str:
    """The run whose rewards and groups the batches of a run consist of."""
    state = states.get(run_id)
    seen: set[str] = set()
    while state is not None and state.kind == "retrain" and state.sources and state.run_id not in seen:
        seen.add(state.run_id)
        state = states.get(state.sources[0])
    return run_id if state is None else state.run_id


def played_in(states: Mapping[str, RunState], run_id: str) -> list[str]:
    """The runs in which the trajectories of a run were played: itself, or its sources, and theirs."""
    found: dict[str, None] = {}
    waiting = [run_id]
    while waiting:
        state = states.get(name := waiting.pop(0))
        if state is not None and state.kind in ("replay", "retrain", "sft"):
            waiting += [source for source in state.sources if source not in found]
        else:
            found[name] = None
    return list(found)


def path_to(version: int, steps: Iterable[LineageStep]) -> list[LineageStep]:
    """The steps that led to a version within its run, ascending; empty when the version is not among them."""
    by_version = {step.version: step for step in steps}
    path: list[LineageStep] = []
    at: int | None = version
    while at is not None and at in by_version:
        step = by_version.pop(at)
        path.append(step)
        at = step.base_version
    return path[::-1]


def batch_of(
    event: BatchCut,
    judged: str,
    groups: Iterable[GroupCompleted],
    prompts: Mapping[str, str],
    played: Mapping[Address, LineageTrajectory],
) -> LineageBatch:
    """A batch with its groups in its own order. `prompts` are by group, `played` is what is known of the attempts."""
    completed: dict[str, GroupCompleted] = {}
    for group in groups:
        # A run may judge one group by several sets, when its tasks name several lists of scorers.
        if not event.scorer_sets or group.scorer_set in event.scorer_sets:
            completed.setdefault(group.meta.group_id or "", group)
    by_group: dict[str, list[LineageTrajectory]] = {}
    for member in event.members:
        known = played.get(member.trajectory) or LineageTrajectory(
            trajectory_id=member.trajectory_id, trajectory=member.trajectory, reward=0.0, advantage=0.0, passed=None
        )
        told = msgspec.structs.replace(
            known,
            trajectory_id=member.trajectory_id,
            reward=member.reward,
            advantage=member.advantage,
            passed=member.passed,
        )
        by_group.setdefault(member.group_id, []).append(told)
    return LineageBatch(
        batch_id=event.meta.id,
        index=event.index,
        judged_in=judged,
        scorer_sets=event.scorer_sets,
        copied_from=event.meta.causation_id if judged != event.meta.run_id else None,
        groups=[
            _group(group_id, completed.get(group_id), prompts.get(group_id, ""), members)
            for group_id, members in by_group.items()
        ],
    )


def _group(
    group_id: str, group: GroupCompleted | None, prompt: str, trajectories: list[LineageTrajectory]
) -> LineageGroup:
    if group is None:
        return LineageGroup(group_id=group_id, prompt=prompt, trajectories=trajectories)
    return LineageGroup(
        group_id=group_id,
        task_id=group.meta.task_id,
        prompt=prompt,
        scorer_set=group.scorer_set,
        reward_mean=group.reward_mean,
        reward_deviation=group.reward_deviation,
        trajectories=trajectories,
    )


def influenced_runs(
    states: Mapping[str, RunState], steps: Sequence[InfluencedStep], newest: Mapping[str, int]
) -> list[InfluencedRun]:
    """All runs with weight versions that a trajectory influenced, oldest first. `steps` learned from it themselves;
    `newest` are the newest versions of the runs."""
    first: dict[str, int] = {}
    for step in steps:
        first[step.run_id] = min(step.version, first.get(step.run_id, step.version))
    copied: dict[str, VersionAddress] = {}
    # In the order in which they started: a run begins with a version that was there already.
    for state in states.values():
        origin = copied_version(state)
        if origin is None or origin.run_id not in first or origin.version < first[origin.run_id]:
            continue
        # Its first version is the copy, so everything that it made is influenced.
        if state.run_id in newest:
            copied[state.run_id] = origin
            first[state.run_id] = origin.version
    return [
        InfluencedRun(
            run_id=run_id,
            kind=state.kind,
            first_version=first[run_id],
            last_version=newest.get(run_id, first[run_id]),
            copied_from=copied.get(run_id),
        )
        for run_id, state in states.items()
        if run_id in first
    ]


def thinned[T](entries: Sequence[T], count: int) -> list[T]:
    """All of a few entries; of many, evenly chosen ones with the first and the last."""
    if len(entries) <= count:
        return list(entries)
    return [entries[round(place * (len(entries) - 1) / (count - 1))] for place in range(count)]
