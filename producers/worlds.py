"""Worlds of requests: the world of a task is on the log once, in its TaskSubmitted, and requests refer to it.

A worker reads the worlds of all requests of one poll together, in the thread that polls, and caches those used last:
the members of a group have the same world.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from replayground.schemas.errors import Undecodable
from replayground.schemas.events import Address, Event, RolloutRequested, TaskSubmitted
from replayground.streams.log.protocol import Delivery, Log

WORLDS_BYTES_KEPT = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PlayableRequest:
    """A request to be played, with its world."""

    delivery: Delivery
    request: RolloutRequested | None
    "None when the delivery is not a request"
    world_missing: str | None = None
    "why the world cannot be read; None if it was, or the task has it inline"


class Worlds:
    """Reads and caches worlds. Belongs to one thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: OrderedDict[str, str] = OrderedDict()
        "worlds by sha256, the most recently used one last"
        self._bytes = 0

    def fill(self, deliveries: Iterable[Delivery]) -> list[PlayableRequest]:
        """The same requests with their worlds. Blocks. Raises LogUnavailable."""
        # By hash: members of one group in a poll need one read.
        found = [(delivery, delivery.event) for delivery in deliveries]
        requests = [event for _, event in found if isinstance(event, RolloutRequested)]
        worlds = self._read({request.task.world_hash: request.world_at for request in requests if _refers(request)})
        return [
            self._fill_one(delivery, event, worlds)
            if isinstance(event, RolloutRequested)
            else PlayableRequest(delivery, None)
            for delivery, event in found
        ]

    def _fill_one(self, delivery: Delivery, request: RolloutRequested, worlds: dict[str, str]) -> PlayableRequest:
        if not _refers(request):
            return PlayableRequest(delivery, request)
        world = worlds.get(request.task.world_hash)
        if world is None:
            reason = f"no task with world {request.task.world_hash[:12]} stands at {request.world_at}"
            return PlayableRequest(delivery, request, reason)
        return PlayableRequest(
            delivery, msgspec.structs.replace(request, task=msgspec.structs.replace(request.task, world=world))
        )

    def _read(self, wanted: dict[str, Address | None]) -> dict[str, str]:
        """Worlds by hash; those that cannot be read are left out."""
        worlds: dict[str, str] = {}
        for sha256 in wanted.keys() & self._kept.keys():
            self._kept.move_to_end(sha256)
            worlds[sha256] = self._kept[sha256]
        places = {sha256: place for sha256, place in wanted.items() if sha256 not in worlds and place is not None}
        for sha256, event in zip(places, self._events_at(list(places.values())), strict=True):
            # The address comes from a message. Only the hash proves that this is the world that was meant.
            if isinstance(event, TaskSubmitted) and hashlib.sha256(event.task.world.encode()).hexdigest() == sha256:
                worlds[sha256] = event.task.world
                self._keep(sha256, event.task.world)
        return worlds

    def _events_at(self, addresses: list[Address]) -> list[Event | None]:
        if not addresses:
            return []
        try:
            return list(self._log.read_at(addresses))
        # read_at fails as a whole: one bad address must not cost the other requests their worlds.
        except (LookupError, Undecodable):
            if len(addresses) == 1:
                return [None]
            return [event for address in addresses for event in self._events_at([address])]

    def _keep(self, sha256: str, world: str) -> None:
        self._kept[sha256] = world
        self._bytes += len(world)
        # The newest one stays even if it alone is over the limit: other members of its group may follow.
        while self._bytes > WORLDS_BYTES_KEPT and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._bytes -= len(oldest)


def _refers(request: RolloutRequested) -> bool:
    return not request.task.world and bool(request.task.world_hash)
