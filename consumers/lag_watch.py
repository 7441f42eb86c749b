"""How far each stage is behind the log, asked now and then in a thread of its own, so that nobody waits for a broker.

Which stage takes which topic, in which group: schemas.programs.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from schemas.errors import LogUnavailable
from schemas.metrics import ProgramMetrics
from schemas.programs import ACCESS
from schemas.retention import Expiry, expiry_of
from schemas.run import FIELD
from schemas.topics import FOREVER, TOPIC_BY_EVENT, TOPIC_BY_NAME
from streams.log.protocol import GroupLag, Log

_EVERY_SECONDS = 5.0
_INTEREST_SECONDS = 30.0
"a run that nobody has asked about for so long is not looked at any more"
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


def groups_of(run_id: str) -> tuple[ConsumerGroup, ...]:
    """The groups that read for a run, in the order of the flow: its own, and those of the field."""
    return tuple(
        ConsumerGroup(access.program, access.group_of(run_id), access.consumes, access.of_field)
        for access in ACCESS
        if access.consumes
    )


class LagWatch:
    """The newest lags of the runs that somebody asks about. `lags` never blocks and may be called from any thread."""

    def __init__(self, log: Log, program_metrics: ProgramMetrics) -> None:
        self._log = log
        self._program_metrics = program_metrics
        self._asked_at: dict[str, float] = {}
        self._lags: dict[str, dict[str, int]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lag-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the log is no longer asked, or after a few seconds when it does not answer."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def lags(self, run_id: str) -> dict[str, int]:
        """Messages by stage; {} as long as nothing is known."""
        self._asked_at[run_id] = time.monotonic()
        return self._lags.get(run_id, {})

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            try:
                self._look()
            except LogUnavailable as error:
                _log.warning("lag_unknown", reason=str(error))

    def _look(self) -> None:
        of_field = lags_of(self._log, FIELD, of_field=True)
        self._program_metrics.gauge("lag", sum(of_field.values()))
        since = time.monotonic() - _INTEREST_SECONDS
        wanted = [run_id for run_id, asked_at in list(self._asked_at.items()) if asked_at >= since]
        self._lags = {run_id: lags_of(self._log, run_id, of_field=False) | of_field for run_id in wanted}
        for run_id in self._asked_at.keys() - set(wanted):
            del self._asked_at[run_id]


def lags_of(log: Log, run_id: str, of_field: bool) -> dict[str, int]:
    """Messages that each stage of the run, or of the field, has not taken yet, in the order of the flow. A topic is shared by
    all runs: what a stage has to pass over counts until it has done so. Raises LogUnavailable."""
    lags: dict[str, int] = {}
    for group in groups_of(run_id):
        if group.of_field != of_field:
            continue
        for topic, group_lags in log.group_lags(group.name, list(group.stage_by_topic)).items():
            stage = group.stage_by_topic[topic]
            lags[stage] = lags.get(stage, 0) + _lag(log, group, topic, group_lags)
    return lags


def _lag(log: Log, group: ConsumerGroup, topic: str, group_lags: GroupLag) -> int:
    """A topic that is written by transactions ends with their markers, which are no messages: nobody is behind for them."""
    if (
        group_lags.lag
        and topic in _ENDS_WITH_MARKERS
        and log.unread(group.name, [topic])[topic].oldest_milliseconds is None
    ):
        return 0
    return group_lags.lag


def expiries_of(log: Log, run_id: str, now_milliseconds: int) -> list[Expiry]:
    """Every group and topic where the broker may forget something unread. Raises LogUnavailable."""
    found: list[Expiry] = []
    for group in groups_of(run_id):
        forgetting = [topic for topic in group.stage_by_topic if TOPIC_BY_NAME[topic].retention_milliseconds != FOREVER]
        if forgetting:  # most groups read nothing that is forgotten, and need not be asked about
            for topic, unread in log.unread(group.name, forgetting).items():
                oldest, expired = unread.oldest_milliseconds, unread.expired
                expiry = expiry_of(group.program, TOPIC_BY_NAME[topic], oldest, expired, now_milliseconds)
                found += [] if expiry is None else [expiry]
    return found
