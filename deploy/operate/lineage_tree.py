"""A lineage as a tree of text lines. Pure. Long lists are counted and thinned unless all is asked for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from replayground.deploy.terminal_text import one_line
from replayground.streams.rules.lineage import (
    InfluencedRun,
    InfluencedStep,
    Lineage,
    LineageBatch,
    LineageGroup,
    LineageReward,
    LineageRun,
    LineageSelection,
    LineageStep,
    LineageTrajectory,
    TrajectoryLineage,
    VersionLineage,
    thinned,
)

_SHOWN = 4
"entries of a list that is thinned"
_STEPS_SHOWN = 6
_PROMPT_CHARACTERS = 60
_DIGEST_CHARACTERS = 12


@dataclass
class Branch:
    """A line with what hangs below it."""

    text: str
    branches: list["Branch"] = field(default_factory=list)


def tree_of(lineage: Lineage, everything: bool) -> list[str]:
    """The lines of the tree."""
    if lineage.version is not None:
        return list(_lines(_version(lineage.version, everything)))
    assert lineage.trajectory is not None, "a lineage is of a version or of a trajectory"
    return list(_lines(_trajectory_influence(lineage.trajectory, everything)))


def _lines(branch: Branch, first: str = "", below: str = "") -> Iterator[str]:
    yield first + branch.text
    for number, part in enumerate(branch.branches, 1):
        is_last = number == len(branch.branches)
        yield from _lines(part, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))


def _version(lineage: VersionLineage, everything: bool) -> Branch:
    address = lineage.version
    root = Branch(f"version {address.version} of {address.run_id}")
    root.branches += [
        Branch(f"{one_line(file.name, 60)}  sha256 {_digest(file.sha256)}  {file.size_bytes:,} bytes")
        for file in lineage.files
        if file.name.endswith(".safetensors")
    ]
    step = Branch(_made_by(lineage.step))
    if lineage.batch is not None:
        step.branches.append(_batch(lineage.batch, everything))
    elif lineage.selection is not None:
        step.branches.append(_selection(lineage.selection, everything))
    root.branches.append(step)
    grew = Branch(
        f"grew from {_count(lineage.steps, 'step')} in {_count(len(lineage.runs), 'run')}, which learned from "
        f"{_count(lineage.trajectories, 'trajectory')}"
    )
    grew.branches += [_run(run, everything) for run in lineage.runs]
    root.branches.append(grew)
    return root


def _made_by(step: LineageStep) -> str:
    base = "" if step.base_version is None else f" from version {step.base_version}"
    return f"step {step.kind}{base}  code {_digest(step.code_hash)}  config {_digest(step.config_hash)}"


def _batch(batch: LineageBatch, everything: bool) -> Branch:
    judged = f"  judged in {batch.judged_in}" if batch.copied_from else ""
    sets = f"  by {', '.join(one_line(text, 100) for text in batch.scorer_sets)}" if batch.scorer_sets else ""
    text = (
        f"batch {batch.index}: {_count(len(batch.groups), 'group')}, {_count(len(batch.trajectories), 'trajectory')}"
        f"{judged}{sets}"
    )
    return Branch(text, _some([_group(group, everything) for group in batch.groups], "group", everything))


def _group(group: LineageGroup, everything: bool) -> Branch:
    mean = (
        "" if group.reward_mean is None else f"  reward {group.reward_mean:.3g} ± {group.reward_deviation or 0.0:.3g}"
    )
    text = f"group {group.group_id}{mean}  task: {one_line(group.prompt, _PROMPT_CHARACTERS)}"
    return Branch(text, _some([_member(member) for member in group.trajectories], "trajectory", everything))


def _member(member: LineageTrajectory) -> Branch:
    version = "" if member.policy_version is None else f" by version {member.policy_version}"
    text = (
        f"trajectory {member.trajectory_id}  reward {member.reward:.3g}  advantage {member.advantage:+.3g}"
        f"  played in {member.run_id}{version}  {_place(member)}"
    )
    return Branch(text, [Branch(_reward(reward)) for reward in member.rewards])


def _place(member: LineageTrajectory) -> str:
    return f"at {member.trajectory.topic}/{member.trajectory.partition}/{member.trajectory.offset}"


def _reward(reward: LineageReward) -> str:
    score = "no number" if reward.score is None else f"{reward.score:.3g}"
    verdict = "" if reward.verdict == "scored" else f"  {reward.verdict}"
    return (
        f"{one_line(reward.scorer, 40)}:{one_line(reward.scorer_version, 20)}  {score}{verdict}"
        f"  {one_line(reward.evidence, _PROMPT_CHARACTERS)}"
    )


def _selection(selection: LineageSelection, everything: bool) -> Branch:
    named = f"selection {one_line(selection.name, 60)}" if selection.name else "demonstrations"
    digest = f"  sha256 {_digest(selection.sha256)}" if selection.sha256 else ""
    text = (
        f"{named}: {_count(selection.trajectories, 'trajectory')} of {_count(len(selection.runs), 'run')}"
        f"  where {one_line(selection.where, 100) or 'all'}{digest}"
    )
    shown = selection.addresses if everything else selection.addresses[:_SHOWN]
    places = [Branch(f"{place.topic}/{place.partition}/{place.offset}") for place in shown]
    if selection.trajectories > len(shown):
        places.append(Branch(f"… and {selection.trajectories - len(shown):,} more"))
    return Branch(text, places)


def _run(run: LineageRun, everything: bool) -> Branch:
    sources = f"  sources {', '.join(run.sources)}" if run.sources else ""
    scorers = ", ".join(
        f"{one_line(name, 40)}:{one_line(version, 20)}" for name, version in sorted(run.scorers.items())
    )
    text = f"{run.run_id}  {run.kind}  seed {run.seed}  code {one_line(run.code_version, 20)}{sources}"
    branch = Branch(text)
    if scorers:
        branch.branches.append(Branch(f"scorers {scorers}"))
    shown = run.steps if everything else thinned(run.steps, _STEPS_SHOWN)
    if len(shown) < len(run.steps):
        branch.branches.append(Branch(f"{len(run.steps):,} versions, of which {len(shown)} are shown"))
    branch.branches += [Branch(_step_line(step, run)) for step in reversed(shown)]
    return branch


def _step_line(step: LineageStep, run: LineageRun) -> str:
    if step.kind == "initial":
        origin = run.copied_from
        made = "the base model" if origin is None else f"a copy of version {origin.version} of {origin.run_id}"
        return f"version {step.version}: {made}"
    groups = f" in {_count(step.groups, 'group')}" if step.groups else ""
    return f"version {step.version}: {step.kind}, {_count(step.trajectories, 'trajectory')}{groups}"


def _trajectory_influence(lineage: TrajectoryLineage, everything: bool) -> Branch:
    sampled = "" if lineage.policy_version is None else f", sampled by version {lineage.policy_version}"
    root = Branch(f"trajectory {lineage.trajectory_id}")
    root.branches += [
        Branch(f"task {lineage.task_id}: {one_line(lineage.prompt, _PROMPT_CHARACTERS)}"),
        Branch(
            f"played in {lineage.run_id}{sampled}  {lineage.purpose}  {lineage.ended_by}: "
            f"{one_line(lineage.answer or 'no answer', _PROMPT_CHARACTERS)}"
        ),
        Branch(f"at {lineage.trajectory.topic}/{lineage.trajectory.partition}/{lineage.trajectory.offset}"),
    ]
    for run_id, rewards in lineage.rewards.items():
        root.branches.append(Branch(f"judged in {run_id}", [Branch(_reward(reward)) for reward in rewards]))
    steps = Branch(f"{_count(len(lineage.steps), 'step')} learned from it")
    steps.branches = _some([Branch(_influenced_step(step)) for step in lineage.steps], "step", everything)
    root.branches.append(steps)
    if lineage.runs:
        versions = sum(run.last_version - run.first_version + 1 for run in lineage.runs)
        runs = [Branch(_influenced_run(run)) for run in lineage.runs]
        influenced = f"it influenced {_count(versions, 'version')} of {_count(len(runs), 'run')}"
        root.branches.append(Branch(influenced, _some(runs, "run", everything)))
    else:
        root.branches.append(Branch("it influenced no weights"))
    return root


def _influenced_step(step: InfluencedStep) -> str:
    if step.kind == "sft":
        learned = f"selection {one_line(step.selection, 60)}" if step.selection else "demonstrations"
        return f"version {step.version} of {step.run_id}: sft, {learned}"
    return (
        f"version {step.version} of {step.run_id}: {step.kind}, reward {step.reward or 0.0:.3g}, "
        f"advantage {step.advantage or 0.0:+.3g}"
    )


def _influenced_run(run: InfluencedRun) -> str:
    origin = run.copied_from
    began = "" if origin is None else f"  began with version {origin.version} of {origin.run_id}"
    return f"{run.run_id}  {run.kind}  versions {run.first_version} to {run.last_version}{began}"


def _some(branches: Sequence[Branch], what: str, everything: bool) -> list[Branch]:
    """The first few, and how many more there are."""
    if everything or len(branches) <= _SHOWN + 1:
        return list(branches)
    return [*branches[:_SHOWN], Branch(f"… and {_count(len(branches) - _SHOWN, f'more {what}')}")]


def _count(number: int, what: str) -> str:
    plural = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{number:,} {what if number == 1 else plural}"


def _digest(text: str) -> str:
    return text[:_DIGEST_CHARACTERS]
