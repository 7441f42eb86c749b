"""Holds a program to its declaration: what schemas.programs does not say of it is refused before it reaches the broker."""

import os
from collections.abc import Iterable
from pathlib import Path

from schemas.events import Event
from schemas.programs import ACCESS_BY_PROGRAM, Access, UndeclaredAccess, Use

RECORD_FOLDER = "REPLAYGROUND_ACCESS_RECORD"
"names a folder: every use of the log is noted there, a file a program, so that a test can compare it with the table"


class AccessGuard:
    """The uses of the log by one program. Each method raises UndeclaredAccess for a use that the table does not have."""

    def __init__(self, program: str) -> None:
        assert program in ACCESS_BY_PROGRAM, f"{program!r} is no program of schemas.programs.ACCESS"
        self._access: Access = ACCESS_BY_PROGRAM[program]
        self._allowed: set[Use] = set()
        "what was looked up once"

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
        """Whether the program has anything to do with a topic."""
        access = self._access
        return access.is_unlimited or topic in access.topics_read | access.topics_written

    def _require(self, use: Use) -> None:
        if use in self._allowed:
            return
        if not self._access.declares(use):
            raise UndeclaredAccess(
                f"program {self._access.program}: {' '.join(use)} is not declared in schemas.programs.ACCESS"
            )
        self._allowed.add(use)
        if folder := os.environ.get(RECORD_FOLDER):
            with (Path(folder) / self._access.program).open("a") as file:
                file.write(" ".join(use) + "\n")

    def _require_own(self, kind: str, name: str) -> None:
        if not self._access.owns(name):
            raise UndeclaredAccess(
                f"program {self._access.program}: {kind} {name!r} is not its own (Access.group_of in schemas.programs)"
            )
