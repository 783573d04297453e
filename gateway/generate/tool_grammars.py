"""Grammars of answers that call functions, in Lark's syntax: each family's way to write calls, and its way to write
values, as data. What a schema asks for and a family's syntax cannot be held to is a ValueError that names it.

Knows nothing of requests. What is a token of its own and shows in no text (`special`) is spelled by its id.
"""

import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

Schema = Mapping[str, Any]
_SPACED = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}
_DEFINITIONS = ("$defs", "definitions")
_NOTES = {"$schema", "$id", "title", "description", "default", "examples", "deprecated", "strict", *_DEFINITIONS}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_KNOWN = {
    "type", "minLength", "maxLength", "pattern", "format", "items", "minItems", "maxItems", "properties", "required",
    "additionalProperties", *_BOUNDS,
}  # fmt: skip
_IN_QUOTES = r"[^'\\\x00-\x1f\x7f]"
_KEY = re.compile(r"[A-Za-z_$][\w$.-]*")


class Function(NamedTuple):
    """A function that is offered, and the JSON schema of its arguments. `strict`: its calls must have that form."""

    name: str
    parameters: Schema
    strict: bool = True


class Values(NamedTuple):
    """How a family writes values. `quote`: what is around a text, "": as in JSON. `key`: what is around a name.
    `identifiers`: a name that has nothing around it must be one of Python's."""

    true: str = "true"
    false: str = "false"
    null: str = "null"
    quote: str = ""
    key: str = '"'
    comma: str = ", "
    colon: str = ": "
    identifiers: bool = False


PYTHON = Values("True", "False", "None", identifiers=True)
GEMMA = Values(quote='<|"|>', key="", comma=",", colon=":")


class Lark:
    """A grammar as it grows. `special`: ids of the tokens that are no text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._lines: list[str] = []

    def text(self, text: str) -> str:
        """An expression that matches nothing but the text."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else quoted(p) for p in parts if p)

    def is_special(self, text: str) -> bool:
        return text in self._special

    def reserve(self, kind: str = "r") -> str:
        """The name of a rule that is still to be defined."""
        self._lines.append("")
        return f"{kind}_{len(self._lines) - 1}"

    def define(self, name: str, body: str, flags: str = "") -> str:
        self._lines[int(name.rpartition("_")[2])] = f"{name}{flags}: {body}"
        return name

    def rule(self, body: str, flags: str = "") -> str:
        return self.define(self.reserve(), body, flags)

    def terminal(self, body: str) -> str:
        return self.define(self.reserve("T"), body)

    def json(self, schema: Schema) -> str:
        return self.rule(f"%json {orjson.dumps(schema).decode()}")

    def whole(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines])


class CallSyntax(Protocol):
    """How a family writes one call, between its marks."""

    def write(self, lark: Lark, function: Function) -> str:
        """An expression of the calls of a function. Raises ValueError."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """All calls of an answer: `mark` `before` call (`between` call)* `behind`; with `each`, every call has its own mark
    and what is before and behind it. `only`: there is no second call. `leads`: the answer begins with calls, and then
    with this, or it has none."""

    syntax: CallSyntax
    mark: str = ""
    before: str = ""
    between: str = ""
    behind: str = ""
    each: bool = True
    only: bool = False
    leads: str = ""

    def required(self, lark: Lark, functions: Sequence[Function], parallel: bool) -> str:
        """An answer of nothing but calls."""
        opening, calls = lark.text(self.mark + self.before), self._calls(lark, functions)
        several = parallel and not self.only
        if self.each:
            unit = lark.rule(f"{opening} {calls} {lark.text(self.behind)}")
            return f"{unit} ({lark.text(self.between)} {unit})*" if several else unit
        return f"{opening} {self._list(lark, calls, several)} {lark.text(self.behind)}"

    def offered(self, lark: Lark, functions: Sequence[Function], parallel: bool) -> str:
        """An answer that may say anything: where it calls, it does so in this form."""
        if self.leads:
            other = lark.terminal(rf"/(\s*[^\s{re.escape(self.leads)}](?s:.)*)?/")
            return f"{self.required(lark, functions, parallel)} | {other}"
        anything = lark.terminal("/(?s:.)*/")
        if lark.is_special(self.mark):
            lead = f"{anything} {lark.text(self.mark)}"
        else:
            lead = lark.rule(f"{anything} {quoted(self.mark)}", "[lazy]")
        calls = self._calls(lark, functions)
        inner = calls if self.each else self._list(lark, calls, parallel)
        body = lark.rule(f"{lark.text(self.before)} {inner} {lark.text(self.behind)}")
        first = lark.rule(f"{lead} {body}")
        if self.each and self.behind:  # and says more between and behind
            return f"{first}{'*' if parallel else '?'} {anything}"
        more = f"({lark.text(self.between + self.mark)} {body})*" if self.each and parallel else ""
        return f"{first} {more} | {anything}"

    def _calls(self, lark: Lark, functions: Sequence[Function]) -> str:
        return lark.rule(" | ".join([self.syntax.write(lark, function) for function in functions]))

    def _list(self, lark: Lark, call: str, several: bool) -> str:
        return f"{call} ({lark.text(self.between)} {call})*" if several else call


def quoted(text: str) -> str:
    return orjson.dumps(text).decode()


@dataclass(frozen=True, slots=True)
class JsonCall:
    """{"name": ..., "arguments": {...}}, as json.dumps would space it; `key`: of the arguments."""

    key: str = "arguments"

    def write(self, lark: Lark, function: Function) -> str:
        parameters, definitions = _split(function.parameters)
        schema = {
            **_SPACED,
            **definitions,  # where "#/$defs/..." looks for them
            "type": "object",
            "properties": {"name": {"const": function.name}, self.key: parameters or {"type": "object"}},
            "required": ["name", self.key],
            "additionalProperties": False,
        }
        return lark.json(schema)


@dataclass(frozen=True, slots=True)
class ArgumentsCall:
    """The name, a mark, and the arguments as JSON."""

    mark: str

    def write(self, lark: Lark, function: Function) -> str:
        schema = {**_SPACED, **(function.parameters or {"type": "object"})}
        return f"{lark.text(function.name + self.mark)} {lark.json(schema)}"


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """`before` name `opening` key=value, ... `closing`, in a syntax of its own. `sign`: between key and value."""

    values: Values
    before: str
    opening: str
    closing: str
    sign: str

    def write(self, lark: Lark, function: Function) -> str:
        literals = Literals(lark, self.values, function.parameters)
        pairs = literals.pairs(_object(function), "", self.sign)
        return f"{lark.text(self.before + function.name + self.opening)} {pairs} {lark.text(self.closing)}"


@dataclass(frozen=True, slots=True)
class XmlCall:
    """<function=name> with a <parameter=key> for each argument: texts as they are, anything else as JSON."""

    def write(self, lark: Lark, function: Function) -> str:
        schema, definitions = _object(function), _split(function.parameters)[1]
        required = schema.get("required", ())
        parts, mark = [lark.text(f"<function={function.name}>\n")], ">\n"
        for key, value in _properties(schema):
            body = f"{quoted('<parameter=' + key + mark)} {self._value(lark, value, definitions)}"
            parts.append(f"({body}){'' if key in required else '?'}")
        return lark.rule(" ".join([*parts, quoted("</function>")]))

    def _value(self, lark: Lark, schema: Any, definitions: Schema) -> str:
        end = "\n</parameter>\n"
        if not is_text(schema):
            value = {**_SPACED, **definitions, **schema} if isinstance(schema, Mapping) else schema
            return f"{lark.json(value)} {quoted(end)}"
        _check_keys(schema, _KNOWN | {"enum", "const"})
        texts = _choices(schema)
        if texts is not None:
            return f"({' | '.join(map(quoted, map(str, texts)))}) {quoted(end)}"
        text = lark.terminal(_any_text(schema) + r" & ~/(?s:.)*<\/(parameter|tool_call)>(?s:.)*/")
        return lark.rule(f"{text} {quoted(end)}", "[lazy]")


@dataclass(slots=True)
class Literals:
    """The values that a schema admits, as a family writes them. `root`: the schema that references point into."""

    lark: Lark
    values: Values
    root: Schema
    _known: dict[str, str] = field(default_factory=dict)

    def value(self, schema: Any) -> str:
        """An expression of the values. Raises ValueError."""
        if schema is True or (isinstance(schema, Mapping) and not set(schema) - _NOTES):
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ValueError("a schema that admits nothing")
        if "$ref" in schema:
            _check_keys(schema, {"$ref"})
            return self._reference(schema["$ref"])
        choices = _choices(schema)
        if choices is not None:
            return self._any_of(map(self.constant, choices))
        if "anyOf" in schema:
            _check_keys(schema, {"anyOf"})
            return self._any_of(map(self.value, schema["anyOf"]))
        _check_keys(schema, _KNOWN)
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else kinds
        if not kinds or any(kind not in _TYPES for kind in kinds):
            raise ValueError("a schema without a type")
        return self._any_of(self._typed(kind, schema) for kind in kinds)

    def pairs(self, schema: Schema, quote: str, sign: str) -> str:
        """Keys and values of an object, without what is around them."""
        required = schema.get("required", ())
        pairs = [
            (f"{quoted(self._key(key, quote) + sign)} {self.value(value)}", key in required)
            for key, value in _properties(schema)
        ]
        tails = {True: quoted(""), False: quoted("")}  # what may follow, by whether anything was written before
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
        """An expression of one value."""
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
            return self.lark.json({name: schema[name] for name in _BOUNDS & set(schema)} | {"type": kind})
        if kind == "string":
            return self._text(schema)
        return self._list(schema) if kind == "array" else self._object(schema)

    def _text(self, schema: Schema) -> str:
        if not self.values.quote:
            given = {name: schema[name] for name in ("minLength", "maxLength", "pattern", "format") if name in schema}
            text = self.lark.json({**given, "type": "string"})
            if self.values.identifiers and not given.keys() & {"pattern", "format"}:
                return self.lark.rule(f'{text} | "\'" {_any_text(schema, _IN_QUOTES)} "\'"')
            return text
        quote = self.values.quote
        if self.lark.is_special(quote):
            return f"{self.lark.text(quote)} {self.lark.terminal(_any_text(schema))} {self.lark.text(quote)}"
        text = self.lark.terminal(f"{_any_text(schema)} & ~/(?s:.)*{re.escape(quote)}(?s:.)*/")
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
        extra = schema.get("additionalProperties", True)
        if schema.get("properties") or extra is False:
            return f'"{{" {self.pairs(schema, self.values.key, self.values.colon)} "}}"'
        if schema.get("required"):
            raise ValueError('the keyword "required" without "properties"')
        name = self.lark.json({"type": "string"}) if self.values.key else self.lark.terminal(r"/[A-Za-z_][\w]*/")
        pair = self.lark.rule(f"{name} {quoted(self.values.colon)} {self.value(extra)}")
        return f'"{{" ({pair} ({quoted(self.values.comma)} {pair})*)? "}}"'

    def _reference(self, path: Any) -> str:
        if path not in self._known:
            place, name = str(path).rpartition("/")[::2]
            found = _split(self.root)[1].get(place.removeprefix("#/"), {})
            if not place.startswith("#/") or not isinstance(found, Mapping) or name not in found:
                raise ValueError(f'the reference "{path}"')
            self._known[path] = self.lark.reserve()
            self.lark.define(self._known[path], self.value(found[name]))
        return self._known[path]

    def _anything(self) -> str:
        if "" not in self._known:
            self._known[""] = self.lark.reserve()
            plain = [self._typed(kind, {"type": kind}) for kind in _TYPES]
            self.lark.define(self._known[""], " | ".join(plain))
        return self._known[""]

    def _key(self, name: str, quote: str) -> str:
        if quote:
            return quoted(name)
        is_python = name.isidentifier() and not keyword.iskeyword(name)
        if not (is_python if self.values.identifiers else _KEY.fullmatch(name)):
            raise ValueError(f'the name "{name}"')
        return name

    def _any_of(self, parts: Iterable[str]) -> str:
        return self.lark.rule(" | ".join(parts))


def _split(schema: Schema) -> tuple[Schema, Schema]:
    """A schema without its definitions, and these."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {name: value for name, value in schema.items() if name not in definitions}, definitions


def _object(function: Function) -> Schema:
    """The schema of arguments that are named one by one."""
    schema: dict[str, Any] = {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise ValueError("arguments that are no object")
    _check_keys(schema, {"type", "properties", "required", "additionalProperties"})
    if schema.get("additionalProperties") and not schema.get("properties"):
        raise ValueError('the keyword "additionalProperties" without "properties"')
    return schema


def _properties(schema: Schema) -> list[tuple[str, Any]]:
    properties = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        raise ValueError(f'"required" names "{missing[0]}", which is not among the properties')
    if any("\n" in key or ">" in key for key in properties):
        raise ValueError("a name with marks in it")
    return list(properties.items())


def _choices(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def is_text(schema: Any) -> bool:
    """Whether all values that a schema admits are texts, as far as it says so itself."""
    if not isinstance(schema, Mapping):
        return False
    choices = _choices(schema)
    if "type" in schema or not isinstance(choices, list):
        return schema.get("type") == "string"
    return all(isinstance(choice, str) for choice in choices)


def _any_text(schema: Schema, letter: str = "(?s:.)") -> str:
    """Texts as they are, without what JSON has around and in them."""
    for name in ("pattern", "format"):
        if name in schema:
            raise ValueError(f'the keyword "{name}" of a text')
    return f"/{letter}{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _check_keys(schema: Schema, known: set[str]) -> None:
    """Raises ValueError for what would not be enforced."""
    for name in schema:
        if name not in known and name not in _NOTES:
            raise ValueError(f'the keyword "{name}"')
