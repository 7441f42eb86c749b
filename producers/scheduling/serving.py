"""serving: which weight versions exist and which are served.

Each of the two topics has one partition, so every reader sees the same order.
"""

from msgspec import Struct

from replayground.schemas.events import WeightsLoaded, WeightsPublished

SERVERS_KEPT = 1024
"how many servers are remembered, those with the newest WeightsLoaded; replaced servers never report again"


class ServingState(Struct, frozen=True):
    version: int
    version_served_max: int
    versions: list[tuple[str, int]]


class Serving:
    """Pure."""

    def __init__(self) -> None:
        self.version = -1
        "newest published version"
        self.version_served_max = -1
        "newest version that any server has served, verified"
        self._versions: dict[str, int] = {}
        "verified version by server; the server with the newest report comes last"

    def note_published(self, event: WeightsPublished) -> None:
        self.version = max(self.version, event.version)

    def note_loaded(self, event: WeightsLoaded) -> None:
        # Removed first, so that the server comes last in the dict again.
        self._versions.pop(event.server, None)
        if event.refusal is not None:
            # The server stays paused: it must not count as serving its old version.
            return
        self._versions[event.server] = event.version
        self.version_served_max = max(self.version_served_max, event.version)
        if len(self._versions) > SERVERS_KEPT:
            del self._versions[next(iter(self._versions))]

    def serves(self, version: int) -> bool:
        return version in self._versions.values()

    def state(self) -> ServingState:
        return ServingState(self.version, self.version_served_max, list(self._versions.items()))

    def restore(self, state: ServingState) -> None:
        self.version = state.version
        self.version_served_max = state.version_served_max
        self._versions = dict(state.versions)
