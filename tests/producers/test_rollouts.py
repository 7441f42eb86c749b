"""The worker over the log in memory: what ended is committed, what did not is played again, and nothing bad stops it."""

import asyncio
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from replayground.producers import rollouts, stockroom
from replayground.producers.chat import ChatFormat
from replayground.producers.config import RolloutsSettings, SchedulerSettings
from replayground.producers.scheduler import Plan
from replayground.sandboxes.backends.scripted import ScriptedBackend, ScriptedSandbox
from replayground.sandboxes.protocol import SandboxFailed
from replayground.schemas.errors import LogUnavailable
from replayground.schemas.events import (
    EventRejected,
    RolloutEnded,
    RolloutRequested,
    ToolCalled,
    ToolObserved,
    TurnGenerated,
)
from replayground.schemas.ids import now_microseconds
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.packed import unpack_tokens
from replayground.schemas.run import Run
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.dead_letter import TooManyRejects
from tests.producers.field import RUN_ID, a_log, a_run, events_on, published, submitted, tokenizer_json
from tests.producers.test_policy import GOOD, answer, server
from tests.producers.test_scheduler import cancel

SETTINGS = RolloutsSettings(slots=8, sandboxes=4, commit_seconds=0.05, poll_seconds=0.01, grace_seconds=2.0)
GROUP = f"rollouts-{RUN_ID}"


class Field:
    """A run with a log, and a worker to be started in a thread."""

    def __init__(self, folder: Path) -> None:
        self.run: Run = a_run(folder)
        self.log, self.blobs = a_log(folder)
        self.program_metrics = ProgramMetrics()
        self.stop = threading.Event()
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def ask(self, count: int, purpose: str = "demonstrate") -> list[RolloutRequested]:
        plan = Plan(self.run, SchedulerSettings(demonstrations_in_flight=10**6, evaluations_in_flight=10**6))
        for number, task in enumerate(islice(stockroom.tasks("train", 0), count)):
            plan.apply(submitted(task, number, "demonstrate"))
        requests = [event for event in plan.decide(now_microseconds()) if isinstance(event, RolloutRequested)]
        changed = [
            msgspec.structs.replace(request, meta=msgspec.structs.replace(request.meta, purpose=purpose))
            for request in requests
        ]
        for request in changed:
            self.log.append(request)
        return changed

    def start(self, backend: Any = None, settings: RolloutsSettings = SETTINGS) -> None:
        def work() -> None:
            try:
                rollouts.work(self.run, settings, self.program_metrics, self.stop, self.log, self.blobs, backend)
            except BaseException as error:
                self.failure = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        give_up = time.monotonic() + seconds
        while not condition():
            assert self.failure is None, self.failure
            assert time.monotonic() < give_up, "it did not happen in time"
            time.sleep(0.01)

    def finish(self) -> None:
        self.stop.set()
        assert self.thread is not None
        self.thread.join(30)
        assert not self.thread.is_alive()
        if self.failure is not None:
            raise self.failure

    @property
    def lag(self) -> int:
        return self.log.group_lags(GROUP, ["rollouts"])["rollouts"].lag

    def calling(self) -> list[str | None]:
        """Trajectories that have called a tool and not ended."""
        over = {end.meta.trajectory_id for end in self.ends()}
        calls = [event for event in events_on(self.log, "messages") if isinstance(event, ToolCalled)]
        return [call.meta.trajectory_id for call in calls if call.meta.trajectory_id not in over]

    def cancelled(self) -> list[RolloutEnded]:
        return [end for end in self.ends() if end.ended_by == "cancelled"]

    def ends(self) -> list[RolloutEnded]:
        return [event for event in events_on(self.log, "messages") if isinstance(event, RolloutEnded)]


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


def scripted(**scripts: Callable[[Any], str]) -> ScriptedBackend:
    room = {"sql": lambda a: "7", "kv": lambda a: "7", "python": lambda a: "45", "set_up_world": lambda a: ""}
    return ScriptedBackend(room | scripts)


def test_demonstrations_are_played_and_committed(field: Field) -> None:
    field.log.append(published(0, field.blobs))
    requests = field.ask(40)
    field.start(scripted())
    field.until(lambda: field.lag == 0)
    field.finish()
    ends = field.ends()
    assert {end.meta.trajectory_id for end in ends} == {request.meta.trajectory_id for request in requests}
    assert {end.ended_by for end in ends} == {"answered"}
    figures = field.program_metrics.figures()
    assert figures["events_read"] == 40
    assert figures["events_written"] == len(events_on(field.log, "messages"))
    by_attempt: dict[str, list[int]] = {}
    for event in events_on(field.log, "messages"):
        by_attempt.setdefault(event.meta.attempt_id or "", []).append(event.meta.seq or 0)
    assert all(numbers == list(range(len(numbers))) for numbers in by_attempt.values()), "in order, without gaps"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_demonstrations_in_real_sandboxes_earn_what_the_recipe_says(field: Field) -> None:
    field.log.append(published(0, field.blobs))
    references = {request.meta.trajectory_id: request.task.reference for request in field.ask(240)}
    field.start()
    field.until(lambda: field.lag == 0)
    field.finish()
    ends = field.ends()
    assert Counter(end.ended_by for end in ends) == {"answered": 240}
    reward = sum(end.answer == references[end.meta.trajectory_id] for end in ends) / len(ends)
    assert reward == pytest.approx(0.41, abs=0.1)
    observed = [event for event in events_on(field.log, "messages") if isinstance(event, ToolObserved)]
    assert {event.content for event in observed if event.is_error} == {"error: busy", "error: not found"}
    assert any('"busy"' in (event.perturbation or "") for event in observed)


def test_it_waits_for_the_tokenizer(field: Field) -> None:
    field.ask(3)
    field.start(scripted())
    time.sleep(0.3)
    assert events_on(field.log, "messages") == []
    field.log.append(published(0, field.blobs))
    field.until(lambda: field.lag == 0)
    field.finish()
    assert len(field.ends()) == 3


def test_stopping_before_there_is_a_tokenizer(field: Field) -> None:
    field.start(scripted())
    field.finish()


def test_a_worker_that_can_read_next_to_nothing_stops_with_an_alarm(field: Field) -> None:
    for number in range(200):
        field.log.append_bytes("rollouts", str(number).encode(), b"no request at all")
    field.log.append(published(0, field.blobs))
    field.start(scripted())
    assert field.thread is not None
    field.thread.join(30)
    assert isinstance(field.failure, TooManyRejects)
    assert "rollouts rejected 100 of the last 100" in str(field.failure)


def test_bad_requests_become_facts_and_the_worker_lives(field: Field) -> None:
    field.log.append(published(0, field.blobs))
    field.log.append_bytes("rollouts", b"k", b"no event")
    good = field.ask(2)
    broken = [
        msgspec.structs.replace(good[0], task=msgspec.structs.replace(good[0].task, world="{")),
        msgspec.structs.replace(good[0], task=msgspec.structs.replace(good[0].task, toolset=["telepathy"])),
        msgspec.structs.replace(good[0], task=msgspec.structs.replace(good[0].task, tags={})),
        msgspec.structs.replace(good[0], meta=msgspec.structs.replace(good[0].meta, run_id="another")),
        msgspec.structs.replace(good[0], deadline=0),
    ]
    for request in broken:
        field.log.append(request)
    field.start(scripted())
    field.until(lambda: field.lag == 0)
    field.finish()
    ends = Counter(end.ended_by for end in field.ends())
    assert ends == {"answered": 2, "infra_error": 4}
    assert "its deadline had passed before a slot was free" in [end.reason for end in field.ends()]
    (rejected,) = events_on(field.log, "dead-letters")
    assert isinstance(rejected, EventRejected)
    assert (rejected.original, rejected.stage, rejected.origin.topic) == (b"no event", "rollouts", "rollouts")


def test_every_kind_of_trouble_is_written_on_the_event(field: Field) -> None:
    """Outside the model and the sandbox: the tool said one thing, the agent read another, and the log has both."""
    field.log.append(published(0, field.blobs))
    (request, *_) = [r for r in field.ask(3) if r.task.tags["kind"] == "look"]
    kinds = ("busy", "latency", "stale", "truncate", "pagination", "partial")
    for kind in kinds:
        rule = {"kind": kind, "tools": ["sql", "kv"], "characters_max": 3, "lines_per_page": 1, "milliseconds_max": 2}
        world = {"name": kind, "perturbations": [rule | {"lines_lost_share": 1.0}]}
        task = msgspec.structs.replace(request.task, world=json.dumps(world))
        field.log.append(msgspec.structs.replace(request, task=task))
    rows = "row 11\nrow 12"
    field.start(scripted(sql=lambda a: rows, kv=lambda a: rows))
    field.until(lambda: field.lag == 0)
    field.finish()
    observed = [event for event in events_on(field.log, "messages") if isinstance(event, ToolObserved)]
    found = {record["applied"][0]["kind"]: (record, event.content) for event in observed for record in _recorded(event)}
    assert found.keys() == set(kinds)
    assert {record["original"] for record, _ in found.values()} == {rows, None}
    assert [kind for kind in kinds if found[kind][0]["original"] is None] == ["busy"]
    assert [kind for kind in kinds if found[kind][1] == rows] == ["latency"]


def _recorded(event: ToolObserved) -> list[dict[str, Any]]:
    return [json.loads(event.perturbation)] if event.perturbation and '"rule":0' in event.perturbation else []


def test_what_has_not_ended_is_not_committed_and_is_played_again(field: Field) -> None:
    field.log.append(published(0, field.blobs))
    field.ask(30)
    field.start(_HangingBackend({}), msgspec.structs.replace(SETTINGS, slots=30, grace_seconds=0.2))
    field.until(lambda: bool(field.ends()))
    time.sleep(0.3)
    field.finish()
    ended = {end.meta.trajectory_id for end in field.ends()}
    assert 0 < len(ended) < 30
    assert field.lag >= 30 - len(ended)

    field.stop = threading.Event()
    field.start(scripted())
    field.until(lambda: field.lag == 0)
    field.finish()
    assert len({end.meta.trajectory_id for end in field.ends()}) == 30
    attempts = {event.meta.attempt_id for event in events_on(field.log, "messages")}
    assert len(attempts) > 30, "what was under way is a second attempt"


def test_what_is_called_off_ends_as_cancelled_whether_it_runs_or_waits(field: Field) -> None:
    """A task and then the whole run: what runs is stopped in the middle of a tool call, what waits never begins."""
    field.log.append(published(0, field.blobs))
    requests = field.ask(12)
    field.start(_HangingBackend({}), msgspec.structs.replace(SETTINGS, slots=4, sandboxes=4))
    field.until(lambda: len(field.calling()) == 4)
    (one,) = [request for request in requests if request.meta.trajectory_id == field.calling()[0]]
    field.log.append(cancel(task_id=one.meta.task_id))
    field.until(lambda: one.meta.trajectory_id in {end.meta.trajectory_id for end in field.cancelled()})
    assert len(field.cancelled()) == 1, "the others go on"
    field.log.append(cancel(at=now_microseconds()))
    field.until(lambda: field.lag == 0)
    field.finish()
    assert {end.meta.trajectory_id for end in field.ends()} == {request.meta.trajectory_id for request in requests}
    cut_short = [end for end in field.cancelled() if end.turns > 0]
    assert cut_short, "what it had said until then is kept"
    assert {end.reason for end in field.cancelled()} == {"called off by an operator"}


def test_a_slow_rollout_does_not_hold_up_those_behind_it(field: Field) -> None:
    """Far more rollouts end behind it than the worker may hold at once; they are committed when it has ended too."""
    field.log.append(published(0, field.blobs))
    requests = field.ask(60)
    backend = _OneSlowBackend({name: (lambda a: "7") for name in ("sql", "kv", "python", "set_up_world")})
    field.start(backend, msgspec.structs.replace(SETTINGS, slots=2, sandboxes=2))
    field.until(lambda: len(field.ends()) == len(requests) - 1)
    assert field.lag > 4, "ends behind it wait, uncommitted"
    backend.go_on()
    field.until(lambda: field.lag == 0)
    field.finish()
    assert len(field.ends()) == len(requests)


class _OneSlowBackend(ScriptedBackend):
    """The first call of all waits until it is told to go on."""

    met = False

    async def open(self, slot: int, apart: bool = False) -> "_OneSlowSandbox":
        if not self.opened:
            self._loop = asyncio.get_running_loop()
            self.free = asyncio.Event()
        sandbox = _OneSlowSandbox(self)
        self.opened.append(sandbox)
        return sandbox

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self.free.set)


class _OneSlowSandbox(ScriptedSandbox):
    def __init__(self, backend: _OneSlowBackend) -> None:
        super().__init__(backend.scripts)
        self._backend = backend

    async def call(self, tool: str, arguments: Any, key: str, session: str = "") -> Any:
        is_first, self._backend.met = not self._backend.met, True
        if is_first:
            await self._backend.free.wait()
        return await super().call(tool, arguments, key, session)


class _HangingBackend(ScriptedBackend):
    """Sandboxes that never answer: every rollout with a tool call hangs."""

    async def open(self, slot: int, apart: bool = False) -> "_HangingSandbox":
        return _HangingSandbox({})


class _HangingSandbox(ScriptedSandbox):
    async def call(self, tool: str, arguments: Any, key: str, session: str = "") -> Any:
        await asyncio.sleep(3600)


async def test_sampled_rollouts_carry_versions_and_count_in_the_pulse(tmp_path: Path) -> None:
    field = Field(tmp_path)
    field.log.append(await asyncio.to_thread(published, 0, field.blobs))
    field.ask(6, purpose="train")
    async with server(GOOD) as (url, _):
        field.start(scripted(), msgspec.structs.replace(SETTINGS, servers=[url]))
        await asyncio.to_thread(field.until, lambda: field.lag == 0)
        await asyncio.to_thread(field.finish)
    turns = [event for event in events_on(field.log, "messages") if isinstance(event, TurnGenerated)]
    assert len(turns) == 6
    assert all(unpack_tokens(turn.tokens) == [7, 8, 4] for turn in turns)
    assert {turn.versions[0].version for turn in turns} == {turn.meta.policy_version for turn in turns} == {3}
    figures = field.program_metrics.figures()
    assert (figures["turns"], figures["tokens_sampled"]) == (6, 18)
    assert figures["busy_seconds"] > 0


def test_a_log_that_fails_ends_the_worker(field: Field) -> None:
    field.log.append(published(0, field.blobs))
    field.ask(3)
    broken = _BrokenLog(field.log.codec)
    broken._partitions = field.log._partitions
    field.log = broken
    field.start(scripted())
    assert field.thread is not None
    field.thread.join(20)
    assert isinstance(field.failure, LogUnavailable)


class _BrokenLog(MemoryLog):
    def append_bytes(self, topic: str, key: bytes | None, value: bytes) -> None:
        raise LogUnavailable("the broker is gone")


def test_the_tokenizer_of_a_version_that_was_removed_is_taken_from_the_next(tmp_path: Path) -> None:
    field = Field(tmp_path)
    removed = published(0, field.blobs)
    lost = msgspec.structs.replace(removed.files[0], sha256="0" * 64, uri=f"{field.blobs.url}/00/{'0' * 64}")
    removed = msgspec.structs.replace(removed, files=[lost])
    field.log.append(removed)
    with pytest.raises(LogUnavailable, match="the tokenizer of this run cannot be read"):
        rollouts._chat_files(field.run, field.log, field.blobs, threading.Event())
    field.log.append(published(1, field.blobs))
    found = rollouts._chat_files(field.run, field.log, field.blobs, threading.Event())
    assert found == {"tokenizer.json": tokenizer_json()}


async def test_infra_errors_of_a_version_are_a_figure_and_an_alarm(tmp_path: Path) -> None:
    def fails(arguments: object) -> str:
        raise SandboxFailed("it died")

    field = Field(tmp_path)
    field.log.append(await asyncio.to_thread(published, 0, field.blobs))
    field.ask(6, purpose="train")
    tokens = ChatFormat(tokenizer_json()).turn('<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>')
    calls = answer(("3", 0, len(tokens)), tokens=tuple(tokens))
    async with server(calls) as (url, _):
        with capture_logs() as logs:
            field.start(ScriptedBackend({"python": fails}), msgspec.structs.replace(SETTINGS, servers=[url]))
            await asyncio.to_thread(field.until, lambda: field.lag == 0)
            await asyncio.to_thread(field.finish)
    assert field.program_metrics.figures()["infra_error_share"] == 1.0
    assert field.program_metrics.figures()["infra_errors_rising"] == 1.0
    alarms = [entry for entry in logs if entry["event"] == "infra_errors_rise"]
    assert [alarm["reason"] for alarm in alarms] == [
        "100.0% of the rollouts of version 3 ended by infra_error, of those before 0.0%"
    ]


async def test_first_turns_that_do_not_come_raise_the_alarm_too(tmp_path: Path) -> None:
    """They have no version of their own; a policy could keep its first turn from ending."""
    field = Field(tmp_path)
    field.log.append(await asyncio.to_thread(published, 0, field.blobs))
    field.ask(6, purpose="train")
    tokens = ChatFormat(tokenizer_json()).turn("<answer>45</answer>")
    settings = msgspec.structs.replace(SETTINGS, slots=1, unverified_wait_seconds=0.0)
    async with server(answer(("3", 0, len(tokens)), tokens=tuple(tokens)), lambda body: 500) as (url, _):
        field.start(ScriptedBackend({}), msgspec.structs.replace(settings, servers=[url]))
        await asyncio.to_thread(field.until, lambda: field.lag == 0)
        await asyncio.to_thread(field.finish)
    figures = field.program_metrics.figures()
    assert (figures["infra_error_share"], figures["infra_errors_rising"]) == (5 / 6, 1.0)
