"""The store on a server's address, by a front of chDB over HTTP (clickhouse_front says what that does not show)."""

import pytest

from replayground.consumers.clickhouse.queries import COUNTS_BY_TYPE, STANDING
from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store, StoreFailed
from replayground.consumers.clickhouse.views import VIEWS
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
