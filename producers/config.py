"""Settings of the producers: what a TOML section may say, with a sentence under each field."""

from msgspec import Struct, field

from schemas.events import Sampling


class FeederSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the feeder puts to the field. TOML section [feeder]."""

    train_backlog: int = 64
    "training tasks kept ahead of the scheduler; never fewer than its pacing can use"
    evaluation_tasks: int = 600
    "held-out tasks of the evaluations at the start and at the end"
    evaluation_tasks_between: int = 200
    "held-out tasks of each evaluation along the way: the first ones of the same set"
    evaluation_every: int = 20
    "an evaluation is made after every so many optimizer steps; 0 = none between start and end"
    tasks_file: str | None = None
    "JSONL file of tasks (fields of schemas.events.Task) that takes the place of the job's own tasks"
    sampling: Sampling = field(default_factory=Sampling)
    "how training and evaluation turns are drawn; a greedy evaluation differs in temperature only"
    poll_seconds: float = 0.05
    "longest wait for news before deciding again"


class SchedulerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rollouts are asked for. TOML section [scheduler]."""

    demonstrations_in_flight: int = 512
    "demonstrations asked for and not ended"
    evaluations_in_flight: int = 640
    "evaluation rollouts asked for and not ended"
    retries_max: int = 5
    "how often a member is asked for again after infrastructure errors before it is closed as cancelled"
    retry_seconds: float = 0.5
    "wait before a member is asked for again; doubles with each retry of it"
    deadline_seconds: float = 900.0
    "time a rollout has from its request to its end"
    overdue_seconds: float = 60.0
    "a member whose end was not seen this long after its deadline is asked for again"
    poll_seconds: float = 0.05
    "longest wait for news before deciding again"


class RolloutsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker plays rollouts. TOML section [rollouts]."""

    servers: list[str] = []
    "base addresses of the policy servers, such as http://127.0.0.1:8000; demonstrations need none"
    slots: int = 32
    "rollouts played at once"
    turn_timeout_seconds: float = 120.0
    "a server that has not answered a turn by then is an infrastructure error; a paused server holds requests back"
    unverified_wait_seconds: float = 60.0
    "how long a turn waits for a server whose weights the reloader has not verified yet"
    grace_seconds: float = 20.0
    "what is running when the worker is told to stop may end within this time; the rest is left to another worker"
    commit_seconds: float = 0.5
    "how often what has ended is flushed and committed"
    poll_seconds: float = 0.05
    "longest wait for requests before looking at everything else"
    sandboxes: int = 32
    "most sandboxes open at once; a rollout keeps one from its first tool call to its end"
