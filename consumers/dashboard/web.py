"""The web server of the traces program: the HTTP interface under /api, and the page.

It listens on loopback unless [traces] bind is set, and then asks for a token (dashboard.access). Every request but
/api/runs takes ?run=ID; without it, it is about the newest run unless noted. A POST carries JSON. An error is
{"error": one sentence}: 404 for an unknown run, 401 and 403 for who may not, 429 for too much at once, 400 for other bad
input.

GET  /api/runs           all runs of the field, newest first (consumers.reports.runs.RunEntry)
POST /api/sql            {"sql": …} → {"columns", "rows", "truncated", "seconds", "age_seconds"}; without a run, over all
GET  /api/overview       the state of the run (consumers.reports.overview.Overview)
POST /api/catch-up       waits until the store has caught up with the log
POST /api/finish         waits until the store has caught up with the log, then {"summary": …, "report": html}
POST /api/reconcile      {"repair": bool} → store and log compared by partition (consumers.reconcile); without a run,
                         of the whole field
GET  /api/lineage        ?of=RUN, RUN:VERSION or the id of a trajectory (streams.rules.lineage.Lineage)
POST /api/queries, /api/verdicts, /api/replays
                         what people decide on the page (consumers.dashboard.actions)
GET  /api/report         the report as of now, HTML
GET  /api/transcripts    ?purpose=&outcome=&session=&rows=
GET  /api/transcripts/…  one of them
"""

import asyncio
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from replayground.consumers.alert_watch import AlertWatch
from replayground.consumers.clickhouse.people_sql import PeopleSql
from replayground.consumers.clickhouse.query_cache import QueryCache
from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlBusy
from replayground.consumers.clickhouse.store import Store, StoreFailed
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard.access import (
    BODY_BYTES_MAX,
    LOOPBACK_NAMES,
    AccessCheck,
    Throttle,
    body_of,
    person_of,
)
from replayground.consumers.dashboard.tokens import LOCAL, Person, TokenFile
from replayground.consumers.lag_watch import LagWatch
from replayground.consumers.operations_log import OperationsWriter
from replayground.consumers.reconcile import WHOLE_FIELD, PartitionComparison, Scope, reconcile
from replayground.consumers.reports import runs
from replayground.consumers.reports.lineage import Lineages
from replayground.consumers.reports.overview import Overview, overview
from replayground.consumers.reports.report import report
from replayground.consumers.reports.runs import Runs, UnknownRun
from replayground.consumers.reports.summary import summary
from replayground.consumers.reports.transcripts import Transcript, TranscriptEntry, list_transcripts, transcript
from replayground.schemas.errors import BadInput, LogUnavailable, Undecodable
from replayground.schemas.events import Address, Event, Meta, OperatorActed, TrajectoriesSelected
from replayground.schemas.ids import new_id, now_microseconds
from replayground.schemas.redaction import redacted
from replayground.schemas.run import FIELD
from replayground.streams.log.protocol import Log
from replayground.streams.replay.selection import selections_on_log
from replayground.streams.rules.lineage import Lineage
from replayground.streams.rules.runs import RunState

_LOOPBACK_ADDRESSES = ("127.0.0.1", "::1", "localhost")
_FRESH_SECONDS = 1.0
_CATCH_UP_SECONDS_MAX = 120.0
_TRANSCRIPTS_MAX = 500
# Runs whose overview is kept.
_SEEN_MAX = 100

_log = structlog.get_logger(__name__)


class Writer(Protocol):
    """What fills the store."""

    def await_caught_up(self, timeout_seconds: float) -> bool: ...


class SqlResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a user's statement."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    seconds: float
    age_seconds: float = 0.0
    "how old the data was when the result was complete"


@dataclass(frozen=True)
class LogSource:
    """The log and what follows it. A program that serves only the store has none."""

    log: Log
    lag: LagWatch
    writer: Writer
    operations: OperationsWriter


class Traces:
    """The requests of page and interface. `run_id` None is the newest run. Every call may block for the time of its
    queries. Raises UnknownRun (404) and BadInput (400) with one sentence, and StoreFailed. Thread-safe."""

    def __init__(self, store: Store, settings: TracesSettings, source: LogSource | None) -> None:
        self._store = store
        self._settings = settings
        self._source = source
        self._answers = QueryCache(store)
        self._runs = Runs(self._answers)
        # Runs belongs to one thread at a time.
        self._turn = threading.Lock()
        self._reading = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, Overview]] = OrderedDict()
        self._people = PeopleSql(settings)
        self._asked = Throttle(settings.sql_per_minute_max, 60.0)
        # As one person with a share of its own: alerts do not take the place of people, nor people theirs.
        self.alerts = None if source is None else self._alerts(source)

    def _alerts(self, source: LogSource) -> AlertWatch:
        def ask(sql: str) -> SqlAnswer:
            return self._people.ask(sql, None, "alerts")

        return AlertWatch(source.log, source.operations, ask, self._settings.webhook, page_url(self._settings))

    @property
    def store(self) -> Store:
        return self._store

    @property
    def answers(self) -> QueryCache:
        return self._answers

    @property
    def source(self) -> LogSource | None:
        """The log, when it is being read."""
        return self._source

    @property
    def follows(self) -> bool:
        """Whether the log is read; False when only the store is served."""
        return self._source is not None

    def find(self, run_id: str | None) -> RunState:
        with self._turn:
            return self._runs.find(run_id)

    def runs(self) -> list[runs.RunEntry]:
        with self._turn:
            return self._runs.list_runs(now_microseconds())

    def overview(self, run_id: str | None = None) -> Overview:
        """The state of the run, at most a second old: however many browsers ask, the store is queried once."""
        with self._turn:
            run = self._runs.find(run_id)
            seen = self._seen.get(run.run_id)
            if seen is None or time.monotonic() > seen[0] + _FRESH_SECONDS:
                seen = (time.monotonic(), overview(self._answers, run, self._lags(run), now_microseconds()))
                self._seen[run.run_id] = seen
                self._seen.move_to_end(run.run_id)
                if len(self._seen) > _SEEN_MAX:
                    self._seen.popitem(last=False)
            return seen[1]

    def partition_lags(self, run_id: str) -> Mapping[str, Mapping[int, int]]:
        """Lags of an active run by stage and partition."""
        run = self.find(run_id)
        return self._source.lag.partition_lags(run_id) if self._source is not None and run.is_active else {}

    def _lags(self, run: RunState) -> dict[str, int]:
        """Lags of an active run. A run that is over has none: its groups stand still while other runs fill the
        topics."""
        return self._source.lag.lags(run.run_id) if self._source is not None and run.is_active else {}

    async def asked_sql(self, statement: str, run_id: str | None = None, person: str = "") -> SqlResult:
        """Runs a user's statement, over all runs or one, without a thread: what serves the page does not wait. Raises
        BadInput, UnknownRun, and SqlBusy when too many are waiting."""
        began = time.monotonic()
        self._note_statement(person)
        found = await asyncio.to_thread(self._id_of, run_id) if run_id else None
        return self._shown(await self._people.asked(statement, found, person), began)

    def ask_sql(self, statement: str, person: str = "") -> SqlResult:
        """As `asked_sql`, over all runs, for a thread that may wait."""
        began = time.monotonic()
        self._note_statement(person)
        return self._shown(self._people.ask(statement, None, person), began)

    def _note_statement(self, person: str) -> None:
        if self._asked.is_full(person):
            raise SqlBusy(f"more than {self._settings.sql_per_minute_max} statements in a minute: wait a little")
        self._asked.mark(person)

    def start(self) -> None:
        """Begins to watch the alerts."""
        if self.alerts is not None:
            self.alerts.start()

    def close(self) -> None:
        """Ends the alerts, and the statements that are running."""
        if self.alerts is not None:
            self.alerts.stop()
        self._people.close()

    def _id_of(self, run_id: str | None) -> str | None:
        return self.find(run_id).run_id if run_id else None

    def _shown(self, answer: SqlAnswer, began: float) -> SqlResult:
        most = self._settings.sql_rows_max
        return SqlResult(
            columns=answer.columns,
            rows=answer.rows[:most],
            truncated=len(answer.rows) > most,
            seconds=round(time.monotonic() - began, 3),
            age_seconds=answer.age_seconds,
        )

    def event_at(self, address: Address) -> Event:
        """The event as it stands on the log. Raises BadInput when it is not there any more, LogUnavailable."""
        log = self.require_source().log
        try:
            # One at a time: a log has one client for this.
            with self._reading:
                return log.read_at([address])[0]
        except (LookupError, Undecodable) as error:
            raise BadInput(f"nothing that can be read stands at {address} on the log any more") from error

    def transcripts(
        self, run_id: str | None, *, purpose: str = "", outcome: str = "", session: str = "", rows: int = 50
    ) -> list[TranscriptEntry]:
        rows = max(1, min(rows, _TRANSCRIPTS_MAX))
        found = self.find(run_id).run_id
        return list_transcripts(self._store, found, purpose=purpose, outcome=outcome, session=session, rows=rows)

    def transcript(self, run_id: str | None, trajectory_id: str) -> Transcript | None:
        return transcript(self._store, self.find(run_id).run_id, trajectory_id)

    def report(self, run_id: str | None = None) -> str:
        """The report as of now, HTML."""
        return str(self._summary_and_report(self.find(run_id))["report"])

    def finish(self, run_id: str | None = None) -> dict[str, Any]:
        """Summary and report. Blocks until everything that is on the log now is in the store, at most two minutes."""
        self._await_written(self.require_source())
        return self._summary_and_report(self.find(run_id))

    def lineage(self, text: str, all_addresses: bool = False) -> Lineage:
        """What a version grew from, or what a trajectory influenced. What is not in the store yet is waited for."""
        try:
            answer = self._lineages().of(text, all_addresses)
            # A version never changes. More steps may have learned from a trajectory than the store knows of.
            if answer.version is not None or self._source is None:
                return answer
        except UnknownRun:
            if self._source is None:
                raise
        self._await_written(self.require_source())
        return self._lineages().of(text, all_addresses)

    def _lineages(self) -> Lineages:
        with self._turn:
            states = self._runs.states()
        return Lineages(self._store, states, self._selections)

    def _selections(self) -> Sequence[TrajectoriesSelected]:
        return selections_on_log(self.require_source().log)

    def reconcile(self, repair: bool, run_id: str | None = None, person: Person = LOCAL) -> list[PartitionComparison]:
        """Compares the store with the log, and repairs it if asked; the whole field, or one run. Reads the log in
        scope."""
        source = self.require_source()
        if repair:
            # Before it is done: whoever repairs a store that then fails has acted all the same.
            source.operations.write(acted(person, "reconcile --repair", f"rows of {run_id or 'all runs'}"))
        scope = WHOLE_FIELD
        if run_id:
            run = self.find(run_id)
            scope = Scope(run_id=run.run_id, start=run.positions)
        return reconcile(source.log, self._store, lambda: self._await_written(source), repair, scope)

    def catch_up(self) -> dict[str, Any]:
        """Blocks until everything that is on the log now is in the store. Raises BadInput."""
        self._await_written(self.require_source())
        return {}

    def _summary_and_report(self, run: RunState) -> dict[str, Any]:
        now = now_microseconds()
        figures = summary(self._store, self._source.log if self._source else None, run, now)
        return {"summary": figures, "report": report(self._store, run, figures, now)}

    def require_source(self) -> LogSource:
        """The log. Raises BadInput when it is not being read."""
        if self._source is None:
            raise BadInput("this needs the log, which is not being read: start the field with `replayground up`")
        return self._source

    def _await_written(self, source: LogSource) -> None:
        if not source.writer.await_caught_up(_CATCH_UP_SECONDS_MAX):
            raise BadInput(
                f"the trace store is behind the log after {_CATCH_UP_SECONDS_MAX:.0f} s: see the traces program"
            )


def interface(traces: Traces, settings: TracesSettings | None = None) -> FastAPI:
    """The application with everything under /api, behind the checks of dashboard.access. Raises BadInput when it would
    listen on other machines' requests without a token."""
    app = FastAPI(title="Replayground traces", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(AccessCheck, **_checks(settings or TracesSettings()))
    # One sentence here too, where the framework would answer with a structure of its own.
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _not_here)

    @app.get("/api/runs")
    async def all_runs() -> Response:
        return await respond(traces.runs)

    @app.post("/api/sql")
    async def sql(request: Request, run: str | None = None) -> Response:
        try:
            body = await body_of(request, BODY_BYTES_MAX)
            statement = msgspec.json.decode(body, type=dict[str, str])["sql"]
        except BadInput as error:
            return refused(str(error), 413)
        except (msgspec.DecodeError, UnicodeError, KeyError):
            return refused('send {"sql": "SELECT …"}', 400)
        person = person_of(request)
        return await _respond_to(traces.asked_sql(statement, run, person.name))

    @app.get("/api/overview")
    async def view(run: str | None = None) -> Response:
        return await respond(lambda: traces.overview(run))

    @app.post("/api/catch-up")
    async def catch_up() -> Response:
        return await respond(traces.catch_up)

    @app.post("/api/finish")
    async def finish(run: str | None = None) -> Response:
        return await respond(lambda: traces.finish(run))

    @app.post("/api/reconcile")
    async def compare(request: Request, run: str | None = None) -> Response:
        try:
            body = await body_of(request, BODY_BYTES_MAX)
            repair = msgspec.json.decode(body, type=dict[str, bool])["repair"]
        except BadInput as error:
            return refused(str(error), 413)
        except (msgspec.DecodeError, UnicodeError, KeyError):
            return refused('send {"repair": false}', 400)
        return await respond(lambda: traces.reconcile(repair, run, person_of(request)))

    @app.get("/api/lineage")
    async def lineage(of: str, everything: bool = False) -> Response:
        return await respond(lambda: traces.lineage(of, everything))

    @app.get("/api/report")
    async def now(run: str | None = None) -> Response:
        return await respond(lambda: traces.report(run), HTMLResponse)

    @app.get("/api/transcripts")
    async def listing(
        run: str | None = None, purpose: str = "", outcome: str = "", session: str = "", rows: int = 50
    ) -> Response:
        return await respond(
            lambda: traces.transcripts(run, purpose=purpose, outcome=outcome, session=session, rows=rows)
        )

    @app.get("/api/transcripts/{trajectory_id}")
    async def one(trajectory_id: str, run: str | None = None) -> Response:
        return await respond(lambda: _one(traces, run, trajectory_id))

    return app


def _one(traces: Traces, run_id: str | None, trajectory_id: str) -> Transcript:
    found = traces.transcript(run_id, trajectory_id)
    if found is None:
        raise UnknownRun(f"there is no trajectory {trajectory_id} in run {traces.find(run_id).run_id}")
    return found


class WebServer:
    """Serves interface and page in a thread."""

    def __init__(self, store: Store, settings: TracesSettings, source: LogSource | None) -> None:
        """Raises BadInput when the port is in use."""
        # Before the import below, which takes seconds.
        _require_free(settings.bind, settings.port)
        from replayground.consumers.dashboard.actions import add_actions
        from replayground.consumers.dashboard.routes import add_views

        traces = Traces(store, settings, source)
        app = interface(traces, settings)
        add_actions(app, traces)
        add_views(app, traces)
        self._traces = traces
        # A browser keeps its connection open: without the timeout, shutdown would wait for it.
        config = uvicorn.Config(
            app,
            host=settings.bind,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
            # A proxy is not believed about who asks: its own address counts.
            proxy_headers=False,
            server_header=False,
            ssl_certfile=settings.tls_certificate or None,
            ssl_keyfile=settings.tls_key or None,
        )
        self._server = uvicorn.Server(config)
        self._settings = settings
        self._thread = threading.Thread(target=self._server.run, name="web", daemon=True)

    def start(self) -> None:
        """Blocks until the server accepts connections. Raises BadInput when it cannot start."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise BadInput(f"the web page could not be opened on port {self._settings.port}: see the log above")
            time.sleep(0.02)
        self._traces.start()
        _log.info("page_started", address=page_url(self._settings))

    def stop(self) -> None:
        self._server.should_exit = True
        # First: requests that wait for a statement would hold up the end of the server.
        self._traces.close()
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)


def acted(person: Person, action: str, detail: str) -> OperatorActed:
    """What a person did that no other event tells."""
    meta = Meta(
        id=new_id(),
        run_id=FIELD,
        category="act",
        topic="operations",
        sender=person.name,
        timestamp=now_microseconds(),
    )
    return OperatorActed(meta=meta, action=action, detail=detail, person=person.name)


def page_url(settings: TracesSettings) -> str:
    """The address of the page as other machines know it."""
    scheme = "https" if settings.tls_key else "http"
    return f"{scheme}://{settings.name or settings.bind}:{settings.port}"


def _require_free(bind: str, port: int) -> None:
    """Raises BadInput when the port cannot be bound. uvicorn would only end its own thread, with the reason in the
    log."""
    with socket.socket() as trial:
        # As asyncio does when it listens: connections of a server that has just ended do not count as in use.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((bind, port))
        except OSError as error:
            raise BadInput(
                f"port {port} is in use, or {bind} is no address of this machine ({error.strerror}): "
                "set [traces] port and bind"
            ) from error


def _checks(settings: TracesSettings) -> dict[str, Any]:
    """The arguments of AccessCheck. Raises BadInput."""
    if bool(settings.tls_certificate) != bool(settings.tls_key):
        raise BadInput("TLS needs both files: set [traces] tls_certificate and tls_key, or neither")
    if settings.bind in _LOOPBACK_ADDRESSES:
        return {"hosts": LOOPBACK_NAMES, "is_tls": bool(settings.tls_key)}
    tokens = TokenFile(Path(settings.tokens)) if settings.tokens else None
    if tokens is None or all(token.revoked_at for token in tokens.tokens()):
        raise BadInput(
            f"[traces] bind = {settings.bind} lets other machines in, and nobody has a token: "
            "`replayground tokens add NAME --role viewer` makes one"
        )
    return {"hosts": (), "tokens": tokens, "is_tls": bool(settings.tls_key)}


async def respond(question: Callable[[], Any], shown: Callable[[Any], Response] | None = None) -> Response:
    """What a question came to, or its error, as JSON."""
    # In a thread: requests block for their queries, and the event loop serves all browsers.
    return await _respond_to(asyncio.to_thread(question), shown)


async def _respond_to(question: Awaitable[Any], shown: Callable[[Any], Response] | None = None) -> Response:
    try:
        answer = await question
        return _json(answer, 200) if shown is None else shown(answer)
    except UnknownRun as error:
        return refused(str(error), 404)
    except SqlBusy as error:
        return refused(str(error), 429)
    except BadInput as error:
        return refused(str(error), 400)
    except LogUnavailable as error:
        return refused(f"the log does not answer: {error}", 503)
    except StoreFailed as error:
        return refused(str(error), 503)


async def _not_understood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refused(f"?{first['loc'][-1]}= is missing or wrong: {first['msg']}", 400)


async def _not_here(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refused(f"{request.method} {request.url.path[:80]}: {error.detail}", error.status_code)


def refused(sentence: str, status: int) -> Response:
    """An error as the interface tells all of them."""
    return _json({"error": redacted(sentence)}, status)


def _json(content: Any, status: int) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
