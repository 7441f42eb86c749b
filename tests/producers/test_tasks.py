"""The feeder as a fold: what is submitted when, restarts, evaluations with hold and release, and tasks files."""

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from replayground.producers import stockroom
from replayground.producers.agent import Agent
from replayground.producers.config import FeederSettings
from replayground.producers.task_lines import KnownNames, read_tasks
from replayground.producers.tasks import Feed, feed, tasks_of
from replayground.producers.topology import AgentCatalog
from replayground.schemas.errors import BadInput
from replayground.schemas.events import AttemptEnded, ControlIssued, Event, RolloutRequested, Task, TaskSubmitted
from replayground.schemas.job import Job, load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.run import Run
from tests.producers.field import a_log, a_run, events_on, published
from tests.producers.test_scheduler import ended

SETTINGS = FeederSettings(evaluation_tasks=6, evaluation_tasks_between=3, evaluation_every=2, train_backlog=5)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return a_run(tmp_path, demonstrations=4, groups_per_batch=1, group_size=2, steps=4, staleness_target=1)


def all_ended(events: list[Event]) -> list[AttemptEnded]:
    """Every member of every task has ended."""
    return [
        ended(
            RolloutRequested(
                meta=msgspec.structs.replace(event.meta, trajectory_id=f"{event.meta.task_id}-{index}"),
                task=event.task,
                index=index,
                seed=0,
                sampling=event.sampling,
                deadline=0,
            )
        )
        for event in events
        if isinstance(event, TaskSubmitted)
        for index in range(event.task.group_size)
    ]


def sessions(events: list[Event]) -> Counter[str]:
    return Counter(event.meta.session_id or "" for event in events if isinstance(event, TaskSubmitted))


def controls(events: list[Event]) -> list[tuple[str, int | None]]:
    return [(event.command, event.version) for event in events if isinstance(event, ControlIssued)]


def test_a_whole_run_in_order(run: Run) -> None:
    fold = Feed(run, SETTINGS, stockroom.tasks)
    demonstrations = fold.decide(0)
    assert sessions(demonstrations) == {"demonstrations": 4}
    assert fold.decide(0) == []
    for event in [published(0), *all_ended(demonstrations)]:
        fold.apply(event)
    assert fold.decide(0) == [], "version 0 is not practised with"

    fold.apply(published(1))
    start = fold.decide(0)
    assert (sessions(start), controls(start)) == ({"eval-v0001-sampled": 6}, [("hold", 1)])
    for event in all_ended(start)[:5]:
        fold.apply(event)
    assert fold.decide(0) == [], "training waits until the start has been judged"
    fold.apply(all_ended(start)[5])
    training = fold.decide(0)
    assert (sessions(training), controls(training)) == ({"train": 5}, [("release", 1)])

    for event in [*all_ended(training)[:4], published(2), published(3)]:
        fold.apply(event)
    between = fold.decide(0)
    assert sessions(between) == {"train": 2, "eval-v0003-sampled": 3}
    assert controls(between) == [("hold", 3)]
    for event in [*all_ended(between), published(4), published(5)]:
        fold.apply(event)
    last = fold.decide(0)
    assert sessions(last) == {"eval-v0005-sampled": 6, "eval-v0005-greedy": 6}
    assert controls(last) == [("release", 3), ("hold", 5)]
    for event in all_ended(last):
        fold.apply(event)
    assert controls(fold.decide(0)) == [("release", 5)]
    assert fold.decide(0) == []
    assert fold.phase == "done"


def test_what_is_asked_and_how(run: Run) -> None:
    fold = Feed(run, SETTINGS, stockroom.tasks)
    demonstrations = [event for event in fold.decide(0) if isinstance(event, TaskSubmitted)]
    assert {(e.meta.purpose, e.task.agent, e.task.split, e.task.group_size) for e in demonstrations} == {
        ("demonstrate", "demonstrator", "train", 1)
    }
    for version in range(6):
        fold.apply(published(version))
    evaluations = [event for event in fold.decide(0) if isinstance(event, TaskSubmitted)]
    by_session: dict[str, list[TaskSubmitted]] = {}
    for event in evaluations:
        by_session.setdefault(event.meta.session_id or "", []).append(event)
        assert (event.meta.purpose, event.task.split, event.task.group_size) == ("eval", "heldout", 1)
    prompts = {name: [event.task.prompt for event in events] for name, events in by_session.items()}
    assert prompts["eval-v0001-sampled"] == prompts["eval-v0005-sampled"] == prompts["eval-v0005-greedy"]
    assert prompts["eval-v0003-sampled"] == prompts["eval-v0001-sampled"][:3]
    assert {event.sampling.temperature for event in by_session["eval-v0005-greedy"]} == {0.0}
    assert {event.sampling.temperature for event in by_session["eval-v0005-sampled"]} == {1.0}
    assert {event.required_version for event in by_session["eval-v0003-sampled"]} == {3}


def test_a_restart_goes_on_where_it_was_even_after_half_a_write(run: Run) -> None:
    first = Feed(run, SETTINGS, stockroom.tasks)
    written = first.decide(0)
    first.apply(published(1))
    written += first.decide(0)
    tasks = [event for event in written if isinstance(event, TaskSubmitted)]
    lost = tasks.pop(2)
    again = Feed(run, SETTINGS, stockroom.tasks)
    for event in [*tasks, published(1)]:
        again.apply(event)
    rest = again.decide(0)
    assert [event.meta.id for event in rest if isinstance(event, TaskSubmitted)] == [lost.meta.id]
    assert controls(rest) == [("hold", 1)], "a hold may be said twice"


def test_without_a_cold_start_version_0_is_practised_with(run: Run) -> None:
    fold = Feed(a_run(Path("/nowhere"), demonstrations=0, steps=2), SETTINGS, stockroom.tasks)
    assert fold.decide(0) == []
    fold.apply(published(0))
    assert sessions(fold.decide(0)) == {"eval-v0000-sampled": 6}


def test_without_evaluations_training_starts_at_once(run: Run) -> None:
    none = FeederSettings(evaluation_tasks=0, evaluation_tasks_between=0, train_backlog=5)
    fold = Feed(run, none, stockroom.tasks)
    fold.apply(published(1))
    events = fold.decide(0)
    assert sessions(events)["train"] == 5
    assert controls(events) == []


def test_a_curriculum_is_given_several_tasks_for_each_that_is_played(run: Run) -> None:
    several = FeederSettings(evaluation_tasks=0, evaluation_tasks_between=0, train_backlog=5, tasks_per_lesson=3)
    fold = Feed(run, several, stockroom.tasks)
    fold.apply(published(1))
    events = fold.decide(0)
    assert sessions(events)["train"] == 3 * 5
    lessons = [event for event in events if event.meta.session_id == "train"]
    for event in all_ended(lessons[:1]):
        fold.apply(event)
    assert len(fold.decide(0)) == 3


def test_a_run_that_need_not_end_is_evaluated_and_fed_for_ever(run: Run) -> None:
    endless = msgspec.structs.replace(run, job=msgspec.structs.replace(run.job, steps=0, demonstrations=0))
    fold = Feed(endless, SETTINGS, stockroom.tasks)
    fold.apply(published(0))
    start = fold.decide(0)
    assert sessions(start) == {"eval-v0000-sampled": 6}
    for event in all_ended(start):
        fold.apply(event)
    assert (sessions(fold.decide(0)), fold.phase) == ({"train": 5}, "trains: version 0, until stopped")
    for version in (1000, 1001, 1002):
        fold.apply(published(version))
        for _ in range(3):
            for event in all_ended(fold.decide(0)):
                fold.apply(event)
    assert fold._evaluations_over > 400
    assert set(fold._numbers) <= {"train"}, "evaluations that are over are known by a count"
    assert len(fold.encode()) < 20_000


def test_an_evaluation_whose_version_is_gone_is_skipped_and_one_that_has_begun_is_not(run: Run) -> None:
    keeping = msgspec.structs.replace(
        run, job=msgspec.structs.replace(run.job, steps=0, demonstrations=0, versions_kept=10)
    )
    fold = Feed(keeping, SETTINGS, stockroom.tasks)
    fold.apply(published(0))
    begun = fold.decide(0)
    assert sessions(begun) == {"eval-v0000-sampled": 6}
    fold.apply(published(20))  # the feeder was away meanwhile
    every = SETTINGS.evaluation_every
    late = fold.decide(0)
    gone = list(range(every, 11, every))
    assert [version for command, version in controls(late) if command == "release"] == gone == fold.skipped
    kept = [version for version in range(every, 21, every) if version > 10]
    assert [version for command, version in controls(late) if command == "hold"] == kept
    assert "eval-v0000-sampled" not in sessions(late), "nothing is submitted twice"
    for event in all_ended(begun):
        fold.apply(event)
    assert ("release", 0) in controls(fold.decide(0)), "its version was held in time, so it is evaluated to its end"


def test_tasks_of_other_sessions_are_none_of_its_business(run: Run) -> None:
    fold = Feed(run, SETTINGS, stockroom.tasks)
    first = fold.decide(0)
    before = fold.encode()
    other = [
        msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, session_id=name))
        for event in (first[0], all_ended(first)[0])
        for name in ("submitted", "eval-v0002-sampled", "eval-vx", "")
    ]
    for event in other:
        fold.apply(event)
    assert (fold.decide(0), fold.encode()) == ([], before)


def test_a_state_comes_back_and_goes_on(run: Run) -> None:
    fold = Feed(run, SETTINGS, stockroom.tasks)
    demonstrations = fold.decide(0)
    for event in [*all_ended(demonstrations)[:3], published(1)]:
        fold.apply(event)
    evaluation = fold.decide(0)
    again = Feed(run, SETTINGS, stockroom.tasks)
    again.restore(fold.encode())
    assert sessions(again.decide(0)) == {}
    assert again.encode() == fold.encode()
    for each in (fold, again):
        for event in all_ended(evaluation):
            each.apply(event)
        assert sessions(each.decide(0)) == {"train": 5}
    assert again.encode() == fold.encode()


def test_the_program_over_a_log(run: Run, tmp_path: Path) -> None:
    log, _ = a_log(tmp_path)
    log.append(published(1))
    for _ in range(2):  # a second life must not submit again
        stop = threading.Event()
        threading.Timer(0.4, stop.set).start()
        feed(run, SETTINGS, ProgramMetrics(), stop, log)
        assert len(events_on(log, "tasks")) == 4 + 6


def job() -> Job:
    return load_job("replayground.producers.stockroom")


def names() -> KnownNames:
    return KnownNames(job(), AgentCatalog())


def test_a_tasks_file_takes_the_place_of_the_job(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        '{"prompt": "2+2?", "reference": "4", "toolset": ["python"]}\n\n'
        '{"prompt": "key a?", "reference": "1", "toolset": ["kv"], "world": {"name": "w", "keys": {"a": 1}}}\n'
        '{"prompt": "3+3?", "reference": "6", "split": "heldout", "world": "{\\"name\\": \\"w\\"}"}\n'
    )
    settings = FeederSettings(tasks_file=str(path), evaluation_tasks=6, train_backlog=5)
    fold = Feed(run, settings, tasks_of(run, settings, job()))
    assert sessions(fold.decide(0)) == {"demonstrations": 4}, "a short file is gone through again"
    fold.apply(published(1))
    evaluation = fold.decide(0)
    assert sessions(evaluation) == {"eval-v0001-sampled": 1}, "but nothing is held out twice"
    for event in all_ended(evaluation):
        fold.apply(event)
    assert sessions(fold.decide(0)) == {"train": 5}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: "),
        ('{"reference": "4"}', "prompt"),
        ('{"prompt": "x", "colour": "red"}', "colour"),
        ('{"prompt": "x", "toolset": ["telepathy"]}', "telepathy.*known tools: .*calculator"),
        ('{"prompt": "x", "scorers": ["exakt_match"]}', "exakt_match.*known scorers: .*exact_match"),
        ('{"prompt": "x", "scorers": []}', "at least one scorer"),
        ('{"prompt": "x", "world": {"tables": 3}}', "tables|name"),
        ('{"prompt": "x", "split": "test"}', "test"),
        ('{"prompt": "x", "world": {"name": "w", "keys": {"a/b": 1}}}', "a/b"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(BadInput, match=says) as raised:
        read_tasks(path, names())
    assert str(path) in str(raised.value)
    assert "line 2" in str(raised.value)


def test_all_bad_lines_of_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": 1}\n{"prompt": "fine"}\n{}\n\n{"prompt": "x", "scorers": ["no"]}\n')
    with pytest.raises(BadInput, match=r"line 1: .*2 more bad lines: 3, 5"):
        read_tasks(path, names())


def test_agents_are_checked_where_the_job_has_some(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "x", "agent": "writr"}\n')
    assert read_tasks(path, names())[0].agent == "writr", "one agent plays whatever it is called"
    with pytest.raises(BadInput, match="no agent 'writr'; known agents: critic, writer"):
        read_tasks(path, KnownNames(job(), AgentCatalog.of([Agent(name="writer"), Agent(name="critic")])))


def misspelt(split: str, seed: int, start: int = 0) -> Iterator[Task]:
    """A job whose third task names a scorer that does not exist."""
    for number, task in enumerate(stockroom.tasks(split, seed, start), start=start):
        yield msgspec.structs.replace(task, scorers=["exakt_match"]) if number == 2 else task


def test_tasks_of_the_job_itself_are_checked_one_by_one(run: Run) -> None:
    bad = Job("bad", misspelt, "", (), (), lambda task, turns, seed: "", None)
    fold = Feed(run, SETTINGS, tasks_of(run, SETTINGS, bad))
    with pytest.raises(BadInput, match="job bad, task 2 of split train: there is no scorer 'exakt_match'"):
        fold.decide(0)
    worse = Job("worse", lambda split, seed, start=0: misspelt(split, seed, start + 2), "", (), (), None, None)
    with pytest.raises(BadInput, match="job worse, task 0"):
        tasks_of(a_run(Path("/nowhere"), demonstrations=0), SETTINGS, worse)


def test_files_and_jobs_that_cannot_be_used_are_bad_input(run: Run, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_tasks(tmp_path / "missing.jsonl", names())
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInput, match="no task of split train"):
        tasks_of(run, FeederSettings(tasks_file=str(tmp_path / "empty.jsonl")), job())
    mute = Job("mute", stockroom.tasks, "", (), (), None, None)
    with pytest.raises(BadInput, match="demonstrate"):
        tasks_of(run, FeederSettings(), mute)


def test_a_restart_holds_no_version_again_when_there_are_fewer_held_out_tasks_than_wanted(run: Run) -> None:
    def few(split: str, seed: int, start: int = 0) -> Iterator[Task]:
        drawn = stockroom.tasks(split, seed, start)
        return drawn if split == "train" else islice(drawn, max(0, 3 - start))

    settings = FeederSettings(evaluation_tasks=5, evaluation_every=0, train_backlog=2)
    feed = Feed(run, settings, few)
    history: list[Event] = [published(1)]
    feed.apply(published(1))
    for now in range(4):
        decided = feed.decide(now)
        history += [*decided, *all_ended(decided)]
        for event in all_ended(decided):
            feed.apply(event)
    assert controls(history) == [("hold", 1), ("release", 1)]
    again = Feed(run, settings, few)
    for fact in history:
        again.apply(fact)
    assert ("hold", 1) not in controls(again.decide(10))
    feed.decide(10)
    assert again.encode() == feed.encode()


@pytest.mark.parametrize("name", ["eval-v" + "1" * 5000 + "-sampled", "eval-v00001-sampled"])
def test_a_session_that_only_looks_like_an_evaluation_is_none(run: Run, name: str) -> None:
    feed = Feed(run, SETTINGS, stockroom.tasks)
    before = feed.encode()
    [task, *_] = [event for event in Feed(run, SETTINGS, stockroom.tasks).decide(0) if isinstance(event, TaskSubmitted)]
    feed.apply(msgspec.structs.replace(task, meta=msgspec.structs.replace(task.meta, session_id=name)))
    assert feed.encode() == before
