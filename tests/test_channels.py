"""The harmony format: answers in channels are parsed, enforced, and shown by all three APIs.

The literal answers are those of the public documents and tests of openai/harmony.
"""

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import tokenizer_folders
import tokenizers
from fake_engine import MODEL, FakeEngine, Served, say, serve
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import fuzz
from support.http import post, prompt_of
from support.lazy import openai
from test_tools import FUNCTIONS, TOOLS, Writing, take_apart

from engine.errors import InvalidRequestError
from engine.forms import Grammar, ThoughtMarks
from engine.text.tokenizer import Tokenizer
from gateway.generate.answer_form import choose_format, find_marks, form_of, read_form
from gateway.generate.answer_parser import MAX_HEADER_CHARS, ParsedText, Parsing
from gateway.generate.tool_formats import ANALYSIS, FINAL, FORMATS, Call
from gateway.generate.wire import ChatCompletionRequest

HARMONY = FORMATS["harmony"]
SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"]
NEXT = "<|end|><|start|>assistant"
THOUGHT = f"{ANALYSIS}Need a tool.{NEXT}"
CALLING = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Rome", "days": 2}'
WEATHER = Call("weather", ARGUMENTS)

TEMPLATE = """<|start|>system<|message|>Reasoning: {{ reasoning_effort | default("medium") }}<|end|>
{%- set turns = messages %}
{%- if messages[0].role == "system" or tools %}
  {%- set turns = messages[1:] if messages[0].role == "system" else messages %}
  {{- "<|start|>developer<|message|>" + (messages[0].content if messages[0].role == "system" else "") }}
  {%- for tool in tools or [] %}{{- "type " + tool.function.name }}{% endfor %}
  {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in turns %}
  {%- if message.role == "assistant" and "tool_calls" in message %}
    {%- if message.content and message.thinking %}{{ raise_exception("both content and thinking") }}{% endif %}
    {%- if message.content or message.thinking %}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
    {%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
    {{- call.arguments | tojson + "<|call|>" }}
    {%- set last.name = call.name %}
  {%- elif message.role == "assistant" %}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content }}
    {{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
  {%- elif message.role == "tool" %}
    {%- if last.name is none %}{{ raise_exception("no call") }}{% endif %}
    {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
    {{- message.content | tojson + "<|end|>" }}
  {%- elif message.role == "user" %}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|start|>assistant" }}{% endif %}"""
"""Reads and refuses messages as the template of gpt-oss does."""


def tokenizer_in(folder: Path, *, probe: bool = True) -> Tokenizer:
    tokenizer_folders.byte_level(folder, TEMPLATE, eos_token="<|return|>")
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder, probe=probe)


ANSWERS: list[tuple[str, ParsedText]] = [
    (f"{ANALYSIS}Simple.{NEXT}{FINAL}2 + 2 = 4.<|return|>", ParsedText("2 + 2 = 4.", "Simple.")),
    (THOUGHT + CALLING + ARGUMENTS + "<|call|>", ParsedText("", "Need a tool.", [WEATHER])),
    (CALLING.replace(" <|con", "<|con") + ARGUMENTS, ParsedText("", "", [WEATHER])),
    (f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}", ParsedText("", "", [WEATHER])),
    (f" to=functions.weather<|channel|>commentary<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
     ParsedText("", "", [WEATHER])),
    (f"<|channel|>analysis to=weather code<|message|>{ARGUMENTS}<|call|>", ParsedText("", "", [WEATHER])),
    ("<|channel|>commentary to=functions.time.now<|message|><|call|>", ParsedText("", "", [Call("time.now", "{}")])),
    (f"{ANALYSIS}Long.{NEXT}<|channel|>commentary<|message|>**Plan**:\n1. Look{NEXT}{CALLING}{ARGUMENTS}<|call|>",
     ParsedText("**Plan**:\n1. Look", "Long.", [WEATHER])),
    (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}<|channel|>commentary<|message|>c{NEXT}{ANALYSIS}d{NEXT}{FINAL}e",
     ParsedText("c\n\ne", "a\n\nb\n\nd")),
    ('<|channel|>final <|constrain|>json<|message|>{"result":true}<|return|>', ParsedText('{"result":true}')),
    (f"I must refuse{NEXT}{ANALYSIS}We must refuse{NEXT}{FINAL}I'm sorry.<|return|>",
     ParsedText("I must refuse\n\nI'm sorry.", "We must refuse")),
    (f"<|channel|>analysis I must refuse{NEXT}{FINAL}Sorry.", ParsedText("Sorry.", "I must refuse")),
    (f"{ANALYSIS}hm<|channel|>final<|message|>Yes", ParsedText("Yes", "hm")),
    (f"{ANALYSIS}hm<|end|>\n<|start|>assistant{FINAL}Yes", ParsedText("Yes", "hm")),
    (f"{ANALYSIS}cut of", ParsedText("", "cut of")),
    (f"{FINAL} keeps \n blanks \n", ParsedText(" keeps \n blanks \n")),
    (f"{FINAL}a <| b <|message|> c", ParsedText("a <| b <|message|> c")),
    ("plain answer", ParsedText("plain answer")),
    ("x" * (MAX_HEADER_CHARS + 9) + f"{NEXT}{FINAL}y", ParsedText("x" * (MAX_HEADER_CHARS + 9) + "\n\ny")),
    (CALLING + '{"city": "Ro', ParsedText(CALLING + '{"city": "Ro')),
    (CALLING.replace("weather", "other") + "{}<|call|>", ParsedText(CALLING.replace("weather", "other") + "{}")),
    ("<|channel|>analysis to=python code<|message|>1 + 1", ParsedText("", "1 + 1")),
    (f"{CALLING}{ARGUMENTS}{NEXT}{CALLING}{ARGUMENTS}", ParsedText("", "", [WEATHER, WEATHER])),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "expected"), ANSWERS, ids=range(len(ANSWERS)))
def test_answers_are_parsed_however_they_are_cut(answer: str, expected: ParsedText) -> None:
    for size in (1, 2, 5, len(answer)):
        pieces = [answer[at : at + size] for at in range(0, len(answer), size)]
        assert take_apart(Parsing(HARMONY, FUNCTIONS), pieces) == expected
    lone = take_apart(Parsing(HARMONY, FUNCTIONS, parallel=False), [answer])
    assert lone.calls == expected.calls[:1]


PIECES = [*SPECIAL, ANALYSIS, FINAL, CALLING, "assistant", " to=functions.time.now", "{}", "hm", "\n", "<|"]


@fuzz(100)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.data())
def test_any_answer_is_parsed_alike_however_it_is_cut(answer: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(answer)), max_size=9)))
    pieces = [answer[first:last] for first, last in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    parsing = Parsing(HARMONY, FUNCTIONS, opening=data.draw(st.sampled_from(["assistant", FINAL, CALLING])))
    whole = take_apart(parsing, [answer])
    assert whole == take_apart(parsing, pieces) == take_apart(parsing, list(answer) or [""])


def test_the_prompt_may_begin_a_message() -> None:
    for opening, expected in (("assistant", ParsedText("go on")), (FINAL, ParsedText("go on")),
                              (f"assistant{ANALYSIS}", ParsedText("", "go on")),
                              (f"{FINAL}said<|end|>", ParsedText("go on"))):  # fmt: skip
        assert take_apart(Parsing(HARMONY, (), opening=opening), ["go on"]) == expected


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Writing:
    folder = tmp_path_factory.mktemp("harmony")
    tokenizer = tokenizer_in(folder, probe=False)
    return Writing(folder, tokenizer)


def test_the_format_is_that_of_the_special_tokens(writing: Writing) -> None:
    tokenizer = writing.tokenizer
    assert choose_format("auto", tokenizer) is HARMONY and choose_format("hermes", tokenizer) is FORMATS["hermes"]
    assert choose_format("auto", tokenizer_folders.load("byte_level")) is not HARMONY
    ends = {tokenizer.special_tokens[end] for end in ("<|return|>", "<|call|>")}
    assert tokenizer.ends_at(frozenset()) == ends and not tokenizer_folders.load("byte_level").has_channels
    marks = find_marks(tokenizer)
    assert marks is not None and marks.closing == (tokenizer.special_tokens["<|end|>"],)


SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
JSON_FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
STRICT = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
SAID = f"<|channel|>commentary<|message|>Let me look.{NEXT}"
CALL = CALLING + ARGUMENTS
WRONG = CALL.replace("Rome", "Oslo")
ENFORCED: list[tuple[str, dict[str, Any], dict[str, bool]]] = [
    ("required", {"tools": TOOLS, "tool_choice": "required"},
     {CALL: True, THOUGHT + CALL: True, THOUGHT + THOUGHT + CALL: True, WRONG: False, f"{FINAL}No.": False,
      THOUGHT: False}),
    ("named", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "time.now"}}},
     {CALL: False, THOUGHT + CALLING.replace("weather", "time.now") + '{"zone": "UTC"}': True}),
    ("strict", {"tools": STRICT},
     {SAID + THOUGHT + CALL: True, WRONG: False, f"{THOUGHT}{FINAL}No.": True, SAID + FINAL + "Yes": True}),
    ("no budget", {"tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 0},
     {CALL: True, THOUGHT + CALL: False}),
    ("budget", {"tools": TOOLS, "tool_choice": "required", "thinking_token_budget": 4},
     {CALL: True, f"{ANALYSIS}a{NEXT}{CALL}": True, f"{ANALYSIS}{'東' * 9}{NEXT}{CALL}": False}),
    ("schema", JSON_FORM,
     {f'{THOUGHT}{FINAL}{{"n":1}}': True, f'{FINAL}{{"n":2}}': True, f'{FINAL}{{"n":3}}': False, '{"n":1}': False,
      f'{SAID}{FINAL}{{"n":1}}': False, CALL: False}),
    ("schema and tools", {**JSON_FORM, "tools": TOOLS},
     {f'{THOUGHT}{FINAL}{{"n":1}}': True, THOUGHT + CALL: True, WRONG.replace("2}", '"x"}'): True,
      f"{FINAL}No.": False}),
    ("regex", {"guided_regex": "(a/b|\\\\/|\n|[/]|\\d{2})"},
     {f"{FINAL}a/b": True, f"{FINAL}\\/": True, f"{FINAL}\n": True, f"{THOUGHT}{FINAL}/": True, f"{FINAL}42": True,
      "a/b": False, f"{FINAL}c": False}),
    ("choice", {"guided_choice": ["yes", 'n"o']}, {f"{THOUGHT}{FINAL}n\"o": True, f"{FINAL}maybe": False}),
]  # fmt: skip


def asked(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "q"}], **fields})


@pytest.mark.parametrize(("fields", "answers"), [case[1:] for case in ENFORCED], ids=[case[0] for case in ENFORCED])
def test_grammars_hold_in_the_right_channel(writing: Writing, fields: dict[str, Any], answers: dict[str, bool]) -> None:
    body = asked(**fields)
    grammar = read_form(body, HARMONY, ThoughtMarks((1,), (2,)), "tools").grammar(
        writing.tokenizer.special_tokens, form_of(body)
    )
    assert grammar is not None
    compiled = writing.compiler.compile(grammar)
    for answer, fits in answers.items():
        assert writing.takes(compiled.matcher(), answer) is fits, answer
    ended = 0
    for seed in range(6):
        text = writing.random(compiled.matcher(), random.Random(seed), 600)
        if text is not None and fields.get("tool_choice"):
            whole = take_apart(Parsing(HARMONY, FUNCTIONS), [text])
            schemas = {each.name: dict(each.parameters) for each in FUNCTIONS}
            (call,) = whole.calls
            jsonschema_rs.validator_for(schemas[call.name]).validate(json.loads(call.arguments))
            ended += 1
    assert ended or not fields.get("tool_choice")


def test_a_grammar_as_form_is_refused_with_its_reason(writing: Writing) -> None:
    with pytest.raises(InvalidRequestError, match="answers in channels"):
        form = read_form(asked(), HARMONY, None, "tools")
        form.grammar({}, Grammar("grammar", 'root ::= "a"', param="guided_grammar"))


# Through HTTP


@asynccontextmanager
async def scripted(folder: Path, text: str) -> AsyncIterator[Served]:
    tokenizer = tokenizer_in(folder)
    engine = FakeEngine(
        say(tokenizer, text), eos_token_ids=frozenset({tokenizer.eos_token_id or 0}), max_model_len=4096
    )
    async with serve(engine, tokenizer) as served:
        yield served


USER = {"role": "user", "content": "Weather?"}


def shown(item: Any) -> tuple[str, Any]:
    """An output item or block, with its text or arguments."""
    names = ("content", "arguments", "thinking", "text", "input")
    found = next(value for name in names if (value := getattr(item, name, None)) is not None)
    return item.type, found[0].text if isinstance(found, list) else found


@pytest.mark.slow
async def test_calls_and_reasoning_in_all_three_apis(tmp_path: Path) -> None:
    """Streamed and not streamed."""
    async with scripted(tmp_path, THOUGHT + SAID + CALL) as served:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            chat: Any = {"model": MODEL, "messages": [USER], "tools": TOOLS, "max_tokens": 300}
            whole = await client.chat.completions.create(**chat)
            async with client.chat.completions.stream(**chat, stream_options={"include_usage": True}) as stream:
                answers = [whole, await stream.get_final_completion()]
            tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
            response = await client.responses.create(model=MODEL, input="Weather?", tools=tools)
            async with client.responses.stream(model=MODEL, input="Weather?", tools=tools) as events:
                responses = [response, await events.get_final_response()]
        import anthropic

        async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0) as other:
            own = [{"name": each.name, "input_schema": each.parameters} for each in FUNCTIONS]
            asked: Any = {"model": MODEL, "max_tokens": 300, "messages": [USER], "tools": own}
            message = await other.messages.create(**asked)
            async with other.messages.stream(**asked) as blocks:
                messages = [message, await blocks.get_final_message()]
        size = len(served.app.state.context.tokenizer.encode("Need a tool.", add_special_tokens=False))
    for answer in answers:
        (choice,), said = answer.choices, answer.choices[0].message
        assert choice.finish_reason == "tool_calls" and said.content == "Let me look."
        assert [(call.function.name, call.function.arguments) for call in said.tool_calls or []] == [tuple(WEATHER)]
        assert (said.model_extra or {})["reasoning"] == (said.model_extra or {})["reasoning_content"] == "Need a tool."
        assert answer.usage and answer.usage.completion_tokens_details
        assert answer.usage.completion_tokens_details.reasoning_tokens == size
    parts = [("reasoning", "Need a tool."), ("message", "Let me look."), ("function_call", ARGUMENTS)]
    assert [[shown(item) for item in each.output] for each in responses] == [parts] * 2
    blocks_expected = [("thinking", "Need a tool."), ("text", "Let me look."), ("tool_use", json.loads(ARGUMENTS))]
    assert [[shown(block) for block in each.content] for each in messages] == [blocks_expected] * 2
    assert {each.stop_reason for each in messages} == {"tool_use"}


async def chat(served: Served, **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message of the answer and the prompt."""
    answer = await post(served, **{"messages": [USER], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"], prompt_of(served)


@pytest.mark.slow
async def test_the_template_gets_history_as_it_wants_it(tmp_path: Path) -> None:
    """Reasoning as `thinking`, one call a message, and no text beside reasoning in a message with calls."""
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate([("weather", ARGUMENTS), ("time.now", "{}")])
    ]
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": f"result {n}"} for n in range(2)]
    calling = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Need a tool.", "tool_calls": calls}
    late = {"role": "developer", "content": "Be brief."}
    async with scripted(tmp_path, f"{FINAL}Sun") as served:
        history = [
            late,
            USER,
            calling,
            *results,
            {"role": "assistant", "content": "Sun", "reasoning": "old"},
            late,
            USER,
        ]
        message, prompt = await chat(served, messages=history, tools=TOOLS)
    assert message["content"] == "Sun" and "tool_calls" not in message and "reasoning" not in message
    assert prompt == (
        "<|start|>system<|message|>Reasoning: medium<|end|>"
        "<|start|>developer<|message|>Be brief.type weathertype time.now<|end|><|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Need a tool.\n\nLet me look.<|end|>"
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
        '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"result 0"<|end|>'
        "<|start|>assistant to=functions.time.now<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.time.now to=assistant<|channel|>commentary<|message|>"result 1"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Sun<|end|><|start|>user<|message|>Be brief.<|end|>"
        "<|start|>user<|message|>Weather?<|end|><|start|>assistant"
    )


async def test_efforts_budgets_and_ends(tmp_path: Path) -> None:
    async with scripted(tmp_path, f"{ANALYSIS}hm{NEXT}{FINAL}Yes") as served:
        for effort, told in (("low", "low"), ("high", "high"), ("xhigh", "high"), ("minimal", "low"), ("none", "low")):
            message, prompt = await chat(served, reasoning_effort=effort)
            assert f"Reasoning: {told}" in prompt and message["reasoning"] == "hm"
        sampling = [request.sampling for request in served.engine.requests]
        assert [each.thinking and each.thinking.tokens for each in sampling] == [None] * 4 + [0]
        special = served.app.state.context.tokenizer.special_tokens
        assert {special["<|call|>"], special["<|return|>"]} <= sampling[0].stop_token_ids
        await chat(served, thinking_token_budget=5)
        await chat(served, thinking_token_budget=5, response_format={"type": "json_object"})
        free, formed = (request.sampling for request in served.engine.requests[-2:])
        assert free.grammar is None and free.thinking is not None and free.thinking.tokens == 5
        assert formed.thinking is None and formed.grammar is not None and "max_tokens=5" in formed.grammar.text


async def test_a_message_is_continued_in_its_channel(tmp_path: Path) -> None:
    past = [USER, {"role": "assistant", "content": '{"n":'}]
    async with scripted(tmp_path, "1}") as served:
        message, prompt = await chat(served, messages=past, continue_final_message=True, **JSON_FORM)
        assert message["content"] == "1}" and prompt.endswith(FINAL + '{"n":')
        refused = await post(served, messages=past, continue_final_message=True, tools=STRICT)
    assert refused.status_code == 400 and "strict calls" in refused.json()["error"]["message"]
    grammar = served.engine.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "json"
