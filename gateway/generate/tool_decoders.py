"""Decoders of tool calls: the text between the marks of a format becomes names and arguments.

Arguments keep the model's own spelling, so that numbers of any size stay exact. All decoders take linear time and raise
ValueError for a text that contains no calls."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from gateway.generate.python_calls import read_calls
from gateway.generate.schemas import KINDS, kinds_of
from gateway.generate.tool_grammars import Function, XmlSyntax
from gateway.generate.tool_values import is_text


class Call(NamedTuple):
    """A tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


class _JsonCall(msgspec.Struct):
    """A call as JSON. `arguments` or `parameters` is an object, or an object as text."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_CALL = msgspec.json.Decoder(_JsonCall)
_CALLS = msgspec.json.Decoder(list[_JsonCall])
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXT = msgspec.json.Decoder(str)
_VALUE = msgspec.json.Decoder(msgspec.Raw)
_SCANNER = json.JSONDecoder(parse_int=str, parse_float=str)
_SEPARATOR = re.compile(r"\s*;?\s*")


def _read(decoder: msgspec.json.Decoder[Any], text: str) -> Any:
    """Parse JSON; a `Raw` is checked but not converted. Raises ValueError."""
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("not JSON of this form") from error


def checked_call(name: str, arguments: str) -> Call:
    """Return a call. Raises ValueError if the arguments are not a JSON object."""
    _read(_OBJECT, arguments)
    return Call(name, arguments)


def _from_json(call: _JsonCall) -> Call:
    arguments = bytes(call.arguments or call.parameters).decode() or "{}"
    return checked_call(call.name, _read(_TEXT, arguments) if arguments.startswith('"') else arguments)


def decode_json(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode {"name": ..., "arguments": {...}}, or a list of them."""
    calls = _read(_CALLS, text) if text.lstrip().startswith("[") else [_read(_CALL, text)]
    return [_from_json(call) for call in calls]


def decode_llama(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode JSON calls with semicolons or white space between them."""
    calls, at = [], 0
    while at < len(text):
        try:
            _, end = _SCANNER.raw_decode(text, at)
        except RecursionError as error:
            raise ValueError("too deep") from error
        calls.append(_from_json(_read(_CALL, text[at:end])))
        between = _SEPARATOR.match(text, end)
        at = between.end() if between else end
    return calls


def decode_mistral(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """Decode a JSON list, or name[ARGS]{...} of newer models, separated by the mark."""
    if "[ARGS]" not in text:
        return decode_json(text, functions)
    parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]") if part.strip()]
    return [checked_call(name.strip().partition("[CALL_ID]")[0], arguments.strip()) for name, _, arguments in parts]


def decode_phi4(text: str, functions: Mapping[str, Function]) -> list[Call]:
    return decode_json(text.strip().removesuffix("<|/tool_call|>"), functions)


def decode_pythonic(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode [name(key=value, ...), ...]."""
    return [checked_call(name, arguments) for name, arguments in read_calls(text)]


class SplitDecoder:
    """Decode `begin` head `middle` rest `end` calls. `read` converts head and rest to a name and arguments."""

    def __init__(self, begin: str, middle: str, end: str, read: Callable[[str, str], tuple[str, str]]) -> None:
        self._begin, self._middle, self._end, self._read = begin, middle, end, read

    def __call__(self, text: str, _functions: Mapping[str, Function]) -> list[Call]:
        before, *parts = text.split(self._begin)
        if before.strip():
            raise ValueError("text before the calls")
        split = [part.strip().removesuffix(self._end).partition(self._middle) for part in parts]
        return [checked_call(*self._read(head, rest.strip())) for head, _, rest in split]


def read_plain(head: str, rest: str) -> tuple[str, str]:
    return head, rest


def read_fenced(_head: str, rest: str) -> tuple[str, str]:
    """Read a name and arguments in a code block."""
    name, _, arguments = rest.partition("\n```json\n")
    return name, arguments.removesuffix("```").strip()


def read_numbered(head: str, rest: str) -> tuple[str, str]:
    """Read the name from an id, functions.NAME:NUMBER."""
    return head.removeprefix("functions.").rpartition(":")[0], rest


class XmlDecoder:
    """Decode XML-like calls. The function's schema determines the types of values.

    Linear time: every search continues where the last one ended."""

    def __init__(self, syntax: XmlSyntax) -> None:
        self._end, self._close, self._pad = syntax.end, syntax.close, syntax.pad
        self._call = re.compile(rf'\s*{re.escape(syntax.call)}([^<>"\n]+){re.escape(syntax.named)}')
        self._next = re.compile("|".join(map(re.escape, filter(None, (syntax.key, syntax.close)))))
        self._value = re.compile(r"\s*".join(map(re.escape, syntax.value.split("\n"))) + "|\n")

    def __call__(self, text: str, functions: Mapping[str, Function]) -> list[Call]:
        calls: list[Call] = []
        at, last = 0, text.rfind(self._end)
        while (found := self._call.match(text, at)) is not None:
            name = found[1].strip()
            values, at = self._arguments(text, found.end(), last)
            function = functions.get(name)
            parameters = function.parameters if function else {}
            properties = parameters.get("properties")
            types = properties if isinstance(properties, dict) else {}
            pairs = [f"{json.dumps(key)}: {_typed(value, types.get(key), parameters)}" for key, value in values.items()]
            calls.append(checked_call(name, f"{{{', '.join(pairs)}}}"))
        if text[at:].strip():
            raise ValueError("not a call")
        return calls

    def _arguments(self, text: str, at: int, last: int) -> tuple[dict[str, str], int]:
        """Read the arguments of a call; return them and the end of the call. After `last`, the position of the last end
        mark, a value ends with its call."""
        values: dict[str, str] = {}
        while (mark := self._next.search(text, at)) is not None:
            begin = mark.end()
            if mark[0] == self._close:
                return values, begin
            named = self._value.search(text, begin)
            if named is None:
                raise ValueError("an argument without a value")
            at = named.end()
            key = text[begin : named.start()]
            if named[0] == "\n" or not key:
                continue
            ending = self._end if at <= last else self._close
            end = text.find(ending, at) if ending else -1
            if end < 0:
                raise ValueError("an incomplete value")
            values[key] = text[at:end].removeprefix(self._pad).removesuffix(self._pad)
            at = end + (len(ending) if at <= last else 0)
        return values, len(text)


def _typed(value: str, schema: Any, root: Mapping[str, Any]) -> str:
    """Return a value as JSON: JSON or a Python literal of a type that the schema admits, else a string."""
    if is_text(schema):
        return orjson.dumps(value).decode()
    kinds = kinds_of(schema, root)
    found = value if _is_json(value) else None if kinds == KINDS else _python_literal(value)
    if found is None or ("string" in kinds and not _is_of(found.strip(), kinds)):
        return orjson.dumps(value).decode()
    return found


def _is_json(text: str) -> bool:
    try:
        _read(_VALUE, text)
    except ValueError:
        return False
    return True


def _python_literal(text: str) -> str | None:
    try:
        ((_, arguments),) = read_calls(f"[f(v={text})]")
        values = _read(_OBJECT, arguments)
    except ValueError:
        return None
    return bytes(values["v"]).decode() if values.keys() == {"v"} else None


def _is_of(text: str, kinds: frozenset[str]) -> bool:
    """Return whether a JSON value is of one of the kinds."""
    names = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
    return names.get(text[0], "number") in kinds


_GEMMA_QUOTES = ('<|"|>', "<escape>")
_GEMMA_CALL = re.compile(r"call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_$][\w$.-]*)\s*:")


def decode_gemma(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode call:name{key:value, ...}: JSON with unquoted names and special marks around strings."""
    found = _GEMMA_CALL.fullmatch(text.strip())
    if found is None:
        raise ValueError("not a call")
    parts = re.split("|".join(map(re.escape, _GEMMA_QUOTES)), found["arguments"])
    written = [
        orjson.dumps(part).decode() if number % 2 else _GEMMA_KEY.sub(r'\1"\2":', part)
        for number, part in enumerate(parts)
    ]
    return [checked_call(found["name"], "".join(written))]
