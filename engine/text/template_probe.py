"""Tries a chat template on small conversations in a child process with limits, before any client can reach it.

A template is a program out of a checkpoint: the sandbox keeps it from the machine, this keeps an endless or exploding
one from the server. Started as a script, so that the child imports nothing of tidemill; the parent's side is
`probe_templates`. What comes back also tells whether the template reads a message's content as a string or as parts.
"""

import contextlib
import ctypes
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CPU_SECONDS = 5
WALL_SECONDS = 600  # only for systems without a limit of processor time: on a busy machine imports alone take minutes
MEMORY_BYTES = 4 * 2**30
MAX_RENDERED_CHARS = 1_000_000
PROBE_TEXT = "tidemill-probe"


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What the probe saw. `reads_strings`, `reads_parts`: the forms of a message's content that arrive in the text;
    `rendered`: all that the template wrote; `error`: why it cannot be used at all."""

    reads_strings: bool = True
    reads_parts: bool = False
    rendered: str = ""
    error: str | None = None


def probe_templates(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> TemplateFacts:
    """Run the probe on templates by name ("default" among them, or the first one counts as it)."""
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
    return TemplateFacts(**json.loads(child.stdout))


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _conversations() -> list[list[dict[str, Any]]]:
    """One for every role, so that the tokens which a template builds for it are seen."""
    user, answer = _user(PROBE_TEXT), {"role": "assistant", "content": PROBE_TEXT}
    call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": {"a": 1}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": PROBE_TEXT}
    return [
        [{"role": "system", "content": PROBE_TEXT}, user],
        [{"role": "developer", "content": PROBE_TEXT}, user],
        [user, answer, user],
        [user, calling, result],
    ]


def _limit(cpu_seconds: int) -> None:
    try:
        import resource
    except ImportError:  # no such limits on this system; the parent's timeout remains
        return
    with contextlib.suppress(OSError, AttributeError):  # Linux: PR_SET_PDEATHSIG, as in `die_with_parent`
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime) + cpu_seconds  # whole ones, and imports have used some
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _probe(render: Callable[[str, list[dict[str, Any]]], str], templates: dict[str, str]) -> dict[str, Any]:
    """The fields of `TemplateFacts`. A template that refuses a conversation is none the worse for it."""

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
    rendered = [as_string]
    for template in templates.values():
        rendered += [attempt(template, conversation) for conversation in _conversations()]
    if sum(map(len, rendered)) + len(as_parts) > MAX_RENDERED_CHARS:
        return {"error": "it writes more than a million characters for a few words"}
    return {
        "reads_strings": PROBE_TEXT in as_string,
        "reads_parts": PROBE_TEXT in as_parts and "'type'" not in as_parts and '"type"' not in as_parts,
        "rendered": "\0".join(rendered),
    }


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
        facts = {"error": "it needs more memory than a prompt can"}
    json.dump(facts, sys.stdout)


if __name__ == "__main__":
    _main()
