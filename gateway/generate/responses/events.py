"""Events and response of POST /v1/responses. A non-streamed response is taken from the last event."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from pydantic import BaseModel

from engine.text.tokenizer import Tokenizer
from gateway.generate.completions import chat_logprobs
from gateway.generate.deltas import OutputDelta
from gateway.generate.params import GenerationPlan
from gateway.generate.responses.request import ResponsesRequest, TextFormat, functions_of
from gateway.generate.tool_decoders import Call
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, named_event

Event = dict[str, Any]

_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


class OpenItem:
    """The open output item: a message or reasoning, each with one text part."""

    def __init__(self, kind: str, index: int) -> None:
        self.kind = kind
        self.index = index
        self.name = "output_text" if kind == "message" else "reasoning_text"
        self.texts: list[str] = []
        self.logprobs: list[orjson.Fragment] = []
        start: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        prefix = "msg" if kind == "message" else "rs"
        self.item: dict[str, Any] = {"id": _new_id(prefix), "type": kind, "status": "in_progress", **start}

    @property
    def place(self) -> dict[str, Any]:
        """The fields that locate the item in events."""
        return {"item_id": self.item["id"], "output_index": self.index, "content_index": 0}

    def part(self, text: str, logprobs: Sequence[orjson.Fragment] = ()) -> dict[str, Any]:
        extra: dict[str, Any] = {"annotations": [], "logprobs": list(logprobs)} if self.kind == "message" else {}
        return {"type": self.name, "text": text, **extra}


class ResponsesFormat:
    """See AnswerFormat."""

    def __init__(self, plan: GenerationPlan, body: ResponsesRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._output: list[dict[str, Any]] = []
        self._open: OpenItem | None = None
        self._number = 0
        self._finish_reason: str | None = None
        self._response = _described(plan, body)

    def opening(self) -> bytes:
        kinds = ("response.created", "response.in_progress")
        return _written([self._event(kind, response=self._response) for kind in kinds])

    def chunk(self, delta: OutputDelta, usage: dict[str, Any] | None) -> bytes:  # noqa: ARG002
        return _written(self._take(delta))

    def closing(self, usage: dict[str, Any]) -> bytes:
        return _written(self._finish(usage)) + DONE

    def failure(self, error: ApiError, usage: dict[str, Any]) -> bytes:
        events = self._close("incomplete")
        cause = {"code": _ERROR_CODES.get(error.status, "server_error"), "message": error.message}
        return _written([*events, self._end("failed", usage, error=cause)]) + DONE

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        for delta in choices[0]:
            self._take(delta)
        response: dict[str, Any] = self._finish(usage)[-1]["response"]
        return response

    def _take(self, delta: OutputDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._write("reasoning", delta.reasoning)
        if delta.text:
            events += self._write("message", delta.text, chat_logprobs(self._tokenizer, delta.logprobs))
        for call in delta.calls:
            events += [*self._close(), *self._call(call)]
        self._finish_reason = delta.finish_reason or self._finish_reason
        return events

    def _write(self, kind: str, text: str, logprobs: Sequence[orjson.Fragment] = ()) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close()
            self._open = OpenItem(kind, len(self._output))
            item = {**self._open.item, "content": []}
            events += [
                self._event("response.output_item.added", output_index=self._open.index, item=item),
                self._event("response.content_part.added", **self._open.place, part=self._open.part("")),
            ]
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        if text:
            events.append(self._text_event("delta", logprobs, delta=text))
        return events

    def _text_event(self, kind: str, logprobs: Sequence[orjson.Fragment], **fields: Any) -> Event:
        assert self._open is not None
        extra: dict[str, Any] = {"logprobs": list(logprobs)} if self._open.kind == "message" else {}
        return self._event(f"response.{self._open.name}.{kind}", **self._open.place, **fields, **extra)

    def _close(self, status: str = "completed") -> list[Event]:
        """Close the open item, if any."""
        opened = self._open
        if opened is None:
            return []
        text = "".join(opened.texts)
        part = opened.part(text, opened.logprobs)
        item = {**opened.item, "status": status, "content": [part]}
        self._output.append(item)
        events = [
            self._text_event("done", opened.logprobs, text=text),
            self._event("response.content_part.done", **opened.place, part=part),
            self._event("response.output_item.done", output_index=opened.index, item=item),
        ]
        self._open = None
        return events

    def _call(self, call: Call) -> list[Event]:
        index, item_id = len(self._output), _new_id("fc")
        item = {
            "id": item_id, "type": "function_call", "status": "completed", "call_id": _new_id("call"),
            "name": call.name, "arguments": call.arguments,
        }  # fmt: skip
        self._output.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        place = {"item_id": item_id, "output_index": index}
        step = "response.function_call_arguments"
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event(f"{step}.delta", **place, delta=call.arguments),
            self._event(f"{step}.done", **place, name=call.name, arguments=call.arguments),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    def _finish(self, usage: dict[str, Any]) -> list[Event]:
        events = [] if self._output or self._open else self._write("message", "")
        if self._finish_reason == "length":
            cause = {"reason": "max_output_tokens"}
            return [*events, *self._close("incomplete"), self._end("incomplete", usage, incomplete_details=cause)]
        return [*events, *self._close(), self._end("completed", usage, completed_at=int(time.time()))]

    def _end(self, status: str, usage: dict[str, Any], **fields: Any) -> Event:
        self._response |= {"status": status, "output": self._output, "usage": _usage(usage), **fields}
        return self._event(f"response.{status}", response=self._response)

    def _event(self, kind: str, **fields: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **fields}


def _described(plan: GenerationPlan, body: ResponsesRequest) -> dict[str, Any]:
    """Return the response without output, with the effective settings of the request."""
    form, choice, sampling = body.text.format if body.text else None, body.tool_choice, plan.requests[0].sampling
    return {
        "id": plan.response_id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": sampling.frequency_penalty,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": plan.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": sampling.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": plan.service_tier,
        "store": False,
        "temperature": sampling.temperature,
        "text": {
            "format": _without_none(form) if form else {"type": "text"},
            "verbosity": (body.text and body.text.verbosity) or "medium",
        },
        "tool_choice": choice.model_dump(exclude_unset=True) if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [dict(tool.__dict__) for tool in functions_of(body)],  # schemas as they are: a dump copies them
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _without_none(form: TextFormat) -> dict[str, Any]:
    """Return the given fields under their JSON names, without copying the schema."""
    given = {**form.__dict__, "schema": form.schema_}
    return {name: value for name, value in given.items() if value is not None and name != "schema_"}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    thoughts = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage["total_tokens"],
    }


def _written(events: Iterable[Event]) -> bytes:
    return b"".join(map(named_event, events))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
