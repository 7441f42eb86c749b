"""The parts of examples/replay: what its two rewards pay, that the log can be judged by the other one, table and plot.

The whole of it needs a model server and minutes: docs/showcase.md has what came of it."""

import runpy
import threading
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from replayground import load_job
from replayground.deploy.experience.scorer_files import judges_of, parse_scorers, require_replayable
from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.events import Event, GroupCompleted, Task
from replayground.schemas.registry import MemoryRegistry
from replayground.streams.driver import Driver
from replayground.streams.hops.flow import hops
from replayground.streams.log.memory import MemoryLog
from replayground.streams.replay.rescoring import Judges, PartitionRange, Rescoring, rescore_partition
from replayground.streams.replay.selection import TOPIC
from replayground.streams.rules.scoring import scorers_by_name
from tests.consumers.synthetic_run import run_of
from tests.flow.synthetic import RUN_ID, rollout

FOLDER = Path(__file__).parent.parent.parent / "examples" / "replay"
RIGHT = FOLDER / "right.py"


def attempt(index: int, answer: str, is_guess: bool) -> list[Event]:
    """An attempt of a group of four at the example's first task: a guess is made without looking."""
    task = replace(first_task(), group_size=4)
    events = rollout(0, index, answer=answer)
    if is_guess:
        # Without the turn that calls the tool, the call and its observation.
        events = [events[0], *events[4:]]
    numbered = [replace(event, meta=replace(event.meta, seq=seq)) for seq, event in enumerate(events)]
    return [replace(event, task=task) if hasattr(event, "task") else event for event in numbered]


def first_task() -> Task:
    return next(load_job(str(FOLDER / "job.py")).tasks("train", 0))


@pytest.fixture
def log(tmp_path: Path) -> MemoryLog:
    """Two attempts that look and are right, and two that guess and are not."""
    made = MemoryLog(Codec(MemoryRegistry(), Blobs((tmp_path / "blobs").as_uri())))
    right = first_task().reference or ""
    for index in range(4):
        for event in attempt(index, right if index < 2 else "7", is_guess=index >= 2):
            made.append(event)
    scorers = load_job(str(FOLDER / "job.py")).scorers
    Driver(made, hops(scorers, "centred"), RUN_ID).run_until_caught_up()
    return made


def advantages(log: MemoryLog, run_id: str) -> list[float]:
    events = [delivery.event for delivery in log.reader(["groups"]).poll(100, 0.0)]
    (group,) = [e for e in events if isinstance(e, GroupCompleted) and e.meta.run_id == run_id]
    return [member.advantage for member in group.members]


def test_the_flawed_reward_pays_guesses_and_the_right_one_turns_the_same_group_around(log: MemoryLog) -> None:
    assert advantages(log, RUN_ID) == [-0.25, -0.25, 0.25, 0.25]
    chosen = parse_scorers([str(RIGHT)])
    scorers = judges_of("", chosen.file)
    require_replayable([scorers[name] for name in chosen.names], is_forced=False)
    run = replace(run_of(steps=1, demonstrations=1), run_id="again", start=())
    judges = Judges("again", frozenset((RUN_ID,)), scorers, chosen.names)
    for end in log.end_positions([TOPIC]):
        wanted = PartitionRange(judges.sources, replace(end, offset=0), partial(int, end.offset))
        assert rescore_partition(run, log, Rescoring(judges), wanted, lambda *_: None, threading.Event())
    assert advantages(log, "again") == [0.5, 0.5, -0.5, -0.5]


def test_the_right_job_is_the_same_job_with_the_other_reward() -> None:
    flawed, right = (load_job(str(FOLDER / name)) for name in ("job.py", "right_job.py"))
    assert list(scorers_by_name(right.scorers)) != list(scorers_by_name(flawed.scorers))
    for split in ("train", "heldout"):
        task, other = next(flawed.tasks(split, 3, 5)), next(right.tasks(split, 3, 5))
        assert (task.scorers, other.scorers) == (["brief"], ["right"])
        assert replace(task, scorers=[]) == replace(other, scorers=[])
    assert right.tools == flawed.tools


def test_table_and_plot_show_each_row_with_its_margins(tmp_path: Path) -> None:
    plot: dict[str, Any] = runpy.run_path(str(FOLDER / "plot.py"))
    rows = [plot["Row"]("first", 0.25, 0.5, 1.0, 0.0, 200), plot["Row"]("second", 0.5, 0.1, 0.75, 0.1, 200)]
    assert plot["table"](rows).splitlines()[2:] == [
        "| first | 1.000 ± 0.000 | 0.250 ± 0.500 | 200 |",
        "| second | 0.750 ± 0.100 | 0.500 ± 0.100 | 200 |",
    ]
    plot["write_plot"](rows, tmp_path / "plot.svg")
    drawn = ET.parse(tmp_path / "plot.svg").getroot()
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"first", "second"} <= set(texts)
    # Two points a row, and two in the legend.
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == 6
