"""A chat endpoint on a port of its own that answers as a test wants: well, nonsense, slowly, with an error, or never."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WELL = '{"score": 1, "reason": "polite"}'


@dataclass(frozen=True)
class Reply:
    """What the server sends. With `until`, not before it is set."""

    text: str | None = WELL
    status: int = 200
    until: threading.Event | None = None
    usage: dict[str, int] | None = field(default_factory=lambda: {"prompt_tokens": 100, "completion_tokens": 10})
    raw: bytes | None = None

    @property
    def body(self) -> bytes:
        if self.raw is not None:
            return self.raw
        return json.dumps({"choices": [{"message": {"content": self.text}}], "usage": self.usage}).encode()


type Behaviour = Callable[[dict[str, Any]], Reply]


class JudgeServer(ThreadingHTTPServer):
    """Keeps every request; `behave` decides what is replied and may be replaced at any time."""

    daemon_threads = True

    def __init__(self, behave: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave = behave
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: a client that was killed or gave up breaks the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(request)
        self.server.keys.append(self.headers["Authorization"])
        reply = self.server.behave(request)
        if reply.until is not None:
            reply.until.wait()
        self.send_response(reply.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name is the base class's
        """Nothing: the tests print no requests."""


@contextmanager
def judge_server(behave: Behaviour = lambda request: Reply()) -> Iterator[JudgeServer]:
    server = JudgeServer(behave)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def question_in(request: dict[str, Any]) -> str:
    """All text of a request."""
    return "\n".join(message["content"] for message in request["messages"])
