"""What streams of chat and of text completions have in common: how they end."""

from typing import Any

import orjson

from gateway.generate.params import GenerationPlan
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event


class CompletionStream:
    """The base of their formats; see AnswerFormat. `head`: what all chunks have."""

    def __init__(self, plan: GenerationPlan, head: dict[str, Any]) -> None:
        self._plan = plan
        self._head = head

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: dict[str, Any]) -> bytes:
        if not self._plan.stream_options.include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + END + DONE

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:  # noqa: ARG002
        """No [DONE]: the client must be able to tell it from the end."""
        return event(error.envelope)
