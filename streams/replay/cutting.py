"""Batches of a replay: groups that were judged again, in one order that depends on nothing but the log.

Of the next groups of all partitions the one with the earliest event time comes first, and every so many of them are a
batch. Nothing is stale here: how far
the model may be from what it learns from is decided when it is trained (trainer). Batches and how far the groups were
read are one transaction.
"""

import heapq
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import msgspec

from replayground.schemas.events import Address, BatchCut, Event, GroupCompleted, Position
from replayground.schemas.ids import now_microseconds
from replayground.schemas.run import Run
from replayground.schemas.topics import TOPIC_BY_NAME
from replayground.streams.hops.groups_to_batches import STATE_VERSION as CUT_STATE_VERSION
from replayground.streams.hops.groups_to_batches import CutGroups, CutState
from replayground.streams.log.protocol import Log
from replayground.streams.log.snapshots import snapshot, snapshot_to_continue
from replayground.streams.replay.patience import while_log_is_away

STATE_VERSION = f"replay-{CUT_STATE_VERSION}"
_ANY_AGE = 10**12
"versions: no group of a replay is too old"
_BATCHES_PER_COMMIT = 64
_POLL_EVENTS = 1000
_encode = msgspec.msgpack.Encoder(order="deterministic").encode

type PlacedGroup = tuple[Address, GroupCompleted]


def cut_replay(
    run: Run,
    log: Log,
    groups_per_batch: int,
    first_version: int,
    report: Callable[[int], None],
    stop: threading.Event,
) -> int | None:
    """Cuts all groups of the run that are on the log. Returns how many batches there are, or None when `stop` was set.
    Groups that do not fill a batch are left over. Waits while the log is unavailable. Raises Fenced, LogBroken."""
    return while_log_is_away(lambda: _cut(run, log, groups_per_batch, first_version, report, stop), stop)


def _cut(
    run: Run,
    log: Log,
    groups_per_batch: int,
    first_version: int,
    report: Callable[[int], None],
    stop: threading.Event,
) -> int | None:
    hop = CutGroups(run.run_id, groups_per_batch, _ANY_AGE, first_version)
    run = msgspec.structs.replace(run, program="replay-cut")
    transactor = log.transactor(f"replay-{run.run_id}-cut")
    try:
        taken = snapshot_to_continue(log, run, STATE_VERSION)
        state = CutState() if taken is None else msgspec.msgpack.decode(taken.state, type=CutState)
        batches: list[Event] = []
        for address, group in merged_groups(log, run, hop.positions(state)):
            if stop.is_set():
                return None
            state, cut = _step(hop, state, address, group)
            batches += cut
            if len(batches) >= _BATCHES_PER_COMMIT:
                transactor.commit([*batches, _snapshot(run, hop, state)], None)
                batches = []
                report(state.index_next)
        transactor.commit([*batches, _snapshot(run, hop, state)], None)
        report(state.index_next)
        return state.index_next
    finally:
        transactor.close()


def merged_groups(log: Log, run: Run, positions: list[Position]) -> Iterator[PlacedGroup]:
    """The groups of the run that are on the log now, from these positions on, always the
    earliest by event time and id among the next ones of all partitions."""
    starts = {position.partition: position for position in (*run.start, *positions) if position.topic == "groups"}
    partitions = range(TOPIC_BY_NAME["groups"].partitions)
    readers = [_groups_of(log, run, partition, starts.get(partition)) for partition in partitions]
    # heapq.merge looks only at the next group of each partition, so where it continues follows from the positions.
    return heapq.merge(*readers, key=lambda placed: (placed[1].meta.timestamp, placed[1].meta.id))


def _groups_of(log: Log, run: Run, partition: int, start: Position | None) -> Iterator[PlacedGroup]:
    starts = [] if start is None else [start]
    with closing(log.reader(["groups"], start=starts, run_id=run.run_id, partitions=[partition])) as reader:
        while not reader.caught_up():
            for delivery in reader.poll(_POLL_EVENTS, 0.2):
                if isinstance(delivery.event, GroupCompleted) and delivery.event.meta.run_id == run.run_id:
                    yield delivery.address, delivery.event


def _step(hop: CutGroups, state: CutState, address: Address, group: GroupCompleted) -> tuple[CutState, list[BatchCut]]:
    outcome = hop.step(state, group, address)
    assert outcome.refused is None, outcome.refused
    after: CutState = outcome.state
    batches = [event for event in outcome.events if isinstance(event, BatchCut)]
    if batches:
        # Groups of a replay are written exactly once, so none has to be remembered: the state stays small.
        after.seen, after.floor = {}, None
    return after, batches


def _snapshot(run: Run, hop: CutGroups, state: CutState) -> Event:
    return snapshot(run, STATE_VERSION, hop.positions(state), _encode(state), now_microseconds())
