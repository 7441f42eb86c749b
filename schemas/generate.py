"""Writes schemas/avro/NN_*.avsc from the event classes.

python -m replayground.schemas.generate                  after a change of schemas/events.py
python -m replayground.schemas.generate release 0.2.0    at a release; later versions must stay compatible with it
"""

import inspect
import json
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from replayground.schemas.events import EVENTS, Event
from replayground.schemas.sentences import sentences

NAMESPACE = "replayground"
AVRO_FOLDER = Path(__file__).parent / "avro"
RELEASED_FOLDER = AVRO_FOLDER / "released"
"One folder for each released version. They never change: logs hold events of each version."
_PRIMITIVES: dict[type, str] = {str: "string", int: "long", float: "double", bool: "boolean", bytes: "bytes"}

Schema = dict[str, Any] | list[Any] | str


def schema_of(event_class: type[Event]) -> dict[str, Any]:
    """The Avro schema of an event class."""
    return _record(event_class, set())


def file_of(event_class: type[Event]) -> Path:
    """The path of its .avsc file."""
    snake = re.sub(r"(?<!^)(?=[A-Z])", "_", event_class.__name__).lower()
    return AVRO_FOLDER / f"{event_class.number:02d}_{snake}.avsc"


def render(event_class: type[Event]) -> str:
    """The text of its .avsc file."""
    return json.dumps(schema_of(event_class), indent=2, ensure_ascii=False) + "\n"


def _record(struct: type[msgspec.Struct], defined: set[str]) -> dict[str, Any]:
    # Before its fields: Avro allows one definition of a name in a schema, so later uses refer to it.
    defined.add(struct.__name__)
    docs = sentences(struct)
    fields = [_field(field, docs.get(field.name), defined) for field in msgspec.structs.fields(struct)]
    return {
        "type": "record",
        "name": struct.__name__,
        "namespace": NAMESPACE,
        "doc": inspect.cleandoc(struct.__doc__ or ""),
        "fields": fields,
    }


def _field(field: msgspec.structs.FieldInfo, doc: str | None, defined: set[str]) -> dict[str, Any]:
    schema: dict[str, Any] = {"name": field.name, "type": _type(field.type, defined)}
    if doc:
        schema["doc"] = doc
    if field.default is not msgspec.NODEFAULT:
        schema["default"] = msgspec.to_builtins(field.default)
    elif field.default_factory is not msgspec.NODEFAULT:
        schema["default"] = field.default_factory()
    return schema


def _type(annotation: Any, defined: set[str]) -> Schema:
    origin = get_origin(annotation)
    if annotation in _PRIMITIVES:
        return _PRIMITIVES[annotation]
    # A string, not an enum: adding a value to the list needs no schema change (decision 0001).
    if origin is Literal:
        return "string"
    # Avro has no bounds; msgspec checks them when an event is decoded.
    if origin is Annotated:
        return _type(get_args(annotation)[0], defined)
    # "null" first: the default of an Avro union must be of its first type, and ours is null.
    if origin in (types.UnionType, Union):
        return ["null", *(_type(part, defined) for part in get_args(annotation) if part is not type(None))]
    if origin is list:
        return {"type": "array", "items": _type(get_args(annotation)[0], defined)}
    if origin is dict:
        return {"type": "map", "values": _type(get_args(annotation)[1], defined)}
    if annotation.__name__ in defined:
        return f"{NAMESPACE}.{annotation.__name__}"
    return _record(annotation, defined)


def write(folder: Path) -> None:
    for event_class in EVENTS:
        (folder / file_of(event_class).name).write_text(render(event_class))


def release(version: str) -> None:
    """Keeps the schemas of a released version. Raises FileExistsError when the version is there already."""
    folder = RELEASED_FOLDER / version
    # Without exist_ok: a released schema must not be overwritten.
    folder.mkdir(parents=True)
    write(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["release"]:
        release(sys.argv[2])
    else:
        write(AVRO_FOLDER)
