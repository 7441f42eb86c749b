"""What every program gets when it starts: the run, the job, and the addresses of log, registry and blobs."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from replayground.schemas.errors import BadInput
from replayground.schemas.events import Position, VersionAddress

FIELD = "field"
"run_id of what belongs to the field as a whole, such as the heartbeats of the traces program"


class SecuritySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How clients prove who they are. TOML section [log.security].

    No secret is ever written here: a password is a reference, `env:NAME` (a variable of the environment) or `file:PATH`
    (the first line of a file), and is read when a client connects. `{program}` in any field stands for the name of the
    program, so that every program can have credentials of its own.
    """

    protocol: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    "whether connections to the brokers are encrypted (ssl) and whether clients log in (sasl)"
    ca_file: str = ""
    "PEM file of the authority that signed the brokers' certificates; empty = those of the system"
    certificate_file: str = ""
    "PEM file of the client's own certificate, when the brokers ask for one"
    key_file: str = ""
    "PEM file of the key of that certificate"
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    "how clients log in, with sasl_plaintext and sasl_ssl"
    username: str = ""
    "who logs in"
    password: str = ""
    "env:NAME or file:PATH"
    registry_ca_file: str = ""
    "PEM file of the authority that signed the registry's certificate; empty = those of the system"
    registry_username: str = ""
    "who logs in to the registry, by basic authentication; empty = nobody"
    registry_password: str = ""
    "env:NAME or file:PATH"


class LogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the log is. TOML section [log]. Nothing set = a broker and a registry of the field's own, on this machine."""

    bootstrap_servers: str = ""
    "host:port of some brokers, separated by commas; empty = the embedded broker"
    registry_url: str = ""
    "address of the schema registry's Confluent API; empty = the embedded registry"
    topic_prefix: str = ""
    "begins the name of every topic, consumer group and transactional id: it keeps two tenants of one cluster apart"
    replication: int = 1
    "copies of every topic that is made"
    min_in_sync: int = 1
    "copies that must have an event before it counts as written"
    security: SecuritySettings = SecuritySettings()
    "encryption and credentials of the clients"


class JobSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The job: what is practised, and the few figures that several programs must agree on. TOML section [job]."""

    module: str = "replayground.producers.stockroom"
    "dotted name, or path of a .py file relative to the TOML file, of the module with tasks, tools, scorers (schemas.job)"
    agents: str | None = None
    "TOML file of agents, topologies and models (docs/agents.md), relative to this file; takes the place of the module's AGENTS"
    trains: tuple[str, ...] = ()
    "agents whose tokens GRPO learns from; empty = all of them; the cold start teaches everybody"
    demonstrations: int = 6000
    "trajectories of the job's scripted teacher that the cold start is trained on; 0 = start GRPO from the given model"
    weights_from: str = ""
    """RUN:VERSION, a weight version of another run that this run begins with, under the same number and with the state of
    its optimizer; then there is no cold start and demonstrations must be 0. Empty = the model of [trainer.model]"""
    steps: int = 80
    "optimizer batches of GRPO after the cold start; 0 = train until stopped"
    evaluates_only: bool = False
    "the first version plays held-out tasks, and the run ends: nothing is trained"
    groups_per_batch: int = 16
    "groups that one optimizer batch is cut from"
    group_size: int = 8
    "attempts at one training task, whose rewards are compared with each other"
    staleness_max: int = 4
    "a trajectory older than this many weight versions is never trained on"
    staleness_target: int = 1
    "how many versions ahead of the trainer the scheduler lets sampling run"
    versions_kept: Annotated[int, Meta(ge=0)] = 0
    """how many of the newest weight versions stay on the log, besides those that an evaluation holds. 0 = all,
    otherwise at least job.staleness_max + 1 and reloader.skipped_versions_max + 2. `replayground blobs sweep` removes
    the files of the others"""

    @property
    def first_version(self) -> int:
        """The weight version that the first batch is trained on: 0 is the base model, 1 the cold start. With
        weights_from it has the number of the version that it is a copy of. Raises BadInput."""
        copied = self.copied_version
        if copied is not None:
            return copied.version
        return 1 if self.has_cold_start else 0

    @property
    def last_version(self) -> int | None:
        """The weight version with which the run is done; None = it trains until stopped. Raises BadInput."""
        if self.evaluates_only:
            return self.first_version
        return self.first_version + self.steps if self.steps > 0 else None

    @property
    def copied_version(self) -> VersionAddress | None:
        """The version of another run that this one begins with. Raises BadInput when weights_from is malformed."""
        return version_address(self.weights_from) if self.weights_from else None

    @property
    def has_cold_start(self) -> bool:
        """Whether SFT on demonstrations makes version 1."""
        return self.demonstrations > 0 and not self.weights_from


def version_address(text: str) -> VersionAddress:
    """Parses RUN:VERSION. Raises BadInput."""
    # From the right: the id of a run may contain a colon.
    run_id, _, version = text.rpartition(":")
    if not run_id or not (version.isascii() and version.isdigit()):
        raise BadInput(f"{text!r} is no weight version: write RUN:VERSION, such as stockroom-1:12")
    return VersionAddress(run_id=run_id, version=int(version))


class Run(Struct, frozen=True, kw_only=True):
    """One run of one job on one field, as one of its programs sees it."""

    run_id: str
    seed: int
    job: JobSettings
    # Holds references to secrets only, so a Run may be written to run.json.
    log: LogSettings
    blobs_url: str
    blobs_also_read: tuple[str, ...] = ()
    "other stores that blobs may be read from: events may refer to blobs of other runs"
    program: str = "operator"
    "which program this is: a name of schemas.programs"
    worker: str = "worker"
    "name of this program's instance, unique on the field"
    start_number: int = 0
    "how often the run had been resumed when this program started: a higher number on the log owns the run"
    start: tuple[Position, ...] = ()
    "the end of every partition when the run started: nothing before it belongs to the run"
