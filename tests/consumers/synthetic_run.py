"""A made-up run, every kind of event on the log as the programs would write it, small or large, always the same."""

import json
import random
from collections.abc import Iterator, Sequence

import msgspec

from replayground.schemas.events import (
    Address,
    AlarmRaised,
    AttemptEnded,
    BatchCut,
    BatchMember,
    ControlIssued,
    EndedBy,
    EndReason,
    Event,
    EventRejected,
    GroupCompleted,
    GroupMember,
    HumanQuestion,
    JudgementMade,
    Meta,
    Position,
    Probe,
    Purpose,
    RewardAssigned,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    Sampling,
    Segment,
    SnapshotTaken,
    StepKind,
    StepTaken,
    Task,
    TaskSubmitted,
    ToolCalled,
    ToolObserved,
    TrajectoriesSelected,
    TrajectoryAssembled,
    TurnGenerated,
    Utterance,
    VerdictGiven,
    VersionSpan,
    WeightsFile,
    WeightsLoaded,
    WeightsPublished,
    WorkerSeen,
)
from replayground.schemas.ids import derived_id
from replayground.schemas.packed import pack_logprobs, pack_tokens
from replayground.schemas.run import FIELD, JobSettings, LogSettings, Run
from replayground.schemas.topics import TOPICS
from replayground.streams.log.protocol import Log
from replayground.streams.rules.runs import RunState, fold

BEGAN = 1_790_000_000_000_000
SERVER = "http://127.0.0.1:8100"
HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
SAMPLING = Sampling()
QUESTION = HumanQuestion(
    scorer="people",
    scorer_version="1",
    question=f"Would this help? {HOSTILE}",
    scale_low=0.0,
    scale_high=4.0,
    annotators_min=2,
    pass_mark=3.0,
)


def run_of(steps: int, demonstrations: int, blobs_url: str = "file:///tmp/none", run_id: str = "run-1") -> Run:
    job = JobSettings(steps=steps, demonstrations=demonstrations, groups_per_batch=2, group_size=2)
    return Run(
        run_id=run_id,
        seed=3,
        job=job,
        log=LogSettings(),
        blobs_url=blobs_url,
        worker="traces",
    )


FIELD_RUN = Run(
    run_id=FIELD,
    seed=0,
    job=JobSettings(),
    log=LogSettings(),
    blobs_url="file:///tmp/none",
    program="traces",
    worker="traces",
)
"what the traces program is told"


class Ids(msgspec.Struct, frozen=True, kw_only=True):
    """Where a message belongs."""

    task_id: str | None = None
    group_id: str | None = None
    trajectory_id: str | None = None
    attempt_id: str | None = None


class SyntheticRun:
    """Writes the events of a run in the order of the flow; time moves on by itself."""

    def __init__(
        self,
        run: Run,
        evaluation_tasks: int,
        seed: int = 0,
        began: int = BEGAN,
        ended: EndReason | None = "finished",
        asks_people: bool = False,
    ) -> None:
        self.run = run
        self._asks_people = asks_people
        self.now = began
        self._ended = ended
        self._evaluation_tasks = evaluation_tasks
        self._chance = random.Random(seed)
        self._numbers = 0
        self._rollouts = 0
        self._offset = 0

    def append_to(self, log: Log) -> list[Event]:
        """Puts the run on a log that may have others on it; returns its events."""
        events = list(self.events(log.end_positions([topic.name for topic in TOPICS])))
        for event in events:
            log.append(event)
        log.flush()
        return events

    def state(self) -> RunState:
        """What the facts of the run come to."""
        return fold(SyntheticRun(self.run, self._evaluation_tasks, ended=self._ended).events())[self.run.run_id]

    def events(self, positions: Sequence[Position] = ()) -> Iterator[Event]:
        """The whole run: demonstrations, cold start, evaluations, training, end. It was resumed once."""
        yield self._started(positions)
        yield from self._weights(0, "initial")
        for _ in range(self.run.job.demonstrations):
            yield from self._rollout("demonstrations", "demonstrate", 0, 0.4)[0]
        yield from self._weights(1, "sft")
        yield from self._evaluation(1, 0.4, ("sampled", "greedy"))
        yield self._resumed()
        for step in range(1, self.run.job.steps + 1):
            yield from self._step(step)
        yield from self._evaluation(self.run.job.first_version + self.run.job.steps, 0.9, ("sampled", "greedy"))
        yield self._alarm()
        yield self._rejected()
        if self._ended is not None:
            yield self._run_ended(self._ended)

    def _started(self, positions: Sequence[Position]) -> RunStarted:
        return RunStarted(
            meta=self._meta("runs", "run"),
            kind="practise",
            config=msgspec.json.encode({"job": self.run.job}).decode(),
            files=[],
            seed=self.run.seed,
            code_version="one",
            packages={"torch": "2"},
            positions=list(positions),
            started_by="ann@here",
            scorers={"exact_match": "1"} | ({"people": "1"} if self._asks_people else {}),
            questions=[QUESTION] if self._asks_people else [],
        )

    def _resumed(self) -> RunResumed:
        meta = self._meta("runs", "run")
        return RunResumed(meta=meta, start=1, code_version="two", packages={}, started_by="bob@there")

    def _run_ended(self, reason: EndReason) -> RunEnded:
        return RunEnded(meta=self._meta("runs", "run"), reason=reason, detail="it is over", start=1)

    def _snapshot(self) -> SnapshotTaken:
        return SnapshotTaken(
            meta=self._meta("snapshots", "snapshot"),
            program="scheduler",
            code_version="1",
            positions=[Position(topic="tasks", partition=0, offset=7)],
            state=b"a state of some size",
        )

    def _selection(self) -> TrajectoriesSelected:
        return TrajectoriesSelected(
            meta=self._meta("selections", "selection"),
            name="short ones",
            runs=[self.run.run_id],
            where="turns < 3",
            partitions=pack_tokens([0, 1]),
            offsets=bytes(16),
            group_sizes=pack_tokens([1, 1]),
            sha256="0" * 64,
        )

    def _evaluation(self, version: int, chance: float, kinds: tuple[str, ...]) -> Iterator[Event]:
        yield self._control("hold", version)
        for kind in kinds:
            for _ in range(self._evaluation_tasks):
                yield from self._rollout(f"eval-v{version:04d}-{kind}", "eval", version, chance)[0]
        yield self._control("release", version)

    def _step(self, step: int) -> Iterator[Event]:
        job = self.run.job
        version = job.first_version + step - 1
        chance = 0.4 + 0.5 * step / max(1, job.steps)
        groups: list[GroupCompleted] = []
        for _ in range(job.groups_per_batch):
            group_id = self._id("group")
            members: list[GroupMember] = []
            for index in range(job.group_size):
                events, member = self._rollout("train", "train", version, chance, group_id=group_id, index=index)
                yield from events
                members.append(member)
            groups.append(self._group(group_id, members))
            yield groups[-1]
        batch = self._batch(step, version, groups)
        yield batch
        yield from self._heartbeats(step, version)
        yield self._snapshot()
        yield self._selection()
        yield from self._judged(groups[0].members[0])
        yield from self._weights(version + 1, "grpo", batch)
        if step % 10 == 0 and step < job.steps:
            yield from self._evaluation(version + 1, chance, ("sampled",))

    def _rollout(
        self, session: str, purpose: Purpose, version: int, chance: float, group_id: str | None = None, index: int = 0
    ) -> tuple[list[Event], GroupMember]:
        """One task played: everything from its request to its reward."""
        passed = self._chance.random() < chance
        self._rollouts += 1
        hostile = self._rollouts % 5 == 0
        infra_error = self._chance.random() < 0.02
        ids = Ids(
            task_id=self._id("task"), group_id=group_id or self._id("group"), trajectory_id=self._id("trajectory")
        )
        task, answer = self._task(session, hostile), "4544" if passed else "1"
        attempts = [("infra_error", answer)] if infra_error else []
        attempts.append(("answered", answer))
        events: list[Event] = []
        if index == 0:
            events.append(
                TaskSubmitted(meta=self._meta("tasks", "task", session, purpose, ids=ids), task=task, sampling=SAMPLING)
            )
        member: GroupMember | None = None
        for retry, (ended_by, said) in enumerate(attempts):
            attempt_id = self._id("attempt")
            played, member = self._attempt(
                session, purpose, version, task, ids, attempt_id, ended_by, said, index, retry
            )
            events += played
        assert member is not None
        return events, member

    def _attempt(
        self,
        session: str,
        purpose: Purpose,
        version: int,
        task: Task,
        ids: Ids,
        attempt_id: str,
        ended_by: str,
        answer: str,
        index: int,
        retry: int,
    ) -> tuple[list[Event], GroupMember]:
        ended: EndedBy = "infra_error" if ended_by == "infra_error" else "answered"
        sampled = purpose != "demonstrate"
        seq = iter(range(100))

        def meta(topic: str, category: str, numbered: bool = True) -> Meta:
            place = msgspec.structs.replace(ids, attempt_id=attempt_id)
            return self._meta(topic, category, session, purpose, version, next(seq) if numbered else None, ids=place)

        def turn(text: str) -> TurnGenerated:
            count = len(text.split()) + 8
            spans = [VersionSpan(version=version, start=0, end=count)] if sampled else []
            return TurnGenerated(
                meta=meta("messages", "turn"),
                agent="agent",
                text=text,
                tokens=pack_tokens([self._chance.randrange(500) for _ in range(count)]),
                logprobs=pack_logprobs([-0.5] * count) if sampled else b"",
                versions=spans,
                sampling=SAMPLING,
                finish_reason="stop",
                milliseconds=40.0,
            )

        call = json.dumps({"name": "python", "arguments": {"code": "503*9+17"}})
        requested = RolloutRequested(
            meta=self._meta("rollouts", "request", session, purpose, ids=ids),
            task=task,
            index=index,
            seed=1,
            sampling=SAMPLING,
            deadline=self.now + 60_000_000,
            retry=retry,
        )
        started = RolloutStarted(
            meta=meta("messages", "rollout"),
            task=task,
            index=index,
            seed=1,
            worker="rollouts-0",
            sandbox="box",
            isolation="bubblewrap",
            prompt_tokens=pack_tokens(list(range(30))),
            template_hash="t",
            tools_hash="u",
            world_hash="w",
        )
        first = turn(f"<tool_call>{call}</tool_call>")
        called = ToolCalled(
            meta=meta("messages", "tool_call"), call_id="c1", agent="agent", tool="python", arguments=call
        )
        perturbation = '{"kind": "busy"}' if self._chance.random() < 0.2 else None
        observed = ToolObserved(
            meta=meta("messages", "observation"),
            call_id="c1",
            tool="python",
            content="error: busy" if perturbation else "4544",
            is_error=perturbation is not None,
            error_kind="tool" if perturbation else None,
            milliseconds=12.0,
            blobs=[],
            perturbation=perturbation,
            tokens=pack_tokens([1, 2, 3]),
        )
        second = turn(f"<answer>{answer}</answer>")
        said = [first, second]
        tokens_sampled = sum(len(t.tokens) // 4 for t in said) if sampled else 0
        ended_event = RolloutEnded(
            meta=meta("messages", "rollout"),
            ended_by=ended,
            answer=answer,
            reason="the sandbox was lost" if ended == "infra_error" else None,
            turns=2,
            tokens_sampled=tokens_sampled,
            tokens_read=33,
            milliseconds=120.0,
            cost=0.0,
        )
        trajectory = TrajectoryAssembled(
            meta=meta("trajectories", "trajectory", numbered=False),
            task=task,
            index=index,
            seed=1,
            tokens=started.prompt_tokens + first.tokens + observed.tokens + second.tokens,
            loss_mask=b"\x01",
            logprobs=first.logprobs,
            segments=[Segment(start=0, end=3, agent="agent", policy_version=version if sampled else None)],
            transcript=[
                Utterance(role="user", name=None, content=task.prompt),
                Utterance(role="assistant", name="agent", content=first.text),
                Utterance(
                    role="tool",
                    name="python",
                    content=observed.content,
                    is_error=observed.is_error,
                    perturbation=perturbation,
                ),
                Utterance(role="assistant", name="agent", content=second.text),
            ],
            answer=answer,
            ended_by=ended,
            reason=ended_event.reason,
            turns=2,
            tokens_sampled=tokens_sampled,
            policy_version_oldest=version if sampled else None,
            template_hash="t",
            tools_hash="u",
            world_hash="w",
            cost=0.0,
        )
        ended_attempt = AttemptEnded(
            meta=meta("attempts", "attempt", numbered=False),
            index=index,
            group_size=task.group_size,
            ended_by=ended,
            reason=ended_event.reason,
            tokens_sampled=tokens_sampled,
            policy_version_oldest=version if sampled else None,
        )
        reward = self._reward(meta("rewards", "reward", numbered=False), trajectory)
        member = GroupMember(
            index=index,
            trajectory_id=ids.trajectory_id or "",
            attempt_id=attempt_id,
            trajectory=reward.trajectory,
            reward=reward.score,
            advantage=0.5,
            valid=True,
            tokens_sampled=tokens_sampled,
            policy_version_oldest=version,
        )
        told = [requested, started, first, called, observed, second, ended_event, trajectory, ended_attempt, reward]
        return told, member

    def _reward(self, meta: Meta, trajectory: TrajectoryAssembled) -> RewardAssigned:
        infra = trajectory.ended_by == "infra_error"
        right = trajectory.answer == trajectory.task.reference and not infra
        self._offset += 1
        return RewardAssigned(
            meta=meta,
            trajectory=Address("trajectories", 0, self._offset),
            index=trajectory.index,
            group_size=trajectory.task.group_size,
            scorers=["exact_match"],
            scorer="exact_match",
            scorer_version="1",
            score=1.0 if right else 0.0,
            parts={},
            evidence=f"answered {trajectory.answer}",
            verdict="excluded" if infra else "scored",
            excluded_because="infra_error" if infra else None,
            ended_by=trajectory.ended_by,
            tokens_sampled=trajectory.tokens_sampled,
            policy_version_oldest=trajectory.policy_version_oldest,
        )

    def _judged(self, member: GroupMember) -> Iterator[Event]:
        """One attempt judged by a model and by a person."""
        ids = Ids(trajectory_id=member.trajectory_id, group_id=self._id("judged"), attempt_id=member.attempt_id)
        yield JudgementMade(
            meta=self._meta("judgements", "judgement", "train", "train", ids=ids),
            trajectory=member.trajectory,
            judge="careful",
            judge_version="1",
            judged_by="model",
            verdict="scored",
            score=0.5,
            excluded_because=None,
            scores=[0.25, 0.75],
            votes=2,
            tries=3,
            answers=["a quarter", "three quarters"],
            model="small",
            prompt_hash="p",
            tokens_in=100,
            tokens_out=7,
            cost=0.25,
            milliseconds=80.0,
            verdicts=[],
        )
        yield VerdictGiven(
            meta=self._meta("judgements", "verdict", "train", "train", ids=ids),
            trajectory=member.trajectory,
            scorer="people",
            scorer_version="1",
            annotator="ann",
            score=1.0,
            comment="well done",
        )

    def _group(self, group_id: str, members: list[GroupMember]) -> GroupCompleted:
        rewards = [member.reward for member in members]
        return GroupCompleted(
            meta=self._meta("groups", "group", "train", "train", ids=Ids(group_id=group_id)),
            scorer_set="exact_match@1",
            members=members,
            reward_mean=sum(rewards) / len(rewards),
            reward_deviation=0.5,
            dropped_because="zero_variance" if len(set(rewards)) == 1 else None,
        )

    def _batch(self, step: int, version: int, groups: list[GroupCompleted]) -> BatchCut:
        members = [
            BatchMember(
                trajectory_id=member.trajectory_id,
                group_id=group.meta.group_id or "",
                trajectory=member.trajectory,
                reward=member.reward,
                advantage=member.advantage,
            )
            for group in groups
            for member in group.members
        ]
        return BatchCut(
            meta=self._meta("batches", "batch", None, "train"),
            index=step - 1,
            base_version=version,
            members=members,
            groups=[group.meta.group_id or "" for group in groups],
            tokens_sampled=500,
            policy_floor=max(1, version - 1),
            groups_stale=["old"] if step == 2 else [],
            groups_dropped={},
            positions=[],
        )

    def _weights(self, version: int, kind: StepKind, batch: BatchCut | None = None) -> Iterator[Event]:
        rewards = [member.reward for member in batch.members] if batch else []
        metrics = {"loss": 1.0}
        if batch:
            metrics = {
                "reward_mean": sum(rewards) / len(rewards),
                "pass_rate": sum(rewards) / len(rewards),
                "entropy": 2.0 / (1 + version / 8),
                "k3": 0.002 * (version % 5),
                "gradient_norm": 0.4 + 0.1 * (version % 4),
                "staleness_max": float(version % 3),
                "logprob_gap_mean": 2e-7,
                "logprob_gap_tokens": 100.0,
            }
        yield StepTaken(
            meta=self._meta("steps", "step"),
            kind=kind,
            batch_id=batch.meta.id if batch else None,
            base_version=version - 1 if version else None,
            new_version=version,
            metrics=metrics,
            seconds={"read": 0.05, "step": 0.4, "checkpoint": 0.1, "publish": 0.05},
            code_hash="c",
            config_hash="d",
        )
        yield WeightsPublished(
            meta=self._meta("weights", "weights"),
            version=version,
            base_version=version - 1 if version else None,
            kind="full",
            files=[WeightsFile(name="model.safetensors", uri="file:///x", sha256="0" * 64, size_bytes=700_000)],
            checkpoint=[],
            batches=[],
            probe=Probe(tokens=b"", logprobs=b""),
        )
        yield WeightsLoaded(
            meta=self._meta("serving", "serving", version=version),
            server=SERVER,
            version=version,
            digest="0" * 64,
            probe_gap=1e-6,
            seconds=0.1,
            refusal=None,
        )

    def _heartbeats(self, step: int, version: int) -> Iterator[Event]:
        for role, figures in (
            (
                "rollouts",
                {
                    "running": 32.0,
                    "sandboxes": 3.0 + step % 4,
                    "busy_seconds": 9.0 * step,
                    "memory_bytes_peak": 2e8,
                    "memory_bytes": 1e8,
                },
            ),
            (
                "trainer",
                {"progress": 1.0, "busy_seconds": 1.0 * step, "memory_bytes_peak": 9e8, "version": float(version)},
            ),
            ("vllm", {"memory_bytes_peak": 3e9, "version": float(version)}),
        ):
            meta = self._meta("control", "heartbeat", sender=f"{role}-0")
            yield WorkerSeen(meta=meta, worker=f"{role}-0", role=role, load=figures)

    def _control(self, command: str, version: int) -> ControlIssued:
        return ControlIssued(
            meta=self._meta("control", "control"),
            command="hold" if command == "hold" else "release",
            version=version,
            requested_by="feeder",
            reason="evaluation",
        )

    def _alarm(self) -> AlarmRaised:
        meta = self._meta("control", "alarm")
        return AlarmRaised(
            meta=meta, alarm="no_batch", is_over=False, detail="no batch was cut for 301 s, 20 groups wait"
        )

    def _rejected(self) -> EventRejected:
        return EventRejected(
            meta=self._meta("dead-letters", "reject"),
            original=b"\x00broken",
            original_key=b"k",
            origin=Address("messages", 0, 5),
            stage="assemble",
            reason="no schema",
        )

    def _task(self, session: str, hostile: bool) -> Task:
        return Task(
            prompt=f"What is 503*9+17? {HOSTILE}" if hostile else "What is 503*9+17?",
            reference="4544",
            agent="agent",
            toolset=["python"],
            world=json.dumps({"files": {}, "tables": {"stock": "x" * 200}}),
            scorers=["exact_match", "people"] if self._asks_people else ["exact_match"],
            group_size=self.run.job.group_size if session == "train" else 1,
            split="heldout" if session.startswith("eval") else "train",
            tags={"kind": "calc"},
        )

    def _meta(
        self,
        topic: str,
        category: str,
        session: str | None = None,
        purpose: Purpose | None = None,
        version: int | None = None,
        seq: int | None = None,
        sender: str = "test",
        ids: Ids | None = None,
    ) -> Meta:
        self.now += 10_000
        return Meta(
            id=self._id("event"),
            run_id=self.run.run_id,
            session_id=session,
            category=category,
            topic=topic,
            sender=sender,
            timestamp=self.now,
            purpose=purpose,
            policy_version=version,
            seq=seq,
            task_id=ids.task_id if ids else None,
            group_id=ids.group_id if ids else None,
            trajectory_id=ids.trajectory_id if ids else None,
            attempt_id=ids.attempt_id if ids else None,
        )

    def _id(self, kind: str) -> str:
        self._numbers += 1
        return derived_id(kind, self.run.run_id, self._numbers)
