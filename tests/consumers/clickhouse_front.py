"""A small front of chDB that speaks enough of ClickHouse's HTTP interface for clickhouse-connect.

Not a ClickHouse server: no server binary can be had where these tests run. It is the same engine behind HTTP, so it shows
that the store's statements, parameters, settings and inserts travel by a server's address; it shows nothing of users,
replication or the server's own limits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chdb

_OWN = (
    *("query", "database", "session_id", "client_protocol_version", "compress", "decompress", "query_id", "role"),
    *("enable_http_compression", "send_progress_in_http_headers", "http_headers_progress_interval_ms"),
    *("wait_end_of_query", "cancel_http_readonly_queries_on_client_close", "default_format"),
)
"what the HTTP interface takes and the engine does not"


@contextmanager
def clickhouse_front(folder: str) -> Iterator[int]:
    """Serves the chDB store in this folder; yields the port on loopback."""
    connection, turn = chdb.connect(folder), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond(200, b"Ok.\n")

        def do_POST(self) -> None:
            asked = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
            body = self._body()
            sql = asked["query"].encode() + b"\n" + body if "query" in asked else body
            try:
                with turn:
                    answer = _run(connection, sql, asked)
            except RuntimeError as error:
                self._respond(400, str(error).encode(), {"X-ClickHouse-Exception-Code": "1"})
            else:
                self._respond(200, answer)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts: list[bytes] = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _respond(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        connection.close()


def _run(connection: Any, sql: bytes, asked: dict[str, str]) -> bytes:
    """A server has settings for one request: here they are set before it, and taken back."""
    parameters = {name.removeprefix("param_"): value for name, value in asked.items() if name.startswith("param_")}
    settings = {name: value for name, value in asked.items() if name not in _OWN and not name.startswith("param_")}
    if asked.get("database"):
        connection.query(f"USE {asked['database']}")
    text = sql.decode(errors="surrogateescape")
    if settings and text.lstrip().upper().startswith("INSERT"):
        given = ", ".join(f"{name} = '{value}'" for name, value in settings.items())
        text = text.replace(" FORMAT ", f" SETTINGS {given} FORMAT ", 1)
        settings = {}
    form = asked.get("default_format", "TabSeparated")
    for name, value in settings.items():
        # A map is written without quotes, as in any SET.
        connection.query(f"SET {name} = {value if value.startswith('{') else repr(value)}")
    try:
        found: bytes = connection.query(text, form, params=parameters).bytes()
        return found
    finally:
        for name in settings:
            connection.query(f"SET {name} = DEFAULT")
