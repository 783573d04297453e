"""Request bodies of OpenAI's API as pydantic models with strict types.

A null has no meaning anywhere. Bodies and their settings refuse unknown fields; messages, tools and other objects that
clients return or decorate ignore them. The models have the supported fields only; `gateway.generate.validation` lists
fields that are ignored or refused.
"""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from engine.api import MAX_LOGIT_BIAS, MAX_LOGPROBS, RequestClass
from engine.errors import InvalidRequestError
from gateway.generate.history import readable_messages
from gateway.generate.validation import ClientObject, StrictBody, at_most

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SWITCHES = ("enable_thinking", "thinking")
"""Names under which chat templates read whether the model reasons first."""
MAX_TEMPLATE_OPTIONS = 64
TemplateOptions = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_OPTIONS), at_most(MAX_TEMPLATE_OPTIONS)]
_INT32 = 2**31 - 1


class ThinkingSwitch(ClientObject):
    """`budget_tokens`: maximum number of reasoning tokens."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=_INT32)


class ReasoningSwitch(StrictBody):
    """`max_tokens`: maximum number of reasoning tokens. Reasoning is always returned, in a field of its own."""

    enabled: bool | None = None
    effort: Effort | None = None
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    exclude: Literal[False] | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None


class ReasoningFields(StrictBody):
    """The first three fields take precedence over those of other servers. `chat_template_kwargs`: variables for the
    chat template."""

    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=_INT32)
    chat_template_kwargs: TemplateOptions | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    think: bool | Effort | None = None
    reasoning: ReasoningSwitch | None = None
    thinking_budget: int | None = Field(None, ge=0, le=_INT32)

    @model_validator(mode="after")
    def _apply_switches(self) -> Self:
        switch = self._switch()
        self.reasoning_effort = self.reasoning_effort or self._effort() or ("none" if switch is False else None)
        if switch:
            self.chat_template_kwargs = dict.fromkeys(SWITCHES, True) | (self.chat_template_kwargs or {})
        return self

    def _switch(self) -> bool | None:
        """Return whether the client turns reasoning on or off; None: the model decides."""
        thinking, reasoning = self.thinking, self.reasoning
        if isinstance(thinking, ThinkingSwitch):
            thinking = {"enabled": True, "disabled": False}.get(thinking.type)
        asked = (self.enable_thinking, thinking, self.think, reasoning and reasoning.enabled)
        return next((each for each in asked if isinstance(each, bool)), None)

    def _effort(self) -> Effort | None:
        if isinstance(self.think, str):
            return self.think
        return self.reasoning.effort if self.reasoning else None

    def other_budget(self) -> int | None:
        """Return the maximum number of reasoning tokens in a field of other servers, which models without reasoning
        ignore."""
        budgets = (
            self.thinking.budget_tokens if isinstance(self.thinking, ThinkingSwitch) else None,
            self.reasoning.max_tokens if self.reasoning else None,
            self.thinking_budget,
        )
        return next((each for each in budgets if each is not None), None)


MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_CHARS = 1024
MAX_SALT_CHARS = 1024
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOL_CALLS = 128
MAX_TOOLS = 1024
MAX_STOP_IDS = 64
MAX_ANSWERS = 20_000
_INT64 = 2**63


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def content_kind(value: Any) -> str:
    """Return the tag of a text or a list of parts."""
    return "<parts>" if isinstance(value, list) else "<text>"


def _empty_as_text(value: Any) -> Any:
    return "" if value == [] else value


class TextPart(ClientObject):
    type: Literal["text"]
    text: str


class FunctionCall(ClientObject):
    name: str
    arguments: str


class ToolCall(ClientObject):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


PartT = TypeVar("PartT")
TextOrParts = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[PartT], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(content_kind),
]
Content = Annotated[TextOrParts[TextPart], BeforeValidator(_empty_as_text)]


class ChatMessage(ClientObject):
    """A message. `tool_call_id`: the call that a tool message answers; `reasoning_content` is another name of
    `reasoning`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class StreamOptions(StrictBody):
    """`include_obfuscation` (padding against traffic analysis) is accepted and ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @property
    def in_every_chunk(self) -> bool:
        """Whether every chunk includes the usage so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, Field(ge=0, le=_INT32)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class JsonSchema(StrictBody):
    """A named schema, which is always enforced, even without `strict`."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


def _named_schema(value: Any) -> Any:
    """Convert a schema beside the type, as other servers take it, to OpenAI's form."""
    if isinstance(value, dict) and isinstance(value.get("schema"), dict) and value.get("json_schema") is None:
        rest = {name: each for name, each in value.items() if name not in ("type", "json_schema")}
        return {"type": "json_schema", "json_schema": {"name": "answer", **rest}}
    return value


class ResponseFormat(StrictBody):
    """Format of the answer. `json_schema` is required for the type of that name."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_ANSWERS, fail_fast=True)]


class StructuredOutputs(StrictBody):
    """Format of the answer as in vLLM: exactly one field except `whitespace_pattern`, which sets the white space in
    JSON."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None


Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PromiseFields(StrictBody):
    """Class and latency limits of an online request, as by headers; see `gateway.generate.params`."""

    class_: Annotated[str, Field(max_length=64)] | None = Field(None, alias="class")
    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class ModelBody(StrictBody):
    """Base of all requests to a model. None means that a field was not given; an empty `model` is the served model."""

    model: str = ""
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    tidemill: PromiseFields | None = None

    @property
    def request_class(self) -> RequestClass:
        return RequestClass.OFFLINE if self.service_tier == "flex" else RequestClass.ONLINE


class RequestBody(ModelBody):
    """Base of all generating APIs."""

    stream: bool | None = None


class GenerationBody(RequestBody):
    """Base of chat and text completions."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1, le=_INT32)
    min_tokens: int | None = Field(None, ge=0, le=_INT32)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True), BeforeValidator(_as_list)] | None = (
        None
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=_INT32)
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    presence_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(None, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10, allow_inf_nan=False)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS), at_most(MAX_LOGIT_BIAS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] | None = None
    response_format: Annotated[ResponseFormat, BeforeValidator(_named_schema)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
"""Twice OpenAI's maximum length, because tool names of agents are prefixed with server names."""


class FunctionDefinition(ClientObject):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ClientObject):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ClientObject):
    name: str


class NamedToolChoice(ClientObject):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(ClientObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(ClientObject):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def choice_kind(value: Any) -> str:
    """Return the tag of a `tool_choice`."""
    if isinstance(value, str):
        return "<mode>"
    return "<allowed>" if isinstance(value, dict) and value.get("type") == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[AllowedToolsChoice, Tag("<allowed>")]
    | Annotated[NamedToolChoice, Tag("<named>")],
    Discriminator(choice_kind),
]


class ChatCompletionRequest(GenerationBody, ReasoningFields):
    """POST /v1/chat/completions. `chat_template_kwargs`: variables for the chat template; `continue_final_message`:
    the answer continues the last message, which is an assistant's."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_special_tokens: Literal[False] | None = None
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    messages: Annotated[
        list[ChatMessage],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        BeforeValidator(readable_messages),
    ]
    max_completion_tokens: int | None = Field(None, ge=1, le=_INT32)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _keep_allowed_tools(self) -> Self:
        """Keep only the tools that `tool_choice` allows. Raises InvalidRequestError for a name without a tool."""
        if not isinstance(self.tool_choice, AllowedToolsChoice):
            return self
        allowed, tools = self.tool_choice.allowed_tools, self.tools or []
        names = {tool.function.name for tool in allowed.tools}
        if not names <= {tool.function.name for tool in tools}:
            message = "'tool_choice' names a function that is not in 'tools'."
            raise InvalidRequestError(message, param="tool_choice.allowed_tools.tools")
        self.tools = [tool for tool in tools if tool.function.name in names]
        self.tool_choice = allowed.mode
        return self


def as_prompts(value: Any, most: int = MAX_PROMPTS) -> Any:
    """Convert any of the four forms of a prompt to a list of prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        message = "Input should be a string, a list of strings, token ids, or lists of token ids"
        raise PydanticCustomError("prompt_type", message)
    if type(value[0]) is int:
        value = [value]
    if len(value) > most:
        raise PydanticCustomError("too_long", "Input should have at most {limit} prompts", {"limit": most})
    for prompt in value:
        is_ids = isinstance(prompt, list) and all(type(i) is int and 0 <= i <= _INT32 for i in prompt)
        if not is_ids and not isinstance(prompt, str):
            raise PydanticCustomError("prompt_type", "Every prompt should be a string or a list of token ids")
    return value


_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def prompt_schema(most: int) -> dict[str, Any]:
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": most},
            {**_IDS_SCHEMA, "minItems": 1},
            {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": most},
        ]
    }


class CompletionRequest(GenerationBody):
    """POST /v1/completions. `prompt` is normalized to a list of strings and lists of token ids. With `max_tokens` 0
    nothing is generated; `echo` with `logprobs` also scores the prompt."""

    prompt: Annotated[Any, BeforeValidator(as_prompts), WithJsonSchema(prompt_schema(MAX_PROMPTS))]
    max_tokens: int | None = Field(None, ge=0, le=_INT32)
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES)
