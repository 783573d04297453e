"""Kernels over a pool of 8 bits, or of blocks of both widths, against their twins.

Run by test_kernels.py in a process of its own.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases_attention import DECODE_TILE, PREFILL_TILE, prefill_scratch
from kernel_cases_cache import LENGTHS, TOKENS
from kernel_pool import DEVICE, NAN, PagedCache, fused_heads, index, paged_cache, random
from torch import Tensor

from engine.execution.pool import UnitPool
from engine.models import torch_ops as twin
from engine.models.byte_cells import FLOATS, INTEGERS, ByteSlices, dequantize, quantize, slice_elements
from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.prefill_attention import prefill_attention
from engine.triton_kernels.rope_cache_write import rope_cache_write
from engine.triton_kernels.work import DecodeWork, PrefillWork

CASES = [((64, 3, 2), torch.float16), ((80, 1, 3), torch.float32)]
"""(head_dim, group, kv_heads), type."""
CELLS = pytest.mark.parametrize("kind", [INTEGERS, FLOATS], ids=("int8", "fp8"))


def byte_cache(kind: torch.dtype, kv_heads: int, head_dim: int, block_size: int = 16) -> PagedCache:
    """A pool whose scales are all NaN; paired, as such pools are."""
    plain = paged_cache(
        LENGTHS, seed=1, dtype=torch.float32, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, paired=True
    )
    size = slice_elements(block_size, kv_heads, head_dim, kind)
    slices = ByteSlices(torch.zeros((len(plain.pool), size), dtype=kind, device=DEVICE), block_size, kv_heads, head_dim)
    slices.scales.fill_(NAN)
    return replace(plain, pool=slices.values)


def copy_of(cache: PagedCache) -> PagedCache:
    count, stride = len(cache.pool), cache.pool.stride(0)
    whole = cache.pool.as_strided((count, stride), (stride, 1)).clone()
    values = ByteSlices(whole, *cache.pool.shape[1:]).values
    return replace(cache, pool=values)


@CELLS
@pytest.mark.parametrize(("rotary", "dtype"), [(0, torch.float32), (32, torch.float16)], ids=str)
def test_what_is_written(rotary: int, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Steps and scales; where a rotated number lies between two steps, either. A token of NaN has scales of NaN."""
    generator = torch.Generator().manual_seed(rotary)
    cache, count = byte_cache(kind, 9, 64), len(TOKENS)
    q = fused_heads(generator, count, 9, 64, dtype)
    k, v = (fused_heads(generator, count, 9, 64, dtype) for _ in range(2))
    k[2, 3, 5], v[3, 8, 0], k[4, 1] = NAN, float("inf"), 0.0
    angle = torch.rand(50, rotary // 2, generator=generator) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE) if rotary else None
    rows, positions = (index([token[part] for token in TOKENS]) for part in (0, 1))
    expected, where = copy_of(cache), {"layer": cache.layer, "scratch_base": cache.scratch_base}
    norm = random(generator, 64, dtype=dtype)
    tables = (cache.k_table, cache.v_table)
    twin.rope_cache_write(q.clone(), k, v, cos_sin, positions, rows, expected.pool, *tables, **where, k_norm=norm)
    rope_cache_write(
        q, k, v, cos_sin, positions, rows, cache.pool, *cache.tables, **where, k_norm=norm, pair=cache.pair
    )
    ours, theirs = ByteSlices.of(cache.pool), ByteSlices.of(expected.pool)
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-2, atol=0, equal_nan=True)
    # the bits of floats of one sign are in their order, so that a step is one of them, too; both zeros are zero
    numbers = [
        torch.where(each.values == 128, 0, each.values.int()) if kind == FLOATS else each.values.int()
        for each in (ours, theirs)
    ]
    apart = (numbers[0] - numbers[1]).abs()[~theirs.scales.isnan()]
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.02
    assert (~theirs.scales.isnan()).sum() == 2 * 6 * 9 - 2


def filled(kind: torch.dtype, shape: tuple[int, int, int], seed: int) -> PagedCache:
    head_dim, _, kv_heads = shape
    cache, generator = byte_cache(kind, kv_heads, head_dim), torch.Generator().manual_seed(seed)
    for row, length in enumerate(LENGTHS):
        for table in (cache.k_table, cache.v_table):
            slots = index(cache.slots(table, row, length), torch.int64)
            ByteSlices.of(cache.pool).write(slots, random(generator, length, kv_heads, head_dim))
    return cache


LAYERS, LAYER, BLOCK = 3, 1, 16


def mixed_cache(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> tuple[PagedCache, PagedCache]:
    """A pool in which two full blocks of three are in 8 bits, and one in float32 that holds what those stand for. What
    nobody may read is NaN."""
    head_dim, _, kv_heads = shape
    blocks = -(-max(LENGTHS) // BLOCK)
    num_units, generator = 2 * len(LENGTHS) * blocks + 3, torch.Generator().manual_seed(seed)
    pools = [
        UnitPool(
            num_units, num_layers=LAYERS, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=head_dim, dtype=kind,
            device=DEVICE, preempted_int8=True,
        )
        for kind in (dtype, torch.float32)
    ]  # fmt: skip
    held = pools[0].compressed
    assert held is not None
    for pool in pools:
        pool.units.fill_(NAN)
    held.scales.fill_(NAN)
    order = torch.randperm(num_units, generator=generator)
    exact = (order[: 2 * len(LENGTHS) * blocks] * LAYERS).reshape(2, len(LENGTHS), blocks)
    mixed, units = exact.clone(), exact // LAYERS
    for row, length in enumerate(LENGTHS):
        for block in range(-(-length // BLOCK)):
            filled = min(BLOCK, length - block * BLOCK)
            pair = units[:, row, block]
            values = random(generator, 2, LAYERS, BLOCK, kv_heads, head_dim, dtype=dtype)
            values[:, :, filled:] = NAN
            is_narrow = filled == BLOCK and (row + block) % 3 < 2
            pools[0].units[pair] = values.flatten(1)
            if is_narrow:
                values = dequantize(*quantize(values), torch.float32)
                held.compress(pair[None].numpy())
                pools[0].units[pair[1]] = NAN
                mixed[:, row, block] = -1 - pair[0] * LAYERS
            pools[1].units[pair] = values.float().flatten(1)
    assert (mixed < 0).sum() >= 2 * 3
    caches = []
    for pool, tables in zip(pools, (mixed, exact), strict=True):
        view = pool.cells.view(-1, BLOCK, kv_heads, head_dim)
        caches.append(PagedCache(view, *tables.to(DEVICE, torch.int32).unbind(0), LAYER, pool.scratch_base))
    return caches[0], caches[1]


def decode_scratch(fill: float, kv_heads: int, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    partial, lse = (torch.full(shape, fill, device=DEVICE) for shape in ((9, heads, head_dim), (9, heads)))
    return partial, lse, torch.zeros((9, kv_heads), dtype=torch.int32, device=DEVICE)


def check_mixed(shape: tuple[int, int, int], dtype: torch.dtype, actual: Tensor, twins: Tensor, whole: Tensor) -> None:
    torch.testing.assert_close(twins, whole, rtol=1e-5, atol=1e-5)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(actual.float(), twins, rtol=tolerance, atol=tolerance)
    assert twins.isfinite().all() and twins.shape[2] == shape[0]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (0, 5.0)])
def test_decode_reads_blocks_of_both_widths(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int, softcap: float
) -> None:
    head_dim, group, kv_heads = shape
    (mixed, exact), heads = mixed_cache(shape, dtype, seed=7), kv_heads * group
    work = DecodeWork(4, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(8), 3, heads, head_dim, dtype)
    scratch = decode_scratch(NAN, kv_heads, heads, head_dim)
    where = {"layer": LAYER, "scale": head_dim**-0.5, "window": window, "softcap": softcap}
    where["scratch_base"] = mixed.scratch_base
    actual, *expected = torch.full_like(q, NAN), *(torch.full(q.shape, NAN, device=DEVICE) for _ in range(2))
    for cache, out, layers in ((mixed, expected[0], LAYERS), (exact, expected[1], 0)):
        tables = (cache.k_table, cache.v_table)
        twin.decode_attention(q.float(), cache.pool, *tables, work, *scratch, out, **where, mixed=layers)
    tables = (mixed.k_table, mixed.v_table)
    decode_attention(
        q, mixed.pool, *tables, work, *scratch, actual, **where, mixed=LAYERS, config=DECODE_TILE
    )  # fmt: skip
    check_mixed(shape, dtype, actual, *expected)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize(("slots", "window"), [(0, 0), (6, 0), (0, 20)])
def test_prefill_reads_blocks_of_both_widths(
    shape: tuple[int, int, int], dtype: torch.dtype, slots: int, window: int
) -> None:
    head_dim, group, kv_heads = shape
    (mixed, exact), heads = mixed_cache(shape, dtype, seed=9), kv_heads * group
    tile = PREFILL_TILE.block_n
    work = PrefillWork(8, 4 + slots, PREFILL_TILE.block_m // group, DEVICE, slots=slots, tile=tile, min_split=8)
    work.fill(np.array([(0, 0, 20, 0), (1, 20, 16, 32), (2, 36, 1, 32)], np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(10), 37, heads, head_dim, dtype)
    where = {"layer": LAYER, "scratch_base": mixed.scratch_base, "scale": head_dim**-0.5, "window": window}
    actual, *expected = torch.full_like(q, NAN), *(torch.full(q.shape, NAN, device=DEVICE) for _ in range(2))
    partial = prefill_scratch(work, q)
    for cache, out, layers in ((mixed, expected[0], LAYERS), (exact, expected[1], 0)):
        tables = (cache.k_table, cache.v_table)
        twin.prefill_attention(q.float(), cache.pool, *tables, work, *partial, out, **where, mixed=layers)
    tables = (mixed.k_table, mixed.v_table)
    prefill_attention(q, mixed.pool, *tables, work, *partial, actual, **where, mixed=LAYERS, config=PREFILL_TILE)
    check_mixed(shape, dtype, actual, *expected)


def test_scales_that_are_not_finite_stay_visible() -> None:
    """To the head of the row that sees them."""
    shape, dtype = CASES[1]
    (mixed, _), (head_dim, group, kv_heads) = mixed_cache(shape, dtype, seed=11), shape
    scales = mixed.pool.untyped_storage().nbytes() - 2 * 2 * (mixed.scratch_base - LAYERS) * BLOCK * kv_heads
    bits = torch.empty(0, dtype=torch.bfloat16, device=DEVICE).set_(mixed.pool.untyped_storage())[scales // 2 :]
    unit = (-1 - int(mixed.k_table[1][mixed.k_table[1] < 0][0])) // LAYERS
    bits.view(-1, 2, LAYERS, BLOCK, kv_heads)[unit, 1, LAYER, 3, 0] = NAN
    work = DecodeWork(4, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(8), 3, kv_heads * group, head_dim, dtype)
    scratch = decode_scratch(0.0, kv_heads, *q.shape[1:])
    tables, out = (mixed.k_table, mixed.v_table), torch.zeros_like(q)
    decode_attention(
        q, mixed.pool, *tables, work, *scratch, out, layer=LAYER, scratch_base=mixed.scratch_base, scale=0.1,
        mixed=LAYERS, config=DECODE_TILE,
    )  # fmt: skip
    assert out.isnan().all(-1).nonzero().tolist() == [[1, 0]] and out.isnan().any(-1).sum() == 1


def test_a_mixed_pool_has_its_scales_behind_it() -> None:
    shape, dtype = CASES[1]
    (mixed, _), (head_dim, group, kv_heads) = mixed_cache(shape, dtype, seed=11), shape
    work = DecodeWork(4, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    q = torch.zeros((3, kv_heads * group, head_dim), device=DEVICE)
    scratch = decode_scratch(0.0, kv_heads, *q.shape[1:])
    tables = (mixed.k_table, mixed.v_table)
    where = {"layer": 0, "scratch_base": mixed.scratch_base, "scale": 0.1, "mixed": LAYERS}
    with pytest.raises(AssertionError, match="of scales lie behind the pool"):
        decode_attention(q, mixed.pool.clone(), *tables, work, *scratch, q.clone(), **where)
    with pytest.raises(AssertionError, match="without scratch"):
        decode_attention(q, mixed.pool, *tables, work, *scratch, q.clone(), **where | {"scratch_base": 9})


@CELLS
@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_decode(shape: tuple[int, int, int], dtype: torch.dtype, kind: torch.dtype) -> None:
    head_dim, group, kv_heads = shape
    cache, heads = filled(kind, shape, seed=3), kv_heads * group
    work = DecodeWork(4, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(4), 3, heads, head_dim, dtype)
    scratch = decode_scratch(NAN, kv_heads, heads, head_dim)
    where = {"layer": cache.layer, "scratch_base": cache.scratch_base, "scale": head_dim**-0.5}
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    tables = (cache.k_table, cache.v_table)
    decode_attention(q, cache.pool, *cache.tables, work, *scratch, actual, **where, pair=cache.pair, config=DECODE_TILE)
    twin.decode_attention(q.float(), cache.pool, *tables, work, *scratch, expected, **where)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("slots", [0, 6])
@CELLS
def test_prefill(shape: tuple[int, int, int], dtype: torch.dtype, slots: int, kind: torch.dtype) -> None:
    head_dim, group, kv_heads = shape
    cache, heads = filled(kind, shape, seed=5), kv_heads * group
    tile = PREFILL_TILE.block_n
    work = PrefillWork(8, 4 + slots, PREFILL_TILE.block_m // group, DEVICE, slots=slots, tile=tile, min_split=8)
    work.fill(np.array([(0, 0, 20, 0), (1, 20, 16, 32), (2, 36, 1, 32)], np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(6), 37, heads, head_dim, dtype)
    where = {"layer": cache.layer, "scratch_base": cache.scratch_base, "scale": head_dim**-0.5}
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    tables = (cache.k_table, cache.v_table)
    partial = prefill_scratch(work, q)
    prefill_attention(
        q, cache.pool, *cache.tables, work, *partial, actual, **where, pair=cache.pair, config=PREFILL_TILE
    )
    twin.prefill_attention(q.float(), cache.pool, *tables, work, *partial, expected, **where)
    assert work.merging == (slots > 0)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slots", [0, 6])
def test_prefill_reads_no_scale_before_its_window(slots: int) -> None:
    """What lies there was given back, and may hold anything by now; the first tile begins before it."""
    window, (head_dim, group, kv_heads) = 10, CASES[0][0]
    cache, heads = filled(INTEGERS, (head_dim, group, kv_heads), seed=5), kv_heads * group
    scales = ByteSlices.of(cache.pool).scales
    for table in (cache.k_table, cache.v_table):
        lost = index(cache.slots(table, 1, 32 + 1 - window), torch.int64)
        scales[lost // cache.pool.shape[1], lost % cache.pool.shape[1]] = NAN
    tile = PREFILL_TILE.block_n
    work = PrefillWork(8, 4 + slots, PREFILL_TILE.block_m // group, DEVICE, slots=slots, tile=tile, min_split=8)
    work.fill(np.array([(1, 0, 16, 32)], np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(6), 16, heads, head_dim, torch.float32)
    where = {"layer": cache.layer, "scratch_base": cache.scratch_base, "scale": head_dim**-0.5, "window": window}
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    tables, partial = (cache.k_table, cache.v_table), prefill_scratch(work, q)
    prefill_attention(
        q, cache.pool, *cache.tables, work, *partial, actual, **where, pair=cache.pair, config=PREFILL_TILE
    )
    twin.prefill_attention(q, cache.pool, *tables, work, *partial, expected, **where)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert expected.isfinite().all()
