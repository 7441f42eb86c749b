"""Whatever answers at a server's address, the reloader gets a refusal that it can act on, never another exception."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from replayground.consumers.vllm_admin import ServerRefused, VllmAdmin


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """A server that answers everything with 200 and this body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *values: object) -> None:  # noqa: A002
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"[1, 2]", b'"text"', b"7", b"\xff\xfe"])
def test_a_response_that_is_no_object_is_refused(body: bytes) -> None:
    with answering(body) as url:
        admin = VllmAdmin(url, timeout_seconds=5.0)
        with pytest.raises(ServerRefused, match="malformed response"):
            admin.prompt_logprobs([1, 2])
        admin.close()


@pytest.mark.parametrize(
    "entries",
    [b'[null, {"9": {"logprob": -1}}]', b'[null, {"2": {}}]', b'[null, {"2": -1}]', b"[null, null]", b"[null]"],
)
def test_log_probabilities_of_other_tokens_are_refused(entries: bytes) -> None:
    with answering(b'{"prompt_logprobs": ' + entries + b"}") as url:
        admin = VllmAdmin(url, timeout_seconds=5.0)
        with pytest.raises(ServerRefused):
            admin.prompt_logprobs([1, 2])
        admin.close()
