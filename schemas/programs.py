"""Who reads and writes which topics: one declaration for each program.

The log that a program opens (streams.log.connect) refuses what is not declared here, so a wrong declaration fails in
the first test that runs the program. ACLs (schemas.acls), docs/topics.md, the lag view and the flow on the web page are
made from the same table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from replayground.schemas.events import (
    AgentMessaged,
    AlarmRaised,
    AlertChanged,
    AttemptEnded,
    BatchCut,
    ControlIssued,
    Event,
    EventRejected,
    GroupCompleted,
    JudgementMade,
    OperatorActed,
    QuerySaved,
    RedriveRequested,
    ReplayRequested,
    RequestReported,
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
    TrajectoriesSelected,
    TrajectoryAssembled,
    TurnGenerated,
    VerdictGiven,
    WeightsLoaded,
    WeightsPublished,
    WorkerSeen,
)
from replayground.schemas.topics import FOREVER, TOPIC_BY_EVENT, TOPICS, Topic

OPERATOR = "operator"
"a person at the command line, or the API"

Use = tuple[str, str]
"""One use of the log: ("write", event class), ("write_bytes", topic), ("read", topic) without a group,
("consume", topic) with a group, ("transact", "")."""

WATCHED = tuple(topic.name for topic in TOPICS if topic.retention_milliseconds != FOREVER)
"""Topics with retention by age. Every program checks how much time is left to read them (deploy.serve): for that it
reads their oldest unread event and asks for the positions of all groups."""


class UndeclaredAccess(AssertionError):
    """A program uses the log in a way that the table does not declare: an error in the program or in the table."""


@dataclass(frozen=True)
class Access:
    """How one program uses the log."""

    program: str
    reads: tuple[str, ...] = ()
    "topics it reads without a group: every instance reads all of them"
    consumes: Mapping[str, str] = field(default_factory=dict)
    "topics that its consumer group reads, and the stage that takes each of them"
    writes: tuple[type[Event], ...] = ()
    is_transactional: bool = False
    "commits events and consumed positions in one transaction, under a transactional id"
    keeps_tables: bool = False
    "has changelog topics of its own, named after its group"
    of_field: bool = False
    "one for all runs of the field, instead of one for each run"
    is_optional: bool = False
    "runs only for jobs that need it: elsewhere its group has no position, and is not behind"
    makes_topics: bool = False
    is_unlimited: bool = False
    "no use of the log is refused"

    def group_of(self, run_id: str) -> str:
        """Its consumer group, and the name of its transactional id."""
        return self.program if self.of_field else f"{self.program}-{run_id}"

    def owns(self, name: str) -> bool:
        """Whether a consumer group or transactional id belongs to this program."""
        # The dash ends the name of the program: a name that only begins alike is not its own.
        return self.is_unlimited or name.startswith(f"{self.program}-") or (self.of_field and name == self.program)

    def declares(self, use: Use) -> bool:
        verb, name = use
        if self.is_unlimited:
            return True
        if verb == "write":
            return name in {event.__name__ for event in self.events_written}
        if verb == "write_bytes":  # an event that was encoded before
            return name in self.topics_written
        # Every program may read WATCHED: the harness measures there how much time retention leaves.
        if verb == "read":
            return name in self.topics_read or name in WATCHED
        if verb == "consume":
            return name in self.consumes
        return verb == "transact" and self.is_transactional

    @property
    def events_written(self) -> tuple[type[Event], ...]:
        """`writes` and the heartbeats (WorkerSeen) that every program writes."""
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
        # It closes a member that is given up by a start and an end, and a refused group by a GroupCompleted.
        writes=(RolloutRequested, RolloutStarted, RolloutEnded, GroupCompleted, SnapshotTaken),
    ),
    Access(
        "rollouts",
        # tasks: worlds of tasks; runs and messages: the turns of a run that is replayed
        reads=(
            "tasks",
            "weights",
            "control",
            "runs",
            "messages",
        ),
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
        "judge",
        consumes={"trajectories": "judge", "judgements": "judge"},
        writes=(JudgementMade, RewardAssigned, EventRejected),
        is_optional=True,
    ),
    Access(
        "cut",
        # runs: to find out, when fenced, whether a newer start took the run over (streams.log.takeover)
        reads=("batches", "snapshots", "runs"),
        consumes={"groups": "cut"},
        writes=(BatchCut, SnapshotTaken, EventRejected),
        is_transactional=True,
    ),
    Access(
        "trainer",
        # trajectories: a batch holds addresses; runs: as in cut; control: versions that are held, and the resume after
        # a refused step
        reads=("trajectories", "weights", "snapshots", "runs", "control"),
        consumes={"batches": "trainer"},
        # ControlIssued: a step that is refused pauses the run
        writes=(StepTaken, WeightsPublished, SnapshotTaken, ControlIssued),
        is_transactional=True,
    ),
    Access(
        "replay",
        # rewards: the old ones, to compare; runs: whether a source that is followed has ended
        reads=("trajectories", "rewards", "groups", "batches", "weights", "snapshots", "selections", "runs"),
        writes=(RewardAssigned, GroupCompleted, BatchCut, SnapshotTaken),
        is_transactional=True,
    ),
    Access("vllm", reads=("weights", "snapshots")),
    Access("reloader", reads=("weights", "control", "serving", "snapshots"), writes=(WeightsLoaded, SnapshotTaken)),
    Access(
        "traces",
        # Without the group too: to compare the trace store with the log.
        reads=_EVERY_TOPIC,
        consumes=dict.fromkeys(_EVERY_TOPIC, "traces"),
        # What people decide on the page, in their name (decision 0033), and what became of their alerts.
        writes=(
            *(EventRejected, VerdictGiven, QuerySaved, AlertChanged, ReplayRequested, RedriveRequested),
            OperatorActed,
        ),
        of_field=True,
    ),
    Access(
        OPERATOR,
        reads=_EVERY_TOPIC,
        # AlarmRaised: the monitor of a run
        writes=(
            *(RunStarted, RunResumed, RunEnded, TaskSubmitted, TrajectoriesSelected, ControlIssued, VerdictGiven),
            *(RequestReported, OperatorActed, AlarmRaised),
        ),
        of_field=True,
        makes_topics=True,
        # Redriving a dead letter writes it to its original topic, whichever that is.
        is_unlimited=True,
    ),
)

ACCESS_BY_PROGRAM: dict[str, Access] = {access.program: access for access in ACCESS}


def writers_of(topic: str) -> tuple[str, ...]:
    """Programs that write the topic. Heartbeats do not count: all programs write them."""
    return tuple(
        access.program for access in ACCESS if any(TOPIC_BY_EVENT[event].name == topic for event in access.writes)
    )


def readers_of(topic: str) -> tuple[str, ...]:
    """Programs that read the topic, with or without a group. The watching of WATCHED does not count."""
    return tuple(access.program for access in ACCESS if topic in access.topics_read)


def topics_page() -> str:
    """The text of docs/topics.md."""
    return "\n".join([*_PAGE_HEAD, *map(_topic_row, TOPICS), "", *_PROGRAMS_HEAD, *map(_program_row, ACCESS), ""])


_PAGE_HEAD = (
    "# Topics and programs",
    "",
    "Generated from schemas/topics.py and schemas/programs.py by `python -m replayground.schemas.programs`; a test compares.",
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
