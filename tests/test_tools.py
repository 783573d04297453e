"""Calls of functions: parsed answers, offered and refused tools, and the answers to clients."""

import dataclasses
import json
import keyword
import os
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import numpy as np
import pytest
import tokenizer_folders
import tokenizers
from batch_tools import client_of
from fake_engine import MODEL, FakeEngine, Served, say, serve
from fixtures import refuse_blocking
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.http import post, prompt_of
from support.lazy import openai
from support.tables import for_each

from engine.forms import Grammar
from engine.structured.compiler import GrammarCompiler, Matcher
from engine.text.tokenizer import CHANNEL_TOKENS, Tokenizer
from gateway.generate.answer_form import choose_format
from gateway.generate.answer_parser import ParsedText, Parsing
from gateway.generate.grammars import Function
from gateway.generate.tool_formats import FINAL, FORMATS, Call, find_format

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
TIME["additionalProperties"] = False
FUNCTIONS = (Function("weather", WEATHER), Function("time.now", TIME))
TOOLS = [
    {"type": "function", "function": {"name": each.name, "description": "A tool", "parameters": dict(each.parameters)}}
    for each in FUNCTIONS
]
TEMPLATE = (
    "{% if tools %}Tools: {{ tools | tojson }} in <tool_call></tool_call>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def take_apart(parsing: Parsing, pieces: list[str]) -> ParsedText:
    parser, whole = parsing.parser(), ParsedText()
    for number, text in enumerate(pieces, 1):
        piece = parser.push(text, final=number == len(pieces))
        whole.text += piece.text
        whole.reasoning += piece.reasoning
        whole.calls += piece.calls
    return whole


def literal(value: Any, name: str) -> str:
    """A value in a family's own syntax."""
    quote = {"gemma": '<|"|>', "functiongemma": "<escape>"}.get(name)
    key, comma, colon = ("{}", ",", ":") if quote else ('"{}"', ", ", ": ")
    if isinstance(value, dict):
        pairs = [key.format(each) + colon + literal(part, name) for each, part in value.items()]
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + comma.join([literal(part, name) for part in value]) + "]"
    if isinstance(value, str) and quote:
        return quote + value + quote
    return json.dumps(value) if quote else repr(value)


class Style(NamedTuple):
    """How a format writes calls, with NAME, NUMBER and ARGUMENTS to be filled in. `argument`: one of an XML-like call,
    with KEY and VALUE; white space around values is kept."""

    call: str
    between: str = ""
    first: str = ""
    last: str = ""
    argument: str = ""


LISTED = '{"name": "NAME", "arguments": ARGUMENTS}'
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>"
DEEPSEEK_V31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
HARMONY = "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"
INVOKE = '<invoke name="NAME">\nARGUMENTS</invoke>'
STYLES = {
    "hermes": Style(f"<tool_call>\n{LISTED}\n</tool_call>", "\n"),
    "deepseek_v3": Style(DEEPSEEK_V3, "\n", *DEEPSEEK),
    "deepseek_v31": Style(DEEPSEEK_V31, "", *DEEPSEEK),
    "kimi_k2": Style(KIMI, "", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "harmony": Style(HARMONY, "<|end|><|start|>assistant"),
    "mistral": Style(LISTED, ", ", "[TOOL_CALLS][", "]"),
    "mistral_args": Style("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "phi4": Style(LISTED, ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    "llama3_json": Style('{"name": "NAME", "parameters": ARGUMENTS}'),
    "gemma": Style("<|tool_call>call:NAMEARGUMENTS<tool_call|>"),
    "functiongemma": Style("<start_function_call>call:NAMEARGUMENTS<end_function_call>"),
    "pythonic": Style("NAME(ARGUMENTS)", ", ", "[", "]"),
    "qwen3_xml": Style("<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", "\n",
                       argument="<parameter=KEY>\nVALUE\n</parameter>\n"),
    "minimax_m2": Style(INVOKE, "\n", "<minimax:tool_call>\n", "\n</minimax:tool_call>",
                        argument='<parameter name="KEY">VALUE</parameter>\n'),
    "glm45": Style("<tool_call>NAME\nARGUMENTS</tool_call>", "\n",
                   argument="<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
    "glm47": Style("<tool_call>NAMEARGUMENTS</tool_call>",
                   argument="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),
}  # fmt: skip
XML = tuple(name for name, style in STYLES.items() if style.argument)


def write_arguments(name: str, arguments: dict[str, Any]) -> str:
    if name in XML:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        argument = STYLES[name].argument
        return "".join(argument.replace("KEY", key).replace("VALUE", text) for key, text in texts.items())
    if name == "pythonic":
        return ", ".join(f"{key}={literal(value, name)}" for key, value in arguments.items())
    return literal(arguments, name) if "gemma" in name else json.dumps(arguments)


def write(name: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as a model of that format writes them; of `llama3_json` the first."""
    style, texts = STYLES[name], []
    for number, (each, arguments) in enumerate(calls[:1] if name == "llama3_json" else calls):
        text = style.call.replace("NUMBER", str(number)).replace("NAME", each)
        texts.append(text.replace("ARGUMENTS", write_arguments(name, arguments)))
    return style.first + style.between.join(texts) + style.last


WORDS = st.text(st.sampled_from("ab {}[]\"'\\<>/=_,:\né東"), max_size=12)
KEYS = st.from_regex(r"[a-z_]{1,6}", fullmatch=True)
ARGUMENTS = st.dictionaries(KEYS, st.one_of(st.integers(-99, 99), WORDS.map(str.strip), st.booleans()), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["weather", "time.now"]), ARGUMENTS), min_size=1, max_size=3)


@st.composite
def pieces_of(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    return text, [text[first:last] for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@fuzz(10_000 if os.environ.get("FUZZ") else 150)
@given(name=st.sampled_from(sorted(FORMATS)), calls=CALLS, data=st.data())
def test_what_a_model_writes_is_read_however_it_was_cut(name: str, calls: Any, data: st.DataObject) -> None:
    if name not in ("pythonic", "llama3_json", "harmony"):
        lead = data.draw(st.sampled_from(["", "Let me look.", "Let me look.\n"]))
    else:
        lead = ""
    if name == "llama3_json":
        calls = calls[:1]
    if name == "pythonic":  # Python's own words are no names of arguments
        calls = [(each, {k: v for k, v in arguments.items() if not keyword.iskeyword(k)}) for each, arguments in calls]
    if name in XML:  # a text in it cannot hold its own marks
        calls = [
            (each, {k: v for k, v in arguments.items() if not (isinstance(v, str) and "<" in v)})
            for each, arguments in calls
        ]
    functions = FUNCTIONS
    if name in XML:
        merged: dict[str, dict[str, Any]] = {each.name: {} for each in FUNCTIONS}
        for each, arguments in calls:
            for key, value in arguments.items():
                merged[each].setdefault(key, type(value))
                if merged[each][key] is not type(value):
                    return  # one parameter, two types
        kinds = {str: {"type": "string"}, int: {"type": "integer"}, bool: {"type": "boolean"}}
        functions = tuple(
            Function(each, {"properties": {key: kinds[kind] for key, kind in keys.items()}})
            for each, keys in merged.items()
        )
    text, pieces = data.draw(pieces_of(st.just(lead + write(name, calls))))
    parsing = Parsing(FORMATS[name], functions)
    whole = take_apart(parsing, [text])
    assert whole == take_apart(parsing, pieces) == take_apart(parsing, list(text))
    assert whole.text == lead.rstrip()
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == calls


NUMBERS = ["54e10028401900", "123456789012345678901234567890", "18446744073709551616", "-0.10", "1E+5", "9" * 5000]


def digits_of(text: str) -> Any:
    """JSON with its numbers as text."""
    return json.loads(text, parse_int=str, parse_float=str)


@for_each("name", sorted(FORMATS))
@for_each("number", NUMBERS)
def test_arguments_keep_every_digit_of_the_model(name: str, number: str) -> None:
    functions = [Function("weather", {"properties": {"x": {"type": "number"}, "y": {}, "z": {"type": "array"}}})]
    text = write(name, [("weather", {"x": 777, "y": 777, "z": [777]})]).replace("777", number)
    whole = take_apart(Parsing(FORMATS[name], functions), [text])
    assert [digits_of(call.arguments) for call in whole.calls] == [{"x": number, "y": number, "z": [number]}]


TYPED = [
    ('{"a":1}', {"anyOf": [{"type": "string"}, {"type": "null"}]}, '{"a":1}'),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ("123", {"type": ["string", "null"]}, "123"),
    ("7", {"$ref": "#/$defs/T"}, "7"),
    ("7", {"oneOf": [{"$ref": "#/$defs/T"}, {"type": "integer"}]}, 7),
    ('"a b"', {"type": ["string", "null"]}, "a b"),
    ("True", {"type": "boolean"}, True),
    ("None", {"type": ["integer", "null"]}, None),
    ("{'a': True}", {"type": "object"}, {"a": True}),
    ("True", {}, "True"),
    ("1", {}, 1),
]


@for_each(("written", "schema", "value"), TYPED)
def test_values_without_quotes_have_the_types_of_the_schema(written: str, schema: Any, value: Any) -> None:
    parameters = {"properties": {"v": schema}, "$defs": {"T": {"type": "string"}}}
    for end in ("\n</parameter>", ""):
        text = f"<tool_call>\n<function=f>\n<parameter=v>\n{written}{end}\n</function>\n</tool_call>"
        whole = take_apart(Parsing(FORMATS["qwen3_xml"], [Function("f", parameters)]), [text])
        assert [json.loads(call.arguments) for call in whole.calls] == [{"v": value}], end


MARKS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<function=weather>", "</function>", "<|python_tag|>",
    "<tool", "<|tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>', "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}",
    "weather()", "call:weather{", "word", '{"name": "weather"}', '"arguments": {}', "\n", " ",
]  # fmt: skip


@fuzz(10_000 if os.environ.get("FUZZ") else 300)
@given(
    name=st.sampled_from([None, *sorted(FORMATS)]),
    reasons=st.booleans(),
    is_thinking=st.booleans(),
    case=pieces_of(st.lists(st.sampled_from(MARKS), max_size=12).map("".join)),
)
def test_nonsense_is_taken_apart_alike_however_it_was_cut(
    name: str | None, reasons: bool, is_thinking: bool, case: tuple[str, list[str]]
) -> None:
    """And never raises; without calls and thoughts every character comes out."""
    text, pieces = case
    parsing = Parsing(FORMATS[name] if name else None, FUNCTIONS, reasons, reasons and is_thinking)
    whole = take_apart(parsing, [text])
    assert whole == take_apart(parsing, pieces) == take_apart(parsing, list(text) or [""])
    if not whole.calls and not reasons:
        assert whole.text == text or (name == "harmony" and not text.strip())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", 'x <tool_call>{"name": "weather", "argu'),
        ("hermes", 'x <tool_call>{"name": "weather"}}</tool_call> more <tool_'),
        ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>" + "[" * 3000 + "</tool_call>"),
        ("pythonic", "[weather(1)]"),
        ("pythonic", "[__import__('os').system('x')]"),
        ("pythonic", "[" + "(" * 3000),
        ("pythonic", "[weather(x={1: {2}})]"),
        ("llama3_json", '{"answer": 42} '),
        ("mistral", "[TOOL_CALLS]weather[ARGS]{"),
        ("phi4", '<|tool_call|>[{"name": "weather"<|/tool_call|>'),
        ("gemma", "<|tool_call>call:weather{city:}<tool_call|>"),
        ("gemma", '<|tool_call>call:weather{city:<|"|>Rome}<tool_call|>'),
        ("qwen3_xml", "<tool_call><function=weather>"[:-1]),
        ("qwen3_xml", "<tool_call>\n<function=weather>\n<parameter=city>\nRo"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key></tool_call>"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n</invoke>'),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="weather">\n</invoke>x</minimax:tool_call>'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>x<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁calls▁end｜>"),
    ],
)
def test_what_is_no_call_is_text_once(name: str, text: str) -> None:
    assert take_apart(Parsing(FORMATS[name], FUNCTIONS), [text]) == ParsedText(text)


@pytest.mark.parametrize(
    ("name", "text", "called", "said"),
    [
        ("qwen3_xml", "Hm.\n\n<function=f>\n<parameter=v>\n*\n</parameter>\n</function>\n</tool_call>", ["*"], "Hm."),
        ("qwen3_xml", "Use <function=x> or <function=f>.", [], "Use <function=x> or <function=f>."),
        ("llama3_json", '{"name": "f", "parameters": {"v": 1}}; {"name": "f", "parameters": {"v": 2}}\n', [1, 2], ""),
        ("llama3_json", '{"name": "f", "parameters": {"v": 1}}\n{"name": "f", "parameters": {}}', [1, None], ""),
        ("llama3_json", '{"name": "f", "parameters": {}}; then', [], '{"name": "f", "parameters": {}}; then'),
    ],
)  # fmt: skip
def test_calls_without_marks_or_with_semicolons(name: str, text: str, called: list[Any], said: str) -> None:
    parsing = Parsing(
        FORMATS[name], [Function("f", {"type": "object", "properties": {"v": {"type": ["string", "integer"]}}})]
    )
    for pieces in ([text], list(text)):
        whole = take_apart(parsing, pieces)
        assert [json.loads(call.arguments).get("v") for call in whole.calls] == called
        assert whole.text == said


def test_thoughts_are_kept_apart() -> None:
    parsing = Parsing(FORMATS["hermes"], FUNCTIONS, reasons=True)
    call = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    whole = take_apart(parsing, [f"<think>\nhm, <tool_call> \n</think>\n\nSo: {call}\n"])
    assert whole == ParsedText("So:", "hm, <tool_call>", [Call("weather", "{}")])
    begun = Parsing(reasons=True, is_thinking=True)
    assert take_apart(begun, ["hm\n</th", "ink>\n\nYes\n no "]) == ParsedText("Yes\n no", "hm")
    assert take_apart(begun, ["cut of"]) == ParsedText("", "cut of")
    assert take_apart(Parsing(reasons=True), ["plain \n"]) == ParsedText("plain \n")


def test_formats_are_recognised() -> None:
    assert find_format(TEMPLATE) is FORMATS["hermes"]
    assert find_format("... <tool_call>\n<function=example>") is FORMATS["qwen3_xml"]
    assert find_format("{{ '[TOOL_CALLS]' }}") is FORMATS["mistral"]
    assert find_format("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}") is FORMATS["mistral_args"]
    assert find_format("{{ '<|tool|>' + message['tools'] }}") is FORMATS["phi4"]
    assert find_format("{{ '<|tool_call>call:' + name }}") is FORMATS["gemma"]
    assert find_format("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'") is FORMATS["deepseek_v3"]
    assert find_format("'<｜tool▁call▁begin｜>' + tool.name + '<｜tool▁sep｜>'") is FORMATS["deepseek_v31"]
    assert find_format("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>") is FORMATS["glm45"]
    assert find_format("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>") is FORMATS["glm47"]
    assert find_format("<|tool_calls_section_begin|>") is FORMATS["kimi_k2"]
    assert find_format('<minimax:tool_call>\n<invoke name="tool">') is FORMATS["minimax_m2"]
    assert find_format("{{ messages }}") is None


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ({"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True}, "hermes"),
        ({"open_pattern": r"\[TOOL_CALLS\]", "close": "</s>", "content": "json"}, "mistral"),
        ({"open_pattern": r"<tool_call>\s*<function=", "close": "</function>"}, "qwen3_xml"),
        ({"open": "<of nobody else>", "close": "</of nobody else>", "content": "json"}, "gemma"),
        (None, "gemma"),
    ],
)
def test_what_a_checkpoint_says_of_its_calls_goes_before_its_chat_template(
    tmp_path: Path, field: dict[str, Any] | None, name: str
) -> None:
    own = {
        "start_anchor": "<|im_start|>assistant",
        "fields": {"content": {}, **({"tool_calls": field} if field else {})},
    }
    from transformers.utils.chat_parsing.response_templates import load_response_template

    load_response_template(own)  # it is one
    tokenizer_folders.byte_level(tmp_path, "{{ '<|tool_call>call:' }}{{ messages[0].content }}", response_template=own)
    tokenizer = Tokenizer.load(tmp_path, probe=False)
    assert choose_format("auto", tokenizer) is FORMATS[name]
    assert choose_format("phi4", tokenizer) is FORMATS["phi4"]
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["<tool_call>"])  # an ordinary token in most checkpoints
    backend.save(str(tmp_path / "tokenizer.json"))
    marked = choose_format("hermes", Tokenizer.load(tmp_path, probe=False))
    assert marked is not None and marked.is_special and not FORMATS["hermes"].is_special
    for wrong in ("text", ["fields"], {"fields": 3}):
        tokenizer_folders.byte_level(tmp_path, "{{ messages[0].content }}", response_template=wrong)
        assert Tokenizer.load(tmp_path, probe=False).call_template == ""


# How required calls are written


def special_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer where marks are tokens of their own, as in the families' checkpoints."""
    tokenizer_folders.byte_level(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>"])
    backend.add_special_tokens(["<|tool_call>", "<tool_call|>", '<|"|>', *CHANNEL_TOKENS])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, probe=False)


REPORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 20},
        "note": {"type": "string", "maxLength": 5},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
    },
    "required": ["kind", "flags", "place"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}, "at": {"$ref": "#/$defs/Place"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
REPORTS = (Function("report", REPORT), Function("time.now", TIME))
WRITTEN = [
    ("report", {"kind": "b c", "note": "it's", "flags": [True, False], "place": {"x": 1, "at": {"x": 2}}}),
    ("time.now", {"zone": "UTC"}),
]


class Writing:
    """Answers kept to a grammar, token by token."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        assert eos is not None
        self.eos = eos
        self.compiler = GrammarCompiler(folder, self.tokenizer.vocab_size, frozenset({eos}))

    def matcher(self, name: str, **options: bool) -> Matcher:
        asked = {"parallel": True, "required": True, **options}
        text = FORMATS[name].grammar(REPORTS, self.tokenizer.special_tokens, **asked)
        return self.compiler.compile(Grammar("lark", text, param="tools")).matcher()

    def takes(self, matcher: Matcher, text: str) -> bool:
        matcher.advance(self.tokenizer.encode(text, add_special_tokens=False))
        return matcher.failed is None and matcher.complete

    def random(self, matcher: Matcher, rng: random.Random, most: int = 400) -> str | None:
        """Any of the tokens that may come, the end where it may; None: it came to none."""
        token_ids: list[int] = []
        bits = np.zeros(self.compiler.mask_words, dtype=np.int32)
        while len(token_ids) < most:
            matcher.write_mask(bits)
            allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
            if self.eos in allowed:
                return self.tokenizer.decode(token_ids, skip_special_tokens=False)
            token_ids.append(int(rng.choice(list(allowed))))
            matcher.advance(token_ids[-1:])
            assert matcher.failed is None
        return None


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Writing:
    folder = tmp_path_factory.mktemp("tokens")
    return Writing(folder, special_tokenizer(folder))


def read_calls(name: str, text: str) -> list[tuple[str, Any]]:
    whole = take_apart(Parsing(FORMATS[name], REPORTS), [text])
    assert whole.text == "" and whole.calls, (name, text)
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_required_calls_are_in_the_format_of_the_model(writing: Writing, name: str) -> None:
    """The grammar admits the calls of the family; each text that it admits can be read, and is valid."""
    calls = WRITTEN[:1] if name in ("llama3_json", "harmony") else WRITTEN
    assert writing.takes(writing.matcher(name), write(name, calls))
    wrong = [("report", {**WRITTEN[0][1], "kind": "z"})]
    assert not writing.takes(writing.matcher(name), write(name, wrong))
    lone = writing.matcher(name, parallel=False)
    assert writing.takes(lone, write(name, calls[:1])) and writing.random(lone, random.Random(0)) == ""
    validators = {each.name: jsonschema_rs.validator_for(dict(each.parameters)) for each in REPORTS}
    ended = 0
    for seed in range(12):
        text = writing.random(writing.matcher(name), random.Random(seed))
        if text is not None:
            ended += 1
            for called, arguments in read_calls(name, text):
                validators[called].validate(arguments)
    assert ended >= 6


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_strict_tools_are_enforced_where_the_answer_calls(writing: Writing, name: str) -> None:
    call, wrong = write(name, WRITTEN[:1]), write(name, [("report", {})])
    leads = name in ("pythonic", "llama3_json")
    lead = "" if leads else "Let me look.\n"
    final = ""
    if name == "harmony":
        lead, final = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant", FINAL
    assert writing.takes(writing.matcher(name, required=False), final + "Nothing { to [ call.")
    assert writing.takes(writing.matcher(name, required=False), lead + call)
    assert not writing.takes(writing.matcher(name, required=False), lead + wrong)
    assert not writing.takes(writing.matcher(name, required=False), lead + call[:-2])


@pytest.mark.parametrize(
    ("name", "schema", "word"),
    [
        ("qwen3_xml", {"type": "string", "pattern": "a"}, "pattern"),
        ("gemma", {"type": "string", "format": "date"}, "format"),
        ("pythonic", {"type": "string", "contentEncoding": "x"}, "contentEncoding"),
        ("pythonic", {"not": {}}, "not"),
        ("pythonic", {"$ref": "#/$defs/none"}, "#/$defs/none"),
    ],
)
def test_what_a_format_cannot_be_held_to_is_named(name: str, schema: dict[str, Any], word: str) -> None:
    function = Function("f", {"type": "object", "properties": {"key": schema}, "required": ["key"]})
    with pytest.raises(ValueError, match=re.escape(word)):
        FORMATS[name].grammar([function], {}, True, True)
    with pytest.raises(ValueError, match="from"):
        FORMATS["pythonic"].grammar([Function("f", {"properties": {"from": True}})], {}, True, True)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_an_answer_calls_or_has_the_form(writing: Writing, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"const": 2**60 + 1}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = Grammar("json", json.dumps(schema))
    text = FORMATS[name].grammar(REPORTS, writing.tokenizer.special_tokens, True, False, form)
    compiled = writing.compiler.compile(Grammar("lark", text))
    final = FINAL if name == "harmony" else ""
    for answer, fits in {
        write(name, WRITTEN[:1]): True,
        final + json.dumps({"n": 2**60 + 1}, separators=(",", ":")): True,
        final + json.dumps({"n": 2**60}, separators=(",", ":")): False,
        write(name, [("report", {})]): False,
        "Let me look.": False,
        "": False,
    }.items():
        assert writing.takes(compiled.matcher(), answer) is fits, answer


# Through HTTP


@asynccontextmanager
async def scripted(folder: Path, text: str, template: str = TEMPLATE, **config: Any) -> AsyncIterator[Served]:
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(folder, template), probe=False)
    engine = FakeEngine(
        say(tokenizer, text), eos_token_ids=frozenset({tokenizer.eos_token_id or 0}), max_model_len=2048
    )
    with refuse_blocking():
        async with serve(engine, tokenizer, **config) as served:
            yield served


def ask(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Weather?"}]
    return {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 300, **fields}


TWO = 'Wait.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n' + (
    '<tool_call>\n{"name": "time.now", "arguments": {"zone": "UTC"}}\n</tool_call>'
)


async def test_calls_as_the_official_client_sees_them(tmp_path: Path) -> None:
    async with scripted(tmp_path, TWO) as served, client_of(served) as client:
        answer = await client.chat.completions.create(**ask())
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Wait."
        calls = choice.message.tool_calls or []
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("weather", {"city": "Rome", "days": 2}),
            ("time.now", {"zone": "UTC"}),
        ]
        assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
        async with client.chat.completions.stream(**ask()) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_completion()
        assert kinds.count("tool_calls.function.arguments.done") == 2
        streamed = final.choices[0]
        assert streamed.finish_reason == "tool_calls" and streamed.message.content == "Wait."
        assert [call.function.arguments for call in streamed.message.tool_calls or []] == [
            call.function.arguments for call in calls
        ]
        assert '"city"' in prompt_of(served)


async def test_the_deltas_of_a_stream(tmp_path: Path) -> None:
    """An index always, id and name once; no chunk without anything in it."""
    async with scripted(tmp_path, TWO) as served:
        answer = await post(served, **ask(stream=True))
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1] and all(call["type"] == "function" for call in calls)
    assert "".join(delta.get("content") or "" for delta in deltas) == "Wait."
    assert all(delta for delta in deltas[:-1]) and chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_where_one_is_wanted(tmp_path: Path) -> None:
    """The request ends in the engine with its first call."""
    async with scripted(tmp_path, TWO) as served, client_of(served) as client:
        answer = await client.chat.completions.create(**ask(parallel_tool_calls=False, stop=["never"]))
        assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["weather"]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert len(served.engine.aborts) == 1


async def test_tools_beside_a_form_of_the_answer(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for number, (text, calls) in enumerate([(TWO.removeprefix("Wait.\n"), 2), ('{"ok":true}', 0)]):
        async with scripted(tmp_path / str(number), text) as served, client_of(served) as client:
            answer = await client.chat.completions.create(**ask(response_format=form))
            required = await client.chat.completions.create(**ask(response_format=form, tool_choice="required"))
            both, calls_only = [request.sampling.grammar for request in served.engine.requests]
        message = answer.choices[0].message
        assert len(message.tool_calls or []) == calls and message.content == (None if calls else text)
        assert both is not None and calls_only is not None and required.choices
        assert '"ok"' in both.text and '"ok"' not in calls_only.text and '"weather"' in both.text


async def test_strict_tools_have_a_grammar_and_leave_room_for_thoughts(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    text = "<think>hm</think>" + TWO
    async with scripted(tmp_path, text, template) as served, client_of(served) as client:
        answer = await client.chat.completions.create(**ask(tools=strict))
        await client.chat.completions.create(**ask())
        await client.chat.completions.create(**ask(tools=strict, tool_choice="none"))
        await client.chat.completions.create(**ask(tools=strict, extra_body={"thinking_token_budget": 3}))
        grammars = [request.sampling.grammar for request in served.engine.requests]
        assert [grammar is None for grammar in grammars] == [False, True, True, False]
        assert grammars[0] is not None and '"Rome"' in grammars[0].text and '"CET"' not in grammars[0].text
        message = answer.choices[0].message
        assert (message.model_extra or {})["reasoning"] == "hm" and len(message.tool_calls or []) == 2
        assert served.engine.requests[3].sampling.thinking is not None


async def test_templates_are_told_of_tools_and_calls_in_their_way(tmp_path: Path) -> None:
    """Phi-4's reads the tools of the system message; Mistral's wants ids of nine letters and digits."""
    told = "{% for message in messages %}{{ message.role }}:{{ message['tools'] }}{% endfor %}<|tool_call|>"
    async with scripted(tmp_path / "phi", "x", told) as served, client_of(served) as client:
        await client.chat.completions.create(**ask())
        prompt = prompt_of(served)
        assert prompt.startswith('system:[{"name":"weather"')
    call = {"id": "toolu_0123456789", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_0123456789", "content": "Sun"},
    ]
    told = "<|tool_calls_section_begin|>{{ tools and messages[1].tool_calls[0].id }}={{ messages[2].tool_call_id }}"
    async with scripted(tmp_path / "kimi", "x", told) as served, client_of(served) as client:
        await client.chat.completions.create(**ask(messages=messages))
        prompt = prompt_of(served)
        assert prompt.endswith("functions.weather:0=functions.weather:0")
    told = "{{ tools | length }}[TOOL_CALLS]{{ messages[1].tool_calls[0].id }}={{ messages[2].tool_call_id }}"
    async with scripted(tmp_path / "mistral", "x", told) as served, client_of(served) as client:
        await client.chat.completions.create(**ask(messages=messages))
        prompt = prompt_of(served)
        assert re.fullmatch(r"2\[TOOL_CALLS\](\w{9})=\1", prompt)


async def test_allowed_tools_are_the_only_ones(tmp_path: Path) -> None:
    """`allowed_tools` gives the prompt and the grammar of a request with these tools alone."""
    only = TOOLS[1]["function"]["name"]
    for mode in ("auto", "required"):
        named = {"type": "function", "function": {"name": only}}
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        flat: Any = {
            "type": "allowed_tools",
            "mode": mode,
            "tools": [{"type": "function", "name": only}, {"type": "mcp"}],
        }
        tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
        async with scripted(tmp_path / mode, "x") as served, client_of(served) as client:
            await client.chat.completions.create(**ask(tools=TOOLS[1:], tool_choice=mode))
            await client.chat.completions.create(**ask(tool_choice=choice))
            content = ask()["messages"][-1]["content"]
            answer = await client.responses.create(
                model=ask()["model"], input=content, tools=tools, tool_choice=flat, max_output_tokens=300
            )
            alone, *others = [(each.prompt_token_ids, each.sampling.grammar) for each in served.engine.requests]
        assert all(ids == alone[0] for ids, _ in others) and (alone[1] is None) == (mode == "auto")
        assert all((grammar and grammar.text) == (alone[1] and alone[1].text) for _, grammar in others)
        assert not isinstance(answer.tool_choice, str) and answer.tool_choice.type == "allowed_tools"


async def test_malformed_calls_are_text(tmp_path: Path) -> None:
    text = 'So <tool_call>{"name": "weather", "arguments": {'
    async with scripted(tmp_path, text) as served, client_of(served) as client:
        answer = await client.chat.completions.create(**ask())
        assert answer.choices[0].message.content == text and answer.choices[0].message.tool_calls is None
        assert answer.choices[0].finish_reason == "stop"
        none = await client.chat.completions.create(**ask(tool_choice="none"))
        assert none.choices[0].message.content == text


async def test_thoughts_go_under_both_names(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if false %}</think>{% endif %}"
    async with scripted(tmp_path, "<think>hm</think>\n\nYes", template) as served, client_of(served) as client:
        answer = await client.chat.completions.create(**ask(tools=[]))
        message = answer.choices[0].message
        extra = message.model_extra or {}
        assert message.content == "Yes" and extra["reasoning"] == extra["reasoning_content"] == "hm"
        stream = await client.chat.completions.create(**ask(tools=[], stream=True))
        deltas = [chunk.choices[0].delta async for chunk in stream]
        assert "".join((delta.model_extra or {}).get("reasoning", "") for delta in deltas) == "hm"
        assert "".join(delta.content or "" for delta in deltas) == "Yes"


async def test_past_thoughts_reach_the_template_under_one_name(tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ message.content", "({{ message.reasoning_content }}){{ message.content")
    async with scripted(tmp_path, "x", template) as served, client_of(served) as client:
        for name in ("reasoning", "reasoning_content"):
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
            await client.chat.completions.create(**ask(messages=messages))
            assert "(hm)b" in prompt_of(served), name


async def test_past_calls_reach_the_template_as_objects_with_every_digit(tmp_path: Path) -> None:
    """A number beyond the range of a double becomes a string, because a template cannot write it."""
    async with scripted(tmp_path, "Sunny") as served, client_of(served) as client:
        served.engine.info = dataclasses.replace(served.engine.info, max_model_len=20_000)
        for number in NUMBERS:
            arguments = f'{{"x": {number}}}'
            call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            messages = [
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
            ]
            await client.chat.completions.create(**ask(messages=messages))
            text = prompt_of(served)
            past = text.rpartition('"arguments": {"x": ')[2].partition("}")[0]
            assert past.strip('"') == {"-0.10": "-0.1", "1E+5": "100000.0"}.get(number, number)


OTHER: Any = {"type": "function", "function": {"name": "other"}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "only allowed with"),
    ({"tool_choice": OTHER}, "tool_choice.function.name", "not in 'tools'"),
    ({"tool_choice": "always"}, "tool_choice", "Invalid"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [OTHER]}}},
     "tool_choice.allowed_tools.tools", "not in"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "same name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "Invalid"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type", "Invalid"),
    ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs.regex", "together with 'tools'"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs.chat_template",
     "no variable"),
]  # fmt: skip


async def test_what_is_refused_names_its_parameter(tmp_path: Path) -> None:
    async with scripted(tmp_path, "x") as served, client_of(served) as client:
        for fields, param, word in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ask(**fields))
            assert caught.value.param == param and word in str(caught.value), (fields, caught.value)
        assert not served.engine.requests


async def test_models_that_call_nothing_say_so(tmp_path: Path) -> None:
    deaf = TEMPLATE.replace("tools", "gadgets")
    unknown = TEMPLATE.replace("tool_call>", "x>")
    cases = [(deaf, {}, "does not support tools"), (unknown, {}, "--tool-parser")]
    for number, (template, config, word) in enumerate(cases):
        folder = tmp_path / str(number)
        async with scripted(folder, "x", template, **config) as served, client_of(served) as client:
            with pytest.raises(openai.BadRequestError, match=word):
                await client.chat.completions.create(**ask(tool_choice="required"))
            await client.chat.completions.create(**ask(tool_choice="none"))


def test_marks_that_are_added_tokens_are_written_by_their_ids(tmp_path: Path) -> None:
    """Also those that are not special, which the grammar library does not take for their text."""
    tokenizer_folders.byte_level(tmp_path, None)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path, probe=False)
    compiler = GrammarCompiler(tmp_path, tokenizer.vocab_size, frozenset({tokenizer.eos_token_id or 0}))
    time = Function("f", {"type": "object", "properties": {}, "additionalProperties": False})
    text = FORMATS["hermes"].grammar([time], tokenizer.atomic_tokens, False, True)
    for source, first in ((text, [tokenizer.atomic_tokens["<tool_call>"]]), ('start: "<tool_call>" "a"', [])):
        matcher = compiler.compile(Grammar("lark", source)).matcher()
        forced = matcher.forced()
        matcher.advance(forced)
        assert matcher.failed is None and forced[:1] == first
