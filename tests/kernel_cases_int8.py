"""Kernels over a pool of 8 bits, against their twins.

Run by test_kernels.py in a process of its own.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_cases_attention import DECODE_TILE, PREFILL_TILE, prefill_scratch
from kernel_cases_cache import LENGTHS, TOKENS
from kernel_pool import DEVICE, NAN, PagedCache, fused_heads, index, paged_cache, random

from engine.models.attention import Manner
from engine.models.byte_cells import INTEGERS, ByteSlices, slice_elements
from engine.triton_kernels import twins as twin
from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.prefill_attention import prefill_attention
from engine.triton_kernels.rope_cache_write import rope_cache_write
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

CASES = [((64, 3, 2), torch.float16), ((80, 1, 3), torch.float32)]
"""(head_dim, group, kv_heads), type."""


def byte_cache(kv_heads: int, head_dim: int, block_size: int = 16) -> PagedCache:
    """A pool whose scales are all NaN; paired, as such pools are."""
    plain = paged_cache(
        LENGTHS, seed=1, dtype=torch.float32, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, paired=True
    )
    size = slice_elements(block_size, kv_heads, head_dim, INTEGERS)
    slices = ByteSlices(
        torch.zeros((len(plain.pool), size), dtype=INTEGERS, device=DEVICE), block_size, kv_heads, head_dim
    )
    slices.scales.fill_(NAN)
    return replace(plain, pool=slices.values)


def copy_of(cache: PagedCache) -> PagedCache:
    count, stride = len(cache.pool), cache.pool.stride(0)
    whole = cache.pool.as_strided((count, stride), (stride, 1)).clone()
    values = ByteSlices(whole, *cache.pool.shape[1:]).values
    return replace(cache, pool=values)


@pytest.mark.parametrize(("rotary", "dtype"), [(0, torch.float32), (32, torch.float16)], ids=str)
def test_what_is_written(rotary: int, dtype: torch.dtype) -> None:
    """Steps and scales; where a rotated number lies between two steps, either. A token of NaN has scales of NaN."""
    generator = torch.Generator().manual_seed(rotary)
    cache, count = byte_cache(9, 64), len(TOKENS)
    q = fused_heads(generator, count, 9, 64, dtype)
    k, v = (fused_heads(generator, count, 9, 64, dtype) for _ in range(2))
    k[2, 3, 5], v[3, 8, 0], k[4, 1] = NAN, float("inf"), 0.0
    angle = torch.rand(50, rotary // 2, generator=generator) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE) if rotary else None
    rows, positions = (index([token[part] for token in TOKENS]) for part in (0, 1))
    expected, norm = copy_of(cache), random(generator, 64, dtype=dtype)
    where = {"layer": cache.layer, "k_norm": norm}
    twin.rope_cache_write(q.clone(), k, v, cos_sin, positions, rows, expected.twin_view, **where)
    rope_cache_write(q, k, v, cos_sin, positions, rows, cache.view, **where)
    ours, theirs = ByteSlices.of(cache.pool), ByteSlices.of(expected.pool)
    torch.testing.assert_close(ours.scales, theirs.scales, rtol=1e-2, atol=0, equal_nan=True)
    apart = (ours.values.int() - theirs.values.int()).abs()[~theirs.scales.isnan()]
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.02
    assert (~theirs.scales.isnan()).sum() == 2 * 6 * 9 - 2


def filled(shape: tuple[int, int, int], seed: int) -> PagedCache:
    head_dim, _, kv_heads = shape
    cache, generator = byte_cache(kv_heads, head_dim), torch.Generator().manual_seed(seed)
    for row, length in enumerate(LENGTHS):
        for table in (cache.k_table, cache.v_table):
            slots = index(cache.slots(table, row, length), torch.int64)
            ByteSlices.of(cache.pool).write(slots, random(generator, length, kv_heads, head_dim))
    return cache


def decode_scratch(fill: float, kv_heads: int, heads: int, head_dim: int) -> Scratch:
    partial, lse = (torch.full(shape, fill, device=DEVICE) for shape in ((9, heads, head_dim), (9, heads)))
    return Scratch(partial, lse, torch.zeros((9, kv_heads), dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_decode(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    head_dim, group, kv_heads = shape
    cache, heads = filled(shape, seed=3), kv_heads * group
    work = DecodeWork(4, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.arange(3, dtype=np.int32), np.array(LENGTHS, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(4), 3, heads, head_dim, dtype)
    scratch = decode_scratch(NAN, kv_heads, heads, head_dim)
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    decode_attention(q, cache.view, work, scratch, actual, layer=cache.layer, config=DECODE_TILE)
    twin.decode_attention(q.float(), cache.twin_view, work, scratch, expected, layer=cache.layer)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("slots", [0, 6])
def test_prefill(shape: tuple[int, int, int], dtype: torch.dtype, slots: int) -> None:
    head_dim, group, kv_heads = shape
    cache, heads = filled(shape, seed=5), kv_heads * group
    tile = PREFILL_TILE.block_n
    work = PrefillWork(8, 4 + slots, PREFILL_TILE.block_m // group, DEVICE, slots=slots, tile=tile, min_split=8)
    work.fill(np.array([(0, 0, 20, 0), (1, 20, 16, 32), (2, 36, 1, 32)], np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(6), 37, heads, head_dim, dtype)
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    scratch = prefill_scratch(work, q)
    prefill_attention(q, cache.view, work, scratch, actual, layer=cache.layer, config=PREFILL_TILE)
    twin.prefill_attention(q.float(), cache.twin_view, work, scratch, expected, layer=cache.layer)
    assert work.merging == (slots > 0)
    tolerance = 1e-4 if dtype == torch.float32 else 6e-3
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slots", [0, 6])
def test_prefill_reads_no_scale_before_its_window(slots: int) -> None:
    """What lies there was given back, and may hold anything by now; the first tile begins before it."""
    window, (head_dim, group, kv_heads) = 10, CASES[0][0]
    cache, heads = filled((head_dim, group, kv_heads), seed=5), kv_heads * group
    scales = ByteSlices.of(cache.pool).scales
    for table in (cache.k_table, cache.v_table):
        lost = index(cache.slots(table, 1, 32 + 1 - window), torch.int64)
        scales[lost // cache.pool.shape[1], lost % cache.pool.shape[1]] = NAN
    tile = PREFILL_TILE.block_n
    work = PrefillWork(8, 4 + slots, PREFILL_TILE.block_m // group, DEVICE, slots=slots, tile=tile, min_split=8)
    work.fill(np.array([(1, 0, 16, 32)], np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(6), 16, heads, head_dim, torch.float32)
    actual, expected = torch.full_like(q, NAN), torch.full(q.shape, NAN, device=DEVICE)
    scratch, manner = prefill_scratch(work, q), Manner(window=window)
    prefill_attention(q, cache.view, work, scratch, actual, layer=cache.layer, manner=manner, config=PREFILL_TILE)
    twin.prefill_attention(q, cache.twin_view, work, scratch, expected, layer=cache.layer, manner=manner)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert expected.isfinite().all()
