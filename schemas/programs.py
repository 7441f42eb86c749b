"""Who reads and writes which topics: one declaration a program, from which everything else is derived.

The log that a program opens (streams.log.connect) refuses what is not declared here, so a declaration that is wrong shows
in the first test that runs the program. ACLs, the lag view and the flow diagram are made from the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.events import (
    AgentMessaged,
    AttemptEnded,
    BatchCut,
    ControlIssued,
    Event,
    EventRejected,
    GroupCompleted,
    RewardAssigned,
    RolloutEnded,
    RolloutRequested,
    RolloutStarted,
    RunEnded,
    RunResumed,
    RunStarted,
    SnapshotTaken,
    StepTaken,
    TaskSubmitted,
    ToolCalled,
    ToolObserved,
    TrajectoryAssembled,
    TurnGenerated,
    WeightsLoaded,
    WeightsPublished,
    WorkerSeen,
)
from schemas.topics import FOREVER, TOPIC_BY_EVENT, TOPICS, Topic

OPERATOR = "operator"
"a person at the command line, or the API"

Use = tuple[str, str]
"""One use of the log: ("write", event class), ("write_bytes", topic), ("read", topic) without a group, ("consume", topic)
with one, ("transact", "")."""

WATCHED = tuple(topic.name for topic in TOPICS if topic.retention_milliseconds != FOREVER)
"""Topics that forget by age. Every program looks how much time is left to read them (deploy.serve), which takes reading
their oldest unread event and asking where every group stands."""


class UndeclaredAccess(AssertionError):
    """A program uses the log otherwise than it is declared here: a mistake in the program or in the table."""


@dataclass(frozen=True)
class Access:
    """What one program does with the log."""

    program: str
    reads: tuple[str, ...] = ()
    "topics it reads without a group: every instance reads all of them"
    consumes: Mapping[str, str] = field(default_factory=dict)
    "topics that its consumer group shares, and the stage that takes each of them"
    writes: tuple[type[Event], ...] = ()
    is_transactional: bool = False
    "writes together with the positions it consumed, by a transactional id"
    keeps_tables: bool = False
    "has changelog topics of its own, named after its group"
    of_field: bool = False
    "one for all runs of the field, instead of one for each run"
    makes_topics: bool = False
    is_unlimited: bool = False
    "may use the log as every program does"

    def group_of(self, run_id: str) -> str:
        """Its consumer group, and the name of its transactional id."""
        return self.program if self.of_field else f"{self.program}-{run_id}"

    def owns(self, name: str) -> bool:
        """Whether a consumer group or transactional id is this program's own."""
        return self.is_unlimited or name.startswith(f"{self.program}-") or (self.of_field and name == self.program)

    def declares(self, use: Use) -> bool:
        verb, name = use
        if self.is_unlimited:
            return True
        if verb == "write":
            return name in {event.__name__ for event in self.events_written}
        if verb == "write_bytes":  # an event that was encoded before
            return name in self.topics_written
        if verb == "read":
            return name in self.topics_read or name in WATCHED
        if verb == "consume":
            return name in self.consumes
        return verb == "transact" and self.is_transactional

    @property
    def events_written(self) -> tuple[type[Event], ...]:
        """Every program tells of itself (WorkerSeen on control)."""
        return (*self.writes, WorkerSeen)

    @property
    def topics_read(self) -> frozenset[str]:
        return frozenset(self.reads) | frozenset(self.consumes)

    @property
    def topics_written(self) -> frozenset[str]:
        return frozenset(TOPIC_BY_EVENT[event].name for event in self.events_written)


_MESSAGES = (RolloutStarted, TurnGenerated, ToolCalled, ToolObserved, AgentMessaged, RolloutEnded)
_EVERY_TOPIC = tuple(topic.name for topic in TOPICS)

ACCESS: tuple[Access, ...] = (
    Access(
        "feeder",
        reads=("tasks", "attempts", "weights", "snapshots"),
        writes=(TaskSubmitted, ControlIssued, SnapshotTaken),
    ),
    Access(
        "scheduler",
        reads=(
            *("tasks", "rollouts", "attempts", "groups", "batches", "weights", "serving", "control", "dead-letters"),
            "snapshots",
        ),
        # a member that is given up is closed by messages of its own, a group that was refused by a completion
        writes=(RolloutRequested, RolloutStarted, RolloutEnded, GroupCompleted, SnapshotTaken),
    ),
    Access(
        "rollouts",
        reads=(
            "tasks",
            "weights",
            "control",
            "runs",
            "messages",
        ),  # tasks: worlds; runs, messages: what is to be said again
        consumes={"rollouts": "rollouts"},
        writes=(*_MESSAGES, EventRejected),
    ),
    Access(
        "streams",
        consumes={"messages": "assemble", "trajectories": "score", "rewards": "group"},
        writes=(TrajectoryAssembled, AttemptEnded, RewardAssigned, GroupCompleted, EventRejected),
        keeps_tables=True,
    ),
    Access(
        "cut",
        reads=("batches", "snapshots", "runs"),  # runs: whether a fenced instance was taken over
        consumes={"groups": "cut"},
        writes=(BatchCut, SnapshotTaken, EventRejected),
        is_transactional=True,
    ),
    Access(
        "trainer",
        reads=("trajectories", "weights", "snapshots", "runs", "control"),  # control: versions that are held
        consumes={"batches": "trainer"},
        writes=(StepTaken, WeightsPublished, SnapshotTaken),
        is_transactional=True,
    ),
    Access("vllm", reads=("weights", "snapshots")),
    Access("reloader", reads=("weights", "control", "serving", "snapshots"), writes=(WeightsLoaded, SnapshotTaken)),
    Access(
        "traces",
        reads=_EVERY_TOPIC,  # to compare the store with the log
        consumes=dict.fromkeys(_EVERY_TOPIC, "traces"),
        writes=(EventRejected,),
        of_field=True,
    ),
    Access(
        OPERATOR,
        reads=_EVERY_TOPIC,
        writes=(RunStarted, RunResumed, RunEnded, TaskSubmitted, ControlIssued),
        of_field=True,
        makes_topics=True,
        is_unlimited=True,  # a dead letter of any topic is written there again
    ),
)

ACCESS_BY_PROGRAM: dict[str, Access] = {access.program: access for access in ACCESS}


def writers_of(topic: str) -> tuple[str, ...]:
    """Programs that write the topic, but for heartbeats, which all of them write."""
    return tuple(
        access.program for access in ACCESS if any(TOPIC_BY_EVENT[event].name == topic for event in access.writes)
    )


def readers_of(topic: str) -> tuple[str, ...]:
    return tuple(access.program for access in ACCESS if topic in access.topics_read)


def topics_page() -> str:
    """docs/topics.md."""
    return "\n".join([*_PAGE_HEAD, *map(_topic_row, TOPICS), "", *_PROGRAMS_HEAD, *map(_program_row, ACCESS), ""])


_PAGE_HEAD = (
    "# Topics and programs",
    "",
    "Generated from schemas/topics.py and schemas/programs.py: `python -m schemas.programs > docs/topics.md`. A test compares.",
    "The log refuses a program what this page does not say of it, and the ACLs are made from the same table.",
    "",
    "```",
    " tasks ─► rollouts ─► messages ─► trajectories ─► rewards ─► groups ─► batches ─► steps, weights ─► serving",
    " feeder   scheduler   rollouts    streams         streams    streams   cut        trainer           reloader",
    "```",
    "",
    "## Topics, in the order of the flow",
    "",
    "Every program writes heartbeats (WorkerSeen) to control; they are left out here.",
    "",
    "| topic | partitions | kept | events | written by | shared by a group | read whole by |",
    "|---|---|---|---|---|---|---|",
)
_PROGRAMS_HEAD = (
    "## Programs",
    "",
    "| program | group and transactional id | consumes | reads | writes |",
    "|---|---|---|---|---|",
)


def _topic_row(topic: Topic) -> str:
    kept = "newest of a key" if topic.compacted else "for ever"
    if topic.retention_milliseconds != FOREVER:
        kept = f"{topic.retention_milliseconds // (24 * 3600 * 1000)} days"
    consumers = [access.program for access in ACCESS if topic.name in access.consumes]
    readers = [access.program for access in ACCESS if topic.name in access.reads and topic.name not in access.consumes]
    return _row(
        topic.name,
        str(topic.partitions),
        kept,
        ", ".join(event.__name__ for event in topic.events),
        ", ".join(writers_of(topic.name)),
        ", ".join(consumers),
        ", ".join(readers),
    )


def _program_row(access: Access) -> str:
    name = access.program if access.of_field else f"{access.program}-RUN"
    return _row(
        access.program,
        (name if access.consumes else "none") + (", transactional" if access.is_transactional else ""),
        "all" if set(access.consumes) == set(_EVERY_TOPIC) else ", ".join(access.consumes),
        "all" if set(access.reads) == set(_EVERY_TOPIC) else ", ".join(access.reads),
        ", ".join(event.__name__ for event in access.writes) + ("; any event again" if access.is_unlimited else ""),
    )


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(topics_page(), end="")
