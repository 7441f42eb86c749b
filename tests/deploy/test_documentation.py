"""The generated reference and the site: up to date, complete, and built without a warning or a network."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from rich.text import Text

from replayground.deploy.documentation.recording import recording_of
from replayground.deploy.documentation.reference import COMMAND, command_parameters, config_sections, pages
from replayground.schemas.sentences import sentences

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


def test_help_shows_every_word() -> None:
    """Rich takes a word in brackets for markup and leaves it out."""
    texts = [parameter.help for _, parameter in command_parameters()]
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def _unexplained(settings: type[msgspec.Struct]) -> Iterator[Any]:
    told = sentences(settings)
    return (field.name for field in msgspec.structs.fields(settings) if not told.get(field.name))


def test_a_recording_shows_one_frame_at_a_time_and_begins_again() -> None:
    looks = [Text(f"look {number}") for number in range(100)]
    svg = recording_of(looks)
    root = ElementTree.fromstring(svg)
    frames = [child for child in root if child.tag.endswith("}g")]
    shown = ["".join(frame.itertext()) for frame in frames]
    assert len(frames) < len(looks)
    assert "look\xa00" in shown[0]
    assert "look\xa099" in shown[-1]
    # each becomes visible in the moment in which the one before it disappears
    begins = [float(found) for found in re.findall(r"([\d.]+)% \{visibility:visible\}", svg)]
    ends = [float(found) for found in re.findall(r"([\d.]+)% \{visibility:hidden\}", svg) if float(found) > 0]
    assert begins == [0.0, *ends]
    assert "url(http" not in svg.replace('"', ""), "a picture loads nothing from elsewhere"
