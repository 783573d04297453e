"""Selection of the layers that are streamed in every step, for a given amount of memory. Torch-free.

Layers are streamed whole. Embeddings, head, norms and biases stay in memory, and two buffers hold layers in passage.
Sizes are those of the widest layout of a matrix (the panels of the CPU kernels), so that they suffice for any backend.
"""

from dataclasses import dataclass

from engine.errors import ConfigError
from engine.models.spec import ModelSpec

BUFFERS = 2
"""Number of buffers: one is computed with while the other is filled."""
FEWEST_STREAMED = BUFFERS + 1
"""Minimum number of streamed layers; up to BUFFERS layers could stay in place of the buffers."""
_PANEL, _PAGE = 32, 4096
_INT8_SCALES = 8  # bytes per output in addition to the integers


@dataclass(frozen=True, slots=True)
class Offload:
    """Selection of streamed layers.

    Attributes:
        held_bytes: Memory used, including buffers.
        layer_bytes: Bytes of the matrices of one layer.
        streamed: Indices of streamed layers, ascending.
    """

    budget_bytes: int
    held_bytes: int
    layer_bytes: int
    num_layers: int
    streamed: tuple[int, ...]

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are streamed in every step."""
        return len(self.streamed) * self.layer_bytes

    def __str__(self) -> str:
        return f"{len(self.streamed)} of {self.num_layers} layers stream"


def plan_offload(spec: ModelSpec, itemsize: int, quantization: str, budget: int) -> Offload | None:
    """Select the fewest layers to stream such that the weights take at most `budget` bytes; None: all layers stay.

    `itemsize`: bytes of a value of embeddings, norms and unquantised matrices. Raises ConfigError if the budget is too
    small even with all layers streamed.
    """
    layer = sum(_round(matrix_bytes(n, k, itemsize, quantization), 64) for n, k in spec.matrices)
    fixed, count = fixed_bytes(spec, itemsize, quantization), spec.num_layers
    if fixed + count * layer <= budget:
        return None
    buffers = BUFFERS * _round(layer, _PAGE)
    stay = (budget - fixed - buffers) // layer if budget >= fixed + buffers else -1
    stay = min(stay, count - FEWEST_STREAMED)
    if stay < 0:
        least = fixed + min(buffers, count * layer)
        raise ConfigError(
            f"--offload-weights {budget / 2**30:.3g} is too small; embeddings, the head and {BUFFERS} buffers of a "
            f"layer take {least / 2**30:.3g} GiB"
        )
    held = fixed + buffers + stay * layer
    return Offload(budget, held, layer, count, spread(count, count - stay))


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Return the indices of the streamed layers, evenly spaced, so that resident layers give reads time."""
    return tuple((place + 1) * num_layers // num_streamed - 1 for place in range(num_streamed))


def matrix_bytes(n: int, k: int, itemsize: int, quantization: str) -> int:
    """Return the bytes of a weight [n, k] in panels, of 4 bits in the smallest groups."""
    outputs, inputs = _round(n, _PANEL), _round(k, _PANEL)
    if quantization == "int4" and k % _PANEL == 0:
        return outputs * int4_bytes(k, _PANEL)
    return outputs * (inputs * itemsize if quantization == "none" else inputs + _INT8_SCALES)


def int4_bytes(k: int, group: int) -> int:
    """Return the bytes of one output of a weight of 4 bits: its values, a scale and a zero point per group, a power of
    two."""
    return k // 2 + 3 * (k // group) + 4


def fixed_bytes(spec: ModelSpec, itemsize: int, quantization: str) -> int:
    """Return the bytes of embeddings, head (packed separately even if tied), and norms and biases, which are kept in
    their type and as floats."""
    hidden = spec.hidden_size
    embeddings = spec.vocab_size * hidden
    if spec.family.position_offset is not None:
        embeddings += (spec.max_position_embeddings + spec.family.position_offset) * hidden
    head = matrix_bytes(spec.vocab_size, hidden, itemsize, "int8" if quantization == "int4" else quantization)
    matrices = spec.num_layers * sum(n * k for n, k in spec.matrices)
    if not spec.tie_word_embeddings:
        matrices += spec.vocab_size * hidden
    small = spec.num_parameters - embeddings - matrices
    if spec.family.qk_norm:  # repeated for every head
        small += spec.num_layers * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return embeddings * itemsize + head + small * (itemsize + 4)


def _round(value: int, step: int) -> int:
    return -(-value // step) * step
