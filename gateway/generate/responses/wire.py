"""Body of POST /v1/responses; see `gateway.generate.wire`. Responses are not stored, so references to earlier responses
are refused."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from engine.api import MAX_LOGPROBS
from gateway.generate.validation import UNHONOURED as CHAT_UNHONOURED
from gateway.generate.validation import ClientObject, StrictBody, Unhonoured, at_most
from gateway.generate.wire import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Effort,
    RequestBody,
    ToolName,
    choice_kind,
    content_kind,
    refusal_as_text,
)

MAX_ITEMS = MAX_MESSAGES - 1  # the instructions become a message, too
MAX_METADATA = 16
_INT32 = 2**31 - 1

_STATELESS = "Responses are not stored; send the whole conversation as 'input'."
_NO_REFERENCES = "Responses are not stored; set 'store' to false, so that the client sends whole items."
UNHONOURED = Unhonoured(
    frozenset(CHAT_UNHONOURED.inert) - {"metadata", "prompt_cache_key", "safety_identifier"} | {"client_metadata"},
    {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled", "auto"),
    },
    {"previous_response_id": _STATELESS, "conversation": _STATELESS},
)


class InputPart(ClientObject):
    """A text part of a message or a tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Thought(ClientObject):
    type: Literal["reasoning_text", "text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[
        list[Annotated[InputPart, BeforeValidator(refusal_as_text)]],
        Field(max_length=MAX_PARTS, fail_fast=True),
        Tag("<parts>"),
    ],
    Discriminator(content_kind),
]


class InputMessage(ClientObject):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class CallItem(ClientObject):
    """A call by the model; `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutput(ClientObject):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(ClientObject):
    """Reasoning of the model. An item without `content` (e.g. encrypted) is ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[Thought], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None


_ITEMS = {
    "message": "<message>", "function_call": "<call>", "function_call_output": "<output>", "reasoning": "<reasoning>",
}  # fmt: skip


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return _ITEMS.get(kind) if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[CallOutput, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        _item_kind,
        custom_error_type="item_type",
        custom_error_message=f"Items should be of type {', '.join(_ITEMS)}. For item_reference: {_NO_REFERENCES}",
    ),
]


Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True), Tag("<parts>")],
    Discriminator(content_kind),
]


class FunctionTool(ClientObject):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class HostedTool(ClientObject):
    """A tool that is not a function, such as `web_search`. Agents send them along; they are not offered to the
    model."""

    type: str


def _tool_kind(value: Any) -> str:
    kind = value.get("type", "function") if isinstance(value, dict) else "function"
    return "<function>" if kind == "function" else "<hosted>"


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[HostedTool, Tag("<hosted>")], Discriminator(_tool_kind)
]


class ToolChoiceFunction(StrictBody):
    type: Literal["function"]
    name: str


class AllowedTool(ClientObject):
    """A tool of `tools`. Hosted tools may have no name; their own fields are returned."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str = ""


class ToolChoiceAllowed(StrictBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[ToolChoiceAllowed, Tag("<allowed>")]
    | Annotated[ToolChoiceFunction, Tag("<named>")],
    Discriminator(choice_kind),
]


class TextFormat(StrictBody):
    """Format of the answer. The fields after `type` belong to json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(StrictBody):
    """`verbosity` is returned and otherwise ignored: chat templates do not know it."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(StrictBody):
    """`effort` `none` turns reasoning off; other values need a chat template that supports them. Summaries are not
    generated."""

    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None


class ResponseStreamOptions(StrictBody):
    include_obfuscation: bool | None = None


Included = Literal[
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "message.output_text.logprobs", "reasoning.encrypted_content",
    "web_search_call.action.sources", "web_search_call.results",
]  # fmt: skip
_Name = Annotated[str, Field(min_length=1, max_length=64)]
_Note = Annotated[str, Field(max_length=512)]


class ResponsesRequest(RequestBody):
    """POST /v1/responses. `max_tool_calls` concerns hosted tools only; like `prompt_cache_key` and `safety_identifier`
    it is returned and otherwise ignored."""

    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=_INT32)
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[_Name, _Note], at_most(MAX_METADATA)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    text: TextOptions | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=_INT32)
    ignore_eos: bool | None = None
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    stream_options: ResponseStreamOptions | None = None
