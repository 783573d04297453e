"""Part of a context that the layers read: a layer with a sliding window reads only the last tokens.

Counts are means over the attention layers in whole tokens. They are rounded down per chunk, so that sums can be
subtracted exactly. They never decrease as a context grows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Reach:
    """Sliding windows of a model's layers.

    `kinds` holds pairs (window, number of layers), ascending by window. A window is the number of tokens that a query
    sees, itself included. Window 0 stands for full attention and comes last. Empty: all layers have full attention.
    Raises ValueError for an invalid list.
    """

    kinds: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        windows = [window for window, _ in self.kinds if window]
        if any(a >= b for a, b in zip((0, *windows), windows, strict=False)) or any(n < 1 for _, n in self.kinds):
            raise ValueError("windows must ascend from 1, each with at least one layer")
        if self.kinds and (not windows or any(window == 0 for window, _ in self.kinds[:-1])):
            raise ValueError("layers with full attention must come last, after layers with a window")

    @classmethod
    def of(cls, windows: Sequence[int | None]) -> "Reach":
        """Build a reach from the window of each layer (None: full attention)."""
        counts: dict[int, int] = {}
        for window in windows:
            counts[window or 0] = counts.get(window or 0, 0) + 1
        limited = sorted((window, count) for window, count in counts.items() if window)
        return cls((*limited, *((0, counts[0]) for _ in range(0 in counts)))) if limited else EVERYTHING

    @classmethod
    def parse(cls, text: str) -> "Reach":
        """Parse the result of `str`. Raises ValueError."""
        pairs = (kind.split("x") for kind in text.split())
        return cls(tuple((int(window), int(layers)) for layers, window in pairs))

    def __str__(self) -> str:
        return " ".join(f"{layers}x{window}" for window, layers in self.kinds)

    def tokens(self, start: int, length: int) -> int:
        """Return the tokens whose K and V a chunk of `length` ≥ 1 tokens after `start` reads, its own included."""
        end = start + length
        if not self.kinds:
            return end
        read = [layers * (min(end, window - 1 + length) if window else end) for window, layers in self.kinds]
        return sum(read) // self.num_layers

    def contexts(self, contexts: Iterable[int]) -> int:
        """Return the sum of tokens read by decodes with these context lengths, their own tokens included."""
        if not self.kinds:
            return sum(contexts)
        (window, layers), *others = self.kinds
        if any(other for other, _ in others):
            return sum([self.tokens(context - 1, 1) for context in contexts])
        total = self.num_layers  # fast path for a single window: called in every step for all running requests
        limited, rest = layers * window, total - layers
        return sum([(limited + rest * c) // total if c > window else c for c in contexts])

    def pairs(self, start: int, length: int) -> int:
        """Return the query-key pairs of a causal chunk within the windows."""
        if not self.kinds:
            return _pairs(start, length)
        total = 0
        for window, layers in self.kinds:
            growing = min(max(window - start, 0), length) if window else length
            total += layers * (_pairs(start, growing) + window * (length - growing))
        return total // self.num_layers

    def middles(self, start: int, length: int, chunk: int) -> Iterator[tuple[float, int]]:
        """Split [start, start + length) where the cost per chunk of `chunk` tokens changes its slope.

        Yields (share of the tokens, start of a chunk of average cost in that part). Within a window, the cost of a
        chunk grows with its start; beyond the window it is constant.
        """
        inside = [window for window, _ in self.kinds if start < window < start + length]
        edges = (start, *inside, start + length)
        for begin, end in pairwise(edges):
            yield (end - begin) / length, max(0, begin + (end - begin - chunk) // 2)

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return sum([layers for _, layers in self.kinds])


EVERYTHING = Reach()


def _pairs(start: int, length: int) -> int:
    return length * start + length * (length + 1) // 2
