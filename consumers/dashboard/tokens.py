"""Tokens of the people who may use the page, in a file: who, with which role, and a hash of the token itself.

A token is 256 random bits, so a plain SHA-256 hides it: there is nothing to guess. It is shown once, when it is made. The
file is read again whenever it changes, so a token that is revoked stops working at its next use.
"""

import hashlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from replayground.schemas.errors import BadInput

type Role = Literal["viewer", "operator", "admin"]
ROLES: tuple[Role, ...] = get_args(Role.__value__)
"each may do what those before it may: look and ask, act on runs and records, manage access"
_BEGINNING = "rp_"
_NAME_CHARACTERS_MAX = 64


class Person(Struct, frozen=True):
    """Who asks."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        return ROLES.index(self.role) >= ROLES.index(role)


LOCAL = Person("local", "admin")
"whoever reaches a page that listens on loopback alone"


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token as it is stored."""

    name: str
    role: Role
    sha256: str
    made_at: int
    "microseconds since the epoch"
    revoked_at: int = 0
    "0 = it works"


class TokenFile:
    """The tokens in one file. Written by one command at a time, read by the traces program."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._by_hash: dict[str, Token] = {}

    def tokens(self) -> list[Token]:
        """All tokens, revoked ones too. Raises BadInput when the file is damaged."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[Token])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise BadInput(f"the tokens in {self._path} cannot be read: {error}") from error

    def add(self, name: str, role: Role, now: int) -> str:
        """Makes a token and returns it; it cannot be read again. Raises BadInput."""
        if not name.isprintable() or not 0 < len(name) <= _NAME_CHARACTERS_MAX:
            raise BadInput(f"a token is named by 1 to {_NAME_CHARACTERS_MAX} printable characters")
        tokens = self.tokens()
        if any(token.name == name and not token.revoked_at for token in tokens):
            raise BadInput(f"{name} has a token: revoke it first, or choose another name")
        secret = _BEGINNING + secrets.token_urlsafe(32)
        self._write([*tokens, Token(name=name, role=role, sha256=_hash(secret), made_at=now)])
        return secret

    def revoke(self, name: str, now: int) -> None:
        """Raises BadInput when nobody of this name has a token that works."""
        tokens = self.tokens()
        if not any(token.name == name and not token.revoked_at for token in tokens):
            raise BadInput(f"{name} has no token: `replayground tokens list` shows them")
        self._write([_revoked(token, now) if token.name == name else token for token in tokens])

    def find(self, secret: str) -> Person | None:
        """Whose token this is; None for an unknown or revoked one."""
        self._refresh()
        token = self._by_hash.get(_hash(secret))
        return None if token is None else Person(token.name, token.role)

    def still(self, person: Person) -> bool:
        """Whether somebody who came in by a token still may: it was not revoked meanwhile."""
        self._refresh()
        return any(Person(token.name, token.role) == person for token in self._by_hash.values())

    def _refresh(self) -> None:
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            self._seen, self._by_hash = None, {}
            return
        # Replaced as a whole at each change: a new inode.
        seen = (now.st_ino, now.st_mtime_ns, now.st_size)
        if seen != self._seen:
            self._by_hash = {token.sha256: token for token in self.tokens() if not token.revoked_at}
            self._seen = seen

    def _write(self, tokens: list[Token]) -> None:
        # mkstemp makes it readable for its owner alone.
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=".tokens-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(tokens)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, self._path)


def _revoked(token: Token, now: int) -> Token:
    return token if token.revoked_at else msgspec.structs.replace(token, revoked_at=now)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
