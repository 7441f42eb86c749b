"""Back-pressure on a real stack (P8): whoever comes after stands still, and whoever comes before slows down by itself.

One run of the example job:
    the trainer and the trace store are stopped      sampling ends at the staleness budget, the rest goes on
    large events are written meanwhile               the trace store has all of them to catch up with
    vLLM is away, and comes back                     rollouts are asked for again, none is given up
    all go on                                        the run ends by itself, as if nothing had been
    the broker is stopped                            a producer waits when its queue is full (broker_away)
What is judged is on the log: what was asked for and what became of it, and the memory that every heartbeat tells.
"""

import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from replayground.deploy.local.stack import KAFKA
from replayground.deploy.programs import PROGRAMS
from replayground.schemas.events import (
    BatchCut,
    Event,
    GroupCompleted,
    RolloutEnded,
    RolloutRequested,
    TurnGenerated,
    WeightsPublished,
    WorkerSeen,
)
from replayground.schemas.run import JobSettings
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from replayground.streams.rules.staleness import groups_allowed
from tests.flow.synthetic import observations
from tests.torture.backlog import catch_up
from tests.torture.broker_away import EVENT_BYTES, Produced, produce_without_broker
from tests.torture.oracle import events_of
from tests.torture.running import PROJECT, Running, running
from tests.torture.stopping import await_that, memory_bytes_peak, stopped, tree

MEBIBYTE = 1024 * 1024
MEMORY_BYTES_MAX = {
    "traces": 1536 * MEBIBYTE,  # ClickHouse alone takes 0.5 to 1 GB
    "trainer": 2048 * MEBIBYTE,  # torch
}
OTHERS_BYTES_MAX = 384 * MEBIBYTE
"imports, 32 MiB fetched ahead and twice 16 MiB in a poll, and a wide margin"
GROWTH_BYTES_MAX = 64 * MEBIBYTE
"while nothing is to be done"
QUIET_BEATS = 3
"heartbeats of the scheduler, two seconds apart, in which nothing new is asked for"
_BACKLOG_RUN = "backlog"


@dataclass(frozen=True)
class Sizes:
    """How hard it is pressed."""

    steps: int
    backlog_events: int
    "of 100 KB each, that are written while the trace store is stopped"
    producer_events: int
    "of 100 KB each, that are written while the broker is stopped; more than fit into a producer's queue"
    vllm_away_seconds: float | None
    "killed, and not started again for so long; None = stopped, until retries have come"


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    seconds: float
    steps: int
    steps_wanted: int
    groups_asked: int
    "for training, while the trainer was stopped"
    groups_over_budget: int
    "most groups asked for above what staleness allowed at that moment"
    requests_when_full: int
    "that were made although the budget was used up"
    outage_seconds: float
    retry_max: int
    "highest retry of a rollout"
    retries_max: int
    "how often a rollout is asked for again while others succeed"
    ends: Counter[str]
    "of all attempts"
    attempts_unasked: int
    "attempts beyond one for each request"
    memory_bytes_peak: dict[str, int]
    "by program, at the end of the run"
    memory_growth_bytes: dict[str, int]
    "by program, while the budget was used up"
    restarted: list[str]
    "programs that ended without being killed"
    backlog_bytes: int
    "that waited for the trace store, and more"
    finish_seconds: float
    "from the moment in which all went on to the end of the run with everything in the trace store"
    trace_rows: int
    log_events: int
    produced: Produced

    @property
    def holds(self) -> bool:
        return (
            self.steps == self.steps_wanted
            and self.groups_over_budget == self.requests_when_full == 0
            and self.retry_max > self.retries_max
            and self.ends["cancelled"] == self.ends["deadline"] == self.attempts_unasked == 0
            and self.trace_rows == self.log_events
            and not self.restarted
            and not self.programs_too_large
            and self.produced.holds
        )

    @property
    def programs_too_large(self) -> list[str]:
        grown = [name for name, grown in self.memory_growth_bytes.items() if grown > GROWTH_BYTES_MAX]
        return grown + [
            n for n, peak in self.memory_bytes_peak.items() if peak > MEMORY_BYTES_MAX.get(n, OTHERS_BYTES_MAX)
        ]


def pressure(quick: bool) -> str:
    """The long form: vLLM killed and away for minutes, gigabytes to catch up with. Raises AssertionError."""
    sizes = Sizes(2, 3000, 1500, None) if quick else Sizes(6, 20_000, 5000, 150.0)
    with tempfile.TemporaryDirectory(prefix="replayground-pressure-") as folder:
        verdict = press(Path(folder), sizes)
    assert verdict.holds, verdict
    with tempfile.TemporaryDirectory(prefix="replayground-backlog-") as folder:
        caught_up = catch_up(Path(folder), 100 if quick else 2500)
    assert all(program.holds for program in caught_up.values()), caught_up
    behind = ", ".join(
        f"{name} {program.memory_bytes_peak // MEBIBYTE:,} MiB in {program.seconds:.0f} s"
        for name, program in caught_up.items()
    )
    return (
        f"trainer and trace store stopped: {verdict.groups_asked} groups asked for, none above the budget, "
        f"{verdict.requests_when_full} more requests when it was used up; vLLM away for {verdict.outage_seconds:.0f} s: "
        f"{verdict.ends['infra_error']} attempts failed, asked for again up to {verdict.retry_max} times, "
        f"{verdict.ends['cancelled']} given up; then {verdict.steps} of {verdict.steps_wanted} steps and "
        f"{verdict.trace_rows:,} trace rows for {verdict.log_events:,} events in {verdict.finish_seconds:.0f} s, with "
        f"{verdict.backlog_bytes / 1e9:.1f} GB behind and {verdict.memory_bytes_peak['traces'] // MEBIBYTE:,} MiB at most; "
        f"broker stopped: a producer took {verdict.produced.waiting_max} of {verdict.produced.wanted:,} events and waited, "
        f"{verdict.produced.found:,} are on the log, once and in order; started behind a backlog: {behind}"
    )


def press(folder: Path, sizes: Sizes) -> Verdict:
    """One run of the example job under pressure. Raises AssertionError when it does not go on by itself."""
    with running(folder, _job(folder, sizes)) as under_pressure:
        pressed = _Pressed(under_pressure, sizes)
        try:
            return pressed.verdict()
        finally:
            pressed.close()


def _job(folder: Path, sizes: Sizes) -> Path:
    """The example job, and less patience than by default, so that it is tried within seconds."""
    text = (PROJECT / "examples/times_tables/job.toml").read_text()
    changes = {
        'module = "job.py"': f'module = "{PROJECT / "examples/times_tables/job.py"}"',
        "\nsteps = 3\n": f"\nsteps = {sizes.steps}\n",
        "evaluation_tasks = 40": "evaluation_tasks = 8",
    }
    for before, after in changes.items():
        assert text.count(before) == 1, f"the example job has changed: {before}"
        text = text.replace(before, after)
    path = folder / "job.toml"
    retries_max = 0 if sizes.vllm_away_seconds is None else 3
    path.write_text(
        f"{text}\n[scheduler]\nretries_max = {retries_max}\n"
        "\n[rollouts]\nslots = 16\nturn_timeout_seconds = 30.0\nunverified_wait_seconds = 6.0\n"
    )
    return path


@dataclass(frozen=True)
class _Standstill:
    """What was seen while the trainer and the trace store were stopped."""

    outage_seconds: float
    groups_asked: int
    full_from: int
    full_until: int
    "times of two heartbeats between which the budget was used up, in microseconds"
    requests_when_full: int


class _Pressed:
    """A stack under pressure, from its start to its end."""

    def __init__(self, running: Running, sizes: Sizes) -> None:
        self._began = time.monotonic()
        self._running = running
        self._run = running.resolved.run_of("judge")
        self._sizes = sizes
        self._log = open_log(self._run)
        self._seen = _Seen(self._log, self._run.run_id)
        states = running.states()
        self._pids = {program.name: states[program.name].pid for program in PROGRAMS if program.name in states}
        self._newest_pids = dict(self._pids)
        self._peaks = dict.fromkeys(self._pids, 0)

    def close(self) -> None:
        self._seen.close()
        self._log.close()

    def verdict(self) -> Verdict:
        standstill = self._standstill()
        went_on = time.monotonic()
        summary = self._summary()
        finish_seconds = time.monotonic() - went_on
        states = self._running.states()
        produced = produce_without_broker(self._run, states[KAFKA].pid, self._sizes.producer_events)
        killed = set() if self._sizes.vllm_away_seconds is None else {"vllm"}
        ends = [event for event in self._events("messages") if isinstance(event, RolloutEnded)]
        return Verdict(
            seconds=time.monotonic() - self._began,
            steps=summary["steps"],
            steps_wanted=self._run.job.steps,
            groups_asked=standstill.groups_asked,
            groups_over_budget=_over_budget(self._events("rollouts", "groups", "batches", "weights"), self._run.job),
            requests_when_full=standstill.requests_when_full,
            outage_seconds=standstill.outage_seconds,
            retry_max=self._seen.retry_max,
            retries_max=self._running.resolved.config.scheduler.retries_max,
            ends=Counter(end.ended_by for end in ends),
            attempts_unasked=len(ends) - len({end.meta.correlation_id for end in ends}),
            memory_bytes_peak=self._peaks,
            memory_growth_bytes=_growth(self._seen.beats, standstill.full_from, standstill.full_until),
            restarted=[n for n, pid in self._newest_pids.items() if pid != self._pids[n] and n not in killed],
            backlog_bytes=self._sizes.backlog_events * EVENT_BYTES,
            finish_seconds=finish_seconds,
            trace_rows=summary["trace_rows"],
            log_events=summary["log_events"],
            produced=produced,
        )

    def _standstill(self) -> "_Standstill":
        """The trainer and the trace store are stopped, vLLM is away and comes back, and sampling goes on until it is full."""
        job, seen = self._run.job, self._seen
        seen.await_that("the cold start is over", lambda: seen.version >= job.first_version)
        with stopped(self._tree("trainer")), stopped(self._tree("traces")):
            seen.await_that("a server samples", lambda: seen.turns_sampled > 0)
            outage_seconds = self._without_vllm()
            seen.await_that("the budget is used up", lambda: seen.groups_to_come(job) == 0)
            requests = len(seen.requests)
            return _Standstill(
                outage_seconds=outage_seconds,
                groups_asked=len(seen.groups_asked),
                full_from=self._beat_of_the_scheduler(1),
                full_until=self._beat_of_the_scheduler(QUIET_BEATS),
                requests_when_full=len(seen.requests) - requests,
            )

    def _write_backlog(self) -> None:
        for event in observations(self._sizes.backlog_events, EVENT_BYTES, _BACKLOG_RUN):
            self._log.append(event)
        self._log.flush()

    def _without_vllm(self) -> float:
        """Takes vLLM away until a rollout was asked for more often than it would be if others succeeded. The backlog is
        written meanwhile: before, it would take so long that nothing is left to be sampled."""
        retries_max = self._running.resolved.config.scheduler.retries_max
        began = time.monotonic()
        is_stopped = self._sizes.vllm_away_seconds is None
        away: AbstractContextManager[None] = stopped(self._tree("vllm")) if is_stopped else self._vllm_killed()
        with away:
            self._write_backlog()
            stay_until = began + (self._sizes.vllm_away_seconds or 0.0)
            self._seen.await_that(
                "rollouts are asked for again",
                lambda: time.monotonic() > stay_until and self._seen.retry_max > retries_max,
            )
        return time.monotonic() - began

    @contextmanager
    def _vllm_killed(self) -> Iterator[None]:
        """kill -9, and it is not started again before the block ends."""
        processes = self._tree("vllm")
        control = self._running.control_of("vllm")
        control.stop("vllm")  # first, or the supervisor would start it again
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        await_that(lambda: self._running.states()["vllm"].has_ended, "vLLM ends")
        yield
        control.start("vllm")

    def _tree(self, name: str) -> list[psutil.Process]:
        return tree(self._pids[name])

    def _beat_of_the_scheduler(self, number: int) -> int:
        """The time of its heartbeat after so many more."""
        beats = self._seen.beats["scheduler"]
        wanted = len(beats) + number
        self._seen.await_that("the scheduler's heart beats", lambda: len(beats) >= wanted)
        return beats[wanted - 1].meta.timestamp

    def _summary(self) -> dict[str, Any]:
        """When the run has ended and all of the log is in the trace store."""

        def has_finished() -> bool:
            self._seen.look()
            self._note_processes()
            self._running.require_healthy()
            overview = self._running.page.overview()
            return overview is not None and overview.finished

        await_that(has_finished, "the run ends")
        return self._running.page.finish().summary

    def _note_processes(self) -> None:
        """While there are any: when the run has finished, its programs end."""
        for name, state in self._running.states().items():
            if name in self._pids and state.pid:
                self._newest_pids[name] = state.pid
                with suppress(OSError, ValueError):  # it ended in this moment
                    self._peaks[name] = max(self._peaks[name], memory_bytes_peak(state.pid))

    def _events(self, *topics: str) -> list[Event]:
        return events_of(self._log, self._run.run_id, *topics)


class _Seen:
    """What the run has done so far, read from its log as it comes."""

    def __init__(self, log: Log, run_id: str) -> None:
        self._run_id = run_id
        self._reader = log.reader(["rollouts", "messages", "groups", "weights", "control"])
        self.requests: list[RolloutRequested] = []
        self.groups_asked: set[str] = set()
        self.groups_accepted: set[str] = set()
        self.version = -1
        self.turns_sampled = 0
        self.beats: defaultdict[str, list[WorkerSeen]] = defaultdict(list)

    @property
    def retry_max(self) -> int:
        return max((request.retry for request in self.requests), default=0)

    def close(self) -> None:
        self._reader.close()

    def await_that(self, what: str, holds: Callable[[], bool]) -> None:
        def looked() -> bool:
            self.look()
            return holds()

        await_that(looked, what)

    def look(self) -> None:
        for delivery in self._reader.poll(1000, 0.5):
            if delivery.event is not None and delivery.event.meta.run_id == self._run_id:
                self._take(delivery.event)

    def groups_to_come(self, job: JobSettings) -> int:
        """Groups that the budget allows and that are not there yet."""
        return _allowed(job, self.version) - len(self.groups_accepted)

    def _take(self, event: Event) -> None:
        match event:
            case RolloutRequested():
                self.requests.append(event)
                if event.meta.purpose == "train":
                    self.groups_asked.add(event.meta.group_id or "")
            case GroupCompleted() if event.dropped_because is None:
                self.groups_accepted.add(event.meta.group_id or "")
            case WeightsPublished():
                self.version = max(self.version, event.version)
            case TurnGenerated() if event.versions:
                self.turns_sampled += 1
            case WorkerSeen():
                self.beats[event.role].append(event)


def _allowed(job: JobSettings, version: int) -> int:
    return groups_allowed(max(0, version - job.first_version), job.staleness_target, job.groups_per_batch)


def _over_budget(events: Iterable[Event], job: JobSettings) -> int:
    """By how many groups, asked for and not dropped or stale, the budget was ever exceeded; negative when never used up.

    An event has its time before the scheduler can read it, so it is held to no less than it knew."""
    asked: set[str] = set()
    out: set[str] = set()
    version = job.first_version
    excess = -_allowed(job, version)
    for event in sorted(events, key=lambda event: event.meta.timestamp):
        match event:
            case RolloutRequested() if event.meta.purpose == "train":
                asked.add(event.meta.group_id or "")
                excess = max(excess, len(asked - out) - _allowed(job, version))
            case GroupCompleted() if event.dropped_because is not None:
                out.add(event.meta.group_id or "")
            case BatchCut():
                out.update(event.groups_stale)
            case WeightsPublished():
                version = max(version, event.version)
    return excess


def _growth(beats: Mapping[str, Sequence[WorkerSeen]], from_time: int, until_time: int) -> dict[str, int]:
    """By program: how far its memory rose above what it was when this time began."""
    grown: dict[str, int] = {}
    for role, all_beats in beats.items():
        memory = [b.load["memory_bytes"] for b in all_beats if from_time <= b.meta.timestamp <= until_time]
        if memory:
            grown[role] = int(max(memory) - memory[0])
    return grown
