"""Secrets by reference: settings, run.json and the log say where a password is, and never hold the password."""

import os
from pathlib import Path

from replayground.schemas.errors import BadInput
from replayground.schemas.redaction import remember


def for_program(text: str, program: str) -> str:
    """A field of [log.security] for one program: `{program}` is replaced by its name."""
    return text.replace("{program}", program)


def read_secret(reference: str, program: str, field: str) -> str:
    """Reads the secret behind `env:NAME` or `file:PATH`. Raises BadInput, which names the field and what is missing."""
    secret = _read(reference, program, field)
    # Wherever it turns up in a text of this program, it is taken out.
    remember(secret)
    return secret


def _read(reference: str, program: str, field: str) -> str:
    kind, _, place = for_program(reference, program).partition(":")
    if kind == "env" and place:
        # An empty variable counts as missing: an empty password would only fail later, at the broker.
        secret = os.environ.get(place, "")
        if not secret:
            raise BadInput(f"{field} is {kind}:{place}, and the environment has no variable {place}: set it")
        return secret
    if kind == "file" and place:
        return _first_line(Path(place), field)
    # The message must not repeat the reference: it may be the secret itself, written here by mistake.
    raise BadInput(f"{field} must be a reference to a secret, env:NAME or file:PATH, and not the secret itself")


def _first_line(path: Path, field: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{field} is file:{path}, which cannot be read: {error}") from error
    # Only the first line counts: editors end a file with a newline, and remarks may follow.
    if not lines or not lines[0]:
        raise BadInput(f"{field} is file:{path}, which has no first line: write the secret there")
    return lines[0]
