"""Every statement of docs/queries.md, as a person would ask it: through the guard, of the real views, over two runs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from replayground.consumers.clickhouse.queries import SESSIONS_OF_RUNS
from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.sql_guard import refusal
from replayground.consumers.clickhouse.store import QueryResult, Store
from replayground.consumers.clickhouse.views import TABLES
from replayground.schemas.events import Address, Event
from tests.consumers.synthetic_run import BEGAN, SyntheticRun, run_of

PAGE = (Path(__file__).resolve().parents[2] / "docs/queries.md").read_text()
RECIPES = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
EVALUATED = 3


@pytest.fixture(scope="module")
def two_runs(chdb_dsn: str) -> Iterator[Store]:
    store = Store(chdb_dsn, "sql_recipes", threads=1)
    runs = [run_of(steps=3, demonstrations=4, run_id=name) for name in ("run-1", "run-2")]
    for number, run in enumerate(runs):
        events = SyntheticRun(run, EVALUATED, seed=number, began=BEGAN + number * 3_600_000_000).events()
        _insert(store, list(events), number)
    yield store
    store.close()


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 30
    assert [name for name in TABLES if f"`{name}`" not in PAGE] == [], "tables that the page does not name"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: " ".join(recipe.split())[:60])
def test_a_recipe_answers(two_runs: Store, recipe: str) -> None:
    answer = guarded(two_runs, recipe)
    assert answer.rows
    if "run_id" in answer.columns:
        at = answer.columns.index("run_id")
        assert {row[at] for row in answer.rows} >= {"run-1", "run-2"}


def test_pass_at_1_is_that_of_the_list_of_runs(two_runs: Store) -> None:
    (recipe,) = (recipe for recipe in RECIPES if "AS pass_at_1" in recipe)
    shown = {(run, session): score for run, session, _, score in guarded(two_runs, recipe).rows}
    listed = two_runs.ask(SESSIONS_OF_RUNS, {"runs": ["run-1", "run-2"]}).dicts()
    assert len(shown) == 2 * 2 * 2, "two runs, first and last version, sampled and greedy"
    expected = {
        (row["run_id"], row["session"]): row["pass_at_1"] for row in listed if row["session"].startswith("eval")
    }
    assert shown == pytest.approx(expected)


def guarded(store: Store, recipe: str) -> QueryResult:
    """The result, when the guard lets the statement through."""
    # What the client adds to a statement: its format and settings.
    added = ("Set", "Identifier Native")
    assert "settings" not in recipe.lower()
    tree = [line for (line,) in store.ask(f"EXPLAIN AST {recipe}").rows if line.strip() not in added]
    ((formatted,),) = store.ask("SELECT formatQuerySingleLine({sql:String})", {"sql": recipe}).rows
    assert refusal("\n".join(tree), formatted) is None
    return store.ask(recipe)


def _insert(store: Store, events: list[Event], number: int) -> None:
    """Rows of one run, each run on a partition of its own, so that no two rows have one address."""
    store.insert([event_row(Address(event.meta.topic, number, at), event) for at, event in enumerate(events)])
