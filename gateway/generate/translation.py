"""Translation of other APIs to chat requests; their responses are built from the same deltas.

All later stages (quotas, tools, structured outputs, reasoning) only know `ChatCompletionRequest`. Errors are renamed to
the parameters that the client sent.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response

from engine.errors import InvalidRequestError
from gateway.context import GatewayContext, context_of
from gateway.generate.answering import BodyT, caller_of, read_body, run_text_work
from gateway.generate.completions import prompt_ids, read_chat
from gateway.generate.params import GenerationPlan
from gateway.generate.validation import JsonPost, told_in, validate
from gateway.generate.wire import ChatCompletionRequest, ChatMessage, FunctionCall, RequestBody, ToolCall


class HasText(Protocol):
    text: str


@dataclass(frozen=True, slots=True)
class Translation:
    """A chat request, and the client's names of its parameters or of their prefixes."""

    chat: ChatCompletionRequest
    names: Mapping[str, str]


Translate = Callable[[GatewayContext, BodyT], Translation]
"""Translate a body. Slow. Raises InvalidRequestError."""


@dataclass(slots=True)
class _Draft:
    """A message under construction. Its parts are joined once at the end, to avoid quadratic time."""

    role: Literal["system", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> ChatMessage:
        message = ChatMessage(role=self.role, content="\n\n".join(self.texts), tool_call_id=self.call_id)
        message.reasoning_content = "\n".join(self.thoughts) if self.thoughts else None
        message.tool_calls = self.calls or None
        return message


class Conversation:
    """Builder of the messages of a chat request. Consecutive reasoning, text and calls of the model become one
    message."""

    def __init__(self) -> None:
        self._drafts: list[_Draft] = []

    def translation(self, body: RequestBody, names: Mapping[str, str], **fields: Any) -> Translation:
        """Return the chat of a body with these messages and other `fields`. Raises InvalidRequestError."""
        common = {"model": body.model, "service_tier": body.service_tier, "stream": body.stream}
        messages = [draft.message() for draft in self._drafts]
        with told_in(names):
            return Translation(validate(ChatCompletionRequest, {**common, "messages": messages, **fields}), names)

    def instruct(self, text: str) -> None:
        """Add instructions. Instructions before the first turn become one message: many templates allow only one."""
        if len(self._drafts) != 1 or self._drafts[0].role != "system":
            self._drafts.append(_Draft("system"))
        self._drafts[-1].texts.append(text)

    def ask(self, text: str) -> None:
        self._drafts.append(_Draft("user", [text]))

    def think(self, text: str) -> None:
        turn = self._turn(begins=True)
        if text:
            turn.thoughts.append(text)

    def say(self, text: str) -> None:
        turn = self._turn(begins=True)
        if text:
            turn.texts.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        turn = self._turn(begins=False)
        call = FunctionCall(name=name, arguments=arguments)
        turn.calls.append(ToolCall(id=call_id, type="function", function=call))

    def answer(self, call_id: str, text: str) -> None:
        self._drafts.append(_Draft("tool", [text], call_id=call_id))

    def _turn(self, begins: bool) -> _Draft:
        """Return the model's current message or a new one. With `begins`, a message that has text or calls is not
        continued."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.role != "assistant" or (begins and (last.texts or last.calls)):
            last = _Draft("assistant")
            self._drafts.append(last)
        return last


def tool_fields(tools: Sequence[Mapping[str, Any]], choice: Any, must_call: bool) -> dict[str, Any]:
    """Return `tools` and `tool_choice` of a chat request. Raises InvalidRequestError if a call is required but there
    are no functions."""
    if tools:
        return {"tools": [{"type": "function", "function": tool} for tool in tools], "tool_choice": choice}
    if must_call:
        raise InvalidRequestError("'tool_choice' requires a call, but 'tools' has no functions.", param="tool_choice")
    return {}


def text_of(content: str | Sequence[HasText]) -> str:
    """Return the text of a content, with its parts joined by line breaks."""
    return content if isinstance(content, str) else "\n".join([part.text for part in content])


async def plan_translated(
    context: GatewayContext, body: BodyT, translate: Translate[BodyT], tenant: str, prefix: str, clip: bool = False
) -> GenerationPlan:
    """Plan a request as a chat; see `ModelEndpoint.plan`. Errors have the client's names. `prefix`: prefix of the
    response id; `clip`: see `chat_plan`."""
    caller = caller_of(context, body, tenant, prefix)

    def plan() -> GenerationPlan:
        translation = translate(context, body)
        with told_in(translation.names):
            made = read_chat(context, translation.chat, caller, clip)
        return dataclasses.replace(made, names=translation.names)

    return await run_text_work(context, plan)


async def count_prompt(request: Request, post: JsonPost[BodyT], translate: Translate[BodyT], **fields: Any) -> Response:
    """Return the number of prompt tokens of a request, and `fields`. Nothing is queued."""
    context = context_of(request)
    context.lifecycle.check_accepting()
    body = await read_body(request, post.parse)
    translation = await run_text_work(context, lambda: translate(context, body))
    with told_in(translation.names):
        number = len(await prompt_ids(context, translation.chat))
    return Response(orjson.dumps({**fields, "input_tokens": number}), media_type="application/json")
