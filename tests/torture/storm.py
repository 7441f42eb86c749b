"""Workers of one Faust app that come and go, and sleep past their session, while messages flow."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from replayground.schemas.codec import Codec
from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Event, EventRejected
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from tests.flow.synthetic import groups
from tests.torture.oracle import FactComparison, compared, events_of, undisturbed
from tests.torture.programs import Program, streams_program
from tests.torture.scenario import flowing, kill_all, lag_of, troubled_run
from tests.torture.stopping import await_that

READ_TOPICS = ("messages", "trajectories", "rewards")

Act = Literal["join", "leave", "kill", "sleep"]
ACTS: tuple[Act, ...] = ("join", "leave", "kill", "sleep")
WORKERS_MAX = 3


@dataclass(frozen=True)
class Stormed:
    """What the workers made of the messages."""

    acts: list[Act]
    messages: int
    facts: FactComparison
    refused: int
    "good messages that are on the dead letters"
    lag: int
    ends: Counter[str]
    "of workers that were told to leave, or ended by themselves"

    @property
    def holds(self) -> bool:
        nothing_amiss = self.facts.lost == self.facts.foreign == self.refused == self.lag == 0
        return nothing_amiss and set(self.ends) <= {"exit code 0"}


def storm(
    run: Run, folder: Path, acts: Sequence[Act], groups_count: int, seed: int, seek_seconds: float = 0.0
) -> Stormed:
    """Workers join, leave, are killed and sleep past their session while messages flow."""
    run = troubled_run(run, "storm")
    chance = random.Random(seed)
    messages = [event for rollout in groups(groups_count, run_id=run.run_id) for event in rollout]
    field = _Field(run, folder, chance, seek_seconds)
    try:
        with flowing(run, messages, seconds=8.0 * len(acts)):
            for act in acts:
                time.sleep(chance.uniform(1.0, 4.0))
                field.do(act)
        field.replace_the_fallen()
        return _stormed(run, messages, list(acts), field)
    finally:
        kill_all(field.workers)


class _Field:
    """The workers of one app. One that ends by itself is started again under its name, as a supervisor would."""

    def __init__(self, run: Run, folder: Path, chance: random.Random, seek_seconds: float) -> None:
        self._run = run
        self._folder = folder
        self._chance = chance
        self._seek_seconds = seek_seconds
        self._by_name: dict[str, Program] = {}
        self.ends: Counter[str] = Counter()
        self.do("join")
        self.do("join")

    @property
    def workers(self) -> list[Program]:
        return list(self._by_name.values())

    def do(self, act: Act) -> None:
        self.replace_the_fallen()
        if act == "join" and len(self._by_name) < WORKERS_MAX:
            names = {f"streams-{number}" for number in range(WORKERS_MAX)}
            self._start(self._chance.choice(sorted(names - self._by_name.keys())))
        if act == "join":
            return
        name = self._chance.choice(sorted(self._by_name))
        worker = self._by_name[name]
        if act == "sleep":
            worker.stop_past_session()
        elif act == "kill":
            worker.kill()
            self._start(name)
        else:
            del self._by_name[name]
            worker.leave()
            self.ends[worker.ended()] += 1
            if not self._by_name:
                self._start(name)

    def replace_the_fallen(self) -> None:
        for name, worker in list(self._by_name.items()):
            if not worker.is_alive:
                self.ends[worker.ended()] += 1
                self._start(name)

    def leave(self) -> None:
        """Everybody drains."""
        for worker in self.workers:
            worker.leave()
        for worker in self.workers:
            self.ends[worker.ended()] += 1

    def _start(self, name: str) -> None:
        run = msgspec.structs.replace(self._run, worker=name)
        self._by_name[name] = streams_program(run, self._folder, self._seek_seconds)


def _stormed(run: Run, messages: Sequence[Event], acts: list[Act], field: _Field) -> Stormed:
    quiet = undisturbed(messages, run.run_id)
    log = open_log(run)
    try:
        await_that(lambda: lag_of(log, f"streams-{run.run_id}", READ_TOPICS) == 0, "everything is taken and committed")
        field.leave()
        facts = compared(log, quiet, run.run_id)
        refused = sum(_is_good(log.codec, event) for event in events_of(log, run.run_id, "dead-letters"))
        lag = lag_of(log, f"streams-{run.run_id}", READ_TOPICS)
        return Stormed(acts, len(messages), facts, refused, lag, field.ends)
    finally:
        log.close()


def _is_good(codec: Codec, reject: Event) -> bool:
    """Other tests may have left on the same topics what cannot be read: that is refused, and rightly so."""
    assert isinstance(reject, EventRejected)
    try:
        codec.decode(reject.original, reject.origin.topic)
    except Undecodable:
        return False
    return True
