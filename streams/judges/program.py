"""The judge: asks models about attempts, counts the verdicts of people, and writes the rewards of both.

    trajectories ─► a model is asked ─► JudgementMade ─┐
                                                       ├─► judgements ─► the first JudgementMade ─► RewardAssigned
    VerdictGiven of enough people ───► JudgementMade ──┘

A reward follows from the judgement that is on the log, never from an answer in memory. The id of a judgement is derived,
and the first with an id counts: an attempt that is asked about twice, after a kill or by two instances, has one reward.
A trajectory is committed when it and all before it on its partition are judged. After a restart, attempts whose
judgement is on the log are not asked about again.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import Future

import structlog

from replayground.schemas.errors import BadInput, LogUnavailable
from replayground.schemas.events import Address, Event, JudgementMade, TrajectoryAssembled, VerdictGiven
from replayground.schemas.ids import now_microseconds
from replayground.schemas.job import Scorer, load_job
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.programs import ACCESS_BY_PROGRAM
from replayground.schemas.run import Run
from replayground.schemas.secrets import read_secret
from replayground.streams.config import JudgeSettings
from replayground.streams.hops.trajectories_to_rewards import reward_event
from replayground.streams.judges.asking import AskingThread, Budget
from replayground.streams.judges.book import read_book
from replayground.streams.judges.pending import PendingTrajectories
from replayground.streams.log.connect import open_log
from replayground.streams.log.kafka import KafkaLog
from replayground.streams.log.protocol import Delivery, Log, Reader
from replayground.streams.rules.dead_letter import rejection
from replayground.streams.rules.judges import HumanVerdict, Judge, LlmJudge, is_asked, judges_of
from replayground.streams.rules.judging import counted_verdicts, human_judgement, is_usable, judgement_id, score_of
from replayground.streams.rules.scoring import scorers_by_name, versions_of

logger = structlog.get_logger()

PROGRAM = "judge"
_RETRY_SECONDS = 1.0
_EVENTS_MAX = 200


class NotUsable(Exception):
    """Why a judgement or verdict on the log is rejected."""


def run(run: Run, settings: JudgeSettings, program_metrics: ProgramMetrics, stop: threading.Event) -> None:
    """Runs the judge until `stop` is set. Raises BadInput for a judge whose endpoint the config lacks, LogBroken."""
    scorers = scorers_by_name(load_job(run.job.module).scorers)
    keys = keys_of(scorers, settings)
    log = open_log(run)
    try:
        judge(run, settings, program_metrics, stop, log, scorers, keys)
    finally:
        log.close()


def keys_of(scorers: Mapping[str, Scorer], settings: JudgeSettings) -> dict[str, str]:
    """The API keys of the endpoints that judges use, by name. Raises BadInput for an endpoint or a key that is missing."""
    used = {judge.endpoint: judge for judge in judges_of(scorers).values() if isinstance(judge, LlmJudge)}
    for name, judge in used.items():
        if name not in settings.endpoints:
            raise BadInput(f"judge {judge.name} asks the endpoint {name}: add [judge.endpoints.{name}] with its url")
    references = {name: settings.endpoints[name].key for name in used}
    return {
        name: read_secret(reference, PROGRAM, f"judge.endpoints.{name}.key")
        for name, reference in references.items()
        if reference
    }


def judge(
    run: Run,
    settings: JudgeSettings,
    program_metrics: ProgramMetrics,
    stop: threading.Event,
    log: KafkaLog,
    scorers: Mapping[str, Scorer],
    keys: Mapping[str, str],
) -> None:
    """The program with an open log. After LogUnavailable it starts again from what is on the log."""
    while not stop.is_set():
        try:
            JudgeWorker(log, run, settings, program_metrics, scorers, keys).run_until(stop)
        except LogUnavailable as error:
            logger.warning("judge_restarting", reason=str(error))
            program_metrics.detail = f"waiting for the log: {error}"
            # What was not acknowledged is lost with the producer, and not committed: it is taken again.
            log.forget_failure()
            stop.wait(_RETRY_SECONDS)


class JudgeWorker:
    """The judge, from the book on the log to the first failure. After a failure, make a new one."""

    def __init__(
        self,
        log: Log,
        run: Run,
        settings: JudgeSettings,
        program_metrics: ProgramMetrics,
        scorers: Mapping[str, Scorer],
        keys: Mapping[str, str],
    ) -> None:
        self._log = log
        self._run = run
        self._settings = settings
        self._program_metrics = program_metrics
        self._scorers = scorers
        self._judges = judges_of(scorers)
        self._versions = versions_of(scorers)
        self._keys = keys
        self._book = read_book(log, run)
        self._pending = PendingTrajectories()
        self._asked: dict[Future[JudgementMade], Address] = {}
        "questions under way, and the trajectory of each"
        self._has_reported = False
        "that the budget is used up"
        self._trajectories: dict[Address, TrajectoryAssembled] = {}
        "whose judgement has not come back from the log; others are read again when they are needed"

    def run_until(self, stop: threading.Event) -> None:
        """Blocks until `stop` is set. Raises LogUnavailable, LogBroken."""
        budget = Budget(self._settings.tokens_max, self._settings.cost_max, self._book.tokens, self._book.cost)
        asking = AskingThread(self._settings, self._keys, budget)
        readers: list[Reader] = []
        try:
            trajectories, judgements = readers = [self._reader("trajectories"), self._reader("judgements")]
            while not stop.is_set():
                self._take_trajectories(trajectories, asking)
                self._take_judgements(judgements)
                self._write_answers()
                self._commit(trajectories)
                self._report(asking, budget)
        finally:
            # Questions under way are given up: their trajectories are not committed, and are taken again.
            asking.close()
            for reader in readers:
                reader.close()

    def _reader(self, topic: str) -> Reader:
        group = ACCESS_BY_PROGRAM[PROGRAM].group_of(self._run.run_id)
        # Alone: one instance reads all partitions, and no rebalance takes one away from a question under way.
        return self._log.reader([topic], group=group, alone=True, start=self._run.start, run_id=self._run.run_id)

    def _take_trajectories(self, reader: Reader, asking: AskingThread) -> None:
        room = self._settings.in_flight_max - len(self._pending)
        # Not polled without room: it reads alone, so no rebalance waits for a poll.
        if room <= 0:
            return
        for delivery in reader.poll(room, 0.0):
            self._program_metrics.count("events_read")
            trajectory = delivery.event
            # What cannot be decoded is rejected by the stage `score`.
            if isinstance(trajectory, TrajectoryAssembled) and trajectory.meta.run_id == self._run.run_id:
                self._ask(trajectory, delivery.address, asking)
            else:
                self._pending.begin(delivery.address, 0)

    def _ask(self, trajectory: TrajectoryAssembled, address: Address, asking: AskingThread) -> None:
        """Asks the models about an attempt that they have not judged yet."""
        judges = [
            judge
            for judge in (self._judges.get(name) for name in dict.fromkeys(trajectory.task.scorers))
            if isinstance(judge, LlmJudge) and is_asked(trajectory)
            if not self._book.has(judgement_id(trajectory, judge))
        ]
        self._pending.begin(address, len(judges))
        if judges:
            self._trajectories[address] = trajectory
        for judge in judges:
            self._asked[asking.ask(trajectory, address, judge)] = address

    def _write_answers(self) -> None:
        """Writes the judgements that have arrived, and waits until they are on the log."""
        answered = [(future, address) for future, address in self._asked.items() if future.done()]
        for future, _ in answered:
            # Raises what no rule covers: the program ends, is restarted, and asks again.
            self._append(future.result())
        if answered:
            self._log.flush()
        for future, address in answered:
            del self._asked[future]
            self._pending.end_one(address)

    def _take_judgements(self, reader: Reader) -> None:
        """Writes what follows from judgements and verdicts, then commits them."""
        # Also the pause of the loop, when nothing arrives.
        deliveries = reader.poll(_EVENTS_MAX, self._settings.poll_seconds)
        self._program_metrics.count("events_read", len(deliveries))
        for delivery in deliveries:
            event = delivery.event
            if isinstance(event, JudgementMade | VerdictGiven) and event.meta.run_id == self._run.run_id:
                self._book.note(event, delivery.address)
                try:
                    for following in self._following(event, delivery.address):
                        self._append(following)
                except NotUsable as reason:
                    self._reject(delivery, str(reason))
        if deliveries:
            self._log.flush()
            reader.commit()

    def _following(self, event: JudgementMade | VerdictGiven, address: Address) -> list[Event]:
        """The reward of a judgement, or the judgement that a verdict completes. Raises NotUsable."""
        if isinstance(event, VerdictGiven):
            return self._after_verdict(event)
        judge = self._judge_of(event.judge, event.judge_version)
        if not self._book.is_first(event, address):
            return []
        trajectory = self._trajectory_of(event)
        score = score_of(event)
        return [reward_event(trajectory, event.trajectory, judge.name, score, self._scorers, self._versions)]

    def _after_verdict(self, event: VerdictGiven) -> list[Event]:
        judge = self._judge_of(event.scorer, event.scorer_version)
        if not isinstance(judge, HumanVerdict) or not is_usable(event, judge):
            raise NotUsable(f"{event.score} is no verdict of {event.scorer}: see the scale of that scorer in the job")
        # The book has those that were rejected, too.
        usable = [verdict for verdict in self._book.verdicts(event) if is_usable(verdict, judge)]
        counted = counted_verdicts(usable, judge.annotators_min)
        # Verdicts after the last one that was needed change nothing: the reward may have been trained on.
        if counted is None or counted[-1].meta.id != event.meta.id:
            return []
        trajectory = self._trajectory_of(event)
        if not is_asked(trajectory) or self._book.has(judgement_id(trajectory, judge)):
            return []
        return [human_judgement(trajectory, judge, counted)]

    def _judge_of(self, name: str, version: str) -> Judge:
        judge = self._judges.get(name)
        if judge is None or judge.version != version:
            raise NotUsable(f"this run has no judge {name} of version {version}")
        return judge

    def _trajectory_of(self, event: JudgementMade | VerdictGiven) -> TrajectoryAssembled:
        """The trajectory that a judgement or verdict is about. Raises NotUsable when it is another one."""
        known = self._trajectories.pop(event.trajectory, None)
        try:
            trajectory = known or self._log.read_at([event.trajectory])[0]
        except LookupError as error:
            raise NotUsable(f"there is no trajectory at {event.trajectory}") from error
        name = event.judge if isinstance(event, JudgementMade) else event.scorer
        if (
            not isinstance(trajectory, TrajectoryAssembled)
            or trajectory.meta.run_id != self._run.run_id
            or trajectory.meta.attempt_id != event.meta.attempt_id
            or name not in trajectory.task.scorers
        ):
            raise NotUsable(f"what stands at {event.trajectory} is no attempt of this run that {name} judges")
        return trajectory

    def _commit(self, reader: Reader) -> None:
        positions = self._pending.to_commit("trajectories")
        if positions:
            reader.commit(positions)
            self._pending.note_committed(positions)

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._program_metrics.count("events_written")

    def _reject(self, delivery: Delivery, reason: str) -> None:
        logger.warning("judgement_rejected", address=str(delivery.address), reason=reason)
        self._log.append(rejection(self._run.run_id, PROGRAM, delivery, reason, now_microseconds()))
        self._program_metrics.count("rejected")

    def _report(self, asking: AskingThread, budget: Budget) -> None:
        trouble = asking.trouble
        # As lag only while an endpoint is down: then the harness reports a stall. A slow judge is at work.
        self._program_metrics.gauge("lag", len(self._pending) if trouble else 0)
        waiting = "; ".join(f"endpoint {name} is down: {reason}" for name, reason in sorted(trouble.items()))
        told = f"{len(self._asked)} questions under way, {budget.tokens} tokens used"
        if budget.is_used_up:
            self._report_used_up(budget)
            told = f"THE BUDGET IS USED UP, further attempts are excluded; {told}"
        self._program_metrics.detail = f"{told}; {waiting}" if waiting else told

    def _report_used_up(self, budget: Budget) -> None:
        """An error in the log, once: the run goes on, and learns nothing more from tasks that a model judges."""
        if not self._has_reported:
            self._has_reported = True
            remedy = "stop the run, and start one with a higher [judge] tokens_max or cost_max"
            logger.error("judge_budget_used_up", tokens=budget.tokens, cost=budget.cost, remedy=remedy)
