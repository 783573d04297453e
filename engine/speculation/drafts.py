"""Drafts without a model: tokens that follow an earlier occurrence of a request's last tokens.

Sources of a request's drafts:

- its own context, prompt and answer (prompt look-up);
- finished answers of the same batch job, whose lines repeat each other;
- without a job: recent finished answers of the same tenant to the same prefix (system prompt, adapter, cache salt).

Answers are never shared between tenants: a fast answer would reveal that another tenant got the same text.
Acceptance is learned per job or tenant for the same reason: rates by source and position, recent outcomes first.

A draft is a guess. It changes the speed of a request but not its answer. `propose` costs microseconds; `catch_up`
builds the indices and belongs beside a running step.

An index of the n-grams of a token sequence, in arrays.

The index answers one question: where did the last 8, 4 or 2 tokens occur before, latest first? Each length has a table
of the newest position by hash and a chain to the next older position of the same hash, as in LZ77 compressors. Hashes
only select candidates; every match is compared with the tokens. A token costs 16 bytes and a slot 12 bytes, about a
tenth of a suffix automaton in dicts.

A position is the index of the token that follows an n-gram. It is indexed once that token is known.
"""

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import mul
from typing import NamedTuple

import numpy as np

GRAMS = (8, 4, 2)
"""Lengths of the n-grams, longest first. Each hash combines two hashes of the next shorter length."""
LONGEST = GRAMS[0]
NO_TOKEN = -1
"""Padding in front of a sequence, and the end of a part of it."""
HOPS = 16
"""Maximum number of candidates of an n-gram that are compared."""
_BY_HAND = 24
"""Positions from which on numpy is faster than a loop."""
_P, _Q, _MASK = 0x9E3779B1, 0x85EBCA77, 0xFFFFFFFF

Hashes = tuple[int, int, int]
"""32-bit hashes of the last 8, 4 and 2 tokens."""


def hash_tail(tail: "array[int]") -> Hashes:
    """Return the hashes of the last 8, 4 and 2 of 8 tokens."""
    a, b, c, d, e, f, g, h = tail
    two = g * _P + h * _Q & _MASK
    four = (e * _P + f * _Q & _MASK) * _P + two * _Q & _MASK
    first = (a * _P + b * _Q & _MASK) * _P + (c * _P + d * _Q & _MASK) * _Q & _MASK
    return first * _P + four * _Q & _MASK, four, two


class NGrams:
    """The index of one sequence, which only grows.

    Args:
        num_slots: Size of the hash tables; a power of 2. Chains grow with the tokens per slot.
    """

    def __init__(self, num_slots: int = 1024) -> None:
        self.tokens = array("i", [NO_TOKEN]) * LONGEST
        self._unread: deque[Iterator[int]] = deque()
        self._shift = 33 - num_slots.bit_length()
        self._heads = tuple(array("i", bytes(4 * num_slots)) for _ in GRAMS)
        self._chains = tuple(array("i", bytes(4 * LONGEST)) for _ in GRAMS)

    @property
    def num_behind(self) -> int:
        """Return the number of known tokens that are not indexed."""
        return len(self.tokens) - len(self._chains[0])

    @property
    def is_read(self) -> bool:
        """Return whether all tokens are known."""
        return not self._unread

    @property
    def tail(self) -> "array[int]":
        """Return the last 8 tokens, padded in front."""
        return self.tokens[-LONGEST:]

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens at once."""
        if self._unread:
            self._unread.append(iter(tokens))
        else:
            self.tokens.extend(tokens)

    def extend_later(self, tokens: Iterable[int]) -> None:
        """Append many tokens as `index` is called. They must not change meanwhile."""
        self._unread.append(iter(tokens))

    def index(self, most: int) -> int:
        """Read and index up to `most` positions. Return the number of positions that this call has handled."""
        before = len(self._chains[0])
        while self._unread and len(self.tokens) - before < most:
            wanted = before + most - len(self.tokens)
            length = len(self.tokens)
            self.tokens.extend(islice(self._unread[0], wanted))
            if len(self.tokens) - length < wanted:
                self._unread.popleft()
        end = min(len(self.tokens), before + most)
        if end - before > _BY_HAND:
            self._link_many(before, end)
        else:
            self._link_few(before, end)
        return end - before

    def find(self, tail: "array[int]", hashes: Hashes, levels: Iterable[int]) -> tuple[int, int]:
        """Return the newest position behind the longest n-gram that ends `tail`, and the length; (0, 0) without one.

        Args:
            tail: 8 tokens, of this sequence or of another.
            levels: Indices of `GRAMS`, in the order in which they are looked up.
        """
        tokens, shift = self.tokens, self._shift
        for level in levels:
            position = self._heads[level][hashes[level] >> shift]
            if not position:
                continue
            length, chain = GRAMS[level], self._chains[level]
            gram = tail[LONGEST - length :]
            for _ in range(HOPS):
                if tokens[position - length : position] == gram:
                    return position, length
                position = chain[position]
                if not position:
                    break
        return 0, 0

    def find_older(self, position: int, length: int) -> int:
        """Return the next older position behind the same n-gram; 0 without one."""
        tokens, chain = self.tokens, self._chains[GRAMS.index(length)]
        gram = tokens[position - length : position]
        for _ in range(HOPS):
            position = chain[position]
            if not position or tokens[position - length : position] == gram:
                return position
        return 0

    def continuation(self, position: int, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens from `position` on, up to NO_TOKEN. At the end of the sequence they repeat."""
        found = self.tokens[position : position + most]
        if NO_TOKEN in found:
            return tuple(found[: found.index(NO_TOKEN)])
        period = len(found)
        if period < most:
            found = (found * (most // period + 1))[:most]
        return tuple(found)

    def _link_few(self, begin: int, end: int) -> None:
        """Index the positions [begin, end), one after the other."""
        tokens, shift = self.tokens[begin - LONGEST : end - 1], self._shift
        two = [a * _P + b * _Q & _MASK for a, b in pairwise(tokens)]
        four = [a * _P + b * _Q & _MASK for a, b in zip(two, two[2:], strict=False)]
        eight = [a * _P + b * _Q & _MASK for a, b in zip(four, four[4:], strict=False)]
        for heads, chained, values in zip(self._heads, self._chains, (eight, four[4:], two[6:]), strict=True):
            for position, value in enumerate(values, begin):
                slot = value >> shift
                chained.append(heads[slot])
                heads[slot] = position

    def _link_many(self, begin: int, end: int) -> None:
        """Do the same as `_link_few`, faster for many positions."""
        window = np.frombuffer(self.tokens, np.int32)[begin - LONGEST : end - 1].astype(np.uint32)
        p, q = np.uint32(_P), np.uint32(_Q)
        two = window[:-1] * p + window[1:] * q
        four = two[:-2] * p + two[2:] * q
        eight = four[:-4] * p + four[4:] * q
        positions = np.arange(begin, end)
        for heads, chained, values in zip(self._heads, self._chains, (eight, four[4:], two[6:]), strict=True):
            keys = np.sort((values >> np.uint32(self._shift)).astype(np.int64) << 32 | positions)
            slots, ordered = keys >> 32, keys & _MASK
            table = np.frombuffer(heads, np.int32)
            older = table[slots]  # right for the first position of a slot
            same = slots[1:] == slots[:-1]
            older[1:][same] = ordered[:-1][same]
            table[slots] = ordered  # of equal slots the last one, the newest position, remains
            links = np.empty(end - begin, np.int32)
            links[ordered - begin] = older
            chained.frombytes(links.tobytes())


MAX_DRAFT = 16
"""Maximum number of tokens in a draft."""
MEMORY = 64
"""Number of recent outcomes that a rate remembers; older ones fade exponentially."""
TRUST = 4.0
"""Outcomes that a prior counts for."""
DRIFT = 1.0 / 1024
"""Share of the way back to the prior for each draft that is not tried: a source that failed gets another chance."""
PRIORS = {8: 0.8, 4: 0.65, 2: 0.5}
"""Acceptance of a token before any outcome, by the length of the match. It lets a new job try."""


class DraftSource(NamedTuple):
    """Where a draft comes from: "context", "job" or "tenant", and the length of the match that precedes it."""

    origin: str
    match: int


class Rates:
    """How often drafts of one source are accepted: P(position i is, if the positions before it are), i from 0 on.

    Recent outcomes count most.
    """

    __slots__ = ("_outcomes", "_prior", "_rates", "_sums", "_survival")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._rates = [prior]
        self._outcomes = [0]
        self._survival: tuple[float, ...] = ()
        self._sums: tuple[float, ...] = ()

    def learn(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were accepted."""
        rates, outcomes = self._rates, self._outcomes
        for position in range(min(accepted + 1, proposed)):
            if position == len(rates):
                rates.append(rates[-1])
                outcomes.append(0)
            count = outcomes[position]
            if count < MEMORY:
                outcomes[position] = count = count + 1
            rates[position] += ((position < accepted) - rates[position]) / (TRUST + count)
        self._survival = ()

    def relax(self) -> None:
        """Record that a draft was not tried, because the source seemed too bad."""
        if self._rates[0] < self._prior:
            self._rates[0] += (self._prior - self._rates[0]) * DRIFT
            self._survival = ()

    @property
    def survival(self) -> tuple[float, ...]:
        """Return P(the draft is accepted up to and including position i) for MAX_DRAFT positions; never increasing."""
        if not self._survival:
            self._compute()
        return self._survival

    def expected(self, length: int) -> float:
        """Return the expected number of accepted tokens of a draft."""
        if not self._survival:
            self._compute()
        return self._sums[length]

    def _compute(self) -> None:
        rates = islice(chain(self._rates, repeat(self._rates[-1])), MAX_DRAFT)
        self._survival = tuple(accumulate(rates, mul))
        self._sums = tuple(accumulate(self._survival, initial=0.0))


class Acceptance(dict[DraftSource, Rates]):
    """Acceptance by source of the drafts of one job or tenant."""

    def __missing__(self, source: DraftSource) -> Rates:
        rates = self[source] = Rates(PRIORS[source.match])
        return rates


MAX_CONTEXT = 1 << 17
"""Last tokens of a prompt that are indexed. A request that has twice as many tokens gets no drafts."""
GENERATION_TOKENS = 1 << 14
"""Tokens of finished answers after which a corpus forgets its older half."""
MAX_CORPORA = 32
"""Jobs and prefixes of tenants whose answers are kept."""
MAX_OWNERS = 256
"""Jobs and tenants whose acceptance is kept."""
MAX_REST = 64
"""Maximum number of tokens for which failed drafts stop a request's drafts."""
MAX_MISS_REST = 4
"""Maximum number of tokens between two look-ups that find nothing."""
SLICE = 1024
"""Tokens of a sequence that are indexed before it is the turn of another one."""
BEHIND = 8
"""Tokens of an answer that are indexed together."""
READY = 64
"""Maximum number of context tokens that may be missing from the index when a draft is proposed."""
FIRST_DRAFT, LEAST_DRAFT = 4, 2
"""Maximum number of tokens of a request's first draft, and of one that follows a wrong one."""
_LEVELS = tuple(range(len(GRAMS)))


class Proposal(NamedTuple):
    """Tokens that may follow. A caller that tries only the first ones judges `first(count)`."""

    tokens: tuple[int, ...]
    source: DraftSource

    def first(self, count: int) -> "Proposal":
        """Return the first `count` tokens."""
        return self if count >= len(self.tokens) else Proposal(self.tokens[:count], self.source)


NOTHING = Proposal((), DraftSource("context", LONGEST))


class Answers:
    """The finished answers of a job or of a tenant's prefix: two generations, of which the older one is dropped whole.

    An answer is preceded by the last tokens of its prompt, so that the first token of an answer can be drafted.
    """

    def __init__(self) -> None:
        self._young = NGrams(GENERATION_TOKENS // 4)
        self._old: NGrams | None = None
        self._num_tokens = 0
        self.num_answers = 0

    def add(self, answer: "array[int]") -> NGrams:
        """Add an answer with the tokens before it. Return the index that must catch up."""
        answer = answer[:GENERATION_TOKENS]
        if self._num_tokens + len(answer) > GENERATION_TOKENS:
            self._old, self._young, self._num_tokens = self._young, NGrams(GENERATION_TOKENS // 4), 0
        self._num_tokens += len(answer) + 1
        self.num_answers += 1
        answer.append(NO_TOKEN)
        self._young.extend_later(answer)
        return self._young

    @property
    def generations(self) -> tuple[NGrams, ...]:
        """Return the indices, newest first."""
        return (self._young,) if self._old is None else (self._young, self._old)


@dataclass(slots=True)
class _Request:
    """State of one request.

    Attributes:
        corpus: Key of the finished answers that may help.
        origin: Name of these answers as a source.
        num_prompt: Number of indexed prompt tokens, with padding.
        length: Number of tokens, with padding; of those that are still to be read too.
        rests: By level, the length up to which matches of this level give no drafts.
        failures: By level, the number of drafts in a row of which no token was accepted.
        misses: Number of look-ups in a row that found nothing.
        next_look: Length from which on the next look-up is worth it.
        untried: Source of the last proposal, until it is judged.
        proposed_at: Length at that proposal.
        longest: Maximum number of tokens of the next draft: twice the number of accepted tokens of the last one.
    """

    context: NGrams
    corpus: Hashable
    origin: str
    acceptance: Acceptance
    num_prompt: int
    length: int
    rests: list[int] = field(default_factory=lambda: [0] * len(GRAMS))
    failures: list[int] = field(default_factory=lambda: [0] * len(GRAMS))
    misses: int = 0
    next_look: int = 0
    untried: DraftSource | None = None
    proposed_at: int = 0
    longest: int = FIRST_DRAFT


class Drafts:
    """Propose drafts for the running requests, and learn which are accepted."""

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._corpora: OrderedDict[Hashable, Answers] = OrderedDict()
        self._owners: OrderedDict[Hashable, Acceptance] = OrderedDict()
        self._behind: dict[NGrams, None] = {}

    def start(self, request_id: str, tokens: Sequence[int], job: str, tenant: str, prefix_key: Hashable) -> None:
        """Start to propose for a request.

        Args:
            tokens: The prompt, and the answer so far of a request that continues. It must not change.
            job: The batch job; "" if the request belongs to none.
            prefix_key: Equal for requests that share a system prompt, adapter and cache salt.
        """
        indexed = tokens if len(tokens) <= MAX_CONTEXT else tokens[-MAX_CONTEXT:]
        context = NGrams(1 << max(10, (len(indexed) - 1).bit_length()))
        context.extend_later(indexed)
        length = len(indexed) + LONGEST
        self._requests[request_id] = _Request(
            context,
            corpus=("job", tenant, job) if job else ("tenant", tenant, prefix_key),
            origin="job" if job else "tenant",
            acceptance=self._acceptance_of((tenant, job)),
            num_prompt=length,
            length=length,
        )
        self._behind[context] = None

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """Append emitted tokens."""
        request = self._requests[request_id]
        request.length += len(tokens)
        request.context.extend(tokens)
        if request.context.num_behind >= BEHIND:
            self._behind[request.context] = None

    def propose(self, request_id: str, most: int) -> Proposal:
        """Return the draft with the most expected tokens, at most `most`; it may be empty.

        A draft ends where the two newest occurrences go on differently: there a value stands, not a repeated text.
        """
        request = self._requests[request_id]
        length, context = request.length, request.context
        if length < request.next_look or most <= 0:
            return NOTHING
        levels = [level for level in _LEVELS if request.rests[level] <= length]
        if not levels or not context.is_read or context.num_behind > READY or length > 2 * MAX_CONTEXT:
            return NOTHING
        tail = context.tail
        hashes = hash_tail(tail)
        most = min(most, request.longest)
        answers = self._corpora.get(request.corpus)
        indices = (context,) if answers is None else (context, *answers.generations)
        best, value = NOTHING, 0.0
        for index in indices:
            position, match = index.find(tail, hashes, levels)
            if not position:
                continue
            tokens = index.continuation(position, most)
            if older := index.find_older(position, match):
                tokens = _common(tokens, index.continuation(older, most))
            if tokens:
                source = DraftSource("context" if index is context else request.origin, match)
                expected = request.acceptance[source].expected(len(tokens))
                if expected > value:
                    best, value = Proposal(tokens, source), expected
        if request.untried is not None and length > request.proposed_at:
            request.acceptance[request.untried].relax()
        request.untried, request.proposed_at = best.source if best.tokens else None, length
        request.misses = 0 if best.tokens else min(request.misses + 1, MAX_MISS_REST)
        request.next_look = length + request.misses
        return best

    def survival(self, request_id: str, source: DraftSource) -> tuple[float, ...]:
        """Return P(the draft is accepted up to and including position i), i from 0 on; never increasing."""
        return self._requests[request_id].acceptance[source].survival

    def judged(self, request_id: str, proposal: Proposal, accepted: int) -> None:
        """Learn that the first `accepted` tokens of a proposal were right and the next one, if any, was wrong.

        After a proposal without an accepted token, matches of its length give no drafts for 2, 4, ... 64 tokens. Drafts
        get longer as they are accepted, so that a wrong one costs little even if the latency model is wrong.
        """
        request = self._requests[request_id]
        request.untried = None
        request.acceptance[proposal.source].learn(len(proposal.tokens), accepted)
        request.longest = min(max(2 * accepted, LEAST_DRAFT), MAX_DRAFT)
        level = GRAMS.index(proposal.source.match)
        if accepted:
            request.failures[level] = 0
        else:
            request.failures[level] += 1
            request.rests[level] = request.length + min(2 ** request.failures[level], MAX_REST)

    def finish(self, request_id: str, completed: bool) -> None:
        """Forget a request, which may be unknown. The answer of a completed one feeds the drafts of later requests."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._behind.pop(request.context, None)
        if completed and request.context.is_read:
            answers = self._answers_of(request.corpus)
            self._behind[answers.add(request.context.tokens[request.num_prompt - LONGEST :])] = None

    def catch_up(self, most: int = 4096) -> bool:
        """Index up to `most` tokens of new prompts and finished answers. Return whether more are left.

        4,096 tokens take about 0.4 ms. Call it while a step runs.
        """
        while self._behind and most > 0:
            index = next(iter(self._behind))
            del self._behind[index]
            most -= max(1, index.index(min(most, SLICE)))
            if index.num_behind or not index.is_read:
                self._behind[index] = None
        return bool(self._behind)

    def _answers_of(self, corpus: Hashable) -> Answers:
        """Return a corpus, made if it is missing. Above MAX_CORPORA, drop the oldest one with a single answer, or the
        least recently fed one."""
        answers = self._corpora.get(corpus)
        if answers is None:
            if len(self._corpora) >= MAX_CORPORA:
                single = (key for key, each in self._corpora.items() if each.num_answers == 1)
                del self._corpora[next(single, next(iter(self._corpora)))]
            answers = self._corpora[corpus] = Answers()
        self._corpora.move_to_end(corpus)
        return answers

    def _acceptance_of(self, owner: Hashable) -> Acceptance:
        acceptance = self._owners.get(owner)
        if acceptance is None:
            acceptance = self._owners[owner] = Acceptance()
            if len(self._owners) > MAX_OWNERS:
                self._owners.popitem(last=False)
        self._owners.move_to_end(owner)
        return acceptance


def _common(tokens: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens up to the first difference."""
    count = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), len(tokens))
    return tokens[:count]
