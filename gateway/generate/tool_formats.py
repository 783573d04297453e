"""Tool call formats of model families, as data: marks around calls, decoder, and grammar for enforced calls.

To support a new family, add an entry to FORMATS.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from gateway.generate.lark import Lark
from gateway.generate.python_calls import read_calls
from gateway.generate.tool_grammars import ArgumentsCall, CallFormat, Function, JsonCall, LiteralCall, XmlCall
from gateway.generate.tool_schemas import is_text
from gateway.generate.tool_values import GEMMA, PYTHON

THINK, END_THINK = "<think>", "</think>"


class Call(NamedTuple):
    """A tool call; `arguments` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool call format of one model family.

    Calls start at the mark of `calls`, or, with `calls.leads`, at the beginning of the answer after an optional `tag`.
    """

    name: str
    closes: str
    """Text that ends calls; "" for the end of the answer."""
    marks: tuple[str, ...]
    """Texts in a chat template by which the format is recognized."""
    decode: Callable[[str, Mapping[str, Function]], list[Call]]
    """Decode the text between the marks in linear time. Raises ValueError if it contains no calls."""
    calls: CallFormat
    """Syntax of calls, for grammars."""
    is_special: bool = False
    """The mark is a special token, which decoded text omits by default."""
    id_chars: int | None = None
    """Length of a call id required by the chat template."""
    tag: str = ""

    def grammar(self, functions: Sequence[Function], special: Mapping[str, int], parallel: bool, required: bool) -> str:
        """Return the grammar of an answer in Lark syntax.

        Args:
            special: ids of special tokens by text.
            parallel: allow several calls.
            required: allow calls only, instead of text with optional calls.

        Raises ValueError for a schema that the format cannot enforce."""
        lark = Lark(special)
        if required:
            return lark.whole(self.calls.required(lark, functions, parallel))
        start = self.calls.offered(lark, functions, parallel)
        if END_THINK in special:  # otherwise the mark is ordinary text, which the grammar allows
            thought = f"{lark.text(THINK)}? {lark.terminal('/(?s:.)*/')} {lark.text(END_THINK)}"
            start = f"({thought})? ({start})"
        return lark.whole(start)


def find_format(template: str) -> ToolFormat | None:
    """Return the first format that is recognized in a chat template, if any."""
    return next((each for each in FORMATS.values() if any(mark in template for mark in each.marks)), None)


# Decoders of the text between the marks


def _call(name: Any, arguments: Any) -> Call:
    if isinstance(arguments, str):
        arguments = orjson.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    try:
        return Call(name, orjson.dumps(arguments).decode())
    except orjson.JSONEncodeError as error:  # nested too deeply, or a number out of range
        raise ValueError("not a call") from error


def _from_json(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not a call")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _decode_json(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    value = orjson.loads(text)
    return [_from_json(each) for each in (value if isinstance(value, list) else [value])]


def _decode_mistral(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """Decode a JSON list, or name[ARGS]{...} of newer models, separated by the mark."""
    if "[ARGS]" not in text:
        return _decode_json(text, functions)
    parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]") if part.strip()]
    return [_call(name.strip().partition("[CALL_ID]")[0], orjson.loads(arguments)) for name, _, arguments in parts]


def _decode_pythonic(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode [name(key=value, ...), ...]."""
    return [_call(name, arguments) for name, arguments in read_calls(text)]


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
_PARAMETER, _END_PARAMETER, _END_FUNCTION = "<parameter=", "</parameter>", "</function>"
_END_KEY = re.compile("[>\n]")


def _decode_xml(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """Decode <function=name> with <parameter=key> elements. The function's schema determines the value types."""
    found = _FUNCTION.match(text)
    if found is None:
        raise ValueError("not a call")
    function = functions.get(found["name"])
    properties = function.parameters.get("properties") if function else None
    types = properties if isinstance(properties, dict) else {}
    values = _read_parameters(text[found.end() :].rstrip().removesuffix(_END_FUNCTION))
    return [_call(found["name"], {key: _typed(value, types.get(key)) for key, value in values.items()})]


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


def _typed(value: str, schema: Any) -> Any:
    """Convert a value from JSON, unless its schema is a string or the value is invalid JSON."""
    if is_text(schema):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


_GEMMA_QUOTES = ('<|"|>', "<escape>")
_GEMMA_CALL = re.compile(r"call:(?P<name>[\w.-]+)(?P<arguments>\{.*\})", re.DOTALL)
_GEMMA_KEY = re.compile(r"([{,]\s*)([A-Za-z_$][\w$.-]*)\s*:")


def _decode_gemma(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode call:name{key:value, ...}: JSON with unquoted names and special marks around strings."""
    found = _GEMMA_CALL.fullmatch(text.strip())
    if found is None:
        raise ValueError("not a call")
    parts = re.split("|".join(map(re.escape, _GEMMA_QUOTES)), found["arguments"])
    written = [
        orjson.dumps(part).decode() if number % 2 else _GEMMA_KEY.sub(r'\1"\2":', part)
        for number, part in enumerate(parts)
    ]
    return [_call(found["name"], orjson.loads("".join(written)))]


def _decode_phi4(text: str, functions: Mapping[str, Function]) -> list[Call]:
    return _decode_json(text.strip().removesuffix("<|/tool_call|>"), functions)


_JSON = JsonCall()
_FORMATS = (
    ToolFormat(
        "qwen3_xml", "</tool_call>", ("<function=",), _decode_xml,
        CallFormat(XmlCall(), "<tool_call>", "\n", "\n", "\n</tool_call>"),
    ),
    ToolFormat(
        "hermes", "</tool_call>", ("<tool_call>",), _decode_json,
        CallFormat(_JSON, "<tool_call>", "\n", "\n", "\n</tool_call>"),
    ),
    ToolFormat(
        "mistral_args", "", ("[ARGS]",), _decode_mistral,
        CallFormat(ArgumentsCall("[ARGS]"), "[TOOL_CALLS]"), is_special=True, id_chars=9,
    ),
    ToolFormat(
        "mistral", "", ("[TOOL_CALLS]",), _decode_mistral,
        CallFormat(_JSON, "[TOOL_CALLS]", "[", ", ", "]", each=False), is_special=True, id_chars=9,
    ),
    ToolFormat(
        "phi4", "", ("<|tool_call|>", "<|tool|>"), _decode_phi4,
        CallFormat(_JSON, "<|tool_call|>", "[", ", ", "]<|/tool_call|>", each=False), is_special=True,
    ),
    ToolFormat(
        "gemma", "<tool_call|>", ("<|tool_call>",), _decode_gemma,
        CallFormat(LiteralCall(GEMMA, "call:", "{", "}", ":"), "<|tool_call>", behind="<tool_call|>"), is_special=True,
    ),
    ToolFormat(
        "functiongemma", "<end_function_call>", ("<start_function_call>",), _decode_gemma,
        CallFormat(
            LiteralCall(GEMMA._replace(quote="<escape>"), "call:", "{", "}", ":"),
            "<start_function_call>", behind="<end_function_call>",
        ),
        is_special=True,
    ),
    ToolFormat(
        "pythonic", "", ("[func_name1(",), _decode_pythonic,
        CallFormat(LiteralCall(PYTHON, "", "(", ")", "="), "", "[", ", ", "]", each=False, leads="["),
    ),
    ToolFormat(
        "llama3_json", "", ("<|python_tag|>", '"parameters": dictionary'), _decode_json,
        CallFormat(JsonCall("parameters"), only=True, leads="{"), tag="<|python_tag|>",
    ),
)  # fmt: skip
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}
"""Formats by name, in the order in which they are tried on a chat template."""
