"""What every program is told when it starts: which run, which job, and where the log, the registry and the blobs are."""

from msgspec import Struct


class JobSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job: what is practised, and the few figures that several programs must agree on. TOML section [job]."""

    module: str = "producers.stockroom"
    "dotted name, or path of a .py file relative to the TOML file, of the module with tasks, tools, scorers (schemas.job)"
    agents: str | None = None
    "TOML file of agents, topologies and models (docs/agents.md), relative to this file; takes the place of the module's AGENTS"
    trains: tuple[str, ...] = ()
    "agents whose tokens GRPO learns from; empty = all of them; the cold start teaches everybody"
    demonstrations: int = 6000
    "trajectories of the job's scripted teacher that the cold start is trained on; 0 = start GRPO from the given model"
    steps: int = 80
    "optimizer batches of GRPO after the cold start"
    groups_per_batch: int = 16
    group_size: int = 8
    staleness_max: int = 4
    "a trajectory older than this many weight versions is never trained on"
    staleness_target: int = 1
    "how many versions ahead of the trainer the scheduler lets sampling run"

    @property
    def first_version(self) -> int:
        """The weight version that the first batch is trained on: 0 is the base model, 1 the cold start."""
        return 1 if self.demonstrations > 0 else 0


class Run(Struct, frozen=True, kw_only=True):
    """One run of one job on one log."""

    run_id: str
    seed: int
    job: JobSettings
    bootstrap_servers: str
    registry_url: str
    blobs_url: str
    worker: str = "worker"
    "name of this program's instance, unique on the stack"
