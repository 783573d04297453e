"""Kernels over a pool of 8 bits, against their twins.

Run by test_kernels.py in a process of its own.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases_attention import Case, case_id, decode_both, prefill_both
from kernel_cases_cache import LENGTHS, TOKENS
from kernel_pool import DEVICE, NAN, PagedCache, fused_heads, index, paged_cache, random

from engine.models.byte_cells import INTEGERS, ByteSlices, slice_elements
from engine.triton_kernels import twins as twin
from engine.triton_kernels.cache import rope_cache_write

CASES = [(Case(64, 3, 2), torch.float16), (Case(80, 1, 3), torch.float32)]


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


def filled(case: Case) -> PagedCache:
    cache, generator = byte_cache(case.kv_heads, case.head_dim), torch.Generator().manual_seed(5)
    for row, length in enumerate(LENGTHS):
        for table in (cache.k_table, cache.v_table):
            slots = index(cache.slots(table, row, length), torch.int64)
            ByteSlices.of(cache.pool).write(slots, random(generator, length, case.kv_heads, case.head_dim))
    return cache


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=case_id)
def test_decode(case: Case, dtype: torch.dtype) -> None:
    decode_both(filled(case), case, LENGTHS, [0, 1, 2], dtype, 9)


@pytest.mark.parametrize(("case", "dtype"), CASES, ids=case_id)
@pytest.mark.parametrize("slots", [0, 6])
def test_prefill(case: Case, dtype: torch.dtype, slots: int) -> None:
    chunks = [[0, 0, 20, 0], [1, 20, 16, 32], [2, 36, 1, 32]]
    work = prefill_both(filled(case), case, chunks, 37, dtype, slots, min_split=8)
    assert work.merging == (slots > 0)


@pytest.mark.parametrize("slots", [0, 6])
def test_prefill_reads_no_scale_before_its_window(slots: int) -> None:
    """What lies there was given back, and may hold anything by now; the first tile begins before it."""
    case = Case(window=10)
    cache = filled(case)
    scales = ByteSlices.of(cache.pool).scales
    for table in (cache.k_table, cache.v_table):
        lost = index(cache.slots(table, 1, 32 + 1 - case.window), torch.int64)
        scales[lost // cache.pool.shape[1], lost % cache.pool.shape[1]] = NAN
    prefill_both(cache, case, [[1, 0, 16, 32]], 16, torch.float32, slots, min_split=8)
