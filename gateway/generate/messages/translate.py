"""Translation of POST /v1/messages to a chat request."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from engine.errors import InvalidRequestError
from gateway.generate.messages.wire import (
    CallBlock,
    CustomTool,
    MessageParam,
    MessagesRequest,
    PromptBody,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
)
from gateway.generate.prompt_options import SWITCHES
from gateway.generate.translation import Conversation, Translation, text_of, told_in, tool_fields
from gateway.generate.validation import validate
from gateway.generate.wire import ChatCompletionRequest

NAMES: Mapping[str, str] = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "tool_choice.function.name": "tool_choice.name",
    "continue_final_message": "messages",
}
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: PromptBody, template: str, reasons: bool = False) -> Translation:
    """Translate a body for a model with this chat template, which may have reasoning. Raises InvalidRequestError for an
    invalid chat request."""
    names = dict(NAMES)
    fields: dict[str, Any] = {
        "model": body.model,
        "service_tier": body.service_tier,
        "stream": body.stream,
        "messages": _conversation(body, names).messages(),
        **_functions(body),
        **_thinking(body, template, reasons),
    }
    if body.output_config and body.output_config.format:
        form = {"name": "answer", "schema": body.output_config.format.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": form}
    if isinstance(body, MessagesRequest):
        fields |= {
            "max_completion_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
    if body.messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    with told_in(names):
        return Translation(validate(ChatCompletionRequest, fields), names)


def _conversation(body: PromptBody, names: dict[str, str]) -> Conversation:
    conversation = Conversation(names)
    for text in [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]:
        # Claude Code's billing line changes with every request and would defeat the prefix cache
        if instruction := _BILLING.sub("", text):
            conversation.instruct(instruction)
    for number, message_ in enumerate(body.messages):
        if message_.role == "system":
            conversation.instruct(_said(message_))
        elif message_.role == "user":
            _ask(conversation, message_)
        else:
            _go_on(conversation, message_, f"messages[{number}]")
    return conversation


def _said(message: MessageParam) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join([block.text for block in message.content if isinstance(block, TextBlock)])


def _ask(conversation: Conversation, message: MessageParam) -> None:
    """Add a user message: first the tool results, then the text. Templates know no failed calls, so that the text of
    their results says it."""
    results = [] if isinstance(message.content, str) else [b for b in message.content if isinstance(b, ResultBlock)]
    for block in results:
        text = text_of(block.content or "")
        conversation.answer(block.tool_use_id, f"Error: {text}" if block.is_error else text)
    text = _said(message)
    if text or not results:
        conversation.ask(text)


def _go_on(conversation: Conversation, message: MessageParam, place: str) -> None:
    """Add an assistant message: reasoning, text and calls."""
    blocks = [] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
    conversation.say(_said(message))
    for number, block in enumerate(blocks):
        if isinstance(block, CallBlock):
            input_place = f"{place}.content[{number}].input"
            try:
                arguments = orjson.dumps(block.input).decode()
            except orjson.JSONEncodeError as error:
                raise InvalidRequestError(f"'{input_place}' is nested too deeply.", param=input_place) from error
            conversation.call(block.id, block.name, arguments, input_place)


def _functions(body: PromptBody) -> dict[str, Any]:
    choice = body.tool_choice
    tools = [
        {
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.input_schema,
            "strict": tool.strict,
        }
        for tool in body.tools or ()
        if isinstance(tool, CustomTool)
    ]
    if choice is None or not tools:
        return tool_fields(tools, None, choice is not None and choice.type in ("any", "tool"))
    alone = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    return tool_fields(tools, _choice(choice), True) | alone


def _choice(choice: ToolChoice) -> Any:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        message = "Missing required parameter: 'tool_choice.name'."
        raise InvalidRequestError(message, param="tool_choice.name", code="missing_required_parameter")
    return {"type": "function", "function": {"name": choice.name}}


def _thinking(body: PromptBody, template: str, reasons: bool) -> dict[str, Any]:
    """Return the fields for reasoning. By default the model decides; models without reasoning get no options."""
    thinking = body.thinking
    effort = body.output_config.effort if body.output_config else None
    if thinking is None or thinking.type == "adaptive" or not reasons:
        return {"reasoning_effort": effort}
    if thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    return {
        "reasoning_effort": effort,
        "chat_template_kwargs": {name: True for name in SWITCHES if name in template},
        "thinking_token_budget": thinking.budget_tokens,
    }
