"""What streams of chat and of text completions have in common: what every chunk holds, and how they end."""

import time
from typing import Any

import orjson

from gateway.generate.params import GenerationPlan
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event


class CompletionStream:
    """The base of their formats; see AnswerFormat. `kind`: the object that a chunk is."""

    def __init__(self, plan: GenerationPlan, kind: str) -> None:
        self._plan = plan
        self._head = {
            "id": plan.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": plan.model,
            "service_tier": plan.service_tier,
            "system_fingerprint": None,
        }

    def opening(self) -> bytes:
        return b""

    def closing(self, usage: dict[str, Any]) -> bytes:
        if not self._plan.stream_options.include_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], "usage": usage}) + END + DONE

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:  # noqa: ARG002
        """No [DONE]: the client must be able to tell it from the end."""
        return event(error.envelope)
