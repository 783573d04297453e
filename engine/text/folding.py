"""Folding of conversations into a shape that the chat template takes, see `Shape`. Text and its order are kept."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from engine.errors import InvalidRequestError
from engine.text.template_probe import Shape

_JOINED = {
    ("system", "system"): Shape.SYSTEMS,
    ("user", "user"): Shape.USERS,
    ("assistant", "assistant"): Shape.ANSWERS,
    ("tool", "user"): Shape.TEXT_AFTER_RESULT,
}
"""Shape that allows a message of the second role to follow one of the first; without it they are joined."""


def fold(messages: Sequence[Mapping[str, Any]], refused: Collection[Shape]) -> Sequence[Mapping[str, Any]]:
    """Return the messages without the refused shapes.

    A system message that the template does not take at its place becomes a user message there, which keeps the prefix
    of the prompt for the cache. Messages that may not follow each other are joined. A message with several calls
    becomes one message per call, each followed by its result. A text before calls becomes a message of its own. For a
    template without tools calls and results become texts.
    """
    if not refused:
        return messages
    turns: list[_Turn] = []
    if Shape.CALL in refused:
        messages = [_without_calls(message) for message in messages]
    if Shape.CALLS in refused:
        messages = list(_one_call_each(messages))
    if Shape.TEXT_WITH_CALL in refused and Shape.ANSWERS not in refused:
        messages = [part for message in messages for part in _text_and_calls(message)]
    for message in messages:
        role = message["role"]
        if role == "system" and _place(turns) in refused:
            role = "user"
        if turns and _JOINED.get((turns[-1].role, role)) in refused:
            turns[-1].add(message)
        else:
            turns.append(_Turn(message, role))
    return [turn.message() for turn in turns]


def text_of(content: Any) -> str:
    """Return a content as text. Raises InvalidRequestError for a part that is not text."""
    if isinstance(content, list | tuple):
        return "\n".join(map(part_text, content))
    return content or ""


def part_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    if not isinstance(text, str):
        raise InvalidRequestError("Only text parts are supported in a message's content.", param="messages")
    return text


class _Turn:
    """One message, or several joined in linear time."""

    def __init__(self, message: Mapping[str, Any], role: str) -> None:
        self.role = role
        self._messages = [message]

    def add(self, message: Mapping[str, Any]) -> None:
        self._messages.append(message)

    def message(self) -> Mapping[str, Any]:
        first = {**self._messages[0], "role": self.role}
        if len(self._messages) == 1:
            return first
        texts = {
            name: "\n\n".join(filter(None, [text_of(message.get(name)) for message in self._messages]))
            for name in ("content", "reasoning_content")
        }
        calls = [call for message in self._messages for call in message.get("tool_calls") or ()]
        parts = {"reasoning_content": texts["reasoning_content"], "tool_calls": calls}
        return {**first, "content": texts["content"], **{name: part for name, part in parts.items() if part}}


def _place(turns: Sequence[_Turn]) -> Shape | None:
    """Return the shape that a system message after these turns needs."""
    if not turns:
        return Shape.SYSTEM
    return None if turns[-1].role == "system" else Shape.LATE_SYSTEM


def _without_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its calls, or the result of one, as text."""
    text = text_of(message.get("content"))
    if message["role"] == "tool":
        return {"role": "user", "content": f"[result of a tool]\n{text}"}
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return message
    written = [f"[call of {call['name']}: {call['arguments']}]" for call in calls]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, [text, *written]))}


def _text_and_calls(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if not (message.get("tool_calls") and message.get("content")):
        yield message
        return
    yield {name: value for name, value in message.items() if name != "tool_calls"}
    yield {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}


def _one_call_each(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results: dict[Any, list[Mapping[str, Any]]] = {}
        while at < len(messages) and messages[at]["role"] == "tool":
            results.setdefault(messages[at].get("tool_call_id"), []).append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            yield {**({"role": "assistant", "content": ""} if number else message), "tool_calls": [call]}
            yield from results.pop(call.get("id"), ())
        for others in results.values():
            yield from others
