"""Counts the verdicts of people in a run whose program `judge` does not run, as that program would.

Judgements and rewards have derived ids, so a program that is started later, and counts them again, changes nothing.
"""

from collections.abc import Mapping
from contextlib import closing

from replayground.schemas.events import Event, VerdictGiven
from replayground.schemas.job import Scorer
from replayground.schemas.programs import OPERATOR
from replayground.schemas.run import Run
from replayground.streams.hops.trajectories_to_rewards import reward_event
from replayground.streams.judges.book import judgements_of
from replayground.streams.judges.human_queue import AttemptOfScorer, HumanQueue, WaitingAttempt
from replayground.streams.log.protocol import Log
from replayground.streams.rules.judges import HumanVerdict, judges_of
from replayground.streams.rules.judging import counted_verdicts, human_judgement, is_usable, score_of
from replayground.streams.rules.scoring import versions_of


def count_verdicts(log: Log, run: Run, scorers: Mapping[str, Scorer]) -> int:
    """Writes judgement and reward of every attempt on which enough people have given a verdict, and that has none.
    Returns how many. Not for a run whose program `judge` is at work. Raises Fenced, LogUnavailable."""
    judges = {name: judge for name, judge in judges_of(scorers).items() if isinstance(judge, HumanVerdict)}
    in_order = _verdicts_in_order(log, run, judges)
    events: list[Event] = []
    for attempt in HumanQueue(log, run, judges).attempts():
        verdicts = in_order.get((attempt.trajectory.meta.attempt_id or "", attempt.judge.name), [])
        counted = counted_verdicts(verdicts, attempt.judge.annotators_min)
        if counted is not None and not attempt.is_judged:
            events += _judged(attempt, counted, scorers)
    if events:
        # One transaction: a judgement without its reward would not be counted again.
        with closing(log.transactor(f"{OPERATOR}-verdicts-{run.run_id}")) as transactor:
            transactor.commit(events, None)
    return len(events) // 2


def _verdicts_in_order(
    log: Log, run: Run, judges: Mapping[str, HumanVerdict]
) -> dict[AttemptOfScorer, list[VerdictGiven]]:
    in_order: dict[AttemptOfScorer, list[VerdictGiven]] = {}
    for event, _ in judgements_of(log, run):
        judge = judges.get(event.scorer) if isinstance(event, VerdictGiven) else None
        if isinstance(event, VerdictGiven) and judge is not None and is_usable(event, judge):
            in_order.setdefault((event.meta.attempt_id or "", event.scorer), []).append(event)
    return in_order


def _judged(attempt: WaitingAttempt, counted: list[VerdictGiven], scorers: Mapping[str, Scorer]) -> tuple[Event, Event]:
    """Judgement and reward of an attempt."""
    judgement = human_judgement(attempt.trajectory, attempt.judge, counted)
    score = score_of(judgement)
    reward = reward_event(attempt.trajectory, attempt.address, attempt.judge.name, score, scorers, versions_of(scorers))
    return judgement, reward
