"""Lineages from the trace store: the facts of streams.rules.lineage, read by key.

Whatever the length of a run, a lineage reads its steps (without their metrics), one batch, and what belongs to that
batch. Selections are the exception: their addresses are on the log alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.store import Store
from replayground.consumers.reports.runs import UnknownRun
from replayground.schemas.events import (
    Address,
    BatchCut,
    BatchMember,
    GroupCompleted,
    Meta,
    TrajectoriesSelected,
    VersionAddress,
    WeightsFile,
)
from replayground.streams.replay.selection import TOPIC, addresses_of
from replayground.streams.rules.lineage import (
    InfluencedStep,
    Lineage,
    LineageBatch,
    LineageReward,
    LineageRun,
    LineageSelection,
    LineageStep,
    LineageTrajectory,
    TrajectoryLineage,
    VersionLineage,
    batch_of,
    copied_version,
    influenced_runs,
    judged_in,
    path_to,
    played_in,
)
from replayground.streams.rules.runs import RunState

_ADDRESSES_SHOWN = 100
"of a selection, unless all are asked for"
_NOT_LEARNED = ("infra_error", "cancelled")
"an SFT leaves attempts out that ended so (trainer.sft)"

type Selections = Callable[[], Sequence[TrajectoriesSelected]]
"reads all selections from the log"


class Lineages:
    """Answers about lineages. Every call blocks for its queries. Raises UnknownRun and StoreFailed."""

    def __init__(self, store: Store, states: Mapping[str, RunState], selections: Selections) -> None:
        """`states` are in the order in which the runs started."""
        self._store, self._states, self._selections = store, states, selections

    def of(self, text: str, all_addresses: bool = False) -> Lineage:
        """The lineage of RUN, which means its newest version, of RUN:VERSION or of a trajectory by its id. The beginning
        of a run's id is enough. Raises UnknownRun."""
        beginning, colon, number = text.rpartition(":")
        if colon and number.isascii() and number.isdigit() and (found := self._only_run(beginning)):
            address = VersionAddress(run_id=found, version=int(number))
            return Lineage(version=self.of_version(address, all_addresses))
        if found := self._only_run(text):
            rows = self._store.ask(queries.NEWEST_VERSION, {"run": found}).rows
            if not rows:
                raise UnknownRun(f"{found} has published no weights")
            return Lineage(version=self.of_version(VersionAddress(run_id=found, version=rows[0][0]), all_addresses))
        return Lineage(trajectory=self.of_trajectory(text))

    def _only_run(self, beginning: str) -> str | None:
        """The run whose id is this or begins with this; None when there is none. Raises UnknownRun for several."""
        if not beginning or beginning in self._states:
            return beginning or None
        found = [run_id for run_id in self._states if run_id.startswith(beginning)]
        if len(found) > 1:
            raise UnknownRun(f"{beginning} is the beginning of {len(found)} runs: {', '.join(found)}")
        return found[0] if found else None

    def of_version(self, address: VersionAddress, all_addresses: bool = False) -> VersionLineage:
        """All that a version grew from. Raises UnknownRun when the run has no such version."""
        runs = self._runs_of(address)
        if not runs or not runs[0].steps:
            rows = self._store.ask(queries.NEWEST_VERSION, {"run": address.run_id}).rows
            newest = f"its newest is {rows[0][0]}" if rows else "it has published no weights"
            raise UnknownRun(f"{address.run_id} has no version {address.version}: {newest}")
        step = runs[0].steps[-1]
        # A copy was made by the step of the run that it was copied from.
        maker, made_by = next(
            ((run, run.steps[-1]) for run in runs if run.steps and run.steps[-1].kind != "initial"), (runs[0], step)
        )
        return VersionLineage(
            version=address,
            files=self._files(address),
            step=made_by,
            batch=self._batch(maker.run_id, made_by.batch_id) if made_by.batch_id else None,
            selection=self._learned_from(maker, all_addresses) if made_by.kind == "sft" else None,
            runs=runs,
        )

    def _runs_of(self, address: VersionAddress) -> list[LineageRun]:
        """The run of the version, the run that it was copied from, and so on."""
        found: list[LineageRun] = []
        at: VersionAddress | None = address
        while at is not None and at.run_id in self._states and all(run.run_id != at.run_id for run in found):
            state = self._states[at.run_id]
            asked = {"run": at.run_id, "version": at.version}
            rows = self._store.ask(queries.STEPS_TO_VERSION, asked).dicts()
            steps = path_to(at.version, map(_step, rows))
            origin = copied_version(state)
            found.append(
                LineageRun(
                    run_id=state.run_id,
                    kind=state.kind,
                    sources=list(state.sources),
                    scorers=state.scorers,
                    code_version=state.code_version,
                    seed=state.seed,
                    steps=steps,
                    copied_from=origin,
                )
            )
            at = origin if steps else None
        return found

    def _files(self, address: VersionAddress) -> list[WeightsFile]:
        asked = {"run": address.run_id, "version": address.version}
        rows = self._store.ask(queries.WEIGHTS_FILES, asked).rows
        return msgspec.json.decode(rows[0][0], type=list[WeightsFile]) if rows else []

    def _batch(self, run_id: str, batch_id: str) -> LineageBatch | None:
        rows = self._store.ask(queries.BATCH, {"run": run_id, "batch": batch_id}).dicts()
        if not rows:
            return None
        event = _batch_cut(rows[0])
        judged = judged_in(self._states, run_id)
        named = {"run": judged, "groups": sorted({member.group_id for member in event.members})}
        groups = [_group_completed(row) for row in self._store.ask(queries.GROUPS_NAMED, named).dicts()]
        played = self._played_at(run_id, [member.trajectory for member in event.members])
        rewards = self._rewards([judged], sorted({member.trajectory_id for member in event.members}))
        by_address = {
            place: _trajectory(row, place, rewards.get((judged, row["attempt_id"]), []))
            for place, row in played.items()
        }
        prompts = {str(row["group_id"]): str(row["prompt"]) for row in played.values()}
        return batch_of(event, judged, groups, prompts, by_address)

    def _played_at(self, run_id: str, places: Sequence[Address]) -> dict[Address, dict[str, Any]]:
        if not places:
            return {}
        pairs = ", ".join(f"({int(place.partition)}, {int(place.offset)})" for place in places)
        statement = f"{queries.PLAYED} AND topic = '{TOPIC}' AND (partition, offset) IN ({pairs})"
        rows = self._store.ask(statement, {"runs": played_in(self._states, run_id)}).dicts()
        return {Address(TOPIC, row["partition"], row["offset"]): row for row in rows}

    def _rewards(
        self, runs: Sequence[str], trajectories: Sequence[str]
    ) -> dict[tuple[str, str | None], list[LineageReward]]:
        """By the run that judged and the attempt."""
        found: dict[tuple[str, str | None], list[LineageReward]] = {}
        for row in self._store.ask(queries.JUDGED, {"runs": list(runs), "trajectories": list(trajectories)}).dicts():
            place = (row.pop("run_id"), row.pop("attempt_id"))
            reward = LineageReward(weight=row.pop("part"), evidence=row.pop("told"), **row)
            found.setdefault(place, []).append(reward)
        return found

    def _learned_from(self, run: LineageRun, all_addresses: bool) -> LineageSelection | None:
        """What the SFT of a run learned from."""
        state = self._states[run.run_id]
        if state.kind != "sft":
            rows = self._store.ask(queries.DEMONSTRATIONS, {"run": run.run_id}).rows
            places = [Address(TOPIC, partition, offset) for partition, offset in rows]
            return LineageSelection(
                name="",
                runs=[run.run_id],
                where="purpose = 'demonstrate'",
                sha256="",
                trajectories=len(places),
                addresses=places if all_addresses else places[:_ADDRESSES_SHOWN],
            )
        selected = self._selection_of(state)
        if selected is None:
            return None
        places = list(addresses_of(selected))
        return LineageSelection(
            name=selected.name,
            runs=selected.runs,
            where=selected.where,
            sha256=selected.sha256,
            trajectories=len(places),
            addresses=places if all_addresses else places[:_ADDRESSES_SHOWN],
        )

    def _selection_of(self, state: RunState) -> TrajectoriesSelected | None:
        asked = selection_id(state)
        return next((event for event in self._selections() if event.meta.id == asked), None)

    def of_trajectory(self, trajectory_id: str) -> TrajectoryLineage:
        """Where a trajectory came from and what it influenced. Raises UnknownRun when there is none with this id."""
        runs = list(self._states)
        asked = {"runs": runs, "trajectory": trajectory_id}
        # The first attempt that did not end by infra_error counts, as everywhere.
        statement = (
            f"{queries.PLAYED} AND trajectory_id = {{trajectory:String}} ORDER BY ended_by = 'infra_error', timestamp"
        )
        rows = self._store.ask(statement, asked).dicts()
        if not rows:
            raise UnknownRun(
                f"there is neither a run nor a trajectory {trajectory_id}: `replayground runs` lists the runs"
            )
        places = {Address(TOPIC, row["partition"], row["offset"]) for row in rows}
        row = rows[0]
        learned = {
            Address(TOPIC, row["partition"], row["offset"]) for row in rows if row["ended_by"] not in _NOT_LEARNED
        }
        steps = [*self._steps_with(trajectory_id, places), *self._sft_with(row, learned)]
        newest = {str(run): int(version) for run, version in self._store.ask(queries.NEWEST_VERSIONS, asked).rows}
        rewards = self._rewards(runs, [trajectory_id])
        return TrajectoryLineage(
            trajectory_id=trajectory_id,
            run_id=row["run_id"],
            trajectory=Address(TOPIC, row["partition"], row["offset"]),
            task_id=row["task_id"],
            group_id=row["group_id"],
            prompt=row["prompt"],
            answer=row["answer"],
            ended_by=row["ended_by"],
            purpose=row["purpose"] or "",
            policy_version=row["sampled_by"],
            rewards={run: found for (run, attempt), found in rewards.items() if attempt == row["attempt_id"]},
            steps=steps,
            runs=influenced_runs(self._states, steps, newest),
        )

    def _steps_with(self, trajectory_id: str, places: set[Address]) -> list[InfluencedStep]:
        """Steps whose batch has the trajectory as a member."""
        batches = self._store.ask(queries.BATCHES_WITH, {"trajectory": trajectory_id}).dicts()
        members = {row["id"]: row for row in batches if Address(TOPIC, row["place"], row["first"]) in places}
        versions = sorted({row["base_version"] + 1 for row in batches})
        asked = {"runs": sorted({row["run_id"] for row in batches}), "versions": versions}
        taken = self._store.ask(queries.STEPS_OF_BATCHES, asked).dicts() if batches else []
        return [
            InfluencedStep(
                run_id=step["run_id"],
                version=step["version"],
                kind="grpo",
                batch_id=step["batch_id"],
                reward=members[step["batch_id"]]["reward"],
                advantage=members[step["batch_id"]]["advantage"],
            )
            for step in taken
            if step["batch_id"] in members
        ]

    def _sft_with(self, row: Mapping[str, Any], places: set[Address]) -> list[InfluencedStep]:
        """SFT steps that learned from the trajectory: of a cold start, and on selections."""
        runs = [state.run_id for state in self._states.values() if state.kind == "sft"]
        if row["purpose"] == "demonstrate" and row["ended_by"] not in _NOT_LEARNED:
            runs.append(row["run_id"])
        taken = self._store.ask(queries.SFT_STEPS, {"runs": runs}).rows if runs else []
        found: list[InfluencedStep] = []
        for run_id, version in taken:
            state = self._states[run_id]
            selected = self._selection_of(state) if state.kind == "sft" else None
            if selected is None and state.kind == "sft":
                continue
            if selected is None or places & set(addresses_of(selected)):
                name = "" if selected is None else selected.name
                found.append(InfluencedStep(run_id=run_id, version=version, kind="sft", selection=name))
        return found


def selection_id(state: RunState) -> str | None:
    """The id of the selection that a run was asked to use."""
    try:
        asked = msgspec.json.decode(state.request, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    return asked.get("selection") or None


def _step(row: Mapping[str, Any]) -> LineageStep:
    figures = {"groups": row["groups_taken"], "trajectories": row["trajectories_taken"]}
    return msgspec.convert({**row, **figures}, LineageStep)


def _batch_cut(row: Mapping[str, Any]) -> BatchCut:
    """A row of queries.BATCH as the event, as far as a lineage needs it."""
    members = [
        BatchMember(
            trajectory_id=trajectory_id,
            group_id=group_id,
            trajectory=Address(TOPIC, partition, offset),
            reward=reward,
            advantage=advantage,
            passed=passed,
        )
        for trajectory_id, group_id, partition, offset, reward, advantage, passed in row["named"]
    ]
    return BatchCut(
        meta=_meta(row["id"], row["run_id"], "batches", causation_id=row["causation_id"]),
        index=row["index"],
        base_version=row["base_version"],
        members=members,
        groups=[],
        tokens_sampled=0,
        policy_floor=0,
        groups_stale=[],
        groups_dropped={},
        positions=[],
        scorer_sets=list(row["scorer_sets"]),
    )


def _group_completed(row: Mapping[str, Any]) -> GroupCompleted:
    """A row of queries.GROUPS_NAMED as the event, as far as a lineage needs it."""
    return GroupCompleted(
        meta=_meta("", "", "groups", group_id=row["group_id"], task_id=row["task_id"]),
        scorer_set=row["scorer_set"],
        members=[],
        reward_mean=row["reward_mean"],
        reward_deviation=row["reward_deviation"],
        dropped_because=None,
    )


def _meta(event_id: str, run_id: str, topic: str, **known: str | None) -> Meta:
    return Meta(id=event_id, run_id=run_id, category="", topic=topic, sender="", timestamp=0, **known)  # type: ignore[arg-type]


def _trajectory(row: Mapping[str, Any], place: Address, rewards: list[LineageReward]) -> LineageTrajectory:
    return LineageTrajectory(
        trajectory_id=row["trajectory_id"],
        trajectory=place,
        reward=0.0,
        advantage=0.0,
        passed=None,
        run_id=row["run_id"],
        policy_version=row["sampled_by"],
        ended_by=row["ended_by"],
        answer=row["answer"],
        rewards=rewards,
    )
