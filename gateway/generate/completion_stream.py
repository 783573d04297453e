"""Common base of the chat and text completion formats."""

import time
from typing import Any

import orjson

from gateway.generate.params import GenerationPlan
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event


class CompletionStream:
    """Base class; see AnswerFormat. `kind`: the `object` field of a chunk."""

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
        """Return the error event, without [DONE], so that clients do not mistake it for a normal end."""
        return event(error.envelope)
