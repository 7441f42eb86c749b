"""Refuses every use of the log that schemas.programs does not declare for a program, before it reaches the broker."""

import os
from collections.abc import Iterable
from pathlib import Path

from replayground.schemas.events import Event
from replayground.schemas.programs import ACCESS_BY_PROGRAM, Access, UndeclaredAccess, Use

RECORD_FOLDER = "REPLAYGROUND_ACCESS_RECORD"
"environment variable with a folder: each use of the log is recorded there, one file per program, for a test"


class AccessGuard:
    """Checks how one program uses the log. Each method raises UndeclaredAccess for a use that is not declared."""

    def __init__(self, program: str) -> None:
        assert program in ACCESS_BY_PROGRAM, f"{program!r} is no program of schemas.programs.ACCESS"
        self._access: Access = ACCESS_BY_PROGRAM[program]
        self._allowed: set[Use] = set()
        "uses that were checked before"

    def write(self, event: type[Event]) -> None:
        self._require(("write", event.__name__))

    def write_bytes(self, topic: str) -> None:
        self._require(("write_bytes", topic))

    def read(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._require(("read", topic))

    def consume(self, topics: Iterable[str], group: str) -> None:
        self._require_own("consumer group", group)
        for topic in topics:
            self._require(("consume", topic))

    def transact(self, name: str) -> None:
        self._require_own("transactional id", name)
        self._require(("transact", ""))

    def touches(self, topic: str) -> bool:
        """Whether the program reads or writes a topic."""
        access = self._access
        return access.is_unlimited or topic in access.topics_read | access.topics_written

    def _require(self, use: Use) -> None:
        # Checked on every append, so a use that is known to be allowed costs one look-up.
        if use in self._allowed:
            return
        if not self._access.declares(use):
            raise UndeclaredAccess(
                f"program {self._access.program}: {' '.join(use)} is not declared in schemas.programs.ACCESS"
            )
        self._allowed.add(use)
        # Tests find declarations that no program uses by these files (decision 0019).
        if folder := os.environ.get(RECORD_FOLDER):
            with (Path(folder) / self._access.program).open("a") as file:
                file.write(" ".join(use) + "\n")

    def _require_own(self, kind: str, name: str) -> None:
        if not self._access.owns(name):
            raise UndeclaredAccess(
                f"program {self._access.program}: {kind} {name!r} is not its own (Access.group_of in schemas.programs)"
            )
