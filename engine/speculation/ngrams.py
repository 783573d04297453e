"""An index of the n-grams of a token sequence, in arrays.

The index answers one question: where did the last 8, 4 or 2 tokens occur before, latest first? Each length has a table
of the newest position by hash and a chain to the next older position of the same hash, as in LZ77 compressors. Hashes
only select candidates; every match is compared with the tokens. A token costs 16 bytes and a slot 12 bytes, about a
tenth of a suffix automaton in dicts.

A position is the index of the token that follows an n-gram. It is indexed once that token is known.
"""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

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
        for heads, chain, values in zip(self._heads, self._chains, (eight, four[4:], two[6:]), strict=True):
            for position, value in enumerate(values, begin):
                slot = value >> shift
                chain.append(heads[slot])
                heads[slot] = position

    def _link_many(self, begin: int, end: int) -> None:
        """Do the same as `_link_few`, faster for many positions."""
        window = np.frombuffer(self.tokens, np.int32)[begin - LONGEST : end - 1].astype(np.uint32)
        p, q = np.uint32(_P), np.uint32(_Q)
        two = window[:-1] * p + window[1:] * q
        four = two[:-2] * p + two[2:] * q
        eight = four[:-4] * p + four[4:] * q
        positions = np.arange(begin, end)
        for heads, chain, values in zip(self._heads, self._chains, (eight, four[4:], two[6:]), strict=True):
            keys = np.sort((values >> np.uint32(self._shift)).astype(np.int64) << 32 | positions)
            slots, ordered = keys >> 32, keys & _MASK
            table = np.frombuffer(heads, np.int32)
            older = table[slots]  # right for the first position of a slot
            same = slots[1:] == slots[:-1]
            older[1:][same] = ordered[:-1][same]
            table[slots] = ordered  # of equal slots the last one, the newest position, remains
            links = np.empty(end - begin, np.int32)
            links[ordered - begin] = older
            chain.frombytes(links.tobytes())
