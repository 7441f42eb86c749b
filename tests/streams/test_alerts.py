"""Alerts: when they are raised and cleared, whatever the order of what happens."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replayground.schemas.events import AlertChanged, Bound, Event, Meta, QuerySaved
from replayground.schemas.run import FIELD
from replayground.streams.rules.alerts import AlertStanding, apply, fold, value_of


def saved(name: str = "a", use: str = "alert", bound: Bound = "above", threshold: float = 1.0) -> QuerySaved:
    fields = {"name": name, "use": use, "sql": "SELECT 1", "bound": bound, "threshold": threshold, "saved_by": "ann"}
    return msgspec.convert({"meta": meta(), **fields}, QuerySaved, from_attributes=True)


def meta(timestamp: int = 5) -> Meta:
    return Meta(id="i", run_id=FIELD, category="c", topic="operations", sender="s", timestamp=timestamp)


def changed(query: QuerySaved, state: str, timestamp: int = 7) -> AlertChanged:
    fields = {"name": query.name, "state": state, "value": 2.0, "bound": query.bound, "threshold": query.threshold}
    return msgspec.convert({"meta": meta(timestamp), "query": "q", **fields}, AlertChanged, from_attributes=True)


@given(values=st.lists(st.one_of(st.none(), st.floats(-10, 10))), bound=st.sampled_from(["above", "below"]))
def test_it_is_raised_exactly_while_the_number_is_beyond_the_threshold(
    values: list[float | None], bound: Bound
) -> None:
    query = saved(bound=bound)
    standings = fold([query])
    is_beyond = False
    for value in values:
        state = standings["a"].change(value)
        if value is not None:
            is_beyond = value > 1.0 if bound == "above" else value < 1.0
        if state is not None:
            apply(standings, changed(query, state))
        assert (standings["a"].raised_at is not None) == is_beyond, "an answer without a number changes nothing"
        assert standings["a"].change(value) is None, "said once"


def test_the_fold_is_the_same_after_a_restart_and_a_removed_alert_is_cleared() -> None:
    first, second = saved("a"), saved("b")
    events: list[Event] = [first, saved("other", use="question"), second, changed(first, "raised", 9)]
    standings = fold(events)
    assert set(standings) == {"a", "b"}
    assert (standings["a"].raised_at, standings["b"].raised_at) == (9, None)
    assert standings["a"].change(5.0) is None, "it is raised already"
    for event in (saved("a", use="removed"), saved("b", use="queue")):
        apply(standings, event)
        events.append(event)
    assert standings == fold(events)
    assert standings["a"].change(None) == "cleared"
    assert standings["b"].change(None) is None
    apply(standings, changed(first, "cleared"))
    assert standings["a"].change(5.0) is None, "nobody watches it any more"


def test_another_threshold_keeps_what_is_raised_until_it_is_asked_again() -> None:
    standing = AlertStanding(saved=saved(threshold=100.0), raised_at=3)
    assert standing.change(50.0) == "cleared"


@pytest.mark.parametrize(
    ("rows", "value"),
    [
        ([], None),
        ([[]], None),
        ([[None]], None),
        ([["why", "17"]], 17.0),
        ([[float("nan"), 2]], 2.0),
        ([[True]], 1.0),
        ([["inf"]], None),
        ([["18446744073709551615"]], 1.8446744073709552e19),
    ],
)
def test_the_first_number_of_the_first_row_counts(rows: list[list[object]], value: float | None) -> None:
    assert value_of(rows) == value
