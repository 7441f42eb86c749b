"""Runs on the log: reads and writes RunStarted, RunResumed and RunEnded on topic `runs`, for every command.

Of two starts with the same id or number, the first on the log counts (streams.rules.runs). Whoever writes a start
therefore reads the log back, and learns whether somebody else was faster. No lock service is needed.
"""

import getpass
import socket
import time
from collections.abc import Iterable, Mapping, Sequence

from replayground.schemas.errors import BadInput, LogUnavailable, ReplaygroundError
from replayground.schemas.events import (
    EndReason,
    Event,
    HumanQuestion,
    Meta,
    Position,
    RunEnded,
    RunFile,
    RunKind,
    RunResumed,
    RunStarted,
)
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.topics import TOPICS
from replayground.streams.log.protocol import Log
from replayground.streams.log.runs import run_facts
from replayground.streams.rules.runs import RunState, fold

_POLL_SECONDS = 0.2
_TRIES_MAX = 10
# Longer than the broker of a field needs to come back after kill -9 (about 9 s, see deploy.local.kafka).
_PATIENCE_SECONDS = 30.0


class RunIdTaken(BadInput):
    """Another run got the id first."""


def list_runs(log: Log) -> dict[str, RunState]:
    """All runs of the field by id, oldest first. Raises LogUnavailable."""
    return fold(_facts(log))


def find_run(states: Iterable[RunState], beginning: str) -> RunState:
    """The run whose id is this or begins with this. Raises BadInput when there is none, or more than one."""
    by_id = {state.run_id: state for state in states}
    return by_id[only_id(list(by_id), beginning)]


def only_id(run_ids: list[str], beginning: str) -> str:
    """The one id that is this or begins with this. Raises BadInput."""
    if beginning in run_ids:
        return beginning
    found = [run_id for run_id in run_ids if run_id.startswith(beginning)]
    if not found:
        raise BadInput(f"there is no run {beginning} on this field: `replayground runs` lists them")
    if len(found) > 1:
        raise BadInput(f"{beginning} is the beginning of {len(found)} runs: {', '.join(found)}")
    return found[0]


def end_positions(log: Log) -> list[Position]:
    """The end of every partition of every topic. Raises LogUnavailable."""
    return log.end_positions([topic.name for topic in TOPICS])


def started_event(
    run_id: str,
    kind: RunKind,
    config: str,
    files: list[RunFile],
    seed: int,
    code_version: str,
    packages: dict[str, str],
    positions: list[Position],
    sources: Sequence[str] = (),
    scorers: Mapping[str, str] | None = None,
    request: str = "",
    questions: Sequence[HumanQuestion] = (),
) -> RunStarted:
    return RunStarted(
        meta=_meta(run_id),
        kind=kind,
        config=config,
        files=files,
        seed=seed,
        code_version=code_version,
        packages=packages,
        positions=positions,
        started_by=user_name(),
        sources=list(sources),
        scorers=dict(scorers or {}),
        request=request,
        questions=list(questions),
    )


def write_start(log: Log, event: RunStarted) -> RunState:
    """Writes RunStarted and blocks until it is acknowledged. Raises RunIdTaken, LogUnavailable."""
    _write(log, event)
    # Read back: the fold keeps the first RunStarted of an id, which may be somebody else's.
    state = list_runs(log)[event.meta.run_id]
    if state.start_id != event.meta.id:
        raise RunIdTaken(
            f"another run got the id {event.meta.run_id} (started by {state.started_by}): start yours again"
        )
    return state


def write_resume(log: Log, run_id: str, code_version: str, packages: dict[str, str]) -> RunState:
    """Writes RunResumed with the next start number and blocks until it is acknowledged; returns the run. Raises
    ReplaygroundError when others are faster ten times in a row, LogUnavailable."""
    for _ in range(_TRIES_MAX):
        number = list_runs(log)[run_id].starts + 1
        event = RunResumed(
            meta=_meta(run_id), start=number, code_version=code_version, packages=packages, started_by=user_name()
        )
        _write(log, event)
        # Somebody who resumes at the same moment may have taken the number first: then try the next one.
        state = list_runs(log)[run_id]
        if state.start_id == event.meta.id:
            return state
    raise ReplaygroundError(f"others resumed {run_id} {_TRIES_MAX} times meanwhile: find out who, then try again")


def write_end(log: Log, run_id: str, start_number: int, reason: EndReason, detail: str) -> None:
    """Writes RunEnded for a start, unless one is on the log already. Raises LogUnavailable."""
    # Monitor and `stop` may both write it, and a monitor that was killed and restarted writes it again.
    facts = [fact for fact in _facts(log) if isinstance(fact, RunEnded) and fact.meta.run_id == run_id]
    if not any(fact.start == start_number for fact in facts):
        _write(log, RunEnded(meta=_meta(run_id), reason=reason, detail=detail, start=start_number))


def end_of(log: Log, run_id: str, start_number: int) -> RunEnded | None:
    """RunEnded of a start; None when none is on the log. Raises LogUnavailable."""
    for fact in _facts(log):
        if isinstance(fact, RunEnded) and fact.meta.run_id == run_id and fact.start == start_number:
            return fact
    return None


def user_name() -> str:
    """The user of this process, as user@machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A user id without an entry in /etc/passwd, as in some containers.
        user = "unknown"
    return f"{user}@{socket.gethostname()}"


def _facts(log: Log) -> list[Event]:
    """All events of topic `runs`. Waits up to 30 s for a broker that is unavailable, then raises LogUnavailable."""
    until = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return run_facts(log)
        except LogUnavailable:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_SECONDS)


def _write(log: Log, event: Event) -> None:
    log.append(event)
    log.flush()


def _meta(run_id: str) -> Meta:
    now = now_microseconds()
    return Meta(id=new_id(now), run_id=run_id, category="run", topic="runs", sender="operator", timestamp=now)
