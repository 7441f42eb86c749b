"""The flow of a run for the page: every topic, its writers, readers and stage. Derived from schemas.programs."""

from dataclasses import dataclass

from replayground.schemas.programs import ACCESS
from replayground.schemas.topics import TOPICS, Topic


@dataclass(frozen=True)
class FlowTopic:
    """One topic, in the order of the flow."""

    topic: str
    events: tuple[str, ...]
    "kinds of events on it"
    writers: tuple[str, ...]
    "programs of a run that write it"
    readers: tuple[str, ...]
    "programs of a run that read it, with or without a group"
    stage: str | None
    """the stage that consumes it in a group and may lag, the first of several that every run has; None when it is only
    read without a group"""


def _flow_topic(topic: Topic) -> FlowTopic:
    # Programs of the field (traces and the operator) read every topic, so showing them would say nothing.
    of_run = [access for access in ACCESS if not access.of_field]
    # A program that only some runs have comes last: the station must show a stage that is there.
    stages = [
        access.consumes[topic.name]
        for access in sorted(of_run, key=lambda access: access.is_optional)
        if topic.name in access.consumes
    ]
    return FlowTopic(
        topic=topic.name,
        events=tuple(event.__name__ for event in topic.events),
        writers=tuple(access.program for access in of_run if topic.name in access.topics_written),
        readers=tuple(access.program for access in of_run if topic.name in access.topics_read),
        stage=stages[0] if stages else None,
    )


FLOW: tuple[FlowTopic, ...] = tuple(_flow_topic(topic) for topic in TOPICS)
