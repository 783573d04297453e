"""Tool call formats of model families, as data: marks around calls, decoder, and grammar for enforced calls.

To support a new family, add an entry to FORMATS.

In the harmony format of gpt-oss an answer consists of messages in channels.

A message is `<|start|>` header `<|message|>` text `<|end|>`. The header names the role, the channel and, for a call,
the recipient, e.g. `assistant<|channel|>commentary to=functions.NAME <|constrain|>json`. The prompt ends with
`<|start|>assistant`; `<|return|>` or `<|call|>` end the answer. The channel `analysis` holds reasoning, `final` the
answer, and `commentary` calls and texts before calls. Source: docs/format.md in the repository openai/harmony.

Arguments keep the model's own spelling, so that numbers of any size stay exact. Decoders turn the text between the
marks into names and arguments in linear time; they raise ValueError for a text that contains no calls.

Calls in Python syntax, `[name(key=value, ...), ...]`, are converted without executing anything. Python's own parser
takes more than linear time for hostile text.
"""

import ast
import json
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import msgspec
import orjson

from engine.forms import Grammar
from gateway.generate.grammars import (
    GEMMA,
    PYTHON,
    ArgumentsCall,
    CallFormat,
    Function,
    JsonCall,
    Lark,
    LiteralCall,
    XmlCall,
    XmlSyntax,
    form_rule,
    is_text,
)
from gateway.generate.history import joined
from gateway.generate.schemas import KINDS, kinds_of


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
_KIND_OF = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null"}
"""Kind of a JSON value by its first character; the others are numbers."""


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
    if found is None or ("string" in kinds and _KIND_OF.get(found.strip()[0], "number") not in kinds):
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


MAX_DEPTH = 100  # nested lists and dictionaries
_TOKEN = re.compile(
    r"""\s*+(?:
    (?P<text>[rRuU]?(?:'[^'\\\n]*+(?:\\.[^'\\\n]*+)*+'|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"))
    |(?P<number>[-+]?\s*+(?:0[xXoObB]\w++|(?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][-+]?[0-9][0-9_]*+)?))
    |(?P<name>[^\W\d]\w*+)
    |(?P<mark>[][(){}=,:.])
    |(?P<end>\Z))""",
    re.DOTALL | re.VERBOSE,
)
_DECIMAL = re.compile(r"(-?)([0-9]*)(?:(\.)([0-9]*))?([eE][-+]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_Item = TypeVar("_Item")


def read_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of the calls, the arguments as JSON. Raises ValueError for any other text."""
    reader = _Reader(text)
    reader.expect("[")
    calls = reader.items("]", reader.call)
    if reader.kind != "end":
        raise ValueError("text after the calls")
    return calls


class _Reader:
    """Recursive descent parser with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._end = 0
        self.kind: str | None = ""
        self.token = ""
        self._next()

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._end)
        if found is None:
            raise ValueError("not a Python literal")
        self.kind, self._end = found.lastgroup, found.end()
        self.token = found[self.kind or 0]

    def _take(self, kind: str) -> str:
        if self.kind != kind:
            raise ValueError(f"expected a {kind}")
        token = self.token
        self._next()
        return token

    def _is(self, mark: str) -> bool:
        return self.kind == "mark" and self.token == mark

    def expect(self, mark: str) -> None:
        if not self._is(mark):
            raise ValueError(f"expected {mark}")
        self._next()

    def items(self, closing: str, item: Callable[[], _Item]) -> list[_Item]:
        """Parse items separated by commas, with an optional trailing comma."""
        found: list[_Item] = []
        while not self._is(closing):
            found.append(item())
            if not self._is(closing):
                self.expect(",")
        self._next()
        return found

    def call(self) -> tuple[str, str]:
        parts = [self._name()]
        while self._is("."):
            self._next()
            parts.append(self._name())
        self.expect("(")
        return ".".join(parts), _object(self.items(")", self._argument))

    def _name(self) -> str:
        name = self._take("name")
        if keyword.iskeyword(name):
            raise ValueError("a Python keyword as a name")
        return name

    def _argument(self) -> tuple[str, str]:
        name = self._name()
        self.expect("=")
        return json.dumps(name, ensure_ascii=False), self._value(MAX_DEPTH)

    def _value(self, depth: int) -> str:
        """Parse a value; return it as JSON."""
        if self.kind == "text":
            return self._texts()
        if self.kind == "number":
            return _number(self._take("number"))
        if self.kind == "name" and self.token in _WORDS:
            return _WORDS[self._take("name")]
        if self.kind != "mark" or self.token not in "[({" or depth == 0:
            raise ValueError("expected a value")
        return self._container(self._take("mark"), depth - 1)

    def _container(self, opening: str, depth: int) -> str:
        if opening == "[":
            return _list(self.items("]", lambda: self._value(depth)))
        if opening == "{":
            return _object(self.items("}", lambda: self._pair(depth)))
        if self._is(")"):
            return _list(self.items(")", lambda: self._value(depth)))
        first = self._value(depth)
        if self._is(")"):  # parentheses around a value
            self._next()
            return first
        self.expect(",")
        return _list([first, *self.items(")", lambda: self._value(depth))])

    def _pair(self, depth: int) -> tuple[str, str]:
        name = self._texts()
        self.expect(":")
        return name, self._value(depth)

    def _texts(self) -> str:
        """Parse a string; adjacent string literals are concatenated."""
        parts = [_text(self._take("text"))]
        while self.kind == "text":
            parts.append(_text(self._take("text")))
        return json.dumps("".join(parts), ensure_ascii=False)


def _text(token: str) -> str:
    if token[0] in "'\"" and "\\" not in token:
        return token[1:-1]
    try:
        value: str = ast.literal_eval(token)
    except SyntaxError as error:
        raise ValueError("invalid string") from error
    return value


def _list(values: Iterable[str]) -> str:
    return f"[{', '.join(values)}]"


def _object(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a JSON object; of equal names the last one counts."""
    return f"{{{', '.join(f'{name}: {value}' for name, value in dict(pairs).items())}}}"


def _number(token: str) -> str:
    """Return a number as JSON with all its digits."""
    digits = "".join(token.split()).removeprefix("+").replace("_", "")
    found = _DECIMAL.fullmatch(digits)
    if found is None:
        return str(int(digits, 0))
    sign, whole, point, fraction, exponent = found.groups("")
    return sign + (whole.lstrip("0") or "0") + (f".{fraction or 0}" if point else "") + exponent


THINK, END_THINK = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
STOPS = ("<|return|>", "<|call|>")
"""Special tokens that end an answer."""
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALLING = "<|channel|>commentary to=functions."
_COMMENTARY = "<|channel|>commentary<|message|>"
_NEXT = "<|end|><|start|>assistant"


def channel_rule(lark: Lark, calls: str, form: Grammar | None, required: bool, budget: int | None) -> str:
    """Return an expression for an answer.

    `calls`: expression for a call, "" without tools; `form`: of the final text; `required`: the answer must call;
    `budget`: maximum number of reasoning tokens.
    """
    anything, following = lark.terminal("/(?s:.)*/"), lark.text(_NEXT)
    limit = "" if budget is None else f"[max_tokens={budget}]"
    thought = f"{lark.text(ANALYSIS)} {lark.rule(anything, limit)} {following}"
    thoughts = "" if budget == 0 else f"({thought}){'*' if budget is None else '?'}"
    if required:
        return f"{thoughts} {calls}"
    final = f"{lark.text(FINAL)} {anything if form is None else form_rule(lark, form)}"
    if form is not None:  # a text before the form would be part of the answer
        return f"{thoughts} ({calls} | {final})" if calls else f"{thoughts} {final}"
    said = f"{lark.text(_COMMENTARY)} {anything}"
    before = f"({said} {following} | {thought})*" if budget is None else f"{thoughts} ({said} {following})*"
    return f"{before} ({calls} | {final} | {said})"


def decode_channel(text: str, _functions: Mapping[str, Function]) -> list[Call]:
    """Decode name `<|message|>` arguments."""
    name, _, arguments = text.partition(MESSAGE)
    return [checked_call(name, arguments.strip() or "{}")]


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
    numbers_ids: bool = False
    """The chat template requires the ids functions.NAME:0, functions.NAME:1, ... in a conversation."""
    tag: str = ""
    bare: str = ""
    """Text behind the mark that also begins calls without their mark, which some models forget."""
    must_close: bool = False
    """A call without its end mark is incomplete, because its syntax alone does not tell its end."""
    has_channels: bool = False
    """Every answer, with or without tools, consists of messages in channels, see the module."""

    def grammar(
        self,
        functions: Sequence[Function],
        special: Mapping[str, int],
        parallel: bool,
        required: bool,
        form: Grammar | None = None,
        budget: int | None = None,
    ) -> str:
        """Return the grammar of an answer in Lark syntax.

        Args:
            special: ids of special tokens by text.
            parallel: allow several calls.
            required: allow calls only, instead of text with optional calls.
            form: of an answer without calls; None: any text, which calls may follow.
            budget: maximum number of reasoning tokens; only a format with channels enforces it here.

        Raises ValueError for a schema that the format cannot enforce."""
        lark = Lark(special)
        if self.has_channels:
            call = self.calls.required(lark, functions, parallel) if functions else ""
            answer = channel_rule(lark, call, form, required, budget)
            return lark.whole(answer)
        if required or form is not None:
            calls = self.calls.required(lark, functions, parallel)
            return lark.whole(calls if required or form is None else f"({calls}) | {form_rule(lark, form)}")
        start = self.calls.offered(lark, functions, parallel)
        if END_THINK in special:  # otherwise the mark is ordinary text, which the grammar allows
            thought = f"{lark.text(THINK)}? {lark.terminal('/(?s:.)*/')} {lark.text(END_THINK)}"
            start = f"({thought})? ({start})"
        return lark.whole(start)

    def adapt(self, messages: Sequence[dict[str, Any]]) -> None:
        """Change past reasoning and the ids of calls and results as the model's chat template requires."""
        numbered: dict[str, str] = {}
        number = 0
        for message in messages:
            for call in message.get("tool_calls", ()):
                if self.numbers_ids:
                    numbered[call["id"]] = f"functions.{call['function']['name']}:{number}"
                    number += 1
                call["id"] = self._id(numbered.get(call["id"], call["id"]))
            if (given := message.get("tool_call_id")) is not None:
                message["tool_call_id"] = self._id(numbered.get(given, given))
            if self.has_channels:
                _name_thoughts(message)

    def _id(self, given: str) -> str:
        """Return an id of a call, as a hexadecimal digest if the template requires a length."""
        size = self.id_chars
        return given if size is None else blake2b(given.encode(), digest_size=size).hexdigest()[:size]


def _name_thoughts(message: dict[str, Any]) -> None:
    """Rename the reasoning as gpt-oss's template reads it. The template takes no text beside it in a message with calls
    and writes a lone text as reasoning, so both become one text."""
    thoughts = message.pop("reasoning_content", None)
    if thoughts and message.get("tool_calls") and message.get("content"):
        thoughts = f"{thoughts}\n\n{joined(message.pop('content'))}"
    if thoughts:
        message["thinking"] = thoughts


def find_format(template: str) -> ToolFormat | None:
    """Return the first format that is recognized in a chat template, if any."""
    return next((each for each in FORMATS.values() if any(mark in template for mark in each.marks)), None)


_JSON = JsonCall()
_QWEN = XmlSyntax("<function=", ">", "<parameter=", ">", "</parameter>", "</function>", "</tool_call>", pad="\n")
_MINIMAX = XmlSyntax(
    '<invoke name="', '">', '<parameter name="', '">', "</parameter>", "</invoke>", "</minimax:tool_call>"
)  # fmt: skip
_GLM = XmlSyntax("", "", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "", "</tool_call>")
_GLM_47 = _GLM._replace(value="</arg_key><arg_value>", line="")
_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK, _END_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_KIMI_MARKS = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_KIMI, _END_KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_FORMATS = (
    ToolFormat(
        "harmony", END, (ANALYSIS,), decode_channel,
        CallFormat(ArgumentsCall(" <|constrain|>json<|message|>"), CALLING, only=True),
        is_special=True, has_channels=True,
    ),
    ToolFormat(
        "deepseek_v3", _END_DEEPSEEK, ("<｜tool▁call▁begin｜>' + tool['type']", "<｜tool▁call▁begin｜>function<"),
        SplitDecoder(*_DEEPSEEK_MARKS, read_fenced),
        CallFormat(
            ArgumentsCall(
                "\n```json\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```<｜tool▁call▁end｜>"
            ),
            _DEEPSEEK, "", "\n", _END_DEEPSEEK, each=False,
        ),
        is_special=True,
    ),
    ToolFormat(
        "deepseek_v31", _END_DEEPSEEK, ("<｜tool▁sep｜>",), SplitDecoder(*_DEEPSEEK_MARKS, read_plain),
        CallFormat(
            ArgumentsCall("<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            _DEEPSEEK, behind=_END_DEEPSEEK, each=False,
        ),
        is_special=True,
    ),
    ToolFormat(
        "kimi_k2", _END_KIMI, (_KIMI,), SplitDecoder(*_KIMI_MARKS, read_numbered),
        CallFormat(
            ArgumentsCall(
                "<|tool_call_argument_begin|>", "<|tool_call_begin|>functions.", "<|tool_call_end|>", ":[0-9]{1,4}"
            ),
            _KIMI, behind=_END_KIMI, each=False,
        ),
        is_special=True, numbers_ids=True,
    ),
    ToolFormat(
        "minimax_m2", "</minimax:tool_call>", ('<invoke name="',), XmlDecoder(_MINIMAX),
        CallFormat(
            XmlCall(_MINIMAX._replace(close="</invoke>\n")),
            "<minimax:tool_call>", "\n", "", "</minimax:tool_call>", each=False,
        ),
        is_special=True, must_close=True,
    ),
    ToolFormat(
        "glm47", "</tool_call>", ("{function-name}<arg_key>",), XmlDecoder(_GLM),
        CallFormat(XmlCall(_GLM_47), "<tool_call>", behind="</tool_call>"), must_close=True,
    ),
    ToolFormat(
        "glm45", "</tool_call>", ("<arg_key>",), XmlDecoder(_GLM),
        CallFormat(XmlCall(_GLM), "<tool_call>", "", "\n", "</tool_call>"), must_close=True,
    ),
    ToolFormat(
        "qwen3_xml", "</tool_call>", ("<function=",), XmlDecoder(_QWEN),
        CallFormat(XmlCall(_QWEN), "<tool_call>", "\n", "\n", "\n</tool_call>"),
        bare="<function=", must_close=True,
    ),
    ToolFormat(
        "hermes", "</tool_call>", ("<tool_call>",), decode_json,
        CallFormat(_JSON, "<tool_call>", "\n", "\n", "\n</tool_call>"),
    ),
    ToolFormat(
        "mistral_args", "", ("[ARGS]",), decode_mistral,
        CallFormat(ArgumentsCall("[ARGS]"), "[TOOL_CALLS]"), is_special=True, id_chars=9,
    ),
    ToolFormat(
        "mistral", "", ("[TOOL_CALLS]",), decode_mistral,
        CallFormat(_JSON, "[TOOL_CALLS]", "[", ", ", "]", each=False), is_special=True, id_chars=9,
    ),
    ToolFormat(
        "phi4", "", ("<|tool_call|>", "<|tool|>"), decode_phi4,
        CallFormat(_JSON, "<|tool_call|>", "[", ", ", "]<|/tool_call|>", each=False), is_special=True,
    ),
    ToolFormat(
        "gemma", "<tool_call|>", ("<|tool_call>",), decode_gemma,
        CallFormat(LiteralCall(GEMMA, "call:", "{", "}", ":"), "<|tool_call>", behind="<tool_call|>"), is_special=True,
    ),
    ToolFormat(
        "functiongemma", "<end_function_call>", ("<start_function_call>",), decode_gemma,
        CallFormat(
            LiteralCall(GEMMA._replace(quote="<escape>"), "call:", "{", "}", ":"),
            "<start_function_call>", behind="<end_function_call>",
        ),
        is_special=True,
    ),
    ToolFormat(
        "pythonic", "", ("[func_name1(",), decode_pythonic,
        CallFormat(LiteralCall(PYTHON, "", "(", ")", "="), "", "[", ", ", "]", each=False, leads="["),
    ),
    ToolFormat(
        "llama3_json", "", ("<|python_tag|>", '"parameters": dictionary'), decode_llama,
        CallFormat(JsonCall("parameters"), only=True, leads="{"), tag="<|python_tag|>",
    ),
)  # fmt: skip
FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}
"""Formats by name, in the order in which they are tried on a chat template."""
