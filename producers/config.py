"""Settings of the producers: what a TOML section may say, with a sentence under each field."""

from typing import Annotated, Literal

from msgspec import Meta as Within
from msgspec import Struct, field

from replayground.sandboxes.limits import Limits, Totals
from replayground.sandboxes.outside.config import ToolsSettings
from replayground.schemas.events import Sampling


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
    "retries of a member after infrastructure errors; then, if other rollouts succeed, it is closed as cancelled"
    retry_seconds: float = 0.5
    "wait before a member is asked for again; doubles with each of the first retries_max retries of it"
    # Without a limit, the last member of a run whose task is broken would keep the run open for ever (decision 0012).
    outage_seconds_max: float = 1800.0
    "while no rollout at all succeeds, servers are taken to be away and failing members are kept; for so long at most"
    # Also bounds how late an attempt can count: hops forget closed groups after a horizon, and a second completion of a
    # forgotten group needs that horizon to pass within one deadline (decision 0017).
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

    # msgspec turns a ValueError raised here into a ValidationError, which names the place in the config.
    def __post_init__(self) -> None:
        if not 0.0 <= self.curriculum_low < self.curriculum_high <= 1.0:
            raise ValueError("curriculum_low must be below curriculum_high, and both between 0 and 1")
        if not 0.0 < self.curriculum_outside <= 1.0:
            raise ValueError("curriculum_outside must be above 0 and at most 1: no family may be given up for good")
        if self.curriculum_half_life_versions <= 0:
            raise ValueError("curriculum_half_life_versions must be above 0")


SANDBOXES_MAX = 1024
"Of one worker: each needs two uids of the range that the worker claims."


class RolloutsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker plays rollouts. TOML section [rollouts]."""

    servers: list[str] = []
    """base addresses of the policy servers, such as http://127.0.0.1:8000; demonstrations need none. Or one entry
    "recorded:<run id>": the turns of that run, from the same log, are replayed"""
    slots: int = 32
    "rollouts played at once"
    turn_timeout_seconds: float = 120.0
    "a server that has not answered a turn by then is an infrastructure error; a paused server holds requests back"
    unverified_wait_seconds: float = 60.0
    "how long a turn waits for a server whose weights the reloader has not verified yet"
    grace_seconds: float = 20.0
    "what is running when the worker is told to stop may end within this time; the rest is left to another worker"
    # Far above slots: rollouts that end behind a slow one make room for others at once, but cannot be committed.
    uncommitted_max: Annotated[int, Within(ge=1)] = 2048
    "limit on requests that are read and not committed, ended ones included: what is repeated when the worker dies"
    commit_seconds: float = 0.5
    "how often what has ended is flushed and committed"
    poll_seconds: float = 0.05
    "longest wait for requests before looking at everything else"
    rejects_share_max: float = 0.5
    "if a larger share of the newest requests cannot be decoded, the worker stops instead of rejecting the rest"
    tools: ToolsSettings = ToolsSettings()
    "tools that work outside the sandbox: [rollouts.tools.search], [rollouts.tools.mcp.NAME] and so on"
    sandboxes: Annotated[int, Within(ge=1, le=SANDBOXES_MAX)] = 32
    "rollouts with open sandboxes at once; each keeps one, and a second for sql and kv, from its first call to its end"
    isolation: Literal["bubblewrap", "gvisor"] = "bubblewrap"
    "what holds the agent's code (docs/sandboxes.md); gVisor is stronger, needs runsc, and opens ten times slower"
    limits: Limits = Limits()
    "what one sandbox may use: [rollouts.limits] memory_bytes_max and so on"
    totals: Totals = Totals()
    "what all sandboxes on this machine may use together: [rollouts.totals] memory_share and so on; set it alike for its workers"
    leases_per_sandbox_max: Annotated[int, Within(ge=1)] = 1
    """how many rollouts use a sandbox one after another; 1 gives each new namespaces, more saves about 20 ms of CPU for each, but
    a rollout can then leave a few bits to the next (docs/sandboxes.md)"""
