"""Who may send what to the web server: checked before any page, request or socket is reached.

* Requests of pages of another origin are refused (Origin, Sec-Fetch-Site, and on loopback the Host): POST, everything
  under /api, and the page's socket. A POST under /api is JSON, which no form of another page can send.
* On loopback whoever reaches the server may do everything. On any other address a token is needed: as a bearer, or
  exchanged at /login for a cookie that scripts cannot read and other sites do not send.
* Every response says that it must not be framed, guessed as another type, or named to other sites.

The cookie is a random key of a session in memory, so a restart of the program ends all sessions.
"""

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from html import escape
from urllib.parse import parse_qs, quote, urlsplit

import msgspec
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayground.consumers.dashboard.tokens import LOCAL, Person, Role, TokenFile
from replayground.schemas.errors import BadInput

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
_COOKIE = "replayground"
_SESSION_SECONDS = 12 * 3600.0
_SESSIONS_MAX = 10_000
_FAILURES_MAX, _FAILURE_SECONDS = 10, 60.0
_ADDRESSES_MAX = 10_000
_FORM_BYTES_MAX = 4096
BODY_BYTES_MAX = 256 * 1024
"of a request"
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# Reads that are sent as POST, since they have a body or wait for the log.
_READS = ("/api/sql", "/api/finish", "/api/catch-up")
# Inline styles are those of the login and of the report. The views forbid them too (dashboard.routes); nothing runs inline.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_log = structlog.get_logger(__name__)


def person_of(connection: HTTPConnection) -> Person:
    """Who sent this request."""
    person: Person = connection.scope.get("replayground.person", LOCAL)
    return person


class AccessDenied(Exception):
    """The request goes no further: the status and one sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


class Throttle:
    """At most so many marks for a name in a stretch of time. Remembers the newest names only."""

    def __init__(self, marks_max: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._marks_max = marks_max
        self._seconds = seconds
        self._clock = clock
        self._marks: OrderedDict[str, deque[float]] = OrderedDict()

    def mark(self, name: str) -> None:
        marks = self._marks.setdefault(name, deque(maxlen=self._marks_max))
        marks.append(self._clock())
        self._marks.move_to_end(name)
        if len(self._marks) > _ADDRESSES_MAX:
            self._marks.popitem(last=False)

    def is_full(self, name: str) -> bool:
        marks = self._marks.get(name)
        return marks is not None and len(marks) == self._marks_max and marks[0] > self._clock() - self._seconds


class AccessCheck:
    """The middleware around everything that the web server has."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Iterable[str] = LOOPBACK_NAMES,
        tokens: TokenFile | None = None,
        is_tls: bool = False,
    ) -> None:
        """Without `hosts` any Host is served; without `tokens` everybody is LOCAL."""
        self._app = app
        self._hosts = frozenset(hosts)
        self._tokens = tokens
        self._is_tls = is_tls
        self._sessions: OrderedDict[str, tuple[Person, float]] = OrderedDict()
        self._failures = Throttle(_FAILURES_MAX, _FAILURE_SECONDS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        guarded = _with_headers(send) if scope["type"] == "http" else send
        try:
            self._require_own_origin(scope)
            if self._tokens is not None and scope["path"] in ("/login", "/logout") and scope["type"] == "http":
                response = await self._log_in_or_out(Request(scope, receive))
                await response(scope, receive, guarded)
                return
            person = self._person(scope)
            _require_role(scope, person)
        except AccessDenied as refusal:
            await _refuse(refusal, scope, receive, guarded)
            return
        scope["replayground.person"] = person
        if scope["type"] == "websocket":
            receive = self._until_revoked(person, receive)
        await self._app(scope, receive, guarded)

    def _require_own_origin(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        # Against DNS rebinding: a foreign page could make its own host name resolve to this machine.
        if (
            self._hosts
            and (host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host) not in self._hosts
        ):
            raise AccessDenied(400, "this page is served as 127.0.0.1 or localhost only")
        method = scope.get("method", "GET")
        is_page = method in _SAFE_METHODS and not scope["path"].startswith("/api")
        # A page may be opened by a link from anywhere; it cannot be framed or read by who links to it.
        if scope["type"] == "http" and is_page:
            return
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise AccessDenied(403, "requests of pages of another origin are refused")
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
            raise AccessDenied(403, "requests of pages of another origin are refused")
        if method not in _SAFE_METHODS and scope["path"].startswith("/api"):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise AccessDenied(415, "send JSON, with Content-Type: application/json")

    def _person(self, scope: Scope) -> Person:
        if self._tokens is None:
            return LOCAL
        connection = HTTPConnection(scope)
        kind, _, secret = connection.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return self._of_token(secret.strip(), connection)
        person, until = self._sessions.get(connection.cookies.get(_COOKIE, ""), (None, 0.0))
        if person is None or until < time.monotonic() or not self._tokens.still(person):
            raise AccessDenied(401, "a token is needed: send it as `Authorization: Bearer …`, or log in at /login")
        return person

    def _of_token(self, secret: str, connection: HTTPConnection) -> Person:
        """Raises AccessDenied, and remembers where wrong tokens come from."""
        assert self._tokens is not None
        address = connection.client.host if connection.client else ""
        if self._failures.is_full(address):
            raise AccessDenied(429, "too many wrong tokens came from this address: try again in a minute")
        person = self._tokens.find(secret)
        if person is None:
            self._failures.mark(address)
            _log.warning("token_refused", reason=f"a wrong or revoked token from {address}")
            raise AccessDenied(401, "this token is unknown or was revoked")
        return person

    async def _log_in_or_out(self, request: Request) -> Response:
        if request.url.path == "/logout":
            # By POST alone: a link from elsewhere must not log anybody out.
            if request.method == "POST":
                self._sessions.pop(request.cookies.get(_COOKIE, ""), None)
            return RedirectResponse("/login", 303)
        if request.method != "POST":
            return HTMLResponse(_login_page("", request.query_params.get("next", "/")))
        try:
            body = await body_of(request, _FORM_BYTES_MAX)
        except BadInput as error:
            return HTMLResponse(_login_page(str(error), "/"), 413)
        asked = {name: values[0] for name, values in parse_qs(body.decode(errors="replace")).items()}
        try:
            person = self._of_token(asked.get("token", "").strip(), request)
        except AccessDenied as refusal:
            return HTMLResponse(_login_page(str(refusal), asked.get("next", "/")), refusal.status)
        response = RedirectResponse(_own_path(asked.get("next", "/")), 303)
        response.set_cookie(
            _COOKIE, self._begin(person), int(_SESSION_SECONDS), httponly=True, samesite="strict", secure=self._is_tls
        )
        return response

    def _begin(self, person: Person) -> str:
        key = secrets.token_urlsafe(32)
        self._sessions[key] = (person, time.monotonic() + _SESSION_SECONDS)
        if len(self._sessions) > _SESSIONS_MAX:
            self._sessions.popitem(last=False)
        return key

    def _until_revoked(self, person: Person, receive: Receive) -> Receive:
        """A socket ends at its next message once the token that opened it was revoked."""

        async def checked() -> Message:
            message = await receive()
            if self._tokens is not None and not self._tokens.still(person):
                return {"type": "websocket.disconnect", "code": 1008}
            return message

        return checked


def _require_role(scope: Scope, person: Person) -> None:
    method, path = scope.get("method", "GET"), scope["path"]
    reads = method in _SAFE_METHODS or path in _READS or not path.startswith("/api")
    needed: Role = "viewer" if reads else "operator"
    if not person.may(needed):
        raise AccessDenied(403, f"{person.name} is {person.role}: this needs the role {needed}")


async def body_of(request: Request, bytes_max: int) -> bytes:
    """What was sent. Raises BadInput as soon as it is more than allowed, without reading the rest."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > bytes_max:
            raise BadInput(f"more than {bytes_max:,} bytes were sent")
    return bytes(body)


async def _refuse(refusal: AccessDenied, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": str(refusal)[:100]})
        return
    wants_page = "text/html" in Headers(scope=scope).get("accept", "")
    if refusal.status == 401 and wants_page and scope["method"] in _SAFE_METHODS:
        query = scope["query_string"].decode(errors="replace")
        response: Response = RedirectResponse(
            f"/login?next={quote(scope['path'] + ('?' + query if query else ''))}", 303
        )
    else:
        content = msgspec.json.encode({"error": str(refusal)})
        response = Response(content, refusal.status, media_type="application/json")
    await response(scope, receive, send)


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                # What is served may be stricter for itself.
                headers.setdefault(name, value)
        await send(message)

    return sending


def _own_path(path: str) -> str:
    """Where to go after the login: never another site, which //host and /\\host would be."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"


def _login_page(complaint: str, following: str) -> str:
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Log in · Replayground</title>"
        "<meta name=viewport content='width=device-width'><style>body{font:16px system-ui;margin:15vh auto;max-width:22rem;"
        "padding:0 1rem;color-scheme:light dark}input,button{font:inherit;width:100%;box-sizing:border-box;padding:.6rem;"
        "margin:.3rem 0}p{color:#b3261e}</style><h1>Replayground</h1>"
        f"<form method=post action=/login>{f'<p role=alert>{escape(complaint)}</p>' if complaint else ''}"
        f"<input type=hidden name=next value='{escape(_own_path(following))}'>"
        "<label>Token <input type=password name=token autocomplete=current-password autofocus required></label>"
        "<button>Log in</button></form></html>"
    )
