"""Settings of the producers: what a TOML section may say, with a sentence under each field."""

from typing import Annotated, Literal

from msgspec import Meta as Within
from msgspec import Struct, field

from sandboxes.limits import Limits
from sandboxes.outside.config import ToolsSettings
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
    tasks_per_lesson: Annotated[int, Within(ge=1)] = 1
    "training tasks submitted for each that is played: above 1, a curriculum ([scheduler] curriculum) has a choice"
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
    "how often a member is asked for again after infrastructure errors before it is closed as cancelled, if others succeed"
    retry_seconds: float = 0.5
    "wait before a member is asked for again; doubles with each of the first retries_max retries of it"
    outage_seconds_max: float = 1800.0
    "while no rollout at all succeeds, servers are taken to be away and failing members are kept; for so long at most"
    deadline_seconds: float = 900.0
    "time a rollout has from its request to its end"
    overdue_seconds: float = 60.0
    "a member whose end was not seen this long after its deadline is asked for again"
    curriculum: Literal["off", "pass_rate"] = "off"
    "pass_rate: families of training tasks that some attempts solve and some do not are taken up more often"
    curriculum_tags: list[str] = []
    "names of the tags that make a task's family; none = all of its tags"
    curriculum_low: float = 0.1
    "families solved less often than this are taken up rarely"
    curriculum_high: float = 0.9
    "families solved more often than this are taken up rarely"
    curriculum_outside: float = 0.1
    "how rarely: the share of its chance that a family outside of low to high keeps"
    curriculum_half_life_versions: float = 4.0
    "what is known of a family counts half after so many weight versions"
    poll_seconds: float = 0.05
    "longest wait for news before deciding again"

    def __post_init__(self) -> None:
        if not 0.0 <= self.curriculum_low < self.curriculum_high <= 1.0:
            raise ValueError("curriculum_low must be below curriculum_high, and both between 0 and 1")
        if not 0.0 < self.curriculum_outside <= 1.0:
            raise ValueError("curriculum_outside must be above 0 and at most 1: no family may be given up for good")
        if self.curriculum_half_life_versions <= 0:
            raise ValueError("curriculum_half_life_versions must be above 0")


class RolloutsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker plays rollouts. TOML section [rollouts]."""

    servers: list[str] = []
    """base addresses of the policy servers, such as http://127.0.0.1:8000; demonstrations need none. Or one "recorded:<run id>":
    what that run said, on the same log, is said again"""
    slots: int = 32
    "rollouts played at once"
    turn_timeout_seconds: float = 120.0
    "a server that has not answered a turn by then is an infrastructure error; a paused server holds requests back"
    unverified_wait_seconds: float = 60.0
    "how long a turn waits for a server whose weights the reloader has not verified yet"
    grace_seconds: float = 20.0
    "what is running when the worker is told to stop may end within this time; the rest is left to another worker"
    uncommitted_max: Annotated[int, Within(ge=1)] = 2048
    "requests held at most, with those that have ended and wait for one before them: what a dead worker leaves to be repeated"
    commit_seconds: float = 0.5
    "how often what has ended is flushed and committed"
    poll_seconds: float = 0.05
    "longest wait for requests before looking at everything else"
    rejects_share_max: float = 0.5
    "a worker that cannot read more of the newest requests stops instead of emptying the log into the dead letters"
    tools: ToolsSettings = ToolsSettings()
    "tools that work outside the sandbox: [rollouts.tools.search], [rollouts.tools.mcp.NAME] and so on"
    sandboxes: int = 32
    "most rollouts with an open sandbox at once; one keeps it, and a second one for sql and kv, from its first call to its end"
    isolation: Literal["bubblewrap", "gvisor"] = "bubblewrap"
    "what holds the agent's code (docs/sandboxes.md); gVisor is stronger, needs runsc, and opens ten times slower"
    limits: Limits = Limits()
    "what one sandbox may use: [rollouts.limits] memory_bytes_max and so on"
