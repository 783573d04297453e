"""Bounds on the work of the gateway for a large request; `test_cost` measures that the work grows linearly."""

import functools
from typing import Any

import pytest
from cost_tools import cost_of
from support.tables import for_each

from engine.errors import InvalidRequestError
from gateway.generate import messages
from gateway.generate.answer_form import grammar_of, read_form
from gateway.generate.grammars import Function
from gateway.generate.messages import MessagesRequest
from gateway.generate.tool_formats import FORMATS
from gateway.generate.validation import rename
from gateway.generate.wire import ChatCompletionRequest

USER = {"role": "user", "content": "x"}


def ask_messages(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "m", "max_tokens": 9, "messages": [USER], **fields})


def test_pieces_are_joined_as_before() -> None:
    body = ask_messages(
        system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": "t1"}, {"type": "thinking", "thinking": "t2"}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "said"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"k": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
        ],
    )
    translation = messages.translate(body, "")
    told = [message.model_dump(exclude_none=True) for message in translation.chat.messages]
    assert told[0] == {"role": "system", "content": "a\n\nb"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"k":1}'}}
    assert told[2:4] == [
        {"role": "assistant", "content": "said", "reasoning_content": "t1\nt2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    assert told[-1] == {"role": "tool", "content": "r", "tool_call_id": "c"}
    assert rename("messages[0].content", {"messages": "input"}) == "input"


# Grammars


def write_grammar(name: str, parameters: dict[str, Any]) -> str:
    return FORMATS[name].grammar([Function("f", parameters)], {}, True, True)


def test_a_grammar_is_refused_as_soon_as_it_is_too_long() -> None:
    """A definition that every parameter uses in a way of its own is written for each: up to the limit."""
    definition = {"description": "x" * 60_000}

    def parameters(n: int) -> dict[str, Any]:
        uses = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d"}} for i in range(n)}
        return {"type": "object", "$defs": {"d": definition}, "properties": uses}

    def refuse(given: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="longer than 256 KiB"):
            write_grammar("qwen3_xml", given)

    few, many = (cost_of(functools.partial(refuse, parameters(n))).lines for n in (10, 1000))
    assert many <= few + 100


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": [USER], **fields})


@for_each("name", sorted(FORMATS))
def test_too_long_a_grammar_is_a_clear_400(name: str) -> None:
    parameters = {"type": "object", "properties": {"p": {"enum": ["x" * 100] * 3000}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(InvalidRequestError, match="256 KiB") as caught:
        read_form(chat(tools=tools, tool_choice="required"), FORMATS[name], None, "tools").grammar({})
    assert caught.value.param == "tools" and caught.value.message.startswith("'tools' cannot be enforced")


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["x" * 300_000]}}}},
        {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "x" * 300_000}},
        {"guided_regex": "x" * 300_000},
        {"guided_choice": ["x" * 300_000]},
        {"guided_grammar": "\n" * 300_000},
    ],
)
def test_too_long_a_form_is_refused_in_the_gateway(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="256 KiB") as caught:
        grammar_of(chat(**fields))
    assert caught.value.param is not None and caught.value.param.split(".")[0] in next(iter(fields)) + "guided_"


@for_each("name", sorted(FORMATS))
@for_each(
    "schema",
    [
        {"$ref": []}, {"type": 5}, {"type": "array", "minItems": "a"}, {"enum": 5}, {"anyOf": 5}, {"const": {"a": {}}},
        {"type": "string", "minLength": "1,}/ | /a{0"}, {"type": "object", "properties": []}, {"type": [[]]},
        {"type": "object", "properties": {"a": True}, "required": [[]]}, {"type": "object", "required": 5}, 5, None,
    ],
)  # fmt: skip
def test_a_tool_without_a_schema_is_refused_or_written(name: str, schema: Any) -> None:
    """The engine judges the JSON schemas in a grammar; a family's own syntax raises nothing but a refusal."""
    parameters = {"type": "object", "properties": {"p": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    try:
        read_form(chat(tools=tools, tool_choice="required"), FORMATS[name], None, "tools").grammar({})
    except InvalidRequestError as error:
        assert error.param == "tools" and len(error.message) < 300
