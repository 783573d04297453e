"""Decoders of tool calls: the text between the marks of a format becomes names and arguments.

Arguments keep the model's own spelling, so that numbers of any size stay exact. All decoders take linear time and raise
ValueError for a text that contains no calls."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import orjson

from gateway.generate.python_calls import read_calls
from gateway.generate.tool_grammars import Function
from gateway.generate.tool_schemas import is_text


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


def _read(decoder: msgspec.json.Decoder[Any], text: str) -> Any:
    """Parse JSON; a `Raw` is checked but not converted. Raises ValueError."""
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("not JSON of this form") from error


def _call(name: str, arguments: str) -> Call:
    _read(_OBJECT, arguments)
    return Call(name, arguments)


def _from_json(call: _JsonCall) -> Call:
    arguments = bytes(call.arguments or call.parameters).decode() or "{}"
    return _call(call.name, _read(_TEXT, arguments) if arguments.startswith('"') else arguments)


def decode_json(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode {"name": ..., "arguments": {...}}, or a list of them."""
    calls = _read(_CALLS, text) if text.lstrip().startswith("[") else [_read(_CALL, text)]
    return [_from_json(call) for call in calls]


def decode_mistral(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """Decode a JSON list, or name[ARGS]{...} of newer models, separated by the mark."""
    if "[ARGS]" not in text:
        return decode_json(text, functions)
    parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]") if part.strip()]
    return [_call(name.strip().partition("[CALL_ID]")[0], arguments.strip()) for name, _, arguments in parts]


def decode_phi4(text: str, functions: Mapping[str, Function]) -> list[Call]:
    return decode_json(text.strip().removesuffix("<|/tool_call|>"), functions)


def decode_pythonic(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode [name(key=value, ...), ...]."""
    return [_call(name, arguments) for name, arguments in read_calls(text)]


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"
_END_KEY = re.compile("[>\n]")


def decode_xml(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """Decode <function=name> with <parameter=key> elements. The function's schema determines the value types."""
    found = _FUNCTION.match(text)
    if found is None:
        raise ValueError("not a call")
    function = functions.get(found["name"])
    properties = function.parameters.get("properties") if function else None
    types = properties if isinstance(properties, dict) else {}
    values = _read_parameters(text[found.end() :].rstrip().removesuffix(_END_FUNCTION))
    pairs = [f"{json.dumps(key)}: {_typed(value, types.get(key))}" for key, value in values.items()]
    return [_call(found["name"], f"{{{', '.join(pairs)}}}")]


def _read_parameters(text: str) -> dict[str, str]:
    """Read the parameters in linear time: every search continues where the last one ended."""
    values: dict[str, str] = {}
    at = text.find(_PARAMETER)
    while at >= 0:
        begin = at + len(_PARAMETER)
        key_end = _END_KEY.search(text, begin)
        if key_end is None:
            break
        at = key_end.end()
        if key_end[0] == ">" and key_end.start() > begin:
            end = text.find(_END_PARAMETER, at)
            if end < 0:
                break
            values[text[begin : key_end.start()]] = text[at:end].removeprefix("\n").removesuffix("\n")
            at = end + len(_END_PARAMETER)
        at = text.find(_PARAMETER, at)
    return values


def _typed(value: str, schema: Any) -> str:
    """Return a value as JSON: as a string if its schema is a string or the value is invalid JSON."""
    if not is_text(schema):
        try:
            _read(_VALUE, value)
        except ValueError:
            pass
        else:
            return value
    return orjson.dumps(value).decode()


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
    return [_call(found["name"], "".join(written))]
