"""Render chat templates within limits of time and memory; runs as a script, which imports nothing of tidemill.

A job is a line of JSON on the standard input. Its answer on the standard output is a line with an outcome and a number
of bytes, then as many bytes of text. The process ends with its standard input. A job beyond its CPU time ends the
process by SIGPROF, also inside C code.
"""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any

MAX_REASON_CHARS = 200


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent ends this process
        signal.signal(number, signal.SIG_IGN)
    memory = int(sys.argv[1])
    from transformers.utils.chat_template_utils import render_jinja_template

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit = _address_space() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for line in sys.stdin.buffer:
        outcome, text = _render(render_jinja_template, line)
        data = text.encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(b"%s %d\n" % (outcome.encode(), len(data)))
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()


def _render(render: Any, line: bytes) -> tuple[str, str]:
    """Return the outcome (text, long, invalid, refused, failed or memory) and the text, its length, or the reason."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        job = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, job["seconds"])  # of CPU time; its default action is the end
        text = str(render(conversations=[job["messages"]], chat_template=job["template"], **job["values"])[0][0])
    except TemplateSyntaxError as error:
        return "invalid", f"line {error.lineno}: {(error.message or 'syntax error')[:MAX_REASON_CHARS]}"
    except TemplateError as error:
        return "refused", (error.message or type(error).__name__)[:MAX_REASON_CHARS]
    except MemoryError:
        return "memory", ""
    except Exception as error:  # a template is a program; any operation may fail on unusual input
        return "failed", type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return ("long", str(len(text))) if len(text) > job["most_chars"] else ("text", text)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
