"""Common parts of the chat and text completion formats: the base class, and OpenAI's two formats of logprobs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson

from engine.api import TokenLogprobs
from engine.text.detokenizer import detokenizer_for
from engine.text.tokenizer import Tokenizer
from gateway.generate.deltas import OutputDelta
from gateway.generate.params import GenerationPlan
from gateway.http.errors import ApiError
from gateway.http.sse import DONE, END, event

_FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity
_PIECE = 64  # tokens encoded at a time


ScoredToken = tuple[int, TokenLogprobs | None]
"""A token with its log-probabilities; None for the first token of a prompt."""


class CompletionStream:
    """Base class; see AnswerFormat. `kind`: the `object` field of a chunk."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, kind: str) -> None:
        self._plan, self._tokenizer = plan, tokenizer
        self._head: dict[str, Any] = {
            "id": plan.response_id,
            "object": kind,
            "created": int(time.time()),
            "model": plan.model,
            "service_tier": plan.service_tier,
        }
        self._start = b"data: " + orjson.dumps(self._head)[:-1]
        self._is_open = [False] * len(plan.requests)

    def _usage_part(self, usage: dict[str, Any] | None) -> bytes:
        if usage is not None:
            return b',"usage":' + orjson.dumps(usage)
        return b',"usage":null' if self._plan.stream_options.include_usage else b""

    def whole(self, choices: list[list[OutputDelta]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            **self._head,
            "object": self._head["object"].removesuffix(".chunk"),
            "choices": [self._choice(index, deltas) for index, deltas in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, deltas: list[OutputDelta]) -> dict[str, Any]:
        """Return choice `index` of a whole response."""
        raise NotImplementedError

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


def read_scores(token_ids: Sequence[int], scores: bytes) -> list[ScoredToken]:
    """Return the tokens of a prompt with the log-probabilities in `scores`, see `Pooling.SCORES`."""
    table = np.frombuffer(scores, dtype="<f4").reshape(len(token_ids), -1)
    best = table.shape[1] // 2
    found = [
        TokenLogprobs(row[0], tuple(zip(map(int, row[1 + best :]), row[1 : 1 + best], strict=True)))
        for row in table[1:].tolist()
    ]
    return list(zip(token_ids, [None, *found], strict=True))


def _in_pieces(pairs: Sequence[ScoredToken], entry: Callable[[int, Any], Any]) -> list[orjson.Fragment]:
    """Encode the entries of a JSON list in pieces, because encoding a long answer at once would hold the GIL for tenths
    of a second."""
    pieces = (pairs[start : start + _PIECE] for start in range(0, len(pairs), _PIECE))
    return [orjson.Fragment(orjson.dumps([entry(*pair) for pair in piece])[1:-1]) for piece in pieces]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(piece)}


class CompletionLogprobs:
    """Encoder of the `logprobs` objects of one completion choice. `text_offset` counts from the start of the text that
    is returned, which follows the tokens `context`."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer_for(tokenizer, context, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def add(self, pairs: Sequence[ScoredToken]) -> dict[str, Any]:
        """Return the object for the next tokens."""
        offsets = []
        for token_id, _ in pairs:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push((token_id,)))
        return {
            "tokens": [self._name(token_id) for token_id, _ in pairs],
            "token_logprobs": [None if found is None else max(found.logprob, _FLOOR) for _, found in pairs],
            "top_logprobs": _in_pieces(pairs, self._top),
            "text_offset": offsets,
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs | None) -> dict[str, float] | None:
        """Return the top tokens and the chosen one by text; of tokens with the same text the likeliest is kept."""
        if logprobs is None:
            return None
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
