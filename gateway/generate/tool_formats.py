"""How families of models write their calls of functions, as data: where a call begins and ends, what is in between, and
a grammar for those who must call. A new family is an entry in FORMATS.

Knows nothing of requests or of streams.
"""

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

NEWLINE = "\n"
_SPACED = {"x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}}


class Call(NamedTuple):
    """`arguments`: a JSON object as text."""

    name: str
    arguments: str


class Function(NamedTuple):
    """A function that is offered, and the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`opens`: a regular expression, with a group `opening`, of what begins calls; `closes`: the text that ends them
    ("": the end of the answer). `marks`: texts by which a chat template is recognised. `decode`: calls in the text
    between the two, ValueError where it has none. `grammar`: for answers of nothing but calls, in Lark's syntax, of
    several calls or of one; None: there is none. `is_special`: what opens is a token that texts do not show.
    """

    name: str
    opens: str
    closes: str
    marks: tuple[str, ...]
    decode: Callable[[str, Mapping[str, Function]], list[Call]]
    grammar: Callable[[Sequence[Function], bool], str] | None = None
    is_special: bool = False


def find_format(template: str) -> ToolFormat | None:
    """The first format that a chat template speaks of; None: none that is known."""
    return next((each for each in FORMATS.values() if any(mark in template for mark in each.marks)), None)


# What is between the marks


def _call(name: Any, arguments: Any) -> Call:
    if isinstance(arguments, str):
        arguments = orjson.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("not a call")
    return Call(name, orjson.dumps(arguments).decode())


def _from_json(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("not a call")
    return _call(value.get("name"), value.get("arguments", value.get("parameters", {})))


def _decode_json(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    value = orjson.loads(text)
    return [_from_json(each) for each in (value if isinstance(value, list) else [value])]


def _decode_mistral(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """A JSON list; newer models write name[ARGS]{...}, one behind the other with the mark between them."""
    if "[ARGS]" not in text:
        return _decode_json(text, functions)
    parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]") if part.strip()]
    return [_call(name.strip().partition("[CALL_ID]")[0], orjson.loads(arguments)) for name, _, arguments in parts]


def _decode_pythonic(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """[name(key=value, ...), ...]: read as an expression, never run."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not a call") from error
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("not a list of calls")
    return [_from_python(each) for each in tree.elts]


def _from_python(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("not a call")
    try:
        arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
        return _call(ast.unparse(node.func), arguments)
    except (TypeError, RecursionError, orjson.JSONEncodeError) as error:
        raise ValueError("not a call") from error


_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", re.DOTALL)


def _decode_xml(text: str, functions: Mapping[str, Function]) -> list[Call]:
    """<function=name> with <parameter=key> in it; values are texts, which the function's schema gives a type."""
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("not a call")
    function = functions.get(found["name"])
    properties = function.parameters.get("properties") if function else None
    types = properties if isinstance(properties, dict) else {}
    pairs = [(each["key"], each["value"]) for each in _PARAMETER.finditer(found["body"])]
    return [_call(found["name"], {key: _typed(value, types.get(key)) for key, value in pairs})]


def _typed(value: str, schema: Any) -> Any:
    """A text stays a text where the schema says so, or where it is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


# Grammars


def _json_grammar(opening: str, arguments: str, closing: str) -> Callable[[Sequence[Function], bool], str]:
    """Calls as JSON objects, each between `opening` and `closing`, as json.dumps would space them."""

    def grammar(functions: Sequence[Function], parallel: bool) -> str:
        schemas = [_call_schema(function, arguments) for function in functions]
        names = [f"call_{number}" for number in range(len(schemas))]
        more = f" ({_lark(NEWLINE)} call)*" if parallel else ""
        lines = [f"start: call{more}"]
        lines.append(f"call: {_lark(opening)} ({' | '.join(names)}) {_lark(closing)}")
        lines += [f"{name}: %json {orjson.dumps(schema).decode()}" for name, schema in zip(names, schemas, strict=True)]
        return "\n".join(lines)

    return grammar


def _call_schema(function: Function, arguments: str) -> dict[str, Any]:
    parameters = dict(function.parameters) or {"type": "object"}
    names = [name for name in ("$defs", "definitions") if name in parameters]
    definitions: dict[str, Any] = {name: parameters.pop(name) for name in names}
    return {
        **_SPACED,
        **definitions,  # where "#/$defs/..." looks for them
        "type": "object",
        "properties": {"name": {"const": function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


def _lark(text: str) -> str:
    return orjson.dumps(text).decode()


def _one_json(functions: Sequence[Function], _parallel: bool) -> str:
    names = [f"call_{number}" for number in range(len(functions))]
    schemas = [orjson.dumps(_call_schema(function, "parameters")).decode() for function in functions]
    lines = [f"{name}: %json {schema}" for name, schema in zip(names, schemas, strict=True)]
    return "\n".join([f"start: {' | '.join(names)}", *lines])


_TOOL_CALL = r"(?P<opening>\s*<tool_call>)"
_FORMATS = (
    ToolFormat("qwen3_xml", _TOOL_CALL, "</tool_call>", ("<function=",), _decode_xml),
    ToolFormat(
        "hermes", _TOOL_CALL, "</tool_call>", ("<tool_call>",), _decode_json,
        _json_grammar("<tool_call>\n", "arguments", "\n</tool_call>"),
    ),
    ToolFormat(
        "mistral", r"(?P<opening>\s*\[TOOL_CALLS\])", "", ("[TOOL_CALLS]",), _decode_mistral, is_special=True
    ),
    ToolFormat("pythonic", r"(?P<opening>\A\s*)(?=\[)", "", ("[func_name1(",), _decode_pythonic),
    ToolFormat(
        "llama3_json", r"(?P<opening>\A\s*(?:<\|python_tag\|>)?\s*)(?=\{)", "",
        ("<|python_tag|>", '"parameters": dictionary'), _decode_json, _one_json,
    ),
)  # fmt: skip
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}
"""By name, in the order in which they are recognised."""
