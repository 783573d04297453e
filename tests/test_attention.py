"""Paged attention against a per-request reference that knows no blocks, groups or padding."""

import numpy as np
import pytest
import torch
from devices import pool_of

from engine.api import SamplingParams
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.execution.cpu.device import ChunkGroups, PagedAttention, arrange, clear_begun_blocks
from engine.execution.rows import RowTable
from engine.limits import Limits
from engine.scheduling.output import AppendedEntries, Chunk, NewRequest, SchedulerOutput

LAYERS = 3


def table(num_rows: int, max_model_len: int, block_size: int) -> RowTable:
    return RowTable(Limits(num_rows, num_rows, max_model_len, num_units=1, block_size=block_size))


class Reference:
    """K and V of every request, kept contiguously; plain softmax attention in float64, one request at a time."""

    def __init__(self) -> None:
        self.past: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(self, row: int, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layers = self.past.setdefault(row, [(k[:0], v[:0])] * LAYERS)
        keys, values = (torch.cat(pair) for pair in zip(layers[layer], (k, v), strict=True))
        layers[layer] = (keys, values)
        group = q.shape[1] // k.shape[1]
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * q.shape[2] ** -0.5
        start = len(keys) - len(q)
        future = torch.arange(len(keys)) > torch.arange(start, len(keys))[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class Bench:
    """A pool full of NaN, rows with scattered blocks, and the reference beside them."""

    def __init__(
        self, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, num_rows: int = 24, max_len: int = 400
    ) -> None:
        self.heads, self.kv_heads, self.head_dim, self.dtype = heads, kv_heads, head_dim, dtype
        self.rows = table(num_rows, max_len, 8)
        num_units = num_rows * (max_len // 8 + 1) * 2
        self.pool = pool_of(num_units, LAYERS, 8, kv_heads, head_dim, dtype)
        self.pool.slices[: num_units * LAYERS] = float("nan")
        self.free = np.random.default_rng(0).permutation(num_units).tolist()
        self.reference = Reference()
        self.lengths: dict[int, int] = {}
        self.lost: set[int] = set()

    def entries(self, count: int) -> tuple[CacheEntry, ...]:
        return tuple(
            CacheEntry(CacheKind.KV, Tier.DEVICE, (self.free.pop(), self.free.pop())) for _ in range(max(count, 0))
        )

    def step(self, wanted: dict[int, int]) -> None:
        """Append `wanted[row]` tokens to every row in one step; compare every layer's output with the reference."""
        chunks = [Chunk(row, self.lengths.get(row, 0), length, False) for row, length in wanted.items()]
        new, appended = [], []
        for chunk in chunks:
            blocks = -(-(chunk.start + chunk.length) // 8)
            if chunk.start == 0:
                tokens = (0,) * chunk.length
                sampling = SamplingParams(max_tokens=1)
                new.append(NewRequest(chunk.row, "r", tokens, chunk.length, sampling, self.entries(blocks)))
            else:
                missing = blocks - int(self.rows.num_blocks[chunk.row])
                appended.append(AppendedEntries(chunk.row, self.entries(missing)))
            self.lengths[chunk.row] = chunk.start + chunk.length
        self.rows.apply(SchedulerOutput(0, tuple(chunks), tuple(new), tuple(appended)))
        array = np.array(chunks, dtype=np.int64)
        clear_begun_blocks(self.pool, self.rows, array)
        batch = arrange(array, self.rows, cell_bytes=2 * self.kv_heads * self.head_dim * self.dtype.itemsize)
        self.check_batch(batch, chunks)
        paged = PagedAttention(self.pool, self.rows, batch)
        for layer in range(LAYERS):
            self.compare(layer, paged, batch)

    @staticmethod
    def check_batch(batch: ChunkGroups, chunks: list[Chunk]) -> None:
        found = [tuple(chunk) for chunk in batch.layout.chunks.tolist()]
        assert sorted(found) == sorted(chunks)
        assert [place for first, last in batch.groups for place in range(first, last)] == list(range(len(chunks)))
        for chunk, first in zip(map(Chunk._make, found), batch.layout.firsts.tolist(), strict=True):
            positions = batch.layout.positions[first : first + chunk.length].tolist()
            assert positions == list(range(chunk.start, chunk.start + chunk.length))
            assert set(batch.layout.token_rows[first : first + chunk.length].tolist()) == {chunk.row}

    def compare(self, layer: int, paged: PagedAttention, batch: ChunkGroups) -> None:
        num_tokens = len(batch.layout.positions)
        fused = torch.randn(num_tokens, self.heads + 2 * self.kv_heads, self.head_dim).to(self.dtype)
        q, k, v = fused.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        got = paged(layer, q, k, v)
        assert got.shape == (num_tokens, self.heads * self.head_dim)
        tolerance = 1e-5 if self.dtype == torch.float32 else 3e-2
        for row, first, length in zip(
            batch.layout.rows.tolist(), batch.layout.firsts.tolist(), batch.layout.lengths.tolist(), strict=True
        ):
            part = slice(first, first + length)
            expected = self.reference.attend(row, layer, q[part], k[part], v[part])
            if row in self.lost:
                assert got[part].isnan().all()
                continue
            torch.testing.assert_close(got[part].double(), expected, rtol=tolerance, atol=tolerance)


SHAPES = [(4, 4, 16), (9, 3, 16), (8, 1, 32), (14, 2, 64), (2, 2, 80)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_steps_equal_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rng = np.random.default_rng(5)
    bench = Bench(*shape, dtype)
    bench.step({0: 1, 1: 7, 2: 8, 3: 9, 4: 70, 5: 200})
    bench.step(dict.fromkeys((5, 0, 3, 1, 2, 4), 1))
    for _ in range(6):
        rows = rng.permutation(12)[: rng.integers(1, 12)].tolist()
        bench.step(
            {row: int(rng.choice([1, 1, 1, 2, 5, 12, 30, 65])) for row in rows if bench.lengths.get(row, 0) < 300}
        )


def test_decodes_come_in_few_groups_whatever_the_contexts() -> None:
    rows = table(64, 8192, 16)
    contexts = np.random.default_rng(1).integers(1, 8192, 64)
    chunks = np.stack((np.arange(64), contexts, *np.ones((2, 64), dtype=np.int64)), axis=1)
    batch = arrange(chunks, rows, cell_bytes=2 * 3 * 64 * 2)
    blocks = (batch.layout.starts // 16) + 1
    padded = sum(int(blocks[first]) * (last - first) for first, last in batch.groups)
    assert len(batch.groups) <= 20
    assert padded <= 1.15 * blocks.sum()


def test_a_poisoned_request_disturbs_nobody() -> None:
    """K and V of one request are NaN; the others in its group are as before, and so is the next owner of its units."""
    torch.manual_seed(6)
    bench = Bench(4, 2, 16, torch.float32)
    bench.step({0: 20, 1: 21, 2: 22})
    units = np.concatenate([table[0, :3] for table in (bench.rows.k_table, bench.rows.v_table)])
    for unit in units.tolist():
        bench.pool.slices[unit * LAYERS : (unit + 1) * LAYERS] = float("nan")
    bench.lost = {0}
    bench.step({0: 1, 1: 1, 2: 1})
    bench.step({0: 5, 1: 3, 2: 4})
    bench.lost = set()
    bench.free.extend(units.tolist())
    bench.lengths[0] = 0
    del bench.reference.past[0]
    bench.step({0: 19, 1: 1})
    bench.step({0: 1, 2: 1})


def test_addresses_follow_the_pool_layout() -> None:
    pool = pool_of(5, 4, 8, 2, 16)
    assert pool.slices.shape == ((5 + 1) * 4, 8 * 2 * 16)
    assert pool.slice_ids(np.array([0, 3])).tolist() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert pool.cell_ids(np.array([3]), np.array([5])).tolist() == [
        [12 * 8 + 5],
        [13 * 8 + 5],
        [14 * 8 + 5],
        [15 * 8 + 5],
    ]
    assert pool.slices.data_ptr() % 64 == 0
    pool.slices.fill_(1.0)
    pool.clear(np.array([1, 4]))
    cleared = [index for index in range(24) if not pool.slices[index].any()]
    assert cleared == [4, 5, 6, 7, 16, 17, 18, 19]
