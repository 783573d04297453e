"""What of a context is read: a layer with a sliding window reads the last tokens of it alone.

Counts are means over the layers that attend, in whole tokens (rounded down, each chunk by itself, so that sums of them
can be taken back exactly). They never fall when a context grows. Knows nothing of models or devices.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Reach:
    """`kinds`: (window, layers with it), ascending by window, which is the tokens that a query sees, itself included;
    0, the last: all before it. Empty: every layer sees all. Raises ValueError for what is no such list."""

    kinds: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        windows = [window for window, _ in self.kinds if window]
        if any(a >= b for a, b in zip((0, *windows), windows, strict=False)) or any(n < 1 for _, n in self.kinds):
            raise ValueError("windows must ascend from 1 and have a layer at least")
        if self.kinds and (not windows or any(window == 0 for window, _ in self.kinds[:-1])):
            raise ValueError("layers that see all come last, behind those that have a window")

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "Reach":
        """By the windows of all layers, None for those without; an empty list: no layer has one."""
        counts: dict[int, int] = {}
        for window in windows:
            counts[window or 0] = counts.get(window or 0, 0) + 1
        limited = sorted((window, count) for window, count in counts.items() if window)
        return cls((*limited, *((0, counts[0]) for _ in range(0 in counts)))) if limited else EVERYTHING

    @classmethod
    def parse(cls, text: str) -> "Reach":
        """Inverse of `str`. Raises ValueError."""
        pairs = (kind.split("x") for kind in text.split())
        return cls(tuple((int(window), int(layers)) for layers, window in pairs))

    def __str__(self) -> str:
        return " ".join(f"{layers}x{window}" for window, layers in self.kinds)

    def tokens(self, start: int, length: int) -> int:
        """Tokens whose K and V a chunk of `length` ≥ 1 tokens behind `start` reads, its own included."""
        end = start + length
        if not self.kinds:
            return end
        read = [layers * (min(end, window - 1 + length) if window else end) for window, layers in self.kinds]
        return sum(read) // self.num_layers

    def contexts(self, contexts: Iterable[int]) -> int:
        """The same of decodes with contexts of so many tokens, their own included: the sum."""
        if not self.kinds:
            return sum(contexts)
        (window, layers), *others = self.kinds
        if any(other for other, _ in others):
            return sum([self.tokens(context - 1, 1) for context in contexts])
        total = self.num_layers  # (one window, as models have it: every step asks this for all that run)
        limited, rest = layers * window, total - layers
        return sum([(limited + rest * c) // total if c > window else c for c in contexts])

    def pairs(self, start: int, length: int) -> int:
        """Query-key pairs of a causal chunk: every token attends to as many before it as windows let it, and itself."""
        if not self.kinds:
            return _pairs(start, length)
        total = 0
        for window, layers in self.kinds:
            growing = min(max(window - start, 0), length) if window else length
            total += layers * (_pairs(start, growing) + window * (length - growing))
        return total // self.num_layers

    def middles(self, start: int, length: int, chunk: int) -> Iterator[tuple[float, int]]:
        """Tokens [start, start + length) in chunks of `chunk`: (share of the tokens, start of a chunk that costs what
        those chunks cost on average). Up to a window a chunk's past grows with its start, and behind it no more."""
        inside = [window for window, _ in self.kinds if start < window < start + length]
        edges = (start, *inside, start + length)
        for begin, end in pairwise(edges):
            yield (end - begin) / length, max(0, begin + (end - begin - chunk) // 2)

    @property
    def num_layers(self) -> int:
        """Of all kinds."""
        return sum([layers for _, layers in self.kinds])


EVERYTHING = Reach()


def _pairs(start: int, length: int) -> int:
    return length * start + length * (length + 1) // 2
