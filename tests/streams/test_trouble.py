"""Short forms of the trouble that `make torture` makes at length."""

import time
from pathlib import Path

from replayground.schemas.run import Run
from replayground.streams.app import state_folder
from replayground.streams.config import StreamsSettings
from replayground.streams.log.connect import open_log
from tests.flow.synthetic import groups
from tests.torture.own_broker import own_broker
from tests.torture.rivals import rival_cutters, rival_trainers
from tests.torture.scenario import completed_groups
from tests.torture.stopping import await_that
from tests.torture.storm import storm
from tests.torture.transactions import broker_killed_in_transactions


def test_a_broker_that_dies_inside_transactions_shows_each_batch_once(kafka_run: Run, tmp_path: Path) -> None:
    with own_broker(tmp_path / "broker", kafka_run) as (broker, run):
        verdict = broker_killed_in_transactions(run, broker, ["sent_offsets", "committing"], seed=1)
        assert broker.kills == 2
    assert verdict.holds, verdict


def test_readers_hear_again_of_a_broker_that_slept_and_was_taken_for_dead(kafka_run: Run, tmp_path: Path) -> None:
    """For a moment it says that there are no brokers; a client that believed it would never read again."""
    with own_broker(tmp_path / "broker", kafka_run) as (broker, run):
        log = open_log(run)
        readers = [log.reader(["groups"]) for _ in range(6)]
        written = completed_groups(run.run_id, 3)
        for number, group in enumerate(written):
            log.append(group)
            log.flush(120.0)
            for reader in readers:
                await_that(lambda reader=reader: bool(reader.poll(10, 0.5)), "the reader goes on")  # type: ignore[misc]
            if number < 2:
                broker.sleep(6.0)
        for reader in readers:
            reader.close()
        log.close()


def test_a_partition_that_is_lost_while_it_is_held_is_read_when_it_comes_back(kafka_run: Run) -> None:
    """A worker with its hands full holds its partitions; another takes some of them, and gives them back."""
    log, other = open_log(kafka_run), open_log(kafka_run)
    run_id = f"held-{time.time_ns():x}"
    busy = log.reader(["messages"], group=run_id)
    await_that(lambda: bool(busy.poll(1, 0.5)) or busy.caught_up(), "all partitions are the first one's")
    busy.poll(0, 0.1)
    guest = other.reader(["messages"], group=run_id)

    def guest_has_some() -> bool:
        busy.poll(0, 0.1)
        return bool(guest.poll(1, 0.1)) or guest.caught_up()

    await_that(guest_has_some, "the second has its share")
    busy.poll(1, 0.5)  # lets go what is left
    guest.close()
    written = {event.meta.id for rollout in groups(20, run_id=run_id) for event in rollout}
    for rollout in groups(20, run_id=run_id):
        for event in rollout:
            log.append(event)
    log.flush()
    read: set[str] = set()

    def has_read_all() -> bool:
        read.update(d.event.meta.id for d in busy.poll(1000, 0.5) if d.event and d.event.meta.run_id == run_id)
        return read == written

    await_that(has_read_all, "what comes on every partition is read")
    busy.close()
    log.close()
    other.close()


def test_of_two_cutters_the_older_ends_and_no_group_is_cut_twice(kafka_run: Run) -> None:
    verdict = rival_cutters(kafka_run, [False, True])
    assert verdict.holds, verdict


def test_of_two_trainers_the_older_ends_and_no_step_is_taken_twice(kafka_run: Run) -> None:
    verdict = rival_trainers(kafka_run, [True])
    assert verdict.holds, verdict


def test_workers_that_come_and_go_and_sleep_lose_nothing(kafka_run: Run, tmp_path: Path) -> None:
    verdict = storm(kafka_run, tmp_path, ["sleep", "kill", "leave"], groups_count=40, seed=1)
    assert verdict.holds, verdict


def test_nothing_flows_while_partitions_are_sought(kafka_run: Run, tmp_path: Path) -> None:
    """What is delivered between a rebalance and the seek after it would be thrown away, and committed."""
    verdict = storm(kafka_run, tmp_path, ["join", "leave", "join"], groups_count=60, seed=2, seek_seconds=1.0)
    assert verdict.holds, verdict


def test_each_worker_keeps_its_tables_in_a_folder_of_its_own(tmp_path: Path) -> None:
    settings = StreamsSettings(state_folder=str(tmp_path))
    folders = {state_folder(settings, name) for name in ("streams", "streams-2", "..", "a/b", "../streams")}
    assert len(folders) == 5
    assert all(folder.parent == tmp_path for folder in folders)
    assert all(folder.resolve() == folder for folder in folders)
