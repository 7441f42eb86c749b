"""All events, in the order of the flow. One fact = one Avro record = one .avsc file = one frozen class.

The classes are the source: `python -m replayground.schemas.generate` writes schemas/avro/NN_*.avsc from them, and a
test fails when the two differ. A string under a field is that field's documentation, here and in the schema. Every
event starts with the same `meta`.

Token ids are packed little-endian int32 and log-probabilities float32 (schemas.packed), never lists.
This file is pure: no clock, no random, no client library.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta as Within
from msgspec import Struct

# Closed lists are Literals here and plain strings in Avro: a new value needs no schema change. A program that does not
# know a value rejects the event with that reason (decision 0001).
Purpose = Literal["train", "eval", "demonstrate", "replay"]
EndedBy = Literal["answered", "turn_limit", "token_limit", "deadline", "agent_error", "infra_error", "cancelled"]
ErrorKind = Literal["agent", "tool", "infra"]
Verdict = Literal["scored", "excluded"]
StepKind = Literal["initial", "sft", "grpo"]
WeightsKind = Literal["full", "lora", "delta"]
RunKind = Literal["practise", "replay", "retrain", "sft", "eval"]
JudgedBy = Literal["model", "human"]
FindingKind = Literal["tables", "file", "command"]
EndReason = Literal["finished", "stopped", "failed", "taken_over"]
QueryUse = Literal["question", "queue", "alert", "removed"]
Bound = Literal["above", "below"]
AlertState = Literal["raised", "cleared"]
RequestState = Literal["started", "finished", "failed"]
Command = Literal["pause", "resume", "drain", "hold", "release", "cancel"]
RetiredCommand = Literal["promote", "roll_back"]
"no program issues or follows these; they can still be decoded, since older logs may hold them"

Alarm = Literal["no_step", "no_batch", "serving_behind"]

# Programs loop up to these numbers. Without bounds, one message with an absurd number would stop all of them.
GroupSize = Annotated[int, Within(ge=1, le=4096)]
RETRY_MAX = 100
Retry = Annotated[int, Within(ge=0, le=RETRY_MAX)]


class Value(Struct, frozen=True, gc=False):
    """Base of events and of their parts. Excluded from garbage collection (gc=False): 16 % faster reads."""

    # Safe, because no instance contains itself: reference counting frees them all.


class Meta(Value, frozen=True, kw_only=True):
    """The envelope that every message carries."""

    # `id` and `run_id` must stay first, as plain strings: readers take the run of a message from its first bytes
    # (schemas.attribution, decision 0023).
    id: str
    "UUIDv7 for first-hand facts; for derived facts a UUIDv5 of kind, inputs and code version, so a repeat has the same id"
    run_id: str
    "the run it belongs to"
    session_id: str | None = None
    "what it was asked for within the run: the cold start, the training, one evaluation"
    task_id: str | None = None
    group_id: str | None = None
    trajectory_id: str | None = None
    attempt_id: str | None = None
    "made by the worker that starts a rollout: a redelivery or a second worker is another attempt"
    seq: int | None = None
    "0, 1, 2 … per attempt without gaps"
    category: str
    "what kind of traffic: task, request, rollout, turn, tool_call, observation, trajectory, reward, weights …"
    topic: str
    "the topic it was written to"
    sender: str
    receiver: str | None = None
    caller: str | None = None
    priority: int = 0
    headers: dict[str, str] = {}
    "carries the W3C traceparent"
    timestamp: int
    "microseconds since the epoch, event time"
    correlation_id: str | None = None
    "the request this answers"
    causation_id: str | None = None
    "the event that caused this one"
    idempotency_key: str | None = None
    purpose: Purpose | None = None
    "set by the request and kept by all that follows; the cutter takes train and replay only"
    policy_version: int | None = None
    "the weights that were serving"


class Event(Value, frozen=True, kw_only=True):
    """A fact on the log. `number` is its place in the flow and the prefix of its .avsc file."""

    number: ClassVar[int] = 0
    # Must stay the first field of every event, for the same reason as run_id in Meta.
    meta: Meta


class Address(Value, frozen=True):
    """Where an event stands on the log."""

    topic: str
    partition: int
    offset: int


class Sampling(Value, frozen=True, kw_only=True):
    """How turns are drawn from the policy."""

    temperature: float = 1.0
    "divides the logits before a token is drawn; 0 takes the likeliest token"
    top_p: float = 1.0
    "tokens are drawn from the likeliest ones that have this share of the probability; 1 = from all"
    max_tokens_per_turn: int = 64
    "a turn of this many sampled tokens is cut off"
    turns_max: int = 6
    "turns of one agent in an attempt; when they are used up it ends by turn_limit"
    tokens_max: int = 512
    "tokens that one agent reads and says in an attempt; what goes beyond ends it by token_limit"


# Copied into the events of its rollouts: workers and scorers then need no table of all tasks (decision 0003). A long
# world stays in TaskSubmitted (decision 0018).
class Task(Value, frozen=True, kw_only=True):
    """What is asked, in which world, with which tools, and how it will be judged."""

    prompt: str
    reference: str | None
    "the right answer; scorers see it, agents never do"
    agent: str
    "name of the agent definition in the job"
    toolset: list[str]
    world: str
    "JSON of the world: files, tables, keys and perturbations; empty where world_hash refers to it"
    scorers: list[str]
    group_size: GroupSize
    split: str
    tags: dict[str, str] = {}
    # Added after release 0.1.0. A new field needs a default: every release reads the events of all others.
    world_hash: str = ""
    "sha256 of the world, which TaskSubmitted alone holds; empty where `world` itself is given"


class TaskSubmitted(Event, frozen=True, kw_only=True):
    """A task was put to the field."""

    number: ClassVar[int] = 1
    task: Task
    sampling: Sampling
    required_version: int | None = None
    "an evaluation names the weights it judges; its rollouts wait until servers hold them"


class RolloutRequested(Event, frozen=True, kw_only=True):
    """The scheduler asked for one attempt at one member of a group."""

    number: ClassVar[int] = 2
    task: Task
    index: int
    "place in the group, 0 … group_size - 1"
    seed: int
    sampling: Sampling
    deadline: int
    "microseconds since the epoch"
    required_version: int | None = None
    retry: Retry = 0
    "how often this member was asked for before"
    # Added after release 0.1.0.
    world_at: Address | None = None
    "the TaskSubmitted that holds the world; null where the task itself carries it"


class RolloutStarted(Event, frozen=True, kw_only=True):
    """A worker began an attempt. Seq 0 of the attempt."""

    number: ClassVar[int] = 3
    task: Task
    index: int
    seed: int
    worker: str
    sandbox: str | None = None
    "always null: a sandbox is leased at the first tool call, after this event"
    isolation: str
    prompt_tokens: bytes
    template_hash: str
    tools_hash: str
    world_hash: str
    required_version: int | None = None


class VersionSpan(Value, frozen=True, kw_only=True):
    """Tokens start … end - 1 of a turn were sampled by this weight version."""

    version: int
    start: int
    end: int


class TurnGenerated(Event, frozen=True, kw_only=True):
    """The policy sampled one turn."""

    number: ClassVar[int] = 4
    agent: str
    # Training uses `tokens`. Tokenising `text` again can give other ids than those that were sampled.
    text: str
    "what the ids decode to, for people and parsers; never re-tokenised"
    tokens: bytes
    logprobs: bytes
    "as sampled (processed); empty for a teacher, whose turns serve SFT and never RL"
    versions: list[VersionSpan]
    "which weights sampled which tokens, as the server says; empty for a teacher"
    sampling: Sampling
    finish_reason: str
    milliseconds: float
    # Added after release 0.1.0, which had one context in each attempt: 0.
    context: int = 0
    "which context of the attempt it extends; 0 is the one that RolloutStarted's prompt began"


class ToolCalled(Event, frozen=True, kw_only=True):
    """The agent asked for a tool."""

    number: ClassVar[int] = 5
    call_id: str
    agent: str
    tool: str
    arguments: str
    "JSON as the agent wrote it"


class ToolObserved(Event, frozen=True, kw_only=True):
    """What came back to the agent, and the ids it read it as."""

    number: ClassVar[int] = 6
    call_id: str
    tool: str
    content: str
    is_error: bool
    error_kind: ErrorKind | None
    milliseconds: float
    blobs: list[str]
    perturbation: str | None
    "JSON of what the perturbation layer did to this observation"
    tokens: bytes
    "observation and the header of the next turn, appended to the sampled ids"
    # Both added after release 0.1.0, as in TurnGenerated.
    context: int = 0
    "which context of the attempt reads it; the next unused number begins a new one, whose prompt is `tokens`"
    context_because: str | None = None
    "why a new context begins where an old one could not be extended id by id; null otherwise"


class AgentMessaged(Event, frozen=True, kw_only=True):
    """A hand-off, delegation or reply between agents of a topology. Sender, receiver and caller stand in `meta`."""

    number: ClassVar[int] = 7
    kind: str
    content: str
    tokens: bytes
    "what the receiver reads it as, with the header of its next turn"
    # Both added after release 0.1.0, as in TurnGenerated.
    context: int = 0
    "which context of the attempt reads it; the next unused number begins a new one, whose prompt is `tokens`"
    context_because: str | None = None
    "why a new context begins: an agent was spoken to for the first time, or its old one could not be extended id by id"


class WorldFinding(Value, frozen=True, kw_only=True):
    """What a check of the world found in the sandboxes when the agents had ended."""

    name: str
    "of the check"
    kind: FindingKind
    content: str
    "tables: the rows that changed, as JSON; file: its text; command: the end of its output"
    exit_code: int | None = None
    "of a command"
    problem: str | None = None
    "why there is no result; what the agents left behind is the cause"


class RolloutEnded(Event, frozen=True, kw_only=True):
    """The attempt is over. Its seq says how many messages there are."""

    number: ClassVar[int] = 8
    ended_by: EndedBy
    answer: str | None
    reason: str | None
    "what went wrong, when something did"
    turns: int
    tokens_sampled: int
    tokens_read: int
    milliseconds: float
    cost: float
    # Added after release 0.1.0.
    findings: list[WorldFinding] = []
    "what the checks of the world found; empty without checks, and when the attempt was cut off"


class Segment(Value, frozen=True, kw_only=True):
    """A stretch of tokens from one source."""

    start: int
    end: int
    agent: str
    policy_version: int | None
    "null for what the policy did not say"
    # Added after release 0.1.0.
    temperature: float = 1.0
    "that the policy sampled these tokens at; 1 for what it did not say, and in older events whatever it was"
    top_p: float = 1.0
    "share of the probability that it sampled from; 1 as for temperature"


class Context(Value, frozen=True, kw_only=True):
    """Tokens from `start` to the next context were read and said by one agent, who saw nothing before `start`."""

    start: int
    agent: str
    because: str | None = None
    "why it began, when it is not the first"


class Utterance(Value, frozen=True, kw_only=True):
    """One entry of a transcript, for people and judges."""

    role: str
    name: str | None
    content: str
    is_error: bool = False
    perturbation: str | None = None


class TrajectoryAssembled(Event, frozen=True, kw_only=True):
    """One whole attempt: what the model saw and said, token by token."""

    number: ClassVar[int] = 9
    task: Task
    index: int
    seed: int
    tokens: bytes
    loss_mask: bytes
    "one byte a token, 1 = sampled by the policy"
    logprobs: bytes
    "one float32 a token, 0 where the mask is 0; empty for a teacher"
    segments: list[Segment]
    transcript: list[Utterance]
    answer: str | None
    ended_by: EndedBy
    reason: str | None
    turns: int
    tokens_sampled: int
    policy_version_oldest: int | None
    "oldest weights among the sampled tokens; null when nothing was sampled by a versioned policy"
    template_hash: str
    tools_hash: str
    world_hash: str
    cost: float
    # Added after release 0.1.0.
    contexts: list[Context] = []
    "where each agent's own view begins in `tokens`, in order, the first at 0; empty = one context, as of one agent"
    findings: list[WorldFinding] = []
    "what the checks of the world found when the agents had ended, for scorers that look at more than the transcript"


class RewardAssigned(Event, frozen=True, kw_only=True):
    """One scorer's judgement of one attempt."""

    number: ClassVar[int] = 10
    # Size, scorers and the last three fields are copied from the trajectory: `group` needs no join (decision 0003).
    trajectory: Address
    index: int
    group_size: GroupSize
    scorers: list[str]
    "all scorers of the task: the group waits for each of them"
    scorer: str
    scorer_version: str
    score: float
    parts: dict[str, float]
    evidence: str
    verdict: Verdict
    excluded_because: str | None
    ended_by: EndedBy
    tokens_sampled: int
    policy_version_oldest: int | None
    # All below were added after release 0.1.0.
    scorer_set: str = ""
    "names and versions of all scorers of the task, as in GroupCompleted; empty in older events"
    weight: float = 1.0
    "how much the score counts in the reward of the attempt, which is the weighted sum over all its scorers"
    passed: bool | None = None
    "whether the attempt passed by this scorer; null when the scorer does not decide that, and in older events"


class GroupMember(Value, frozen=True, kw_only=True):
    """One member of a group, filled by the first attempt that ended other than by infra_error."""

    index: int
    trajectory_id: str
    attempt_id: str
    trajectory: Address
    reward: float
    advantage: float
    valid: bool
    tokens_sampled: int
    policy_version_oldest: int | None
    # Added after release 0.1.0.
    passed: bool | None = None
    "whether the attempt passed; null in older events"


class GroupCompleted(Event, frozen=True, kw_only=True):
    """All members of a group have ended."""

    number: ClassVar[int] = 11
    scorer_set: str
    members: list[GroupMember]
    reward_mean: float
    reward_deviation: float
    dropped_because: str | None
    "zero_variance, too_few_valid, or refused when it can never be completed: more work is asked for instead"


class BatchMember(Value, frozen=True, kw_only=True):
    """One trajectory of a batch, by address."""

    trajectory_id: str
    group_id: str
    trajectory: Address
    reward: float
    advantage: float
    # Added after release 0.1.0.
    passed: bool | None = None
    "whether the attempt passed; null in older events"


class Position(Value, frozen=True, kw_only=True):
    """How far a reader of one partition has come: the offset it reads next."""

    topic: str
    partition: int
    offset: int


class BatchCut(Event, frozen=True, kw_only=True):
    """Groups were cut into a batch, in total order."""

    number: ClassVar[int] = 12
    index: int
    "0, 1, 2 … per run"
    base_version: int
    "the weights this batch will be trained on"
    members: list[BatchMember]
    groups: list[str]
    tokens_sampled: int
    policy_floor: int
    "oldest policy version in the batch"
    groups_stale: list[str]
    "dropped since the batch before, because a member was older than allowed; the newest ones, see groups_stale_unnamed"
    groups_dropped: dict[str, int]
    "passed over since the batch before, by reason: that of the group, or nothing_sampled"
    positions: list[Position]
    "how far the groups topic is consumed by this cut; the cutter's whole state is read back from here"
    # All below were added after release 0.1.0.
    groups_passed: list[str] = []
    "the newest that groups_dropped counts: the log may repeat them, and a cutter that has started again must know them"
    policy_ceiling: int | None = None
    "newest among the oldest versions of all groups named here: when it is too old to be admitted, so is each of them"
    groups_stale_unnamed: int = 0
    "stale groups besides those named: of the groups that it did not take, a batch names the newest 256 of each partition"
    scorer_sets: list[str] = []
    "scorer sets of its groups, each once, sorted; empty in older events"


class StepTaken(Event, frozen=True, kw_only=True):
    """The trainer made new weights."""

    number: ClassVar[int] = 13
    kind: StepKind
    batch_id: str | None
    base_version: int | None
    new_version: int
    metrics: dict[str, float]
    seconds: dict[str, float]
    code_hash: str
    config_hash: str


class WeightsFile(Value, frozen=True, kw_only=True):
    """One file of a weight version."""

    name: str
    uri: str
    sha256: str
    size_bytes: int


# A reload that silently did nothing would pass a check of file digests: this shows what a server computes with
# (decision 0005).
class Probe(Value, frozen=True, kw_only=True):
    """A prompt and the trainer's own log-probabilities of it: a server that serves these weights must agree."""

    tokens: bytes
    logprobs: bytes
    "of tokens 1 … n - 1 given those before"


class VersionAddress(Value, frozen=True, kw_only=True):
    """A weight version of some run."""

    run_id: str
    version: int


class WeightsPublished(Event, frozen=True, kw_only=True):
    """A weight version exists, is whole and is named by digest."""

    number: ClassVar[int] = 14
    version: int
    base_version: int | None
    kind: WeightsKind
    files: list[WeightsFile]
    "what a server needs to serve it"
    checkpoint: list[WeightsFile]
    "what the trainer needs besides to go on from it"
    batches: list[str]
    probe: Probe
    # Added after release 0.1.0.
    copied_from: VersionAddress | None = None
    "the version of another run that this one is a copy of; null where the run made it itself"


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """A server serves a version, verified; or it refused, and why."""

    number: ClassVar[int] = 15
    server: str
    version: int
    digest: str
    probe_gap: float | None
    "greatest difference between the server's and the trainer's log-probabilities of the probe"
    seconds: float
    refusal: str | None


class ControlIssued(Event, frozen=True, kw_only=True):
    """Somebody steered the run."""

    number: ClassVar[int] = 16
    command: Literal[Command, RetiredCommand]
    version: int | None
    requested_by: str
    reason: str


class WorkerSeen(Event, frozen=True, kw_only=True):
    """A heartbeat."""

    number: ClassVar[int] = 17
    worker: str
    role: str
    load: dict[str, float]
    "named figures: memory_bytes, busy_share, running …"


class RunFile(Value, frozen=True, kw_only=True):
    """A file that a run needs: the job's source, or a file that its config names."""

    name: str
    "path relative to the folder of the job"
    setting: str | None
    "the config field that names it, such as job.module; null for what stands beside the module"
    uri: str
    sha256: str
    size_bytes: int


class HumanQuestion(Value, frozen=True, kw_only=True):
    """What a scorer of a run asks people about an attempt."""

    scorer: str
    scorer_version: str
    question: str
    scale_low: float
    scale_high: float
    annotators_min: int
    "how many different people must have judged an attempt before it has a score"
    pass_mark: float | None
    "score from which on an attempt has passed; null = it does not decide that"


# Acknowledged by the log before any program of the run starts (decision 0020).
class RunStarted(Event, frozen=True, kw_only=True):
    """A run began. Everything needed to go on with it elsewhere stands here; nothing of it is secret."""

    number: ClassVar[int] = 18
    kind: RunKind
    config: str
    "JSON of the config as it was asked for; addresses and folders of this machine are left out"
    files: list[RunFile]
    seed: int
    code_version: str
    packages: dict[str, str]
    "versions of the packages that decide what comes out"
    positions: list[Position]
    "the end of every partition at this moment: nothing before it belongs to the run"
    started_by: str
    "user and machine"
    sources: list[str] = []
    "runs whose trajectories this one replays"
    scorers: dict[str, str] = {}
    "versions of the scorers that judge this run, by name: a run never changes them; empty in older events"
    request: str = ""
    "JSON of what a replay, a retraining, an SFT or an evaluation was asked to do; empty for practice"
    questions: list[HumanQuestion] = []
    "what its scorers ask people, so that a page can ask without the code of the job; empty in older events"


class RunResumed(Event, frozen=True, kw_only=True):
    """A run that had ended, or whose programs were gone, goes on. Older starts of it give way."""

    number: ClassVar[int] = 19
    start: int
    "1 for the first time it is resumed, then 2, 3 …"
    code_version: str
    packages: dict[str, str]
    started_by: str


class RunEnded(Event, frozen=True, kw_only=True):
    """The programs of a run have stopped. A run that was not finished can be resumed."""

    number: ClassVar[int] = 20
    reason: EndReason
    detail: str
    "one sentence"
    start: int
    "which start of the run ended: 0 for the first, then as in RunResumed"


class AttemptEnded(Event, frozen=True, kw_only=True):
    """An attempt is over and its trajectory is on the log: all that planners need to know of it, without its tokens."""

    number: ClassVar[int] = 21
    # Small on purpose: planners read one of these for every attempt, instead of whole trajectories (decision 0018).
    index: int
    group_size: GroupSize
    ended_by: EndedBy
    reason: str | None
    tokens_sampled: int
    policy_version_oldest: int | None


class SnapshotTaken(Event, frozen=True, kw_only=True):
    """The state of one program of a run, folded from everything before `positions`. The newest one counts."""

    number: ClassVar[int] = 22
    # A cache of the log: it needs no compatibility between versions (docs/versioning.md).
    program: str
    code_version: str
    "of the fold: a program that folds otherwise does not use it"
    positions: list[Position]
    state: bytes


# A name for a choice of experience: it can be inspected, exported, and trained on again. Addresses are packed, since a
# selection may have millions (schemas.packed).
class TrajectoriesSelected(Event, frozen=True, kw_only=True):
    """Trajectories were chosen, by runs or by a question in SQL, to be replayed or learned from."""

    number: ClassVar[int] = 23
    name: str
    "by which people refer to it; the run that uses it when it was not named"
    runs: list[str]
    "source runs; empty = all"
    where: str
    "condition in SQL over the view `trajectories`; empty = all of the source runs"
    partitions: bytes
    "partition of topic trajectories of each one, packed int32, in the order of partition and offset"
    offsets: bytes
    "offset of each one, packed int64, in the same order"
    group_sizes: bytes
    "how many members of its group were chosen, packed int32, in the same order"
    sha256: str
    "of partitions, offsets and group_sizes: equal selections have equal digests"


class JudgementMade(Event, frozen=True, kw_only=True):
    """A model judged one attempt by a rubric, or enough people gave their verdicts. Its reward follows from this."""

    number: ClassVar[int] = 24
    # The id is derived from trajectory and judge: of two judgements with one id, the first on the log counts.
    trajectory: Address
    judge: str
    "name of the scorer"
    judge_version: str
    judged_by: JudgedBy
    verdict: Verdict
    score: float
    "mean of `scores`; 0 when excluded, and then it does not count"
    excluded_because: str | None
    scores: list[float]
    "one for each vote of a model or each annotator"
    votes: int
    "how many were asked for"
    tries: int
    "answers of the model, with those that could not be read; 0 for people"
    answers: list[str]
    "what the model replied, in order and shortened; empty for people"
    model: str
    "as the endpoint calls it; empty for people"
    prompt_hash: str
    "sha256 of what the model was asked, without the random boundary; empty for people"
    tokens_in: int
    tokens_out: int
    cost: float
    "by the prices of the config"
    milliseconds: float
    "from the first request to the last answer, with waits for an endpoint that was down"
    verdicts: list[str]
    "ids of the VerdictGiven that it was made of; empty for a model"


class VerdictGiven(Event, frozen=True, kw_only=True):
    """A person judged one attempt."""

    number: ClassVar[int] = 25
    trajectory: Address
    scorer: str
    scorer_version: str
    annotator: str
    score: float
    comment: str


class AlarmRaised(Event, frozen=True, kw_only=True):
    """The loop of a run does not go on as it should, or does so again."""

    number: ClassVar[int] = 26
    alarm: Alarm
    is_over: bool
    "true: what was wrong is over"
    detail: str
    "one sentence"


class QuerySaved(Event, frozen=True, kw_only=True):
    """Somebody kept a SELECT under a name, changed it or removed it. The newest event of a name counts."""

    number: ClassVar[int] = 27
    name: str
    use: QueryUse
    "question = to be asked again; queue = its trajectories wait for people; alert = its number is watched"
    sql: str
    bound: Bound = "above"
    "of an alert: raised when the number is above the threshold, or below it"
    threshold: float = 0.0
    every_seconds: float = 60.0
    "how often an alert asks, at most"
    saved_by: str


# The log line and the body of the webhook have the same fields (decision 0033).
class AlertChanged(Event, frozen=True, kw_only=True):
    """The number of an alert has passed its threshold, or has come back."""

    number: ClassVar[int] = 28
    name: str
    state: AlertState
    value: float | None
    "what its query gave; null when the alert was removed or changed while it was raised"
    bound: Bound
    threshold: float
    query: str
    "id of the QuerySaved"


class ReplayRequested(Event, frozen=True, kw_only=True):
    """Somebody asked for a replay, which `replayground requests` carries out."""

    number: ClassVar[int] = 29
    sources: list[str]
    scorers: list[str]
    "names of scorers of the job or built-in ones; empty = those that the tasks name"
    failed_only: bool
    is_dry_run: bool
    "judge and compare, write no run"
    requested_by: str


class RedriveRequested(Event, frozen=True, kw_only=True):
    """Somebody asked for rejected messages to be written again, which `replayground requests` does."""

    number: ClassVar[int] = 30
    rejects: list[str]
    "ids of EventRejected"
    requested_by: str


class RequestReported(Event, frozen=True, kw_only=True):
    """How far a ReplayRequested or a RedriveRequested is."""

    number: ClassVar[int] = 31
    request: str
    "id of what was asked for"
    state: RequestState
    run: str
    "the replay; empty for a dry run or a redrive, and until it has started"
    detail: str
    "one sentence"
    figures: dict[str, float]
    "of the comparison: attempts, agreed, to_passed, to_failed, changed, reward_before …"


class OperatorActed(Event, frozen=True, kw_only=True):
    """Somebody did what no other event tells: wrote rejected messages again, repaired the store, swept blobs …"""

    number: ClassVar[int] = 32
    action: str
    "the command: dead-letters redrive, reconcile --repair, blobs sweep, submit, tokens add …"
    detail: str
    "one sentence: what it came to"
    person: str


class EventRejected(Event, frozen=True, kw_only=True):
    """A message that a stage could not take, whole and with its address."""

    number: ClassVar[int] = 99
    original: bytes
    original_key: bytes | None
    origin: Address
    stage: str
    reason: str


# In the order of `number`. No event is ever removed, even if nothing writes it any more: some log holds it.
EVENTS: tuple[type[Event], ...] = (
    TaskSubmitted,
    RolloutRequested,
    RolloutStarted,
    TurnGenerated,
    ToolCalled,
    ToolObserved,
    AgentMessaged,
    RolloutEnded,
    TrajectoryAssembled,
    RewardAssigned,
    GroupCompleted,
    BatchCut,
    StepTaken,
    WeightsPublished,
    WeightsLoaded,
    ControlIssued,
    WorkerSeen,
    RunStarted,
    RunResumed,
    RunEnded,
    AttemptEnded,
    SnapshotTaken,
    TrajectoriesSelected,
    JudgementMade,
    VerdictGiven,
    AlarmRaised,
    QuerySaved,
    AlertChanged,
    ReplayRequested,
    RedriveRequested,
    RequestReported,
    OperatorActed,
    EventRejected,
)
