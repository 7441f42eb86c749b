"""A broker that dies inside transactions of the cutter."""

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

from confluent_kafka import Producer

from replayground.schemas.codec import Codec
from replayground.schemas.events import Event
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import LogSettings, Run
from replayground.streams import cut
from replayground.streams.config import CutSettings
from replayground.streams.log.access import AccessGuard
from replayground.streams.log.connect import codec_of
from replayground.streams.log.connection import Connection
from replayground.streams.log.kafka import KafkaLog, KafkaTransactor
from replayground.streams.log.protocol import Log
from tests.torture.oracle import Batches, append, judged_batches
from tests.torture.own_broker import OwnBroker
from tests.torture.scenario import GROUPS_PER_BATCH, completed_groups, lag_of, troubled_run
from tests.torture.stopping import await_that

Moment = Literal["produced", "sent_offsets", "committing", "committed"]
MOMENTS: tuple[Moment, ...] = ("produced", "sent_offsets", "committing", "committed")


@dataclass(frozen=True)
class Cut:
    """What the cutters made of the groups."""

    groups: int
    batches: Batches
    groups_missing: int
    lag: int

    @property
    def holds(self) -> bool:
        whole = self.batches.count == self.groups // GROUPS_PER_BATCH
        return whole and self.batches.hold and self.groups_missing == self.lag == 0


def broker_killed_in_transactions(run: Run, broker: OwnBroker, moments: Sequence[Moment], seed: int) -> Cut:
    """One cutter; the broker is killed at one moment of each transaction after another."""
    run = troubled_run(run, "transactions")
    written = completed_groups(run.run_id, GROUPS_PER_BATCH * (len(moments) + 2))
    trouble = _Trouble(broker, list(moments), random.Random(seed))
    log = _TroubledLog(run.log, codec_of(run), trouble)
    try:
        append(log, written)
        with _cutting(run, log):
            return cut_of(run, log, written)
    finally:
        log.close()


class _Trouble:
    """Knows at which moments the broker is to die."""

    def __init__(self, broker: OwnBroker, moments: list[Moment], chance: random.Random) -> None:
        self._broker = broker
        self._moments = moments
        self._chance = chance

    def is_due(self, moment: Moment) -> bool:
        return bool(self._moments) and self._moments[0] == moment

    def strike(self) -> None:
        self._moments.pop(0)
        self._broker.kill_and_start_again()

    @contextmanager
    def striking_meanwhile(self) -> Iterator[None]:
        """Strikes while the block runs, a little later than it began."""
        timer = threading.Timer(self._chance.uniform(0.0, 0.01), self.strike)
        timer.start()
        yield
        timer.join()


class _TroubledLog(KafkaLog):
    def __init__(self, log: LogSettings, codec: Codec, trouble: _Trouble) -> None:
        super().__init__(log, codec)
        self._trouble = trouble

    def transactor(self, name: str) -> KafkaTransactor:
        return _TroubledTransactor(self.connection, self.codec, name, self._guard, self._trouble)


class _TroubledTransactor(KafkaTransactor):
    def __init__(self, connection: Connection, codec: Codec, name: str, guard: AccessGuard, trouble: _Trouble) -> None:
        self._trouble = trouble
        super().__init__(connection, codec, name, guard)

    def _initialise(self) -> Producer:
        return cast(Producer, _TroubledProducer(super()._initialise(), self._trouble))


class _TroubledProducer:
    """A real producer whose broker dies between two of its calls, or during one."""

    def __init__(self, producer: Producer, trouble: _Trouble) -> None:
        self._producer = producer
        self._trouble = trouble

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)

    def send_offsets_to_transaction(self, *arguments: Any) -> None:
        if self._trouble.is_due("produced"):
            self._producer.flush()
            self._trouble.strike()
        self._producer.send_offsets_to_transaction(*arguments)
        if self._trouble.is_due("sent_offsets"):
            self._trouble.strike()

    def commit_transaction(self) -> None:
        if self._trouble.is_due("committing"):
            with self._trouble.striking_meanwhile():
                self._producer.commit_transaction()
            return
        self._producer.commit_transaction()
        if self._trouble.is_due("committed"):
            self._trouble.strike()


@contextmanager
def _cutting(run: Run, log: KafkaLog) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=cut.cut, args=(run, CutSettings(), ProgramMetrics(), stop, log))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def cut_of(run: Run, log: Log, written: Sequence[Event]) -> Cut:
    """Waits until every group is committed, and judges the batches."""
    await_that(lambda: lag_of(log, f"cut-{run.run_id}", ["groups"]) == 0, "every group is in a batch")
    batches = judged_batches(log, run)
    return Cut(
        groups=len(written),
        batches=batches,
        groups_missing=len({group.meta.group_id for group in written} - batches.groups),
        lag=lag_of(log, f"cut-{run.run_id}", ["groups"]),
    )
