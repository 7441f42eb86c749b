"""Carries out what people asked for on the page: replays, and rejected messages to be written again.

    operations ─► ReplayRequested, RedriveRequested ─► a process for each ─► RequestReported ─► operations

The page only asks: scorers are code, and a process that serves the network runs none (decision 0033). What is carried
out, and by whom it was asked for, stands on the log; a request is carried out once.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from replayground.deploy.field import running_field
from replayground.deploy.local.folder import FieldFolder
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.run_lifecycle import log_of
from replayground.deploy.runs import find_run, list_runs
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import Meta, RedriveRequested, ReplayRequested, RequestReported, RequestState
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.run import FIELD
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Log, Reader

if TYPE_CHECKING:
    from replayground.deploy.experience.rescoring import RescoreResult

_TOPIC = "operations"
_POLL_SECONDS = 0.5
_EVENTS_MAX = 500
_REPORT_SECONDS = 2.0
_AGE_MICROSECONDS_MAX = 24 * 3600 * 1_000_000

type Request = ReplayRequested | RedriveRequested
type Say = Callable[[str], None]


@dataclass
class Requests:
    """What was asked for, by id, and what was reported last. A fold of topic `operations`."""

    asked: dict[str, Request] = field(default_factory=dict)
    reported: dict[str, RequestReported] = field(default_factory=dict)

    def read(self, reader: Reader) -> None:
        """Takes what has arrived. Raises LogUnavailable."""
        for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
            event = delivery.event
            if isinstance(event, ReplayRequested | RedriveRequested):
                self.asked[event.meta.id] = event
            elif isinstance(event, RequestReported):
                self.reported[event.request] = event

    def next(self) -> Request | None:
        """The oldest one that nobody has begun."""
        return next((event for name, event in self.asked.items() if name not in self.reported), None)

    def begun(self) -> Iterator[RequestReported]:
        """Those that were begun and have no end."""
        return (report for report in self.reported.values() if report.state == "started")


def serve(path: Path, is_once: bool, say: Say) -> None:
    """Carries out requests, one after another, until Ctrl-C; `is_once`: those that are there. One of these for a field.
    Raises BadInput, LogUnavailable."""
    _, resolved = running_field(path)
    with log_of(resolved) as log, closing(log.reader([_TOPIC])) as reader:
        requests = Requests()
        while not reader.caught_up():
            requests.read(reader)
        # Nobody else carries requests out, so whoever began these is gone.
        for report in list(requests.begun()):
            going_on = f": `replayground resume {report.run}` goes on with it" if report.run else ""
            _report(log, report.request, "failed", report.run, f"it was interrupted{going_on}")
        while (request := requests.next()) is not None or not is_once:
            if request is None:
                requests.read(reader)
                continue
            say(f"{_sentence(request)}, asked for by {request.requested_by}")
            if now_microseconds() - request.meta.timestamp > _AGE_MICROSECONDS_MAX:
                # Whoever asked has found another way, or has forgotten it.
                _report(log, request.meta.id, "failed", "", "nobody carried it out for a day: ask again")
            else:
                say(_carried_out(path, log, request))
            requests.reported[request.meta.id] = _reported_now(requests, reader, request.meta.id)


def _carried_out(path: Path, log: Log, request: Request) -> str:
    """Runs the request in a process of its own, which code of a job and of scorers cannot outlive; one line about it."""
    # spawn: a fork would share the client of the log.
    process = get_context("spawn").Process(target=carry_out, args=(path, request))
    process.start()
    try:
        process.join()
    except KeyboardInterrupt:
        # The terminal has sent it to the child as well, which reports how far it came.
        process.join()
        raise
    if process.exitcode:
        _report(log, request.meta.id, "failed", "", f"its process ended with code {process.exitcode}")
    return "done" if process.exitcode == 0 else f"its process ended with code {process.exitcode}"


def _reported_now(requests: Requests, reader: Reader, request_id: str) -> RequestReported:
    while not reader.caught_up() or request_id not in requests.reported:
        requests.read(reader)
    return requests.reported[request_id]


def carry_out(path: Path, request: Request) -> None:
    """One request, from its first report to its last."""
    folder, resolved = running_field(path)
    with log_of(resolved) as log:
        try:
            if isinstance(request, RedriveRequested):
                _redrive(log, request)
            else:
                _Replay(folder, resolved, log, request).go()
        except ReplaygroundError as error:
            _report(log, request.meta.id, "failed", "", str(error))
        except KeyboardInterrupt:
            _report(log, request.meta.id, "failed", "", "it was interrupted")


def _redrive(log: Log, request: RedriveRequested) -> None:
    from replayground.deploy.operate.dead_letters import dead_letters, redrive

    wanted = set(request.rejects)
    letters = [letter for letter in dead_letters(log) if letter.reject.meta.id in wanted]
    if len(letters) < len(wanted):
        raise BadInput(f"{len(wanted) - len(letters)} of {len(wanted)} rejected messages are not on the log")
    _report(log, request.meta.id, "started", "", "writing them again")
    redrive(log, letters)
    _report(log, request.meta.id, "finished", "", f"{len(letters)} messages were written again")


class _Replay:
    """One replay or dry run."""

    def __init__(self, folder: FieldFolder, resolved: ResolvedConfig, log: KafkaLog, request: ReplayRequested) -> None:
        self._folder, self._resolved, self._log, self._request = folder, resolved, log, request
        self._run_id = ""
        self._reported_at = 0.0

    def go(self) -> None:
        """Raises BadInput, LogUnavailable."""
        from replayground.deploy.experience.rescoring import ask, dry_run, go_on, start
        from replayground.deploy.experience.runs import Interrupted, ended_on_log
        from replayground.deploy.experience.scorer_files import ChosenScorers
        from replayground.deploy.experience.selecting import FAILED, Choice, find

        self._say("started", "reading what was asked for")
        states = list_runs(self._log)
        sources = [find_run(states.values(), name) for name in self._request.sources]
        chosen = ChosenScorers(tuple(self._request.scorers), None)
        plan = ask(self._log, self._folder, self._resolved, sources, chosen)
        if self._request.failed_only:
            selected = find(self._log, self._resolved, Choice(sources, FAILED), f"selection-{new_id()[:13]}", FIELD)
            plan = replace(plan, selected=selected, is_selection_new=True)
        if self._request.is_dry_run:
            self._finish(dry_run(self._log, plan, states, self._show))
            return
        try:
            state = start(self._log, self._resolved, plan)
            self._run_id = state.run_id
            self._say("started", "judging")
            with ended_on_log(self._log, state):
                result = go_on(self._log, self._folder, self._resolved, state, os.cpu_count() or 1, self._show)
        except Interrupted as stopped:
            self._say("failed", f"it was interrupted: `replayground resume {stopped.run_id}` goes on with it")
        else:
            self._finish(result)

    def _show(self, done: int, total: int, detail: str) -> None:
        # A dry run writes no rewards from which its progress could be read.
        if time.monotonic() - self._reported_at >= _REPORT_SECONDS:
            self._say("started", f"{done / total:.0%} read, {detail}" if total else detail)

    def _finish(self, result: "RescoreResult") -> None:
        found = result.comparison
        figures = {name: float(getattr(found, name)) for name in found.__dataclass_fields__ if name != "changes"}
        judged = result.total("trajectories")
        self._say("finished", f"{judged:,} trajectories judged in {result.seconds:.1f} s", figures)

    def _say(self, state: RequestState, detail: str, figures: dict[str, float] | None = None) -> None:
        self._reported_at = time.monotonic()
        _report(self._log, self._request.meta.id, state, self._run_id, detail, figures)


def _report(
    log: Log, request: str, state: RequestState, run_id: str, detail: str, figures: dict[str, float] | None = None
) -> None:
    meta = Meta(
        id=new_id(),
        run_id=FIELD,
        category="report",
        topic=_TOPIC,
        sender="requests",
        timestamp=now_microseconds(),
        causation_id=request,
    )
    log.append(
        RequestReported(meta=meta, request=request, state=state, run=run_id, detail=detail, figures=figures or {})
    )
    log.flush()


def _sentence(request: Request) -> str:
    if isinstance(request, RedriveRequested):
        return f"{len(request.rejects)} rejected messages to be written again"
    return f"{'a dry run' if request.is_dry_run else 'a replay'} of {', '.join(request.sources)}"
