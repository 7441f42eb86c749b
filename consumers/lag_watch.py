"""How far each stage is behind the log, polled in a thread of its own, so that no request waits for a broker.

schemas.programs declares which stage takes which topic in which group.
"""

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from replayground.schemas.errors import LogUnavailable
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.programs import ACCESS
from replayground.schemas.retention import Expiry, expiry_of
from replayground.schemas.run import FIELD
from replayground.schemas.topics import FOREVER, TOPIC_BY_EVENT, TOPIC_BY_NAME
from replayground.streams.log.protocol import GroupLag, Log

_EVERY_SECONDS = 5.0
_INTEREST_SECONDS = 30.0
"a run that nobody has asked about for this long is no longer polled"
# Topics written by transactions. Each ends with a commit marker, which has an offset and is never delivered, so the
# offsets of a group stay behind the end for ever.
_ENDS_WITH_MARKERS = frozenset(
    TOPIC_BY_EVENT[event].name for access in ACCESS if access.is_transactional for event in access.writes
)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ConsumerGroup:
    """A consumer group and the stage that takes each of its topics."""

    program: str
    name: str
    stage_by_topic: Mapping[str, str]
    of_field: bool
    is_optional: bool
    "not behind as long as it has no position: its program does not run for this job"


def groups_of(run_id: str) -> tuple[ConsumerGroup, ...]:
    """The groups that read for a run, in the order of the flow: its own, and those of the field. For the field itself
    those of the field alone: a group of a run that does not exist would be behind by the whole log."""
    return tuple(
        ConsumerGroup(access.program, access.group_of(run_id), access.consumes, access.of_field, access.is_optional)
        for access in ACCESS
        if access.consumes and (access.of_field or run_id != FIELD)
    )


class LagWatch:
    """The newest lags of the runs that were asked about lately. `lags` never blocks and may be called from any
    thread."""

    def __init__(self, log: Log, program_metrics: ProgramMetrics) -> None:
        self._log = log
        self._program_metrics = program_metrics
        self._asked_at: dict[str, float] = {}
        self._lags: dict[str, dict[str, Counter[int]]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lag-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Blocks until it has ended, at most 5 s: a request to the broker may be under way."""
        self._stop.set()
        # Joining a thread that was never started raises.
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def lags(self, run_id: str) -> dict[str, int]:
        """Messages by stage; {} until they are known. A run is polled for some time after each call."""
        self._asked_at[run_id] = time.monotonic()
        return _summed(self._lags.get(run_id, {}))

    def partition_lags(self, run_id: str) -> Mapping[str, Mapping[int, int]]:
        """Messages by stage and partition, like `lags`."""
        self._asked_at[run_id] = time.monotonic()
        return self._lags.get(run_id, {})

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            # A broker that is away must not end the thread: the next round tries again.
            try:
                self._look()
            except LogUnavailable as error:
                _log.warning("lag_unknown", reason=str(error))

    def _look(self) -> None:
        of_field = partition_lags_of(self._log, FIELD, of_field=True)
        self._program_metrics.gauge("lag", sum(_summed(of_field).values()))
        since = time.monotonic() - _INTEREST_SECONDS
        # A copy: `lags` adds keys from other threads meanwhile.
        wanted = [run_id for run_id, asked_at in list(self._asked_at.items()) if asked_at >= since]
        # Replaced as a whole, because `lags` reads it without a lock.
        self._lags = {run_id: partition_lags_of(self._log, run_id, of_field=False) | of_field for run_id in wanted}
        for run_id in self._asked_at.keys() - set(wanted):
            del self._asked_at[run_id]


def lags_of(log: Log, run_id: str, of_field: bool) -> dict[str, int]:
    """Messages that each stage of the run, or of the field, has not consumed, in the order of the flow. Topics are
    shared: messages of other runs count until the stage has skipped them. Blocks. Raises LogUnavailable."""
    return _summed(partition_lags_of(log, run_id, of_field))


def partition_lags_of(log: Log, run_id: str, of_field: bool) -> dict[str, Counter[int]]:
    """The same by partition. A stage that takes several topics has the sum of their partitions with one number."""
    lags: dict[str, Counter[int]] = {}
    for group in groups_of(run_id):
        if group.of_field != of_field:
            continue
        for topic, group_lags in log.group_lags(group.name, list(group.stage_by_topic)).items():
            if group.is_optional and not group_lags.has_begun:
                continue
            behind = lags.setdefault(group.stage_by_topic[topic], Counter())
            behind.update(_lag(log, group, topic, group_lags))
    return lags


def _summed(lags: Mapping[str, Counter[int]]) -> dict[str, int]:
    return {stage: behind.total() for stage, behind in lags.items()}


def _lag(log: Log, group: ConsumerGroup, topic: str, group_lags: GroupLag) -> Mapping[int, int]:
    """The lag by partition, nothing when only transaction markers are left: they are no messages, so nobody is behind
    because of them."""
    # The oldest unread message is looked up only where it can make a difference: it costs a read from the log.
    if (
        group_lags.lag
        and topic in _ENDS_WITH_MARKERS
        and log.unread(group.name, [topic])[topic].oldest_milliseconds is None
    ):
        return {}
    return group_lags.lag_by_partition


def expiries_of(log: Log, run_id: str, now_milliseconds: int) -> list[Expiry]:
    """Every group and topic where retention may delete unread messages. Blocks. Raises LogUnavailable."""
    found: list[Expiry] = []
    for group in groups_of(run_id):
        forgetting = [topic for topic in group.stage_by_topic if TOPIC_BY_NAME[topic].retention_milliseconds != FOREVER]
        # Most groups read no such topic, which saves the requests to the broker.
        if forgetting:
            for topic, unread in log.unread(group.name, forgetting).items():
                oldest, expired = unread.oldest_milliseconds, unread.expired
                expiry = expiry_of(group.program, TOPIC_BY_NAME[topic], oldest, expired, now_milliseconds)
                found += [] if expiry is None else [expiry]
    return found
