"""Grammar rules for argument values in the syntax of each model family. A schema feature that a syntax cannot enforce
raises ValueError with its name."""

import keyword
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

import orjson

from gateway.generate.lark import Lark, admits, integer_pattern, quoted
from gateway.generate.schemas import choices_of, rounds_numbers

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


_SPACED = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}
_IN_QUOTES = r"[^'\\\x00-\x1f\x7f]"
_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")


class Values(NamedTuple):
    """Syntax of values in one model family."""

    true: str = "true"
    false: str = "false"
    null: str = "null"
    quote: str = ""
    """Mark around strings; "": as in JSON."""
    key: str = '"'
    """Mark around names."""
    comma: str = ", "
    colon: str = ": "
    identifiers: bool = False
    """Unquoted names must be Python identifiers."""


JSON = Values()
COMPACT = Values(comma=",", colon=":")
PYTHON = Values("True", "False", "None", identifiers=True)
GEMMA = Values(quote='<|"|>', key="", comma=",", colon=":")


@dataclass(slots=True)
class JsonValues:
    """Rules for JSON values with references into the definitions of one function's schema (`root`).

    A rule contains only the definitions that its schema references. Equal references share one rule."""

    lark: Lark
    root: Schema
    _known: dict[str, str] = field(default_factory=dict)

    def rule(self, schema: Any) -> str:
        """Return the name of the rule for a schema. Raises ValueError."""
        if not isinstance(schema, Mapping):
            return self.lark.json(schema)
        bare = {name: value for name, value in schema.items() if name not in COMMENTS}
        path = bare.get("$ref") if len(bare) == 1 else None
        if not isinstance(path, str):
            return self._rule(bare)
        if path not in self._known:
            self._known[path] = self._rule(bare)
        return self._known[path]

    def _rule(self, schema: Schema) -> str:
        return json_rule(self.lark, {**reachable(schema, split(self.root)[1]), **schema})


def json_rule(lark: Lark, schema: Any) -> str:
    """Return a rule for JSON with the spaces of json.dumps. Raises ValueError."""
    if rounds_numbers(schema):
        return lark.rule(Literals(lark, JSON, schema).value(schema))
    return lark.json({**schema, **_SPACED} if isinstance(schema, Mapping) else schema)


def form_rule(lark: Lark, schema: Any, whitespace: str | None) -> str:
    """Return a rule for a JSON answer, compact or with `whitespace` between tokens. Raises ValueError."""
    if not rounds_numbers(schema):
        options = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
        return lark.json({**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema)
    if whitespace is not None:
        raise ValueError("white space cannot be chosen for a schema with numbers of more than 15 digits")
    return lark.rule(Literals(lark, COMPACT, schema).value(schema))


@dataclass(slots=True)
class Literals:
    """Expressions for values in a family's own syntax. `root`: the schema for references."""

    lark: Lark
    values: Values
    root: Schema
    _known: dict[str, str] = field(default_factory=dict)

    def value(self, schema: Any) -> str:
        """Return an expression for the values of a schema. Raises ValueError."""
        if schema is True or (isinstance(schema, Mapping) and not set(schema) - NOTES):
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ValueError("a schema that admits no value")
        if "$ref" in schema:
            check_keys(schema, {"$ref"})
            return self._reference(schema["$ref"])
        choices = choices_of(schema)
        if choices is not None:
            return self._any_of([self.constant(choice) for choice in choices if admits(schema, choice)])
        if "anyOf" in schema:
            check_keys(schema, {"anyOf"})
            return self._any_of(map(self.value, schema["anyOf"]))
        check_keys(schema, KNOWN)
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(dict.fromkeys(kinds))
        if not kinds or any(kind not in TYPES for kind in kinds):
            raise ValueError("a schema without a type")
        return self._any_of(self._typed(kind, schema) for kind in kinds)

    def members(self, schema: Schema, quote: str, sign: str) -> str:
        """Return an expression for the keys and values of an object, without braces."""
        extra = schema.get("additionalProperties", True)
        if schema.get("properties") or extra is False:
            return self._pairs(schema, quote, sign)
        if schema.get("required"):
            raise ValueError('the keyword "required" without "properties"')
        pair = self.lark.rule(f"{self._any_key(quote)} {quoted(sign)} {self.value(extra)}")
        return f"({pair} ({quoted(self.values.comma)} {pair})*)?"

    def _any_key(self, quote: str) -> str:
        if quote:
            return self.lark.json({"type": "string"})
        words = f" & ~/{'|'.join(keyword.kwlist)}/" if self.values.identifiers else ""
        return self.lark.terminal(rf"/[A-Za-z_][A-Za-z0-9_]*/{words}")

    def _pairs(self, schema: Schema, quote: str, sign: str) -> str:
        required = required_names(schema)
        pairs = [
            (f"{quoted(self._key(key, quote) + sign)} {self.value(value)}", key in required)
            for key, value in properties_of(schema)
        ]
        tails = {True: quoted(""), False: quoted("")}  # rest of the object, by whether it follows another pair
        for pair, is_required in reversed(pairs):
            tails = {
                begun: self.lark.rule(
                    f"{quoted(self.values.comma) if begun else ''} {pair} {tails[True]}"
                    + ("" if is_required else f" | {tails[begun]}")
                )
                for begun in (True, False)
            }
        return tails[False]

    def constant(self, value: Any) -> str:
        """Return an expression for a constant."""
        words = self.values
        if value is None or isinstance(value, bool):
            return quoted({None: words.null, True: words.true, False: words.false}[value])
        if isinstance(value, str):
            mark = self.lark.text(words.quote)
            if words.quote:
                return f"{mark} {quoted(value)} {mark}"
            both = {quoted(value), repr(value)} if words.identifiers else {quoted(value)}
            return f"({' | '.join(map(quoted, sorted(both)))})"
        comma = f" {quoted(words.comma)} "
        if isinstance(value, list):
            return f'"[" {comma.join(map(self.constant, value))} "]"'
        if isinstance(value, dict):
            pairs = [
                f"{quoted(self._key(key, words.key) + words.colon)} {self.constant(each)}"
                for key, each in value.items()
            ]
            return f'"{{" {comma.join(pairs)} "}}"'
        return quoted(orjson.dumps(value).decode())

    def _typed(self, kind: str, schema: Schema) -> str:
        words = self.values
        if kind == "boolean":
            return f"({quoted(words.true)} | {quoted(words.false)})"
        if kind == "null":
            return quoted(words.null)
        if kind in ("integer", "number"):
            return self._number(kind, {name: schema[name] for name in BOUNDS & set(schema)})
        if kind == "string":
            return self._text(schema)
        return self._list(schema) if kind == "array" else self._object(schema)

    def _number(self, kind: str, bounds: Mapping[str, Any]) -> str:
        if not rounds_numbers(bounds):
            return self.lark.json({**bounds, "type": kind})
        if kind == "number" or "multipleOf" in bounds:
            raise ValueError('a bound beyond 2^53 of a number that need not be an integer, or beside "multipleOf"')
        return self.lark.terminal(f"/{integer_pattern(bounds)}/")

    def _text(self, schema: Schema) -> str:
        if not self.values.quote:
            given = {name: schema[name] for name in ("minLength", "maxLength", "pattern", "format") if name in schema}
            text = self.lark.json({**given, "type": "string"})
            if self.values.identifiers and not given.keys() & {"pattern", "format"}:
                return self.lark.rule(f'{text} | "\'" {any_text(schema, _IN_QUOTES)} "\'"')
            return text
        quote = self.values.quote
        if self.lark.is_special(quote):
            return f"{self.lark.text(quote)} {self.lark.terminal(any_text(schema))} {self.lark.text(quote)}"
        text = self.lark.terminal(f"{any_text(schema)} & ~/(?s:.)*{re.escape(quote)}(?s:.)*/")
        return f"{quoted(quote)} {self.lark.rule(f'{text} {quoted(quote)}', '[lazy]')}"

    def _list(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return quoted("[]")
        item = self.lark.rule(self.value(schema.get("items", True)))
        more = f"({quoted(self.values.comma)} {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} {more}"
        return f'"[" {items if least else f"({items})?"} "]"'

    def _object(self, schema: Schema) -> str:
        return f'"{{" {self.members(schema, self.values.key, self.values.colon)} "}}"'

    def _reference(self, path: Any) -> str:
        if path not in self._known:
            place, name = str(path).rpartition("/")[::2]
            found = split(self.root)[1].get(place.removeprefix("#/"), {})
            if not place.startswith("#/") or not isinstance(found, Mapping) or name not in found:
                raise ValueError(f'the reference "{shown(path)}"')
            self._known[path] = self.lark.reserve()
            self.lark.define(self._known[path], self.value(found[name]))
        return self._known[path]

    def _anything(self) -> str:
        if "" not in self._known:
            self._known[""] = self.lark.reserve()
            plain = [self._typed(kind, {"type": kind}) for kind in TYPES]
            self.lark.define(self._known[""], " | ".join(plain))
        return self._known[""]

    def _key(self, name: str, quote: str) -> str:
        if quote:
            return quoted(name)
        is_python = name.isidentifier() and not keyword.iskeyword(name)
        if not (is_python if self.values.identifiers else _KEY.fullmatch(name)):
            raise ValueError(f'the name "{shown(name)}"')
        return name

    def _any_of(self, parts: Iterable[str]) -> str:
        options = list(parts)
        if not options:
            raise ValueError("a schema that admits no value")
        return self.lark.rule(" | ".join(options))
