"""Processes that share the partitions of a replay. Each judges its partitions one after another and reports to its parent.

A worker that is killed loses nothing: what it wrote and how far it read are one transaction. When the parent dies, the
kernel ends its workers.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import msgspec

from replayground.deploy.experience.scorer_files import bounded_by_name, judges_of
from replayground.deploy.runs import list_runs
from replayground.schemas.errors import BadInput, ReplaygroundError
from replayground.schemas.events import Position
from replayground.schemas.run import Run
from replayground.streams.log.connect import open_log
from replayground.streams.log.protocol import Log
from replayground.streams.replay.request import RescoreRequest
from replayground.streams.replay.rescoring import (
    Counts,
    Judges,
    PartitionRange,
    PartitionState,
    Rescoring,
    rescore_partitions,
)
from replayground.streams.replay.selection import TOPIC, PartitionSelection, by_partition, find_selection

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.2
_RUNS_SECONDS = 2.0
"between two looks at whether the sources have ended"


@dataclass(frozen=True)
class Work:
    """What all workers of a replay are told."""

    run: Run
    request: RescoreRequest
    module: str
    "the job, on this machine"
    scorer_file: Path | None


@dataclass(frozen=True)
class Standing:
    """How far one partition is."""

    partition: int
    offset: int
    counts: Counts


@dataclass(frozen=True)
class _Failure:
    sentence: str
    is_bad_input: bool


def rescore(work: Work, processes: int, report: Callable[[Standing], None]) -> None:
    """Judges all partitions, in this many processes. Blocks until all are done; ends them on KeyboardInterrupt, which is
    raised.

    Raises BadInput and ReplaygroundError with what a worker reported."""
    context = multiprocessing.get_context("spawn")
    partitions = [position.partition for position in work.request.end]
    # Followed partitions have no end yet, so none of them can wait for another one.
    processes = len(partitions) if work.request.is_followed else processes
    shares = [share for number in range(processes) if (share := partitions[number::processes])]
    workers: list[tuple[SpawnProcess, Connection]] = []
    for share in shares:
        ours, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_serve, args=(work, share, os.getpid(), theirs), daemon=True)
        worker.start()
        # Closed here, so that the end of the worker is the end of the pipe.
        theirs.close()
        workers.append((worker, ours))
    try:
        _follow([ours for _, ours in workers], report)
        # Their pipes are closed: they are about to end by themselves.
        for worker, _ in workers:
            worker.join()
    finally:
        for worker, ours in workers:
            worker.terminate()
            worker.join()
            ours.close()
    for worker, _ in workers:
        if worker.exitcode != 0:
            raise ReplaygroundError(f"a worker of the replay ended with exit code {worker.exitcode}: resume the run")


def _follow(pipes: list[Connection], report: Callable[[Standing], None]) -> None:
    open_pipes = list(pipes)
    while open_pipes:
        for pipe in wait(open_pipes, _LOOK_SECONDS):
            assert isinstance(pipe, Connection)
            try:
                told = pipe.recv()
            except EOFError:
                open_pipes.remove(pipe)
                continue
            if isinstance(told, _Failure):
                raise BadInput(told.sentence) if told.is_bad_input else ReplaygroundError(told.sentence)
            report(told)


def _serve(work: Work, partitions: Sequence[int], parent: int, pipe: Connection) -> None:
    """The whole life of a worker."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    # Ctrl-C reaches the whole group: the parent decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return  # it died before the line above
    try:
        _judge(work, partitions, pipe, stop)
    except ReplaygroundError as error:
        pipe.send(_Failure(str(error), isinstance(error, BadInput)))
    finally:
        pipe.close()


def _judge(work: Work, partitions: Sequence[int], pipe: Connection, stop: threading.Event) -> None:
    request, run = work.request, work.run
    judges = Judges(
        run_id=run.run_id,
        sources=frozenset(request.sources),
        scorers=bounded_by_name(judges_of(work.module, work.scorer_file), request.score_seconds_max),
        names=request.scorers,
        advantage=request.advantage,
    )

    def report(partition: int, state: PartitionState) -> None:
        pipe.send(Standing(partition, state.offset, state.counts))

    with closing(open_log(msgspec.structs.replace(run, program="replay"))) as log:
        selections = by_partition(find_selection(log, request.selection)) if request.selection else None
        ends = FollowedEnds(log, request) if request.is_followed else None
        parts: list[tuple[Rescoring, PartitionRange]] = []
        for partition in partitions:
            end = partial(end_of, request, partition) if ends is None else partial(ends.end, partition)
            start = start_of(request, partition)
            wanted = PartitionRange(judges.sources, start, end, request.trajectories_per_commit)
            parts.append((Rescoring(judges, _selection_of(selections, partition)), wanted))
        for _ in rescore_partitions(run, log, parts, report, stop):
            pass


class FollowedEnds:
    """Where a replay that follows its sources ends: not known before all of them have ended."""

    def __init__(self, log: Log, request: RescoreRequest) -> None:
        self._log, self._sources = log, request.sources
        self._asked_at = 0.0
        self._ends: dict[int, int] | None = None

    def end(self, partition: int) -> int | None:
        """The offset at which the partition ends; None while a source is active. Raises LogUnavailable."""
        if self._ends is None and time.monotonic() > self._asked_at + _RUNS_SECONDS:
            self._asked_at = time.monotonic()
            # Asked first: what a source wrote before its end is then before these positions.
            states = list_runs(self._log)
            if not any(states[source].is_active for source in self._sources):
                self._ends = {position.partition: position.offset for position in self._log.end_positions([TOPIC])}
        return None if self._ends is None else self._ends[partition]


def start_of(request: RescoreRequest, partition: int) -> Position:
    """Where the sources begin on a partition."""
    found = (position for position in request.start if position.partition == partition)
    return next(found, Position(topic=TOPIC, partition=partition, offset=0))


def end_of(request: RescoreRequest, partition: int) -> int:
    """The offset at which a replay of a partition ends."""
    return next(position.offset for position in request.end if position.partition == partition)


def _selection_of(selections: dict[int, PartitionSelection] | None, partition: int) -> PartitionSelection | None:
    # A partition without a chosen trajectory: none of it is judged.
    return None if selections is None else selections.get(partition, PartitionSelection.empty())
