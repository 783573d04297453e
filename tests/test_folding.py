"""Conversations in shapes that a template refuses: folded where it does, unchanged where it takes them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_folders
import tokenizers
from cost_tools import check
from fake_engine import FakeEngine, say, serve
from support.http import post

from engine.text.chat_template import fold
from engine.text.template_probe import Shape, probe_templates
from engine.text.tokenizer import Tokenizer
from gateway.generate.tool_formats import find_format

TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}{{ message.reasoning_content }}"
CALLS = "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}"
OPEN = "{% for message in messages %}" + TURN + CALLS + "<|im_end|>\n{% endfor %}"
LEADS = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}{{ raise_exception('begin') }}"
    "{% endif %}" + TURN + CALLS + "<|im_end|>\n{% endfor %}"
)
ALTERNATES = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% set turn = namespace(index=0) %}"
    "{% for message in messages[start:] %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (turn.index % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set turn.index = turn.index + 1 %}"
    "{% elif message.role == 'system' %}{{ raise_exception('an initial system message only') }}{% endif %}"
    "{% if loop.first and start %}({{ messages[0].content }}){% endif %}" + TURN + CALLS + "<|im_end|>\n{% endfor %}"
)
ONE_CALL = (
    "{% for message in messages %}{% if message.tool_calls and message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call') }}{% endif %}" + TURN + CALLS + "<|im_end|>\n{% endfor %}"
)
IGNORES_CALLS = tokenizer_folders.CHATML
# As DeepSeek's: arguments are text; V3 writes calls only beside content None, V3.1 fails without content.
TEXT_CALLS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['tool_calls'] is defined and message['tool_calls'] is not none %}"
    "{% if message['content'] is not none %}{{ message['content'] + '' }}{% endif %}"
    "{% for tool in message['tool_calls'] %}"
    "{{ '<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}"
    "{% endfor %}{% else %}{{ message['content'] + '' }}{% endif %}<|im_end|>\n{% endfor %}"
)
BARE_CALLS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and message['content'] is none %}{% for tool in message['tool_calls'] %}"
    "{{ '(' + tool['function']['name'] + ')' + tool['function']['arguments'] }}{% endfor %}"
    "{% elif message['content'] is not none %}{{ message['content'] + '' }}{% endif %}<|im_end|>\n{% endfor %}"
)
OF_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endfor %}"
DROPS_SYSTEM = "{% for message in messages if message.role != 'system' %}" + TURN + "<|im_end|>\n{% endfor %}"


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def calling(*names: str) -> dict[str, Any]:
    calls = [{"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return said("", tool_calls=calls)


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id-{name}", "content": text}


LATE = {Shape.SYSTEMS, Shape.LATE_SYSTEM}
REFUSED: list[tuple[str, set[Shape]]] = [
    (OPEN, set()),
    (LEADS, LATE),
    (ALTERNATES, LATE | {Shape.USERS, Shape.ANSWERS, Shape.TEXT_AFTER_RESULT}),
    (ONE_CALL, {Shape.CALLS}),
    (IGNORES_CALLS, {Shape.CALL}),
    (DROPS_SYSTEM, LATE | {Shape.SYSTEM, Shape.CALL}),
    (TEXT_CALLS, set()),
    (BARE_CALLS, {Shape.TEXT_WITH_CALL}),
    (OF_PARTS, {Shape.CALL}),
]


CASES: list[tuple[str, set[Shape], list[Any], list[Any]]] = [
    ("systems in front are joined", LATE,
     [system("a"), system("b"), user("q")], [system("a\n\nb"), user("q")]),
    ("a late system message keeps its place", LATE,
     [system("a"), user("q"), said("x"), system("b"), user("r")],
     [system("a"), user("q"), said("x"), user("b"), user("r")]),
    ("a system message behind the user", LATE | {Shape.USERS},
     [system("a"), user("q"), system("b")], [system("a"), user("q\n\nb")]),
    ("no system message at all", LATE | {Shape.SYSTEM, Shape.USERS},
     [system("a"), system("b"), user("q"), said("x"), user("r")], [user("a\n\nb\n\nq"), said("x"), user("r")]),
    ("user after user", {Shape.USERS},
     [user("a"), user("b"), said("x"), user("c")], [user("a\n\nb"), said("x"), user("c")]),
    ("parts are joined as text", {Shape.USERS},
     [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, user("c")],
     [user("a\nb\n\nc")]),
    ("answers with thoughts and calls", {Shape.ANSWERS},
     [user("q"), said("x", reasoning_content="t"), {**calling("f"), "content": None}, result("f", "1")],
     [user("q"), {**calling("f"), "content": "x", "reasoning_content": "t"}, result("f", "1")]),
    ("text after results", {Shape.TEXT_AFTER_RESULT},
     [user("q"), calling("f"), result("f", "1"), user("go on")],
     [user("q"), calling("f"), result("f", "1\n\ngo on")]),
    ("one call a message, results in any order", {Shape.CALLS},
     [user("q"), {**calling("f", "g"), "content": "look"}, result("g", "2"), result("f", "1"), result("h", "3")],
     [user("q"), {**calling("f"), "content": "look"}, result("f", "1"), calling("g"), result("g", "2"),
      result("h", "3")]),
    ("calls for a template without tools", {Shape.CALL, Shape.USERS, Shape.ANSWERS},
     [user("q"), {**calling("f"), "content": "x"}, result("f", "1"), user("go on"), said("y")],
     [user("q"), said("x\n[call of f: {}]"), user("[result of a tool]\n1\n\ngo on"), said("y")]),
    ("a text before calls", {Shape.TEXT_WITH_CALL},
     [user("q"), {**calling("f"), "content": "x", "reasoning_content": "t"}, result("f", "1")],
     [user("q"), said("x", reasoning_content="t"), calling("f"), result("f", "1")]),
    ("fields of a message stay", LATE,
     [{**system("a"), "tools": "[]"}, system("b"), {**user("q"), "name": "n"}],
     [{**system("a\n\nb"), "tools": "[]"}, {**user("q"), "name": "n"}]),
    ("nothing is refused", set(), [system("a"), system("b"), user("q"), user("r")],
     [system("a"), system("b"), user("q"), user("r")]),
    ("an empty text adds nothing", LATE, [system(""), system("b"), user("q")], [system("b"), user("q")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "refused", "given", "expected"), CASES, ids=[case[0] for case in CASES])
def test_folding(name: str, refused: set[Shape], given: list[Any], expected: list[Any]) -> None:
    assert list(fold(given, refused)) == expected


ALL = set(Shape)
HISTORY = [
    system("s1"), system("s2"), user("u1"), user("u2"), calling("f", "g"), result("f", "r1"), result("g", "r2"),
    user("u3"), said("a1"), said("a2"), system("s3"), user("u4"), system("s4"),
]  # fmt: skip
WORDS = ["s1", "s2", "u1", "u2", "r1", "r2", "u3", "a1", "a2", "s3", "u4", "s4"]


@pytest.mark.slow
@pytest.mark.parametrize(("template", "refused"), REFUSED, ids=range(len(REFUSED)))
def test_every_template_takes_every_conversation(
    tmp_path: Path, template: str, refused: set[Shape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe finds the shapes that the template refuses. All texts reach the prompt once, in their order."""
    facts = probe_templates({"default": template}, {})
    assert facts.error is None and set(facts.refused) == refused
    if template == OF_PARTS:
        return
    monkeypatch.setattr("engine.text.tokenizer.probe_templates", lambda *_: facts)
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(tmp_path, template))
    written = tokenizer.decode(tokenizer.encode_chat(HISTORY))
    places = [written.index(word) for word in WORDS]
    assert places == sorted(places) and all(written.count(word) == 1 for word in WORDS)
    if template == OPEN:
        plain = Tokenizer.load(tmp_path, probe=False)
        assert plain.encode_chat(HISTORY) == tokenizer.encode_chat(HISTORY)


@pytest.mark.parametrize("template", [TEXT_CALLS, BARE_CALLS])
def test_calls_with_arguments_as_text(tmp_path: Path, template: str) -> None:
    """In the client's spelling, with and without text in their message."""
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(tmp_path, template))
    spelled = '{"city":  "Rome", "n": 1e999}'
    calls = [{"id": "c", "type": "function", "function": {"name": "weather", "arguments": spelled}}]
    for content, texts in (("Let me look.", ["Let me look."]), ("", []), (None, [])):
        calling = {"role": "assistant", "content": content, "tool_calls": calls}
        history = [user("u"), calling, {"role": "tool", "tool_call_id": "c", "content": "Sun"}]
        written = tokenizer.decode(tokenizer.encode_chat(history))
        places = [written.index(word) for word in [*texts, "weather", spelled, "Sun"]]
        assert places == sorted(places) and "None" not in written


def test_a_tools_section_is_added_where_the_template_has_none(tmp_path: Path) -> None:
    """Its marks are control tokens; the same marks in a description are not."""
    marks = ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"]
    tokenizer_folders.byte_level(tmp_path, TEXT_CALLS)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(marks)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "weather", "description": "Not <｜tool▁sep｜>", "parameters": parameters}
    for messages in ([system("Be brief."), user("u")], [user("u")]):
        ids = tokenizer.encode_chat(messages, tools=[{"type": "function", "function": function}])
        written = tokenizer.decode(ids, skip_special_tokens=False)
        words = [*(message["content"] for message in messages[:-1]), "### weather", json.dumps(parameters), marks[0]]
        places = [written.index(word) for word in [*words, "<|im_start|>user"]]
        assert places == sorted(places) and [ids.count(tokenizer.special_tokens[mark]) for mark in marks] == [1, 1, 1]
        assert "## Tools" not in tokenizer.decode(tokenizer.encode_chat(messages))
    assert "tools" in tokenizer.chat_template_text and find_format(tokenizer.chat_template_text) is not None


def test_folding_is_linear() -> None:
    def conversation(size: int) -> Any:
        turns = [user("x" * 20), system("y"), calling("f", "g"), result("f", "1"), user("z"), said("a"), said("b")]
        return lambda: fold(turns * size, ALL)

    check(conversation, 20, 0)


async def test_all_three_apis_fold(tmp_path: Path) -> None:
    """The same conversation gives the same prompt by each API."""
    tokenizer = Tokenizer.load(tokenizer_folders.byte_level(tmp_path, ALTERNATES))
    engine = FakeEngine(say(tokenizer, "ok"), eos_token_ids=frozenset({tokenizer.eos_token_id or 0}))
    turns = [user("q"), system("late"), user("r")]
    developer = {"role": "developer", "content": "b"}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [system("a"), developer, *turns]},
        "/v1/messages": {"system": [{"type": "text", "text": each} for each in "ab"], "messages": turns},
        "/v1/responses": {"instructions": "a", "input": [developer, *turns]},
    }
    async with serve(engine, tokenizer) as served:
        for path, body in bodies.items():
            length = {"max_tokens": 9} if path == "/v1/messages" else {}
            answer = await post(served, path, **body, **length)
            assert answer.status_code == 200, answer.text
    prompts = [tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in engine.requests]
    assert prompts == ["(a\n\nb)<|im_start|>user\nq\n\nlate\n\nr<|im_end|>\n"] * 3
