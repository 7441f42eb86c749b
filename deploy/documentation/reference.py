"""The reference, generated from source: events, config, command line, metrics.

`python -m replayground.deploy.documentation` writes it.

Only headings are written by hand: the sentences are those under the fields, docstrings and help texts. Topics have a
page of their own (schemas.programs).
"""

import inspect
import json
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import typer
from msgspec import Struct

from replayground.consumers.clickhouse.views import VIEWS
from replayground.deploy.cli import app
from replayground.deploy.config import FIELD_SECTIONS, Config
from replayground.deploy.documentation.api_reference import python_api
from replayground.deploy.documentation.markdown import table
from replayground.schemas.events import EVENTS, Event, Value
from replayground.schemas.generate import file_of
from replayground.schemas.metrics import FIGURES
from replayground.schemas.programs import ACCESS, readers_of
from replayground.schemas.sentences import sentences
from replayground.schemas.topics import TOPIC_BY_EVENT

COMMAND = "python -m replayground.deploy.documentation"
_MISSING = msgspec.NODEFAULT
_WORDS: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    bytes: "bytes",
    Path: "path",
    type(None): "null",
}


def pages() -> dict[str, str]:
    """File name in docs/reference -> its whole text."""
    return {
        "events.md": events(),
        "config.md": config(),
        "cli.md": command_line(),
        "metrics.md": metrics(),
        "python.md": python_api(),
        "views.md": views(),
    }


def views() -> str:
    """Every table and view of the trace store, with its columns."""
    lines = [
        *_head("Views", "consumers/clickhouse/views.py"),
        "What SQL may read: `replayground sql`, the page, `Field.sql`. Worked questions: [queries](../queries.md).",
        "",
        *table(("name", "a row is"), [(f"[`{view.name}`](#{view.name})", view.rows) for view in VIEWS]),
    ]
    for view in VIEWS:
        rows = [(f"`{name}`", meaning) for name, meaning in view.columns.items()]
        lines += ["", f"## {view.name}", "", f"A row is {view.rows}.", "", *table(("column", "meaning"), rows)]
    return _page(lines)


def events() -> str:
    """Every event with its topic, its schema and its fields, then what they are made of."""
    lines = [
        *_head("Events", "schemas/events.py"),
        "One fact is one record, one `.avsc` in `schemas/avro` and one frozen class. Every event starts with the same `meta`.",
        "Topics with their partitions and retention, and programs with their rights: [topics](../topics.md).",
        "",
        *table(("", "event", "topic"), [_event_row(event) for event in EVENTS]),
    ]
    for event in EVENTS:
        lines += _event_section(event)
    for value in _values_of(EVENTS):
        lines += ["", f"## {value.__name__}", "", _text(value), "", *_fields_table(value)]
    return _page(lines)


def config() -> str:
    """Every section of a config file with its fields."""
    lines = [
        *_head("Config", "the settings classes of the programs"),
        "A config is a TOML file with one section per program. Every field has a default, so a field or section may be",
        "left out; a field that does not exist is refused. Paths are relative to the file.",
        f"{', '.join(f'`[{name}]`' for name in FIELD_SECTIONS)} describe the field, all others a run.",
        "",
        "Ports, folders and addresses of servers that are left out are chosen when a field or a run starts: `vllm.port`,",
        "`vllm.folder`, `reloader.servers`, `reloader.folder`, `rollouts.servers`, `streams.state_folder`, `traces.port`,",
        "`traces.dsn` and the ports of `[local]`. Their defaults below are those of the classes alone.",
    ]
    for name, settings in config_sections():
        lines += ["", f"## [{name}]", "", _text(settings), "", *_fields_table(settings, without_sections=True)]
    return _page(lines)


def command_line() -> str:
    """Every command with its arguments, options and examples."""
    lines = [
        *_head("Command line", "deploy/cli.py"),
        "Exit codes: 0 done, 1 a part failed or a comparison differs, 2 wrong input. `--help` shows the same texts.",
    ]
    for name, command in _commands():
        lines += _command_section(name, command)
    return _page(lines)


def config_sections() -> list[tuple[str, type[Struct]]]:
    """Every section of a config with its dotted name and its settings class."""
    return list(_sections(Config))


def command_parameters() -> Iterator[tuple[str, Any]]:
    """Every argument and option of every command that is shown, with the whole name of the command."""
    return ((name, parameter) for name, command in _commands() for parameter in command.params)


def metrics() -> str:
    """Every metric of the programs."""
    rows = [(f"`replayground_{name}`", sentence) for name, sentence in FIGURES.items()]
    return _page(
        [
            *_head("Metrics", "schemas/metrics.py"),
            "Every program serves them as Prometheus gauges on `/metrics`, with the labels `program` and `worker`. The same",
            "figures are in its heartbeats (`WorkerSeen.load` on the topic `control`), so SQL has their history: view `workers`.",
            "A program reports only the metrics that apply to it. The label `run` comes from the scraper: deploy/monitoring has",
            "a config of Prometheus, alerts and Grafana dashboards ([runbook](../../deploy/runbook.md#alerts-of-prometheus)).",
            "",
            *table(("gauge", "meaning"), rows),
        ]
    )


def _head(title: str, source: str) -> list[str]:
    return [f"# {title}", "", f"Generated from {source} by `{COMMAND}`; a test compares.", ""]


def _page(lines: Sequence[str]) -> str:
    return "\n".join(lines).rstrip("\n") + "\n"


def _event_row(event: type[Event]) -> tuple[str, str, str]:
    return f"{event.number:02d}", f"[{event.__name__}](#{event.__name__.lower()})", TOPIC_BY_EVENT[event].name


def _event_section(event: type[Event]) -> list[str]:
    topic = TOPIC_BY_EVENT[event]
    schema = file_of(event).name
    writers = [access.program for access in ACCESS if event in access.events_written]
    own = [field for field in msgspec.structs.fields(event) if field.name != "meta"]
    return [
        "",
        f"## {event.__name__}",
        "",
        _text(event),
        "",
        f"Topic `{topic.name}` · schema [{schema}](../../schemas/avro/{schema}) · written by {', '.join(writers)} · "
        f"topic read by {', '.join(readers_of(topic.name))}",
        "",
        *_rows_of(event, own),
    ]


def _values_of(kinds: Sequence[type[Struct]]) -> list[type[Struct]]:
    """The classes of nested fields, each once, in the order in which they occur; Meta comes first."""
    found: dict[type[Struct], None] = {}

    # A dict keeps the order of insertion, and the test for membership ends the recursion.
    def meet(kind: type[Struct]) -> None:
        for annotation in get_type_hints(kind).values():
            for part in _structs_in(annotation):
                if part not in found:
                    found[part] = None
                    meet(part)

    for kind in kinds:
        meet(kind)
    return list(found)


def _structs_in(annotation: Any) -> Iterator[type[Value]]:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        yield annotation
    for part in get_args(annotation):
        yield from _structs_in(part)


def _sections(settings: type[Struct], path: str = "") -> Iterator[tuple[str, type[Struct]]]:
    """The sections of a config with their dotted names, depth first."""
    for field in msgspec.structs.fields(settings):
        inner = _section_of(field.type)
        if inner is not None:
            # A table of named entries, such as [rollouts.tools.mcp.clock], is documented once, as NAME.
            name = f"{path}{field.name}" + (".NAME" if get_origin(field.type) is dict else "")
            yield name, inner
            yield from _sections(inner, f"{name}.")


def _section_of(annotation: Any) -> type[Struct] | None:
    """The settings class of a field that is a section of its own, or a table of such sections by name."""
    kind = get_args(annotation)[1] if get_origin(annotation) is dict else annotation
    return kind if isinstance(kind, type) and issubclass(kind, Struct) else None


def _fields_table(struct: type[Struct], without_sections: bool = False) -> list[str]:
    fields = [
        field
        for field in msgspec.structs.fields(struct)
        if not (without_sections and _section_of(field.type) is not None)
    ]
    return _rows_of(struct, fields)


def _rows_of(struct: type[Struct], fields: Sequence[msgspec.structs.FieldInfo]) -> list[str]:
    if not fields:
        return ["No fields of its own."]
    told = sentences(struct)
    rows = [(f"`{field.name}`", type_text(field.type), _default(field), told.get(field.name, "")) for field in fields]
    return table(("field", "type", "default", "meaning"), rows)


def type_text(annotation: Any) -> str:
    """A type as text: `list of string`, `"a" or "b"`, `integer or null`."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(inside[0]) + "".join(_bounds(bound) for bound in inside[1:])
    if origin is Literal:
        return " or ".join(f"`{json.dumps(value)}`" for value in inside)
    if origin in (types.UnionType, Union):
        return " or ".join(type_text(part) for part in inside)
    if origin in (list, tuple):
        return f"list of {type_text(inside[0])}"
    if origin is dict:
        return f"map of {type_text(inside[1])}"
    # A `type` alias keeps its target in __value__.
    if hasattr(annotation, "__value__"):
        return type_text(annotation.__value__)
    if annotation in _WORDS:
        return _WORDS[annotation]
    return f"[{annotation.__name__}](#{annotation.__name__.lower()})"


def _bounds(bound: msgspec.Meta) -> str:
    limits = ((">", bound.gt), ("≥", bound.ge), ("<", bound.lt), ("≤", bound.le))
    return "".join(f" {sign} {limit}" for sign, limit in limits if limit is not None)


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not _MISSING:
        value = field.default_factory()
    elif field.default is not _MISSING:
        value = field.default
    else:
        return ""
    return "null" if value is None else f"`{json.dumps(msgspec.to_builtins(value), ensure_ascii=False)}`"


def _text(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")


def _commands() -> Iterator[tuple[str, Any]]:
    """Every visible command with its whole name, in the order of --help."""

    def walk(group: Any, name: str) -> Iterator[tuple[str, Any]]:
        for inner in group.commands.values():
            whole = f"{name} {inner.name}"
            if hasattr(inner, "commands"):
                yield from walk(inner, whole)
            elif not inner.hidden:
                yield whole, inner

    return walk(typer.main.get_command(app), "replayground")


def _command_section(name: str, command: Any) -> list[str]:
    # Help texts end with a paragraph "Example:" or "Examples:", separated by "·": it becomes a code block.
    told, _, examples = inspect.cleandoc(command.help or "").partition("\n\nExample")
    _, _, examples = examples.partition(":")
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    usage = " ".join([name, *(_placeholder(argument) for argument in arguments), "[OPTIONS]" if options else ""])
    lines = ["", f"## {name}", "", told, "", "```text", usage.rstrip(), "```"]
    if examples.strip():
        lines += ["", "```sh", *(example.strip() for example in " ".join(examples.split()).split("·")), "```"]
    if command.params:
        rows = [_parameter_row(parameter) for parameter in (*arguments, *options)]
        lines += ["", *table(("", "type", "default", "meaning"), rows)]
    return lines


def _placeholder(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _parameter_row(parameter: Any) -> tuple[str, str, str, str]:
    is_option = parameter.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    kind = "flag" if is_option and parameter.is_flag else type_text(parameter.type_descriptor.annotation)
    # A flag that is off by default needs no entry.
    default = None if parameter.default is False else parameter.default
    environment = f" Environment: `{parameter.envvar}`." if parameter.envvar else ""
    return (
        names if is_option else f"`{_placeholder(parameter)}`",
        kind,
        "" if default is None else f"`{default}`",
        (parameter.help or "") + environment,
    )
