"""The map of topics: every topic with its events, in the order of the flow. Writers and readers: schemas.programs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from replayground.schemas import events
from replayground.schemas.events import Event

PARTITIONS = 4
"Topics from tasks to groups have the same count, so that one key is on the same partition number in each of them."

_DAY_MILLISECONDS = 24 * 3600 * 1000
FOREVER = -1
NOBODY = "nobody"


@dataclass(frozen=True)
class Topic:
    name: str
    events: tuple[type[Event], ...]
    key: Callable[[Event], str]
    partitions: int = PARTITIONS
    compacted: bool = False
    retention_milliseconds: int = FOREVER
    rejected_by: str = "traces"
    "the stage that writes an EventRejected for an undecodable message; others skip it (several runs: decision 0023)"
    extra_settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """Broker settings of the topic."""
        return {
            "cleanup.policy": "compact" if self.compacted else "delete",
            "retention.ms": str(self.retention_milliseconds),
            # Retention by age only: programs warn before an unread message expires, which a size limit would not allow.
            "retention.bytes": str(FOREVER),
            # Stored as the producers compressed it, so the broker does not compress again.
            "compression.type": "producer",
            **self.extra_settings,
        }


COMPACTED_SOON = {
    # The smallest segment that Kafka 4 allows.
    "segment.bytes": str(1024 * 1024),
    "segment.ms": "10000",
    "min.cleanable.dirty.ratio": "0.05",
    "max.compaction.lag.ms": "20000",
    # Longer than a restore takes: a reader that misses a removed tombstone would keep the older state of the key.
    "delete.retention.ms": "30000",
}
"""Settings of a topic that holds states. Kafka compacts closed segments only, and a restart reads all that is not
compacted, tombstones included. With these settings that is less than a minute of changes; with the broker's defaults
(a segment of 1 GiB or a week, tombstones for a day) it is the whole history of every key."""


def _field(name: str) -> Callable[[Event], str]:
    """Keys by a field of the envelope. The key function raises ValueError for an event without it."""

    def key(event: Event) -> str:
        value = getattr(event.meta, name)
        # A missing key would spread the events of one rollout or group over partitions, in no order.
        if value is None:
            raise ValueError(f"{type(event).__name__} {event.meta.id} has no {name}, which is its key")
        return str(value)

    return key


def weights_key(run_id: str, version: int | str) -> bytes:
    """The key of a weight version on topic weights; with "" as version, the prefix of all keys of the run."""
    # The topic is compacted: without the run in the key, one run would replace the versions of another.
    return f"{run_id}:{version}".encode()


def _weights_key(event: Event) -> str:
    assert isinstance(event, events.WeightsPublished)
    return weights_key(event.meta.run_id, event.version).decode()


def _server_key(event: Event) -> str:
    assert isinstance(event, events.WeightsLoaded)
    return event.server


def _control_key(event: Event) -> str:
    return event.worker if isinstance(event, events.WorkerSeen) else event.meta.run_id


def _origin_key(event: Event) -> str:
    assert isinstance(event, events.EventRejected)
    return (event.original_key or b"").decode("utf-8", "replace")


def _snapshot_key(event: Event) -> str:
    assert isinstance(event, events.SnapshotTaken)
    # The topic is compacted: the newest snapshot of each program of each run stays.
    return f"{event.meta.run_id}:{event.program}"


TOPICS: tuple[Topic, ...] = (
    # One partition: the order decides which of two starts with the same number counts (decision 0020).
    Topic("runs", (events.RunStarted, events.RunResumed, events.RunEnded), _field("run_id"), partitions=1),
    Topic("tasks", (events.TaskSubmitted,), _field("task_id")),
    # Keyed by trajectory from here to messages: the messages of a rollout stay in order on one partition.
    Topic("rollouts", (events.RolloutRequested,), _field("trajectory_id"), rejected_by="rollouts"),
    Topic(
        "messages",
        (
            events.RolloutStarted,
            events.TurnGenerated,
            events.ToolCalled,
            events.ToolObserved,
            events.AgentMessaged,
            events.RolloutEnded,
        ),
        _field("trajectory_id"),
        rejected_by="assemble",
    ),
    # Keyed by group from here to groups: a group is scored and completed in order by one worker.
    Topic("trajectories", (events.TrajectoryAssembled,), _field("group_id"), rejected_by="score"),
    Topic("attempts", (events.AttemptEnded,), _field("group_id")),
    Topic("judgements", (events.JudgementMade, events.VerdictGiven), _field("group_id")),
    Topic("rewards", (events.RewardAssigned,), _field("group_id"), rejected_by="group"),
    Topic("groups", (events.GroupCompleted,), _field("group_id"), rejected_by="cut"),
    # One partition: people look selections up by name, and the newest of a name counts.
    Topic("selections", (events.TrajectoriesSelected,), _field("run_id"), partitions=1),
    # What people did to the field, and what watches it. One partition: the newest event of a name or a request counts.
    Topic(
        "operations",
        (
            *(events.QuerySaved, events.AlertChanged, events.ReplayRequested, events.RedriveRequested),
            *(events.RequestReported, events.OperatorActed),
        ),
        _field("run_id"),
        partitions=1,
    ),
    # One partition from here on: its order is the order of training.
    Topic("batches", (events.BatchCut,), _field("run_id"), partitions=1),
    Topic("steps", (events.StepTaken,), _field("run_id"), partitions=1),
    # Compacted, so that a tombstone removes a version; its key has one version only.
    Topic("weights", (events.WeightsPublished,), _weights_key, partitions=1, compacted=True),
    Topic("serving", (events.WeightsLoaded,), _server_key, partitions=1),
    # The one topic that forgets by age: every program writes heartbeats here all the time.
    Topic(
        "control",
        (events.ControlIssued, events.AlarmRaised, events.WorkerSeen),
        _control_key,
        partitions=1,
        retention_milliseconds=30 * _DAY_MILLISECONDS,
    ),
    Topic(
        "snapshots",
        (events.SnapshotTaken,),
        _snapshot_key,
        partitions=1,
        compacted=True,
        extra_settings=COMPACTED_SOON,
    ),
    # Nobody rejects here: the reject of an unreadable dead letter would be a dead letter again.
    Topic("dead-letters", (events.EventRejected,), _origin_key, partitions=1, rejected_by=NOBODY),
)

TOPIC_BY_NAME: dict[str, Topic] = {topic.name: topic for topic in TOPICS}
TOPIC_BY_EVENT: dict[type[Event], Topic] = {kind: topic for topic in TOPICS for kind in topic.events}


def topic_of(event: Event) -> Topic:
    """The topic of an event."""
    return TOPIC_BY_EVENT[type(event)]
