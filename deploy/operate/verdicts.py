"""`replayground verdicts`: what people judge, one attempt after another at the keyboard or from a file, and how far they agree.

Everything that an agent or a tool wrote is shown by deploy.terminal_text: it cannot steer the terminal.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from replayground.deploy.options import FIELD, Field, console, echo, echo_error
from replayground.deploy.terminal_text import plain
from replayground.schemas.errors import BadInput

if TYPE_CHECKING:
    from replayground.schemas.job import Scorer
    from replayground.schemas.run import Run
    from replayground.streams.judges.human_queue import HumanQueue, WaitingAttempt
    from replayground.streams.log.kafka import KafkaLog
    from replayground.streams.rules.runs import RunState

verdicts = typer.Typer(help="Verdicts of people: the attempts that wait for one, and how far people agree.")

_OfRun = Annotated[
    str | None, typer.Option("--run", help="The run; the beginning of its id is enough. Default: the active one.")
]
_As = Annotated[str, typer.Option("--as", metavar="NAME", help="Who judges; by default the user of this machine.")]
_Scorer = Annotated[str, typer.Option("--scorer", help="Only this scorer, where the job has several that ask people.")]
_SHOWN_CHARACTERS_MAX = 6_000
"of one utterance, until all is asked for"
_RULE = "─" * 60


@verdicts.command(name="next")
def next_verdicts(run: _OfRun = None, annotator: _As = "", scorer: _Scorer = "", field: Field = FIELD) -> None:
    """Judge the attempts that wait, one after another: task, transcript and answer are shown, a score is typed.

    Ctrl-D or q ends it; each verdict is on the log as soon as it is given. Attempts that you have judged do not come again.

    Examples:  replayground verdicts next  ·  replayground verdicts next --run 2026 --as ada
    """
    with _open_queue(field, run, scorer) as opened:
        name = annotator or _user()
        given = 0
        try:
            for attempt in opened.queue.waiting_for(name):
                scored = _prompt(attempt)
                if scored is not None:
                    opened.give(attempt, name, *scored)
                    given += 1
            echo("nothing waits for you")
        except (EOFError, KeyboardInterrupt):
            echo("")
        opened.finish(given)


@verdicts.command(name="list")
def list_waiting(run: _OfRun = None, scorer: _Scorer = "", field: Field = FIELD) -> None:
    """List the attempts that wait for verdicts: scorer, trajectory, how many people are still needed, and who has judged.

    Examples:  replayground verdicts list  ·  replayground verdicts list --run 2026 --scorer helpful
    """
    with _open_queue(field, run, scorer) as opened:
        counts: Counter[tuple[str, bool]] = Counter()
        for attempt in opened.queue.attempts():
            counts[attempt.judge.name, attempt.is_judged] += 1
            if not attempt.is_judged:
                who = ", ".join(sorted(plain(name) for name in attempt.given)) or "nobody yet"
                echo(f"{attempt.judge.name}\t{attempt.trajectory.meta.trajectory_id}\t{attempt.missing} needed\t{who}")
        for name in opened.judges:
            echo(f"{name}: {counts[name, False]:,} wait, {counts[name, True]:,} are judged")


@verdicts.command(name="give")
def give_verdict(
    trajectory: Annotated[str, typer.Argument(help="Id of the trajectory.")],
    score: Annotated[float, typer.Argument(help="On the scale of the scorer.")],
    comment: Annotated[str, typer.Option(help="Why.")] = "",
    run: _OfRun = None,
    annotator: _As = "",
    scorer: _Scorer = "",
    field: Field = FIELD,
) -> None:
    """Give one verdict without being asked. A second one on the same attempt replaces yours until its reward is written.

    Example:  replayground verdicts give 3f2a… 0.5 --as ada --comment "polite, and wrong"
    """
    from replayground.streams.judges.human_queue import VerdictLine

    line = VerdictLine(trajectory=trajectory, score=score, comment=comment)
    with _open_queue(field, run, scorer) as opened:
        ((attempt, line),) = _without_number(lambda: opened.queue.matched([line], annotator or _user()))
        is_new = opened.give(attempt, line.annotator, line.score, line.comment)
        echo("given" if is_new else "you have said so before: nothing to write")
        opened.finish(int(is_new))


@verdicts.command(name="import")
def import_verdicts(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", help="One verdict a line.")],
    run: _OfRun = None,
    annotator: _As = "",
    scorer: _Scorer = "",
    field: Field = FIELD,
) -> None:
    """Give the verdicts of a file: {"trajectory": ID, "score": 4, "annotator": "ada", "scorer": NAME, "comment": TEXT}.

    The last three may be left out. Either all lines fit or nothing is written; a file that was imported before changes nothing.

    Example:  replayground verdicts import verdicts.jsonl --run 2026 --as ada
    """
    from replayground.streams.judges.human_queue import lines_of

    try:
        with file.open("rb") as text:
            lines = lines_of(text)
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}") from error
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from error
    with _open_queue(field, run, scorer) as opened:
        matched = opened.queue.matched(lines, annotator or _user())
        given = sum(opened.give(attempt, line.annotator, line.score, line.comment) for attempt, line in matched)
        echo(f"{given:,} verdicts given, {len(lines) - given:,} were on the log already")
        opened.finish(given)


@verdicts.command(name="count")
def count_given(run: _OfRun = None, scorer: _Scorer = "", field: Field = FIELD) -> None:
    """Make rewards of the verdicts that were given on the page to a run that is over. An active run counts them itself.

    Example:  replayground verdicts count --run 2026
    """
    with _open_queue(field, run, scorer) as opened:
        if opened.state.is_active:
            echo(f"{opened.state.run_id} is active: its program judge counts verdicts")
        opened.finish(1)


@verdicts.command(name="agreement")
def show_agreement(run: _OfRun = None, scorer: _Scorer = "", field: Field = FIELD) -> None:
    """Show how far annotators agree beyond chance: Krippendorff's alpha, 1 = perfectly, 0 = as by chance.

    Nominal takes scores as names, ordinal as ranks, interval as numbers. Attempts with one verdict say nothing.

    Example:  replayground verdicts agreement --run 2026
    """
    with _open_queue(field, run, scorer) as opened:
        for name in opened.judges:
            levels = {level: opened.queue.agreement(name, level) for level in ("nominal", "ordinal", "interval")}
            shown = ", ".join(f"{level} {'undefined' if a is None else f'{a:.3f}'}" for level, a in levels.items())
            echo(f"{name}: alpha {shown}")
            table = Table(box=None, pad_edge=False)
            for column in ("annotator", "verdicts", "mean"):
                table.add_column(column, justify="left" if column == "annotator" else "right")
            for who, scores in opened.queue.scores_by_annotator(name).items():
                table.add_row(plain(who), f"{len(scores):,}", f"{sum(scores) / len(scores):.3f}")
            console.print(table, markup=False)


@dataclass
class _Opened:
    """The queue of one run."""

    log: "KafkaLog"
    run: "Run"
    state: "RunState"
    scorers: "dict[str, Scorer]"
    judges: list[str]
    queue: "HumanQueue"

    def give(self, attempt: "WaitingAttempt", annotator: str, score: float, comment: str) -> bool:
        from replayground.schemas.ids import now_microseconds

        return self.queue.give(attempt, annotator, score, comment, now_microseconds()) is not None

    def finish(self, given: int) -> None:
        """Of a run that is not active, counts the verdicts: no program does."""
        from replayground.streams.judges.counting import count_verdicts

        if self.state.is_active or not given:
            return
        count = count_verdicts(self.log, self.run, self.scorers)
        echo(f"{self.state.run_id} is not active: {count:,} rewards were written here")


@contextmanager
def _open_queue(path: Path, beginning: str | None, scorer: str) -> Iterator[_Opened]:
    """The queue of a run. Raises BadInput for a run whose job asks nobody."""
    from replayground.deploy.experience.rescoring import module_of
    from replayground.deploy.experience.runs import run_of
    from replayground.deploy.field import open_field
    from replayground.deploy.operate.requests import active_run
    from replayground.deploy.run_lifecycle import log_of
    from replayground.deploy.runs import find_run, list_runs
    from replayground.schemas.job import load_job
    from replayground.streams.judges.human_queue import HumanQueue
    from replayground.streams.rules.judges import HumanVerdict
    from replayground.streams.rules.scoring import scorers_by_name

    with open_field(path, echo_error) as (folder, resolved), log_of(resolved) as log:
        states = list_runs(log)
        state = find_run(states.values(), beginning) if beginning else active_run(states, None)
        scorers = dict(scorers_by_name(load_job(module_of(folder, resolved, state)).scorers))
        judges = {name: judge for name, judge in scorers.items() if isinstance(judge, HumanVerdict)}
        if scorer and scorer not in judges:
            raise BadInput(f"no scorer {scorer} asks people: there are {', '.join(sorted(judges)) or 'none'}")
        judges = {name: judge for name, judge in judges.items() if scorer in ("", name)}
        if not judges:
            raise BadInput(f"no scorer of {state.run_id} asks people: see HumanVerdict in docs/scorers.md")
        for name, judge in judges.items():
            if state.scorers.get(name, judge.version) != judge.version:
                raise BadInput(f"scorer {name} is another one than that which {state.run_id} began with")
        run = run_of(resolved, state, "operator")
        yield _Opened(log, run, state, scorers, sorted(judges), HumanQueue(log, run, judges))


def _prompt(attempt: "WaitingAttempt") -> tuple[float, str] | None:
    """Shows an attempt and asks for score and comment; None to pass on. Raises EOFError to end."""
    _show(attempt, _SHOWN_CHARACTERS_MAX)
    low, high = attempt.judge.scale
    while True:
        typed = input(f"score from {low:g} to {high:g}, then why (s skips, a shows all, q ends): ").strip()
        if typed == "q":
            raise EOFError
        if typed == "s":
            return None
        if typed == "a":
            _show(attempt, None)
            continue
        number, _, comment = typed.partition(" ")
        try:
            score = float(number)
        except ValueError:
            echo(f"{plain(number)} is not a number")
            continue
        if low <= score <= high:
            return score, comment.strip()
        echo(f"{score:g} is not on the scale from {low:g} to {high:g}")


def _show(attempt: "WaitingAttempt", characters_max: int | None) -> None:
    trajectory = attempt.trajectory
    echo(f"\n{_RULE}\n{trajectory.meta.trajectory_id}: {attempt.judge.question}")
    for who, text in [
        ("task", trajectory.task.prompt),
        # The first utterance is the task.
        *((" ".join(filter(None, (said.role, said.name))), said.content) for said in trajectory.transcript[1:]),
        ("answer", "(none)" if trajectory.answer is None else trajectory.answer),
    ]:
        # Indented: no text can look like a heading of ours.
        shown = "\n".join(f"    {line}" for line in plain(_cut(text, characters_max)).split("\n"))
        echo(f"\n{plain(who)}\n{shown}")
    echo(_RULE)


def _cut(text: str, characters_max: int | None) -> str:
    if characters_max is None or len(text) <= characters_max:
        return text
    return f"{text[:characters_max]}\n[{len(text) - characters_max:,} characters more: type a]"


def _without_number[T](match: Callable[[], T]) -> T:
    """For a single verdict, which has no number of a line."""
    try:
        return match()
    except BadInput as error:
        raise BadInput(str(error).removeprefix("line 1: ")) from error


def _user() -> str:
    from replayground.deploy.runs import user_name

    return user_name()
