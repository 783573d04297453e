"""Grammars of tool calls in Lark syntax, built from each model family's syntax of calls and values.

A schema feature that a syntax cannot enforce raises ValueError with its name. Special tokens are written by their ids.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gateway.generate.lark import Lark, quoted
from gateway.generate.schemas import choices_of
from gateway.generate.tool_values import (
    KNOWN,
    JsonValues,
    Literals,
    Schema,
    Values,
    any_text,
    check_keys,
    is_text,
    json_rule,
    properties_of,
    required_names,
    split,
)


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
        if lark.is_special(self.mark):
            lead = f"{anything} {lark.text(self.mark)}"
        else:
            lead = lark.rule(f"{anything} {quoted(self.mark)}", "[lazy]")
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
