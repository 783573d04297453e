"""Grammars in Lark syntax: builder, argument values in the syntax of each model family, and calls.

A schema feature that a syntax cannot enforce raises ValueError with its name. Special tokens are written by their ids.
"""

import keyword
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple, Protocol
from urllib.parse import unquote

import orjson

from engine.errors import InvalidRequestError
from engine.forms import MAX_GRAMMAR_BYTES, Grammar
from gateway.generate.schemas import KIND_OF, choices_of, rounds_numbers


def quoted(text: str) -> str:
    return orjson.dumps(text).decode()


class Lark:
    """A grammar under construction, which can become much longer than its request. `special`: ids of special tokens by
    text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._marks = re.compile("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")")
        self._lines: list[str] = []
        self._room = MAX_GRAMMAR_BYTES

    def text(self, text: str) -> str:
        """Return an expression that matches exactly the text."""
        parts = self._marks.split(text) if self._special else [text]
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else quoted(p) for p in parts if p)

    def is_special(self, text: str) -> bool:
        return text in self._special

    def reserve(self, kind: str = "r") -> str:
        """Return the name of a rule that is defined later."""
        self._lines.append("")
        return f"{kind}_{len(self._lines) - 1}"

    def define(self, name: str, body: str, flags: str = "") -> str:
        """Define a rule and return its name. Raises ValueError if the grammar becomes too long."""
        line = f"{name}{flags}: {body}"
        self._take_room(len(line.encode()) + 1)
        self._lines[int(name.rpartition("_")[2])] = line
        return name

    def rule(self, body: str, flags: str = "") -> str:
        return self.define(self.reserve(), body, flags)

    def terminal(self, body: str) -> str:
        return self.define(self.reserve("T"), body)

    def until(self, terminal: str, end: str) -> str:
        """Return an expression for the shortest text of a terminal that is followed by `end`."""
        if any(token in end for token in self._special):
            return f"{terminal} {self.text(end)}"
        return self.rule(f"{terminal} {quoted(end)}", "[lazy]")

    def json(self, schema: Any) -> str:
        return self.rule(f"%json {orjson.dumps(schema).decode()}")

    def whole(self, start: str) -> str:
        line = f"start: {start}"
        self._take_room(len(line.encode()))
        return "\n".join([line, *self._lines])

    def _take_room(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            most = MAX_GRAMMAR_BYTES // 1024
            raise ValueError(f"the grammar is longer than {most} KiB; send smaller schemas or fewer tools")


def integer_pattern(bounds: Mapping[str, int | float]) -> str:
    """Return a regular expression for the integers within `minimum`, `exclusiveMinimum`, `maximum` and
    `exclusiveMaximum`. Raises ValueError if there are none."""
    if any(isinstance(bound, bool) for bound in bounds.values()):
        raise ValueError("a bound must be a number")
    lows = [math.ceil(bounds["minimum"])] if "minimum" in bounds else []
    lows += [math.floor(bounds["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in bounds else []
    highs = [math.floor(bounds["maximum"])] if "maximum" in bounds else []
    highs += [math.ceil(bounds["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in bounds else []
    least, most = max(lows, default=None), min(highs, default=None)
    if least is not None and most is not None and least > most:
        raise ValueError("no integer lies within the bounds")
    parts: list[str] = []
    if least is None or least < 0:
        negative = _magnitudes(max(1, -most) if most is not None else 1, None if least is None else -least)
        parts += [f"-{part}" for part in negative]
    if most is None or most >= 0:
        parts += _magnitudes(max(0, least or 0), most)
    return f"({'|'.join(parts)})"


def _magnitudes(least: int, most: int | None) -> Iterator[str]:
    """Yield patterns that together match the decimal integers from `least` to `most`; None: without limit."""
    if most is None:
        digits = len(str(least))
        yield f"[1-9][0-9]{{{digits},}}"
        most = 10**digits - 1
    while least <= most:  # from `least` on, all numbers that differ in one digit and those behind it
        size = 1
        while least and least % (10 * size) == 0 and least + 10 * size - 1 <= most:
            size *= 10
        digit = least // size % 10
        count = min(10 - digit, (most - least + 1) // size)
        yield f"{least // size // 10 or ''}[{digit}-{digit + count - 1}][0-9]{{{len(str(size)) - 1}}}"
        least += count * size


def admits(schema: Mapping[str, Any], choice: Any) -> bool:
    """Return whether the type, bounds and lengths of a schema admit a value that it lists."""
    named, kinds = schema.get("type"), [KIND_OF[type(choice)]]
    if kinds == ["number"] and float(choice).is_integer():
        kinds.append("integer")
    if named is not None and not any(kind in kinds for kind in ([named] if isinstance(named, str) else named)):
        return False
    if isinstance(choice, str):
        return bool(schema.get("minLength", 0) <= len(choice) <= schema.get("maxLength", len(choice)))
    if isinstance(choice, bool) or not isinstance(choice, int | float):
        return True
    least, most = schema.get("minimum", choice), schema.get("maximum", choice)
    above, below = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    step = schema.get("multipleOf")
    divides = step is None or Fraction(str(choice)) % Fraction(str(step)) == 0
    return bool(least <= choice <= most and above < choice < below and divides)


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


NO_SCHEMA = (AttributeError, TypeError, KeyError, ArithmeticError)
"""Exceptions of a schema whose keywords have values of other types."""
_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)
"""Matches the parts of a regular expression that need care between slashes."""


def form_rule(lark: Lark, form: Grammar) -> str:
    """Return a rule for a form: JSON, choices, or a regular expression. Raises ValueError."""
    if form.kind == "choice":
        return lark.terminal(" | ".join(map(quoted, orjson.loads(form.text))))
    if form.kind == "regex":
        return lark.terminal(f"/{_SLASH.sub(_escaped, form.text)}/")
    schema, whitespace = orjson.loads(form.text), form.whitespace
    exact = _exact_rule(lark, schema, whitespace)
    if exact is not None:
        return exact
    options = {"whitespace_flexible": False} if whitespace is None else {"whitespace_pattern": whitespace}
    return lark.json({**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema)


def _escaped(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _exact_rule(lark: Lark, schema: Any, whitespace: str | None) -> str | None:
    """Return a rule for compact JSON, or None if the grammar library rounds no number of the schema. Raises
    ValueError."""
    if not rounds_numbers(schema):
        return None
    if whitespace is not None:
        raise ValueError("white space cannot be chosen for a schema with numbers of more than 15 digits")
    return lark.rule(Literals(lark, COMPACT, schema).value(schema))


def exact_grammar(form: Grammar | None) -> Grammar | None:
    """Return a form, as Lark if it is a JSON schema with numbers that the grammar library would round. Raises
    InvalidRequestError."""
    if form is None or form.kind != "json":
        return form
    lark = Lark({})
    try:
        rule = _exact_rule(lark, orjson.loads(form.text), form.whitespace)
        return form if rule is None else replace(form, kind="lark", text=lark.whole(rule))
    except RecursionError as error:
        raise refusal(form.param, "it is nested too deeply") from error
    except ValueError as error:
        raise refusal(form.param, error) from error
    except NO_SCHEMA as error:
        message = f"'{form.param}' is not a valid JSON schema."
        raise InvalidRequestError(message, param=form.param, code="invalid_value") from error


def refusal(param: str, reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"'{param}' cannot be enforced: {reason}.", param=param)


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
        quote, text = self.values.quote, any_text(schema)
        if not self.lark.is_special(quote):
            text += f" & ~/(?s:.)*{re.escape(quote)}(?s:.)*/"
        return f"{self.lark.text(quote)} {self.lark.until(self.lark.terminal(text), quote)}"

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


class Function(NamedTuple):
    """An offered function with the JSON schema of its arguments. `strict`: enforce the schema."""

    name: str
    parameters: Schema
    strict: bool = True


class CallSyntax(Protocol):
    """Syntax of one call between its marks."""

    def write(self, lark: Lark, function: Function) -> str:
        """Return an expression for calls of a function. Raises ValueError."""
        ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Syntax of all calls in an answer: `mark` `before` call (`between` call)* `behind`."""

    syntax: CallSyntax
    mark: str = ""
    before: str = ""
    between: str = ""
    behind: str = ""
    each: bool = True
    """Every call has its own `mark`, `before` and `behind`."""
    only: bool = False
    """At most one call."""
    leads: str = ""
    """First character of an answer with calls, which cannot start later; "": calls may follow text."""

    def required(self, lark: Lark, functions: Sequence[Function], parallel: bool) -> str:
        """Return an expression for an answer that consists of calls."""
        opening, calls = lark.text(self.mark + self.before), self._calls(lark, functions)
        several = parallel and not self.only
        if self.each:
            unit = lark.rule(f"{opening} {calls} {lark.text(self.behind)}")
            return f"{unit} ({lark.text(self.between)} {unit})*" if several else unit
        return f"{opening} {self._list(lark, calls, several)} {lark.text(self.behind)}"

    def offered(self, lark: Lark, functions: Sequence[Function], parallel: bool) -> str:
        """Return an expression for any answer whose calls, if any, have this syntax."""
        if self.leads:
            other = lark.terminal(rf"/(\s*[^\s{re.escape(self.leads)}](?s:.)*)?/")
            return f"{self.required(lark, functions, parallel)} | {other}"
        anything = lark.terminal("/(?s:.)*/")
        lead = lark.until(anything, self.mark)
        calls = self._calls(lark, functions)
        inner = calls if self.each else self._list(lark, calls, parallel)
        body = lark.rule(f"{lark.text(self.before)} {inner} {lark.text(self.behind)}")
        first = lark.rule(f"{lead} {body}")
        if self.each and self.behind:  # text may follow each call
            return f"{first}{'*' if parallel else '?'} {anything}"
        more = f"({lark.text(self.between + self.mark)} {body})*" if self.each and parallel else ""
        return f"{first} {more} | {anything}"

    def _calls(self, lark: Lark, functions: Sequence[Function]) -> str:
        return lark.rule(" | ".join([self.syntax.write(lark, function) for function in functions]))

    def _list(self, lark: Lark, call: str, several: bool) -> str:
        return f"{call} ({lark.text(self.between)} {call})*" if several else call


@dataclass(frozen=True, slots=True)
class JsonCall:
    """{"name": ..., "arguments": {...}} with the spaces of json.dumps; `key`: name of the arguments field."""

    key: str = "arguments"

    def write(self, lark: Lark, function: Function) -> str:
        parameters, definitions = split(function.parameters)
        schema = {
            **definitions,  # at the root, where "#/$defs/..." refers to
            "type": "object",
            "properties": {"name": {"const": function.name}, self.key: {"type": "object", **parameters}},
            "required": ["name", self.key],
            "additionalProperties": False,
        }
        return json_rule(lark, schema)


@dataclass(frozen=True, slots=True)
class ArgumentsCall:
    """`before` name `number` `mark` arguments `behind`: the arguments are JSON, `number` is a regular expression."""

    mark: str
    before: str = ""
    behind: str = ""
    number: str = ""

    def write(self, lark: Lark, function: Function) -> str:
        number = lark.terminal(f"/{self.number}/") if self.number else ""
        arguments = json_rule(lark, {"type": "object", **function.parameters})
        name = lark.text(self.before + function.name)
        return f"{name} {number} {lark.text(self.mark)} {arguments} {lark.text(self.behind)}"


@dataclass(frozen=True, slots=True)
class LiteralCall:
    """`before` name `opening` key `sign` value, ... `closing`, with the family's own syntax of values."""

    values: Values
    before: str
    opening: str
    closing: str
    sign: str

    def write(self, lark: Lark, function: Function) -> str:
        literals = Literals(lark, self.values, function.parameters)
        pairs = literals.members(_object(function), "", self.sign)
        return f"{lark.text(self.before + function.name + self.opening)} {pairs} {lark.text(self.closing)}"


class XmlSyntax(NamedTuple):
    """Marks of one XML-like call: `call` name `named` (`key` key `value` text `end`)* `close`."""

    call: str
    named: str
    key: str
    value: str
    end: str
    close: str
    outer: str
    """Mark behind the call, which a string must not contain."""
    pad: str = ""
    """Text on both sides of a value."""
    line: str = "\n"
    """Text between the parts."""


@dataclass(frozen=True, slots=True)
class XmlCall:
    """An element per argument: strings unquoted, other values as JSON."""

    syntax: XmlSyntax

    def write(self, lark: Lark, function: Function) -> str:
        marks, schema, values = self.syntax, _object(function), JsonValues(lark, function.parameters)
        required = required_names(schema)
        parts = [lark.text(marks.call + function.name + marks.named + marks.line)]
        for key, value in properties_of(schema):
            body = f"{lark.text(marks.key + key + marks.value + marks.pad)} {self._value(lark, value, values)}"
            parts.append(f"({body}){'' if key in required else '?'}")
        extra = schema.get("additionalProperties", True)
        if extra is not False and not schema.get("properties"):
            name, value = lark.terminal(r"/[^<>\n\"]+/"), {"type": "string"} if extra is True else extra
            mark = lark.text(marks.value + marks.pad)
            parts.append(f"({lark.text(marks.key)} {name} {mark} {self._value(lark, value, values)})*")
        return lark.rule(" ".join([*parts, lark.text(marks.close)]))

    def _value(self, lark: Lark, schema: Any, values: JsonValues) -> str:
        marks = self.syntax
        end = marks.pad + marks.end + marks.line
        if not is_text(schema):
            return f"{values.rule(schema)} {lark.text(end)}"
        check_keys(schema, KNOWN | {"enum", "const"})
        texts = choices_of(schema)
        if texts is not None:
            return f"({' | '.join(map(quoted, map(str, texts)))}) {lark.text(end)}"
        forbidden = "|".join(re.escape(mark).replace("/", r"\/") for mark in (marks.end, marks.outer))
        return lark.until(lark.terminal(f"{any_text(schema)} & ~/(?s:.)*({forbidden})(?s:.)*/"), end)


def _object(function: Function) -> Schema:
    """Return a function's schema for syntaxes that write each argument separately. Raises ValueError."""
    schema: dict[str, Any] = {"type": "object", **function.parameters}
    if schema["type"] != "object":
        raise ValueError("arguments that are not an object")
    check_keys(schema, {"type", "properties", "required", "additionalProperties"})
    return schema
