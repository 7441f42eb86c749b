"""The store on a server's address, by a front of chDB over HTTP (clickhouse_front says what that does not show)."""

import asyncio

import pytest

from replayground.consumers.clickhouse.queries import COUNTS_BY_TYPE, STANDING
from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.sql_answers import SqlAnswer, SqlRefused
from replayground.consumers.clickhouse.sql_server import ServerUser
from replayground.consumers.clickhouse.store import Store, StoreFailed
from replayground.consumers.clickhouse.views import VIEWS
from replayground.consumers.config import TracesSettings
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address
from tests.consumers.clickhouse_front import clickhouse_front
from tests.consumers.synthetic_run import SyntheticRun, run_of


def test_the_same_rows_and_views_by_a_servers_address(chdb_dsn: str, store: Store) -> None:
    events = SyntheticRun(run_of(steps=2, demonstrations=2), evaluation_tasks=2).events()
    rows = [event_row(Address(event.meta.topic, 0, at), event) for at, event in enumerate(events)]
    store.insert(rows)
    with clickhouse_front(chdb_dsn.removeprefix("chdb://")) as port:
        served = Store(f"clickhouse://127.0.0.1:{port}", f"{store._database}_served", threads=1)
        served.insert(rows[:100])
        served.insert(rows)  # and what is there is not taken again
        assert served.checksums() == store.checksums()
        assert sorted(served.ask(STANDING).rows) == sorted(store.ask(STANDING).rows)
        asked = {"run": "run-1"}
        assert served.ask(COUNTS_BY_TYPE, asked).rows == store.ask(COUNTS_BY_TYPE, asked).rows
        for view in VIEWS:
            sql = f"SELECT count() FROM {view.name}"
            assert served.ask(sql).rows == store.ask(sql).rows, view.name
        with pytest.raises(StoreFailed, match="nowhere"):
            served.ask("SELECT nowhere FROM events")
        served.close()


def test_sql_of_people_by_a_servers_address(chdb_dsn: str, store: Store) -> None:
    """Statements, door, limits and the filter by run. That the user may only read is the server's part: not shown."""
    for run_id in ("run-1", "run-2"):
        events = SyntheticRun(run_of(steps=2, demonstrations=2, run_id=run_id), evaluation_tasks=2).events()
        store.insert(
            [event_row(Address(event.meta.topic, int(run_id[-1]), at), event) for at, event in enumerate(events)]
        )
    with clickhouse_front(chdb_dsn.removeprefix("chdb://")) as port:
        settings = TracesSettings(
            dsn="clickhouse://nobody@127.0.0.1:1",
            sql_dsn=f"clickhouse://people:secret%20word@127.0.0.1:{port}",
            database=store._database,
            sql_rows_max=5,
            sql_bytes_max=100_000,
        )

        async def asked(*statements: tuple[str, str | None]) -> list[SqlAnswer | str]:
            user = ServerUser(settings, is_guarded=True)
            found: list[SqlAnswer | str] = []
            for sql, run_id in statements:
                try:
                    found.append(await user.ask(sql, run_id))
                except SqlRefused as refused:
                    found.append(str(refused))
            await user.close()
            return found

        of_all, of_one, many, wrong, elsewhere, several, large = asyncio.run(
            asked(
                ("SELECT DISTINCT run_id FROM steps ORDER BY 1", None),
                ("SELECT DISTINCT run_id FROM steps ORDER BY 1", "run-2"),
                ("SELECT number FROM numbers(100)", None),
                ("SELECT nowhere FROM events", None),
                ("SELECT * FROM system.users", None),
                ("SELECT 1; SELECT 2", None),
                ("SELECT repeat('x', 200000)", None),
            )
        )
    assert isinstance(of_all, SqlAnswer)
    assert (of_all.columns, of_all.rows) == (["run_id"], [["run-1"], ["run-2"]])
    assert isinstance(of_one, SqlAnswer)
    assert of_one.rows == [["run-2"]]
    assert isinstance(many, SqlAnswer)
    assert len(many.rows) == 6, "one more than the limit, which tells that there are more"
    refusals = [wrong, elsewhere, several, large]
    for refusal, told in zip(refusals, ("nowhere", "not about the traces", "refused", "larger than"), strict=True):
        assert isinstance(refusal, str)
        assert told in refusal
        assert "\n" not in refusal


def test_people_never_ask_as_the_one_that_writes() -> None:
    with pytest.raises(BadInput, match="sql_dsn"):
        ServerUser(TracesSettings(dsn="clickhouse://writer@127.0.0.1:1"), is_guarded=True)
