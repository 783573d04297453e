"""Runs a chat template on small conversations in a child process with limits, before clients can reach it.

A template is a program from a checkpoint. The sandbox isolates it from the machine; this probe detects templates that
do not end or produce huge output. It runs as a script, so that the child imports nothing of tidemill. The probe also
finds out whether the template reads a message's content as a string or as parts, how it reads calls, and which
conversations it refuses.
The parent calls `probe_templates`.
"""

import contextlib
import ctypes
import enum
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

CPU_SECONDS = 5
WALL_SECONDS = 600  # for systems without a CPU time limit; imports alone can take minutes on a busy machine
MEMORY_BYTES = 4 * 2**30
MAX_RENDERED_CHARS = 1_000_000
PROBE_TEXT = "tidemill-probe"
MAX_MARK_CHARS = 200


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


def probe_templates(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> TemplateFacts:
    """Probe templates by name; the one named "default", else the first, is the main template."""
    job = json.dumps({"templates": dict(templates), "special_tokens": dict(special_tokens), "cpu_seconds": CPU_SECONDS})
    command = [sys.executable, "-P", __file__]
    try:
        child = subprocess.run(command, input=job.encode(), capture_output=True, timeout=WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return TemplateFacts(error=f"it does not end within {WALL_SECONDS} seconds")
    if child.returncode < 0:
        return TemplateFacts(error=f"it does not end within {CPU_SECONDS} seconds")
    if child.returncode > 0:
        return TemplateFacts(error="it fails beyond the limits of the sandbox")
    facts = json.loads(child.stdout)
    return TemplateFacts(**facts | {"refused": frozenset(map(Shape, facts.get("refused", ())))})


class _Style(NamedTuple):
    """The form of messages that the template reads."""

    as_parts: bool = False
    text_arguments: bool = False
    bare_calls: bool = False


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _conversations(style: _Style) -> list[list[dict[str, Any]]]:
    """Return a conversation for every role, so that tokens that a template builds from roles are seen."""
    user, answer = _user(PROBE_TEXT), {"role": "assistant", "content": PROBE_TEXT}
    calling = _message("call", 0, style)
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": PROBE_TEXT}
    return [
        [{"role": "system", "content": PROBE_TEXT}, user],
        [{"role": "developer", "content": PROBE_TEXT}, user],
        [user, answer, user],
        [user, calling, result],
    ]


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


def _after_answer(rendered: str) -> str:
    return rendered.partition(f"{PROBE_TEXT}-1")[2][:MAX_MARK_CHARS]


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


def _limit(cpu_seconds: int) -> None:
    try:
        import resource
    except ImportError:  # no resource limits on this system; the parent's timeout remains
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux: PR_SET_PDEATHSIG, as in `die_with_parent`
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds  # whole seconds; imports have used some
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _probe(render: Callable[[str, list[dict[str, Any]]], str], templates: dict[str, str]) -> dict[str, Any]:
    """Return the fields of `TemplateFacts`. A template may refuse a conversation."""

    def attempt(template: str, conversation: list[dict[str, Any]]) -> str:
        from jinja2 import TemplateSyntaxError

        try:
            return render(template, conversation)
        except (TemplateSyntaxError, MemoryError):
            raise
        except Exception:
            return ""

    main = templates.get("default") or next(iter(templates.values()))
    as_string = attempt(main, [_user(PROBE_TEXT)])
    as_parts = attempt(main, [_user([{"type": "text", "text": PROBE_TEXT}])])
    takes_parts = PROBE_TEXT in as_parts and "'type'" not in as_parts and '"type"' not in as_parts
    style = _find_style(partial(attempt, main), takes_parts and PROBE_TEXT not in as_string)
    rendered = [as_string]
    for template in templates.values():
        rendered += [attempt(template, conversation) for conversation in _conversations(style)]
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
        return {"error": "its output exceeds a million characters for a few words"}
    return {
        "reads_strings": PROBE_TEXT in as_string,
        "reads_parts": takes_parts,
        "refused": refused,
        "text_arguments": style.text_arguments,
        "bare_calls": style.bare_calls,
        "rendered": "\0".join(rendered),
        "after_answer": _after_answer(attempt(main, _talk("user", "assistant", style=style))),
    }


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


def _main() -> None:
    job = json.load(sys.stdin)
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template: str, conversation: list[dict[str, Any]]) -> str:
        texts, _ = render_jinja_template(
            conversations=[conversation],
            chat_template=template,
            add_generation_prompt=True,
            **job["special_tokens"],
        )
        return str(texts[0])

    _limit(job["cpu_seconds"])
    try:
        facts = _probe(render, job["templates"])
    except TemplateSyntaxError as error:
        facts = {"error": f"line {error.lineno}: {(error.message or 'syntax error')[:200]}"}
    except MemoryError:
        facts = {"error": "it needs more memory than allowed"}
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    _main()
