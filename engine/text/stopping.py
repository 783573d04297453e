"""Stop strings, and the text of one streamed choice: detokenisation combined with stop strings.

The caller ends the request when a stop string is found.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.detokenizer import TokenTable, detokenizer_for
from engine.text.thoughts import Detector


class StopMatcher:
    """Finds the first complete stop string and releases text as soon as it cannot be part of one.

    Of several stop strings that end at the same character, the longest wins. The result does not depend on the sizes of
    the pushes. `include` keeps the stop string in the text. Constant time per character and stop string.
    """

    def __init__(self, stop: tuple[str, ...], include: bool = False) -> None:
        self._stops = [Detector(text) for text in stop if text]
        self._held = ""
        self._include = include
        self.matched: str | None = None
        self.position = 0  # number of released characters

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text; return the released text, and the stop string if one is complete. Nothing may follow a match."""
        assert self.matched is None, "no text may follow a stop string"
        if not self._stops:
            return self._let_through(text), None
        for index, char in enumerate(text):
            complete = [
                str(stop.wanted)
                for stop in self._stops
                if (stop.matched or stop.wanted[0] == char) and stop.advance(char)
            ]
            if complete:
                self.matched = found = max(complete, key=len)
                seen = self._held + text[: index + 1]
                self._held = ""
                return self._let_through(seen if self._include else seen[: len(seen) - len(found)]), found
        seen, held = self._held + text, max(stop.matched for stop in self._stops)
        cut = len(seen) - held
        self._held = seen[cut:]
        return self._let_through(seen[:cut]), None

    def flush(self) -> str:
        """Return the text held back, at the end of the answer."""
        held, self._held = self._held, ""
        for stop in self._stops:
            stop.matched = 0
        return self._let_through(held)

    def _let_through(self, text: str) -> str:
        self.position += len(text)
        return text


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Result of a push.

    Attributes:
        stop: Stop string that ended the answer.
        num_tokens: Number of tokens newly covered by the text. A token counts once its last character is released (one
            without text: once all earlier tokens are); after a stop string, if any of its characters is in the text.
            The sum never exceeds the number of pushed tokens.
    """

    text: str
    stop: str | None = None
    num_tokens: int = 0


class OutputTextStream:
    """Text of one choice. Nothing may be pushed after a delta with `stop`.

    Stop strings are matched only after the first `min_tokens` tokens. With `prompt_ids` the text continues the prompt
    (completions); chat answers stand alone.
    """

    def __init__(
        self,
        tokenizer: TokenTable,
        prompt_ids: Sequence[int] = (),
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = detokenizer_for(tokenizer, prompt_ids, skip_special_tokens=skip_special_tokens)
        self._matcher = StopMatcher(stop, include_stop)
        self._unchecked_tokens = min_tokens if stop else 0
        self._length = 0  # characters detokenised
        self._shown = 0  # characters returned
        # Begin and end of tokens not counted yet, and begins of the tokens of an incomplete character.
        self._open: deque[tuple[int, int]] = deque()
        self._unfinished: list[int] = []

    def push(self, token_ids: Sequence[int], final: bool = False) -> TextDelta:
        """Add the tokens of a step; `final` releases all text held back."""
        texts: list[str] = []
        for token_id in token_ids:
            begin, text = self._length, self._detokenizer.push((token_id,))
            self._length += len(text)
            if self._unchecked_tokens > 0:
                self._unchecked_tokens -= 1
                shown, stop = text, None
            else:
                shown, stop = self._matcher.push(text)
            self._record(begin)
            texts.append(shown)
            if stop is not None:
                return self._cut(texts, stop)
        return self._finish(texts) if final else self._delta(texts)

    def push_plain(self, token_ids: Sequence[int]) -> str | None:
        """Like `push` without stop strings and counts. Return None if the tokens end inside their first character."""
        text = self._detokenizer.push(token_ids)
        return None if not text and self._detokenizer.holds_text else text

    def _record(self, begin: int) -> None:
        """Record the begin of the last token; a completed character ends all of its tokens."""
        self._unfinished.append(begin)
        if not self._detokenizer.holds_text:
            self._open.extend((start, self._length) for start in self._unfinished)
            self._unfinished.clear()

    def _finish(self, texts: list[str]) -> TextDelta:
        rest = self._detokenizer.finish()
        self._length += len(rest)
        shown, stop = self._matcher.push(rest) if self._unchecked_tokens <= 0 else (rest, None)
        texts.append(shown)
        if stop is not None:
            return self._cut(texts, stop)
        texts.append(self._matcher.flush())
        text, count = "".join(texts), len(self._open) + len(self._unfinished)
        self._open.clear()
        self._unfinished.clear()
        return TextDelta(text, None, count)

    def _delta(self, texts: list[str]) -> TextDelta:
        text = "".join(texts)
        self._shown += len(text)
        count = 0
        while self._open and self._open[0][1] <= self._shown:
            self._open.popleft()
            count += 1
        return TextDelta(text, None, count)

    def _cut(self, texts: list[str], stop: str) -> TextDelta:
        text = "".join(texts)
        self._shown += len(text)
        count = sum(begin < self._shown for begin in [*(begin for begin, _ in self._open), *self._unfinished])
        self._open.clear()
        self._unfinished.clear()
        return TextDelta(text, stop, count)
