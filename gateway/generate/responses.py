"""POST /v1/responses and /v1/responses/input_tokens: body, its translation to a chat request, and events; see
`gateway.generate.wire`. Responses are not stored, so references to earlier responses are refused. A non-streamed
response is taken from the last event."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from engine.api import MAX_LOGPROBS
from engine.text.tokenizer import Tokenizer
from gateway.context import GatewayContext
from gateway.generate.answer_parser import OutputDelta
from gateway.generate.answering import ModelEndpoint
from gateway.generate.completions import chat_logprobs
from gateway.generate.history import readable_items
from gateway.generate.params import GenerationPlan
from gateway.generate.tool_formats import Call
from gateway.generate.translation import Conversation, Translation, count_prompt, plan_translated, text_of, tool_fields
from gateway.generate.validation import (
    EXTRA_BODY,
    ClientObject,
    JsonPost,
    RefusedField,
    StrictBody,
    Unhonoured,
    at_most,
)
from gateway.generate.validation import UNHONOURED as CHAT_UNHONOURED
from gateway.generate.wire import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    Effort,
    FunctionDefinition,
    RequestBody,
    TextOrParts,
    choice_kind,
    content_kind,
)
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, named_event

MAX_ITEMS = MAX_MESSAGES - 1  # the instructions become a message, too
MAX_METADATA = 16
_INT32 = 2**31 - 1

_SWITCHES = ("chat_template_kwargs", "enable_thinking", "reasoning_effort", "think", "thinking")
_STATELESS = "Responses are not stored; send the whole conversation as 'input'."
_NO_REFERENCES = "Responses are not stored; set 'store' to false, so that the client sends whole items."
UNHONOURED = Unhonoured(
    frozenset(CHAT_UNHONOURED.inert) - {"metadata", "prompt_cache_key", "safety_identifier"} | {"client_metadata"},
    {
        **dict.fromkeys(_SWITCHES, RefusedField("Use 'reasoning' with 'effort', which may be 'none'.")),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), RefusedField("Use 'max_output_tokens'.")),
        "background": RefusedField("Use POST /v1/batches for answers without a connection.", (False,)),
        "context_management": RefusedField(
            "The server shortens no conversation; shorten 'input' in the client.", ([],)
        ),
        "conversation": RefusedField(_STATELESS),
        "extra_body": EXTRA_BODY,
        "moderation": CHAT_UNHONOURED.unsupported["moderation"],
        "previous_response_id": RefusedField(_STATELESS),
        "prompt": RefusedField("The server stores no prompts; write the prompt into 'instructions'."),
        "response_format": RefusedField("Use 'text' with 'format'."),
        "truncation": RefusedField("Shorten 'input' in the client.", ("disabled", "auto")),
    },
)


class InputPart(ClientObject):
    """A text part of a message or a tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class Thought(ClientObject):
    type: Literal["reasoning_text", "text"]
    text: str


Content = TextOrParts[InputPart]


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


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


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
    return _conversation(body).translation(body, NAMES, **fields)


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


Event = dict[str, Any]

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class OpenItem:
    """The open output item: a message or reasoning, each with one text part."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.name = "output_text" if kind == "message" else "reasoning_text"
        self.texts: list[str] = []
        self.logprobs: list[orjson.Fragment] = []
        start: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        prefix = "msg" if kind == "message" else "rs"
        self.item: dict[str, Any] = {"id": _new_id(prefix), "type": kind, "status": "in_progress", **start}

    @property
    def place(self) -> dict[str, Any]:
        """The fields that locate the item in events."""
        return {"item_id": self.item["id"], "output_index": self.index, "content_index": 0}

    def part(self, text: str, logprobs: Sequence[orjson.Fragment] = ()) -> dict[str, Any]:
        extra: dict[str, Any] = {"annotations": [], "logprobs": list(logprobs)} if self.kind == "message" else {}
        return {"type": self.name, "text": text, **extra}


class ResponsesFormat:
    """See AnswerFormat."""

    def __init__(self, plan: GenerationPlan, body: ResponsesRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._number = 0
        self._finish_reason: str | None = None
        self._response = _described(plan, body)

    def opening(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return _written([self._event(kind, response=self._response) for kind in kinds])

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:  # noqa: ARG002
        return _written(self._take(delta))

    def closing(self, usage: dict[str, Any]) -> bytes:
        return _written(self._finish(usage)) + DONE

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:
        events = self._close("incomplete")
        cause = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        return _written([*events, self._end("failed", usage, error=cause)]) + DONE

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        for delta in choices[0]:
            self._take(delta)
        response: dict[str, Any] = self._finish(usage)[-1]["response"]
        return response

    def _take(self, delta: OutputDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._write("reasoning", delta.reasoning)
        if delta.text:
            events += self._write("message", delta.text, chat_logprobs(self._tokenizer, delta.logprobs))
        for call in delta.calls:
            events += [*self._close(), *self._call(call)]
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def _write(self, kind: str, text: str, logprobs: Sequence[orjson.Fragment] = ()) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close()
            self._open = OpenItem(kind, len(self._output))
            item = {**self._open.item, "content": []}
            events += [
                self._event("response.output_item.added", output_index=self._open.index, item=item),
                self._event("response.content_part.added", **self._open.place, part=self._open.part("")),
            ]
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        if text:
            events.append(self._text_event("delta", logprobs, delta=text))
        return events

    def _text_event(self, kind: str, logprobs: Sequence[orjson.Fragment], **fields: Any) -> Event:
        assert self._open is not None
        extra: dict[str, Any] = {"logprobs": list(logprobs)} if self._open.kind == "message" else {}
        return self._event(f"response.{self._open.name}.{kind}", **self._open.place, **fields, **extra)

    def _close(self, status: str = "completed") -> list[Event]:
        """Close the open item, if any."""
        opened = self._open
        if opened is None:
            return []
        text = "".join(opened.texts)
        part = opened.part(text, opened.logprobs)
        item = {**opened.item, "status": status, "content": [part]}
        self._output.append(item)
        events = [
            self._text_event("done", opened.logprobs, text=text),
            self._event("response.content_part.done", **opened.place, part=part),
            self._event("response.output_item.done", output_index=opened.index, item=item),
        ]
        self._open = None
        return events

    def _call(self, call: Call) -> list[Event]:
        index, item_id = len(self._output), _new_id("fc")
        item = {
            "id": item_id, "type": "function_call", "status": "completed", "call_id": _new_id("call"),
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
        self._output.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        place = {"item_id": item_id, "output_index": index}
        step = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{step}.delta", **place, delta=call.arguments),
            self._event(f"{step}.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _finish(self, usage: dict[str, Any]) -> list[Event]:
        events = [] if self._output or self._open else self._write("message", "")
        if self._finish_reason == "length":
            cause = {"reason": "max_output_tokens"}
            return [*events, *self._close("incomplete"), self._end("incomplete", usage, incomplete_details=cause)]
        return [*events, *self._close(), self._end("completed", usage, completed_at=int(time.time()))]

    def _end(self, status: str, usage: dict[str, Any], **fields: Any) -> Event:
        self._response |= {"status": status, "output": self._output, "usage": _usage(usage), **fields}
        return self._event(f"response.{status}", response=self._response)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _described(plan: GenerationPlan, body: ResponsesRequest) -> dict[str, Any]:
    """Return the response without output, with the effective settings of the request."""
    form, choice, sampling = body.text.format if body.text else None, body.tool_choice, plan.requests[0].sampling
    return {
        "id": plan.response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": plan.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": plan.service_tier,
        "store": False,
        "temperature": sampling.temperature,
        "text": {
            "format": _without_none(form) if form else {"type": "text"},
            "verbosity": (body.text and body.text.verbosity) or "medium",
        },
        "tool_choice": choice.model_dump(exclude_unset=True) if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [dict(tool.__dict__) for tool in functions_of(body)],  # schemas as they are: a dump copies them
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _without_none(form: TextFormat) -> dict[str, Any]:
    """Return the given fields under their JSON names, without copying the schema."""
    given = {**form.__dict__, "schema": form.schema_}
    return {name: value for name, value in given.items() if value is not None and name != "schema_"}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    thoughts = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage["total_tokens"],
    }


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(map(named_event, events))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"


def _translate(_: GatewayContext, body: ResponsesRequest) -> Translation:
    return translate(body)


async def _plan(context: GatewayContext, body: ResponsesRequest, tenant: str) -> GenerationPlan:
    return await plan_translated(context, body, _translate, tenant, "resp_")


RESPONSES = ModelEndpoint(
    "/v1/responses", ResponsesRequest, UNHONOURED, "create_response", _plan,
    lambda context, body, plan, _: ResponsesFormat(plan, body, context.tokenizer),
)  # fmt: skip
INPUT_TOKENS = JsonPost("/v1/responses/input_tokens", ResponsesRequest, UNHONOURED)


async def input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a response. Nothing is queued."""
    return await count_prompt(request, INPUT_TOKENS, _translate, object="response.input_tokens")
