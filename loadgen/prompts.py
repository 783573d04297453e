"""Prompts of an exact number of tokens, as token ids or as text, without the model's tokenizer.

Token ids are sent to /v1/completions. Text consists of common words whose token counts were measured on the server
(`loadgen.session`). A prompt is a function of (seed, salt, request); a shared prefix is a function of (seed, salt,
segment id).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from loadgen import InputError
from loadgen.stats import stream
from loadgen.traces import Content, Segment

UNIQUE = -1
"""Stream id of the part of a prompt that is unique to a request."""

COMMON_WORDS = (
    "time year people way day man thing woman life child world school state family group country hand part place case "
    "week company system program question work number night point home water room area money story fact month lot"
)
ANCHOR = "Text"
"""First word of every generated text. Templates strip leading space, which would change the first word's cost."""
WORDS = tuple(COMMON_WORDS.split())


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Random token ids in [low, high). The default range has ordinary tokens in nearly every vocabulary."""

    low: int = 16
    high: int = 250

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError("--token-id-range needs 0 <= LOW < HIGH")

    def draw(self, count: int, random: np.random.Generator) -> list[int]:
        """Draw `count` token ids."""
        ids: list[int] = random.integers(self.low, self.high, count).tolist()
        return ids


@dataclass(frozen=True, slots=True)
class WordCosts:
    """Token counts of words on a server."""

    words: tuple[str, ...]
    costs: tuple[int, ...]  # tokens of " " + `words[i]`
    overhead: int = 0  # tokens of the chat template, special tokens and the anchor

    def draw(self, count: int, random: np.random.Generator) -> str:
        """Draw text of `count` tokens; fewer, by less than the cheapest word, if no combination of words is exact."""
        cheap = min(self.costs)
        singles = [word for word, cost in zip(self.words, self.costs, strict=True) if cost == cheap]
        filler, spent = self._filler(count, cheap)
        picks = random.integers(0, len(singles), max(0, (count - spent) // cheap))
        return "".join([f" {singles[pick]}" for pick in picks]) + filler

    def _filler(self, count: int, cheap: int) -> tuple[str, int]:
        """Return a word that makes the remaining count a multiple of the cheapest cost, and its cost."""
        if count % cheap == 0:
            return "", 0
        for word, cost in zip(self.words, self.costs, strict=True):
            if cost <= count and (count - cost) % cheap == 0:
                return f" {word}", cost
        return "", 0


Source = TokenIds | WordCosts
Kind = Literal["completions", "chat"]


class PromptMaker:
    """Maker of the `prompt` or `messages` of a request body.

    `seed` and `salt` determine the text. A new salt per run avoids prefix cache hits on prompts of the last run.
    """

    def __init__(self, source: Source, kind: Kind, seed: int, salt: int) -> None:
        if kind == "chat" and isinstance(source, TokenIds):
            raise InputError("chat endpoints need text prompts; use --prompt-mode text")
        self.source = source
        self.kind = kind
        self._seed = seed
        self._salt = salt
        self._segment = lru_cache(maxsize=4096)(self._draw_segment)

    def fields(self, index: int, tokens: int, content: Content) -> dict[str, Any]:
        """Return the body fields with the prompt of request `index`: the text in `content`, or `tokens` tokens."""
        if content.messages:
            if self.kind == "completions":
                return {"prompt": "\n".join(text for _, text in content.messages)}
            return {"messages": [{"role": role, "content": text} for role, text in content.messages]}
        if content.text is not None:
            return self._wrap(content.text)
        return self._wrap(self._compose(index, tokens, content.segments))

    def _wrap(self, prompt: str | list[int]) -> dict[str, Any]:
        if self.kind == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    def _compose(self, index: int, tokens: int, segments: Sequence[Segment]) -> str | list[int]:
        remaining = tokens
        if isinstance(self.source, WordCosts):
            remaining = max(0, tokens - self.source.overhead)
        pieces: list[str | list[int]] = []
        for name, size in segments:
            taken = min(size, remaining)
            if taken > 0:
                pieces.append(self._segment(name, size)[:taken] if self._ids else self._segment(name, taken))
            remaining -= max(0, taken)
        if remaining > 0:
            pieces.append(self.source.draw(remaining, stream(self._seed, "text", self._salt, UNIQUE, index)))
        if self._ids:
            return [token for piece in pieces for token in piece]  # type: ignore[misc]
        return ANCHOR + "".join(pieces)  # type: ignore[arg-type]

    @property
    def _ids(self) -> bool:
        return isinstance(self.source, TokenIds)

    def _draw_segment(self, name: int, size: int) -> str | list[int]:
        return self.source.draw(size, stream(self._seed, "segment", self._salt, name & 0xFFFFFFFF, name >> 32))


def output_fields(tokens: int, *, ignore_eos: bool) -> dict[str, Any]:
    """Return the body fields that request `tokens` tokens, exactly with `ignore_eos`, else at most.

    Both endpoints use `max_tokens` because several servers do not support `max_completion_tokens`.
    """
    fields: dict[str, Any] = {"max_tokens": tokens}
    if ignore_eos:
        fields |= {"min_tokens": tokens, "ignore_eos": True}
    return fields
