"""Other APIs as translations: their requests become chat requests, and their answers are written from the same deltas.

`ChatCompletionRequest` is the neutral form that everything behind it knows - limits, tenants, tools, structured output,
thoughts. What remains here is to call parameters by the names that the client used.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from engine.errors import InvalidRequestError
from gateway.generate.wire import ChatCompletionRequest, FunctionCall, Message, ToolCall

_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}
_QUOTED = re.compile("'([^']+)'")


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
    known = max((name for name in names if param.startswith((f"{name}.", f"{name}["))), key=len, default=None)
    return param if known is None else names[known]


class Conversation:
    """The messages of a chat request, from APIs whose turns come in smaller parts: what the model thought, said and
    called in one go is one message. `names`: is told where the arguments of calls came from."""

    def __init__(self, names: dict[str, str]) -> None:
        self.messages: list[Message] = []
        self._names = names

    def instruct(self, text: str) -> None:
        """What stands before the first turn is one message: many templates take no more."""
        if len(self.messages) == 1 and self.messages[0].role == "system":
            self.messages[0].content = f"{self.messages[0].content}\n\n{text}"
        else:
            self.messages.append(Message(role="system", content=text))

    def ask(self, text: str) -> None:
        self.messages.append(Message(role="user", content=text))

    def think(self, text: str) -> None:
        last = self._turn(lambda last: last.content or last.tool_calls)
        last.reasoning_content = "\n".join(filter(None, (last.reasoning_content, text)))

    def say(self, text: str) -> None:
        self._turn(lambda last: last.content or last.tool_calls).content = text

    def call(self, call_id: str, name: str, arguments: str, place: str) -> None:
        """`place`: what the arguments are called by the client."""
        last = self._turn(lambda _: False)
        call = ToolCall(id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments))
        last.tool_calls = [*(last.tool_calls or ()), call]
        here = f"messages[{len(self.messages) - 1}].tool_calls[{len(last.tool_calls) - 1}].function.arguments"
        self._names[here] = place

    def answer(self, call_id: str, text: str) -> None:
        self.messages.append(Message(role="tool", content=text, tool_call_id=call_id))

    def _turn(self, is_over: Callable[[Message], object]) -> Message:
        """The model's message that is being made, or a new one."""
        if not self.messages or self.messages[-1].role != "assistant" or is_over(self.messages[-1]):
            self.messages.append(Message(role="assistant", content=""))
        return self.messages[-1]


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
