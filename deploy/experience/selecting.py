"""Selections of trajectories by SQL: asked of the trace store, kept on the log under a name.

The condition is over the columns of view `trajectories`, with reward, passed, excluded and scorer_set of view `outcomes`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from replayground.deploy.operate.requests import traces_unreachable
from replayground.deploy.resolve import ResolvedConfig
from replayground.deploy.traces_client import TracesClient
from replayground.schemas.errors import BadInput
from replayground.schemas.events import Meta, Position, TrajectoriesSelected
from replayground.schemas.ids import new_id, now_microseconds
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.replay.selection import TOPIC, selected_event
from replayground.streams.rules.runs import RunState

FAILED = "passed = 0"
_OFFSETS_AT_ONCE = 50_000
"of one partition: the answer to one question, a row, stays below the limits of SQL"


@dataclass(frozen=True)
class Choice:
    """Which trajectories are wanted."""

    runs: Sequence[RunState]
    where: str

    @property
    def in_runs(self) -> str:
        names = ", ".join(_quoted(state.run_id) for state in self.runs)
        return f"run_id IN ({names})"


def select(log: KafkaLog, field: ResolvedConfig, choice: Choice, name: str, run_id: str) -> TrajectoriesSelected:
    """Makes a selection and writes it to the log. Raises BadInput for a condition that SQL refuses, or that nothing
    meets."""
    event = find(log, field, choice, name, run_id)
    log.append(event)
    log.flush()
    return event


def find(log: KafkaLog, field: ResolvedConfig, choice: Choice, name: str, run_id: str) -> TrajectoriesSelected:
    """The selection, not written. Blocks until the trace store has caught up with the log. Raises BadInput."""
    require_condition(choice.where)
    client = TracesClient(field.page_url)
    try:
        client.catch_up()
        rows = [row for end in log.end_positions([TOPIC]) for row in _partition(client, choice, end)]
    except OSError as error:
        raise traces_unreachable(error) from error
    if not rows:
        raise BadInput(f"no trajectory of {len(choice.runs)} runs meets the condition: {choice.where or 'all'}")
    now = now_microseconds()
    meta = Meta(
        id=new_id(now), run_id=run_id, category="selection", topic="selections", sender="operator", timestamp=now
    )
    runs = [state.run_id for state in choice.runs]
    return selected_event(meta, name, runs, choice.where, _with_sizes(rows))


type _Row = tuple[int, int, int, int, bool]
"partition, offset, digest of the group, index, whether it ended by infra_error"

_QUOTES = "'\"`"
# Comments, strings of other kinds, and a further statement: each could hide a bracket from the count.
_HIDING = ("--", "#", "/*", "//", "$", ";", "“", "”", "‘", "’")


def require_condition(where: str) -> None:
    """Raises BadInput for what is more than a condition: a bracket that closes none would end the one around it."""
    depth, quote, place = 0, "", 0
    while place < len(where):
        letter = where[place]
        if quote:
            place += letter == "\\"
            quote = "" if letter == quote else quote
        elif letter in _QUOTES:
            quote = letter
        elif hiding := next((text for text in _HIDING if where.startswith(text, place)), ""):
            raise BadInput(f"a condition has no {hiding} outside of a text: {where}")
        else:
            depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        place += 1
    if depth or quote:
        raise BadInput(f"a bracket or a quote of the condition has no partner: {where}")


def _partition(client: TracesClient, choice: Choice, end: Position) -> Iterator[_Row]:
    first = min(_start(state, end.partition) for state in choice.runs)
    for start in range(first, end.offset, _OFFSETS_AT_ONCE):
        where = f"partition = {end.partition} AND offset >= {start} AND offset < {start + _OFFSETS_AT_ONCE}"
        for (found,) in client.sql(statement(choice, where))["rows"]:
            for offset, group, index, is_infra in found:
                yield end.partition, int(offset), int(group), int(index), bool(is_infra)


def statement(choice: Choice, place: str) -> str:
    """The question about one part of one partition."""
    # One row: a list is not cut at the number of rows that SQL returns at most.
    return (
        "SELECT groupArray((offset, toString(cityHash64(run_id, group_id)), index, ended_by = 'infra_error')) FROM "
        "(SELECT t.*, o.reward AS reward, o.passed AS passed, o.excluded AS excluded, o.scorer_set AS scorer_set "
        # The runs inside: no condition can lead out of them.
        f"FROM (SELECT * FROM trajectories WHERE {choice.in_runs} AND {place}) AS t "
        "LEFT JOIN outcomes AS o ON t.run_id = o.run_id AND t.attempt_id = o.attempt_id) AS chosen "
        f"WHERE {choice.where or '1'}"
    )


def _with_sizes(rows: Sequence[_Row]) -> Iterator[tuple[int, int, int]]:
    """Rows with the number of members of their group that were chosen, as a replay counts them."""
    # An attempt that ended by infra_error fills no member; another attempt at the same member is no further one.
    members = {(group, index) for _, _, group, index, is_infra in rows if not is_infra}
    groups, counts = numpy.unique(numpy.array([group for group, _ in members], dtype=numpy.uint64), return_counts=True)
    sizes = dict(zip(groups.tolist(), counts.tolist(), strict=True))
    for partition, offset, group, _, _ in rows:
        yield partition, offset, sizes.get(group, 1)


def _start(state: RunState, partition: int) -> int:
    return next((p.offset for p in state.positions if (p.topic, p.partition) == (TOPIC, partition)), 0)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
