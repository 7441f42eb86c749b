"""serving: which weights exist and which are served. Each topic has one partition, so its order is the same for all."""

from msgspec import Struct

from schemas.events import WeightsLoaded, WeightsPublished

SERVERS_KEPT = 1024
"servers remembered, those that were heard of last; names of servers that are replaced do not come back"


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
        self._versions: dict[str, int] = {}
        "what each server serves, verified; the one heard of last stands last"

    def note_published(self, event: WeightsPublished) -> None:
        self.version = max(self.version, event.version)

    def note_loaded(self, event: WeightsLoaded) -> None:
        self._versions.pop(event.server, None)
        if event.refusal is not None:
            return  # what it serves now is not known to be verified
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
