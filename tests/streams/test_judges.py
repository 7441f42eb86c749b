"""The program `judge` with a real HTTP endpoint: over the log in memory, and on a real broker with kills."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from replayground.schemas.blobs import Blobs
from replayground.schemas.codec import Codec
from replayground.schemas.errors import BadInput
from replayground.schemas.events import (
    Address,
    Event,
    EventRejected,
    JudgementMade,
    Meta,
    RewardAssigned,
    RolloutStarted,
    TrajectoryAssembled,
    VerdictGiven,
)
from replayground.schemas.job import Scorer
from replayground.schemas.metrics import ProgramMetrics
from replayground.schemas.registry import MemoryRegistry
from replayground.schemas.run import JobSettings, LogSettings, Run
from replayground.streams.config import JudgeEndpointSettings, JudgeSettings
from replayground.streams.judges.asking import BUDGET_USED_UP
from replayground.streams.judges.program import JudgeWorker, keys_of
from replayground.streams.judges.program import run as run_judge
from replayground.streams.log.connect import open_log
from replayground.streams.log.memory import MemoryLog
from replayground.streams.rules.judges import HumanVerdict, LlmJudge
from replayground.streams.rules.scoring import scorers_by_name
from tests.flow.synthetic import rollout
from tests.streams.judge_server import JudgeServer, Reply, judge_server, question_in
from tests.streams.test_judging import trajectory_of
from tests.torture.oracle import events_of
from tests.torture.programs import Program, streams_program
from tests.torture.stopping import await_that

RUN = Run(run_id="judged", seed=0, job=JobSettings(), log=LogSettings(), blobs_url="memory://", program="judge")
POLITE = LlmJudge(name="polite", model="judge-7b", rubric="1 for a polite answer, 0 for a rude one.")
HELPFUL = HumanVerdict(name="helpful", question="Does it help?", annotators_min=2, scale=(1, 5), pass_mark=4)
PATIENCE_SECONDS = 60.0


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog(Codec(MemoryRegistry(), Blobs("memory://")))


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


class Until(threading.Event):
    """Tells the program to stop when something holds; fails when that takes too long for any machine."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        super().__init__()
        self._holds = holds
        self._until = time.monotonic() + PATIENCE_SECONDS

    def is_set(self) -> bool:
        assert time.monotonic() < self._until, "it never happens"
        return self._holds()


@dataclass
class Judged:
    """A worker over a log in memory."""

    log: MemoryLog
    server: JudgeServer
    scorers: Sequence[Any] = (POLITE,)

    def settings(self, **change: Any) -> JudgeSettings:
        endpoint = JudgeEndpointSettings(url=self.server.url, price_in_per_million=1.0, price_out_per_million=10.0)
        quick: dict[str, Any] = {
            "endpoints": {"default": endpoint},
            "timeout_seconds": 30.0,
            "backoff_seconds": 0.01,
            "backoff_seconds_max": 0.05,
            "poll_seconds": 0.01,
        }
        return JudgeSettings(**quick | change)

    def run_until(self, holds: Callable[[], bool], **change: Any) -> ProgramMetrics:
        metrics = ProgramMetrics()
        known: dict[str, Scorer] = dict(scorers_by_name(self.scorers))
        JudgeWorker(self.log, RUN, self.settings(**change), metrics, known, {}).run_until(Until(holds))
        return metrics

    def run_to_end(self, **change: Any) -> ProgramMetrics:
        """Until every trajectory and judgement is committed."""
        return self.run_until(lambda: self.lag == 0, **change)

    @property
    def lag(self) -> int:
        return sum(lag.lag for lag in self.log.group_lags("judge-judged", ["trajectories", "judgements"]).values())

    def on(self, topic: str) -> list[Any]:
        return [delivery.event for delivery in self.log.reader([topic]).poll(10_000, 0.0)]

    @property
    def judgements(self) -> list[JudgementMade]:
        return [event for event in self.on("judgements") if isinstance(event, JudgementMade)]

    @property
    def rewards(self) -> list[RewardAssigned]:
        return self.on("rewards")


def attempts(count: int, scorers: Sequence[str] = ("polite",), **change: Any) -> list[TrajectoryAssembled]:
    return [trajectory_of(rollout(group, 0, run_id="judged", **change), scorers) for group in range(count)]


def put(log: MemoryLog, events: Sequence[Event]) -> list[Address]:
    at: list[Address] = []
    for event in events:
        log.append(event, at.append)
    log.flush()
    return at


def test_an_attempt_is_judged_by_what_the_model_replies(log: MemoryLog, server: JudgeServer) -> None:
    judged = Judged(log, server)
    (attempt,) = attempts(1)
    (address,) = put(log, [attempt])
    judged.run_to_end()
    (made,), (reward,) = judged.judgements, judged.rewards
    assert (made.verdict, made.score, made.scores, made.votes, made.tries) == ("scored", 1.0, [1.0], 1, 1)
    assert (made.tokens_in, made.tokens_out) == (100, 10)
    assert made.cost == pytest.approx(2e-4)
    assert made.answers == ['{"score": 1, "reason": "polite"}']
    assert (made.model, made.trajectory) == ("judge-7b", address)
    assert (reward.score, reward.passed, reward.verdict, reward.scorer) == (1.0, True, "scored", "polite")
    assert reward.scorer_version == POLITE.version
    assert reward.scorer_set == f"polite:{POLITE.version}"
    assert reward.trajectory == address
    (request,) = server.requests
    assert (request["model"], request["temperature"]) == ("judge-7b", 0.0)


def test_votes_are_averaged(log: MemoryLog, server: JudgeServer) -> None:
    votes = iter([1, 0, 1, 1])
    server.behave = lambda request: Reply(f'{{"score": {next(votes)}, "reason": "so"}}')
    judge = LlmJudge(name="polite", model="m", rubric="r", votes=4, temperature=0.7, pass_mark=0.7)
    judged = Judged(log, server, (judge,))
    put(log, attempts(1))
    judged.run_to_end()
    (reward,) = judged.rewards
    assert (reward.score, reward.passed) == (0.75, True)
    assert reward.parts == {"vote_1": 1.0, "vote_2": 0.0, "vote_3": 1.0, "vote_4": 1.0}
    boundaries = {question_in(request).split("consist of ")[1].split(" ")[0] for request in server.requests}
    assert len(boundaries) == 4, "each vote has a boundary of its own"


def test_nobody_is_asked_about_what_is_not_judged(log: MemoryLog, server: JudgeServer) -> None:
    judged = Judged(log, server, (POLITE, HELPFUL))
    put(log, attempts(3, ["exact_match"]))
    put(log, attempts(3, ["polite"], ended_by="infra_error", attempt=1))
    put(log, attempts(3, ["polite"], purpose="demonstrate", attempt=2))
    put(log, [replace_run(attempt, "another") for attempt in attempts(3)])
    judged.run_to_end()
    assert not server.requests
    assert not judged.rewards


def replace_run(event: Any, run_id: str) -> Any:
    return msgspec.structs.replace(event, meta=msgspec.structs.replace(event.meta, run_id=run_id))


def test_nonsense_is_asked_for_again_and_then_excludes(log: MemoryLog, server: JudgeServer) -> None:
    server.behave = lambda request: Reply("The answer is rather polite, I would say 1.")
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end(tries_max=3)
    assert len(server.requests) == 3
    assert "could not be read" in question_in(server.requests[-1])
    (made,), (reward,) = judged.judgements, judged.rewards
    assert (made.verdict, made.tries, len(made.answers)) == ("excluded", 3, 3)
    assert made.tokens_in == 300
    assert (reward.verdict, reward.passed) == ("excluded", None)
    assert "could not be read, 3 times" in str(reward.excluded_because)


def test_nonsense_once_is_forgiven(log: MemoryLog, server: JudgeServer) -> None:
    replies = iter(["hm", None, '{"score": 0, "reason": "rude"}'])
    server.behave = lambda request: Reply(next(replies))
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end(tries_max=3)
    (reward,) = judged.rewards
    assert (reward.verdict, reward.score, reward.passed) == ("scored", 0.0, False)


@pytest.mark.parametrize(
    "broken",
    [
        Reply(status=500),
        Reply(status=429),
        Reply(status=401),
        Reply(status=404),
        Reply(raw=b"<html>"),
        Reply(raw=b"{}"),
    ],
    ids=["500", "429", "401", "404", "html", "no_completion"],
)
def test_an_endpoint_that_is_down_delays(log: MemoryLog, server: JudgeServer, broken: Reply) -> None:
    server.behave = lambda request: broken if len(server.requests) <= 12 else Reply()
    judged = Judged(log, server)
    put(log, attempts(2))
    metrics = judged.run_until(lambda: len(server.requests) >= 8)
    assert not judged.judgements
    assert metrics.figures()["lag"] == 2
    assert "endpoint default is down" in metrics.detail
    assert judged.lag == 2
    judged.run_to_end()
    assert [(reward.verdict, reward.score) for reward in judged.rewards] == [("scored", 1.0)] * 2
    assert not judged.on("dead-letters")


def test_nobody_listens_at_the_address(log: MemoryLog) -> None:
    with judge_server() as gone:
        pass
    judged = Judged(log, gone)
    put(log, attempts(1))
    looks: Iterator[int] = iter(range(20))
    judged.run_until(lambda: next(looks, None) is None)
    assert not judged.judgements
    assert judged.lag == 1


def test_an_endpoint_that_hangs_for_all_is_down(log: MemoryLog, server: JudgeServer) -> None:
    """Not one attempt is excluded for it, however often requests time out."""
    forever = threading.Event()
    server.behave = lambda request: Reply(until=forever)
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_until(lambda: len(server.requests) >= 8, timeout_seconds=0.05, timeouts_max=2)
    assert not judged.judgements
    forever.set()


def test_a_question_that_alone_hangs_is_excluded(log: MemoryLog, server: JudgeServer) -> None:
    forever = threading.Event()
    server.behave = lambda request: Reply(until=forever if "Rubric" in question_in(request) else None)
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end(timeout_seconds=0.2, timeouts_max=2)
    (reward,) = judged.rewards
    assert reward.verdict == "excluded"
    assert "did not answer, 2 times" in str(reward.excluded_because)
    forever.set()


def test_a_question_that_is_refused_is_excluded_and_a_server_that_refuses_all_is_down(
    log: MemoryLog, server: JudgeServer
) -> None:
    judged = Judged(log, server)
    put(log, attempts(1))
    server.behave = lambda request: Reply(status=400, raw=b"no such model")
    judged.run_until(lambda: len(server.requests) >= 6)
    assert not judged.judgements
    server.behave = lambda request: Reply(
        status=400 if "Rubric" in question_in(request) else 200,
        raw=b"too long" if "Rubric" in question_in(request) else None,
    )
    judged.run_to_end()
    (reward,) = judged.rewards
    assert "too long" in str(reward.excluded_because)


@pytest.mark.parametrize("limit", [{"tokens_max": 250}, {"cost_max": 0.0005}])
def test_a_used_up_budget_excludes_and_is_not_forgotten_by_a_restart(
    log: MemoryLog, server: JudgeServer, limit: dict[str, Any]
) -> None:
    judged = Judged(log, server)
    put(log, attempts(2))
    judged.run_to_end(concurrency=1, **limit)
    put(log, attempts(5, attempt=1))
    metrics = judged.run_to_end(concurrency=1, **limit)
    assert "THE BUDGET IS USED UP" in metrics.detail
    assert len(server.requests) == 3
    reasons = Counter(reward.excluded_because for reward in judged.rewards)
    assert reasons == {None: 3, BUDGET_USED_UP: 4}


def test_a_server_that_does_not_count_tokens_has_a_budget_all_the_same(log: MemoryLog, server: JudgeServer) -> None:
    server.behave = lambda request: Reply(usage=None)
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end()
    (made,) = judged.judgements
    assert made.tokens_in > 100
    assert made.tokens_out > 1


def test_no_more_requests_run_at_once_than_allowed(log: MemoryLog, server: JudgeServer) -> None:
    running: list[int] = []
    most: list[int] = []

    def behave(request: dict[str, Any]) -> Reply:
        running.append(1)
        most.append(len(running))
        time.sleep(0.01)  # so that others have a chance to run meanwhile
        running.pop()
        return Reply()

    server.behave = behave
    judged = Judged(log, server)
    put(log, attempts(30))
    judged.run_to_end(concurrency=3, in_flight_max=7)
    assert max(most) <= 3
    assert len(judged.rewards) == 30


def test_a_judgement_on_the_log_is_not_asked_for_again(log: MemoryLog, server: JudgeServer) -> None:
    """As after a kill between the judgement and the commit."""
    judged = Judged(log, server)
    put(log, attempts(5))
    judged.run_to_end()
    for group in list(log._committed):  # the offsets are lost, and all is delivered again
        log._committed[group] = 0
    judged.run_to_end()
    assert len(server.requests) == 5
    assert len(judged.judgements) == 5
    by_id = Counter(reward.meta.id for reward in judged.rewards)
    assert len(by_id) == 5
    assert len({msgspec.json.encode(reward) for reward in judged.rewards}) == 5, "repeats are equal"


def test_of_two_judgements_of_one_attempt_the_first_counts(log: MemoryLog, server: JudgeServer) -> None:
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end()
    (first,) = judged.judgements
    put(log, [msgspec.structs.replace(first, score=0.0, scores=[0.0])])
    judged.run_to_end()
    assert [reward.score for reward in judged.rewards] == [1.0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"judge": "nobody"}, "no judge nobody"),
        ({"judge_version": "old"}, "of version old"),
        ({"trajectory": Address("trajectories", 0, 10**6)}, "no trajectory at"),
    ],
)
def test_a_judgement_that_does_not_belong_here_is_rejected(
    log: MemoryLog, server: JudgeServer, change: dict[str, Any], reason: str
) -> None:
    judged = Judged(log, server)
    put(log, attempts(1))
    judged.run_to_end()
    (made,) = judged.judgements
    foreign = msgspec.structs.replace(made, meta=msgspec.structs.replace(made.meta, id="foreign"), **change)
    put(log, [foreign])
    judged.run_to_end()
    (reject,) = judged.on("dead-letters")
    assert isinstance(reject, EventRejected)
    assert reason in reject.reason
    assert len(judged.rewards) == 1


def verdict(
    attempt: TrajectoryAssembled, address: Address, annotator: str, given_score: float, **change: Any
) -> VerdictGiven:
    meta: dict[str, Any] = {
        "id": str(uuid.uuid4()),
        "category": "verdict",
        "topic": "judgements",
        "sender": annotator,
    }
    given: dict[str, Any] = {
        "trajectory": address,
        "scorer": "helpful",
        "scorer_version": HELPFUL.version,
        "annotator": annotator,
        "score": given_score,
        "comment": "",
    }
    envelope: Meta = msgspec.structs.replace(attempt.meta, **meta)
    return VerdictGiven(meta=envelope, **given | change)


def test_the_reward_of_people_is_the_mean_of_their_verdicts(log: MemoryLog, server: JudgeServer) -> None:
    judged = Judged(log, server, (HELPFUL,))
    (attempt,) = attempts(1, ["helpful"])
    (address,) = put(log, [attempt])
    put(log, [verdict(attempt, address, "ada", 5), verdict(attempt, address, "ada", 4)])
    judged.run_to_end()
    assert not judged.judgements
    put(log, [verdict(attempt, address, "bob", 5), verdict(attempt, address, "eve", 1)])
    judged.run_to_end()
    (made,), (reward,) = judged.judgements, judged.rewards
    assert (made.judged_by, made.scores, made.votes, len(made.verdicts)) == ("human", [4.0, 5.0], 2, 2)
    assert (reward.score, reward.passed, reward.scorer) == (4.5, True, "helpful")
    put(log, [verdict(attempt, address, "ada", 1)])
    judged.run_to_end()
    assert len(judged.rewards) == 1, "a reward that may have been trained on does not change"


@pytest.mark.parametrize(
    "change",
    [{"score": 6.0}, {"score": float("nan")}, {"scorer": "nobody"}, {"scorer_version": "old"}, {"scorer": "polite"}],
)
def test_a_verdict_that_cannot_be_used_is_rejected(log: MemoryLog, server: JudgeServer, change: dict[str, Any]) -> None:
    judged = Judged(log, server, (HELPFUL, POLITE))
    (attempt,) = attempts(1, ["helpful"])
    (address,) = put(log, [attempt])
    put(log, [verdict(attempt, address, "ada", 5, **change), verdict(attempt, address, "bob", 3)])
    judged.run_to_end()
    assert len(judged.on("dead-letters")) == 1
    assert not judged.rewards
    put(log, [verdict(attempt, address, "ada", 5)])
    judged.run_to_end()
    assert [reward.score for reward in judged.rewards] == [4.0]


def test_keys_are_read_where_the_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges: tuple[Any, ...] = (POLITE,)
    scorers = scorers_by_name(judges)
    with pytest.raises(BadInput, match=r"add \[judge.endpoints.default\]"):
        keys_of(scorers, JudgeSettings())
    told = JudgeSettings(endpoints={"default": JudgeEndpointSettings(url="http://x", key="env:KEY_OF_JUDGE")})
    with pytest.raises(BadInput, match="KEY_OF_JUDGE"):
        keys_of(scorers, told)
    monkeypatch.setenv("KEY_OF_JUDGE", "hunter2")
    assert keys_of(scorers, told) == {"default": "hunter2"}


GROUP_SIZE = 3
MEMBERS = 8 * GROUP_SIZE


def judge_process(run: Run, settings: JudgeSettings, stop: threading.Event) -> None:
    run_judge(run, settings, ProgramMetrics(), stop)


@contextmanager
def a_program(program: Program) -> Iterator[Program]:
    try:
        yield program
    finally:
        program.kill()


def test_a_kill_asks_again_what_was_under_way_and_no_other_scorer_waits(kafka_run: Run, tmp_path: Path) -> None:
    """Groups without a judge are completed while the endpoint is down. Then it answers, the program is killed in the middle, and
    each attempt has one reward of each scorer."""
    (tmp_path / "judged_job.py").write_text(
        "from replayground import LlmJudge\n\n\n"
        "def tasks(split, seed, start=0):\n    return iter(())\n\n\n"
        'SCORERS = (LlmJudge(name="polite", model="judge-7b", rubric="1 for a polite answer."),)\n'
    )
    job = JobSettings(module=str(tmp_path / "judged_job.py"))
    run = msgspec.structs.replace(kafka_run, run_id=f"judge-{uuid.uuid4().hex[:8]}", job=job, program="streams")
    judging = msgspec.structs.replace(run, program="judge")
    log = open_log(msgspec.structs.replace(run, program="operator"))
    log.make_topics()
    for group in range(12):
        scorers = ["exact_match", "polite"] if group < 8 else ["exact_match"]
        for index in range(GROUP_SIZE):
            messages = rollout(group, index, answer=str(6 + index), group_size=GROUP_SIZE, run_id=run.run_id)
            for event in messages:
                log.append(with_answer(event, group, index, scorers))
    log.flush()
    groups = Counted(log, "groups", run.run_id)
    with judge_server(lambda request: Reply(status=503)) as server:
        settings = JudgeSettings(
            endpoints={"default": JudgeEndpointSettings(url=server.url, key="env:KEY_OF_JUDGE")},
            backoff_seconds=0.05,
            backoff_seconds_max=0.2,
            concurrency=4,
        )
        with pytest.MonkeyPatch.context() as environment, a_program(streams_program(run, tmp_path)):
            environment.setenv("KEY_OF_JUDGE", "hunter2")
            with a_program(Program(judge_process, judging, settings)) as first:
                await_that(lambda: len(groups.read()) >= 4 and len(server.requests) >= 4, "other groups are completed")
                assert {group.scorer_set for group in groups.events} == {"exact_match:1"}
                # From now on it answers, but for one attempt that hangs: the kill finds a question under way.
                hangs, asked = threading.Event(), Counter[str]()

                def answer_all_but_one(request: dict[str, Any]) -> Reply:
                    asked[_attempt_in(question_in(request))] += 1
                    return Reply(until=hangs if "attempt 5 of" in question_in(request) else None)

                server.behave = answer_all_but_one
                answered = Counted(log, "judgements", run.run_id)
                await_that(lambda: len(answered.read()) >= 10 and asked["5"] == 1, "some are judged")
                first.kill()
            hangs.set()
            with a_program(Program(judge_process, judging, settings)):
                await_that(lambda: len(groups.read()) >= 12, "all groups are completed")
        assert set(server.keys) == {"Bearer hunter2"}
    rewards = {
        reward.meta.id: reward for reward in events_of(log, run.run_id, "rewards") if isinstance(reward, RewardAssigned)
    }
    of_attempt = Counter((reward.meta.attempt_id, reward.scorer) for reward in rewards.values())
    assert set(of_attempt.values()) == {1}
    assert Counter(scorer for _, scorer in of_attempt) == {"exact_match": 12 * GROUP_SIZE, "polite": MEMBERS}
    assert len(asked) == MEMBERS
    # Once more at most, for what was under way when it was killed.
    assert max(asked.values()) == asked["5"] == 2
    answered.close()
    groups.close()
    log.close()


class Counted:
    """The events of a run on a topic, by id, as they come."""

    def __init__(self, log: Any, topic: str, run_id: str) -> None:
        self._reader = log.reader([topic], run_id=run_id)
        self._run_id = run_id
        self._found: dict[str, Any] = {}

    @property
    def events(self) -> list[Any]:
        return list(self._found.values())

    def read(self) -> list[Any]:
        for delivery in self._reader.poll(1000, 0.1):
            if delivery.event is not None and delivery.event.meta.run_id == self._run_id:
                self._found[delivery.event.meta.id] = delivery.event
        return self.events

    def close(self) -> None:
        self._reader.close()


def with_answer(event: Event, group: int, index: int, scorers: list[str]) -> Event:
    """The same event at a task that names its attempt and these scorers."""
    if not isinstance(event, RolloutStarted):
        return event
    prompt = f"This is attempt {group * GROUP_SIZE + index} of many."
    return msgspec.structs.replace(event, task=msgspec.structs.replace(event.task, scorers=scorers, prompt=prompt))


def _attempt_in(question: str) -> str:
    return question.split("This is attempt ")[1].split(" ")[0]
