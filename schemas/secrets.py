"""Secrets by reference: settings, run.json and the log hold where a password is, never the password."""

import os
from pathlib import Path

from schemas.errors import BadInput


def for_program(text: str, program: str) -> str:
    """A field of [log.security] as it holds for one program: `{program}` is replaced by its name."""
    return text.replace("{program}", program)


def read_secret(reference: str, program: str, field: str) -> str:
    """The secret behind `env:NAME` or `file:PATH`. Raises BadInput, which names the field and what is missing."""
    kind, _, place = for_program(reference, program).partition(":")
    if kind == "env" and place:
        secret = os.environ.get(place, "")
        if not secret:
            raise BadInput(f"{field} is {kind}:{place}, and the environment has no variable {place}: set it")
        return secret
    if kind == "file" and place:
        return _first_line(Path(place), field)
    raise BadInput(f"{field} must say where the secret is, env:NAME or file:PATH: a secret itself may not stand there")


def _first_line(path: Path, field: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{field} is file:{path}, which cannot be read: {error}") from error
    if not lines or not lines[0]:
        raise BadInput(f"{field} is file:{path}, which has no first line: write the secret there")
    return lines[0]
