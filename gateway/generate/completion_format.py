"""Common parts of the chat and text completion formats: the base class, and OpenAI's two formats of logprobs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.api import TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer
from gateway.generate.params import GenerationPlan
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event

_FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity
_PIECE = 64  # tokens encoded at a time


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


def chat_logprobs(tokenizer: Tokenizer, pairs: Sequence[tuple[int, TokenLogprobs]]) -> list[orjson.Fragment]:
    """Return the `content` list of a chat choice's `logprobs`. The `bytes` of all tokens concatenate to the text."""
    return _in_pieces(
        pairs,
        lambda token_id, logprobs: {
            **_chat_token(tokenizer, token_id, logprobs.logprob),
            "top_logprobs": [_chat_token(tokenizer, i, value) for i, value in logprobs.top],
        },
    )


def _in_pieces(
    pairs: Sequence[tuple[int, TokenLogprobs]], entry: Callable[[int, TokenLogprobs], Any]
) -> list[orjson.Fragment]:
    """Encode the entries of a JSON list in pieces, because encoding a long answer at once would hold the GIL for tenths
    of a second."""
    pieces = (pairs[start : start + _PIECE] for start in range(0, len(pairs), _PIECE))
    return [orjson.Fragment(orjson.dumps([entry(*pair) for pair in piece])[1:-1]) for piece in pieces]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(piece)}


class CompletionLogprobs:
    """Encoder of the `logprobs` objects of one completion choice. `text_offset` counts from the start of the answer."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._offset = 0

    def add(self, pairs: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """Return the object for the next tokens."""
        offsets = []
        for token_id, _ in pairs:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return {
            "tokens": [self._name(token_id) for token_id, _ in pairs],
            "token_logprobs": [max(logprobs.logprob, _FLOOR) for _, logprobs in pairs],
            "top_logprobs": _in_pieces(pairs, self._top),
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """Return the top tokens and the chosen one by text; of tokens with the same text the likeliest is kept."""
        found: dict[str, float] = {}
        for other, value in (*logprobs.top, (token_id, logprobs.logprob)):
            found.setdefault(self._name(other), max(value, _FLOOR))
        return found

    def _name(self, token_id: int) -> str:
        """Return the text of a token, or `bytes:\\x..` for incomplete characters, as OpenAI does."""
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
