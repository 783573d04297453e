"""POST /v1/messages and /v1/messages/count_tokens: bodies, their translation to chat requests, and events; see
`gateway.generate.wire`."""

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequestError
from gateway.context import GatewayContext
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.answering import ModelEndpoint
from gateway.generate.history import arguments_text, readable_turns
from gateway.generate.params import GenerationPlan
from gateway.generate.tool_formats import Call
from gateway.generate.translation import Conversation, Translation, count_prompt, plan_translated, text_of, tool_fields
from gateway.generate.validation import EXTRA_BODY, ClientObject, JsonPost, RefusedField, Unhonoured
from gateway.generate.wire import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    SWITCHES,
    RequestBody,
    StopString,
    TextOrParts,
    ToolName,
)
from gateway.http.errors import ApiError, messages_envelope
from gateway.http.sse import named_event

_INT32 = 2**31 - 1

_SWITCHES = ("chat_template_kwargs", "enable_thinking", "reasoning", "think")
UNHONOURED = Unhonoured(
    {
        "anthropic_beta", "anthropic_version", "betas", "cache_control", "context_management", "diagnostics",
        "inference_geo", "metadata", "speed", "user_profile_id",
    },
    {
        **dict.fromkeys(_SWITCHES, RefusedField("Use 'thinking' with 'type' 'enabled' or 'disabled'.")),
        "container": RefusedField("The server runs no code; offer a tool and run its calls in the client."),
        "extra_body": EXTRA_BODY,
        "fallbacks": RefusedField("The server has one model; choose another one in the client.", ([],)),
        "mcp_servers": RefusedField("The server calls no tools; call the MCP servers in the client.", ([],)),
        "reasoning_effort": RefusedField("Use 'output_config' with 'effort'."),
        "response_format": RefusedField("Use 'output_config' with 'format'."),
        "stop": RefusedField("Use 'stop_sequences'.", ([],)),
        "thread": RefusedField("The server stores no threads; send the whole conversation."),
    },
)  # fmt: skip
"""`cache_control` and betas have no effect: all prefixes are cached."""

SERVER_TOOLS = ("code_execution_", "tool_search_tool_", "web_fetch_", "web_search_")
"""Type prefixes of tools that Anthropic's servers execute. They are not offered to the model."""


class TextBlock(ClientObject):
    type: Literal["text"]
    text: str


class ThinkingBlock(ClientObject):
    type: Literal["thinking"]
    thinking: str


class HiddenThinkingBlock(ClientObject):
    """Encrypted reasoning of another server, which is ignored."""

    type: Literal["redacted_thinking"]


class CallBlock(ClientObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Texts = TextOrParts[TextBlock]


class ResultBlock(ClientObject):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


def _block_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else "text"
    return f"<{kind}>" if kind in _BLOCKS else None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[HiddenThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[CallBlock, Tag("<tool_use>")]
    | Annotated[ResultBlock, Tag("<tool_result>")],
    Discriminator(
        _block_kind,
        custom_error_type="block_type",
        custom_error_message=f"Blocks should be of type {', '.join(_BLOCKS)}",
    ),
]


class MessageParam(ClientObject):
    role: Literal["user", "assistant", "system"]
    content: TextOrParts[Block]


class CustomTool(ClientObject):
    """A function that the model may call; `input_schema` is the JSON schema of its arguments, enforced if `strict`."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ServerTool(ClientObject):
    """A tool that is ignored."""

    type: str


def _tool_kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None or kind == "custom":
        return "<function>"
    return "<server>" if isinstance(kind, str) and kind.startswith(SERVER_TOOLS) else None


Tool = Annotated[
    Annotated[CustomTool, Tag("<function>")] | Annotated[ServerTool, Tag("<server>")],
    Discriminator(
        _tool_kind, custom_error_type="tool_type", custom_error_message="Only tools with an input_schema are supported"
    ),
]


class ToolChoice(ClientObject):
    """`name` is required for the type `tool`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ClientObject):
    """`budget_tokens`: maximum number of reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=_INT32)


class OutputFormat(ClientObject):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ClientObject):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


def _as_tier(value: Any) -> Any:
    return "default" if value == "standard_only" else value


class PromptBody(RequestBody):
    """Fields that determine the prompt, which are all fields of POST /v1/messages/count_tokens. `output_format` is an
    older name of `output_config.format`."""

    messages: Annotated[
        list[MessageParam],
        Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True),
        BeforeValidator(readable_turns),
    ]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None


class CountRequest(PromptBody):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(PromptBody):
    """POST /v1/messages. A `max_tokens` beyond the context is reduced, because the API has a stop reason for it."""

    service_tier: Annotated[Literal["auto", "default", "flex", "standard_only"] | None, BeforeValidator(_as_tier)] = (
        None  # type: ignore[assignment]
    )
    max_tokens: int = Field(ge=1, le=_INT32)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0, le=_INT32)


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
    fields = _functions(body) | _thinking(body, template, reasons)
    if form_ := (body.output_config and body.output_config.format) or body.output_format:
        form = {"name": "answer", "schema": form_.schema_}
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
    return _conversation(body).translation(body, NAMES, **fields)


def _conversation(body: PromptBody) -> Conversation:
    conversation = Conversation()
    for text in [body.system] if isinstance(body.system, str) else [block.text for block in body.system or ()]:
        # Claude Code's billing line changes with every request and would defeat the prefix cache
        if instruction := _BILLING.sub("", text):
            conversation.instruct(instruction)
    for message_ in body.messages:
        if message_.role == "system":
            conversation.instruct(_said(message_))
        elif message_.role == "user":
            _ask(conversation, message_)
        else:
            _go_on(conversation, message_)
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


def _go_on(conversation: Conversation, message: MessageParam) -> None:
    """Add an assistant message: reasoning, text and calls."""
    blocks = [] if isinstance(message.content, str) else message.content
    for block in blocks:
        if isinstance(block, ThinkingBlock):
            conversation.think(block.thinking)
    conversation.say(_said(message))
    for block in blocks:
        if isinstance(block, CallBlock):
            conversation.call(block.id, block.name, arguments_text(block.input))


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


_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class MessageFormat:
    """See AnswerFormat. `request_id`: id of the HTTP request, for errors."""

    def __init__(self, plan: GenerationPlan, body: MessagesRequest, request_id: str | None) -> None:
        self._plan = plan
        self._request_id = request_id
        self._is_clipped = plan.requests[0].sampling.max_tokens < body.max_tokens
        self._content: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._kind: str | None = None  # kind of the open block
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        usage = {"prompt_tokens": len(self._plan.prompts[0].token_ids), "completion_tokens": 0}
        return _event("message_start", message=self._message(usage)) + _event("ping")

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:  # noqa: ARG002
        return self._take(delta)

    def closing(self, usage: dict[str, Any]) -> bytes:
        events = self._finish()
        return events + _event("message_delta", delta=self._end, usage=self._usage(usage)) + _event("message_stop")

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:  # noqa: ARG002
        return _event("error", **messages_envelope(error, self._request_id))

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        for delta in choices[0]:
            self._take(delta)
        self._finish()
        return self._message(usage)

    def _take(self, delta: OutputDelta) -> bytes:
        events: list[bytes] = []
        if delta.reasoning:
            events.append(self._write("thinking", delta.reasoning))
        if delta.text:
            events.append(self._write("text", delta.text))
        for call in delta.calls:
            events += (self._close(), self._call(call))
        if delta.finish_reason is not None:
            self._end = {"stop_reason": self._stop_reason(delta), "stop_sequence": delta.stop}
        return b"".join(events)

    def _stop_reason(self, delta: OutputDelta) -> str:
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_clipped else "max_tokens"
        return "stop_sequence" if delta.stop is not None else _STOP_REASONS[str(delta.finish_reason)]

    def _write(self, kind: str, text: str) -> bytes:
        events = b""
        if self._kind != kind:
            events = self._close()
            self._kind = kind
            events += _event("content_block_start", index=len(self._content), content_block=_block(kind, ""))
        self._texts.append(text)
        delta = {"type": f"{kind}_delta", kind: text}
        return events + _event("content_block_delta", index=len(self._content), delta=delta)

    def _close(self) -> bytes:
        """Close the open block, if any."""
        if self._kind is None:
            return b""
        index = len(self._content)
        self._content.append(_block(self._kind, "".join(self._texts)))
        self._kind = None
        self._texts.clear()
        return _event("content_block_stop", index=index)

    def _call(self, call: Call) -> bytes:
        index = len(self._content)
        block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": {}}
        self._content.append({**block, "input": orjson.Fragment(call.arguments)})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return b"".join(
            [
                _event("content_block_start", index=index, content_block=block),
                _event("content_block_delta", index=index, delta=delta),
                _event("content_block_stop", index=index),
            ]
        )

    def _finish(self) -> bytes:
        """Close the open block; an empty answer gets an empty block."""
        events = b"" if self._content or self._kind else self._write("text", "")
        return events + self._close()

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._plan.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": self._content,
            **self._end,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return Anthropic's usage, where input tokens exclude cached tokens."""
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": "batch" if self._plan.service_tier == "flex" else "standard",
        }


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})


def _translate(context: GatewayContext, body: PromptBody) -> Translation:
    return translate(body, context.tokenizer.chat_template_text, context.thought_marks is not None)


async def _plan(context: GatewayContext, body: MessagesRequest, tenant: str) -> GenerationPlan:
    return await plan_translated(context, body, _translate, tenant, "msg_", clip=True)


MESSAGES = ModelEndpoint(
    "/v1/messages", MessagesRequest, UNHONOURED, "create_message", _plan,
    lambda _, body, plan, request_id: MessageFormat(plan, body, request_id),
)  # fmt: skip
COUNT_TOKENS = JsonPost("/v1/messages/count_tokens", CountRequest, UNHONOURED)


async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a message. Nothing is queued."""
    return await count_prompt(request, COUNT_TOKENS, _translate)
