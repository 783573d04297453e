"""Features of one step as running sums: the input of the latency model (HyGen §4.2, "Feature Engineering").

A chunk is (start, length), tokens [start, start + length) of a sequence. A chunk of length 1 is a decode at any
position, because the device runs it as one query row. The sums are Python integers, so that subtraction is exact.

`Reach` is the part of a context that the layers read: a layer with a sliding window reads only the last tokens. Counts
are means over the attention layers in whole tokens. They are rounded down per chunk, so that sums can be subtracted
exactly. They never decrease as a context grows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple, Protocol


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


class CacheWork(NamedTuple):
    """Work of one step for the cache: past tokens run from hidden state, tokens whose K and V are restored, bytes moved
    between device and host."""

    compact_tokens: int = 0
    restored_tokens: int = 0
    transferred_bytes: int = 0


@dataclass(slots=True)
class BatchFeatures:
    """Running sums of the step being built; every operation is O(1).

    Context tokens count as far as the layers read them, as a mean over the layers (see `Reach`).

    Attributes:
        num_tokens: T, all tokens of the step, decodes included.
        num_decodes: N_d.
        decode_context_sum: S_d, tokens that the decodes attend to, including their own.
        num_prefill_chunks: N_p.
        prefill_token_sum: S_p.
        attention_work: Query-key pairs of prefill chunks, Σ length·start + length·(length + 1)/2 without windows.
        compact_tokens: Context tokens read from compact (hidden) cache.
        restored_tokens: Tokens whose K and V are restored in this step.
        transferred_bytes: Bytes copied between host and device in this step.
        adapters: Number of distinct LoRA adapters.
        adapted_tokens: Tokens of chunks with an adapter.
        prefill_context_sum: Tokens that the prefill chunks attend to, start + length without windows. A short chunk
            after a long context reads all of it, and on a GPU few programs share that work.
        masks: 1 if a grammar or thinking budget limits any sample, else 0.
        masked_rows: Number of limited samples.
    """

    reach: Reach = field(default=EVERYTHING, compare=False)
    num_tokens: int = 0
    num_decodes: int = 0
    decode_context_sum: int = 0
    num_prefill_chunks: int = 0
    prefill_token_sum: int = 0
    attention_work: int = 0
    compact_tokens: int = 0
    restored_tokens: int = 0
    transferred_bytes: int = 0
    adapters: int = 0
    adapted_tokens: int = 0
    prefill_context_sum: int = 0
    masks: int = 0
    masked_rows: int = 0

    def add_decodes(self, count: int, context_sum: int) -> None:
        """Add `count` decodes whose contexts (own token included, within the windows) sum to `context_sum`."""
        self.num_tokens += count
        self.num_decodes += count
        self.decode_context_sum += context_sum

    def add_chunk(self, start: int, length: int) -> None:
        """Add one chunk of `length` ≥ 1 tokens after `start` computed tokens; length 1 counts as a decode."""
        assert start >= 0 and length >= 1, "a chunk needs start >= 0 and length >= 1"
        if length == 1:
            self.add_decodes(1, self.reach.tokens(start, 1))
            return
        self.num_tokens += length
        self.num_prefill_chunks += 1
        self.prefill_token_sum += length
        self.attention_work += self.reach.pairs(start, length)
        self.prefill_context_sum += self.reach.tokens(start, length)

    def add_cache_work(self, compact_tokens: int = 0, restored_tokens: int = 0, transferred_bytes: int = 0) -> None:
        """Add work on hidden state and the host tier; negative values subtract."""
        self.compact_tokens += compact_tokens
        self.restored_tokens += restored_tokens
        self.transferred_bytes += transferred_bytes

    @property
    def cache_work(self) -> CacheWork:
        """The work for the cache."""
        return CacheWork(self.compact_tokens, self.restored_tokens, self.transferred_bytes)

    def add_adapted(self, adapters: int, tokens: int) -> None:
        """Add LoRA adapters that are new in the step, and tokens of chunks with an adapter."""
        self.adapters += adapters
        self.adapted_tokens += tokens

    def add_masked(self, rows: int) -> None:
        """Add samples that a mask limits."""
        self.masked_rows += rows
        self.masks = int(self.masked_rows > 0)

    def copy(self) -> "BatchFeatures":
        """Return an independent copy."""
        return BatchFeatures(self.reach, *_sums(self))

    def row(self) -> tuple[int, ...]:
        """Return the sums in the order of `SUMS`, in which samples store them."""
        row: tuple[int, ...] = _sums(self)
        return row

    @classmethod
    def from_row(cls, row: Iterable[int], reach: Reach = EVERYTHING) -> "BatchFeatures":
        """Inverse of `row`."""
        return cls(reach, *row)


SUMS = tuple(each.name for each in fields(BatchFeatures))[1:]
"""The names of the sums of a step."""
_sums = attrgetter(*SUMS)


class LatencyPredictor(Protocol):
    """Predictions needed by a scheduler, in seconds. Implemented by `LatencyModel` and `OnlineModel`."""

    @property
    def reach(self) -> Reach:
        """Windows with which features count contexts; features passed to the model must use the same."""

    def likely(self) -> "LatencyPredictor":
        """Return the predictor without margins, at the fastest speed that is plausible for the next seconds."""

    def steady(self) -> "LatencyPredictor":
        """Return the predictor without margins, for the sum of many steps: their variations cancel out."""

    def predict(self, features: BatchFeatures) -> float:
        """Return the time of the whole step; of the empty step, the fixed cost of any step."""

    def usual(self, features: BatchFeatures) -> float:
        """Return the usual time of the whole step, without a margin."""

    def usual_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        """Return the time that `marginal_decodes` bounds, without a margin."""

    def marginal(self, features: BatchFeatures, start: int, length: int) -> float:
        """Return the time that the chunk (start, length) adds to the step."""

    def marginal_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        """Return the time that `count` decodes whose contexts, within the windows, sum to `context_sum` add."""

    def max_prefill(self, features: BatchFeatures, seconds: float, max_tokens: int, start: int) -> int:
        """Return the largest chunk length ≤ `max_tokens` after `start` that adds at most `seconds`; 0 if none fits.

        With padding, the result is an upper edge of a bucket if one fits, because padding tokens are nearly free.
        """

    def expected_prefill(self, features: BatchFeatures, limit: float, max_tokens: int, start: int) -> int:
        """Return the largest chunk with which the expected time of the step is at most `limit` seconds, without margin;
        0 if none fits."""

    def cache_work(
        self,
        compact_tokens: int = 0,
        restored_tokens: int = 0,
        transferred_bytes: int = 0,
        beside: BatchFeatures | None = None,
    ) -> float:
        """Return the time added by running from hidden state, restoring K and V, and transfers.

        With `beside`, fixed costs per step are included: added with the first token, subtracted with the last.
        """

    def adapter_work(self, adapters: int, tokens: int) -> float:
        """Return the time that further LoRA adapters, and tokens of chunks with an adapter, add to a step."""

    def mask_work(self, features: BatchFeatures, rows: int) -> float:
        """Return the time that `rows` further masked samples add, including the fixed cost of the first mask."""


def smallest_step(model: LatencyPredictor) -> float:
    """Return the seconds of a step with a single decode."""
    features = BatchFeatures(model.reach)
    features.add_decodes(1, 1)
    return model.predict(features)
