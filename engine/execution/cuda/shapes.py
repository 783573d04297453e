"""Step shapes: a few sizes to which steps are padded, so that one CUDA graph serves every step of its bucket.

Torch-free.
"""

from bisect import bisect_left
from dataclasses import dataclass

GRAPH_TOKENS = 2048
"""Maximum number of tokens of a step with a graph; kernels of larger steps are long enough to hide their launches."""

_GRAPH_BYTES = 16 * 1024**2
"""Estimate of the driver's memory for a graph of a few hundred kernels."""


@dataclass(frozen=True, slots=True, order=True)
class PaddedShape:
    """Shape of a step.

    Attributes:
        tokens: Number of tokens, including padding.
        decodes: Number of leading tokens that the decode kernel handles.
        prefill: Whether there may be longer chunks.
        samples: Maximum number of sampled tokens.
        exact: Made for a single step instead of a bucket.
    """

    tokens: int
    decodes: int
    prefill: bool
    samples: int
    exact: bool = False

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel, `begin_step`, writes positions and work list: in the buckets of decodes."""
        return not self.prefill and not self.exact


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Return the padded numbers of decodes, about an eighth apart for large batches, up to `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, max(max_num_seqs, 320) + 1, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_buckets(max_num_batched_tokens: int) -> list[int]:
    """Return the padded numbers of tokens of steps with prefill chunks, up to `GRAPH_TOKENS`."""
    sizes = [16, 32, *range(64, 641, 64), *range(768, 1025, 128), *range(1280, GRAPH_TOKENS + 1, 256)]
    limit = min(max_num_batched_tokens, GRAPH_TOKENS)
    return [size for size in sizes if size < limit] + [limit]


def graph_bytes(num_shapes: int, step_bytes: int, max_tokens: int) -> int:
    """Return the memory of the graphs: `step_bytes` of the largest step, scaled to the largest graph, shared by all."""
    largest = min(max_tokens, GRAPH_TOKENS)
    return num_shapes * _GRAPH_BYTES + -(-step_bytes * largest // max_tokens)


class Buckets:
    """Step shapes of an engine with at most `max_num_seqs` requests and `max_num_batched_tokens` tokens per step."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._decode = decode_buckets(max_num_seqs)
        self._mixed = mixed_buckets(max_num_batched_tokens)

    def all_shapes(self) -> list[PaddedShape]:
        """Return all buckets, the largest first, so that later graphs fit into the memory of earlier ones."""
        decode = [PaddedShape(size, size, False, size) for size in self._decode]
        return sorted([*decode, *map(self._mixed_shape, self._mixed)], reverse=True)

    def fit(self, num_tokens: int, num_decodes: int) -> PaddedShape:
        """Return the smallest shape that holds a step; beyond the buckets, a shape of its exact size."""
        if num_tokens == num_decodes:
            size = self._decode[bisect_left(self._decode, num_tokens)]
            return PaddedShape(size, size, False, size)
        if num_tokens <= self._mixed[-1]:
            return self._mixed_shape(self._mixed[bisect_left(self._mixed, num_tokens)])
        return self.exact(num_tokens, num_decodes)

    def exact(self, num_tokens: int, num_decodes: int) -> PaddedShape:
        """Return a shape without padded tokens."""
        return PaddedShape(num_tokens, num_decodes, True, min(num_tokens, self.max_num_seqs), exact=True)

    def _mixed_shape(self, size: int) -> PaddedShape:
        # A prompt chunk has at least two tokens, so the number of decodes is below `size`.
        capacity = min(size, self.max_num_seqs)
        return PaddedShape(size, capacity, True, capacity)
