"""Avro readers and writers of our own schemas, compiled to Python: about three times as fast as fastavro's.

fastavro looks at the schema again for every value; here that is done once, and what is left is one straight function
for each schema. The bytes are the same (tests/schemas/test_compiled_avro.py compares the two). Only schemas that are made
from our classes are compiled: the text of one from elsewhere must not become code. What these hold is all that is
known here: records, null, boolean, long, double, string, bytes, array, map, and unions of null and one other type.
"""

import struct
from collections.abc import Callable, Collection, Mapping
from itertools import count
from typing import Any

from msgspec import Struct
from msgspec.inspect import (
    BoolType,
    BytesType,
    DictType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    type_info,
)

type Read = Callable[[bytes, int], tuple[dict[str, Any], int]]
"the record that begins at an offset, and the offset after it. Raises exceptions of many kinds for bad bytes"
type Write = Callable[[bytearray, Any], None]
"appends an object, whose attributes are the fields"

_PLAIN = {BoolType: bool, IntType: int, FloatType: float, StrType: str, BytesType: bytes}
"types of msgspec that allow every value of a class"
_DOUBLE = struct.Struct("<d")
_VARINT_BYTES_MAX = 10


def compiled_reader(schema: Mapping[str, Any]) -> Read:
    """Reads records of one of our schemas as dictionaries."""
    read: Read = _reader(_Code(), schema)
    return read


def compiled_struct_reader(
    schema: Mapping[str, Any], kind: type[Struct], repeating: Collection[str] = ()
) -> Callable[[bytes, int], tuple[Any, int]]:
    """Reads records as objects of the class that the schema was made from: what msgspec makes of the dictionary, in half
    the time. Raises for values that the class does not allow, without saying which.

    Inner records whose names are in `repeating` are often the same bytes as the time before. Then they are the same object,
    whose lists nobody may change."""
    return _reader(_Code(_classes_of(type_info(kind)), repeating), schema)  # type: ignore[no-any-return]


def _reader(code: "_Code", schema: Mapping[str, Any]) -> Any:
    record = code.read(schema, 1)
    return _function(
        "read", ["def read(data, i):", *code.lines, f"    return {record}, within(data, i)"], code.constants
    )


def _classes_of(kind: Type) -> dict[str, StructType]:
    """The classes of a record and of the records in it, by name."""
    match kind:
        case StructType():
            found = {kind.cls.__name__: kind}
            for field in kind.fields:
                found |= _classes_of(field.type)
            return found
        case UnionType():
            return {name: inner for each in kind.types for name, inner in _classes_of(each).items()}
        case ListType():
            return _classes_of(kind.item_type)
        case DictType():
            return _classes_of(kind.value_type)
        case _:
            return {}


def compiled_writer(schema: Mapping[str, Any]) -> Write:
    """Writes objects of one of our schemas. What has the wrong type raises an exception of one kind or another."""
    code = _Code()
    code.write(schema, "event", 1)
    write: Write = _function("write", ["def write(out, event):", *code.lines])
    return write


def _function(name: str, lines: list[str], constants: Mapping[str, Any] | None = None) -> Any:
    scope: dict[str, Any] = {
        **(constants or {}),
        "long_at": _long_at,
        "span_at": _span_at,
        "items_at": _items_at,
        "within": _within,
        "long": _long,
        "short": _SHORT,
        "double_at": _DOUBLE.unpack_from,
        "double": _DOUBLE.pack,
    }
    exec("\n".join(lines), scope)
    return scope[name]


class _Code:
    """The lines of one function. Each value has a variable of its own; `i` is where reading is."""

    def __init__(self, classes: Mapping[str, StructType] | None = None, repeating: Collection[str] = ()) -> None:
        """Without classes, records are read as dictionaries."""
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        "by name in the code; a list of one item is what the function keeps from one call to the next"
        self._classes = classes
        self._repeating = repeating
        self._numbers = count()
        self._records: dict[str, Mapping[str, Any]] = {}
        "by full name: a schema defines a record once and names it from then on"

    def read(self, schema: Any, depth: int) -> str:
        """Adds lines that read one value. Returns an expression for it."""
        kind = schema["type"] if isinstance(schema, Mapping) else "union" if isinstance(schema, list) else schema
        if kind == "null":
            return "None"
        if kind == "record" or kind in self._records:
            return self._read_record(self._record(schema), depth)
        value = f"v{next(self._numbers)}"
        match kind:
            case "long":
                self._add(depth, f"{value} = data[i]", f"if {value} > 127: {value}, i = long_at(data, i)")
                self._add(depth, f"else: {value} = {value} >> 1 ^ -({value} & 1); i += 1")
            case "string" | "bytes":
                self._add(depth, "n = data[i]", "if n & 129: i, n = span_at(data, i)", "else: i += 1; n = i + (n >> 1)")
                self._add(depth, f"{value} = data[i:n]{'.decode()' if kind == 'string' else ''}", "i = n")
            case "boolean":
                self._add(depth, f"{value} = (False, True)[data[i]]", "i += 1")
            case "double":
                self._add(depth, f"{value} = double_at(data, i)[0]", "i += 8")
            case "union":
                self._read_union(schema, value, depth)
            case "array" | "map":
                self._read_items(schema, value, depth)
            case _:
                raise NotImplementedError(f"Avro type {kind}")
        return value

    def write(self, schema: Any, value: str, depth: int) -> None:
        """Adds lines that write the value of an expression."""
        kind = schema["type"] if isinstance(schema, Mapping) else "union" if isinstance(schema, list) else schema
        own = f"v{next(self._numbers)}"
        self._add(depth, f"{own} = {value}")
        match kind:
            case "long":
                self._add(depth, f"out += short[{own}] if 0 <= {own} < {len(_SHORT)} else long({own})")
            case "string" | "bytes":
                if kind == "string":
                    self._add(depth, f"{own} = {own}.encode()")
                self._add(
                    depth, f"n = len({own})", f"out += short[n] if n < {len(_SHORT)} else long(n)", f"out += {own}"
                )
            case "boolean":
                self._add(depth, f"out.append(1 if {own} else 0)")
            case "double":
                self._add(depth, f"out += double({own})")
            case "union":
                self._add(depth, f"if {own} is None: out.append(0)", "else:", "    out.append(2)")
                self.write(_other_than_null(schema), own, depth + 1)
            case "array" | "map":
                self._write_items(schema, own, depth)
            case _:
                for field in self._record(schema)["fields"]:
                    self.write(field["type"], f"{own}.{field['name']}", depth)

    def _read_record(self, schema: Mapping[str, Any], depth: int) -> str:
        if schema["name"] not in self._repeating:
            return self._read_fields(schema, depth)
        value, last, begin = (f"{kind}{next(self._numbers)}" for kind in ("v", "last", "begin"))
        self.constants[last] = [None]
        self._add(depth, f"{begin} = {last}[0]")
        self._add(depth, f"if {begin} is not None and data.startswith({begin}[0], i):")
        self._add(depth + 1, f"{value} = {begin}[1]", f"i += len({begin}[0])")
        self._add(depth, "else:", f"    {begin} = i")
        self._add(depth + 1, f"{value} = {self._read_fields(schema, depth + 1)}")
        # One assignment of both: other threads read with the same function.
        self._add(depth + 1, f"{last}[0] = data[{begin}:i], {value}")
        return value

    def _read_fields(self, schema: Mapping[str, Any], depth: int) -> str:
        if self._classes is not None:
            return self._read_struct(schema, self._classes[schema["name"]], depth)
        fields = [f"{field['name']!r}: {self.read(field['type'], depth)}" for field in schema["fields"]]
        value = f"v{next(self._numbers)}"
        self._add(depth, f"{value} = {{{', '.join(fields)}}}")
        return value

    def _read_struct(self, schema: Mapping[str, Any], kind: StructType, depth: int) -> str:
        types = {field.name: field.type for field in kind.fields}
        arguments: list[str] = []
        for field in schema["fields"]:
            item = self.read(field["type"], depth)
            arguments.append(f"{field['name']}={item}")
            if (allowed := self._allowed(types[field["name"]], item)) is not None:
                self._add(depth, f"if not ({allowed}): raise ValueError({field['name']!r})")
        name, value = f"class_{kind.cls.__name__}", f"v{next(self._numbers)}"
        self.constants[name] = kind.cls
        self._add(depth, f"{value} = {name}({', '.join(arguments)})")
        return value

    def _allowed(self, kind: Type, value: str) -> str | None:
        """An expression that is true for the values that a type allows; None when it allows all of its Avro type."""
        match kind:
            case LiteralType():
                name = f"values{next(self._numbers)}"
                self.constants[name] = frozenset(kind.values)
                return f"{value} in {name}"
            case IntType(ge=int(), le=int()):
                return f"{kind.ge} <= {value} <= {kind.le}"
            case UnionType(types=(one, NoneType()) | (NoneType(), one)):
                allowed = self._allowed(one, value)
                return None if allowed is None else f"{value} is None or {allowed}"
            case ListType(item_type=item, min_length=None, max_length=None):
                if self._allowed(item, value) is None:
                    return None
            case DictType(key_type=StrType(), value_type=item, min_length=None, max_length=None):
                if self._allowed(item, value) is None:
                    return None
            case StructType() | BoolType() | IntType() | FloatType() | StrType() | BytesType():
                if kind == type_info(_PLAIN.get(type(kind), getattr(kind, "cls", None))):
                    return None
        raise NotImplementedError(f"values of {kind}")

    def _read_union(self, schema: list[Any], value: str, depth: int) -> None:
        self._add(depth, "n = data[i]", "i += 1", f"if n == 0: {value} = None", "elif n == 2:")
        self._add(depth + 1, f"{value} = {self.read(_other_than_null(schema), depth + 1)}")
        self._add(depth, "else: raise ValueError(f'byte {i - 1} chooses no type')")

    def _read_items(self, schema: Mapping[str, Any], value: str, depth: int) -> None:
        left = f"v{next(self._numbers)}"
        self._add(depth, f"{value} = {'[]' if schema['type'] == 'array' else '{}'}")
        self._add(depth, "while data[i]:", f"    {left}, i = items_at(data, i)", f"    for _ in range({left}):")
        if schema["type"] == "array":
            self._add(depth + 2, f"{value}.append({self.read(schema['items'], depth + 2)})")
        else:
            key, item = self.read("string", depth + 2), self.read(schema["values"], depth + 2)
            self._add(depth + 2, f"{value}[{key}] = {item}")
        self._add(depth, "i += 1")

    def _write_items(self, schema: Mapping[str, Any], value: str, depth: int) -> None:
        # One block with all items, then the empty block that ends every array and map.
        self._add(depth, f"if {value}:", f"    out += long(len({value}))")
        item = f"v{next(self._numbers)}"
        if schema["type"] == "array":
            self._add(depth + 1, f"for {item} in {value}:")
            self.write(schema["items"], item, depth + 2)
        else:
            self._add(depth + 1, f"for {item}key, {item} in {value}.items():")
            self.write("string", f"{item}key", depth + 2)
            self.write(schema["values"], item, depth + 2)
        self._add(depth, "out.append(0)")

    def _record(self, schema: Any) -> Mapping[str, Any]:
        if not isinstance(schema, Mapping):
            return self._records[schema]
        assert schema["fields"], "each item takes at least a byte, so that bad bytes cannot ask for endless items"
        self._records[f"{schema.get('namespace', '')}.{schema['name']}"] = schema
        return schema

    def _add(self, depth: int, *lines: str) -> None:
        self.lines += ["    " * depth + line for line in lines]


def _other_than_null(union: list[Any]) -> Any:
    null, other = union
    assert null == "null", "our unions are of null and one other type, in this order"
    return other


def _long(number: int) -> bytes:
    """A zigzag varint. Raises OverflowError for what has more than 64 bits."""
    if not -(2**63) <= number < 2**63:
        raise OverflowError(f"{number} does not fit into 64 bits")
    rest = number << 1 ^ number >> 63
    encoded = bytearray()
    while rest > 127:
        encoded.append(rest & 127 | 128)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


_SHORT = tuple(_long(number) for number in range(4096))
"made once: most numbers and lengths are small"


def _long_at(data: bytes, i: int) -> tuple[int, int]:
    """A number and the offset after it."""
    raw = shift = 0
    for end in range(i, i + _VARINT_BYTES_MAX):
        byte = data[end]
        raw |= (byte & 127) << shift
        if byte < 128:
            return raw >> 1 ^ -(raw & 1), end + 1
        shift += 7
    raise ValueError(f"the number at byte {i} has more than {_VARINT_BYTES_MAX} bytes")


def _span_at(data: bytes, i: int) -> tuple[int, int]:
    """Where a string or bytes begin and end."""
    length, begin = _long_at(data, i)
    # Reading must never go back, or bad bytes could make it endless.
    if length < 0:
        raise ValueError(f"the length at byte {i} is negative")
    return begin, begin + length


def _items_at(data: bytes, i: int) -> tuple[int, int]:
    """How many items a block has, and where they begin."""
    items, begin = _long_at(data, i)
    if items < 0:
        # Other writers may say how many bytes the block has, after a negative count.
        items, (_, begin) = -items, _long_at(data, begin)
    return items, begin


def _within(data: bytes, i: int) -> int:
    # A slice beyond the end is silently shorter.
    if i > len(data):
        raise EOFError("it ends too early")
    return i
