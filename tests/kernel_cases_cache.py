"""Kernels that write, read and copy cached tokens, against their twins. Run by test_kernels.py in its own process."""

import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, PagedCache, assert_same, fused_heads, index, paged_cache, random

from engine.triton_kernels import twins as twin
from engine.triton_kernels.cache import hidden_gather, hidden_write, rope_cache_write, unit_copy

ROPE = [
    # head_dim, rotary_dim, q heads, kv heads, q norm, k norm, index type
    (64, 64, 6, 2, False, False, torch.int32),
    (128, 128, 9, 9, True, True, torch.int64),
    (80, 20, 4, 4, False, False, torch.int32),
    (80, 32, 14, 2, True, False, torch.int32),
    (96, 96, 3, 3, False, True, torch.int64),
    (256, 64, 8, 1, True, True, torch.int32),
    (64, 0, 12, 12, False, False, torch.int32),
    (128, 0, 4, 2, True, True, torch.int32),
    (64, 16, 0, 4, False, True, torch.int32),  # no q: a restore
]
# (row, position) of each token; row -1 is padding. Lengths of the rows below.
TOKENS = [(1, 0), (-1, 7), (0, 16), (2, 31), (2, 32), (1, 47), (-1, 0), (0, 3)]
LENGTHS = [20, 48, 33]


def empty_cache(
    dtype: torch.dtype, kv_heads: int, head_dim: int, block_size: int = 16, *, paired: bool = False
) -> PagedCache:
    cache = paged_cache(
        LENGTHS, seed=1, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, paired=paired
    )
    cache.pool.fill_(NAN)
    return cache


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "paired"), [*((case, False) for case in ROPE), (ROPE[1], True), (ROPE[3], True)], ids=str
)
def test_rope_and_cache_write(
    case: tuple[int, int, int, int, bool, bool, torch.dtype], paired: bool, dtype: torch.dtype
) -> None:
    head_dim, rotary, heads, kv_heads, q_norm, k_norm, kind = case
    generator = torch.Generator().manual_seed(head_dim + rotary)
    cache, count = empty_cache(dtype, kv_heads, head_dim, paired=paired), len(TOKENS)
    q = fused_heads(generator, count, heads, head_dim, dtype) if heads else None
    k, v = (fused_heads(generator, count, kv_heads, head_dim, dtype) for _ in range(2))
    weights = [random(generator, head_dim, dtype=dtype) if wanted else None for wanted in (q_norm, k_norm)]
    angle = torch.rand(50, rotary // 2, generator=generator) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], dim=1).to(DEVICE) if rotary else None
    rows, positions = (index([token[part] for token in TOKENS], kind) for part in (0, 1))
    tables = (cache.k_table, cache.v_table)
    where = {"layer": cache.layer, "eps": 1e-3}
    if q_norm == k_norm:  # elsewhere the places of the angles are the positions
        where["angles"] = index([(position * 7 + 3) % 50 for _, position in TOKENS], kind)

    wide = cache.double()
    wide_q = None if q is None else q.double()
    wide_weights = [None if weight is None else weight.double() for weight in weights]
    norms = dict(zip(("q_norm", "k_norm"), wide_weights, strict=True))
    wide_cos = None if cos_sin is None else cos_sin.double()
    twin.rope_cache_write(wide_q, k.double(), v.double(), wide_cos, positions, rows, wide.twin_view, **where, **norms)
    norms = dict(zip(("q_norm", "k_norm"), weights, strict=True))
    rope_cache_write(q, k, v, cos_sin, positions, rows, cache.view, **where, **norms)
    if q is not None and wide_q is not None:
        assert_same(q, wide_q, dtype)
    assert_same(cache.pool, wide.pool, dtype)
    written = (~cache.pool.isnan()).all(dim=-1).all(dim=-1).flatten().nonzero().flatten().tolist()
    real = [(row, position) for row, position in TOKENS if row >= 0]
    assert written == sorted(cache.slots(table, row, 48)[position] for row, position in real for table in tables)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("paired", [False, True], ids=["two tables", "one table"])
@pytest.mark.parametrize(("head_dim", "value_dim", "spare"), [(192, 128, 0), (24, 16, 8), (40, 64, 0)])
def test_cache_write_of_unlike_widths(
    head_dim: int, value_dim: int, spare: int, paired: bool, dtype: torch.dtype
) -> None:
    generator, kv_heads = torch.Generator().manual_seed(head_dim), 2
    cache = paged_cache(
        LENGTHS, seed=1, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, spare=spare,
        paired=paired,
    )  # fmt: skip
    cells = cache.pool.as_strided((*cache.pool.shape[:2], cache.pool.stride(1)), (*cache.pool.stride()[:2], 1))
    k, v = (fused_heads(generator, len(TOKENS), kv_heads, width, dtype) for width in (head_dim, value_dim))
    rows, positions = (index([token[part] for token in TOKENS]) for part in (0, 1))
    tables = (cache.k_table, cache.v_table)
    expected = torch.full_like(cells, NAN)
    tokens = expected.flatten(0, 1)
    for at, (row, position) in enumerate(TOKENS):
        for table, heads in zip(tables, (k, v), strict=True):
            if row >= 0:
                tokens[cache.slots(table, row, 48)[position], : heads[at].numel()] = heads[at].flatten()
    for write in (rope_cache_write, twin.rope_cache_write):
        cells.fill_(NAN)
        write(None, k, v, None, positions, rows, cache.view, layer=cache.layer)
        torch.testing.assert_close(cells, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "kv_heads", "head_dim"), [(128, 2, 64), (1200, 19, 64), (512, 8, 80), (64, 1, 64)])
def test_hidden_write_and_gather(width: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    cache, count = empty_cache(dtype, kv_heads, head_dim, block_size=8), len(TOKENS)
    rows, positions = (index([token[part] for token in TOKENS]) for part in (0, 1))
    where = {"layer": cache.layer, "scratch_base": cache.scratch_base}
    x = random(generator, count, width + 8, dtype=dtype)[:, :width]
    expected = cache.pool.clone()
    twin.hidden_write(x, positions, rows, expected, cache.k_table, **where)
    hidden_write(x, positions, rows, cache.pool, cache.k_table, **where)
    torch.testing.assert_close(cache.pool, expected, rtol=0, atol=0, equal_nan=True)

    out, twin_out = (torch.full((count, width), NAN, dtype=dtype, device=DEVICE) for _ in range(2))
    hidden_gather(out, positions, rows, cache.pool, cache.k_table, **where)
    twin.hidden_gather(twin_out, positions, rows, expected, cache.k_table, **where)
    assert torch.equal(out, twin_out)
    assert torch.equal(out, torch.where((rows >= 0)[:, None], x, 0))


def test_hidden_state_that_does_not_fit_is_refused() -> None:
    cache, rows = empty_cache(torch.float32, 1, 64), index([0])
    with pytest.raises(AssertionError, match="does not fit"):
        hidden_write(
            torch.zeros((1, 65), device=DEVICE), rows, rows, cache.pool, cache.k_table, layer=0, scratch_base=0
        )


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [64, 4096, 9000])
def test_unit_copy(size: int, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    source = random(generator, 7, size, dtype=torch.float16)
    source[3, 5] = NAN  # bits are copied, without a meaning
    pairs = index([[3, 0], [-1, 1], [6, 4], [0, 2], [3, 3]], kind)
    results = []
    for copy in (unit_copy, twin.unit_copy):
        staging = torch.full((5, size + 16), NAN, dtype=torch.float16, device=DEVICE)
        copy(source, staging[:, :size], pairs)
        results.append(staging.view(torch.int16))
    assert torch.equal(*results)
    assert torch.equal(results[0][4, :size], source[6].view(torch.int16))
    assert staging[1].isnan().all() and staging[:, size:].isnan().all()


def test_unit_copy_within_the_pool() -> None:
    pool = random(torch.Generator().manual_seed(0), 6, 5000)
    before = pool.clone()
    unit_copy(pool, pool, index([[0, 5], [1, 4]]))
    assert torch.equal(pool, before[[0, 1, 2, 3, 1, 0]])
