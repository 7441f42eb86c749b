"""What people decide on the page: each of it an event on the log under their name (decision 0033).

POST /api/queries   {"name", "use", "sql", "bound", "threshold", "every_seconds"}; use "removed" takes the name away
POST /api/verdicts  {"run", "trajectory", "attempt", "scorer", "score", "comment", "annotator"}
POST /api/replays   {"sources", "scorers", "failed_only", "is_dry_run"}
POST /api/redrives  {"rejects": ids}

dashboard.access lets operators of this page's own origin through to here, and JSON alone. The response is {"id": of the
event}, once the event is on the log.
"""

import re
import time
from collections.abc import Callable

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec import Struct

from replayground.consumers.clickhouse.sql_answers import SqlBusy
from replayground.consumers.dashboard.access import BODY_BYTES_MAX, Throttle, body_of, person_of
from replayground.consumers.dashboard.queries import operations
from replayground.consumers.dashboard.queries.verdicts import address_of
from replayground.consumers.dashboard.tokens import LOCAL, Person
from replayground.consumers.dashboard.web import Traces, refused, respond
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Bound,
    Event,
    Meta,
    QuerySaved,
    QueryUse,
    RedriveRequested,
    ReplayRequested,
    TrajectoryAssembled,
    VerdictGiven,
)
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.run import FIELD
from replayground.streams.judges.human_queue import verdict_event
from replayground.streams.rules.judges import is_asked
from replayground.streams.rules.runs import RunState

EVERY_SECONDS_MIN = 5.0
ALERTS_MAX = 100
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SOURCES_MAX = 20
_REJECTS_MAX = 500
_DECISIONS_PER_MINUTE_MAX = 300
"of one person"
_STORED_SECONDS_MAX = 3.0
_LOOK_SECONDS = 0.1


class QueryForm(Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to keep a query."""

    name: str
    sql: str = ""
    use: QueryUse = "question"
    bound: Bound = "above"
    threshold: float = 0.0
    every_seconds: float = 60.0


class VerdictForm(Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to judge an attempt."""

    run: str
    trajectory: str
    attempt: str
    scorer: str
    score: float
    comment: str = ""
    annotator: str = ""
    "on loopback alone: elsewhere it is whose token is used"


class ReplayForm(Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to ask for a replay."""

    sources: list[str]
    scorers: list[str] = []
    failed_only: bool = False
    is_dry_run: bool = True


class RedriveForm(Struct, frozen=True, forbid_unknown_fields=True):
    """What is sent to have rejected messages written again."""

    rejects: list[str]


class TooMany(SqlBusy):
    """One person decides too much at once."""


def add_actions(app: FastAPI, traces: Traces) -> None:
    """Adds the actions to the application."""
    decided = Throttle(_DECISIONS_PER_MINUTE_MAX, 60.0)
    _add(app, traces, decided, "/api/queries", QueryForm, save_query)
    _add(app, traces, decided, "/api/verdicts", VerdictForm, give_verdict)
    _add(app, traces, decided, "/api/replays", ReplayForm, request_replay)
    _add(app, traces, decided, "/api/redrives", RedriveForm, request_redrive)


def _add[Form](
    app: FastAPI,
    traces: Traces,
    decided: Throttle,
    path: str,
    kind: type[Form],
    made: Callable[[Traces, Person, Form], Event],
) -> None:
    async def answer(request: Request) -> Response:
        person = person_of(request)
        try:
            body = await body_of(request, BODY_BYTES_MAX)
        except BadInput as error:
            return refused(str(error), 413)

        def write() -> dict[str, str]:
            if decided.is_full(person.name):
                raise TooMany(f"more than {_DECISIONS_PER_MINUTE_MAX} decisions in a minute: wait a little")
            decided.mark(person.name)
            return _write(traces, made(traces, person, _form(body, kind)))

        return await respond(write)

    app.post(path)(answer)


def _form[Form](body: bytes, kind: type[Form]) -> Form:
    """Raises BadInput."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadInput(f"what was sent cannot be read: {error}") from error


def _write(traces: Traces, event: Event) -> dict[str, str]:
    """Returns when the log has it, and the store too unless that takes long. Raises BadInput, LogUnavailable."""
    traces.require_source().operations.write(event)
    # The page that is opened next shows it. Verdicts are given faster than this: their page leaves them out by itself.
    until = time.monotonic() + (0.0 if isinstance(event, VerdictGiven) else _STORED_SECONDS_MAX)
    while time.monotonic() < until and not operations.has(traces.store, event):
        time.sleep(_LOOK_SECONDS)
    return {"id": event.meta.id}


def save_query(traces: Traces, person: Person, form: QueryForm) -> QuerySaved:
    """Raises BadInput: what cannot be asked now is not kept."""
    if not _NAME.fullmatch(form.name):
        raise BadInput(f"{form.name[:80]!r} is no name for a query: use small letters, digits, - and _")
    saved = operations.saved_queries(traces.store)
    if form.use == "removed":
        if form.name not in saved:
            raise BadInput(f"there is no saved query {form.name}")
        form = msgspec.structs.replace(form, sql="")
    else:
        _require_useful(traces, person, form)
    is_new_alert = form.use == "alert" and (form.name not in saved or saved[form.name].use != "alert")
    if is_new_alert and sum(query.use == "alert" for query in saved.values()) >= ALERTS_MAX:
        raise BadInput(f"there are {ALERTS_MAX} alerts already: remove one")
    return QuerySaved(meta=_meta(person, "query"), saved_by=person.name, **msgspec.structs.asdict(form))


def _require_useful(traces: Traces, person: Person, form: QueryForm) -> None:
    if form.use == "alert" and form.every_seconds < EVERY_SECONDS_MIN:
        raise BadInput(f"an alert asks every {EVERY_SECONDS_MIN:g} s at most")
    # Through the wall, as it will be asked later.
    answer = traces.ask_sql(form.sql, person.name)
    if form.use == "queue" and "trajectory_id" not in answer.columns:
        raise BadInput("the rows of a queue need a column trajectory_id")
    if form.use == "alert" and len(answer.rows) > 1:
        raise BadInput(f"an alert compares one number, and this gives {len(answer.rows)} rows")


def give_verdict(traces: Traces, person: Person, form: VerdictForm) -> Event:
    """Raises BadInput, UnknownRun."""
    run = traces.find(form.run)
    question = next((asked for asked in run.questions if asked.scorer == form.scorer), None)
    if question is None:
        raise BadInput(f"no scorer {form.scorer[:80]} of {run.run_id} asks people")
    address = address_of(traces.store, run.run_id, form.trajectory, form.attempt)
    trajectory = traces.event_at(address) if address is not None else None
    if address is None or not _is_asked_about(trajectory, run, form.scorer):
        raise BadInput(f"there is no attempt {form.attempt[:80]} in {run.run_id} that {form.scorer} judges")
    assert isinstance(trajectory, TrajectoryAssembled)
    annotator = form.annotator if person == LOCAL else person.name
    return verdict_event(trajectory, address, question, annotator, form.score, form.comment, now_microseconds())


def _is_asked_about(trajectory: Event | None, run: RunState, scorer: str) -> bool:
    return (
        isinstance(trajectory, TrajectoryAssembled)
        and trajectory.meta.run_id == run.run_id
        and scorer in trajectory.task.scorers
        and is_asked(trajectory)
    )


def request_replay(traces: Traces, person: Person, form: ReplayForm) -> ReplayRequested:
    """Raises BadInput, UnknownRun."""
    if not 0 < len(form.sources) <= _SOURCES_MAX:
        raise BadInput(f"choose the runs to judge again: one to {_SOURCES_MAX}")
    for source in form.sources:
        state = traces.find(source)
        if state.kind not in ("practise", "eval"):
            raise BadInput(f"{state.run_id} is of kind {state.kind} and has no trajectories of its own")
    for name in form.scorers:
        # A path of a file would be read as code by who carries it out.
        if not name.isprintable() or name.endswith(".py") or ".py:" in name or name.startswith("-"):
            raise BadInput(f"{name[:80]!r} is no name of a scorer: scorers in files are given by command")
    return ReplayRequested(meta=_meta(person, "replay"), requested_by=person.name, **msgspec.structs.asdict(form))


def request_redrive(traces: Traces, person: Person, form: RedriveForm) -> RedriveRequested:
    """Raises BadInput."""
    if not 0 < len(form.rejects) <= _REJECTS_MAX:
        raise BadInput(f"choose the messages to write again: one to {_REJECTS_MAX}")
    known = operations.rejects_among(traces.store, form.rejects)
    if missing := set(form.rejects) - known:
        raise BadInput(f"no rejected message has the id {min(missing)[:80]}")
    return RedriveRequested(meta=_meta(person, "redrive"), rejects=sorted(known), requested_by=person.name)


def _meta(person: Person, category: str) -> Meta:
    return Meta(
        id=new_id(),
        run_id=FIELD,
        category=category,
        topic="operations",
        sender=person.name,
        timestamp=now_microseconds(),
    )
