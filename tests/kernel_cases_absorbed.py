"""Attention that reads hidden state against its twin in float64, and that against attention over projected K and V.

Run by test_kernels.py, in a process of its own.
"""

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, assert_same, fused_heads, random
from torch import Tensor

from engine.models import torch_ops as twin
from engine.models.absorption import KVWeights
from engine.triton_kernels import configs
from engine.triton_kernels.absorbed_attention import absorbed_attention
from engine.triton_kernels.work import AbsorbedScratch, DecodeWork

LAYERS, LAYER, TILE, MAX_ITEMS = 2, 1, 32, 14
LENGTHS = [150, 40, 97, 64, 1, 33]


class Shape(NamedTuple):
    heads: int
    head_dim: int
    width: int
    block_size: int
    table: torch.dtype
    biased: bool


SHAPES = [
    Shape(3, 24, 64, 16, torch.int32, True),
    Shape(20, 16, 320, 4, torch.int64, True),
    Shape(12, 64, 768, 16, torch.int32, False),
    Shape(2, 80, 160, 32, torch.int32, True),
]


class Cache(NamedTuple):
    """`tables [3, rows, blocks]`; `projected`: the same pool and K's and V's tables where nothing is hidden state."""

    pool: Tensor
    tables: Tensor
    scratch_base: int
    projected: tuple[Tensor, Tensor, Tensor]


def weights_of(generator: torch.Generator, shape: Shape, dtype: torch.dtype) -> KVWeights:
    heads, head_dim, width, *_ = shape
    keys, values = (random(generator, heads, head_dim, width, dtype=dtype) / width**0.5 for _ in range(2))
    k_bias, v_bias = (random(generator, heads, head_dim, dtype=dtype) if shape.biased else None for _ in range(2))
    return KVWeights(keys, values, k_bias, v_bias)


def wide(weights: KVWeights) -> KVWeights:
    k_bias, v_bias = (None if each is None else each.double() for each in weights[2:])
    return KVWeights(weights.keys.double(), weights.values.double(), k_bias, v_bias)


def cache_of(
    generator: torch.Generator, shape: Shape, dtype: torch.dtype, weights: KVWeights, share: list[float]
) -> Cache:
    """Row r has LENGTHS[r] tokens, about share[r] of its blocks hidden state. All else in the pool is NaN, and so is
    where K's and V's entries of hidden blocks point to. Entries of hidden state of other blocks name such units."""
    heads, head_dim, width, block_size, table_dtype, _ = shape
    blocks = max(-(-length // block_size) for length in LENGTHS) + 1
    count = 3 * len(LENGTHS) * blocks
    units = torch.randperm(count, generator=generator).reshape(3, len(LENGTHS), blocks) * LAYERS
    scratch_base = (count + 1) * LAYERS
    pool = torch.full((scratch_base + 4, block_size, heads, head_dim), NAN, dtype=torch.float64, device=DEVICE)
    projected = pool.clone()
    tables, cells, whole = units.clone(), pool.flatten(0, 1).flatten(1), projected.flatten(0, 1)
    for row, length in enumerate(LENGTHS):
        for block in range(-(-length // block_size)):
            places = [int(units[part, row, block] + LAYER) * block_size for part in range(3)]
            k_at, v_at, x_at = (slice(at, at + min(block_size, length - block * block_size)) for at in places)
            tokens = k_at.stop - k_at.start
            if torch.rand(1, generator=generator).item() < share[row]:
                x = random(generator, tokens, width, dtype=dtype).double()
                cells[x_at, :width] = x
                k, v = twin_of(x, weights)
                tables[:2, row, block] = torch.tensor([-1 - block % 4, -4 + block % 4])
            else:
                k, v = (random(generator, tokens, heads, head_dim, dtype=dtype).double() for _ in range(2))
                pool.flatten(0, 1)[k_at], pool.flatten(0, 1)[v_at] = k, v
            whole[k_at], whole[v_at] = k, v
    given = tables.to(DEVICE, table_dtype)
    return Cache(pool.to(dtype), given, scratch_base, (projected, *units[:2].to(DEVICE)))


def twin_of(x: Tensor, weights: KVWeights) -> list[Tensor]:
    pairs = zip(weights[:2], weights[2:], strict=True)
    return [
        torch.einsum("th,kdh->tkd", x, weight.double()) + (0.0 if bias is None else bias.double())
        for weight, bias in pairs
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_hidden_state_and_kv_in_any_mix(shape: Shape, dtype: torch.dtype) -> None:
    """Contexts of hidden state, of K and V and of both, split and whole, one twice, one empty; two rows of padding."""
    generator = torch.Generator().manual_seed(5)
    heads, head_dim, width, *_ = shape
    weights = weights_of(generator, shape, dtype)
    cache = cache_of(generator, shape, dtype, weights, [1.0, 0.0, 0.5, 1.0, 1.0, 0.5])
    rows, lengths = [0, 1, 2, 3, 4, 5, 2], [150, 40, 97, 0, 1, 33, 97]
    count = len(rows) + 2
    work = DecodeWork(count, MAX_ITEMS, TILE, DEVICE, min_split=TILE)
    work.fill(np.array(rows, np.int32), np.array(lengths, np.int32))
    work.buffer.upload()
    splits = work.ranges[:, 1].tolist()
    assert max(splits) > 1 and 1 in splits and 0 in splits
    q = fused_heads(generator, count, heads, head_dim, dtype)
    lse = [torch.full((MAX_ITEMS, heads), NAN, device=DEVICE) for _ in range(2)]
    gathered = torch.full((heads, MAX_ITEMS, width), NAN, dtype=dtype, device=DEVICE)
    partial = torch.full((MAX_ITEMS, heads, head_dim), NAN, device=DEVICE)
    scratch = AbsorbedScratch(gathered, lse[0], partial, lse[1])
    where = {"layer": LAYER, "scratch_base": cache.scratch_base, "scale": head_dim**-0.5}
    out = torch.full(q.shape, NAN, dtype=dtype, device=DEVICE)
    absorbed_attention(q, cache.pool, cache.tables, weights, work, scratch, out, **where)
    found, expected = (torch.full(q.shape, NAN, dtype=torch.float64, device=DEVICE) for _ in range(2))
    double = (q.double(), cache.pool.double(), cache.tables, wide(weights))
    twin.absorbed_attention(*double, work, scratch, found, **where)
    twin.decode_attention(q.double(), *cache.projected, work, partial, partial, partial, expected, **where)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert found.isnan().all(-1).all(-1).tolist() == [not length for length in (*lengths, 0, 0)]
    assert_same(out, found, dtype)


def test_a_context_of_more_splits_than_are_merged_at_once() -> None:
    shape = Shape(2, 16, 32, 4, torch.int32, True)
    generator = torch.Generator().manual_seed(6)
    weights = weights_of(generator, shape, torch.float32)
    cache = cache_of(generator, shape, torch.float32, weights, [0.7] * len(LENGTHS))
    work = DecodeWork(1, 40, 4, DEVICE, min_split=4)
    work.fill(np.array([0], np.int32), np.array([150], np.int32))
    work.buffer.upload()
    assert work.ranges[0, 1].item() > configs.join_config().block_n
    q = fused_heads(generator, 1, 2, 16, torch.float32)
    items = torch.zeros((40, 2), device=DEVICE)
    scratch = AbsorbedScratch(
        torch.zeros((2, 40, 32), device=DEVICE), items, torch.zeros((40, 2, 16), device=DEVICE), items.clone()
    )
    out, expected = torch.empty_like(q), torch.empty(q.shape, dtype=torch.float64, device=DEVICE)
    where = {"layer": LAYER, "scratch_base": cache.scratch_base, "scale": 0.25}
    with pytest.MonkeyPatch.context() as patch:
        tile = configs.AbsorbedConfig(16, 4, 4, 2, 64, 32)
        patch.setattr(configs, "absorbed_config", lambda *_: tile)
        patch.setattr(configs, "beside_config", lambda *_: tile)
        absorbed_attention(q, cache.pool, cache.tables, weights, work, scratch, out, **where)
    twin.absorbed_attention(
        q.double(), cache.pool.double(), cache.tables, wide(weights), work, scratch, expected, **where
    )
    assert_same(out, expected, torch.float32)


def test_wrong_shapes_are_refused() -> None:
    shape = SHAPES[0]
    generator = torch.Generator().manual_seed(7)
    weights = weights_of(generator, shape, torch.float32)
    cache = cache_of(generator, shape, torch.float32, weights, [0.5] * len(LENGTHS))
    work, q = DecodeWork(1, MAX_ITEMS, TILE, DEVICE), torch.zeros((1, 3, 24), device=DEVICE)
    lse = torch.zeros((MAX_ITEMS, 3), device=DEVICE)
    gathered, partial = torch.zeros((3, MAX_ITEMS, 64), device=DEVICE), torch.zeros((MAX_ITEMS, 3, 24), device=DEVICE)
    scratch = AbsorbedScratch(gathered, lse, partial, lse)
    good: dict[str, Any] = {
        "q": q, "pool": cache.pool, "tables": cache.tables, "layer_weights": weights, "scratch": scratch,
        "out": q.clone(),
    }  # fmt: skip
    bad: dict[str, dict[str, Any]] = {
        "as many KV heads": {"pool": cache.pool[:, :, :1]},
        "by head": {"layer_weights": weights._replace(keys=weights.keys[:, :, :32])},
        "gathered": {"scratch": scratch._replace(gathered=gathered[:, 1:])},
        "partial_lse": {"scratch": scratch._replace(hidden_lse=lse[1:])},
        "rows of heads": {"out": torch.zeros((1, 3, 48), device=DEVICE)[..., ::2]},
        "one type": {"q": q.half()},
    }
    where = {"layer": LAYER, "scratch_base": cache.scratch_base, "scale": 0.2}
    for match, change in bad.items():
        with pytest.raises(AssertionError, match=match):
            absorbed_attention(**{**good, **change}, work=work, **where)
