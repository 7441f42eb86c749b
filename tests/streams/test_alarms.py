"""Alarms of a run: what raises each of them, what ends it, and what does not; and that the log has them."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from replayground.deploy.monitor import AlarmWatch
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import (
    AlarmRaised,
    BatchCut,
    Command,
    ControlIssued,
    Event,
    GroupCompleted,
    Meta,
    Probe,
    Purpose,
    StepTaken,
    WeightsLoaded,
    WeightsPublished,
)
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.alarms import AlarmLimits, LoopProgress, alarms_of, progressed

LIMITS = AlarmLimits(
    step_seconds=600, batch_seconds=300, behind_seconds=120, behind_versions=2, groups_per_batch=2, batches=3
)
SERVER = "http://one"


def meta(seconds: float, purpose: Purpose | None = "train", run_id: str = "run", name: str = "") -> Meta:
    at = int(seconds * 1_000_000)
    return Meta(
        id=name or f"id-{at}", run_id=run_id, group_id="g", category="test", topic="t", sender="s", timestamp=at,
        purpose=purpose,
    )  # fmt: skip


def group(seconds: float, dropped_because: str | None = None, purpose: Purpose = "train") -> GroupCompleted:
    return GroupCompleted(
        meta=meta(seconds, purpose), scorer_set="", members=[], reward_mean=0.0, reward_deviation=0.0,
        dropped_because=dropped_because,
    )  # fmt: skip


def batch(seconds: float, index: int) -> BatchCut:
    return BatchCut(
        meta=meta(seconds, name=f"batch-{index}"), index=index, base_version=index, members=[], groups=[],
        tokens_sampled=0, policy_floor=0, groups_stale=[], groups_dropped={}, positions=[],
    )  # fmt: skip


def step(seconds: float, index: int) -> StepTaken:
    return StepTaken(
        meta=meta(seconds), kind="grpo", batch_id=f"batch-{index}", base_version=index, new_version=index + 1,
        metrics={}, seconds={}, code_hash="", config_hash="",
    )  # fmt: skip


def published(seconds: float, version: int) -> WeightsPublished:
    return WeightsPublished(
        meta=meta(seconds), version=version, base_version=None, kind="full", files=[], checkpoint=[], batches=[],
        probe=Probe(tokens=b"", logprobs=b""),
    )  # fmt: skip


def loaded(seconds: float, version: int, refusal: str | None = None, server: str = SERVER) -> WeightsLoaded:
    return WeightsLoaded(
        meta=meta(seconds), server=server, version=version, digest="", probe_gap=0.0, seconds=0.1, refusal=refusal
    )


def control(seconds: float, command: Command, version: int | None = None) -> ControlIssued:
    return ControlIssued(meta=meta(seconds), command=command, version=version, requested_by="", reason="")


def alarms(events: Sequence[Event], now_seconds: float, limits: AlarmLimits = LIMITS) -> dict[str, str]:
    progress = LoopProgress()
    for event in events:
        progress = progressed(progress, event, limits)
    assert len(progress.published) <= limits.behind_versions + 2
    return alarms_of(progress, limits, int(now_seconds * 1_000_000))


def test_a_batch_that_waits_for_its_step() -> None:
    waiting = [batch(100, 0), batch(400, 1)]
    assert alarms(waiting, 700) == {}
    assert alarms(waiting, 701) == {"no_step": "no optimizer step for 601 s, 2 batches wait"}
    assert alarms([*waiting, step(650, 0)], 1250) == {}, "it counts from the step before"
    assert list(alarms([*waiting, step(650, 0)], 1251)) == ["no_step"]
    assert alarms([*waiting, step(650, 0), step(660, 1)], 9999) == {}


def test_groups_that_wait_for_their_batch() -> None:
    enough = [group(100), group(200, "zero_variance"), group(300, purpose="eval"), group(1000)]
    assert alarms(enough[:-1], 9999) == {}, "one group of two"
    assert alarms(enough, 1300) == {}
    assert alarms([*enough, group(1299)], 1301) == {"no_batch": "no batch was cut for 301 s, 3 groups wait"}
    assert alarms([*enough, batch(1301, 0), step(1302, 0), group(1303)], 9999) == {}
    done = [batch(1301, 2), step(1302, 2), group(1303), group(1304)]
    assert alarms([*enough, *done], 9999) == {}, "all batches of the job are cut"
    assert list(alarms([*enough, *done], 9999, replace(LIMITS, batches=0))) == ["no_batch"]


def test_servers_that_fall_behind() -> None:
    kept_up = [published(0, 0), loaded(5, 0), *(published(100 * version, version) for version in (1, 2))]
    assert alarms(kept_up, 9999) == {}, "two versions are allowed"
    behind = [*kept_up, *(published(100 * version, version) for version in range(3, 30))]
    assert alarms(behind, 420) == {}
    assert alarms(behind, 421) == {"serving_behind": f"{SERVER} serves version 0, the newest is 29, for 121 s"}
    assert list(alarms([*behind, loaded(3000, 29, refusal="damaged")], 3001)) == ["serving_behind"]
    assert alarms([*behind, loaded(3000, 29)], 9999) == {}
    assert list(alarms([*behind, loaded(6, 0, server="http://two"), loaded(3000, 29)], 3001)) == ["serving_behind"]
    nothing = [published(0, 0), published(50, 1)]
    assert alarms(nothing, 121) == {
        "serving_behind": "no server has loaded any version, the newest is 1, for 121 s"
    }  # fmt: skip


def test_a_pause_and_a_hold_are_no_trouble() -> None:
    waiting: list[Event] = [batch(100, 0), control(200, "pause")]
    assert alarms(waiting, 9999) == {}
    waiting.append(control(5000, "resume"))
    assert alarms(waiting, 5600) == {}, "nothing counts from before it went on"
    assert list(alarms(waiting, 5601)) == ["no_step"]
    held: list[Event] = [published(0, 0), loaded(1, 0), control(2, "hold", 0), *(published(n, n) for n in range(3, 9))]
    assert alarms(held, 9999) == {}
    held.append(control(5000, "release", 0))
    assert list(alarms(held, 5121)) == ["serving_behind"]


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs(f"file://{tmp_path}")))


def test_the_monitor_writes_when_an_alarm_begins_and_when_it_is_over(log: MemoryLog) -> None:
    run = Run(
        run_id="run", seed=0, job=JobSettings(), log=LogSettings(), blobs_url=log.codec.blobs.url, worker="monitor"
    )
    log.append(batch(0, 0))  # from before
    times = iter([1000, 1601, 1601, 1602, 1604, 1604, 1605])
    watch = AlarmWatch(log, run, LIMITS, now=lambda: next(times) * 1_000_000)
    log.append(replace(batch(1000, 1), meta=meta(1000, run_id="another", name="batch-1")))
    log.append(batch(1000, 1))
    for _ in range(3):
        watch.look()
    log.append(step(1603, 1))
    for _ in range(2):
        watch.look()
    events = [delivery.event for delivery in log.reader(["control"]).poll(100, 0)]
    assert [(event.alarm, event.is_over) for event in events if isinstance(event, AlarmRaised)] == [
        ("no_step", False),
        ("no_step", True),
    ]
