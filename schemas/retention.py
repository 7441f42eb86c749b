"""How long until retention removes what a consumer group has not read. Pure: time is an argument."""

from dataclasses import dataclass

from replayground.schemas.topics import FOREVER, Topic

_ALARM_SHARE = 0.25
"of a topic's retention: with less than this left, programs raise an alarm"


@dataclass(frozen=True, slots=True)
class Expiry:
    """How long a group still has to read the oldest message of a topic that it has not read."""

    group: str
    topic: str
    seconds_left: float
    "below zero: the broker may remove it at any moment"
    expired: int
    "messages that retention removed before the group read them"
    is_alarming: bool

    def __str__(self) -> str:
        if self.expired:
            return f"{self.group} lost {self.expired:,} messages of {self.topic}: retention removed them unread"
        hours = max(0.0, self.seconds_left / 3600)
        return f"{self.group} has {hours:,.1f} h left to read {self.topic} before retention removes what is unread"


def expiry_of(
    group: str, topic: Topic, oldest_unread_milliseconds: int | None, expired: int, now_milliseconds: int
) -> Expiry | None:
    """None when nothing can be lost: everything is read, or the topic has no retention by age."""
    # A compacted topic removes by key only, whatever its retention.ms.
    if topic.retention_milliseconds == FOREVER or topic.compacted:
        return None
    if oldest_unread_milliseconds is None and not expired:
        return None
    # Everything left is read, but messages were lost: the full retention remains for new ones.
    oldest = now_milliseconds if oldest_unread_milliseconds is None else oldest_unread_milliseconds
    left = oldest + topic.retention_milliseconds - now_milliseconds
    is_alarming = expired > 0 or left < _ALARM_SHARE * topic.retention_milliseconds
    return Expiry(group, topic.name, left / 1000, expired, is_alarming)
