"""The addresses of the web page: one function for each view, all of them plain GET requests that return HTML.

    path ─► view(request) ─► content ─► frame.page ─► HTML

Pages hold no state on the server and no socket: what a view shows follows from its address alone, so a finished run opens
as a running one does. Actions go through /api (consumers.dashboard.web), with its checks.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from replayground.consumers.clickhouse.store import StoreFailed
from replayground.consumers.dashboard import addresses
from replayground.consumers.dashboard.access import person_of
from replayground.consumers.dashboard.addresses import address
from replayground.consumers.dashboard.frame import NAVIGATION, empty, page
from replayground.consumers.dashboard.images import picture
from replayground.consumers.dashboard.markup import el
from replayground.consumers.dashboard.queries.operations import saved_queries
from replayground.consumers.dashboard.request import StatementResult, ViewContent, ViewRequest
from replayground.consumers.dashboard.views import (
    alerts,
    audit,
    batches,
    compare,
    curves,
    event,
    failures,
    flow,
    group,
    lineage,
    machines,
    rejects,
    replay,
    runs,
    sql,
    tokens,
    trajectories,
    trajectory,
    verdicts,
)
from replayground.consumers.dashboard.web import Traces, refused
from replayground.consumers.reports.runs import RunEntry, UnknownRun
from replayground.schemas.errors import BadInput

type View = Callable[[ViewRequest], ViewContent]
type RunStatement = Callable[[ViewRequest, Request], Awaitable[StatementResult]]
"what becomes of the statement that an address holds or names"

VIEWS: Mapping[str, View] = {
    addresses.RUNS: runs.view,
    addresses.FLOW: flow.view,
    addresses.CURVES: curves.view,
    addresses.TRAJECTORIES: trajectories.view,
    addresses.TRAJECTORY: trajectory.view,
    addresses.GROUP: group.view,
    addresses.TOKENS: tokens.view,
    addresses.COMPARE: compare.view,
    addresses.BATCHES: batches.view,
    addresses.LINEAGE: lineage.view,
    addresses.FAILURES: failures.view,
    addresses.MACHINES: machines.view,
    addresses.REJECTS: rejects.view,
    addresses.REPLAY: replay.view,
    addresses.ALERTS: alerts.view,
    addresses.AUDIT: audit.view,
    addresses.EVENT: event.view,
}
_ASSETS_FOLDER = Path(__file__).parent / "assets"
_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page needs nothing from elsewhere and no inline script: text of an agent could not run even if an escape were
# forgotten.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-store"}

_log = structlog.get_logger(__name__)


def add_views(app: FastAPI, traces: Traces) -> None:
    """Adds all views to the application."""
    assets = _assets()
    version = hashlib.sha256(b"".join(assets[name] for name in sorted(assets))).hexdigest()[:12]
    for path, view in VIEWS.items():
        app.get(path)(_route(traces, path, view, version))
    app.get(addresses.SQL)(_asking_route(traces, addresses.SQL, sql.view, _run_statement, version))
    app.get(addresses.VERDICTS)(_asking_route(traces, addresses.VERDICTS, verdicts.view, _run_queue, version))

    @app.get(f"{addresses.ASSETS}/{{name}}")
    def asset(name: str) -> Response:
        if name not in assets:
            return Response("there is no such file", 404, media_type="text/plain")
        headers = {"Cache-Control": "max-age=31536000, immutable"}
        return Response(assets[name], headers=headers, media_type=_MEDIA_TYPES[Path(name).suffix])

    @app.get(addresses.BLOB)
    def blob(uri: str = "") -> Response:
        return picture(traces.source.log.codec.blobs if traces.source else None, uri)

    # The last one: whatever no other route takes.
    @app.get("/{path:path}")
    def elsewhere(request: Request, path: str) -> Response:
        told = f"there is no view at /{path[:80]}"
        if "text/html" not in request.headers.get("accept", ""):
            return refused(told, 404)
        asked = ViewRequest(traces, f"/{path}", {}, person=person_of(request))
        return _framed(asked, _problem("Not here", told, asked, is_lasting=True), 404, version)


def _assets() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in _ASSETS_FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}


def _route(traces: Traces, path: str, view: View, version: str) -> Callable[[Request], Response]:
    # Not async: FastAPI runs it in a thread, and a slow query keeps no other request waiting.
    def answer(request: Request) -> Response:
        asked = ViewRequest(traces, path, _query(request), person=person_of(request))
        # Addresses of older releases: one page for one run.
        if path == addresses.RUNS and asked.text("run"):
            return RedirectResponse(address(addresses.FLOW, asked.text("run")))
        return _page(asked, view, version)

    return answer


def _asking_route(
    traces: Traces, path: str, view: View, run_statement: RunStatement, version: str
) -> Callable[[Request], Awaitable[Response]]:
    # Statements of people wait outside the threads that serve the page.
    async def answer(request: Request) -> Response:
        asked = ViewRequest(traces, path, _query(request), person=person_of(request))
        asked = replace(asked, statement=await run_statement(asked, request))
        return await asyncio.to_thread(_page, asked, view, version)

    return answer


async def _run_statement(asked: ViewRequest, request: Request) -> StatementResult:
    """What became of the statement in the address."""
    statement = asked.text("sql")
    if not statement:
        return None
    # A page of somebody else could otherwise make the store work by linking here.
    if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return "You came here from another site, so the statement was not run. Read it, then press Ask."
    try:
        return await asked.traces.asked_sql(statement, asked.text("run") or None, person_of(request).name)
    except BadInput as error:
        return str(error)


async def _run_queue(asked: ViewRequest, request: Request) -> StatementResult:
    """What the saved query gives that the address names as a queue."""
    name = asked.text("queue")
    if not name:
        return None
    try:
        saved = (await asyncio.to_thread(saved_queries, asked.store)).get(name)
        if saved is None or saved.use != "queue":
            return f"there is no queue {name}: somebody may have removed it"
        return await asked.traces.asked_sql(saved.sql, None, asked.person.name)
    except (BadInput, StoreFailed) as error:
        return str(error)


def _query(request: Request) -> Mapping[str, Sequence[str]]:
    return {name: request.query_params.getlist(name) for name in request.query_params}


def _page(asked: ViewRequest, view: View, version: str) -> Response:
    content, status = _content(asked, view)
    return _framed(asked, content, status, version)


def _framed(asked: ViewRequest, content: ViewContent, status: int, version: str) -> Response:
    return HTMLResponse(
        page(content, asked.path, _runs(asked.traces), version, _raised(asked.traces), asked.person),
        status,
        headers=_HEADERS,
    )


def _content(asked: ViewRequest, view: View) -> tuple[ViewContent, int]:
    """The content, or what went wrong in one sentence."""
    try:
        return view(asked), 200
    except UnknownRun as error:
        if not asked.text("run") and not _runs(asked.traces):
            return _nothing_yet(asked), 200
        return _problem("Not here", str(error), asked), 404
    except BadInput as error:
        return _problem("Not understood", str(error), asked), 400
    except StoreFailed as error:
        _log.warning("view_failed", path=asked.path, reason=str(error))
        return _problem("The trace store could not answer", str(error), asked), 503


def _nothing_yet(asked: ViewRequest) -> ViewContent:
    """A view of one run on a field that has none."""
    name = next((name for _, views in NAVIGATION for name, path, _ in views if path == asked.path), "Nothing yet")
    told = empty(
        "No run has started on this field yet. ", el("code", "replayground run"), " starts one, and it shows here."
    )
    return ViewContent(name, [el("div", {"id": "none", "data-live": True}, told)], refresh_seconds=3.0)


def _problem(title: str, sentence: str, asked: ViewRequest, is_lasting: bool = False) -> ViewContent:
    told = f"{sentence[:1].upper()}{sentence[1:600]}"
    back = el("p", el("a", {"href": addresses.RUNS}, "All runs of this field"))
    # Asked again: a run that has just started may not be in the store yet, and a store that failed may be back.
    body = [el("div", {"id": "problem", "data-live": True}, empty(told)), back]
    return ViewContent(title, body, refresh_seconds=0.0 if is_lasting else 3.0)


def _runs(traces: Traces) -> list[RunEntry]:
    try:
        return traces.runs()
    except (BadInput, StoreFailed):
        return []


def _raised(traces: Traces) -> list[str]:
    """Names of the alerts that are raised."""
    standings = {} if traces.alerts is None else traces.alerts.standings()
    return [name for name, standing in standings.items() if standing.raised_at is not None]
