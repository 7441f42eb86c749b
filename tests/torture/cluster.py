"""The example job on a secured cluster of three brokers, which are killed -9 one at a time under load; then the log is judged.

`replayground run` is given the cluster's addresses as anybody's Kafka: SASL_SSL, three copies, two in sync, a prefix, and
credentials and ACLs of its own for every program.
"""

import random
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from replayground.deploy.local.cluster import NODES
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import LogSettings, Run
from replayground.streams.log.connect import open_log
from tests.flow.synthetic import groups
from tests.torture.kills import Verdict, example_job, judged, kill_until_finished
from tests.torture.oracle import Batches, FactComparison, compared, events_of, judged_batches, undisturbed
from tests.torture.programs import Program, cut_program, streams_program
from tests.torture.progress import tell
from tests.torture.running import running
from tests.torture.scenario import GROUPS_PER_BATCH, flowing, kill_all, taught_by, troubled_run
from tests.torture.secure_field import SecureField, secure_field
from tests.torture.stopping import await_that

TENANT = "torture."


@dataclass(frozen=True)
class OnCluster:
    """What came of it."""

    verdict: Verdict
    kills_wanted: int

    @property
    def holds(self) -> bool:
        return self.verdict.holds and self.verdict.kills.total() >= self.kills_wanted


def train_on_cluster(folder: Path, kills_wanted: int, seed: int, steps: int) -> OnCluster:
    """Raises AssertionError when the run does not end."""
    chance = random.Random(seed)
    with secure_field(folder / "brokers", [TENANT]) as field:
        job = example_job(folder, steps)
        job.write_text(job.read_text() + toml_of(field.run_of(TENANT).log))
        with running(folder, job, "--seed", str(seed)) as tortured:
            began = time.monotonic()
            # with two of three replicas required, a broker that is killed before the last one has caught up stops all writing:
            # that would be two faults at once
            kills = kill_until_finished(
                tortured,
                lambda: chance.uniform(2.0, 6.0),
                kills_wanted,
                lambda: _kill_one(field, chance) if field.is_in_sync() else None,
            )
            summary = tortured.page.finish().summary
            run = tortured.resolved.run_of("judge", OPERATOR)
            log = open_log(run)
            try:
                return OnCluster(judged(log, run, kills, time.monotonic() - began, summary), kills_wanted)
            finally:
                log.close()


@dataclass(frozen=True)
class Flowed:
    """What the streams and the cutter made of messages that flowed while brokers were killed."""

    kills: int
    messages: int
    facts: FactComparison
    batches: Batches
    groups_left: int
    "that were completed, teach something, fill a batch and are in none"

    @property
    def holds(self) -> bool:
        return self.facts.lost == self.facts.foreign == self.groups_left == 0 and self.batches.hold


def flow_on_cluster(folder: Path, kills_wanted: int, seed: int, groups_count: int) -> Flowed:
    """Streams and cutter alone, without a model: more kills in less time. Raises AssertionError when work is left."""
    chance = random.Random(seed)
    with secure_field(folder / "brokers", [TENANT]) as field:
        run = troubled_run(field.run_of(TENANT), "flow")
        messages = [event for rollout in groups(groups_count, run_id=run.run_id) for event in rollout]
        wanted = len(taught_by(events_of(undisturbed(messages, run.run_id), run.run_id, "groups"))) // GROUPS_PER_BATCH
        pair = _Pair(run, folder / "state")
        try:
            with flowing(run, messages, seconds=20.0 * kills_wanted):
                for number in range(kills_wanted):
                    time.sleep(chance.uniform(1.0, 4.0))
                    pair.replace_the_fallen()
                    await_that(field.is_in_sync, "every replica is in sync")
                    _kill_one(field, chance)
                    tell(f"cluster: {number + 1} of {kills_wanted} brokers killed under streams and cut")
            await_that(lambda: pair.replace_the_fallen() or _batches_cut(run) >= wanted, f"{wanted} batches are cut")
        finally:
            kill_all(pair.programs)
        log = open_log(run)
        try:
            batches = judged_batches(log, run)
            facts = compared(log, undisturbed(messages, run.run_id), run.run_id)
        finally:
            log.close()
    return Flowed(kills_wanted, len(messages), facts, batches, wanted * GROUPS_PER_BATCH - len(batches.groups))


class _Pair:
    """Streams and cutter, each as its own user, started again when the log was away for too long."""

    def __init__(self, run: Run, state: Path) -> None:
        self._run = run
        self._state = state
        self.programs = [self._started(name) for name in ("streams", "cut")]

    def _started(self, name: str) -> Program:
        run = msgspec.structs.replace(self._run, program=name)
        return streams_program(run, self._state) if name == "streams" else cut_program(run)

    def replace_the_fallen(self) -> bool:
        """False, so that it can stand in a condition."""
        for place, name in enumerate(("streams", "cut")):
            if not self.programs[place].is_alive:
                tell(f"cluster: {name} is started again after {self.programs[place].ended()}")
                self.programs[place] = self._started(name)
        return False


def _batches_cut(run: Run) -> int:
    log = open_log(run)
    try:
        return len(events_of(log, run.run_id, "batches"))
    except LogUnavailable:
        return 0
    finally:
        log.close()


def _kill_one(field: SecureField, chance: random.Random) -> str:
    node = chance.choice(NODES)
    field.running.kill(node)
    time.sleep(chance.uniform(0.0, 3.0))
    field.running.start(node)
    return f"broker {node}"


def toml_of(log: LogSettings) -> str:
    """The section [log] of a config."""
    security = log.security
    return f"""
[log]
bootstrap_servers = "{log.bootstrap_servers}"
registry_url = "{log.registry_url}"
topic_prefix = "{log.topic_prefix}"
replication = {log.replication}
min_in_sync = {log.min_in_sync}

[log.security]
protocol = "{security.protocol}"
ca_file = "{security.ca_file}"
mechanism = "{security.mechanism}"
username = "{security.username}"
password = "{security.password}"
"""
