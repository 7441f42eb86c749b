"""How far each stage is behind the log, asked now and then in a thread of its own, so that nobody waits for a broker."""

import threading

import structlog

from schemas.errors import LogUnavailable
from schemas.metrics import Pulse
from schemas.retention import Expiry, expiry_of
from schemas.run import Run
from schemas.topics import FOREVER, TOPIC_BY_NAME, TOPICS
from streams.log.protocol import Log

_EVERY_SECONDS = 5.0

_log = structlog.get_logger(__name__)

# stage, consumer group, the topics it is behind on; one question a group
GROUPS: tuple[tuple[str, dict[str, str]], ...] = (
    ("rollouts", {"rollouts": "rollouts"}),
    ("streams", {"messages": "assemble", "trajectories": "score", "rewards": "group"}),
    ("cut", {"groups": "cut"}),
    ("trainer", {"batches": "trainer"}),
    ("traces", {topic.name: "traces" for topic in TOPICS}),
)


class LagWatch:
    """The newest lags. `lags` never blocks and may be called from any thread."""

    def __init__(self, log: Log, run: Run, pulse: Pulse) -> None:
        self._log = log
        self._run_id = run.run_id
        self._pulse = pulse
        self._lags: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="lag-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the log is no longer asked, or after a few seconds when it does not answer."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def lags(self) -> dict[str, int]:
        """Messages by stage; {} as long as nothing is known."""
        return self._lags

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_SECONDS):
            try:
                self._lags = lags_of(self._log, self._run_id)
                self._pulse.gauge("lag", self._lags.get("traces", 0))
            except LogUnavailable as error:
                _log.warning("lag_unknown", error=str(error))


def lags_of(log: Log, run_id: str) -> dict[str, int]:
    """Messages that each stage has not taken yet, in the order of the flow."""
    lags: dict[str, int] = {}
    for group, stages in GROUPS:
        for topic, standing in log.standing(f"{group}-{run_id}", list(stages)).items():
            lags[stages[topic]] = lags.get(stages[topic], 0) + standing.lag
    return lags


def expiries_of(log: Log, run_id: str, now_milliseconds: int) -> list[Expiry]:
    """Every group and topic where the broker may forget something unread. Raises LogUnavailable."""
    found: list[Expiry] = []
    for group, stages in GROUPS:
        forgetting = [topic for topic in stages if TOPIC_BY_NAME[topic].retention_milliseconds != FOREVER]
        if forgetting:  # most groups read nothing that is forgotten, and need not be asked about
            for topic, unread in log.unread(f"{group}-{run_id}", forgetting).items():
                oldest, expired = unread.oldest_milliseconds, unread.expired
                expiry = expiry_of(group, TOPIC_BY_NAME[topic], oldest, expired, now_milliseconds)
                found += [] if expiry is None else [expiry]
    return found
