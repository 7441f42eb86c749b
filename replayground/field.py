"""A field from Python: the same functions as the commands `replayground runs`, `sql`, `tail` and `submit`."""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec

from replayground.consumers.clickhouse.sql_arrow import arrow_column
from replayground.deploy.field import existing_field
from replayground.deploy.operate.requests import lineage_of, listed_runs, read_log, select, submit_lines
from replayground.deploy.operate.tail import EventFilter, topics_of
from replayground.deploy.options import FIELD, FIELD_VARIABLE, echo_error
from replayground.deploy.traces_client import RunEntry
from replayground.producers.submission import SubmissionResult
from replayground.schemas.events import Event, Task
from replayground.streams.log.protocol import Delivery
from replayground.streams.rules.lineage import TrajectoryLineage, VersionLineage

# Optional: neither is a dependency of the distribution, and both are imported where they are used.
if TYPE_CHECKING:
    import pandas
    import pyarrow


@dataclass(frozen=True)
class RunRecord:
    """One run of a field, from the trace store."""

    run_id: str
    job: str
    "module of the job"
    seed: int
    state: str
    "running, finished, stopped, failed, taken_over or lost"
    started_at: datetime
    "in UTC"
    started_by: str
    "user@machine"
    steps: int
    "optimizer steps taken"
    steps_target: int | None
    "None = until stopped"
    pass_at_1: float | None
    "share of held-out tasks solved in the newest complete evaluation at temperature 1; None before the first one"


@dataclass(frozen=True)
class SqlResult:
    """Columns and rows of a SELECT. Dates and other types that JSON does not have are strings.

    >>> result = SqlResult(columns=("type", "events"), rows=[("RunStarted", 2), ("RunEnded", 1)])
    >>> len(result), result.to_pandas()["events"].sum().item()
    (2, 3)
    >>> result.to_arrow().column_names
    ['type', 'events']
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    truncated: bool = False
    "True when there were more than [traces] sql_rows_max rows (10,000 unless set), of which only so many are returned"

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def to_arrow(self) -> "pyarrow.Table":
        """The result as an Arrow table. Raises ImportError without pyarrow."""
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError("to_arrow needs pyarrow: install it beside replayground") from error
        # By position, not by name: a SELECT may return two columns of the same name.
        return pyarrow.table([arrow_column(column) for column in self._by_column()], names=list(self.columns))

    def to_pandas(self) -> "pandas.DataFrame":
        """The result as a data frame. Raises ImportError without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_pandas needs pandas: install it beside replayground") from error
        return pandas.DataFrame(self.rows, columns=list(self.columns))

    def _by_column(self) -> list[list[Any]]:
        return [[row[place] for row in self.rows] for place in range(len(self.columns))]


class Field:
    """A field: its runs, its trace store and its log. Nothing is started or opened before a method is called.

    A field that is down is started for the time of a call and stopped again, as by the command line: its trace store
    for `runs` and `sql`, all of it for `tail`. Each start takes seconds, so run `replayground up` before many calls.
    Runs are named by any prefix of their id. Methods block. They raise BadInput with one line that says what to do,
    and other ReplaygroundErrors when a part of the field does not start or cannot be reached.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The field in this folder. Raises BadInput when there is none."""
        self.path = Path(path)
        # Fails here and not in the first call, which may come much later in a notebook.
        existing_field(self.path)

    @classmethod
    def open(cls) -> Self:
        """The field that the command line uses: $REPLAYGROUND_FIELD, else `field` in the current folder."""
        # `or`: a variable that is set to nothing counts as not set.
        return cls(os.environ.get(FIELD_VARIABLE) or FIELD)

    def __repr__(self) -> str:
        return f"Field({str(self.path)!r})"

    def runs(self) -> list[RunRecord]:
        """All runs, past and present, newest first."""
        return [_record(run) for run in listed_runs(self.path, echo_error)]

    def sql(self, text: str, run: str | None = None) -> SqlResult:
        """The result of one SELECT on the trace store, over all runs or one. docs/python_api.md lists the tables."""
        return _result(select(self.path, text, run, echo_error))

    def lineage(self, of: str, *, everything: bool = False) -> VersionLineage | TrajectoryLineage:
        """What a weight version (RUN or RUN:VERSION) grew from, or what a trajectory, by its id, influenced.

        With `everything`, the addresses of a long selection are all there instead of the first hundred."""
        found = lineage_of(self.path, of, everything, echo_error)
        lineage = found.version or found.trajectory
        assert lineage is not None, "a lineage is of a version or of a trajectory"
        return lineage

    def tail(
        self,
        topics: str | Sequence[str] = (),
        *,
        run: str | None = None,
        types: Iterable[str] = (),
        task: str | None = None,
        trajectory: str | None = None,
        last: int | None = None,
        follow: bool = False,
    ) -> Iterator[Event]:
        """Events of the log, decoded, in the order of each partition; messages that cannot be decoded are skipped.

        topics      names of topics; by default all but `control`, which holds the heartbeats
        types       names of events, such as "StepTaken"; by default all
        task        prefix of a task's id; `trajectory` likewise
        last        start so many messages before the end of each partition, instead of at the beginning
        follow      wait for more at the end, instead of stopping there

        A field that was started for it is stopped when the iterator is exhausted or closed.
        """
        # Checked here: the rest runs only when the first event is asked for.
        names = topics_of([topics] if isinstance(topics, str) else topics)
        wanted = EventFilter(None, task, trajectory, frozenset(types))
        return _events(read_log(self.path, names, wanted, run, last, lambda: follow, echo_error))

    def submit(self, tasks: Iterable[Task | Mapping[str, Any]], run: str | None = None) -> SubmissionResult:
        """Adds tasks to an active run: to the one that `run` names, else to the only one. The field must be up.

        A mapping has the fields of a line of `replayground submit`. A Task of split "heldout" is evaluated, any other
        is trained on. All are checked before any is submitted; tasks that the run already has are skipped."""
        # As lines of JSONL: they go through the same checks as a file given to the command.
        lines = [msgspec.json.encode(_line(task) if isinstance(task, Task) else task) for task in tasks]
        return submit_lines(self.path, lines, run, "tasks")[1]


def _record(run: RunEntry) -> RunRecord:
    return RunRecord(
        run_id=run.run_id,
        job=run.job,
        seed=run.seed,
        state=run.state,
        started_at=datetime.fromtimestamp(run.started_at / 1e6, UTC),
        started_by=run.started_by,
        steps=run.steps,
        # The trace store has 0 for a run without a last step.
        steps_target=run.steps_target or None,
        pass_at_1=run.pass_at_1,
    )


def _result(answer: Mapping[str, Any]) -> SqlResult:
    # By column, since only a whole column shows whether its strings are numbers.
    columns = [_with_numbers([row[place] for row in answer["rows"]]) for place in range(len(answer["columns"]))]
    return SqlResult(
        columns=tuple(str(column) for column in answer["columns"]),
        rows=list(zip(*columns, strict=True)),
        truncated=bool(answer["truncated"]),
    )


# As the traces program writes them (consumers.dashboard.web).
_NUMBERS_AS_TEXT = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _with_numbers(column: list[Any]) -> list[Any]:
    """Turns NaN and the infinities, which JSON does not have, from strings back into numbers."""
    # In a column without a number, "nan" and "inf" are taken as ordinary text.
    if not any(isinstance(cell, float) for cell in column):
        return column
    return [_NUMBERS_AS_TEXT.get(cell, cell) if isinstance(cell, str) else cell for cell in column]


def _events(deliveries: Iterator[Delivery]) -> Iterator[Event]:
    for delivery in deliveries:
        if delivery.event is not None:
            yield delivery.event


def _line(task: Task) -> dict[str, Any]:
    """A task as a line of JSONL."""
    line: dict[str, Any] = msgspec.to_builtins(task)
    # Only for copies of a task on the log, which refer to their world by its hash; a line has no such field.
    del line["world_hash"]
    return line | {"purpose": "eval" if task.split == "heldout" else "train"}
