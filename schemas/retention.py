"""When the broker forgets what nobody has read yet. Pure: time is an argument, the map says how long a topic remembers."""

from dataclasses import dataclass

from schemas.topics import FOREVER, Topic

_ALARM_SHARE = 0.25
"of a topic's retention: with less than this left, somebody has to hear of it"


@dataclass(frozen=True, slots=True)
class Expiry:
    """How long a group still has to read the oldest message of a topic that it has not read."""

    group: str
    topic: str
    seconds_left: float
    "below zero: the broker may forget it at any moment"
    expired: int
    "messages that are forgotten already, unread"
    is_alarming: bool

    def __str__(self) -> str:
        if self.expired:
            return f"{self.group} lost {self.expired:,} messages of {self.topic}: the broker forgot them unread"
        hours = max(0.0, self.seconds_left / 3600)
        return f"{self.group} has {hours:,.1f} h left to read {self.topic} before the broker forgets what is unread"


def expiry_of(
    group: str, topic: Topic, oldest_unread_milliseconds: int | None, expired: int, now_milliseconds: int
) -> Expiry | None:
    """None when nothing can be lost: all is read, or the topic forgets nothing. A compacted topic forgets by key alone."""
    if topic.retention_milliseconds == FOREVER or topic.compacted:
        return None
    if oldest_unread_milliseconds is None and not expired:
        return None
    oldest = now_milliseconds if oldest_unread_milliseconds is None else oldest_unread_milliseconds
    left = oldest + topic.retention_milliseconds - now_milliseconds
    is_alarming = expired > 0 or left < _ALARM_SHARE * topic.retention_milliseconds
    return Expiry(group, topic.name, left / 1000, expired, is_alarming)
