"""Converts an event and its address to a row of the trace store. Pure: the same message always gives the same row.

A row has the envelope, the columns of its kind (consumers.clickhouse.columns), and `body`: the whole event as JSON
without its envelope, with bytes (token ids, log-probabilities) in base64. Only the state of a snapshot and the addresses
of a selection are left out. `Store` writes each column to the tables that have it.
"""

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from replayground.schemas.events import (
    Address,
    AgentMessaged,
    AlarmRaised,
    AlertChanged,
    AttemptEnded,
    BatchCut,
    BatchMember,
    ControlIssued,
    Event,
    EventRejected,
    GroupCompleted,
    GroupMember,
    JudgementMade,
    OperatorActed,
    QuerySaved,
    RedriveRequested,
    ReplayRequested,
    RequestReported,
    RewardAssigned,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    SnapshotTaken,
    StepTaken,
    Task,
    TaskSubmitted,
    ToolCalled,
    ToolObserved,
    TrajectoriesSelected,
    TrajectoryAssembled,
    TurnGenerated,
    VerdictGiven,
    WeightsLoaded,
    WeightsPublished,
    WorkerSeen,
)
from replayground.schemas.packed import token_count

UNDECODABLE = "undecodable"
"type of a message that cannot be decoded; it has a row too, so that rows can be counted against messages"

Row = dict[str, Any]

_encoder = msgspec.json.Encoder()


def event_row(address: Address, event: Event) -> Row:
    """The row of an event."""
    row = msgspec.structs.asdict(event.meta)
    # The address where the message is. meta.topic is only what its writer says.
    row["topic"] = address.topic
    row["partition"] = address.partition
    row["offset"] = address.offset
    row["type"] = type(event).__name__
    # Encoded once, here. ClickHouse stores these bytes as text (input_format_json_read_objects_as_strings).
    row["body"] = msgspec.Raw(_encoder.encode(_body(event)))
    row.update(_COLUMNS_BY_KIND[type(event)](event))
    return row


def undecodable_row(address: Address, key: bytes | None, value: bytes, reason: str) -> Row:
    """The row of a message that could not be decoded, with all its bytes in base64."""
    body = {
        "reason": reason,
        "key": None if key is None else base64.b64encode(key).decode(),
        "value": base64.b64encode(value).decode(),
    }
    return {
        "topic": address.topic,
        "partition": address.partition,
        "offset": address.offset,
        "type": UNDECODABLE,
        "reason": reason,
        "body": msgspec.Raw(_encoder.encode(body)),
    }


def encode_rows(rows: Iterable[Row]) -> bytes:
    """Rows as JSON lines, ClickHouse's format JSONEachRow."""
    return _encoder.encode_lines(rows)


def _body(event: Event) -> dict[str, Any]:
    body = msgspec.structs.asdict(event)
    del body["meta"]
    # The state is as large as the memory of its program, and nobody queries it.
    if isinstance(event, SnapshotTaken):
        del body["state"]
        body["size_bytes"] = len(event.state)
    # Packed addresses, millions perhaps: they are read from the log.
    if isinstance(event, TrajectoriesSelected):
        for packed in ("partitions", "offsets", "group_sizes"):
            del body[packed]
        body["trajectories"] = token_count(event.partitions)
    return body


def _json(value: object) -> str:
    return _encoder.encode(value).decode()


def _finite(figures: Mapping[str, float]) -> Mapping[str, float]:
    """Without NaN and infinity: JSON has neither, and ClickHouse takes no null inside a map."""
    if all(map(math.isfinite, figures.values())):
        return figures
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _finite_ones(figures: Iterable[float]) -> list[float]:
    """NaN and infinity as 0: in an array each number must keep its place."""
    return [value if math.isfinite(value) else 0.0 for value in figures]


# One function for each kind, in the order of the flow: the columns that its rows fill besides envelope and body.


def _task(task: Task) -> Row:
    return {
        "prompt": task.prompt,
        "reference": task.reference,
        "agent": task.agent,
        "split": task.split,
        "tags": task.tags,
        "group_size": task.group_size,
    }


def _run_started(event: RunStarted) -> Row:
    try:
        job = msgspec.json.decode(event.config)["job"]["module"]
    # A config of another release, or of another program.
    except (msgspec.DecodeError, KeyError, TypeError):
        job = ""
    return {
        "kind": event.kind,
        "job": job if isinstance(job, str) else "",
        "seed": event.seed,
        "started_by": event.started_by,
        "code_version": event.code_version,
        "source_runs": event.sources,
        "config": event.config,
    }


def _run_resumed(event: RunResumed) -> Row:
    return {"start": event.start, "started_by": event.started_by, "code_version": event.code_version}


def _run_ended(event: RunEnded) -> Row:
    return {"start": event.start, "reason": event.reason, "detail": event.detail}


def _task_submitted(event: TaskSubmitted) -> Row:
    return _task(event.task)


def _rollout_requested(event: RolloutRequested) -> Row:
    task = event.task
    row = {"agent": task.agent, "split": task.split, "tags": task.tags, "group_size": task.group_size}
    return row | {"index": event.index, "seed": event.seed, "retry": event.retry}


def _rollout_started(event: RolloutStarted) -> Row:
    task = event.task
    row = {"agent": task.agent, "split": task.split, "tags": task.tags, "group_size": task.group_size}
    row |= {"index": event.index, "seed": event.seed, "worker": event.worker, "isolation": event.isolation}
    return row | {"tokens_read": token_count(event.prompt_tokens)}


def _turn_generated(event: TurnGenerated) -> Row:
    return {
        "agent": event.agent,
        "text": event.text,
        "tokens": token_count(event.tokens),
        "versions": _json(event.versions),
        "finish_reason": event.finish_reason,
        "milliseconds": event.milliseconds,
        "context": event.context,
    }


def _tool_called(event: ToolCalled) -> Row:
    return {"call_id": event.call_id, "agent": event.agent, "tool": event.tool, "arguments": event.arguments}


def _tool_observed(event: ToolObserved) -> Row:
    return {
        "call_id": event.call_id,
        "tool": event.tool,
        "content": event.content,
        "is_error": event.is_error,
        "error_kind": event.error_kind,
        "perturbation": event.perturbation,
        "milliseconds": event.milliseconds,
        "tokens_read": token_count(event.tokens),
        "context": event.context,
    }


def _agent_messaged(event: AgentMessaged) -> Row:
    row = {"kind": event.kind, "content": event.content, "context": event.context}
    return row | {"tokens_read": token_count(event.tokens)}


def _rollout_ended(event: RolloutEnded) -> Row:
    return {
        "ended_by": event.ended_by,
        "answer": event.answer,
        "reason": event.reason,
        "turns": event.turns,
        "tokens_sampled": event.tokens_sampled,
        "tokens_read": event.tokens_read,
        "milliseconds": event.milliseconds,
        "cost": event.cost,
    }


def _trajectory_assembled(event: TrajectoryAssembled) -> Row:
    return _task(event.task) | {
        "asked_scorers": event.task.scorers,
        "index": event.index,
        "seed": event.seed,
        "transcript": _json(event.transcript),
        "answer": event.answer,
        "ended_by": event.ended_by,
        "reason": event.reason,
        "turns": event.turns,
        "tokens_sampled": event.tokens_sampled,
        "policy_version_oldest": event.policy_version_oldest,
        "cost": event.cost,
    }


def _attempt_ended(event: AttemptEnded) -> Row:
    return {
        "index": event.index,
        "group_size": event.group_size,
        "ended_by": event.ended_by,
        "reason": event.reason,
        "tokens_sampled": event.tokens_sampled,
        "policy_version_oldest": event.policy_version_oldest,
    }


def _judged(trajectory: Address) -> Row:
    return {"trajectory_partition": trajectory.partition, "trajectory_offset": trajectory.offset}


def _reward_assigned(event: RewardAssigned) -> Row:
    return _judged(event.trajectory) | {
        "index": event.index,
        "group_size": event.group_size,
        "scorer": event.scorer,
        "scorer_version": event.scorer_version,
        "scorer_set": event.scorer_set,
        "scorers": len(event.scorers),
        "score": event.score,
        "weight": event.weight,
        "passed": event.passed,
        "verdict": event.verdict,
        "excluded_because": event.excluded_because,
        "parts": _finite(event.parts),
        "evidence": event.evidence,
        "ended_by": event.ended_by,
        "tokens_sampled": event.tokens_sampled,
        "policy_version_oldest": event.policy_version_oldest,
    }


def _judgement_made(event: JudgementMade) -> Row:
    return _judged(event.trajectory) | {
        "scorer": event.judge,
        "scorer_version": event.judge_version,
        "judged_by": event.judged_by,
        "score": event.score,
        "verdict": event.verdict,
        "excluded_because": event.excluded_because,
        "scores": _finite_ones(event.scores),
        "votes": event.votes,
        "answers": event.answers,
        "model": event.model,
        "tokens_in": event.tokens_in,
        "tokens_out": event.tokens_out,
        "cost": event.cost,
        "milliseconds": event.milliseconds,
    }


def _verdict_given(event: VerdictGiven) -> Row:
    return _judged(event.trajectory) | {
        "scorer": event.scorer,
        "scorer_version": event.scorer_version,
        "judged_by": "human",
        "annotator": event.annotator,
        "score": event.score,
        "comment": event.comment,
    }


def _group_completed(event: GroupCompleted) -> Row:
    members = event.members
    return {
        "scorer_set": event.scorer_set,
        "reward_mean": event.reward_mean,
        "reward_deviation": event.reward_deviation,
        "dropped_because": event.dropped_because,
        "member_attempts": [member.attempt_id for member in members],
        "member_valid": [member.valid for member in members],
        **_member_columns(members),
    }


def _trajectories_selected(event: TrajectoriesSelected) -> Row:
    return {
        "name": event.name,
        "source_runs": event.runs,
        "where_sql": event.where,
        "trajectories": token_count(event.partitions),
        "sha256": event.sha256,
    }


def _query_saved(event: QuerySaved) -> Row:
    return {
        "name": event.name,
        "kind": event.use,
        "where_sql": event.sql,
        "bound": event.bound,
        "threshold": event.threshold,
        "every_seconds": event.every_seconds,
        "requested_by": event.saved_by,
    }


def _alert_changed(event: AlertChanged) -> Row:
    row = {"name": event.name, "kind": event.state, "score": event.value}
    return row | {"bound": event.bound, "threshold": event.threshold}


def _replay_requested(event: ReplayRequested) -> Row:
    return {
        "kind": "dry run" if event.is_dry_run else "replay",
        "source_runs": event.sources,
        "asked_scorers": event.scorers,
        "where_sql": "failed only" if event.failed_only else "",
        "requested_by": event.requested_by,
    }


def _redrive_requested(event: RedriveRequested) -> Row:
    return {"rejects": event.rejects, "requested_by": event.requested_by}


def _request_reported(event: RequestReported) -> Row:
    row = {"request_id": event.request, "kind": event.state, "name": event.run, "reason": event.detail}
    return row | {"metrics": _finite(event.figures)}


def _operator_acted(event: OperatorActed) -> Row:
    return {"command": event.action, "reason": event.detail, "requested_by": event.person}


def _batch_cut(event: BatchCut) -> Row:
    members = event.members
    return {
        "index": event.index,
        "base_version": event.base_version,
        "tokens_sampled": event.tokens_sampled,
        "policy_floor": event.policy_floor,
        "groups": len(event.groups),
        "groups_stale": len(event.groups_stale) + event.groups_stale_unnamed,
        "groups_dropped": event.groups_dropped,
        "scorer_sets": event.scorer_sets,
        "member_groups": [member.group_id for member in members],
        **_member_columns(members),
    }


def _member_columns(members: Sequence[GroupMember] | Sequence[BatchMember]) -> Row:
    """What groups and batches say of their members, in the order of the members."""
    return {
        "members": len(members),
        "member_trajectories": [member.trajectory_id for member in members],
        "member_rewards": _finite_ones(member.reward for member in members),
        "member_advantages": _finite_ones(member.advantage for member in members),
        "member_passed": [member.passed for member in members],
        "member_partitions": [member.trajectory.partition for member in members],
        "member_offsets": [member.trajectory.offset for member in members],
    }


def _step_taken(event: StepTaken) -> Row:
    return {
        "kind": event.kind,
        "version": event.new_version,
        "base_version": event.base_version,
        "batch_id": event.batch_id,
        "metrics": _finite(event.metrics),
        "stage_seconds": _finite(event.seconds),
        "code_hash": event.code_hash,
        "config_hash": event.config_hash,
    }


def _weights_published(event: WeightsPublished) -> Row:
    copied = event.copied_from
    return {
        "kind": event.kind,
        "version": event.version,
        "base_version": event.base_version,
        "files": len(event.files),
        "size_bytes": sum(file.size_bytes for file in event.files),
        "batches": event.batches,
        "copied_from_run": "" if copied is None else copied.run_id,
        "copied_from_version": None if copied is None else copied.version,
    }


def _weights_loaded(event: WeightsLoaded) -> Row:
    return {
        "server": event.server,
        "version": event.version,
        "digest": event.digest,
        "probe_gap": event.probe_gap,
        "load_seconds": event.seconds,
        "refusal": event.refusal,
    }


def _control_issued(event: ControlIssued) -> Row:
    return {
        "command": event.command,
        "version": event.version,
        "requested_by": event.requested_by,
        "reason": event.reason,
    }


def _alarm_raised(event: AlarmRaised) -> Row:
    return {"kind": event.alarm, "command": "ended" if event.is_over else "raised", "reason": event.detail}


def _worker_seen(event: WorkerSeen) -> Row:
    return {"worker": event.worker, "role": event.role, "load": _finite(event.load)}


def _snapshot_taken(event: SnapshotTaken) -> Row:
    return {
        "program": event.program,
        "code_version": event.code_version,
        "size_bytes": len(event.state),
        "positions": _json(event.positions),
    }


def _event_rejected(event: EventRejected) -> Row:
    return {
        "stage": event.stage,
        "reason": event.reason,
        "origin_topic": event.origin.topic,
        "origin_partition": event.origin.partition,
        "origin_offset": event.origin.offset,
    }


_COLUMNS_BY_KIND: dict[type[Event], Callable[[Any], Row]] = {
    RunStarted: _run_started,
    RunResumed: _run_resumed,
    RunEnded: _run_ended,
    TaskSubmitted: _task_submitted,
    RolloutRequested: _rollout_requested,
    RolloutStarted: _rollout_started,
    TurnGenerated: _turn_generated,
    ToolCalled: _tool_called,
    ToolObserved: _tool_observed,
    AgentMessaged: _agent_messaged,
    RolloutEnded: _rollout_ended,
    TrajectoryAssembled: _trajectory_assembled,
    AttemptEnded: _attempt_ended,
    RewardAssigned: _reward_assigned,
    JudgementMade: _judgement_made,
    VerdictGiven: _verdict_given,
    GroupCompleted: _group_completed,
    TrajectoriesSelected: _trajectories_selected,
    QuerySaved: _query_saved,
    AlertChanged: _alert_changed,
    ReplayRequested: _replay_requested,
    RedriveRequested: _redrive_requested,
    RequestReported: _request_reported,
    OperatorActed: _operator_acted,
    BatchCut: _batch_cut,
    StepTaken: _step_taken,
    WeightsPublished: _weights_published,
    WeightsLoaded: _weights_loaded,
    ControlIssued: _control_issued,
    AlarmRaised: _alarm_raised,
    WorkerSeen: _worker_seen,
    SnapshotTaken: _snapshot_taken,
    EventRejected: _event_rejected,
}
