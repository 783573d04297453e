"""Translation of POST /v1/responses to a chat request."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.generate.responses.wire import (
    CallItem,
    CallOutput,
    FunctionTool,
    InputMessage,
    Item,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    ToolChoiceAllowed,
    ToolChoiceFunction,
)
from gateway.generate.translation import Conversation, Translation, text_of, told_in, tool_fields
from gateway.generate.validation import validate
from gateway.generate.wire import ChatCompletionRequest

LOGPROBS = "message.output_text.logprobs"
NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema.name": "text.format.name",
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
    "tool_choice.function.name": "tool_choice.name",
}


def translate(body: ResponsesRequest) -> Translation:
    """Translate a body. Raises InvalidRequestError for an invalid chat request."""
    names = dict(NAMES)
    fields: dict[str, Any] = {
        "model": body.model,
        "service_tier": body.service_tier,
        "stream": body.stream,
        "messages": _conversation(body, names).messages(),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        **_logprobs(body),
        "response_format": _form(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "thinking_token_budget": body.thinking_token_budget,
        "ignore_eos": body.ignore_eos,
        "parallel_tool_calls": body.parallel_tool_calls,
        **_functions(body),
    }
    with told_in(names):
        return Translation(validate(ChatCompletionRequest, fields), names)


def functions_of(body: ResponsesRequest) -> list[FunctionTool]:
    """Return the tools that are offered to the model."""
    return [tool for tool in body.tools or () if isinstance(tool, FunctionTool)]


def _conversation(body: ResponsesRequest, names: dict[str, str]) -> Conversation:
    conversation = Conversation(names)
    if body.instructions:
        conversation.instruct(body.instructions)
    if isinstance(body.input, str):
        conversation.ask(body.input)
    else:
        _add(conversation, body.input)
    return conversation


def _add(conversation: Conversation, items: Sequence[Item]) -> None:
    for number, item in enumerate(items):
        match item:
            case InputMessage(role="user"):
                conversation.ask(text_of(item.content))
            case InputMessage(role="assistant"):
                conversation.say(text_of(item.content))
            case InputMessage():
                conversation.instruct(text_of(item.content))
            case ReasoningItem():
                conversation.think("\n".join([thought.text for thought in item.content or ()]))
            case CallItem():
                conversation.call(item.call_id, item.name, item.arguments, f"input[{number}].arguments")
            case CallOutput():
                conversation.answer(item.call_id, text_of(item.output))


def _logprobs(body: ResponsesRequest) -> dict[str, Any]:
    """Return the chat fields for log-probabilities, which the client asks for by `include` or `top_logprobs`."""
    if not body.top_logprobs and LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}


def _functions(body: ResponsesRequest) -> dict[str, Any]:
    tools = [tool.model_dump(exclude={"type"}) for tool in functions_of(body)]
    choice: Any = body.tool_choice
    if isinstance(choice, ToolChoiceAllowed):
        named = [_named(tool.name) for tool in choice.tools if tool.type == "function"]
        allowed = {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": named}}
        tools, choice = (tools, allowed) if named else ([], choice.mode)
    elif isinstance(choice, ToolChoiceFunction):
        choice = _named(choice.name)
    return tool_fields(tools, choice, choice not in (None, "none", "auto"))


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _form(form: TextFormat | None) -> dict[str, Any] | None:
    if form is None or form.type != "json_schema":
        return None if form is None else {"type": form.type}
    given = {"name": form.name, "schema": form.schema_, "description": form.description, "strict": form.strict}
    return {"type": form.type, "json_schema": {name: value for name, value in given.items() if value is not None}}
