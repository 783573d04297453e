"""JSON schemas as grammars of calls read them: keywords that can be enforced, choices, required names, definitions."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]
DEFINITIONS = ("$defs", "definitions")
COMMENTS = {"title", "description", "default", "examples", "deprecated"}
NOTES = {"$schema", "$id", "strict", *COMMENTS, *DEFINITIONS}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
KNOWN = {
    "type", "minLength", "maxLength", "pattern", "format", "items", "minItems", "maxItems", "properties", "required",
    "additionalProperties", *BOUNDS,
}  # fmt: skip
_SHOWN_CHARS = 64


def split(schema: Schema) -> tuple[Schema, Schema]:
    """A schema without its definitions, and these."""
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    return {name: value for name, value in schema.items() if name not in definitions}, definitions


def properties_of(schema: Schema) -> list[tuple[str, Any]]:
    properties = schema.get("properties", {})
    missing = next((name for name in schema.get("required", ()) if name not in properties), None)
    if missing is not None:
        raise ValueError(f'"required" names "{shown(missing)}", which is not among the properties')
    if any("\n" in key or ">" in key for key in properties):
        raise ValueError("a name with marks in it")
    return list(properties.items())


def required_names(schema: Schema) -> frozenset[str]:
    return frozenset(schema.get("required", ()))


def shown(name: Any) -> str:
    """A client's own name as errors tell it."""
    return str(name)[:_SHOWN_CHARS]


def choices_of(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def is_text(schema: Any) -> bool:
    """Whether all values that a schema admits are texts, as far as it says so itself."""
    if not isinstance(schema, Mapping):
        return False
    choices = choices_of(schema)
    if "type" in schema or not isinstance(choices, list):
        return schema.get("type") == "string"
    return all(isinstance(choice, str) for choice in choices)


def any_text(schema: Schema, letter: str = "(?s:.)") -> str:
    """Texts as they are, without what JSON has around and in them."""
    for name in ("pattern", "format"):
        if name in schema:
            raise ValueError(f'the keyword "{name}" of a text')
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    return f"/{letter}{{{int(least)},{'' if most is None else int(most)}}}/"


def check_keys(schema: Schema, known: set[str]) -> None:
    """Raises ValueError for what would not be enforced."""
    for name in schema:
        if name not in known and name not in NOTES:
            raise ValueError(f'the keyword "{shown(name)}"')


def reachable(schema: Schema, definitions: Schema) -> Schema:
    """Return those of the `definitions` that a schema's references reach, over any number of steps. The work is linear
    in the schema and the result."""
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
                if not path.startswith("#/"):  # an anchor, perhaps within a definition
                    return definitions
            elif name in definitions[group] and name not in found.setdefault(group, {}):
                found[group][name] = definitions[group][name]
                waiting.append({name: definitions[group][name]})
    return found


def _definition(path: str) -> tuple[str, str]:
    """The group of a reference's definition, and its name in it."""
    group, _, rest = path.removeprefix("#/").partition("/")
    return group, unquote(rest.partition("/")[0]).replace("~1", "/").replace("~0", "~")
