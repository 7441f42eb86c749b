"""Secrets are taken out of text at its source: before an observation becomes an event, and before a line is logged.

What is on the log is kept for ever and copied to the trace store, pages, reports and exports, so a secret cannot be
taken back there. Two things are replaced: secrets that this program has read itself (schemas.secrets), wherever they
appear, and what has the form of a key. Only forms that nothing else has are among them: an observation that is changed
without need would be another observation.

Not covered: passwords of others without a form of their own, keys that are encoded or cut in two, and what an agent
writes in its own words.
"""

import re
from typing import Any

REDACTED = "[redacted]"
# A shorter one would be found by chance in other text.
_SECRET_CHARACTERS_MIN = 8
_KEYS = (
    r"\bsk-[\w-]{20,}",
    r"\bgh[pousr]_[A-Za-z0-9]{30,}",
    r"\bgithub_pat_\w{22,}",
    r"\bglpat-[\w-]{20,}",
    r"\bxox[abprs]-[\w-]{10,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    r"\bAIza[\w-]{35}",
    r"\bhf_[A-Za-z0-9]{30,}",
    r"\brp_[\w-]{43}",
    # JSON web tokens.
    r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,}",
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)",
)
# What stands before these shows that a secret follows; it is kept.
_AFTER = (
    r"(?<=://)[^\s/:@]{0,200}:[^\s/@]{1,500}(?=@)",
    r"(?i:\b(?:authorization|proxy-authorization)\s?[:=]\s?(?:bearer|basic|token)\s)\S+",
    r"(?i:\bbearer\s)[\w.~+/=-]{20,}",
)
_PATTERN = re.compile("|".join((*_KEYS, *_AFTER)), re.DOTALL)
# One of these is in every match: a search for plain text is far faster than the pattern.
_MARKS = (
    "sk-",
    "ghp_",
    "gho_",
    "ghu_",
    "ghs_",
    "ghr_",
    "github_pat_",
    "glpat-",
    "xox",
    "AKIA",
    "ASIA",
    "AIza",
    "hf_",
    "rp_",
    "eyJ",
    "-----BEGIN",
    "://",
)
_MARKS_ANY_CASE = ("authorization", "bearer")

_known: set[str] = set()


def remember(secret: str) -> None:
    """From now on this secret is replaced wherever it appears."""
    if len(secret) >= _SECRET_CHARACTERS_MIN:
        _known.add(secret)


def redacted(text: str) -> str:
    """The text with secrets replaced."""
    for secret in _known:
        text = text.replace(secret, REDACTED)
    if any(mark in text for mark in _MARKS) or any(mark in text.lower() for mark in _MARKS_ANY_CASE):
        text = _PATTERN.sub(_replacement, text)
    return text


def redacted_fields(value: Any) -> Any:
    """The same for every text in a structure of dicts and lists."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {name: redacted_fields(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_fields(part) for part in value]
    return value


def _replacement(found: re.Match[str]) -> str:
    text = found.group()
    if text.startswith("-----BEGIN"):
        return REDACTED
    # The name of the user in an address, and the words before a token.
    before, mark, _ = text.partition(":") if ":" in text and " " not in text else text.rpartition(" ")
    return f"{before}{mark}{REDACTED}" if mark else REDACTED
