"""Events and message of POST /v1/messages."""

import secrets
from typing import Any

import orjson

from gateway.generate.deltas import OutputDelta
from gateway.generate.messages.request import MessagesRequest
from gateway.generate.params import GenerationPlan
from gateway.generate.tool_decoders import Call
from gateway.http.errors import ApiError, messages_envelope
from gateway.http.sse import named_event

_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class MessageFormat:
    """See AnswerFormat. `request_id`: id of the HTTP request, for errors."""

    def __init__(self, plan: GenerationPlan, body: MessagesRequest, request_id: str | None) -> None:
        self._plan = plan
        self._request_id = request_id
        self._is_clipped = plan.requests[0].sampling.max_tokens < body.max_tokens
        self._content: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._kind: str | None = None  # kind of the open block
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def opening(self) -> bytes:
        usage = {"prompt_tokens": len(self._plan.prompts[0].token_ids), "completion_tokens": 0}
        return _event("message_start", message=self._message(usage)) + _event("ping")

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:  # noqa: ARG002
        return self._take(delta)

    def closing(self, usage: dict[str, Any]) -> bytes:
        events = self._finish()
        return events + _event("message_delta", delta=self._end, usage=self._usage(usage)) + _event("message_stop")

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:  # noqa: ARG002
        return _event("error", **messages_envelope(error, self._request_id))

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        for delta in choices[0]:
            self._take(delta)
        self._finish()
        return self._message(usage)

    def _take(self, delta: OutputDelta) -> bytes:
        events: list[bytes] = []
        if delta.reasoning:
            events.append(self._write("thinking", delta.reasoning))
        if delta.text:
            events.append(self._write("text", delta.text))
        for call in delta.calls:
            events += (self._close(), self._call(call))
        if delta.finish_reason is not None:
            self._end = {"stop_reason": self._stop_reason(delta), "stop_sequence": delta.stop}
        return b"".join(events)

    def _stop_reason(self, delta: OutputDelta) -> str:
        if delta.finish_reason == "length":
            return "model_context_window_exceeded" if self._is_clipped else "max_tokens"
        return "stop_sequence" if delta.stop is not None else _STOP_REASONS[str(delta.finish_reason)]

    def _write(self, kind: str, text: str) -> bytes:
        events = b""
        if self._kind != kind:
            events = self._close()
            self._kind = kind
            events += _event("content_block_start", index=len(self._content), content_block=_block(kind, ""))
        self._texts.append(text)
        delta = {"type": f"{kind}_delta", kind: text}
        return events + _event("content_block_delta", index=len(self._content), delta=delta)

    def _close(self) -> bytes:
        """Close the open block, if any."""
        if self._kind is None:
            return b""
        index = len(self._content)
        self._content.append(_block(self._kind, "".join(self._texts)))
        self._kind = None
        self._texts.clear()
        return _event("content_block_stop", index=index)

    def _call(self, call: Call) -> bytes:
        index = len(self._content)
        block = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name, "input": {}}
        self._content.append({**block, "input": orjson.Fragment(call.arguments)})
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        return b"".join(
            [
                _event("content_block_start", index=index, content_block=block),
                _event("content_block_delta", index=index, delta=delta),
                _event("content_block_stop", index=index),
            ]
        )

    def _finish(self) -> bytes:
        """Close the open block; an empty answer gets an empty block."""
        events = b"" if self._content or self._kind else self._write("text", "")
        return events + self._close()

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._plan.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": self._content,
            **self._end,
            "usage": self._usage(usage),
        }

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return Anthropic's usage, where input tokens exclude cached tokens."""
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "service_tier": "batch" if self._plan.service_tier == "flex" else "standard",
        }


def _block(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}


def _event(kind: str, **fields: Any) -> bytes:
    return named_event({"type": kind, **fields})
