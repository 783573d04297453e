"""Fill the library's structures from a pool of blocks and a table of rows."""

from typing import Any

from engine.arrays import IntArray
from engine.execution.cpu.native.library import CacheType, TapeShape, TapeStep
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable


def shape_over(pool: UnitPool, rows: RowTable, max_model_len: int, **model: Any) -> TapeShape:
    """Return the shape of the cache, completed by properties of the model."""
    return TapeShape(
        layers=pool.num_layers,
        cell=pool.num_kv_heads * pool.head_dim,
        block_size=pool.block_size,
        pool_units=pool.num_units,
        num_rows=rows.num_rows,
        max_blocks=rows.k_table.shape[1],
        max_positions=min(max_model_len, rows.tokens.shape[1]),
        int8_cache=_cache_type(pool),
        **model,
    )


def step_over(pool: UnitPool, rows: RowTable, chunks: IntArray, **results: Any) -> TapeStep:
    """Return a step of chunks [n, 4], int64, contiguous, kept alive by the caller; `results`: their addresses."""
    return TapeStep(
        num_chunks=len(chunks),
        token_stride=rows.tokens.shape[1],
        table_stride=rows.k_table.shape[1],
        chunks=chunks.ctypes.data,
        tokens=rows.tokens.ctypes.data,
        k_table=rows.k_table.ctypes.data,
        v_table=rows.v_table.ctypes.data,
        num_blocks=rows.num_blocks.ctypes.data,
        pool=pool.slices.data_ptr(),
        **results,
    )


def _cache_type(pool: UnitPool) -> CacheType:
    return CacheType.EXACT if pool.bytes is None else CacheType.INT8
