"""JSON schemas of tool arguments: derived from a signature, and used to explain wrong arguments to an agent. Pure."""

import difflib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

TYPE_NAMES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list, tuple),
    "null": (type(None),),
}


def parameters_of(function: Callable[..., Any], documentation: str) -> dict[str, Any]:
    """The JSON schema of a function's arguments. Lines `name: text` of the documentation describe them; an indented
    line continues the one above. TypeError for an argument without a type or with one that has no schema here."""
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in hints:
            raise TypeError(f"{function.__name__}: the argument {name} has no type")
        properties[name] = schema_of(hints[name], f"{function.__name__}.{name}")
        described = re.search(rf"^\s*{re.escape(name)}: (.+(?:\n[ \t]+\S.*)*)$", documentation, re.MULTILINE)
        if described:
            properties[name]["description"] = " ".join(described.group(1).split())
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """Schema of one type: str, int, float, bool, dict, a Literal of strings, a list of these, or any of them | None."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in TYPE_NAMES:
        return {"type": TYPE_NAMES[hint]}
    if origin is typing.Literal and all(isinstance(argument, str) for argument in arguments):
        return {"type": "string", "enum": list(arguments)}
    if origin is dict:
        return {"type": "object"}
    if hint is list or origin is list:
        return {"type": "array", **({"items": schema_of(arguments[0], where)} if arguments else {})}
    if origin in (typing.Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        (inner,) = (argument for argument in arguments if argument is not type(None))
        schema = schema_of(inner, where)
        if "enum" in schema:
            # JSON schema checks "enum" and "type" both, so null must be in each.
            schema["enum"].append(None)
        return {**schema, "type": [schema["type"], "null"]}
    raise TypeError(f"{where}: {hint!r} has no JSON schema here (str, int, float, bool, dict, list, Literal or | None)")


def complaint(name: str, parameters: Mapping[str, Any], arguments: Any) -> str | None:
    """An error message for the agent when names or types of arguments do not fit the schema; None when they do."""
    properties = parameters["properties"]
    usage = f"{name} takes {usage_of(parameters)}"
    if not isinstance(arguments, Mapping):
        return f"arguments must be a JSON object; {usage}"
    for required in parameters.get("required", ()):
        if required not in arguments:
            return f"missing argument {required!r}; {usage}"
    for key, value in arguments.items():
        if key not in properties:
            # Cut: its length is the agent's choice.
            close = difflib.get_close_matches(str(key)[:100], properties, 1)
            return f"unknown argument {str(key)[:100]!r}{f', did you mean {close[0]!r}?' if close else ''}; {usage}"
        if not fits(value, properties[key]):
            said = repr(value) if "enum" in properties[key] and isinstance(value, str) else json_type(value)
            return f"argument {key!r} must be {type_text(properties[key])}, not {said[:100]}; {usage}"
    return None


def usage_of(parameters: Mapping[str, Any]) -> str:
    required = parameters.get("required", ())
    parts = [
        f"{key} ({type_text(schema)}{'' if key in required else ', optional'})"
        for key, schema in parameters["properties"].items()
    ]
    return ", ".join(parts) or "no arguments"


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value has the type of the schema."""
    if "enum" in schema:
        return value in schema["enum"]
    expected = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    # bool is a subclass of int, but true is not a number in JSON.
    if isinstance(value, bool):
        return "boolean" in expected
    if not any(isinstance(value, PYTHON_TYPES[name]) for name in expected):
        return False
    if isinstance(value, list | tuple) and "items" in schema:
        return all(fits(item, schema["items"]) for item in value)
    return True


def type_text(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    return schema["type"] if isinstance(schema["type"], str) else " or ".join(schema["type"])


def json_type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kinds in PYTHON_TYPES.items() if isinstance(value, kinds)), type(value).__name__)
