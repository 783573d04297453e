"""Where a token lies in the pool (see engine.triton_kernels.addressing for the layout), in torch."""

from torch import Tensor


def token_slots(table: Tensor, rows: Tensor, positions: Tensor, pool: Tensor, layer: int, scratch_base: int) -> Tensor:
    """[n] int64 indices into `pool.flatten(0, 1)` of tokens at `positions` of the requests in `rows` of `table`."""
    block_size = pool.shape[1]
    entries = table[rows.long(), positions.long() // block_size].long()
    slices = (entries + layer).where(entries >= 0, scratch_base - 1 - entries)
    return slices * block_size + positions.long() % block_size
