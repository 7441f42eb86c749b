"""The generated reference and the site: up to date, complete, and built without a warning or a network."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.documentation.reference import COMMAND, command_parameters, config_sections, pages
from schemas.sentences import sentences

PROJECT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", sorted(pages()))
def test_the_reference_is_up_to_date(name: str) -> None:
    assert (PROJECT / "docs/reference" / name).read_text() == pages()[name], f"run `{COMMAND}`"


def test_every_config_field_has_a_sentence() -> None:
    silent = [f"[{section}] {name}" for section, settings in config_sections() for name in _unexplained(settings)]
    assert silent == []


def test_every_argument_and_option_has_a_sentence() -> None:
    parameters = list(command_parameters())
    assert len(parameters) > 50
    assert [f"{command} {parameter.name}" for command, parameter in parameters if not parameter.help] == []


def _unexplained(settings: type[msgspec.Struct]) -> Iterator[Any]:
    told = sentences(settings)
    return (field.name for field in msgspec.structs.fields(settings) if not told.get(field.name))
