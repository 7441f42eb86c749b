"""The queue of attempts that wait for people, and the verdicts that people give. For the command line and the web page.

A verdict is a fact with a derived id: given twice, it is the same event, and of several verdicts of one person on one
attempt the newest counts. Who counts them is the program `judge`; of a run that is not active, `counting`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Address, HumanQuestion, JudgementMade, TrajectoryAssembled, VerdictGiven
from replayground.schemas.ids import derived_id
from replayground.schemas.run import Run
from replayground.streams.judges.book import judgements_of
from replayground.streams.log.protocol import Log
from replayground.streams.rules.agreement import Level, alpha
from replayground.streams.rules.judges import HumanVerdict, is_asked, is_on_scale, question_of
from replayground.streams.rules.judging import is_usable, judgement_id

COMMENT_CHARACTERS_MAX = 10_000
_TOPIC = "trajectories"
_EVENTS_MAX = 200
_POLL_SECONDS = 0.2

type AttemptOfScorer = tuple[str, str]
"id of the attempt, name of the scorer"


@dataclass(frozen=True, slots=True)
class WaitingAttempt:
    """An attempt that a scorer wants verdicts on."""

    trajectory: TrajectoryAssembled
    address: Address
    judge: HumanVerdict
    given: Mapping[str, VerdictGiven]
    "the newest usable verdict of each annotator"
    is_judged: bool
    "enough people have given theirs: its reward stands"

    @property
    def missing(self) -> int:
        """How many annotators are still needed."""
        return 0 if self.is_judged else max(0, self.judge.annotators_min - len(self.given))


class VerdictLine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a file with verdicts."""

    trajectory: str
    score: float
    scorer: str = ""
    "may be left out when the run has one scorer that asks people"
    annotator: str = ""
    "may be left out when the command names one"
    comment: str = ""


class HumanQueue:
    """The attempts of one run that people judge, as the log has them now."""

    def __init__(self, log: Log, run: Run, judges: Mapping[str, HumanVerdict]) -> None:
        """Reads all judgements and verdicts of the run. Raises LogUnavailable."""
        self._log = log
        self._run = run
        self._judges = judges
        self._judged: set[str] = set()
        "ids of the judgements that there are"
        self._verdicts: defaultdict[AttemptOfScorer, dict[str, VerdictGiven]] = defaultdict(dict)
        for event, _ in judgements_of(log, run):
            self._note(event)

    def attempts(self) -> Iterator[WaitingAttempt]:
        """All attempts that a scorer of the queue is to judge, once for each scorer, in the order of the log."""
        seen: set[AttemptOfScorer] = set()
        with closing(self._log.reader([_TOPIC], start=self._run.start, run_id=self._run.run_id)) as reader:
            while not reader.caught_up():
                for delivery in reader.poll(_EVENTS_MAX, _POLL_SECONDS):
                    event = delivery.event
                    if not isinstance(event, TrajectoryAssembled) or event.meta.run_id != self._run.run_id:
                        continue
                    for found in self._of(event, delivery.address):
                        # The stage that assembles trajectories repeats some after it was killed.
                        if (key := _key(found)) not in seen:
                            seen.add(key)
                            yield found

    def waiting_for(self, annotator: str) -> Iterator[WaitingAttempt]:
        """Attempts without a reward that this person has not judged."""
        return (found for found in self.attempts() if not found.is_judged and annotator not in found.given)

    def give(
        self, attempt: WaitingAttempt, annotator: str, score: float, comment: str, now: int
    ) -> VerdictGiven | None:
        """Writes a verdict and waits until it is on the log; None when it says what this person has said before. `now` is
        in microseconds since the epoch. Raises BadInput, LogUnavailable."""
        verdict = verdict_of(attempt, annotator, score, comment, now)
        before = self._verdicts[_key(attempt)].get(verdict.annotator)
        if before is not None and (before.score, before.comment) == (verdict.score, verdict.comment):
            return None
        self._log.append(verdict)
        self._log.flush()
        self._note(verdict)
        return verdict

    def agreement(self, scorer: str, level: Level) -> float | None:
        """Krippendorff's alpha over all verdicts on this scorer; None where it is not defined."""
        units = [given for (_, name), given in self._verdicts.items() if name == scorer]
        return alpha(({who: verdict.score for who, verdict in unit.items()} for unit in units), level)

    def scores_by_annotator(self, scorer: str) -> dict[str, list[float]]:
        found: defaultdict[str, list[float]] = defaultdict(list)
        for (_, name), given in self._verdicts.items():
            for who, verdict in given.items() if name == scorer else ():
                found[who].append(verdict.score)
        return dict(sorted(found.items()))

    def matched(self, lines: Sequence[VerdictLine], annotator: str) -> list[tuple[WaitingAttempt, VerdictLine]]:
        """Each line with its attempt. Raises BadInput, with the number of the line, for one that fits none."""
        wanted = {line.trajectory for line in lines}
        found: dict[tuple[str, str], WaitingAttempt] = {}
        for attempt in self.attempts():
            trajectory_id = attempt.trajectory.meta.trajectory_id or ""
            if trajectory_id in wanted:
                found[trajectory_id, attempt.judge.name] = attempt
        matched: list[tuple[WaitingAttempt, VerdictLine]] = []
        for number, line in enumerate(lines, start=1):
            try:
                matched.append(self._match(found, line, annotator))
            except BadInput as error:
                raise BadInput(f"line {number}: {error}") from error
        return matched

    def _match(
        self, found: Mapping[tuple[str, str], WaitingAttempt], line: VerdictLine, annotator: str
    ) -> tuple[WaitingAttempt, VerdictLine]:
        names = sorted(self._judges)
        scorer = line.scorer or (names[0] if len(names) == 1 else "")
        if scorer not in self._judges:
            raise BadInput(f"name one of the scorers that ask people: {', '.join(names)}")
        attempt = found.get((line.trajectory, scorer))
        if attempt is None:
            raise BadInput(f"there is no trajectory {line.trajectory!r} in {self._run.run_id} that {scorer} judges")
        line = msgspec.structs.replace(line, annotator=line.annotator or annotator)
        # Now, before any line is written.
        verdict_of(attempt, line.annotator, line.score, line.comment, 0)
        return attempt, line

    def _of(self, trajectory: TrajectoryAssembled, address: Address) -> Iterator[WaitingAttempt]:
        if not is_asked(trajectory):
            return
        for name in dict.fromkeys(trajectory.task.scorers):
            if (judge := self._judges.get(name)) is not None:
                given = self._verdicts[trajectory.meta.attempt_id or "", name]
                is_judged = judgement_id(trajectory, judge) in self._judged
                yield WaitingAttempt(trajectory, address, judge, dict(given), is_judged)

    def _note(self, event: JudgementMade | VerdictGiven) -> None:
        if isinstance(event, JudgementMade):
            self._judged.add(event.meta.id)
        elif (judge := self._judges.get(event.scorer)) is not None and is_usable(event, judge):
            self._verdicts[event.meta.attempt_id or "", event.scorer][event.annotator] = event


def verdict_of(attempt: WaitingAttempt, annotator: str, score: float, comment: str, now: int) -> VerdictGiven:
    """The event. Raises BadInput for a score that is not on the scale, or a text that cannot be stored."""
    question = question_of(attempt.judge)
    return verdict_event(attempt.trajectory, attempt.address, question, annotator, score, comment, now)


def verdict_event(
    trajectory: TrajectoryAssembled,
    address: Address,
    question: HumanQuestion,
    annotator: str,
    score: float,
    comment: str,
    now: int,
) -> VerdictGiven:
    """As `verdict_of`, without the code of the scorer."""
    annotator = annotator.strip()
    scale = low, high = question.scale_low, question.scale_high
    if not annotator:
        raise BadInput("a verdict needs the name of the person who gives it")
    if not is_on_scale(score, scale):
        raise BadInput(f"{score:g} is not on the scale of {question.scorer}: {low:g} to {high:g}")
    if len(comment) > COMMENT_CHARACTERS_MAX or len(annotator) > COMMENT_CHARACTERS_MAX:
        raise BadInput(f"a comment has at most {COMMENT_CHARACTERS_MAX} characters")
    if not (annotator + comment).isascii() and _has_half_pair(annotator + comment):
        raise BadInput("name or comment hold half of a surrogate pair, which cannot be stored")
    meta, scorer, version = trajectory.meta, question.scorer, question.scorer_version
    changes: dict[str, Any] = {
        "id": derived_id("VerdictGiven", meta.run_id, meta.id, scorer, version, annotator, score, comment),
        "category": "verdict",
        "topic": "judgements",
        "sender": annotator,
        "receiver": "judge",
        "timestamp": now,
        "causation_id": meta.id,
    }
    return VerdictGiven(
        meta=msgspec.structs.replace(meta, **changes),
        trajectory=address,
        scorer=scorer,
        scorer_version=version,
        annotator=annotator,
        score=score,
        comment=comment,
    )


def lines_of(text: Iterable[bytes]) -> list[VerdictLine]:
    """The verdicts in a file of JSON lines; empty lines are left out. Raises BadInput, with the number of the line."""
    lines: list[VerdictLine] = []
    for number, line in enumerate(text, start=1):
        if line.strip():
            try:
                lines.append(msgspec.json.decode(line, type=VerdictLine))
            except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
                raise BadInput(f"line {number} is no verdict: {error}") from error
    return lines


def _key(attempt: WaitingAttempt) -> AttemptOfScorer:
    return attempt.trajectory.meta.attempt_id or "", attempt.judge.name


def _has_half_pair(text: str) -> bool:
    return text.encode("utf-8", "replace").decode() != text
