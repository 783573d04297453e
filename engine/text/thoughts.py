"""What an answer thinks before it speaks, told from its tokens: how many they are, and how they are brought to an end.

A thought lies between two marks, `<think>` and `</think>` in most models, each a few tokens, or one. Plain values and
pure functions of tokens: gateway and engine, and an engine that goes on with an answer, count alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.text.stopping import failure_table


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """The tokens that begin and end a thought, as the tokenizer spells the marks on their own."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """At most `tokens` tokens of an answer, its marks not counted, are thoughts; then the closing mark is all that may
    come next. `begun`: the prompt ends within a thought."""

    tokens: int
    marks: ThoughtMarks
    begun: bool = False


class _Mark:
    """Looks for a mark in tokens; `matched`: how much of it they end with."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = token_ids
        self.matched = 0
        self._table = failure_table(token_ids)

    def advance(self, token_id: int) -> bool:
        """Whether it is complete with this token."""
        size = self.matched
        while size and self.token_ids[size] != token_id:
            size = self._table[size - 1]
        if self.token_ids[size] == token_id:
            size += 1
        complete = size == len(self.token_ids)
        self.matched = 0 if complete else size
        return complete


class ThoughtTracker:
    """Follows one answer through its thoughts. `begun`: the prompt has begun one. `once`: what comes behind the first
    one, or where the answer does not begin with one, are no thoughts, whatever it looks like."""

    def __init__(self, marks: ThoughtMarks, begun: bool = False, once: bool = False) -> None:
        assert not once or begun or len(marks.opening) == 1, "the first token tells whether the answer is a thought"
        self.thinking = begun
        self._once = once
        self._over = False
        self._opening, self._closing = _Mark(marks.opening), _Mark(marks.closing)
        self._num_inside = 0

    @property
    def num_thoughts(self) -> int:
        """Tokens of thoughts, without marks and what may become one."""
        return self._num_inside - self._closing.matched

    @property
    def may_begin(self) -> bool:
        """With `once`: whether the next token may still begin the thought."""
        return not (self.thinking or self._over)

    def advance(self, token_ids: Sequence[int]) -> list[int]:
        """Take in the next tokens; returns those outside of thoughts, marks left out only with `once`."""
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
        """The tokens that must come next, as the budget is spent; none otherwise."""
        if not self.thinking or self.num_thoughts < budget:
            return ()
        return self._closing.token_ids[self._closing.matched :]
