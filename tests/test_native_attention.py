"""Attention of transformers' modules by the native library against its twin in torch, call by call."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from devices import pool_of
from native_build import library_of
from torch import Tensor

from engine.execution.cpu.device import PagedAttention, arrange
from engine.execution.cpu.native.attention import NativeAttention
from engine.execution.cpu.native.library import Level, StepError, Team
from engine.execution.cpu.native.linear import Native
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.limits import Limits
from engine.models.attention import Manner

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]  # the first test may have to build the library

LENGTH, BLOCK, ROWS = 1200, 16, 3


class Layer(NamedTuple):
    """Heads and KV heads, the widths of K and V, and the manner of attention."""

    heads: int
    kv_heads: int
    dims: tuple[int, int]
    manner: Manner = Manner()


LAYERS = (
    Layer(4, 4, (48, 32), Manner(scale=0.2)),
    Layer(4, 2, (32, 64)),
    Layer(4, 4, (48, 32), Manner(scale=0.2, window=21, softcap=3.0)),
    Layer(6, 2, (40, 96), Manner(sinks=torch.linspace(-2, 2, 6))),
    Layer(6, 2, (40, 96), Manner(sinks=torch.linspace(1, -4, 6))),
    Layer(4, 2, (32, 64), Manner(chunk=50)),
    Layer(6, 2, (40, 96), Manner(sinks=torch.linspace(-2, 2, 6), chunk=64)),
)
STEPS = (
    ((0, 0, 70), (1, 0, 9)),
    ((1, 9, 5), (0, 70, 1), (2, 0, 16)),
    ((0, 71, 1), (1, 14, 1), (2, 16, 1)),
    ((2, 17, 600),),  # more tokens than the buffers had rows
    ((2, 617, 530), (0, 72, 3)),
    ((0, 75, 1), (2, 1147, 1), (1, 15, 20)),  # a context that is split
)
"""Chunks (row, start, length) of each step."""
LEVELS = [(Level.AVX2, torch.float32), (Level.AVX512, torch.bfloat16), (Level.AVX512, torch.float16)]
LEVELS += [(Level.BF16, torch.bfloat16), (Level.AMX, torch.bfloat16)]


def cache(dtype: torch.dtype) -> tuple[UnitPool, RowTable]:
    """A pool of NaN, in cells wide enough for every layer, and rows whose blocks are scattered over it."""
    per_row = LENGTH // BLOCK
    units = 2 * ROWS * per_row
    pool = pool_of(units, len(LAYERS), BLOCK, 1, 192, dtype)
    pool.units[:units].fill_(math.nan)
    rows = RowTable(Limits(ROWS, ROWS, LENGTH, num_units=1, block_size=BLOCK))
    order = np.random.default_rng(0).permutation(units).reshape(2, ROWS, per_row)
    rows.num_blocks[:] = per_row
    rows.k_table[:, :per_row], rows.v_table[:, :per_row] = order
    return pool, rows


def draw(count: int, heads: int, dim: int, seed: int, dtype: torch.dtype) -> Tensor:
    """[count, heads, dim], not contiguous, as modules give it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, count, dim, generator=generator).to(dtype).transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("level", "dtype"), LEVELS)
def test_what_torch_gives(level: Level, dtype: torch.dtype) -> None:
    """Layers of several shapes of heads in one pool. The cells that were written are torch's bit by bit."""
    library = library_of(level)
    native = Native(library, level, Team(library, 2))
    (pool, rows), (twin, twin_rows) = cache(dtype), cache(dtype)
    twin.units.zero_()  # it reads blocks whole
    attention, seed = NativeAttention(native, pool, rows, LENGTH), 0
    for step in STEPS:
        chunks = np.array([(*chunk, 0) for chunk in step], dtype=np.int64)
        batch, count = arrange(chunks, twin_rows, 1), int(chunks[:, 2].sum())
        order = [step.index(chunk) for chunk in map(tuple, batch.layout.chunks[:, :3].tolist())]
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        places = torch.from_numpy(np.concatenate([firsts[i] + np.arange(chunks[i, 2]) for i in order]))
        attention.begin(chunks)
        by_torch = PagedAttention(twin, twin_rows, batch)
        for index, (heads, kv_heads, dims, manner) in enumerate(LAYERS):
            seed += 3
            q, k = draw(count, heads, dims[0], seed, dtype), draw(count, kv_heads, dims[0], seed + 1, dtype)
            v = draw(count, kv_heads, dims[1], seed + 2, dtype)
            gathered = attention(index, q, k, v, manner)
            expected = by_torch(index, q[places], k[places], v[places], manner)
            assert gathered.dtype == dtype and gathered.shape == (count, heads * dims[1])
            allowed = 4 * torch.finfo(dtype).eps * (expected.float().abs() + 0.5) + 1e-5
            wrong = (gathered[places].float() - expected.float()).abs() > allowed
            assert not bool(wrong.any()), (step, index, int(wrong.sum()))
    for row, end in ((0, 76), (1, 35), (2, 1148)):
        for index, (_, kv_heads, dims, _) in enumerate(LAYERS):
            for table, dim in zip((rows.k_table, rows.v_table), dims, strict=True):
                blocks = torch.from_numpy(table[row] * len(LAYERS) + index)
                ours, theirs = (each.slices[blocks].view(-1, 192)[:end, : kv_heads * dim] for each in (pool, twin))
                assert torch.equal(ours, theirs)


def test_a_block_outside_of_the_pool_is_refused() -> None:
    library = library_of(Level.AVX2)
    pool, rows = cache(torch.float32)
    attention = NativeAttention(Native(library, Level.AVX2, Team(library, 1)), pool, rows, LENGTH)
    rows.v_table[0, 0] = pool.num_units
    attention.begin(np.array([(0, 0, 1, 0)]))
    q, k, v = (draw(1, 4, width, 0, torch.float32) for width in (48, 48, 32))
    with pytest.raises(StepError, match="outside of the pool"):
        attention(0, q, k, v, LAYERS[0].manner)
    assert bool(pool.units[: pool.num_units].isnan().all())
