"""Who may send what to a page that other machines reach: a real server, real requests."""

import asyncio
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from replayground.consumers.clickhouse.store import Store
from replayground.consumers.config import TracesSettings
from replayground.consumers.dashboard.access import AccessCheck, Throttle, person_of
from replayground.consumers.dashboard.tokens import LOCAL, Person, TokenFile
from replayground.consumers.dashboard.web import WebServer
from replayground.schemas.errors import BadInput
from tests.consumers.conftest import free_port


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


@contextmanager
def serving(tokens: TokenFile | None, hosts: tuple[str, ...] = ()) -> Iterator[str]:
    """The checks in front of an application that says who asks."""

    async def who(request: object) -> JSONResponse:
        return JSONResponse({"who": person_of(request).name})  # type: ignore[arg-type]

    async def echo(socket: object) -> None:
        await socket.accept()  # type: ignore[attr-defined]
        while True:
            await socket.send_text(await socket.receive_text())  # type: ignore[attr-defined]

    routes = [Route("/{path:path}", who, methods=["GET", "POST"]), WebSocketRoute("/socket", echo)]
    app = AccessCheck(Starlette(routes=routes), hosts=hosts, tokens=tokens)
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def test_a_token_is_needed_and_has_a_role(tokens: TokenFile) -> None:
    secrets = {role: tokens.add(role, role, now=1) for role in ("viewer", "operator")}
    with serving(tokens) as url:
        assert httpx.get(f"{url}/api/runs").status_code == 401
        assert httpx.post(f"{url}/api/sql", json={}).status_code == 401
        assert httpx.get(f"{url}/", headers={"Accept": "text/html"}).headers["location"] == "/login?next=/"
        for role, may in (("viewer", 403), ("operator", 200)):
            bearer = {"Authorization": f"Bearer {secrets[role]}"}
            assert httpx.get(f"{url}/api/runs", headers=bearer).json() == {"who": role}
            assert httpx.post(f"{url}/api/sql", json={}, headers=bearer).status_code == 200
            assert httpx.post(f"{url}/api/reconcile", json={}, headers=bearer).status_code == may
        tokens.revoke("viewer", now=2)
        gone = httpx.get(f"{url}/api/runs", headers={"Authorization": f"Bearer {secrets['viewer']}"})
        assert (gone.status_code, gone.json()["error"]) == (401, "this token is unknown or was revoked")


def test_a_login_gives_a_cookie_that_ends_with_its_token(tokens: TokenFile) -> None:
    secret = tokens.add("alice", "viewer", now=1)
    with serving(tokens) as url, httpx.Client(base_url=url) as browser:
        assert "form method=post" in browser.get("/login").text
        assert browser.post("/login", data={"token": "wrong"}).status_code == 401
        entered = browser.post("/login", data={"token": secret, "next": "//evil.example/"})
        assert entered.headers["location"] == "/"
        cookie = entered.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert secret not in cookie
        assert browser.get("/api/runs").json() == {"who": "alice"}
        # A form of another site, whatever cookie came with it.
        elsewhere = {"Origin": "http://evil.example"}
        assert browser.post("/api/sql", json={}, headers=elsewhere).status_code == 403
        assert browser.post("/login", data={"token": secret}, headers=elsewhere).status_code == 403
        tokens.revoke("alice", now=2)
        assert browser.get("/api/runs").status_code == 401


def test_a_socket_needs_the_cookie_and_ends_with_the_token(tokens: TokenFile) -> None:
    import aiohttp

    secret = tokens.add("alice", "viewer", now=1)

    async def talk(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{url}/socket")
            bearer = {"Authorization": f"Bearer {secret}"}
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{url}/socket", headers=bearer | {"Origin": "http://evil.example"})
            async with session.ws_connect(f"{url}/socket", headers=bearer) as socket:
                await socket.send_str("a")
                assert (await socket.receive()).data == "a"
                await asyncio.to_thread(tokens.revoke, "alice", 2)
                await socket.send_str("b")
                assert (await socket.receive()).type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED)

    with serving(tokens) as url:
        asyncio.run(talk(url))


def test_wrong_tokens_are_slowed_down(tokens: TokenFile) -> None:
    secret = tokens.add("alice", "viewer", now=1)
    with serving(tokens) as url:
        codes = [httpx.get(url, headers={"Authorization": f"Bearer {n}"}).status_code for n in range(11)]
        assert codes == [401] * 10 + [429]
        # Whoever guessed so often does not get in by the right one either, for a while.
        assert httpx.get(url, headers={"Authorization": f"Bearer {secret}"}).status_code == 429


def test_marks_are_forgotten_with_time() -> None:
    now = [0.0]
    throttle = Throttle(2, 10.0, lambda: now[0])
    for _ in range(2):
        assert not throttle.is_full("a")
        throttle.mark("a")
    assert throttle.is_full("a")
    assert not throttle.is_full("b")
    now[0] = 11.0
    assert not throttle.is_full("a")


def test_without_tokens_only_names_of_this_machine_are_served() -> None:
    with serving(None, ("127.0.0.1", "localhost")) as url:
        assert httpx.get(f"{url}/api/runs").json() == {"who": LOCAL.name}
        assert httpx.get(f"{url}/api/runs", headers={"Host": "evil.example:80"}).status_code == 400


def test_tokens_are_kept_as_hashes(tokens: TokenFile, tmp_path: Path) -> None:
    secret = tokens.add("alice", "operator", now=1)
    file = tmp_path / "tokens.json"
    assert secret not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert tokens.find(secret) == Person("alice", "operator")
    assert tokens.find("rp_x") is None
    for wrong in ("alice", "", "a\x1b[0m", "x" * 100):
        with pytest.raises(BadInput):
            tokens.add(wrong, "viewer", now=2)
    with pytest.raises(BadInput, match="bob has no token"):
        tokens.revoke("bob", now=2)
    tokens.revoke("alice", now=3)
    assert tokens.find(secret) is None
    assert tokens.add("alice", "viewer", now=4) != secret
    file.write_text("nonsense")
    with pytest.raises(BadInput, match="cannot be read"):
        tokens.tokens()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"bind": "0.0.0.0"}, "nobody has a token"),
        ({"tls_key": "x.pem"}, "TLS needs both files"),
    ],
)
def test_a_page_that_would_stand_open_is_not_served(store: Store, change: dict[str, str], sentence: str) -> None:
    settings = msgspec.structs.replace(TracesSettings(port=free_port()), **change)
    with pytest.raises(BadInput, match=sentence):
        WebServer(store, settings, None)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate of localhost that signs itself, and its key."""
    certificate, key = tmp_path / "page.pem", tmp_path / "page.key"
    told = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *told]
    subprocess.run([*made, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


def test_over_tls_each_role_sees_what_it_may_do_and_logs_out(
    store: Store, tokens: TokenFile, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """The whole page as other machines reach it."""
    secrets = {role: tokens.add(f"{role}-anna", role, now=1) for role in ("viewer", "operator")}
    settings = TracesSettings(
        bind="0.0.0.0",
        name="localhost",
        port=free_port(),
        tokens=str(tmp_path / "tokens.json"),
        tls_certificate=str(certificate[0]),
        tls_key=str(certificate[1]),
    )
    web = WebServer(store, settings, None)
    web.start()
    trusted = ssl.create_default_context(cafile=str(certificate[0]))
    try:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{settings.port}/login")
        for role, secret in secrets.items():
            with httpx.Client(base_url=f"https://localhost:{settings.port}", verify=trusted, timeout=60) as browser:
                entered = browser.post("/login", data={"token": secret, "next": "/audit"})
                assert entered.headers["location"] == "/audit"
                assert "secure" in entered.headers["set-cookie"].lower()
                assert f"{role}-anna" in browser.get("/audit").text
                may = [browser.post(f"/api/{name}", json={}).status_code != 403 for name in _ACTIONS]
                assert may == [role == "operator"] * len(_ACTIONS)
                assert browser.post("/logout").headers["location"] == "/login"
                assert browser.get("/audit").status_code == 401
    finally:
        web.stop()


_ACTIONS = ("queries", "verdicts", "replays", "redrives", "reconcile")
