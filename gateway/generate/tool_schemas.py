"""Helpers for JSON schemas in tool call grammars: enforceable keywords, enums, required names and definitions."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from gateway.generate.schemas import choices_of

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
COMMENTS = {"title", "description", "default", "examples", "deprecated"}
NOTES = {"$schema", "$id", "strict", "discriminator", *COMMENTS, *DEFINITIONS}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
KNOWN = {
    "type", "minLength", "maxLength", "pattern", "format", "items", "minItems", "maxItems", "properties", "required",
    "additionalProperties", *BOUNDS,
}  # fmt: skip
_SHOWN_CHARS = 64
_MAX_PARTS = 256


def split(schema: Schema) -> tuple[Schema, Schema]:
    """Split a schema into the schema without definitions, and its definitions."""
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {name: value for name, value in schema.items() if name not in definitions}, definitions


def properties_of(schema: Schema) -> list[tuple[str, Any]]:
    properties = schema.get("properties", {})
    missing = next((name for name in schema.get("required", ()) if name not in properties), None)
    if missing is not None:
        raise ValueError(f'"required" names "{shown(missing)}", which is not in "properties"')
    if any("\n" in key or ">" in key for key in properties):
        raise ValueError('a property name with a line break or ">"')
    return list(properties.items())


def required_names(schema: Schema) -> frozenset[str]:
    return frozenset(schema.get("required", ()))


def shown(name: Any) -> str:
    """Return a client's name, shortened for error messages."""
    return str(name)[:_SHOWN_CHARS]


def is_text(schema: Any) -> bool:
    """Return whether a schema admits only strings, without resolving references."""
    if not isinstance(schema, Mapping):
        return False
    choices = choices_of(schema)
    if "type" in schema or not isinstance(choices, list):
        return schema.get("type") == "string"
    return all(isinstance(choice, str) for choice in choices)


def kinds_of(schema: Any, root: Schema) -> frozenset[str]:
    """Return the types that a schema names, also by `anyOf`, `oneOf` and references to definitions of `root`; empty if
    any type is possible, or if it has too many parts."""
    kinds: set[str] = set()
    waiting = [schema]
    for _ in range(_MAX_PARTS):
        if not waiting:
            return frozenset(kinds)
        item = waiting.pop()
        if not isinstance(item, Mapping):
            continue
        named = item.get("type")
        kinds.update(kind for kind in TYPES if kind == named or (isinstance(named, list) and kind in named))
        parts = (item.get("anyOf"), item.get("oneOf"))
        waiting += [part for listed in parts if isinstance(listed, list) for part in listed[:_MAX_PARTS]]
        if isinstance(item.get("$ref"), str):
            group, name = _definition(item["$ref"])
            found = root.get(group)
            waiting.append(found.get(name) if isinstance(found, Mapping) else None)
    return frozenset()


def any_text(schema: Schema, letter: str = "(?s:.)") -> str:
    """Return a regular expression for unquoted strings of a schema. Raises ValueError."""
    for name in ("pattern", "format"):
        if name in schema:
            raise ValueError(f'the keyword "{name}" of a string')
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return f"/{letter}{{{int(least)},{'' if most is None else int(most)}}}/"


def check_keys(schema: Schema, known: set[str]) -> None:
    """Raise ValueError for a keyword that would not be enforced."""
    for name in schema:
        if name not in known and name not in NOTES:
            raise ValueError(f'the keyword "{shown(name)}"')


def reachable(schema: Schema, definitions: Schema) -> Schema:
    """Return the `definitions` that a schema references, directly or indirectly. Linear in schema and result."""
    found: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [schema]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, Mapping):
            waiting.extend(part for part in item if isinstance(part, Mapping | list))
            continue
        waiting.extend(part for part in item.values() if isinstance(part, Mapping | list))
        for path in (item.get("$ref"), item.get("$dynamicRef")):
            if not isinstance(path, str):
                continue
            group, name = _definition(path)
            if group not in definitions:
                if not path.startswith("#/"):  # an anchor, possibly inside a definition
                    return definitions
            elif name in definitions[group] and name not in found.setdefault(group, {}):
                found[group][name] = definitions[group][name]
                waiting.append({name: definitions[group][name]})
    return found


def _definition(path: str) -> tuple[str, str]:
    """Return the group (`$defs` or `definitions`) and name of a reference."""
    group, _, rest = path.removeprefix("#/").partition("/")
    return group, unquote(rest.partition("/")[0]).replace("~1", "/").replace("~0", "~")
