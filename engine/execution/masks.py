"""Token masks for grammars and thinking budgets, computed in threads while the forward pass runs.

A matcher belongs to the request of a row. It is rebuilt from the tokens whenever the row is written, so preemption and
restarts need nothing else. The step does not wait for slow grammars: a row whose mask is not ready `PATIENCE` seconds
after the forward pass gets no token in this step and is tried again in its next step. (If the same token cannot be run
twice, as in recurrent layers, whose state already includes it, all rows wait.) Slow rows have their own thread, so that
they do not delay the masks of others.

If the grammar leaves no choice for several tokens, the mask allows only the first and the following tokens are
known with it ("forced"). The same applies to the end of a thought whose budget is spent. If an answer has a budget and
a grammar, the grammar applies after the thought.

Behind a draft, a row has a mask for each position. Copies of the matcher and of the thought's state follow the drafted
tokens as far as the masks allow them: the samples behind a token that they forbid are discarded.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from copy import copy, deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from engine.api import SamplingParams
from engine.arrays import BoolArray, Int32Array, IntArray
from engine.execution.rows import RowTable
from engine.forms import Grammar
from engine.panics import as_error
from engine.text.thoughts import ThoughtTracker

if TYPE_CHECKING:  # running a model does not need the grammar compiler
    from engine.structured.compiler import GrammarCompiler, Matcher

log = logging.getLogger("tidemill.engine")

MAX_FORCED = 32
"""Maximum number of tokens that are known together with a sampled one."""
PATIENCE = 2e-3
FOREVER = threading.TIMEOUT_MAX
LONE_PATIENCE = 10e-3
"""Patience in seconds for steps with grammar rows only: new requests may arrive during the wait."""


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Masks of the samples of a step.

    Attributes:
        places: [m], samples whose tokens are limited.
        bits: [m, ceil(vocab / 32)], bit i is set if token i is allowed.
        late: Samples without a token in this step because the mask is not ready.
        failed: Samples whose grammar failed.
        forced: For each sample, the tokens that must follow the sampled one.
    """

    places: IntArray
    bits: Int32Array
    late: IntArray
    failed: IntArray
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


FinishMasks = Callable[[], StepMasks]
"""Waits for the masks of a step that was begun."""


def masked(rows: RowTable, where: IntArray, ends: IntArray) -> BoolArray:
    """Return [S] whether a mask may limit the sample at position `ends [S]` of rows `where [S]`.

    It does not if the token is already known, because that sample is discarded.
    """
    begun: BoolArray = ends - rows.num_prompt[where] >= rows.sampling.masked_from[where]
    return begun & (ends >= rows.known_to[where])


class _State(enum.IntEnum):
    READY = 0
    LATE = 1
    FAILED = 2
    FREE = 3


class _RowMatcher:
    """Follows the answer of the request that the row held at its `generation`."""

    def __init__(self, generation: int, params: SamplingParams, words: int) -> None:
        self.generation = generation
        self.params = params
        self.bits = np.zeros(words, dtype=np.int32)
        self.behind: list[tuple[_State, Int32Array]] = []  # states and masks behind the drafted tokens
        self.is_stale = False  # `work` was begun for an earlier step, which may have had another draft
        self.work: Future[None] | None = None
        self.end = -1  # position for which `work` computes the mask
        self.seconds = 0.0  # duration of the last mask
        self.forced: tuple[int, ...] = ()  # tokens that must follow the single allowed token
        self._state = _State.FAILED
        self._matcher: Matcher | None = None
        self._num_seen = 0
        budget = params.thinking
        once = params.grammar is not None
        self._thoughts = None if budget is None else ThoughtTracker(budget.marks, budget.begun, once)

    def take(self, count: int) -> "list[tuple[_State, Int32Array]]":
        """Return states and masks of `count` positions of a step; late masks continue to be computed."""
        assert self.work is not None
        late = [(_State.LATE, self.bits)] * count
        if not self.work.done():
            return late
        work, self.work = self.work, None
        work.result()
        return [(self._state, self.bits), *(late[1:] if self.is_stale else self.behind)]

    def run(self, compiler: "GrammarCompiler", token_ids: IntArray, room: int, drafted: Sequence[int] = ()) -> None:
        """Compute the mask after `token_ids`, the answer so far, and the forced tokens, at most `room` in total; and
        the masks after each of the tokens that are drafted behind them."""
        began = time.perf_counter()
        said = token_ids[self._num_seen :].tolist()
        try:
            self._state = self._advance(compiler, said, room)
            self._follow_draft(compiler, drafted)
        except BaseException as raised:  # of the grammar library: only this request ends
            as_error(raised)
            log.error("a grammar failed while an answer grew: %s", type(raised).__name__)
            self._state, self.forced, self.behind = _State.FAILED, (), [(_State.FREE, self.bits)] * len(drafted)
            if self._matcher is not None:
                self._matcher.give_up()
        self.seconds = time.perf_counter() - began

    def _advance(self, compiler: "GrammarCompiler", token_ids: list[int], room: int) -> _State:
        """Add tokens of the answer, and compute the mask of the next one."""
        self._num_seen += len(token_ids)
        self.forced = ()
        said = token_ids if self._thoughts is None else self._thoughts.advance(token_ids)
        if self.params.grammar is None:
            return self._limit_thought(room)
        return self._limit(compiler, self.params.grammar, said, room)

    def _limit_thought(self, room: int) -> _State:
        """Limit only the thought of an answer without a grammar."""
        budget = self.params.thinking
        assert budget is not None and self._thoughts is not None
        run = self._thoughts.closing_due(budget.tokens)
        if not run or (self._is_short and run[0] in self.params.stop_token_ids):
            return _State.FREE
        self._allow_only(run, room)
        return _State.READY

    def _limit(self, compiler: "GrammarCompiler", grammar: Grammar, said: list[int], room: int) -> _State:
        thoughts, budget = self._thoughts, self.params.thinking
        if thoughts is not None and budget is not None and thoughts.thinking:
            run = thoughts.closing_due(budget.tokens)
            if run:
                self._allow_only(run, room)
            else:  # the grammar applies after the thought
                self.bits[:] = -1
                self._forbid(self.params.stop_token_ids)
            return _State.READY
        if self._matcher is None:
            compiled = compiler.find(grammar)
            if compiled is None:  # it was ready when the request was queued, but its lexer hit a limit since
                return _State.FAILED
            self._matcher = compiled.matcher()
        self._matcher.advance(said)
        if thoughts is not None and budget is not None and thoughts.may_begin and budget.tokens:
            self._matcher.write_mask(self.bits)
            self._allow(budget.marks.opening[0])
        else:
            self._follow_grammar(self._matcher, room)
        return _State.READY if self._matcher.failed is None else _State.FAILED

    def _follow_grammar(self, matcher: "Matcher", room: int) -> None:
        # Also for runs of one token: of the spellings of a forced text, the answer must use that of the tokenizer.
        stops = self.params.stop_token_ids
        run = list(takewhile(lambda token_id: token_id not in stops, matcher.forced()))
        if run:
            self._allow_only(run, room)
        else:
            matcher.write_mask(self.bits)
        if self._is_short:
            self._forbid(stops)

    def _follow_draft(self, compiler: "GrammarCompiler", drafted: Sequence[int]) -> None:
        """Set `behind`, with FREE for the positions that cannot be reached."""
        self.behind = [(_State.FREE, self.bits)] * len(drafted)
        if not drafted or self._state is _State.FAILED:
            return
        state = copy(self)
        state._matcher = None if self._matcher is None else self._matcher.copy()
        state._thoughts = deepcopy(self._thoughts)
        for place, token_id in enumerate(drafted):
            if token_id in self.params.stop_token_ids or not (state._state is _State.FREE or state._allows(token_id)):
                return
            state.bits = np.zeros_like(self.bits)
            state._state = state._advance(compiler, [token_id], room=1)
            # A matcher that fails behind a draft fails again when the token is known.
            failed = state._state is _State.FAILED
            self.behind[place] = _State.LATE if failed else state._state, state.bits
            if failed:
                return

    def _allows(self, token_id: int) -> bool:
        return bool(self.bits.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & np.uint32(1))

    @property
    def _is_short(self) -> bool:
        """Whether the answer has not reached its minimum length."""
        return self._num_seen < self.params.min_tokens

    def _allow_only(self, run: Sequence[int], room: int) -> None:
        """Allow only the first token of the run; the others are forced."""
        self.forced = tuple(run[1:room])
        self.bits[:] = 0
        self._allow(run[0])

    def _allow(self, token_id: int) -> None:
        self.bits.view(np.uint32)[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)

    def _forbid(self, token_ids: frozenset[int]) -> None:
        """Forbid the tokens unless nothing else is allowed: a complete answer ends even if it is short."""
        ids = np.array(sorted(token_ids), dtype=np.int64)
        bits = self.bits.copy()
        np.bitwise_and.at(bits.view(np.uint32), ids // 32, ~(np.uint32(1) << (ids % 32).astype(np.uint32)))
        if bits.any():
            self.bits[:] = bits


class RowMasks:
    """Matchers of a runner's rows.

    `patience` and `lone_patience` are in seconds; see the module. `max_forced` limits the tokens that are known with a
    sampled one.
    """

    def __init__(
        self,
        rows: RowTable,
        compiler: "GrammarCompiler",
        patience: float = PATIENCE,
        lone_patience: float = LONE_PATIENCE,
        max_forced: int = MAX_FORCED,
    ) -> None:
        self._rows = rows
        self._compiler = compiler
        self._patience = patience
        self._lone_patience = lone_patience
        self._max_forced = max_forced
        self._matchers: dict[int, _RowMatcher] = {}
        self._quick = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-masks")
        self._slow = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tidemill-slow-masks")

    def start(self, where: IntArray, ends: IntArray, alone: bool) -> FinishMasks:
        """Begin the masks of a step that samples position `ends [S]` of rows `where [S]`; earlier tokens must be known,
        or drafted behind another sample of the row.

        `alone`: no other step is running.
        """
        # A row's first sample follows its last known token, even if a mask may limit only the samples behind a draft.
        places = np.flatnonzero(np.isin(where, where[masked(self._rows, where, ends)]))
        by_row: dict[int, list[int]] = {}
        for place in places.tolist():
            by_row.setdefault(int(where[place]), []).append(place)
        matchers = [self._begin(row, ends[own]) for row, own in by_row.items()]
        return partial(self._finish, list(by_row.values()), matchers, alone and len(places) == len(where))

    def _begin(self, row: int, ends: IntArray) -> _RowMatcher | None:
        """Begin the masks of a row; None if the row got no token in a step on which this one depends."""
        rows, matcher, end = self._rows, self._matchers.get(row), int(ends[0])
        if matcher is None or matcher.generation != rows.generation[row]:
            params = rows.sampling.params[row]
            assert params is not None
            matcher = _RowMatcher(int(rows.generation[row]), params, self._compiler.mask_words)
            self._matchers[row] = matcher
        matcher.is_stale = matcher.work is not None
        if matcher.is_stale:
            return matcher if matcher.end == end else None
        # UNKNOWN tokens occur only in steps behind a failed one, whose results are discarded.
        answer = np.maximum(rows.tokens[row, rows.num_prompt[row] : end], 0)
        drafted = rows.tokens[row, end : ends[-1]].tolist()
        run = partial(matcher.run, self._compiler, answer, self._room(row, end, matcher.params), drafted)
        matcher.end, matcher.work = end, self._start(matcher, run)
        return matcher

    def _start(self, matcher: _RowMatcher, run: Callable[[], None]) -> "Future[None]":
        """Run in a thread, or directly if there is only a thinking budget to check."""
        grammar = matcher.params.grammar
        if grammar is not None:
            return (self._quick if matcher.seconds <= self._patience else self._slow).submit(run)
        done: Future[None] = Future()
        run()
        done.set_result(None)
        return done

    def _room(self, row: int, end: int, params: SamplingParams) -> int:
        """Return the number of tokens from position `end` that may be known at once; 1 if log-probabilities are
        wanted, which exist only for sampled tokens."""
        if params.logprobs is not None:
            return 1
        longest = min(self._rows.tokens.shape[1] - 1, int(self._rows.num_prompt[row]) + params.max_tokens)
        return min(longest - end, 1 + self._max_forced)

    def _finish(self, places: list[list[int]], matchers: list[_RowMatcher | None], alone: bool) -> StepMasks:
        """Wait for the masks. `places`: samples of each matcher's row, in the order of their positions."""
        work = [matcher.work for matcher in matchers if matcher is not None and matcher.work is not None]
        done, _ = wait(work, timeout=self._patience)
        if work and not done and alone:
            wait(work, timeout=self._lone_patience, return_when=FIRST_COMPLETED)
        found: dict[_State, list[int]] = {state: [] for state in _State}
        bits: list[Int32Array] = []
        forced: dict[int, tuple[int, ...]] = {}
        for own, matcher in zip(places, matchers, strict=True):
            if matcher is None:
                found[_State.LATE] += own
                continue
            taken = matcher.take(len(own))
            for place, (state, mask) in zip(own, taken, strict=True):
                found[state].append(place)
                if state is _State.READY:
                    bits.append(mask)
            if taken[0][0] is _State.READY and matcher.forced:
                forced[own[0]] = matcher.forced
        return StepMasks(
            np.array(found[_State.READY], dtype=np.int64),
            np.stack(bits) if bits else np.zeros((0, self._compiler.mask_words), dtype=np.int32),
            np.array(found[_State.LATE], dtype=np.int64),
            np.array(found[_State.FAILED], dtype=np.int64),
            forced,
        )
