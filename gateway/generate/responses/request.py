"""Body of POST /v1/responses, and its translation to a chat request; see `gateway.generate.wire`. Responses are not
stored, so references to earlier responses are refused."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from engine.api import MAX_LOGPROBS
from gateway.generate.history import readable_items
from gateway.generate.reasoning import Effort
from gateway.generate.translation import Conversation, Translation, text_of, told_in, tool_fields
from gateway.generate.validation import EXTRA_BODY, ClientObject, Refused, StrictBody, Unhonoured, at_most, validate
from gateway.generate.validation import UNHONOURED as CHAT_UNHONOURED
from gateway.generate.wire import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    ChatCompletionRequest,
    RequestBody,
    ToolName,
    choice_kind,
    content_kind,
)

MAX_ITEMS = MAX_MESSAGES - 1  # the instructions become a message, too
MAX_METADATA = 16
_INT32 = 2**31 - 1

_SWITCHES = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "think", "thinking")
_STATELESS = "Responses are not stored; send the whole conversation as 'input'."
_NO_REFERENCES = "Responses are not stored; set 'store' to false, so that the client sends whole items."
UNHONOURED = Unhonoured(
    frozenset(CHAT_UNHONOURED.inert) - {"metadata", "prompt_cache_key", "safety_identifier"} | {"client_metadata"},
    {
        **dict.fromkeys(_SWITCHES, Refused("Use 'reasoning' with 'effort', which may be 'none'.")),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refused("Use 'max_output_tokens'.")),
        "background": Refused("Use POST /v1/batches for answers without a connection.", (False,)),
        "context_management": Refused("The server shortens no conversation; shorten 'input' in the client.", ([],)),
        "conversation": Refused(_STATELESS),
        "extra_body": EXTRA_BODY,
        "moderation": CHAT_UNHONOURED.unsupported["moderation"],
        "previous_response_id": Refused(_STATELESS),
        "prompt": Refused("The server stores no prompts; write the prompt into 'instructions'."),
        "response_format": Refused("Use 'text' with 'format'."),
        "truncation": Refused("Shorten 'input' in the client.", ("disabled", "auto")),
    },
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
    | Annotated[list[InputPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
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


_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str | None:
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return f"<{kind}>" if kind in _ITEMS else None


Item = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[CallOutput, Tag("<function_call_output>")]
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
    BeforeValidator(readable_items),
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
    fields: dict[str, Any] = {
        "model": body.model,
        "service_tier": body.service_tier,
        "stream": body.stream,
        "messages": _conversation(body).messages(),
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
    with told_in(NAMES):
        return Translation(validate(ChatCompletionRequest, fields), NAMES)


def functions_of(body: ResponsesRequest) -> list[FunctionTool]:
    """Return the tools that are offered to the model."""
    return [tool for tool in body.tools or () if isinstance(tool, FunctionTool)]


def _conversation(body: ResponsesRequest) -> Conversation:
    conversation = Conversation()
    if body.instructions:
        conversation.instruct(body.instructions)
    if isinstance(body.input, str):
        conversation.ask(body.input)
    else:
        _add(conversation, body.input)
    return conversation


def _add(conversation: Conversation, items: Sequence[Item]) -> None:
    for item in items:
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
                conversation.call(item.call_id, item.name, item.arguments)
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
    if form is None:
        return None
    name = form.name
    if form.type != "json_schema":
        if form.schema_ is None:
            return {"type": form.type}
        name = name or "answer"  # a schema is never ignored
    given = {"name": name, "schema": form.schema_, "description": form.description, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if value is not None}}
