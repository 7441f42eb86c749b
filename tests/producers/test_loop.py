"""Feeder, scheduler, worker and hops together over one log: the producers' half of the loop, with a server that is faked."""

import asyncio
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from replayground.producers import rollouts, scheduler, tasks
from replayground.producers.chat import ChatFormat
from replayground.producers.config import FeederSettings, RolloutsSettings, SchedulerSettings
from replayground.schemas.events import ControlIssued, Event, RolloutRequested, TaskSubmitted, TrajectoryAssembled
from replayground.schemas.metrics import ProgramMetrics
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from tests.producers.field import RUN_ID, a_log, a_run, events_on, published, tokenizer_json
from tests.producers.test_policy import FinalAnswer, server
from tests.producers.test_rollouts import scripted
from tests.producers.test_scheduler import loaded

CHAT = ChatFormat(tokenizer_json())


class Speaker:
    """A faked server: answers at once with the right form, and fails now and then; its version can be changed."""

    def __init__(self) -> None:
        self.version = "default"
        self._asked = 0

    def __call__(self, body: dict[str, Any]) -> dict[str, Any] | int:
        self._asked += 1
        if self._asked % 17 == 0:
            return 500
        tokens = CHAT.turn(f"<answer>{self._asked % 2}</answer>")
        content = [{"token_id": token, "logprob": -1.0} for token in tokens]
        spans = [{"version": self.version, "start": 0, "end": len(tokens)}]
        choice = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        return {"choices": [choice | {"finish_reason": "stop"}]}


def flow(log: MemoryLog, stop: threading.Event) -> None:
    """assemble, score, group: as the stream processors run them."""
    driver = Driver(log, hops((), "centred"), RUN_ID)
    while not stop.wait(0.02):
        driver.run_until_caught_up()
    driver.close()


async def until(condition: Any, what: str) -> None:
    for _ in range(300):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(what)


async def test_from_demonstrations_to_training_groups(tmp_path: Path) -> None:
    run = a_run(tmp_path, demonstrations=30, steps=2, groups_per_batch=2, group_size=4)
    log, blobs = a_log(tmp_path)
    speaker: FinalAnswer = Speaker()
    stop = threading.Event()
    feeding = FeederSettings(evaluation_tasks=10, evaluation_every=0, train_backlog=4, poll_seconds=0.01)
    scheduling = SchedulerSettings(demonstrations_in_flight=8, poll_seconds=0.01, retry_seconds=0.05)
    log.append(await asyncio.to_thread(published, 0, blobs))

    def count(kind: type[Event], **meta: str) -> int:
        events = events_on(log, {TaskSubmitted: "tasks", TrajectoryAssembled: "trajectories"}[kind])
        return sum(all(getattr(event.meta, name) == value for name, value in meta.items()) for event in events)

    async with server(speaker) as (url, _):
        working = RolloutsSettings(slots=8, sandboxes=4, servers=[url], commit_seconds=0.05, poll_seconds=0.01)
        programs = [
            threading.Thread(target=tasks.feed, args=(run, feeding, ProgramMetrics(), stop, log)),
            threading.Thread(target=scheduler.schedule, args=(run, scheduling, ProgramMetrics(), stop, log)),
            threading.Thread(target=rollouts.work, args=(run, working, ProgramMetrics(), stop, log, blobs, scripted())),
            threading.Thread(target=flow, args=(log, stop)),
        ]
        for program in programs:
            program.start()
        try:
            await until(lambda: count(TrajectoryAssembled, purpose="demonstrate") == 30, "demonstrations")
            log.append(published(1))
            await until(lambda: count(TaskSubmitted, purpose="eval") == 10, "the start evaluation")
            assert not any(event.meta.purpose == "eval" for event in events_on(log, "rollouts"))
            assert isinstance(speaker, Speaker)
            speaker.version = "1"
            log.append(loaded(1))
            await until(lambda: count(TrajectoryAssembled, session_id="eval-v0001-sampled") == 10, "its end")
            await until(lambda: len(events_on(log, "groups")) >= 4, "training groups")
        finally:
            stop.set()
            await asyncio.gather(*(asyncio.to_thread(program.join, 20) for program in programs))
    assert events_on(log, "dead-letters") == []
    controls = [event.command for event in events_on(log, "control") if isinstance(event, ControlIssued)]
    assert controls == ["hold", "release"]
    requests = [event for event in events_on(log, "rollouts") if isinstance(event, RolloutRequested)]
    assert max(Counter(request.meta.id for request in requests).values()) == 1
    groups = {request.meta.group_id for request in requests if request.meta.purpose == "train"}
    assert len(groups) - len(events_on(log, "groups")) <= 4, "paced: two batches of two groups ahead"
