"""Arguments of attention over a paged pool, as plain data: the pool, and the variant of a layer."""

from typing import NamedTuple

from torch import Tensor

from engine.models.spec import ModelSpec


class Manner(NamedTuple):
    """Deviations of a layer's attention from softmax(q · k / sqrt(d)) · v.

    Attributes:
        scale: Replaces 1 / sqrt(d).
        window: A query sees itself and the window - 1 tokens before it.
        softcap: A score s becomes softcap · tanh(s / softcap), after the scale.
        sinks: [heads], a score per head that takes part in the softmax without a value; float32 for kernels.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Manner()


def manners_of(spec: ModelSpec) -> list[Manner]:
    """Return the variant of each layer."""
    return [Manner(spec.scale, spec.window_of(layer), spec.softcap) for layer in range(spec.num_layers)]


class PoolView(NamedTuple):
    """The pool as kernels read and write it (layout: `engine.triton_kernels.addressing`).

    Attributes:
        cells: [slices, block_size, kv_heads, head_dim], also 8-bit, or a view of wider cells.
        k_table: Block table of K, [rows, max_blocks].
        v_table: Block table of V; None in a paired pool.
        scratch_base: First scratch slice.
        pair: Slices from K to V of a block in a paired pool; else 0.
    """

    cells: Tensor
    k_table: Tensor
    v_table: Tensor | None
    scratch_base: int
    pair: int = 0
