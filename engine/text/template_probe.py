"""Try a chat template on small conversations, each rendered in a process with limits, before clients can reach it.

A template is a program from a checkpoint. The sandbox isolates it from the machine; this probe detects templates that
do not end or produce huge output. The probe also finds out whether the template reads a message's content as a string
or as parts, how it reads calls, and which conversations it refuses.
"""

import enum
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from engine.text.renderer import shared_renderer

MAX_RENDERED_CHARS = 1_000_000
PROBE_TEXT = "tidemill-probe"
MAX_MARK_CHARS = 200
_UNUSABLE = {
    "invalid": "{}",
    "memory": "it needs more memory than allowed",
    "time": "it does not end within {} seconds",
    "long": "its output exceeds a million characters for a few words",
    "ended": "it fails beyond the limits of the sandbox",
}
"""Reasons why a template cannot be used, by outcome of a rendering. Other outcomes concern the conversation."""


class Shape(enum.StrEnum):
    """A sequence of messages that not every template takes."""

    SYSTEM = "a system message before the first turn"
    SYSTEMS = "several system messages before the first turn"
    LATE_SYSTEM = "a system message anywhere after the first turn"
    USERS = "a user message after a user message"
    ANSWERS = "an assistant message after an assistant message"
    TEXT_AFTER_RESULT = "a user message after a tool result"
    CALL = "a tool call and its result"
    CALLS = "several tool calls in a message"
    TEXT_WITH_CALL = "a text and a tool call in a message"


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """Result of the probe.

    Attributes:
        reads_strings: Content given as a string appears in the text.
        reads_parts: Content given as parts appears in the text.
        refused: Shapes that the template refuses, or of which it drops a text; `Shape.CALL` only for templates that
            do not mention tools.
        text_arguments: The template reads the arguments of a call as JSON text instead of an object.
        bare_calls: The template writes calls only if the content of their message is None.
        rendered: All text that the template wrote.
        after_answer: Text that the template wrote after the text of an assistant message, shortened.
        error: Why the template cannot be used, or None.
    """

    reads_strings: bool = True
    reads_parts: bool = False
    refused: Collection[Shape] = ()
    text_arguments: bool = False
    bare_calls: bool = False
    rendered: str = ""
    after_answer: str = ""
    error: str | None = None


class _UnusableError(Exception):
    """The template cannot be used; the text is the reason."""


def probe_templates(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> TemplateFacts:
    """Probe templates by name; the one named "default", else the first, is the main template."""
    renderer, values = shared_renderer(), {"add_generation_prompt": True, **special_tokens}

    def attempt(template: str, conversation: list[dict[str, Any]]) -> str:
        """Return the prompt; empty if the template refuses the conversation."""
        outcome, text = renderer.attempt(template, conversation, values, MAX_RENDERED_CHARS)
        if outcome in _UNUSABLE:
            raise _UnusableError(_UNUSABLE[outcome].format(text))
        return text if outcome == "text" else ""

    try:
        return _probe(attempt, templates)
    except _UnusableError as error:
        return TemplateFacts(error=str(error))


class _Style(NamedTuple):
    """The form of messages that the template reads."""

    as_parts: bool = False
    text_arguments: bool = False
    bare_calls: bool = False


_TALKS = (("system", "user"), ("developer", "user"), ("user", "assistant", "user"), ("user", "call", "result"))
"""Conversations with every role, so that tokens that a template builds from roles are seen."""


def _shaped(style: _Style) -> dict[Shape, list[list[dict[str, Any]]]]:
    """Return conversations of each shape, with a different text or function name in each message."""

    talk = partial(_talk, style=style)
    several, first, second = talk("user", "call", "result", "result"), _call(1, style), _call(2, style)
    several[1]["tool_calls"] = [first, second]
    several[2]["tool_call_id"], several[3]["tool_call_id"] = first["id"], second["id"]
    spoken = talk("user", "call", "result")
    spoken[1]["content"] = _message("assistant", 1, style)["content"]
    return {
        Shape.SYSTEM: [talk("system", "user")],
        Shape.SYSTEMS: [talk("system", "system", "user")],
        Shape.LATE_SYSTEM: [talk("user", "system"), talk("user", "assistant", "system", "user")],
        Shape.USERS: [talk("user", "user")],
        Shape.ANSWERS: [talk("user", "assistant", "assistant", "user")],
        Shape.TEXT_AFTER_RESULT: [talk("user", "call", "result", "user")],
        Shape.CALL: [talk("user", "call", "result")],
        Shape.CALLS: [several],
        Shape.TEXT_WITH_CALL: [spoken],
    }


def _talk(*roles: str, style: _Style) -> list[dict[str, Any]]:
    return [_message(role, number, style) for number, role in enumerate(roles)]


def _message(role: str, number: int, style: _Style) -> dict[str, Any]:
    text = f"{PROBE_TEXT}-{number}"
    content: Any = [{"type": "text", "text": text}] if style.as_parts else text
    if role == "call":
        return {"role": "assistant", "content": None if style.bare_calls else "", "tool_calls": [_call(number, style)]}
    if role == "result":
        return {"role": "tool", "name": "probe", "tool_call_id": _call(number - 1, style)["id"], "content": content}
    return {"role": role, "content": content}


def _call(number: int, style: _Style) -> dict[str, Any]:
    arguments = {"a": 1}
    function = {"name": f"lookup-{number}", "arguments": json.dumps(arguments) if style.text_arguments else arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def _shows(rendered: str, conversation: list[dict[str, Any]]) -> bool:
    """Return whether all texts and calls of a conversation are in the rendered prompt."""
    calls = [call["function"]["name"] for message in conversation for call in message.get("tool_calls", ())]
    texts = [message["content"] for message in conversation if message["content"]]
    return all(word in rendered for word in calls + [t if isinstance(t, str) else t[0]["text"] for t in texts])


def _probe(attempt: Callable[[str, list[dict[str, Any]]], str], templates: Mapping[str, str]) -> TemplateFacts:
    main = templates.get("default") or next(iter(templates.values()))
    as_string, as_parts = (attempt(main, _talk("user", style=_Style(as_parts))) for as_parts in (False, True))
    takes_parts = PROBE_TEXT in as_parts and "'type'" not in as_parts and '"type"' not in as_parts
    style = _find_style(partial(attempt, main), takes_parts and PROBE_TEXT not in as_string)
    rendered = [as_string]
    for template in templates.values():
        rendered += [attempt(template, _talk(*roles, style=style)) for roles in _TALKS]
    refused: list[Shape] = []
    for shape, conversations in _shaped(style).items():
        written = [attempt(main, conversation) for conversation in conversations]
        rendered += written
        if not all(map(_shows, written, conversations)):
            refused.append(shape)
    if Shape.CALL in refused:  # other shapes of calls do not help
        of_calls = (Shape.CALL, Shape.CALLS, Shape.TEXT_WITH_CALL, Shape.TEXT_AFTER_RESULT)
        refused = [shape for shape in refused if shape not in of_calls]
        if "tool" not in main:
            refused.append(Shape.CALL)
    if sum(map(len, rendered)) + len(as_parts) > MAX_RENDERED_CHARS:
        raise _UnusableError(_UNUSABLE["long"])
    answered = attempt(main, _talk("user", "assistant", style=style))
    return TemplateFacts(
        reads_strings=PROBE_TEXT in as_string,
        reads_parts=takes_parts,
        refused=frozenset(refused),
        text_arguments=style.text_arguments,
        bare_calls=style.bare_calls,
        rendered="\0".join(rendered),
        after_answer=answered.partition(f"{PROBE_TEXT}-1")[2][:MAX_MARK_CHARS],
    )


def _find_style(attempt: Callable[[list[dict[str, Any]]], str], as_parts: bool) -> _Style:
    """Return the first style in which the template writes a call and its result, without a dict in Python's syntax."""
    for bare_calls in (False, True):
        for text_arguments in (False, True):
            style = _Style(as_parts, text_arguments, bare_calls)
            conversation = _talk("user", "call", "result", style=style)
            written = attempt(conversation)
            if _shows(written, conversation) and "{'a'" not in written:
                return style
    return _Style(as_parts)
