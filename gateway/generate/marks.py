"""Marks in the text of an answer, and the parts of a parsed answer."""

import re
from dataclasses import dataclass, field

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
