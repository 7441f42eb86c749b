"""The cutter: groups in, batches out, each batch and the positions it consumed in one transaction (P4).

    groups ─► CutGroups (pure) ─► BatchCut + positions ─► one Kafka transaction

Nothing is kept besides the log: a restart reads its state back from `batches`, and a second cutter fences the first.
"""

import threading

import structlog

from schemas.errors import LogUnavailable
from schemas.events import BatchCut
from schemas.ids import now_microseconds
from schemas.metrics import Pulse
from schemas.run import Run
from streams.config import CutSettings
from streams.hops.groups_to_batches import CutGroups, Cutting
from streams.log.connect import open_log
from streams.log.kafka import KafkaLog
from streams.log.protocol import Delivery, Log, Reader, Transactor
from streams.rules.dead_letter import RejectLimit, rejected

logger = structlog.get_logger()

_RETRY_SECONDS = 1.0


def run(run: Run, settings: CutSettings, pulse: Pulse, stop: threading.Event) -> None:
    """Cuts until told to stop. Raises Fenced when another cutter took over, LogBroken, TooManyRejects."""
    log = open_log(run)
    try:
        cut(run, settings, pulse, stop, log)
    finally:
        log.close()


def cut(run: Run, settings: CutSettings, pulse: Pulse, stop: threading.Event, log: KafkaLog) -> None:
    """The program over any log of Kafka. When the log is not available it starts over from the batches on it."""
    hop = cutting_of(run)
    while not stop.is_set():
        try:
            Cutter(log, hop, run.run_id, settings, pulse).run_until(stop)
        except LogUnavailable as error:
            # the transaction was aborted or the broker is away: state and positions are read back and taken again
            logger.warning("cut.restarting", reason=str(error))
            pulse.detail = f"waiting for the log: {error}"
            log.forget_failure()
            stop.wait(_RETRY_SECONDS)


def cutting_of(run: Run) -> CutGroups:
    """How batches of this run are cut."""
    job = run.job
    return CutGroups(run.run_id, job.groups_per_batch, job.staleness_max, job.first_version, batches_max=job.steps)


class Cutter:
    """One life of the cutter, from what is on the log to the first failure."""

    def __init__(self, log: Log, hop: CutGroups, run_id: str, settings: CutSettings, pulse: Pulse) -> None:
        self._log = log
        self._hop = hop
        self._run_id = run_id
        self._settings = settings
        self._pulse = pulse
        self._limit = RejectLimit("cut", settings.rejects_share_max)
        # the transactional id is taken over before the state is read, so that no older cutter can add to it any more
        self._transactor: Transactor = log.transactor(f"cut-{run_id}")
        self._state = restored(log, hop, run_id)

    def run_until(self, stop: threading.Event) -> None:
        # alone: every group of the run is this cutter's, also while an older one does not know yet that it is fenced
        reader = self._log.reader([self._hop.reads], group=f"cut-{self._run_id}", alone=True)
        self._pulse.detail = "cuts batches"
        try:
            while not stop.is_set():
                # one at a time: a batch commits exactly the groups it was cut from, and no later ones
                for delivery in reader.poll(1, self._settings.poll_seconds):
                    self._take(delivery, reader)
        finally:
            reader.close()
            self._transactor.close()

    def _take(self, delivery: Delivery, reader: Reader) -> None:
        self._pulse.count("events_read")
        self._limit.count(delivery.undecodable is not None)
        if delivery.event is None or self._hop.key(delivery.event) is None:
            self._reject(delivery)
            return
        outcome = self._hop.step(self._state, delivery.event, delivery.address)
        self._state = outcome.state
        if outcome.events:
            # as long as the batch waits for the log it counts as lag: a log that does not take it is seen as a stall
            self._pulse.gauge("lag", len(outcome.events))
            with self._pulse.busy():
                self._log.flush()  # rejects: what the batch commits is not read again
                self._transactor.commit(outcome.events, reader)
            self._pulse.gauge("lag", 0)
            self._pulse.count("events_written", len(outcome.events))
            logger.info("cut.batch", index=self._state.index_next - 1)

    def _reject(self, delivery: Delivery) -> None:
        if delivery.undecodable is None:
            return
        self._log.append(rejected(self._run_id, "cut", delivery, delivery.undecodable, now_microseconds()))
        self._pulse.count("rejected")


def restored(log: Log, hop: CutGroups, run_id: str) -> Cutting:
    """The cutter's state as the batches on the log tell it."""
    reader = log.reader(["batches"])
    state = Cutting()
    try:
        while not reader.caught_up():
            for delivery in reader.poll(100, 1.0):
                if isinstance(delivery.event, BatchCut) and delivery.event.meta.run_id == run_id:
                    state = hop.restored(state, delivery.event)
    finally:
        reader.close()
    return state
