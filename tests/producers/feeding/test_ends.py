"""How many tasks ended, each once."""

import pytest

from replayground.producers.feeding import ends
from replayground.producers.feeding.ends import EndlessEnds, FiniteEnds, counts
from replayground.schemas.events import AttemptEnded, Meta


def an_end(task: str, index: int = 0, group_size: int = 1, ended_by: str = "answered") -> AttemptEnded:
    meta = Meta(id="e", run_id="r", task_id=task, category="", topic="attempts", sender="", timestamp=0)
    return AttemptEnded(
        meta=meta,
        index=index,
        group_size=group_size,
        ended_by=ended_by,  # type: ignore[arg-type]
        reason=None,
        tokens_sampled=0,
        policy_version_oldest=None,
    )


def test_a_session_that_ends_counts_every_task_once() -> None:
    finite = FiniteEnds()
    for task in ("a", "b", "a"):
        finite.note(an_end(task))
    assert len(finite) == len(FiniteEnds(finite.state())) == 2
    assert not counts(an_end("a", ended_by="infra_error"))


def test_a_group_has_ended_when_all_members_have() -> None:
    endless = EndlessEnds()
    for index in (0, 2, 2, 1, 0):
        endless.note(an_end("a", index, 3), partition=0)
    assert len(endless) == 1
    endless.note(an_end("b", 0, 3), partition=0)
    again = EndlessEnds(endless.state())
    for index in (1, 2):
        again.note(an_end("b", index, 3), partition=0)
    assert len(again) == 2


def test_copies_are_recognised_within_the_horizon_of_their_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ends, "RECENT_ENDS", 2)
    endless = EndlessEnds()
    for task, partition in (("a", 0), ("b", 0), ("x", 1), ("y", 1), ("z", 1), ("a", 0)):
        endless.note(an_end(task), partition)
    assert len(endless) == 5, "what other partitions hold does not push it out"
    for number in range(10):
        endless.note(an_end(f"open-{number}", 0, 2), 0)
    assert len(endless.state()[0].open) == 2, "nor do copies from beyond it pile up"
