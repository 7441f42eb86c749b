"""Secrets leave a text before it is written down; what is no secret stays as it is."""

import pytest

from replayground.schemas.redaction import REDACTED, redacted, redacted_fields, remember

# Put together here, so that no scanner of repositories takes them for real ones.
SECRETS = (
    "sk-" + "proj-" + "a1B2" * 8,
    "gh" + "p_" + "A" * 36,
    "github" + "_pat_" + "x" * 30,
    "glpat" + "-" + "y" * 20,
    "xox" + "b-" + "1234567890-abc",
    "AK" + "IA" + "ABCDEFGH12345678",
    "AI" + "za" + "z" * 35,
    "hf" + "_" + "Q" * 34,
    "rp" + "_" + "k" * 43,
    "ey" + "JhbGciOiJIUzI1NiJ9." + "e30" * 5 + "." + "s" * 20,
    "-----BEGIN " + "RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    "-----BEGIN " + "PRIVATE KEY-----\nMIIE cut off",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_keys_are_taken_out(secret: str) -> None:
    assert secret not in redacted(f"error: key {secret}")
    assert redacted(f"error: key {secret}").startswith("error: key ")
    assert REDACTED in redacted(f'{{"key": "{secret}"}}')


def test_what_stands_before_a_secret_is_kept() -> None:
    assert redacted("clickhouse://bob:hunter2@host:8123/db") == f"clickhouse://bob:{REDACTED}@host:8123/db"
    assert redacted("Authorization: Bearer abc.def") == f"Authorization: Bearer {REDACTED}"
    assert redacted("authorization: Basic dXNlcjpwYXNz") == f"authorization: Basic {REDACTED}"


def test_secrets_that_were_read_are_taken_out_wherever_they_are() -> None:
    remember("correct horse battery")
    remember("short")
    assert redacted("it is correct horse battery!") == f"it is {REDACTED}!"
    assert redacted("a short text") == "a short text"
    assert redacted_fields({"a": ["correct horse battery", 1], "b": None}) == {"a": [REDACTED, 1], "b": None}


@pytest.mark.parametrize(
    "text",
    [
        "Take the stock of panel, times 7 plus 12.",
        "https://example.org/a?b=c#d and http://127.0.0.1:8200/?run=x",
        "risk-averse desk-bound, ask-me-anything, rpm_limit, ghost, hf_hub",
        "the bearer of this letter",
        "sha256:" + "0123456789abcdef" * 4,
        "2026-07-13T09:15:00Z 018f6b1e-7b7a-7000-8000-000000000000",
        "user@example.org wrote to bob@there: hello",
        "def f(x):\n    return x['key']",
        "sk-12",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redacted(text) == text
