"""Thoughts of an answer: counting their tokens, and ending them by a budget (`ThinkingBudget`).

A thought lies between two marks, in most models `<think>` and `</think>`, of one or a few tokens each. All functions
are pure, so that gateway, engine, and an engine that continues an answer count alike.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from engine.forms import ThoughtMarks

Item = TypeVar("Item", str, int)


class Detector(Generic[Item]):
    """Detects a text or token sequence (Knuth-Morris-Pratt); `matched` is the length of its prefix at the end."""

    def __init__(self, wanted: Sequence[Item]) -> None:
        self.wanted: Sequence[Item] = wanted
        self.matched = 0
        self._borders = [0] * len(wanted)  # length of the longest border of each prefix
        for end in range(1, len(wanted)):
            self._borders[end] = self._extended(self._borders[end - 1], wanted[end])

    def advance(self, item: Item) -> bool:
        """Add a character or token; return whether it completes the sequence."""
        size = self._extended(self.matched, item)
        complete = size == len(self.wanted)
        self.matched = 0 if complete else size
        return complete

    def _extended(self, size: int, item: Item) -> int:
        while size and self.wanted[size] != item:
            size = self._borders[size - 1]
        return size + (self.wanted[size] == item)


class ThoughtTracker:
    """Follows the thoughts of one answer.

    `begun`: the prompt has begun a thought. `once`: there is at most one thought, which must begin the answer.
    """

    def __init__(self, marks: ThoughtMarks, begun: bool = False, once: bool = False) -> None:
        assert not once or begun or len(marks.opening) == 1, "the first token must tell whether the answer is a thought"
        self.thinking = begun
        self._once = once
        self._over = False
        self._opening, self._closing = Detector(marks.opening), Detector(marks.closing)
        self._num_inside = 0

    @property
    def num_thoughts(self) -> int:
        """Number of thought tokens, without marks and possible beginnings of marks."""
        return self._num_inside - self._closing.matched

    @property
    def may_begin(self) -> bool:
        """With `once`: whether the next token may still begin the thought."""
        return not (self.thinking or self._over)

    def advance(self, token_ids: Sequence[int]) -> list[int]:
        """Add tokens; return those outside of thoughts (with `once` without marks)."""
        said: list[int] = []
        for token_id in token_ids:
            if self._over:
                said.append(token_id)
            elif self.thinking:
                self._think(token_id)
            elif self._opening.advance(token_id):
                self.thinking = True
            else:
                self._over = self._once
                said.append(token_id)
        return said

    def _think(self, token_id: int) -> None:
        self._num_inside += 1
        if self._closing.advance(token_id):
            self._num_inside -= len(self._closing.wanted)
            self.thinking, self._over = False, self._once

    def closing_due(self, budget: int) -> Sequence[int]:
        """Return the tokens that must follow because the budget is spent; else none."""
        if not self.thinking or self.num_thoughts < budget:
            return ()
        return self._closing.wanted[self._closing.matched :]
