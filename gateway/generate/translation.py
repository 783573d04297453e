"""Other APIs as translations: their requests become chat requests, and their answers are written from the same deltas.

`ChatCompletionRequest` is the neutral form that everything behind it knows - limits, tenants, tools, structured output,
thoughts. What remains here is to call parameters by the names that the client used.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidRequestError
from gateway.generate.wire import ChatCompletionRequest, FunctionCall, Message, ToolCall

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
_QUOTED = re.compile("'([^']{1,200})'")
_PART = re.compile(r"[.\[]")


class HasText(Protocol):
    text: str


class ClientObject(BaseModel):
    """An object of exact types that may hold more than its fields: what clients send back as they got it holds whatever
    some version of the API put into it."""

    model_config = ConfigDict(extra="ignore", strict=True, hide_input_in_errors=True, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class Translation:
    """The chat request that asks the same. `names`: what its parameters, or what stands before their parts, are called
    by the client."""

    chat: ChatCompletionRequest
    names: Mapping[str, str]


@contextmanager
def told_in(names: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a chat request is told by the client's names."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = None if error.param is None else rename(error.param, names)
        error.message = _QUOTED.sub(lambda match: f"'{rename(match[1], names)}'", error.message)
        raise


def rename(param: str, names: Mapping[str, str]) -> str:
    """A parameter by its own name, or the one of the longest part of it that has any."""
    if param in names:
        return names[param]
    ends = reversed([match.start() for match in _PART.finditer(param)])
    return next((names[param[:end]] for end in ends if param[:end] in names), param)


@dataclass(slots=True)
class _Draft:
    """A message whose parts are still coming. They are joined once, at the end: joining at every part would be
    quadratic."""

    role: Literal["system", "user", "assistant", "tool"]
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> Message:
        message = Message(role=self.role, content="\n\n".join(self.texts), tool_call_id=self.call_id)
        message.reasoning_content = "\n".join(self.thoughts) if self.thoughts else None
        message.tool_calls = self.calls or None
        return message


class Conversation:
    """The messages of a chat request, from APIs whose turns come in smaller parts: thoughts, texts and calls that the
    model wrote in one go are one message. `names` receives the client's names of the calls' arguments."""

    def __init__(self, names: dict[str, str]) -> None:
        self._drafts: list[_Draft] = []
        self._names = names

    def messages(self) -> list[Message]:
        return [draft.message() for draft in self._drafts]

    def instruct(self, text: str) -> None:
        """Add instructions. Those before the first turn become one message: many templates take no more."""
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

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """Add a call; `place`: the client's name of its arguments."""
        turn = self._turn(begins=False)
        call = FunctionCall(name=name, arguments=arguments)
        turn.calls.append(ToolCall(id=call_id, type="function", function=call))
        here = f"messages[{len(self._drafts) - 1}].tool_calls[{len(turn.calls) - 1}].function.arguments"
        self._names[here] = place

    def answer(self, call_id: str, text: str) -> None:
        self._drafts.append(_Draft("tool", [text], call_id=call_id))

    def _turn(self, begins: bool) -> _Draft:
        """The model's message that is still open, or a new one. A part that `begins` a turn fits no message with text
        or calls."""
        last = self._drafts[-1] if self._drafts else None
        if last is None or last.role != "assistant" or (begins and (last.texts or last.calls)):
            last = _Draft("assistant")
            self._drafts.append(last)
        return last


def tool_fields(tools: Sequence[Mapping[str, Any]], choice: Any, must_call: bool) -> dict[str, Any]:
    """The functions of a chat request, `tool_choice` in its words. Raises InvalidRequestError where a call is asked for
    and there is none."""
    if tools:
        return {"tools": [{"type": "function", "function": tool} for tool in tools], "tool_choice": choice}
    if must_call:
        message = "'tool_choice' asks for a call, and there is no function among the tools."
        raise InvalidRequestError(message, param="tool_choice", code="invalid_value")
    return {}


def text_of(content: str | Sequence[HasText]) -> str:
    """A text, or the texts of parts as one."""
    return content if isinstance(content, str) else "\n".join([part.text for part in content])


def effort_of(effort: str | None, template: str) -> str | None:
    """How much the model is to think, in the words of a chat request. Agents always say something: where the template
    knows of no efforts, the model thinks as it does."""
    if effort is None or effort == "none":
        return effort
    return _EFFORTS.get(effort, effort) if "reasoning_effort" in template else None
