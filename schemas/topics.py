"""THE MAP: every topic in the order of the flow and what stands on it. Who writes and reads it: schemas.programs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from schemas import events
from schemas.events import Event

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
    "the one stage that turns what cannot be read into an EventRejected; others pass it over (of several runs: decision 0023)"
    extra_settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        """Broker settings of the topic."""
        return {
            "cleanup.policy": "compact" if self.compacted else "delete",
            "retention.ms": str(self.retention_milliseconds),
            "retention.bytes": str(FOREVER),  # nothing is forgotten for want of room: an age can be warned of
            "compression.type": "producer",
            **self.extra_settings,
        }


COMPACTED_SOON = {
    "segment.bytes": str(1024 * 1024),  # the least that Kafka 4 allows
    "segment.ms": "10000",
    "min.cleanable.dirty.ratio": "0.05",
    "max.compaction.lag.ms": "20000",
    # longer than a restore takes: a tombstone that is removed while it is on its way would leave the older state behind
    "delete.retention.ms": "30000",
}
"""Settings of a topic that holds states. Only closed segments are compacted, and what is not compacted, tombstones among it,
is read at every restart: with these settings less than a minute of changes, with the broker's defaults (a segment of 1 GiB
or a week, tombstones for a day) the whole history of every key."""


def _field(name: str) -> Callable[[Event], str]:
    """Key by a field of the envelope; a message without it has no place on the topic."""

    def key(event: Event) -> str:
        value = getattr(event.meta, name)
        if value is None:
            raise ValueError(f"{type(event).__name__} {event.meta.id} has no {name} to be keyed by")
        return str(value)

    return key


def weights_key(run_id: str, version: int | str) -> bytes:
    """The key of a weight version on topic weights; with "" as version, what the keys of the run begin with."""
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
    return f"{event.meta.run_id}:{event.program}"


TOPICS: tuple[Topic, ...] = (
    Topic("runs", (events.RunStarted, events.RunResumed, events.RunEnded), _field("run_id"), partitions=1),
    Topic("tasks", (events.TaskSubmitted,), _field("task_id")),
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
    Topic("trajectories", (events.TrajectoryAssembled,), _field("group_id"), rejected_by="score"),
    Topic("attempts", (events.AttemptEnded,), _field("group_id")),
    Topic("rewards", (events.RewardAssigned,), _field("group_id"), rejected_by="group"),
    Topic("groups", (events.GroupCompleted,), _field("group_id"), rejected_by="cut"),
    Topic("batches", (events.BatchCut,), _field("run_id"), partitions=1),
    Topic("steps", (events.StepTaken,), _field("run_id"), partitions=1),
    Topic("weights", (events.WeightsPublished,), _weights_key, partitions=1, compacted=True),
    Topic("serving", (events.WeightsLoaded,), _server_key, partitions=1),
    Topic(
        "control",
        (events.ControlIssued, events.WorkerSeen),
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
    Topic("dead-letters", (events.EventRejected,), _origin_key, partitions=1, rejected_by=NOBODY),
)

TOPIC_BY_NAME: dict[str, Topic] = {topic.name: topic for topic in TOPICS}
TOPIC_BY_EVENT: dict[type[Event], Topic] = {kind: topic for topic in TOPICS for kind in topic.events}


def topic_of(event: Event) -> Topic:
    """The topic an event belongs on."""
    return TOPIC_BY_EVENT[type(event)]
