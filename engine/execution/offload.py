"""Which layers of a model stay in a stated amount of memory, and which stream in every step. Torch-free.

Whole layers: embeddings, the head, norms and biases always stay, and two buffers hold layers that pass through.
Sizes are those of the widest layout of a matrix (the CPU kernels' panels), so that no backend needs more.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.models.spec import ModelSpec

BUFFERS = 2
"""One computes while the other is filled."""
FEWEST_STREAMED = BUFFERS + 1
"""As many layers as there are buffers could stay in their place."""
_PANEL, _PAGE = 32, 4096
_INT8_SCALES = 8  # bytes of an output beside its integers


@dataclass(frozen=True, slots=True)
class Offload:
    """`streamed`: indices of the layers that do, ascending. Bytes: `held` in memory, buffers included, of at most
    `budget`; `layer` of one layer's matrices."""

    budget_bytes: int
    held_bytes: int
    layer_bytes: int
    num_layers: int
    streamed: tuple[int, ...]

    @property
    def streamed_bytes(self) -> int:
        """What passes through in every step."""
        return len(self.streamed) * self.layer_bytes

    def __str__(self) -> str:
        return f"{len(self.streamed)} of {self.num_layers} layers stream"


def plan_offload(spec: ModelSpec, itemsize: int, quantization: str, budget: int) -> Offload | None:
    """The fewest layers that must stream for the weights to take at most `budget` bytes; None: all of them stay.

    `itemsize`: bytes of a value of embeddings and norms, and of matrices that are not quantised. Raises ConfigError
    where not even the parts that must stay fit.
    """
    layer = sum(_round(matrix_bytes(n, k, itemsize, quantization), 64) for n, k in _matrices(spec))
    fixed, count = fixed_bytes(spec, itemsize, quantization), spec.num_layers
    if fixed + count * layer <= budget:
        return None
    buffers = BUFFERS * _round(layer, _PAGE)
    stay = (budget - fixed - buffers) // layer if budget >= fixed + buffers else -1
    stay = min(stay, count - FEWEST_STREAMED)
    if stay < 0:
        least = fixed + min(buffers, count * layer)
        raise ConfigError(
            f"--offload-weights {budget / 2**30:.3g} is too little: embeddings, the head and {BUFFERS} buffers of a "
            f"layer take {least / 2**30:.3g} GiB"
        )
    held = fixed + buffers + stay * layer
    return Offload(budget, held, layer, count, spread(count, count - stay))


def spread(num_layers: int, num_streamed: int) -> tuple[int, ...]:
    """Indices of so many layers of `num_layers`, as far apart as they can be: what stays gives reading its time."""
    return tuple((place + 1) * num_layers // num_streamed - 1 for place in range(num_streamed))


def matrix_bytes(n: int, k: int, itemsize: int, quantization: str) -> int:
    """A weight [n, k] in panels."""
    outputs, inputs = _round(n, _PANEL), _round(k, _PANEL)
    return outputs * (inputs * itemsize if quantization == "none" else inputs + _INT8_SCALES)


def fixed_bytes(spec: ModelSpec, itemsize: int, quantization: str) -> int:
    """Embeddings, the head beside them (packed apart even where it is tied), and norms and biases, as they are and once
    more as floats."""
    hidden = spec.hidden_size
    embeddings = spec.vocab_size * hidden
    if spec.position_offset is not None:
        embeddings += (spec.max_position_embeddings + spec.position_offset) * hidden
    head = matrix_bytes(spec.vocab_size, hidden, itemsize, quantization)
    matrices = spec.num_layers * sum(n * k for n, k in _matrices(spec))
    if not spec.tie_word_embeddings:
        matrices += spec.vocab_size * hidden
    small = spec.num_parameters - embeddings - matrices
    return embeddings * itemsize + head + small * (itemsize + 4) + _qk_norms(spec) * (itemsize + 4)


def _qk_norms(spec: ModelSpec) -> int:
    """Values of q and k norms, which are kept once for every head."""
    return spec.num_layers * (spec.num_heads + spec.num_kv_heads) * spec.head_dim if spec.qk_norm else 0


def _matrices(spec: ModelSpec) -> Iterator[tuple[int, int]]:
    """Outputs and inputs of a layer's matrices."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    yield spec.q_size + 2 * spec.kv_size, hidden
    yield hidden, spec.q_size
    yield ffn * (2 if spec.gated_mlp else 1), hidden
    yield hidden, ffn


def _round(value: int, step: int) -> int:
    return -(-value // step) * step
