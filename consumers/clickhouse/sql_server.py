"""The wall of people's SQL on a ClickHouse server: a user that may SELECT from the traces and do nothing else.

deploy/clickhouse/people.sql makes that user, with its limits; [traces] sql_dsn names it. What protects the server is in
its grants and constraints: this program adds the door (sql_guard) and a time limit.

Not covered: the user's statements share memory and cores of the server with everything else that runs there.
"""

import asyncio
from typing import Any
from urllib.parse import unquote, urlsplit

import httpx

from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlRefused, SqlTable, table_of
from replayground.consumers.clickhouse.sql_guard import refusal, too_long
from replayground.consumers.clickhouse.sql_process import OUTPUT, TABLES_OF_RUNS, filters_of, quoted, sentence
from replayground.consumers.config import TracesSettings
from replayground.schemas.errors import BadInput

_GRACE_SECONDS = 2.0
_SECURE_PORTS = (443, 8443)


class ServerUser:
    """Asks as that user, over HTTP: a session has one statement, and the server refuses a text of several."""

    def __init__(self, settings: TracesSettings, is_guarded: bool) -> None:
        """Raises BadInput when no user is named: people never ask as the one that writes."""
        if not settings.sql_dsn:
            raise BadInput(
                "SQL is refused: set [traces] sql_dsn to a user of the ClickHouse server that may only read "
                "(deploy/clickhouse/people.sql makes one)"
            )
        self._settings = settings
        self._is_guarded = is_guarded
        self._turns = asyncio.Semaphore(settings.sql_processes)
        address = urlsplit(settings.sql_dsn)
        port = address.port or 8123
        scheme = "https" if "https" in address.scheme or port in _SECURE_PORTS else "http"
        self._client = httpx.AsyncClient(
            base_url=f"{scheme}://{address.hostname}:{port}",
            headers={
                "X-ClickHouse-User": unquote(address.username or ""),
                "X-ClickHouse-Key": unquote(address.password or ""),
            },
            params={"database": settings.database, **OUTPUT},
        )

    async def ask(self, sql: str, run_id: str | None) -> SqlAnswer:
        """The result of one statement, over one run or all. Raises SqlRefused."""
        async with self._turns:
            seconds = self._settings.sql_seconds_max
            try:
                async with asyncio.timeout(seconds + _GRACE_SECONDS):
                    return await self._answer(sql, run_id)
            except TimeoutError:
                raise SqlRefused(f"the statement took longer than {seconds:g} s and was ended") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, sql: str, run_id: str | None) -> SqlAnswer:
        if self._is_guarded:
            await self._check(sql)
        settings = {
            "limit": str(self._settings.sql_rows_max + 1),
            # Closing the connection ends the statement.
            "cancel_http_readonly_queries_on_client_close": "1",
        }
        if run_id:
            settings["additional_table_filters"] = filters_of((await self._table(TABLES_OF_RUNS)).data, run_id)
        found = await self._table(sql, settings)
        return SqlAnswer(columns=[column.name for column in found.meta], rows=found.data)

    async def _check(self, sql: str) -> None:
        reason = too_long(sql)
        if reason is None:
            formatted = await self._request(f"SELECT formatQuerySingleLine({quoted(sql)})", {}, "RawBLOB")
            tree = await self._request(f"EXPLAIN AST {sql}", {}, "TSVRaw")
            reason = refusal(tree.decode(errors="replace"), formatted.decode(errors="replace"))
        if reason is not None:
            raise SqlRefused(reason)

    async def _table(self, sql: str, settings: dict[str, str] | None = None) -> SqlTable:
        return await asyncio.to_thread(table_of, await self._request(sql, settings or {}, "JSONCompact"))

    async def _request(self, sql: str, settings: dict[str, str], form: str) -> bytes:
        parameters: dict[str, Any] = {**settings, "default_format": form}
        found = bytearray()
        try:
            async with self._client.stream(
                "POST", "/", content=sql.encode(), params=self._client.params.merge(parameters), timeout=None
            ) as response:
                async for chunk in response.aiter_bytes():
                    found += chunk
                    if len(found) > self._settings.sql_bytes_max:
                        raise SqlRefused(f"the result is larger than {self._settings.sql_bytes_max / 2**20:g} MiB")
        except httpx.HTTPError as error:
            raise SqlRefused(f"the ClickHouse server does not answer: {error}") from error
        if response.status_code != 200:
            raise SqlRefused(f"ClickHouse refused: {sentence(found.decode(errors='replace'))}")
        return bytes(found)
