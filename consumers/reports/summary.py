"""The figures of a run at its end. Names are fixed: summary.json is checked by others.

Everything is asked of the trace store, except log_events: that is counted on the log itself, message by message, so
that the two can be compared.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from consumers.clickhouse import queries
from consumers.clickhouse.answers import Answers
from consumers.clickhouse.store import Place, Store
from consumers.reports.overview import Evaluation, Step, grpo_steps, overview
from schemas.run import Run
from schemas.topics import TOPICS
from streams.log.protocol import Log


class Summary(Struct, frozen=True, kw_only=True):
    """The figures of a run."""

    run_id: str
    seed: int
    seconds_total: float
    "from the first event of the run to the last that is no heartbeat"
    seconds_to_first_rollout: float | None
    steps: int
    heldout_pass_at_1_start: float | None
    "at temperature 1, of the version that practice began with"
    heldout_pass_at_1_end: float | None
    "at temperature 1, of the last version that was evaluated"
    heldout_greedy_end: float | None
    events_by_type: dict[str, int]
    trajectories: int
    trajectories_infra_error: int
    groups_completed: int
    groups_dropped_by_reason: dict[str, int]
    batches: int
    weight_versions_published: int
    weight_versions_loaded_by_server: dict[str, int]
    "versions that a server loaded and proved, each counted once"
    staleness_max: int
    "greatest age in versions of a trajectory that was trained on"
    dead_letters: int
    tokens_sampled: int
    "by the policy; the teacher's are not sampled"
    tokens_per_second: float
    "tokens sampled, by the seconds from the first to the last sampled turn"
    logprob_gap_mean: float | None
    "mean |sampling - trainer| over tokens that the very version being trained had sampled"
    sampling_busy_share: float | None
    "share of the GRPO phase in which rollouts were under way"
    trainer_busy_share: float | None
    trace_rows: int
    log_events: int
    peak_memory_bytes_by_program: dict[str, int]


def summary(store: Store, log: Log, run: Run, now: int) -> Summary:
    """Asks the store and counts the log. Whoever writes the store must not be in the middle of a batch."""
    asked = {"run": run.run_id}
    answers = Answers(store)
    view = overview(answers, run, {}, now)
    steps = grpo_steps(answers, run.run_id)
    times = store.ask(queries.BEGINNING, asked).dicts()[0]
    trajectories = store.ask(queries.TRAJECTORIES, asked).dicts()[0]
    batches = store.ask(queries.BATCHES, asked).dicts()
    sampled = store.ask(queries.SAMPLED, asked).dicts()[0]
    busy = _busy_shares(store, run.run_id, batches, steps)
    trace_rows, log_events = counted(store, log)
    return Summary(
        run_id=run.run_id,
        seed=run.seed,
        seconds_total=_seconds(times["first"], times["last"]),
        seconds_to_first_rollout=_seconds(times["first"], times["first_rollout"]) if times["first_rollout"] else None,
        steps=len(steps),
        heldout_pass_at_1_start=_pass_at_1(view.heldout_pass_at_1, "sampled", first=True),
        heldout_pass_at_1_end=_pass_at_1(view.heldout_pass_at_1, "sampled", first=False),
        heldout_greedy_end=_pass_at_1(view.heldout_pass_at_1, "greedy", first=False),
        events_by_type=view.events,
        trajectories=trajectories["trajectories"],
        trajectories_infra_error=trajectories["infra_error"],
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


def counted(store: Store, log: Log) -> tuple[int, int]:
    """Rows in the store, and messages on the log up to where the store has come."""
    standing = store.ask(queries.STANDING).rows
    cut = {(topic, partition): following for topic, partition, following, _ in standing}
    rows = {topic.name: 0 for topic in TOPICS}
    for topic, _, _, count in standing:
        rows[topic] += count
    messages = log.count(list(rows))
    # Heartbeats never end: what has grown since the store was asked is counted again, up to where the store stands.
    grown = [topic for topic in rows if messages[topic] != rows[topic]]
    unchanged = sum(messages[topic] for topic in rows if topic not in grown)
    return sum(rows.values()), unchanged + count_log(log, grown, cut)


def count_log(log: Log, topics: Sequence[str], cut: Mapping[Place, int]) -> int:
    """Messages of the topics before the cut, counted by reading them from the beginning."""
    ends = {place: end for place, end in cut.items() if place[0] in topics}
    if not ends:
        return 0
    reader = log.reader(topics)
    reached = dict.fromkeys(ends, 0)
    count = 0
    try:
        while any(reached[place] < end for place, end in ends.items()):
            deliveries = reader.poll(events_max=10_000, timeout_seconds=1.0)
            for delivery in deliveries:
                place = (delivery.address.topic, delivery.address.partition)
                reached[place] = delivery.address.offset + 1
                count += delivery.address.offset < ends.get(place, 0)
            if not deliveries and reader.caught_up():
                break  # the log ends before the cut: it has lost what the store has, and the figures will say so
    finally:
        reader.close()
    return count


def logprob_gap(steps: Sequence[Step]) -> float | None:
    """Weighted by tokens, since steps rest on different numbers of them."""
    weights = [step.metrics.get("logprob_gap_tokens", 0.0) for step in steps]
    gaps = [step.metrics.get("logprob_gap_mean", 0.0) for step in steps]
    total = sum(weights)
    return sum(gap * weight for gap, weight in zip(gaps, weights, strict=True)) / total if total else None


def _busy_shares(
    store: Store, run_id: str, batches: Sequence[dict[str, Any]], steps: Sequence[Step]
) -> dict[str, float]:
    """Busy seconds of each role by the seconds of the GRPO phase, from the first batch to the last step."""
    if not batches or not steps:
        return {}
    first, last = batches[0]["timestamp"], steps[-1].timestamp
    rows = store.ask(queries.BUSY_SECONDS, {"run": run_id, "first": first, "last": last}).rows
    return {role: _rate(busy, _seconds(first, last)) for role, busy in rows}


def _dropped(store: Store, run_id: str, batches: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Groups that taught nothing, by reason, and those that were too old when a batch was cut."""
    dropped = {str(reason): int(count) for reason, count in store.ask(queries.GROUPS_BY_REASON, {"run": run_id}).rows}
    stale = sum(int(batch["groups_stale"]) for batch in batches)
    return dropped | ({"stale": stale} if stale else {})


def _pass_at_1(evaluations: Sequence[Evaluation], kind: str, first: bool) -> float | None:
    complete = [evaluation for evaluation in evaluations if evaluation.kind == kind and evaluation.complete]
    return complete[0 if first else -1].pass_at_1 if complete else None


def _seconds(first: int, last: int) -> float:
    return (last - first) / 1e6


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
