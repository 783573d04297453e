"""Log-probabilities in the two shapes of OpenAI's API. Knows nothing of requests."""

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.api import TokenLogprobs
from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

_FLOOR = -9999.0  # OpenAI's value for "very unlikely"; JSON has no infinity
_PIECE = 64  # tokens


def chat_logprobs(tokenizer: Tokenizer, pairs: Sequence[tuple[int, TokenLogprobs]]) -> list[orjson.Fragment]:
    """The `content` list of a chat choice's `logprobs`. Joined, the `bytes` of its tokens are the text's."""
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
    """Encode the entries of a JSON list in pieces of some tokens each. Encoding a long answer at once would hold the
    interpreter's lock for tenths of a second."""
    pieces = (pairs[start : start + _PIECE] for start in range(0, len(pairs), _PIECE))
    return [orjson.Fragment(orjson.dumps([entry(*pair) for pair in piece])[1:-1]) for piece in pieces]


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token_id)
    return {"token": piece.decode("utf-8", "replace"), "logprob": max(logprob, _FLOOR), "bytes": list(piece)}


class CompletionLogprobs:
    """The `logprobs` objects of one completion choice. `text_offset` counts characters from the answer's start."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids)
        self._offset = 0

    def add(self, pairs: Sequence[tuple[int, TokenLogprobs]]) -> dict[str, Any]:
        """The object for the next tokens."""
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
        """The most likely tokens and the chosen one; the likelier of two with the same text stays."""
        found: dict[str, float] = {}
        for other, value in (*logprobs.top, (token_id, logprobs.logprob)):
            found.setdefault(self._name(other), max(value, _FLOOR))
        return found

    def _name(self, token_id: int) -> str:
        """A token's text; its bytes spelled out where they are no whole characters, as OpenAI does."""
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
