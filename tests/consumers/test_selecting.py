"""What a selection by SQL chooses, on a real chDB; with the page in between: tests/deploy/test_experience.py."""

import pytest
from msgspec.structs import replace

from replayground.consumers.clickhouse.rows import event_row
from replayground.consumers.clickhouse.store import Store
from replayground.deploy.experience.selecting import Choice, require_condition, statement
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, TrajectoryAssembled
from replayground.streams.rules.runs import RunState
from tests.streams.scored_attempts import attempt

WINDOW = "partition = 0 AND offset >= 0 AND offset < 100"


def state(run_id: str) -> RunState:
    return RunState(
        run_id=run_id,
        kind="practise",
        job="",
        seed=0,
        config="{}",
        files=(),
        positions=(),
        started_at=0,
        started_by="",
        code_version="",
        packages={},
        start_id="",
        resumed_at=0,
    )


def played(run_id: str, number: int) -> TrajectoryAssembled:
    event = attempt("x", trajectory_id=f"{run_id}-{number}")
    meta = replace(event.meta, run_id=run_id, group_id=f"{run_id}-g", attempt_id=f"{run_id}-a{number}")
    return replace(event, meta=meta, index=number)


def chosen(store: Store, where: str) -> list[int]:
    ((found,),) = store.ask(statement(Choice([state("mine")], where), WINDOW)).rows
    return sorted(int(row[0]) for row in found)


@pytest.fixture
def filled(store: Store) -> Store:
    """Two runs; the first trajectory of the first run is on the log twice, as after a kill of the stage that wrote it.
    Rewards, groups and batches name it where it came first."""
    mine, other = [played("mine", number) for number in range(3)], played("other", 0)
    for offset, event in ((4, mine[0]), (5, mine[1]), (6, other), (7, mine[2]), (10, mine[0])):
        store.insert([event_row(Address("trajectories", 0, offset), event)])
    return store


def test_a_condition_chooses_within_its_runs_alone(filled: Store) -> None:
    assert chosen(filled, "") == [4, 5, 7]
    assert chosen(filled, "index = 1") == [5]
    assert chosen(filled, "index = 9 OR 1") == [4, 5, 7]


@pytest.mark.parametrize(
    "where",
    [
        *(
            "1) OR (1",
            "1) UNION ALL SELECT [(1, '1', 0, 0)] WHERE (1",
            "1)",
            "(1",
            "1 --",
            "1 /* ",
            "1 # ",
            "1; SELECT 1",
        ),
        *("answer = '", "answer = 'a\\' ) OR (1", "“'”) OR (1) OR (“'”", "answer = $$'$$) OR (1) OR ($$'$$"),
    ],
)
def test_what_is_more_than_a_condition_is_refused(where: str) -> None:
    with pytest.raises(BadInput, match="condition"):
        require_condition(where)


@pytest.mark.parametrize(
    "where", ["", "(a = ')') OR b IN ('x', 'it''s', 'a\\'(')", "answer = '-- # /* ; “'", "`index` = 1"]
)
def test_conditions_are_taken_as_they_are(where: str) -> None:
    require_condition(where)
