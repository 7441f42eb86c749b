"""The figures of a run at its end. Their names are fixed: other programs check summary.json.

All of them come from the trace store but log_events, which is counted on the log itself, message by message from the
start positions of the run, so that rows and messages can be compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from replayground.consumers.clickhouse import queries
from replayground.consumers.clickhouse.query_cache import QueryCache
from replayground.consumers.clickhouse.store import Place, Store
from replayground.consumers.reports.evaluations import complete_ones, newest_pass_at_1
from replayground.consumers.reports.overview import Step, grpo_steps, overview
from replayground.schemas.events import Position
from replayground.schemas.topics import FOREVER, TOPIC_BY_NAME, TOPICS
from replayground.streams.log.protocol import Log
from replayground.streams.rules.runs import RunState


class Summary(Struct, frozen=True, kw_only=True):
    """The figures of a run."""

    run_id: str
    seed: int
    seconds_total: float
    "from the first event of the run to the last one that is no heartbeat"
    seconds_to_first_rollout: float | None
    steps: int
    heldout_pass_at_1_start: float | None
    "at temperature 1, of the first version that was evaluated"
    heldout_pass_at_1_end: float | None
    "at temperature 1, of the last version that was evaluated"
    heldout_greedy_end: float | None
    events_by_type: dict[str, int]
    trajectories: int
    trajectories_infra_error: int
    infra_error_share_by_version: dict[str, float]
    "share of the attempts that a version sampled, the oldest of its tokens counting, which ended by infra_error"
    groups_completed: int
    groups_dropped_by_reason: dict[str, int]
    batches: int
    weight_versions_published: int
    weight_versions_loaded_by_server: dict[str, int]
    "versions that a server loaded and verified, each counted once"
    staleness_max: int
    "greatest staleness of a trajectory that was trained on"
    dead_letters: int
    tokens_sampled: int
    "by the policy; the teacher's are not sampled"
    tokens_per_second: float
    "tokens sampled, by the seconds from the first to the last sampled turn"
    logprob_gap_mean: float | None
    "mean |sampling - trainer| over tokens that were sampled by the version being trained"
    sampling_busy_share: float | None
    "busy seconds of the rollouts program by the seconds of the GRPO phase"
    trainer_busy_share: float | None
    trace_rows: int
    "rows of all runs from where this one started, at offsets that the log still has; without the log, rows of this run"
    log_events: int | None
    "messages of all runs from where this one started, up to the store's last offsets; null without the log"
    peak_memory_bytes_by_program: dict[str, int]


def summary(store: Store, log: Log | None, run: RunState, now: int) -> Summary:
    """Queries the store and counts the log from the start of the run on. The store must not be in the middle of a
    batch, or trace_rows and log_events differ. Raises StoreFailed, BadInput, LogUnavailable."""
    asked = {"run": run.run_id}
    answers = QueryCache(store)
    view = overview(answers, run, {}, now)
    steps = grpo_steps(answers, run.run_id)
    times = store.ask(queries.BEGINNING, asked).dicts()[0]
    trajectories = store.ask(queries.TRAJECTORIES, asked).dicts()[0]
    batches = store.ask(queries.BATCHES, asked).dicts()
    sampled = store.ask(queries.SAMPLED, asked).dicts()[0]
    busy = _busy_shares(store, run.run_id, batches, steps)
    trace_rows, log_events = count_rows(store, log, run.positions) if log else (sum(view.events.values()), None)
    evaluations = view.heldout_pass_at_1
    sampled_ones = complete_ones(evaluations, "sampled")
    return Summary(
        run_id=run.run_id,
        seed=run.seed,
        seconds_total=_seconds(times["first"], times["last"]),
        seconds_to_first_rollout=_seconds(times["first"], times["first_rollout"]) if times["first_rollout"] else None,
        steps=len(steps),
        heldout_pass_at_1_start=sampled_ones[0].pass_at_1 if sampled_ones else None,
        heldout_pass_at_1_end=newest_pass_at_1(evaluations, "sampled"),
        heldout_greedy_end=newest_pass_at_1(evaluations, "greedy"),
        events_by_type=view.events,
        trajectories=trajectories["trajectories"],
        trajectories_infra_error=trajectories["infra_error"],
        infra_error_share_by_version={
            str(version): share for version, share in store.ask(queries.INFRA_ERRORS_BY_VERSION, asked).rows
        },
        groups_completed=store.ask(queries.GROUPS, asked).rows[0][0],
        groups_dropped_by_reason=_dropped(store, run.run_id, batches),
        batches=len(batches),
        weight_versions_published=store.ask(queries.PUBLISHED, asked).rows[0][0],
        weight_versions_loaded_by_server={
            server: len(versions) for server, versions in store.ask(queries.LOADED_BY_SERVER, asked).rows
        },
        staleness_max=int(max((step.metrics.get("staleness_max", 0.0) for step in steps), default=0.0)),
        dead_letters=view.events.get("EventRejected", 0),
        tokens_sampled=sampled["tokens"],
        tokens_per_second=_rate(sampled["tokens"], _seconds(sampled["first"], sampled["last"])),
        logprob_gap_mean=logprob_gap(steps),
        sampling_busy_share=busy.get("rollouts"),
        trainer_busy_share=busy.get("trainer"),
        trace_rows=trace_rows,
        log_events=log_events,
        peak_memory_bytes_by_program={role: int(peak) for role, peak in store.ask(queries.PEAK_MEMORY, asked).rows},
    )


def count_rows(store: Store, log: Log, start: Sequence[Position] = ()) -> tuple[int, int]:
    """Rows in the store, and messages on the log up to the last offsets of the store, both from `start` on."""
    # Next offsets of the store by partition (no lags, despite the name).
    group_lags = {(topic, partition): following for topic, partition, following, _ in store.ask(queries.STANDING).rows}
    starts = {(position.topic, position.partition): position.offset for position in start}
    found = {place: _OnLog() for place in group_lags}
    for message in log.messages([topic.name for topic in TOPICS], start):
        place = (message.address.topic, message.address.partition)
        # A tombstone has no row. The log grows while it is read: messages beyond the store's offsets are not missing.
        if message.value is not None and message.address.offset < group_lags.get(place, 0):
            found[place].add(message.address.offset, TOPIC_BY_NAME[place[0]].compacted)
    rows = _rows(store, {place: (starts.get(place, 0), following) for place, following in group_lags.items()}, found)
    return rows, sum(on_log.messages for on_log in found.values())


@dataclass
class _OnLog:
    """What the log has of a partition."""

    messages: int = 0
    first: int | None = None
    offsets: list[int] = field(default_factory=list)
    "of a compacted topic, which keeps one message a key"

    def add(self, offset: int, compacted: bool) -> None:
        self.messages += 1
        self.first = offset if self.first is None else self.first
        if compacted:
            self.offsets.append(offset)


def _rows(store: Store, stretches: Mapping[Place, tuple[int, int]], found: Mapping[Place, _OnLog]) -> int:
    """Number of rows whose messages the log still has. Compaction and retention remove messages, not rows."""
    kept: dict[Place, tuple[int, int]] = {}
    at_offsets = 0
    for place, (first, following) in stretches.items():
        topic, on_log = TOPIC_BY_NAME[place[0]], found[place]
        if topic.compacted:
            at_offsets += store.rows_at(place, on_log.offsets)
        elif topic.retention_milliseconds == FOREVER:
            kept[place] = (first, following)
        elif on_log.first is not None:
            kept[place] = (on_log.first, following)
    return at_offsets + store.rows_between(kept)


def logprob_gap(steps: Sequence[Step]) -> float | None:
    """The mean gap of all steps, weighted by the number of tokens it was measured on; None when there were none."""
    weights = [step.metrics.get("logprob_gap_tokens", 0.0) for step in steps]
    gaps = [step.metrics.get("logprob_gap_mean", 0.0) for step in steps]
    total = sum(weights)
    return sum(gap * weight for gap, weight in zip(gaps, weights, strict=True)) / total if total else None


def _busy_shares(
    store: Store, run_id: str, batches: Sequence[dict[str, Any]], steps: Sequence[Step]
) -> dict[str, float]:
    """Busy seconds of each role divided by the seconds of the GRPO phase, from the first batch to the last step."""
    if not batches or not steps:
        return {}
    first, last = batches[0]["timestamp"], steps[-1].timestamp
    rows = store.ask(queries.BUSY_SECONDS, {"run": run_id, "first": first, "last": last}).rows
    return {role: _rate(busy, _seconds(first, last)) for role, busy in rows}


def _dropped(store: Store, run_id: str, batches: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Dropped groups by reason, and as `stale` those that were too old when a batch was cut."""
    # Staleness is decided by the cutter, so stale groups are on the batches and not on GroupCompleted.
    dropped = {str(reason): int(count) for reason, count in store.ask(queries.GROUPS_BY_REASON, {"run": run_id}).rows}
    stale = sum(int(batch["groups_stale"]) for batch in batches)
    return dropped | ({"stale": stale} if stale else {})


def _seconds(first: int, last: int) -> float:
    return (last - first) / 1e6


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
