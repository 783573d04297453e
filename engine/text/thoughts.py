"""Thoughts of an answer: counting their tokens, and ending them by a budget.

A thought lies between two marks, in most models `<think>` and `</think>`, of one or a few tokens each. All functions
are pure, so that gateway, engine, and an engine that continues an answer count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Tokens that begin and end a thought, as the tokenizer encodes the marks alone."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """Limit of thought tokens in an answer, marks not counted; after it, only the closing mark may follow.

    `begun`: the prompt ends within a thought.
    """

    tokens: int
    marks: ThoughtMarks
    begun: bool = False


class _Mark:
    """Detects a mark in a token sequence; `matched` is the length of its prefix at the end."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.matched = 0
        self._table = failure_table(token_ids)

    def advance(self, token_id: int) -> bool:
        """Add a token; return whether it completes the mark."""
        size = self.matched
        while size and self.token_ids[size] != token_id:
            size = self._table[size - 1]
        if self.token_ids[size] == token_id:
            size += 1
        complete = size == len(self.token_ids)
        self.matched = 0 if complete else size
        return complete


class ThoughtTracker:
    """Follows the thoughts of one answer.

    `begun`: the prompt has begun a thought. `once`: there is at most one thought, which must begin the answer.
    """

    def __init__(self, marks: ThoughtMarks, begun: bool = False, once: bool = False) -> None:
        assert not once or begun or len(marks.opening) == 1, "the first token must tell whether the answer is a thought"
        self.thinking = begun
        self._once = once
        self._over = False
        self._opening, self._closing = _Mark(marks.opening), _Mark(marks.closing)
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
            self._num_inside -= len(self._closing.token_ids)
            self.thinking, self._over = False, self._once

    def closing_due(self, budget: int) -> Sequence[int]:
        """Return the tokens that must follow because the budget is spent; else none."""
        if not self.thinking or self.num_thoughts < budget:
            return ()
        return self._closing.token_ids[self._closing.matched :]


def failure_table(text: Sequence[object]) -> list[int]:
    """Return for each prefix of a text or token sequence the length of its longest border."""
    table = [0] * len(text)
    size = 0
    for index in range(1, len(text)):
        while size and text[size] != text[index]:
            size = table[size - 1]
        if text[size] == text[index]:
            size += 1
        table[index] = size
    return table
