"""Bodies of POST /v1/messages and /v1/messages/count_tokens; see `gateway.generate.wire`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.generate.validation import ClientObject, Unhonoured
from gateway.generate.wire import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    RequestBody,
    StopString,
    ToolName,
    content_kind,
)

_INT32 = 2**31 - 1

UNHONOURED = Unhonoured(
    {
        "anthropic_beta", "anthropic_version", "betas", "cache_control", "context_management", "diagnostics",
        "inference_geo", "metadata", "speed", "user_profile_id",
    },
    {"container": (), "fallbacks": ([],), "mcp_servers": ([],), "thread": ()},
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


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(content_kind),
]


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
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
        Discriminator(content_kind),
    ]


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
    """Fields that determine the prompt, which are all fields of POST /v1/messages/count_tokens."""

    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES - 1, fail_fast=True)]
    system: Texts | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


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
