"""New parts of an answer: output of a choice, parsed text, and the marks that end a region of the text."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import TokenLogprobs
from gateway.generate.tool_decoders import Call


@dataclass(slots=True)
class ParsedText:
    """Parsed output of one `push`."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.reasoning or self.calls)


@dataclass(slots=True)
class OutputDelta:
    """New output of one choice."""

    index: int
    """Index of the choice."""
    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[tuple[int, TokenLogprobs]] = ()
    """Visible tokens with their logprobs."""
    finish_reason: str | None = None
    """Set on the last delta of the choice."""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    """Complete tool calls."""
    stop: str | None = None
    """The stop string that ended the choice, if any."""
    embedding: bytes = b""
    """The vector of an embedding request, or the scores of the prompt (`Pooling.SCORES`), float32 little-endian."""


class Marks:
    """The marks that end a region of an answer."""

    def __init__(self, *marks: str) -> None:
        self._marks = [mark for mark in marks if mark]
        self._pattern = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
        self.longest = max(map(len, self._marks), default=0)

    def find(self, text: str, start: int, stop: int) -> re.Match[str] | None:
        return None if self._pattern is None else self._pattern.search(text, start, stop)

    def begin(self, text: str, start: int) -> int:
        """Return the position of a partial mark at the end of the text, or the length of the text."""
        first = len(text)
        for mark in self._marks:
            at = text.find(mark[0], max(start, len(text) - len(mark) + 1))
            while at >= 0 and not mark.startswith(text[at:]):
                at = text.find(mark[0], at + 1)
            first = first if at < 0 else min(first, at)
        return first
