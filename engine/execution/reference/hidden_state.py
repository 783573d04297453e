"""Torch twins of the hidden-state kernels."""

from torch import Tensor

from engine.execution.reference.addressing import token_slots


def hidden_write(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Store x[i] in the pool; rows[i] < 0: skip. Shapes as in the kernel's wrapper."""
    real = rows >= 0
    slots = token_slots(table, rows[real], positions[real], pool, layer, scratch_base)
    pool.view(-1, pool.shape[2] * pool.shape[3])[slots, : x.shape[1]] = x[real]


def hidden_gather(
    out: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """out[i] = what `hidden_write` stored; rows[i] < 0: zeros. Shapes as in the kernel's wrapper."""
    real = rows >= 0
    slots = token_slots(table, rows[real], positions[real], pool, layer, scratch_base)
    out.zero_()
    out[real] = pool.view(-1, pool.shape[2] * pool.shape[3])[slots, : out.shape[1]]
