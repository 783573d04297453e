"""Tool call formats of model families, as data: marks around calls, decoder, and grammar for enforced calls.

To support a new family, add an entry to FORMATS.

In the harmony format of gpt-oss an answer consists of messages in channels.

A message is `<|start|>` header `<|message|>` text `<|end|>`. The header names the role, the channel and, for a call,
the recipient, e.g. `assistant<|channel|>commentary to=functions.NAME <|constrain|>json`. The prompt ends with
`<|start|>assistant`; `<|return|>` or `<|call|>` end the answer. The channel `analysis` holds reasoning, `final` the
answer, and `commentary` calls and texts before calls. Source: docs/format.md in the repository openai/harmony.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
)
from gateway.generate.tool_decoders import (
    Call,
    SplitDecoder,
    XmlDecoder,
    checked_call,
    decode_gemma,
    decode_json,
    decode_llama,
    decode_mistral,
    decode_phi4,
    decode_pythonic,
    read_fenced,
    read_numbered,
    read_plain,
)

THINK, END_THINK = "<think>", "</think>"
START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
STOPS = ("<|return|>", "<|call|>")
"""Special tokens that end an answer."""
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALLING = "<|channel|>commentary to=functions."
_COMMENTARY = "<|channel|>commentary<|message|>"
_NEXT = "<|end|><|start|>assistant"


def channel_rule(lark: Lark, calls: str, form: Callable[[Lark], str] | None, required: bool, budget: int | None) -> str:
    """Return an expression for an answer.

    `calls`: expression for a call, "" without tools; `form`: writes the rule of the final text; `required`: the answer
    must call; `budget`: maximum number of reasoning tokens.
    """
    anything, following = lark.terminal("/(?s:.)*/"), lark.text(_NEXT)
    limit = "" if budget is None else f"[max_tokens={budget}]"
    thought = f"{lark.text(ANALYSIS)} {lark.rule(anything, limit)} {following}"
    thoughts = "" if budget == 0 else f"({thought}){'*' if budget is None else '?'}"
    if required:
        return f"{thoughts} {calls}"
    final = f"{lark.text(FINAL)} {anything if form is None else form(lark)}"
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
        form: Callable[[Lark], str] | None = None,
        budget: int | None = None,
    ) -> str:
        """Return the grammar of an answer in Lark syntax.

        Args:
            special: ids of special tokens by text.
            parallel: allow several calls.
            required: allow calls only, instead of text with optional calls.
            form: writes the rule of an answer without calls; None: any text, which calls may follow.
            budget: maximum number of reasoning tokens; only a format with channels enforces it here.

        Raises ValueError for a schema that the format cannot enforce."""
        lark = Lark(special)
        if self.has_channels:
            call = self.calls.required(lark, functions, parallel) if functions else ""
            return lark.whole(channel_rule(lark, call, form, required, budget))
        if required or form is not None:
            calls = self.calls.required(lark, functions, parallel)
            return lark.whole(calls if required or form is None else f"({calls}) | {form(lark)}")
        start = self.calls.offered(lark, functions, parallel)
        if END_THINK in special:  # otherwise the mark is ordinary text, which the grammar allows
            thought = f"{lark.text(THINK)}? {lark.terminal('/(?s:.)*/')} {lark.text(END_THINK)}"
            start = f"({thought})? ({start})"
        return lark.whole(start)


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
