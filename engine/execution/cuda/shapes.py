"""Step shapes: the few sizes to which steps are padded, so that one CUDA graph serves every step of its bucket.

Torch-free. Knows nothing of models, memory or what runs in a step.
"""

from bisect import bisect_left
from dataclasses import dataclass

GRAPH_TOKENS = 2048
"""Steps of more tokens run without a graph: their kernels are long enough to hide their launches."""


@dataclass(frozen=True, slots=True, order=True)
class StepShape:
    """`tokens` of a step with its padding, the first `decodes` of them handled by the decode kernel. `prefill`: whether
    there may be longer chunks; `samples`: how many tokens can be sampled; `exact`: made for one step, of no bucket."""

    tokens: int
    decodes: int
    prefill: bool
    samples: int
    exact: bool = False


def decode_buckets(max_num_seqs: int) -> list[int]:
    """Numbers of decodes: fine where a step is short, an eighth apart where it is long. Ends with `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    sizes += range(320, max(max_num_seqs, 320) + 1, 64)
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_buckets(max_num_batched_tokens: int) -> list[int]:
    """Numbers of tokens of steps with prefill chunks, up to `GRAPH_TOKENS`."""
    sizes = [16, 32, *range(64, 641, 64), *range(768, 1025, 128), *range(1280, GRAPH_TOKENS + 1, 256)]
    limit = min(max_num_batched_tokens, GRAPH_TOKENS)
    return [size for size in sizes if size < limit] + [limit]


class Buckets:
    """The shapes of an engine of at most `max_num_seqs` requests and `max_num_batched_tokens` tokens in a step."""

    def __init__(self, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.max_num_seqs = max_num_seqs
        self._decode = decode_buckets(max_num_seqs)
        self._mixed = mixed_buckets(max_num_batched_tokens)

    def all_shapes(self) -> list[StepShape]:
        """Every bucket, the largest first: graphs captured later find room in the memory of earlier ones."""
        decode = [StepShape(size, size, False, size) for size in self._decode]
        return sorted([*decode, *map(self._mixed_shape, self._mixed)], reverse=True)

    def fit(self, num_tokens: int, num_decodes: int) -> StepShape:
        """The smallest shape that holds a step; beyond the buckets one of the step's own size."""
        if num_tokens == num_decodes:
            size = self._decode[bisect_left(self._decode, num_tokens)]
            return StepShape(size, size, False, size)
        if num_tokens <= self._mixed[-1]:
            return self._mixed_shape(self._mixed[bisect_left(self._mixed, num_tokens)])
        return self.exact(num_tokens, num_decodes)

    def exact(self, num_tokens: int, num_decodes: int) -> StepShape:
        """A shape without padded tokens."""
        return StepShape(num_tokens, num_decodes, True, min(num_tokens, self.max_num_seqs), exact=True)

    def _mixed_shape(self, size: int) -> StepShape:
        # one request's chunk is at least two tokens long, so that many decodes at most stand beside one
        capacity = min(size, self.max_num_seqs)
        return StepShape(size, capacity, True, capacity)
