"""Features of one step as running sums: the input of the latency model (HyGen §4.2, "Feature Engineering").

A chunk is (start, length), tokens [start, start + length) of a sequence. A chunk of length 1 is a decode at any
position, because the device runs it as one query row. The sums are Python integers, so that subtraction is exact.
"""

from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Protocol

from predictor.reach import EVERYTHING, Reach


class FeatureRow(NamedTuple):
    """The sums of one step, in the order in which samples store them."""

    num_tokens: int
    num_decodes: int
    decode_context_sum: int
    num_prefill_chunks: int
    prefill_token_sum: int
    attention_work: int
    compact_tokens: int
    restored_tokens: int
    transferred_bytes: int
    adapters: int
    adapted_tokens: int
    prefill_context_sum: int = 0
    masks: int = 0
    masked_rows: int = 0


class CacheWork(NamedTuple):
    """Work of one step for the cache: past tokens run from hidden state, tokens whose K and V are restored, bytes moved
    between device and host."""

    compact_tokens: int = 0
    restored_tokens: int = 0
    transferred_bytes: int = 0


_sums = attrgetter(*FeatureRow._fields)


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

    def row(self) -> FeatureRow:
        """Return the sums as a tuple."""
        return FeatureRow._make(_sums(self))

    @classmethod
    def from_row(cls, row: FeatureRow, reach: Reach = EVERYTHING) -> "BatchFeatures":
        """Inverse of `row`."""
        return cls(reach, *row)


class LatencyPredictor(Protocol):
    """Predictions needed by a scheduler, in seconds. Implemented by `LatencyModel` and `OnlineModel`."""

    @property
    def reach(self) -> Reach:
        """Windows with which features count contexts; features passed to the model must use the same."""

    def likely(self) -> "LatencyPredictor":
        """Return the predictor without margins, at the fastest speed that is plausible for the next seconds."""

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
