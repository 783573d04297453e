"""Parser of a streamed answer: bytes with arrival times in, token events out.

A token event is a chunk whose delta has content, reasoning or tool calls. Chunks with only a role, a finish reason or
usage are ignored; with `silent_tokens`, a chunk without text counts if its usage grew. If the server sends usage with
each chunk, the tokens of an event are the growth of `completion_tokens` since the last event, else 1.
"""

from typing import Any

import orjson

from loadgen.records import Outcome, RequestRecord

DATA = b"data:"
DONE = b"[DONE]"
MAX_LINE = 16 * 1024 * 1024


class StreamEvents:
    """Fills the record of a request. Call `feed` for every read, then `close` once."""

    def __init__(self, record: RequestRecord, *, silent_tokens: bool = False) -> None:
        self.record = record
        self._silent_tokens = silent_tokens
        self._pending = b""
        self._counted = 0
        self._usage: int | None = None
        self._done = False
        self._error = ""

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at `now`, seconds since the run's start; events may be split anywhere."""
        if self._pending:
            data = self._pending + data
        lines = data.split(b"\n")
        self._pending = lines.pop()
        if len(self._pending) > MAX_LINE:
            raise ValueError("the server sent a line over 16 MiB")
        for line in lines:
            if line.startswith(DATA):
                self._event(line[len(DATA) :].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == DONE:
            self._done = True
            return
        try:
            chunk = orjson.loads(payload)
        except orjson.JSONDecodeError:
            self._error = self._error or "an event is not JSON"
            return
        if isinstance(chunk, dict):
            self._chunk(chunk, now)

    def _chunk(self, chunk: dict[str, Any], now: float) -> None:
        if chunk.get("error"):
            error = chunk["error"]
            self._error = str(error.get("message", error) if isinstance(error, dict) else error)[:300]
            return
        usage = chunk.get("usage")
        if usage:
            self._read_usage(usage)
        choices = chunk.get("choices")
        if not choices:
            return
        choice = choices[0]
        if has_tokens(choice) or (self._silent_tokens and usage and (self._usage or 0) > self._counted):
            self._tokens(now, had_usage=bool(usage))
        if choice.get("finish_reason"):
            self.record.finish_reason = str(choice["finish_reason"])

    def _read_usage(self, usage: dict[str, Any]) -> None:
        record = self.record
        self._usage = int(usage.get("completion_tokens") or 0)
        if usage.get("prompt_tokens") is not None:
            record.input_tokens = int(usage["prompt_tokens"])
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            record.cached_tokens = int(cached)

    def _tokens(self, now: float, *, had_usage: bool) -> None:
        grown = 1
        if had_usage and self._usage is not None:
            grown = max(1, self._usage - self._counted)
        self._counted += grown
        record = self.record
        if record.first_token_at is None:
            record.first_token_at = now
        record.chunk_at.append(now)
        record.chunk_tokens.append(grown)

    def close(self, now: float) -> None:
        """End the stream at `now`: set the outcome and the token count."""
        record = self.record
        record.ended_at = now
        record.output_tokens = self._counted if self._usage is None else max(self._usage, self._counted)
        record.outcome = self._outcome()
        if self._error:
            record.error = self._error

    def _outcome(self) -> Outcome:
        if self._error:
            return "stream_error"
        if not self._done and not self.record.finish_reason:
            return "cut"
        return "ok" if self.record.chunk_at else "empty"


def has_tokens(choice: dict[str, Any]) -> bool:
    """Return whether a choice has content, reasoning or tool calls (chat delta or completion text)."""
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not delta:
        return False
    return bool(
        delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    )


def whole_answer(record: RequestRecord, body: dict[str, Any], now: float) -> None:
    """Fill a record from an answer that was not streamed; all tokens arrived at `now`."""
    usage = body.get("usage") or {}
    tokens = int(usage.get("completion_tokens") or 0)
    choices = body.get("choices") or [{}]
    record.ended_at = now
    record.finish_reason = str(choices[0].get("finish_reason") or "")
    record.output_tokens = tokens
    record.input_tokens = usage.get("prompt_tokens", record.input_tokens)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    record.outcome = "ok" if tokens else "empty"
    if tokens:
        record.first_token_at = now
        record.chunk_at, record.chunk_tokens = [now], [tokens]
