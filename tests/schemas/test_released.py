"""No schema breaks one that was ever released: asked of the registry itself, which would refuse it at the start of a run."""

import copy
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replayground.schemas.errors import BadInput
from replayground.schemas.events import EVENTS, Event
from replayground.schemas.generate import RELEASED_FOLDER, file_of, schema_of
from replayground.schemas.registry import ConfluentRegistry
from replayground.schemas.run import Run


@pytest.fixture
def registry(kafka_run: Run) -> Iterator[ConfluentRegistry]:
    registry = ConfluentRegistry(kafka_run.log.registry_url)
    registry.require_compatibility()
    yield registry
    registry.close()


def released(event_class: type[Event]) -> list[dict[str, Any]]:
    """Its schema in every release that had it, oldest first."""
    folders = sorted(RELEASED_FOLDER.iterdir(), key=lambda folder: [int(part) for part in folder.name.split(".")])
    files = [folder / file_of(event_class).name for folder in folders]
    return [json.loads(file.read_text()) for file in files if file.exists()]


@pytest.mark.parametrize("event_class", EVENTS, ids=lambda kind: kind.__name__)
def test_a_schema_reads_and_is_read_by_every_release(event_class: type[Event], registry: ConfluentRegistry) -> None:
    subject = f"{event_class.__name__}-{uuid.uuid4()}"
    for schema in [*released(event_class), schema_of(event_class)]:
        registry.id_of(subject, schema)


def test_no_event_of_a_release_is_gone() -> None:
    files = {file.name for folder in RELEASED_FOLDER.iterdir() for file in folder.glob("*.avsc")}
    assert files
    assert files <= {file_of(event_class).name for event_class in EVENTS}


def without_a_field(schema: dict[str, Any]) -> None:
    schema["fields"] = [field for field in schema["fields"] if field["name"] != "tool"]


def with_a_field_without_default(schema: dict[str, Any]) -> None:
    schema["fields"].append({"name": "new", "type": "string"})


def with_another_type(schema: dict[str, Any]) -> None:
    next(field for field in schema["fields"] if field["name"] == "tool")["type"] = "long"


@pytest.mark.parametrize("breaking", [without_a_field, with_a_field_without_default, with_another_type])
def test_what_breaks_an_old_reader_or_an_old_event_is_refused(
    breaking: Callable[[dict[str, Any]], None], registry: ConfluentRegistry
) -> None:
    from replayground.schemas.events import ToolCalled

    broken = copy.deepcopy(schema_of(ToolCalled))
    breaking(broken)
    subject = f"broken-{uuid.uuid4()}"
    registry.id_of(subject, schema_of(ToolCalled))
    with pytest.raises(BadInput, match="other schemas under our subjects"):
        registry.id_of(subject, broken)
