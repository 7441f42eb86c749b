"""Which task comes next, and which is let go."""

import msgspec
import pytest

from replayground.producers.config import SchedulerSettings
from replayground.producers.scheduler import _ask_of
from replayground.producers.scheduling import demand
from replayground.producers.scheduling.demand import Demand
from replayground.producers.scheduling.ledger import GroupOutcome, GroupRequest
from tests.producers.test_scheduler import tasks

CURRICULUM = SchedulerSettings(curriculum="pass_rate", curriculum_tags=["level"])


def asks(count: int, purpose: str = "train", version: int | None = None, level: str = "") -> list[GroupRequest]:
    """Submitted one after another."""
    made = [_ask_of(task, None, 0) for task in tasks(count, 1, purpose, version)]
    return [
        msgspec.structs.replace(ask, submitted_at=number, task=msgspec.structs.replace(ask.task, tags={"level": level}))
        for number, ask in enumerate(made)
    ]


def test_the_oldest_comes_first_whatever_is_read_first() -> None:
    waiting = Demand(SchedulerSettings(), 0)
    first, second, third = asks(3)
    for ask in (third, first, second):
        waiting.add(ask)
    assert len(waiting) == 3
    assert waiting.next_training(0, 0) == first
    waiting.remove(first)
    assert waiting.next_training(0, 1) == second


def test_evaluations_wait_for_their_version_and_the_lowest_comes_first() -> None:
    waiting = Demand(SchedulerSettings(), 0)
    (of_7,), (of_3,) = asks(1, "eval", 7), asks(1, "eval", 3)
    of_3 = msgspec.structs.replace(of_3, task_id="other")
    for ask in (of_7, of_3):
        waiting.add(ask)
    assert waiting.next("eval", lambda ask: True) == of_3
    assert waiting.next("eval", lambda ask: ask.required_version == 7) == of_7
    assert waiting.next("demonstrate", lambda ask: True) is None
    assert not waiting.has_training


def test_with_a_curriculum_what_waits_too_long_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand, "TRAINING_TASKS_WAITING_MAX", 2)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        waiting = Demand(CURRICULUM, 0)
        made = asks(4)
        for number in order:
            waiting.note_submitted(made[number])
            waiting.add(made[number])
        assert waiting.waiting_too_long() == made[:2]
        assert [waiting.is_overtaken(ask) for ask in made] == [True, True, False, False]
    plain = Demand(SchedulerSettings(), 0)
    for ask in asks(4):
        plain.note_submitted(ask)
        plain.add(ask)
    assert plain.waiting_too_long() == [], "without a choice nothing waits for ever"


def test_what_a_curriculum_knows_comes_back_and_old_rates_are_forgotten_in_any_order() -> None:
    hard, easy = asks(1, level="hard")[0], asks(1, level="easy")[0]
    one, other = Demand(CURRICULUM, 0), Demand(CURRICULUM, 0)
    facts = [(hard, GroupOutcome(False, 1, 1, 1 / 3, 3)), (easy, GroupOutcome(True, 100, 100, 1.0, 3))]
    for ask, judged in facts:
        one.observe(ask, judged)
    one.note_published(100)
    other.note_published(100)
    for ask, judged in reversed(facts):
        other.observe(ask, judged)
    assert one.state() == other.state()
    assert list(one.state().rates) == ["level=easy"], "a family of which nothing is left is forgotten too"
    again = Demand(CURRICULUM, 0)
    again.restore(one.state())
    assert again.state() == one.state()
    for each in (one, again):
        each.observe(*facts[0])  # too old: a restart must not bring back what the fold has forgotten
    assert again.state() == one.state()
    assert list(again.state().rates) == ["level=easy"]
