"""Preparation of clients' JSON schemas for generation.

A schema is written to check values; a grammar generates them. `prepared` therefore

- closes objects: without `additionalProperties`, only the names in `properties` and `required` may be written;
- replaces `oneOf` by `anyOf` where no value fits two of its options, which the grammar library only finds out for
  options without `$ref`;
- removes unknown values of `format` and keywords of OpenAPI, which only annotate: next to them the library does not
  take references;
- rewrites patterns and `unevaluatedProperties`, see `simplify`;
- removes keywords that admit every value where they stand, such as `propertyNames` with type `string`;
- removes options of `anyOf` with a look-around in their `pattern`, which the library refuses, if another one is left.

All functions take linear time in the size of the schema and do not recurse.

Behind the last name that a pattern of names still admits, the grammar library allows a comma and then finds no name. A
pattern that admits only names of `properties` and `required` is therefore folded into these properties.
"""

import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import islice, product
from typing import Any
from urllib.parse import unquote

import orjson

from engine.structured.dialect import ascii_space

EXACT_INTEGER = 2**53
"""The grammar library reads the digits of a number as a double, which is exact up to this magnitude."""
_EXACT_DIGITS, _EXACT_POWER = 15, 22
"""The library reads a fraction exactly up to this number of digits and this power of ten."""
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
_ALIASES = {f"uuid{version}": "uuid" for version in range(1, 9)}
_ANNOTATIONS = {"discriminator", "deprecated", "example", "xml", "externalDocs"}
_OPTIONS = ("allOf", "anyOf", "oneOf")
_LISTS = ("prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ONES = ("items", "additionalItems", "additionalProperties", "unevaluatedProperties")
_ABOUT_NAMES = {"properties", "required", "additionalProperties", "patternProperties", "unevaluatedProperties"}
KIND_OF = {
    str: "string", int: "number", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
_ADMITS_ALL: Mapping[str, Sequence[Any]] = {
    "uniqueItems": (False,), "propertyNames": (True, {}, {"type": "string"}), "not": (False,),
    "dependentRequired": ({},), "dependentSchemas": ({},), "dependencies": ({},),
    "unevaluatedItems": (True, {}), "unevaluatedProperties": (True, {}),
}  # fmt: skip
"""Values of keywords that admit every value."""
_NEEDS = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}
"""Keywords that have no effect without another one."""
_OF_KIND = {
    "array": ("uniqueItems", "contains", "unevaluatedItems"),
    "object": ("propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"),
}
KINDS = frozenset(KIND_OF.values())
MOST_COMPARED = 50_000
_MOST_STEPS = 16
_MOST_NODES = 64


def prepared(schema: Any) -> Any:
    """Return a changed copy of a schema. Raises ValueError for a schema that cannot be enforced exactly."""
    try:
        root = orjson.loads(orjson.dumps(schema))
    except orjson.JSONEncodeError as error:  # deeper than orjson supports
        raise ValueError("it is nested too deeply") from error
    found = _subschemas(root)
    for each, is_open in found:
        _check_numbers(each)
        _drop_annotation(each)
        simplify(each)
        if not is_open:
            _close(each)
        _drop_idle(each)
    options = _Options(root)
    for each, _ in found:
        options.separate(each)
        _drop_lookaround(each, root)
        for name in [name for name in each if name in _ANNOTATIONS or name.startswith("x-")]:
            del each[name]
    return root


def rounds_numbers(schema: Any) -> bool:
    """Return whether the grammar library would round a number of the schema."""
    return any(_is_rounded(number) for each, _ in _subschemas(schema) for number in _numbers(each))


def _is_rounded(number: int | float) -> bool:
    if isinstance(number, int):
        return abs(number) > EXACT_INTEGER
    _, digits, power = Decimal(orjson.dumps(number).decode()).as_tuple()
    return len(digits) > _EXACT_DIGITS or abs(int(power)) > _EXACT_POWER


def resolved(schema: Any, root: Any) -> Any:
    """Follow the `$ref` of a schema within `root`; return None for a reference that leads nowhere or too far."""
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, Mapping) or not isinstance(path := schema.get("$ref"), str):
            return schema
        schema = _at(path, root)
    return None


def kinds_of(schema: Any, root: Any) -> frozenset[str]:
    """Return the kinds of values that a schema admits, out of KINDS; all of them if the schema is large or does not
    tell."""
    kinds: set[str] = set()
    waiting, visits = [schema], 0
    while waiting and len(kinds) < len(KINDS):
        each = resolved(waiting.pop(), root)
        visits += 1
        if visits > _MOST_NODES or not isinstance(each, Mapping):
            return KINDS
        choices, types = choices_of(each), each.get("type")
        options = next((each[name] for name in ("anyOf", "oneOf") if isinstance(each.get(name), list)), None)
        if isinstance(choices, list):
            kinds.update(KIND_OF[kind] for kind in set(map(type, choices)))
        elif isinstance(types, str | list):
            kinds.update("number" if kind == "integer" else str(kind) for kind in _as_list(types))
        elif options is not None:
            waiting += options
        elif isinstance(all_of := each.get("allOf"), list) and len(all_of) == 1:
            waiting += all_of
        else:
            return KINDS
    return frozenset(kinds) & KINDS


def choices_of(schema: Mapping[str, Any]) -> Any:
    """Return the values that a schema lists, or None if it lists none."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _at(path: str, root: Any) -> Any:
    """Return the value at a reference such as `#/$defs/Name`; None if there is none."""
    if not path.startswith("#"):
        return None
    value = root
    for part in path[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and len(name) < 9 and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def _subschemas(root: Any) -> list[tuple[dict[str, Any], bool]]:
    """Return all subschemas, each with whether it must stay open because another one applies to the same value."""
    found: dict[int, tuple[dict[str, Any], bool]] = {}
    waiting: list[tuple[Any, bool]] = [(root, False)]
    while waiting:
        schema, is_open = waiting.pop()
        if not isinstance(schema, dict) or (id(schema) in found and found[id(schema)][1] >= is_open):
            continue
        found[id(schema)] = schema, is_open
        for name in _MAPS:
            if isinstance(parts := schema.get(name), Mapping):
                waiting += [(part, False) for part in parts.values()]
        waiting += [(schema[name], False) for name in _ONES if name in schema]
        for name in _LISTS:
            if isinstance(parts := schema.get(name), list):
                waiting += [(part, False) for part in parts]
        waiting += [(part, is_open or not _is_alone(schema)) for part in _in_place(schema, root)]
    return list(found.values())


def _in_place(schema: Mapping[str, Any], root: Any) -> Iterator[Any]:
    """Yield the schemas that apply to the same value."""
    for name in _OPTIONS:
        if isinstance(options := schema.get(name), list):
            yield from options
    if isinstance(path := schema.get("$ref"), str):
        yield _at(path, root)


def _is_alone(schema: Mapping[str, Any]) -> bool:
    """Return whether a value meets only one of the schemas in place, and nothing else limits its names."""
    all_of = schema.get("allOf")
    several = isinstance(all_of, list) and len(all_of) > 1
    return not several and sum(name in schema for name in (*_OPTIONS, "$ref")) == 1 and not schema.keys() & _ABOUT_NAMES


def _numbers(schema: Mapping[str, Any]) -> Iterator[int | float]:
    """Yield the listed numbers and the bounds; fractions as bounds only if they are larger than 64 bits."""
    choices = choices_of(schema)
    bounds = [schema.get(name) for name in BOUNDS]
    waiting = [bound for bound in bounds if not isinstance(bound, float) or abs(bound) >= 2**64]
    waiting += choices if isinstance(choices, list) else []
    while waiting:
        value = waiting.pop()
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
        elif isinstance(value, Mapping | list):
            waiting.extend(value.values() if isinstance(value, Mapping) else value)


def _check_numbers(schema: Mapping[str, Any]) -> None:
    """Raise ValueError for a number that the JSON parser may have rounded: an integer beyond 64 bits."""
    for number in _numbers(schema):
        if isinstance(number, float) and abs(number) >= 2**64:
            raise ValueError(f"the number {number:g} is larger than 64 bits")


def _drop_annotation(schema: dict[str, Any]) -> None:
    name = schema.get("format")
    if isinstance(name, str) and name not in ENFORCED_FORMATS:
        del schema["format"]
        if name in _ALIASES:
            schema["format"] = _ALIASES[name]


def _drop_idle(schema: dict[str, Any]) -> None:
    """Remove keywords that admit every value of this schema."""
    types = schema.get("type")
    named = _as_list(types) if types is not None else KINDS
    idle = {name for name, values in _ADMITS_ALL.items() if schema.get(name) in values}
    idle.update(name for kind, names in _OF_KIND.items() if kind not in named for name in names)
    idle.update(name for name, other in _NEEDS.items() if other not in schema or other in idle)
    if schema.keys().isdisjoint({"then", "else"}):
        idle.add("if")
    for name in idle & schema.keys():
        del schema[name]


def _drop_lookaround(schema: dict[str, Any], root: Any) -> None:
    """Remove options of `anyOf` that need a look-around, unless all do. The remaining ones admit fewer values."""
    options = schema.get("anyOf")
    if isinstance(options, list):
        kept = [option for option in options if not looks_around(resolved(option, root))]
        schema["anyOf"] = kept or options


def _close(schema: dict[str, Any]) -> None:
    """Forbid names that the schema does not mention, unless another keyword may admit them."""
    properties, required = schema.get("properties"), schema.get("required", ())
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return
    if schema.keys() & {"patternProperties", "unevaluatedProperties", "$ref", "$dynamicRef", *_OPTIONS}:
        return
    if "additionalProperties" in schema or not all(isinstance(name, str) for name in required):
        return
    names = dict.fromkeys([*properties, *required], True)
    least = schema.get("minProperties", 0)
    if isinstance(least, int) and least <= len(names):
        schema["properties"] = names | properties
        schema["additionalProperties"] = False


class _Options:
    """Decides whether no value fits two options of a `oneOf`. At most MOST_COMPARED options, constants and names are
    compared in one schema, because many `oneOf` may refer to the same large definitions."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MOST_COMPARED

    def separate(self, schema: dict[str, Any]) -> None:
        """Replace `oneOf` by `anyOf` if no value fits two options."""
        given = schema.get("oneOf")
        if not isinstance(given, list) or "anyOf" in schema:
            return
        options = [resolved(option, self._root) for option in given]
        for option in options:
            if not (
                isinstance(option, dict) and self._counts(option.get("required")) and self._counts(choices_of(option))
            ):
                return
        if self._require_tag(schema.get("discriminator"), options) or self._are_apart(options):
            pairs = list(schema.items())
            schema.clear()
            schema.update({"anyOf" if name == "oneOf" else name: value for name, value in pairs})

    def _counts(self, items: Any) -> bool:
        """Count a comparison and those of `items`; return whether they are still allowed."""
        self._left -= 1 + (len(items) if isinstance(items, list) else 0)
        return self._left > 0

    def _require_tag(self, discriminator: Any, options: Sequence[dict[str, Any]]) -> bool:
        """Require the property of an OpenAPI `discriminator` in every option. Return False if an option does not have
        it with constants of its own."""
        name = discriminator.get("propertyName") if isinstance(discriminator, Mapping) else None
        if not isinstance(name, str) or not self._have_own_values([self._property(each, name) for each in options]):
            return False
        for each in options:
            required = each.setdefault("required", [])
            if isinstance(required, list) and name not in required:
                required.append(name)
        return True

    def _are_apart(self, options: Sequence[dict[str, Any]]) -> bool:
        groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for option in options:
            for kind in kinds_of(option, self._root):
                groups[kind].append(option)
        return all(
            len(group) == 1 or self._have_own_values(group) or (kind == "object" and self._objects_are_apart(group))
            for kind, group in groups.items()
        )

    def _objects_are_apart(self, group: Sequence[dict[str, Any]]) -> bool:
        """Return whether a required property has different constants in all schemas, or all but one schema require a
        name that no other one admits."""
        needed = [dict.fromkeys(_texts(each.get("required"))) for each in group]
        shared = [name for name in needed[0] if all(name in names for names in needed)]
        if any(self._have_own_values([self._property(each, name) for each in group]) for name in shared):
            return True
        if not all(each.get("additionalProperties") is False for each in group):
            return False
        uses = Counter(name for each in group for name in each.get("properties", ()))
        return sum(any(uses[name] == 1 for name in names) for names in needed) >= len(group) - 1

    def _property(self, schema: Mapping[str, Any], name: str) -> Any:
        properties = schema.get("properties")
        return resolved(properties.get(name), self._root) if isinstance(properties, Mapping) else None

    def _have_own_values(self, schemas: Sequence[Any]) -> bool:
        """Return whether every schema lists its values and no two list the same one."""
        seen: set[bytes] = set()
        for each in schemas:
            choices = choices_of(each) if isinstance(each, Mapping) else None
            if not isinstance(choices, list) or not self._counts(choices):
                return False
            own = {_as_key(choice) for choice in choices}
            if own & seen:
                return False
            seen |= own
        return True


def _as_key(value: Any) -> bytes:
    number = isinstance(value, int) and not isinstance(value, bool)
    return orjson.dumps(float(value) if number else value, option=orjson.OPT_SORT_KEYS)


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


MOST_NAMES = 256
"""Maximum number of names that are read from a pattern."""
_BEGIN, _END = "\ue000", "\ue001"
_IN_PLACE = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "then", "else", "dependentSchemas", "dependencies"}
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|(?P<around>\(\?<?[=!])|.", re.DOTALL)
_PARSER: Any = importlib.import_module("re._parser")


def looks_around(schema: Any) -> bool:
    """Return whether the `pattern` of a schema has a look-around."""
    pattern = schema.get("pattern") if isinstance(schema, Mapping) else None
    return isinstance(pattern, str) and any(token["around"] for token in _TOKENS.finditer(pattern))


def simplify(schema: dict[str, Any]) -> None:
    """Rewrite the patterns and the left-over names of a schema without its subschemas."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = ascii_space(pattern)
    close_unevaluated(schema)
    fold_patterns(schema)


def close_unevaluated(schema: dict[str, Any]) -> None:
    """Replace `unevaluatedProperties` by `additionalProperties` where no other schema evaluates properties of the same
    value."""
    if "unevaluatedProperties" in schema and not schema.keys() & _IN_PLACE:
        schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        schema.pop("unevaluatedProperties", None)


def fold_patterns(schema: dict[str, Any]) -> None:
    """Move patterns all of whose names are in `properties` or `required` into the properties."""
    patterns, properties = schema.get("patternProperties"), schema.get("properties", {})
    required = schema.get("required", ())
    if not isinstance(patterns, dict) or not isinstance(properties, dict) or not isinstance(required, list | tuple):
        return
    known = {*properties, *(name for name in required if isinstance(name, str))}
    folded = {pattern: names for pattern in patterns if (names := names_of(pattern)) is not None and names <= known}
    if not folded:
        return
    parts: dict[str, list[Any]] = {name: [schema_] for name, schema_ in properties.items()}
    for pattern, names in folded.items():
        part = patterns.pop(pattern)
        for name in sorted(names):
            parts.setdefault(name, []).append(part)
    schema["properties"] = {name: each[0] if len(each) == 1 else {"allOf": each} for name, each in parts.items()}
    if not patterns:
        del schema["patternProperties"]


def names_of(pattern: str) -> set[str] | None:
    """Return all names that a pattern admits; None if they are many or the pattern is not understood."""
    try:
        parsed = _PARSER.parse(pattern, re.ASCII)
        found = list(islice(_matches(parsed), MOST_NAMES + 1))
    except (re.error, RecursionError, OverflowError, NotImplementedError):
        return None
    anchored = all(text[:1] == _BEGIN and text[-1:] == _END for text in found)
    names = {text.strip(_BEGIN + _END) for text in found}
    inside = any(_BEGIN in name or _END in name for name in names)
    plain = anchored and not inside and not parsed.state.flags & re.IGNORECASE
    return names if plain and len(found) <= MOST_NAMES else None


def _matches(parsed: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    """Yield the texts of a parsed expression, anchors included. Raises NotImplementedError."""
    for parts in product(*(list(islice(_part(str(kind), value), MOST_NAMES + 1)) for kind, value in parsed)):
        yield "".join(parts)


def _part(kind: str, value: Any) -> Iterator[str]:
    if kind == "LITERAL":
        yield chr(value)
    elif kind == "AT" and str(value) in ("AT_BEGINNING", "AT_END"):
        yield _BEGIN if str(value) == "AT_BEGINNING" else _END
    elif kind == "IN":
        for inner, each in value:
            if str(inner) not in ("LITERAL", "RANGE"):
                raise NotImplementedError
            first, last = (each, each) if str(inner) == "LITERAL" else each
            yield from map(chr, range(first, last + 1))
    elif kind == "BRANCH":
        for branch in value[1]:
            yield from _matches(branch)
    elif kind == "SUBPATTERN" and not (value[1] or value[2]):
        yield from _matches(value[3])
    elif kind == "MAX_REPEAT" and value[1] <= MOST_NAMES:
        for count in range(value[0], value[1] + 1):
            yield from _matches(list(value[2]) * count)
    else:
        raise NotImplementedError
