"""Workers as processes on a real broker: one is killed, one is frozen and comes back, and every member is filled once."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from aiohttp import web

from replayground.producers.config import RolloutsSettings, SchedulerSettings
from replayground.producers.scheduler import Plan
from replayground.schemas.blobs import Blobs
from replayground.schemas.errors import Rebalanced
from replayground.schemas.events import Event, GroupCompleted, RolloutEnded, RolloutRequested, RolloutStarted
from replayground.schemas.ids import now_microseconds
from replayground.schemas.run import Run
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from tests.flow.synthetic import groups
from tests.producers.field import published
from tests.producers.test_policy import GOOD
from tests.producers.test_scheduler import tasks

PATIENCE_SECONDS = 120.0
TASKS, GROUP_SIZE, SLOTS = 24, 4, 8


class Site:
    """A run on the broker, its workers, and what they have written so far."""

    def __init__(self, run: Run, log: KafkaLog, server_url: str, turns: asyncio.Semaphore) -> None:
        self.run = run
        self.log = log
        self.turns = turns
        self.events: list[Event] = []
        self._settings = RolloutsSettings(slots=SLOTS, servers=[server_url], commit_seconds=0.1, grace_seconds=30.0)
        self._reader = log.reader(["messages"])
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def ask(self) -> list[RolloutRequested]:
        plan = Plan(self.run, SchedulerSettings(demonstrations_in_flight=10**6))
        for task in tasks(TASKS, GROUP_SIZE, "demonstrate"):
            plan.apply(task)
        requests = [self._ours(event) for event in plan.decide(now_microseconds())]
        for request in requests:
            self.log.append(request)
        self.log.flush()
        return [request for request in requests if isinstance(request, RolloutRequested)]

    def _ours(self, event: Event) -> Event:
        changes: dict[str, Any] = {"run_id": self.run.run_id, "purpose": "train"}
        return msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, **changes))

    def start(self, name: str) -> None:
        run = msgspec.structs.replace(self.run, worker=name)
        given = [msgspec.json.encode(part).decode() for part in (run, self._settings)]
        self.workers[name] = subprocess.Popen([sys.executable, "-m", "tests.producers.worker_program", *given])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        give_up = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not condition():
            assert asyncio.get_running_loop().time() < give_up, f"it did not happen in time: {what}; {self.told()}"
            deliveries = await asyncio.to_thread(self._reader.poll, 1000, 0.1)
            ours = (delivery.event for delivery in deliveries if delivery.event is not None)
            self.events += [event for event in ours if event.meta.run_id == self.run.run_id]

    def told(self) -> str:
        return ", ".join(
            f"{name} ended {len(self.ends(name))} and plays {len(self.under_way(name))}" for name in self.workers
        )

    def ends(self, worker: str | None = None) -> list[RolloutEnded]:
        ends = [event for event in self.events if isinstance(event, RolloutEnded)]
        return [end for end in ends if worker in (None, end.meta.sender)]

    def ended(self) -> set[str | None]:
        return {end.meta.trajectory_id for end in self.ends()}

    def under_way(self, worker: str) -> set[str | None]:
        """Trajectories of attempts that this worker began and did not end."""
        over = {end.meta.attempt_id for end in self.ends()}
        began = [event for event in self.events if isinstance(event, RolloutStarted) and event.worker == worker]
        return {event.meta.trajectory_id for event in began if event.meta.attempt_id not in over}

    def attempts(self) -> dict[str | None, list[RolloutStarted]]:
        found: dict[str | None, list[RolloutStarted]] = {}
        for event in self.events:
            if isinstance(event, RolloutStarted):
                found.setdefault(event.meta.trajectory_id, []).append(event)
        return found

    def lag(self) -> int:
        return self.log.group_lags(f"rollouts-{self.run.run_id}", ["rollouts"])["rollouts"].lag

    def groups(self) -> list[GroupCompleted]:
        """What the stream hops make of it all."""
        driver = Driver(self.log, hops((), "centred"), self.run.run_id)
        driver.run_until_caught_up()
        driver.close()
        reader = self.log.reader(["groups"])
        found: list[Event | None] = []
        while not reader.caught_up():
            found += [delivery.event for delivery in reader.poll(1000, 0.5)]
        reader.close()
        completed = [event for event in found if isinstance(event, GroupCompleted)]
        return [group for group in completed if group.meta.run_id == self.run.run_id]

    def close(self) -> None:
        for worker in self.workers.values():
            if worker.poll() is None:
                worker.kill()
            worker.wait()
        self._reader.close()


@asynccontextmanager
async def policy_server(turns: asyncio.Semaphore) -> AsyncIterator[str]:
    """Answers as many turns as it is given, in the order they were asked."""

    async def generate(received: web.Request) -> web.Response:
        asked = await received.json()
        await turns.acquire()
        return web.json_response(GOOD(asked))

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def a_site(kafka_run: Run) -> AsyncIterator[Site]:
    run = msgspec.structs.replace(kafka_run, run_id=f"workers-{uuid.uuid4().hex[:8]}")
    log = open_log(run)
    weights = await asyncio.to_thread(published, 0, Blobs(run.blobs_url))
    log.append(msgspec.structs.replace(weights, meta=msgspec.structs.replace(weights.meta, run_id=run.run_id)))
    log.flush()
    turns = asyncio.Semaphore(0)
    async with policy_server(turns) as url:
        site = Site(run, log, url, turns)
        try:
            yield site
        finally:
            site.close()
            log.close()


async def both_working(site: Site, *names: str) -> list[RolloutRequested]:
    """Every slot of the first is taken when the second joins, so partitions are moved under a worker that takes nothing."""
    site.start(names[0])
    requests = site.ask()
    await site.until(lambda: len(site.under_way(names[0])) == SLOTS, "the first one has its hands full")
    site.start(names[1])
    await site.until(lambda: len(site.under_way(names[1])) == SLOTS, "the second one has been given partitions")
    for _ in range(2 * SLOTS):
        site.turns.release()
    for name in names:
        ends_some = partial(_ends_and_goes_on, site, name)
        await site.until(ends_some, f"{name} has ended some and is in the middle of others")
    return requests


def _ends_and_goes_on(site: Site, name: str) -> bool:
    return bool(site.ends(name)) and len(site.under_way(name)) == SLOTS


def let_all_end(site: Site) -> None:
    for _ in range(10 * TASKS * GROUP_SIZE):
        site.turns.release()


def assert_every_member_is_filled_by_its_first_end(site: Site, requests: list[RolloutRequested]) -> None:
    first: dict[str | None, str | None] = {}
    for end in site.ends():  # a trajectory is on one partition: this is the order of the log
        first.setdefault(end.meta.trajectory_id, end.meta.attempt_id)
    completed = site.groups()
    assert len(completed) == TASKS
    filled = {member.trajectory_id: member.attempt_id for group in completed for member in group.members}
    assert Counter(len(group.members) for group in completed) == {GROUP_SIZE: TASKS}
    assert filled == first
    assert filled.keys() == {request.meta.trajectory_id for request in requests}


async def test_what_a_killed_worker_had_begun_is_attempted_again_elsewhere(kafka_run: Run) -> None:
    async with a_site(kafka_run) as site:
        requests = await both_working(site, "victim", "survivor")
        site.workers["victim"].kill()
        site.workers["victim"].wait()
        let_all_end(site)
        await site.until(lambda: site.ended() >= {request.meta.trajectory_id for request in requests}, "all ended")
        left = site.under_way("victim")
        assert left, "it was killed in the middle of something"
        by = {trajectory: [started.worker for started in site.attempts()[trajectory]] for trajectory in left}
        assert all("survivor" in workers for workers in by.values()), by
        assert all(end.ended_by == "agent_error" for end in site.ends())
        await asyncio.to_thread(wait_until_committed, site)
        await asyncio.to_thread(assert_every_member_is_filled_by_its_first_end, site, requests)


async def test_a_frozen_worker_that_comes_back_changes_nothing(kafka_run: Run) -> None:
    """Its partitions are given to another; what it then ends is a second end, and the first one counts."""
    async with a_site(kafka_run) as site:
        requests = await both_working(site, "frozen", "other")
        site.workers["frozen"].send_signal(signal.SIGSTOP)
        let_all_end(site)
        await site.until(lambda: site.ended() >= {request.meta.trajectory_id for request in requests}, "all ended")
        assert site.under_way("frozen"), "it was frozen in the middle of something"
        site.workers["frozen"].send_signal(signal.SIGCONT)
        await site.until(lambda: not site.under_way("frozen"), "what it had begun ends twice")
        assert any(count > 1 for count in Counter(end.meta.trajectory_id for end in site.ends()).values())
        for worker in site.workers.values():
            assert worker.poll() is None, "a rebalance ends no worker"
            worker.send_signal(signal.SIGTERM)
        for worker in site.workers.values():
            assert await asyncio.to_thread(worker.wait, PATIENCE_SECONDS) == 0
        assert site.lag() == 0
        await asyncio.to_thread(assert_every_member_is_filled_by_its_first_end, site, requests)


def test_a_commit_amid_a_rebalance_is_told_apart_and_the_reader_goes_on(kafka_run: Run) -> None:
    """Another member comes and goes until a commit falls between the old generation of the group and the new one."""
    log, group = open_log(kafka_run), f"rebalanced-{uuid.uuid4().hex[:8]}"
    for messages in groups(4, run_id=group):
        for message in messages:
            log.append(message)
    log.flush()
    reader = log.reader(["messages"], group=group)
    while not reader.caught_up():
        reader.poll(10_000, 0.1)
    positions = reader.positions()
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            other = log.reader(["messages"], group=group)
            for _ in range(10):
                other.poll(10, 0.02)
            other.close()

    member = threading.Thread(target=come_and_go)
    member.start()
    give_up = time.monotonic() + PATIENCE_SECONDS
    refused = False
    try:
        while not refused and time.monotonic() < give_up:
            reader.poll(10_000, 0.005)
            try:
                reader.commit(positions)
            except Rebalanced:
                refused = True
    finally:
        stop.set()
        member.join()
    assert refused, "no commit fell into a rebalance"
    while not reader.caught_up():
        reader.poll(10_000, 0.1)
    reader.commit(positions)
    reader.close()
    log.close()


def wait_until_committed(site: Site) -> None:
    for _ in range(int(PATIENCE_SECONDS / 0.2)):
        if site.lag() == 0:
            return
        signal.sigtimedwait([], 0.2)
    pytest.fail("what has ended was not committed")
