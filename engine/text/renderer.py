"""Render chat templates in a few processes with limits, shared by all tokenizers of this process.

A template is a program from a checkpoint. It may be cheap in the probe and explode on other messages, so each rendering
has limits of its own. A process that reaches one ends and is replaced; other renderings use the other processes.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import InvalidRequestError

MAX_PROMPT_CHARS = 16 * 2**20
CPU_SECONDS = 2.0
"""CPU time of one rendering."""
MEMORY_BYTES = 512 * 2**20
WALL_SECONDS = 600.0
"""For a process that does not run; imports alone can take minutes on a busy machine."""
WARM = 2
"""A template that explodes must not delay the others until a process has started."""
PROCESSES = 4
"""Maximum renderings at once."""
ATTEMPTS = 2
"""The system may end a process, such as for want of memory."""
_SCRIPT = Path(__file__).with_name("render_process.py")


class _EndedError(Exception):
    """The process ended before its answer."""


class _Process:
    def __init__(self) -> None:
        command = [sys.executable, "-P", str(_SCRIPT), str(MEMORY_BYTES)]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)

    def ask(self, job: bytes) -> tuple[str, str]:
        """Return outcome and text of a job. Raises _EndedError with a negative signal number, or 0."""
        stdin, stdout = self._child.stdin, self._child.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(job)
            stdin.flush()
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            header = stdout.readline() if poll.poll(WALL_SECONDS * 1000) else b""
            outcome, _, size = header.decode().partition(" ")
            text = stdout.read(int(size or 0))
        except OSError:
            header = b""
        if not header or len(text) < int(size):
            raise _EndedError(self.end())
        return outcome, text.decode("utf-8", "surrogatepass")

    def end(self) -> int:
        """Wait for the end of the process, or end it; return its exit status, negative for a signal."""
        try:
            status = self._child.wait(1.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
            status = self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            with suppress(OSError):  # a job that was not read
                assert stream is not None
                stream.close()
        return status

    def kill(self) -> None:
        self._child.kill()
        self.end()

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None


class TemplateRenderer:
    """Renders chat templates. `cpu_seconds` bounds one rendering."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        self._cpu_seconds = cpu_seconds
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(PROCESSES)

    def warm_up(self) -> None:
        """Start processes, whose imports take a second or more, so that two are ready or will be soon."""
        while len(self._idle) < WARM:
            self._idle.insert(0, _Process())  # those that are ready are taken first

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Return the rendered text. Blocking. `values`: other variables of the template, and options of transformers.

        Raises InvalidRequestError if the template refuses the messages, fails, or reaches a limit, and OSError if no
        process can be started.
        """
        outcome, text = self.attempt(template, messages, values, MAX_PROMPT_CHARS)
        if outcome == "text":
            return text
        raise InvalidRequestError(_message(outcome, text), param="messages")

    def attempt(
        self, template: str, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any], most_chars: int
    ) -> tuple[str, str]:
        """Return the outcome of a rendering (see `engine.text.render_process`, or `time` or `ended`), and its text."""
        job: dict[str, Any] = {"template": template, "messages": messages, "values": values}
        job |= {"seconds": self._cpu_seconds, "most_chars": most_chars}
        try:
            return self._ask(json.dumps(job).encode() + b"\n")
        except RecursionError as error:
            return "failed", type(error).__name__

    def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            self._idle.pop().kill()

    def _ask(self, job: bytes) -> tuple[str, str]:
        if self._pid != os.getpid():  # a fork shares no process with its parent
            self._begin()
        with self._places:
            for _ in range(ATTEMPTS):
                process = self._take()
                try:
                    answer = process.ask(job)
                except _EndedError as ended:
                    if ended.args[0] == -signal.SIGPROF:
                        self.warm_up()
                        return "time", f"{self._cpu_seconds:g}"
                    continue
                except BaseException:  # its answer may still come, and must not be taken for the next one's
                    process.kill()
                    raise
                self._idle.append(process)
                return answer
        return "ended", "its process ends"

    def _take(self) -> _Process:
        while True:
            try:
                process = self._idle.pop()
            except IndexError:
                return _Process()
            if process.is_alive:
                return process
            process.end()


def _message(outcome: str, text: str) -> str:
    match outcome:
        case "refused":
            return f"The chat template refuses these messages: {text}"
        case "memory":
            return f"The chat template needs more than {MEMORY_BYTES >> 20} MiB of memory for these messages."
        case "time":
            return f"The chat template needs more than {text} s of CPU time for these messages."
        case "long":
            message = f"The prompt has {int(text):,} characters after applying the chat template; the limit is"
            return f"{message} {MAX_PROMPT_CHARS:,}."
        case _:
            return f"The chat template fails on these messages ({text})."


@cache
def shared_renderer() -> TemplateRenderer:
    """Return the renderer of this process."""
    renderer = TemplateRenderer()
    atexit.register(renderer.close)
    return renderer
