"""What the traces program serves on loopback: the interface under /api, and the page.

POST /api/sql            {"sql": …} → {"columns", "rows", "truncated", "seconds"}; 400 with one sentence otherwise
GET  /api/overview       how the run stands (consumers.reports.overview.Overview)
POST /api/finish         waits until the store has everything, then {"summary": …, "report": html}
POST /api/reconcile      {"repair": bool} → the store against the log, by partition (consumers.reconcile)
GET  /api/report         the report as it would be now
GET  /api/transcripts    ?purpose=&outcome=&session=&rows=
GET  /api/transcripts/…  one of them
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.middleware.trustedhost import TrustedHostMiddleware

from consumers.clickhouse.answers import Answers
from consumers.clickhouse.guard import checked
from consumers.clickhouse.store import Store, StoreFailed
from consumers.config import TracesSettings
from consumers.lag_watch import LagWatch
from consumers.reconcile import Compared, reconcile
from consumers.reports.overview import Overview, overview
from consumers.reports.report import report
from consumers.reports.summary import summary
from consumers.reports.transcripts import Listed, Transcript, listed, transcript
from schemas.errors import BadInput
from schemas.ids import now_microseconds
from schemas.run import Run
from streams.log.protocol import Log

HOST = "127.0.0.1"
_FRESH_SECONDS = 1.0
_CATCH_UP_SECONDS_MAX = 120.0
_TRANSCRIPTS_MAX = 500

_log = structlog.get_logger(__name__)


class Writer(Protocol):
    """Whoever fills the store."""

    def await_caught_up(self, timeout_seconds: float) -> bool: ...


class SqlAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a person's statement."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    seconds: float


class Traces:
    """What the page and the interface ask. Every call may block for the time of its queries; safe between threads."""

    def __init__(
        self, store: Store, log: Log, run: Run, settings: TracesSettings, lag: LagWatch, writer: Writer
    ) -> None:
        self.run = run
        self._store = store
        self._log = log
        self._settings = settings
        self._lag = lag
        self._writer = writer
        self._answers = Answers(store)
        self._turn = threading.Lock()
        self._seen: tuple[float, Overview] | None = None

    def overview(self) -> Overview:
        """How the run stands, at most a second old: however many ask, the store is asked once."""
        with self._turn:
            if self._seen is None or time.monotonic() > self._seen[0] + _FRESH_SECONDS:
                view = overview(self._answers, self.run, self._lag.lags(), now_microseconds())
                self._seen = (time.monotonic(), view)
            return self._seen[1]

    def sql(self, statement: str) -> SqlAnswer:
        """Answers a statement of a person. Raises BadInput with one sentence."""
        safe = checked(statement)
        limits = {
            "limit": self._settings.sql_rows_max + 1,
            "max_execution_time": max(1, round(self._settings.sql_seconds_max)),
            "max_memory_usage": self._settings.sql_memory_bytes_max,
            "readonly": 1,
        }
        began = time.monotonic()
        try:
            answer = self._store.ask_guarded(safe, limits)
        except StoreFailed as error:
            raise BadInput(f"ClickHouse refused: {str(error).splitlines()[0][:400]}") from error
        rows = [[_plain(cell) for cell in row] for row in answer.rows[: self._settings.sql_rows_max]]
        truncated = len(answer.rows) > self._settings.sql_rows_max
        seconds = round(time.monotonic() - began, 3)
        return SqlAnswer(columns=list(answer.columns), rows=rows, truncated=truncated, seconds=seconds)

    def transcripts(self, purpose: str, outcome: str, session: str, rows: int) -> list[Listed]:
        rows = max(1, min(rows, _TRANSCRIPTS_MAX))
        return listed(self._store, self.run.run_id, purpose=purpose, outcome=outcome, session=session, rows=rows)

    def transcript(self, trajectory_id: str) -> Transcript | None:
        return transcript(self._store, self.run.run_id, trajectory_id)

    def report(self) -> str:
        """The report as it would be now."""
        return str(self.finish(await_log=False)["report"])

    def finish(self, await_log: bool = True) -> dict[str, Any]:
        """Summary and report. Raises BadInput when the store does not catch up with the log."""
        if await_log:
            self._await_written()
        now = now_microseconds()
        figures = summary(self._store, self._log, self.run, now)
        return {"summary": figures, "report": report(self._store, self.run, figures, now)}

    def reconcile(self, repair: bool) -> list[Compared]:
        """The store against the log. Raises BadInput when the store does not catch up."""
        return reconcile(self._log, self._store, self._await_written, repair)

    def _await_written(self) -> None:
        if not self._writer.await_caught_up(_CATCH_UP_SECONDS_MAX):
            raise BadInput(
                f"the trace store is behind the log after {_CATCH_UP_SECONDS_MAX:.0f} s: see the traces program"
            )


def interface(traces: Traces) -> FastAPI:
    """The application with everything under /api."""
    app = FastAPI(title="Replayground traces", docs_url=None, redoc_url=None, openapi_url=None)
    # a page elsewhere must not reach us through a name that it makes point to this machine
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    @app.post("/api/sql")
    async def sql(request: Request) -> Response:
        try:
            statement = msgspec.json.decode(await request.body(), type=dict[str, str])["sql"]
        except (msgspec.DecodeError, KeyError):
            return _json({"error": 'send {"sql": "SELECT …"}'}, 400)
        return await _answered(lambda: traces.sql(statement))

    @app.get("/api/overview")
    async def view() -> Response:
        return await _answered(traces.overview)

    @app.post("/api/finish")
    async def finish() -> Response:
        return await _answered(traces.finish)

    @app.post("/api/reconcile")
    async def compare(request: Request) -> Response:
        try:
            repair = msgspec.json.decode(await request.body(), type=dict[str, bool])["repair"]
        except (msgspec.DecodeError, KeyError):
            return _json({"error": 'send {"repair": false}'}, 400)
        return await _answered(lambda: traces.reconcile(repair))

    @app.get("/api/report")
    async def now() -> Response:
        return HTMLResponse(await asyncio.to_thread(traces.report))

    @app.get("/api/transcripts")
    async def listing(purpose: str = "", outcome: str = "", session: str = "", rows: int = 50) -> Response:
        return await _answered(lambda: traces.transcripts(purpose, outcome, session, rows))

    @app.get("/api/transcripts/{trajectory_id}")
    async def one(trajectory_id: str) -> Response:
        found = await asyncio.to_thread(traces.transcript, trajectory_id)
        return _json(found, 200) if found is not None else _json({"error": "there is no such trajectory"}, 404)

    return app


class WebServer:
    """Interface and page in a thread."""

    def __init__(
        self, store: Store, log: Log, run: Run, settings: TracesSettings, lag: LagWatch, writer: Writer
    ) -> None:
        """Raises BadInput when the port is taken, before anything is opened."""
        _must_be_free(settings.port)
        from consumers.dashboard.page import add_page  # NiceGUI takes seconds to import

        traces = Traces(store, log, run, settings, lag, writer)
        app = interface(traces)
        add_page(app, traces)
        config = uvicorn.Config(
            app, host=HOST, port=settings.port, log_config=None, access_log=False, timeout_graceful_shutdown=2
        )
        self._server = uvicorn.Server(config)
        self._port = settings.port
        self._thread = threading.Thread(target=self._server.run, name="web", daemon=True)

    def start(self) -> None:
        """Returns when the page answers. Raises BadInput when it cannot be opened."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise BadInput(f"the web page could not be opened on port {self._port}: see the log above")
            time.sleep(0.02)
        _log.info("page", address=f"http://{HOST}:{self._port}")

    def stop(self) -> None:
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(timeout=10.0)


def _must_be_free(port: int) -> None:
    """uvicorn would end the process on a busy port; this says what is wrong instead."""
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((HOST, port))
        except OSError as error:
            raise BadInput(f"port {port} is in use: set [traces] port to a free one, or end what uses it") from error


async def _answered(question: Callable[[], Any]) -> Response:
    try:
        return _json(await asyncio.to_thread(question), 200)
    except BadInput as error:
        return _json({"error": str(error)}, 400)


def _json(content: Any, status: int) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _plain(cell: Any) -> Any:
    """Cells as JSON can carry them: bytes and others as text, numbers that JSON has no word for as text too."""
    if isinstance(cell, float) and (cell != cell or cell in (float("inf"), float("-inf"))):
        return str(cell)
    if cell is None or isinstance(cell, bool | int | float | str):
        return cell
    if isinstance(cell, list | tuple):
        return [_plain(part) for part in cell]
    if isinstance(cell, dict):
        return {str(name): _plain(part) for name, part in cell.items()}
    return str(cell)
