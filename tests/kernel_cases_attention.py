"""Attention kernels against their twins in float64. Run by test_kernels.py, in a process of its own."""

from copy import copy
from itertools import permutations
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, PagedCache, assert_same, fused_heads, index, paged_cache, typed
from torch import Tensor

from engine.models.attention import Manner
from engine.triton_kernels import configs
from engine.triton_kernels import twins as twin
from engine.triton_kernels.attention import decode_attention, prefill_attention
from engine.triton_kernels.configs import LaunchConfig, device_arch, prefill_config
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

DECODE_TILE = LaunchConfig(16, 32, 4, 2)
PREFILL_TILE = LaunchConfig(64, 32, 8, 2)


class Case(NamedTuple):
    """Heads, cells and tables of a cache, and the variant of attention; `value_dim` 0: as `head_dim`."""

    head_dim: int = 64
    group: int = 3
    kv_heads: int = 2
    block_size: int = 16
    table: torch.dtype = torch.int32
    value_dim: int = 0
    spare: int = 0
    paired: bool = False
    softcap: float = 0.0
    window: int = 0
    sinks: bool = False
    chunk: int = 0

    def cache(self, lengths: list[int], dtype: torch.dtype) -> PagedCache:
        return paged_cache(
            lengths, seed=DTYPES.index(dtype), dtype=dtype, kv_heads=self.kv_heads, head_dim=self.head_dim,
            block_size=self.block_size, table_dtype=self.table, value_dim=self.value_dim, spare=self.spare,
            paired=self.paired,
        )  # fmt: skip

    @property
    def manner(self) -> Manner:
        sinks = sinks_of(self.kv_heads * self.group) if self.sinks else None
        return Manner(1.3 * self.head_dim**-0.5, self.window, self.softcap, sinks, self.chunk)


SHAPES = [
    Case(64, 5), Case(80, 7, 1, 4, torch.int64), Case(96, 2, 2, 32), Case(128, 1), Case(128, 3, 1, 64, torch.int64),
    Case(256, 8, 1, 8),
]  # fmt: skip
CASES = [
    *SHAPES,
    Case(paired=True),
    Case(80, 7, 1, 4, torch.int64, window=95, paired=True),
    Case(24, 4, value_dim=16, paired=True),
    Case(40, 2, block_size=32, value_dim=64, window=95, paired=True),
    Case(softcap=0.7),
    Case(sinks=True),
    Case(softcap=0.7, window=95, sinks=True),
    Case(softcap=30.0, window=32),
    Case(window=1, sinks=True),
    Case(192, 1, value_dim=128),  # DeepSeek-V2 and -V3
    Case(192, 1, value_dim=128, window=95, sinks=True),
    Case(24, 4, value_dim=16, window=95, sinks=True),
    Case(40, 3, 1, value_dim=64, spare=8),  # V is the wider one, and cells are wider than both
    Case(40, 3, 1, value_dim=64, spare=8, window=95, sinks=True),
    Case(group=2, spare=16, window=95),
    Case(group=2, chunk=50, sinks=True),
    Case(40, 2, block_size=32, value_dim=64, chunk=64, paired=True),
]


def case_id(value: object) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def decode_both(
    cache: PagedCache, case: Case, lengths: list[int], rows: list[int], dtype: torch.dtype, max_items: int = 64
) -> DecodeWork:
    """Decode request i with lengths[i] tokens of table row rows[i], in a batch with two padded requests."""
    count, heads = len(rows) + 2, case.kv_heads * case.group
    work = DecodeWork(count + 1, max_items, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.array(rows, np.int32), np.array(lengths, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(1), count, heads, case.head_dim, dtype)
    shape = (count, heads, case.value_dim or case.head_dim)
    partial = torch.full((max_items, *shape[1:]), NAN, device=DEVICE)
    partial_lse = torch.full((max_items, heads), NAN, device=DEVICE)
    actual = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    arrived = torch.zeros((max_items, case.kv_heads), dtype=torch.int32, device=DEVICE)
    scratch, layer, manner = Scratch(partial, partial_lse, arrived), cache.layer, case.manner
    decode_attention(q, cache.view, work, scratch, actual, layer=layer, manner=manner, config=DECODE_TILE)
    expected = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
    twin.decode_attention(q.double(), cache.double().twin_view, work, scratch, expected, layer=layer, manner=manner)
    assert expected.isnan().all(-1).all(-1).tolist() == [not length for length in (*lengths, 0, 0)]
    assert_same(actual, expected, dtype, cache.is_bytes)
    assert not arrived.any(), "the next layer counts from zero"
    return work


@pytest.mark.parametrize(("case", "dtype"), typed(CASES), ids=case_id)
def test_decode(case: Case, dtype: torch.dtype) -> None:
    """Contexts that are split, whole and empty ones; one is read twice."""
    cache = case.cache([180, 15, 40, 1], dtype)
    work = decode_both(cache, case, [40, 180, 0, 1, 15, 40], [2, 0, 1, 3, 1, 2], dtype, 18)
    counts = work.ranges[:, 1].tolist()
    assert max(counts) > 4 and 1 in counts and 0 in counts


def test_twins_find_v_behind_k_or_by_its_table() -> None:
    cache = paged_cache([70], seed=33, dtype=torch.float32, kv_heads=2, head_dim=32, paired=True)
    decode, prefill = DecodeWork(1, 4, 32, DEVICE), PrefillWork(1, 8, 8, DEVICE)
    decode.fill(np.array([0], np.int32), np.array([70], np.int32))
    prefill.fill(np.array([[0, 0, 9, 61]], np.int32))
    for work in (decode, prefill):
        work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(1), 9, 4, 32, torch.float32)
    scratch = Scratch(q, q, q)
    for attend, work, count in ((twin.decode_attention, decode, 1), (twin.prefill_attention, prefill, 9)):
        outs = [torch.full((count, 4, 32), NAN, device=DEVICE) for _ in range(2)]
        attend(q[:count], cache.twin_view, work, scratch, outs[0], layer=cache.layer)
        attend(q[:count], cache.view, work, scratch, outs[1], layer=cache.layer)
        assert torch.equal(*outs) and not outs[0].isnan().any()
        with pytest.raises(AssertionError, match="pass either v_table or pair"):
            attend(q[:count], cache.view._replace(pair=0), work, scratch, outs[1], layer=cache.layer)


@pytest.mark.parametrize("dtype", DTYPES[-1:], ids=str)
def test_decode_merges_more_splits_than_one_tile(dtype: torch.dtype) -> None:
    case = Case(kv_heads=1)
    work = decode_both(case.cache([1300, 40], dtype), case, [1300, 40], [0, 1], dtype)
    assert work.ranges[0, 1].item() > 32


@pytest.mark.parametrize(("at_once", "window", "sinks"), [(2, 100, True), (4, 0, True), (8, 0, False)])
def test_decode_merges_in_any_order_of_arrival(
    at_once: int, window: int, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run five splits of a context in six orders, each beginning with another split, beside another context.

    The result is not touched before the last split, and then the same to the last bit. The counters are zeros again."""
    monkeypatch.setattr(configs, "merged_splits", lambda _width: at_once)
    cache = paged_cache([150, 60], seed=9, dtype=torch.float16, kv_heads=1, head_dim=64)
    work = DecodeWork(3, 9, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.array([0, 1], np.int32), np.array([150, 60], np.int32))
    work.buffer.upload()
    assert work.ranges[:, 1].tolist() == [5, 2, 0]
    q = fused_heads(torch.Generator().manual_seed(9), 2, 6, 64, torch.float16)
    arrived = torch.zeros((9, 1), dtype=torch.int32, device=DEVICE)
    partial, lse = torch.empty((9, 6, 64), device=DEVICE), torch.empty((9, 6), device=DEVICE)
    out, expected = torch.empty_like(q), torch.empty_like(q, dtype=torch.float64)
    scratch, layer = Scratch(partial, lse, arrived), cache.layer
    manner = Manner(0.2, window, sinks=sinks_of(6) if sinks else None)

    def run(*items: int) -> None:
        part = copy(work)
        part.items = work.items.clone()
        part.items[[item not in items for item in range(9)], 0] = -1
        decode_attention(q, cache.view, part, scratch, out, layer=layer, manner=manner, config=DECODE_TILE)

    twin.decode_attention(q.double(), cache.double().twin_view, work, scratch, expected, layer=layer, manner=manner)
    run(*range(9))
    whole = out.clone()
    assert_same(whole, expected, torch.float16)
    for number, order in enumerate([*permutations(range(5))][::23]):
        for rows in (partial, lse, out):
            rows.fill_(NAN)
        for ended, item in enumerate(order):
            run(item, *((5, 6) if ended == number % 5 else ()))
            assert torch.equal(out[0], whole[0]) if ended == 4 else out[0].isnan().all()
        assert torch.equal(out[1], whole[1]) and not arrived.any()


def sinks_of(heads: int) -> Tensor:
    """Below every score, among them, above all: so far that the exponential of the difference is none."""
    return torch.tensor([-9.0, 0.0, 0.5, 2.0, 6.0, 200.0], device=DEVICE).repeat(heads // 6 + 1)[:heads].contiguous()


def test_decode_with_no_room_to_split() -> None:
    case = Case()
    work = decode_both(case.cache([90, 40], torch.float32), case, [90, 40], [0, 1], torch.float32, 5)
    assert work.ranges[:2, 1].tolist() <= [2, 1]


def test_decode_of_large_scores_does_not_overflow() -> None:
    cache = Case().cache([100], torch.float32)
    cache.pool.flatten(0, 1)[cache.slots(cache.k_table, 0, 100)] *= 40.0  # K alone
    decode_both(cache, Case(), [100], [0], torch.float32)


def prefill_both(
    cache: PagedCache, case: Case, chunks: list[list[int]], count: int, dtype: torch.dtype, slots: int = 0,
    config: LaunchConfig = PREFILL_TILE, min_split: int = 32,
) -> PrefillWork:  # fmt: skip
    """Compare the kernel with its twin and return the work list; with `slots` contexts of 128 tokens are split."""
    heads, tile = case.kv_heads * case.group, config.block_n
    size = config.block_m // case.group
    work = PrefillWork(len(chunks) + 2, 40, size, DEVICE, slots=slots, tile=tile, min_split=min_split)
    work.fill(np.array(chunks, np.int32))
    work.buffer.upload()
    q = fused_heads(torch.Generator().manual_seed(7), count, heads, case.head_dim, dtype)
    manner, layer = case.manner, cache.layer
    actual = torch.full((*q.shape[:2], case.value_dim or case.head_dim), NAN, dtype=dtype, device=DEVICE)
    expected, scratch = actual.double(), prefill_scratch(work, actual)
    prefill_attention(q, cache.view, work, scratch, actual, layer=layer, manner=manner, config=config)
    twin.prefill_attention(q.double(), cache.double().twin_view, work, scratch, expected, layer=layer, manner=manner)
    covered = torch.zeros(count, dtype=torch.bool)
    for _, first, length, _ in chunks:
        covered[first : first + length] = True
    assert (~expected.isnan()).all(dim=-1).all(dim=-1).tolist() == covered.tolist()
    assert_same(actual, expected, dtype, cache.is_bytes)
    return work


def prefill_scratch(work: PrefillWork, out: Tensor) -> Scratch:
    shape = (work.partials, *out.shape[1:])
    return Scratch(torch.full(shape, NAN, device=DEVICE), torch.full(shape[:2], NAN, device=DEVICE), index([]))


@pytest.mark.parametrize(
    ("case", "dtype", "slots"),
    [*((*pair, 10) for pair in typed(CASES, 1)), *((*pair, 0) for pair in typed(SHAPES[::3]))],
    ids=case_id,
)
def test_prefill(case: Case, dtype: torch.dtype, slots: int) -> None:
    """A mixed step: decodes, a whole prompt, a chunk in the middle, one that ends at a tile's edge, and with slots one
    behind a past that is split; gaps in q."""
    chunks = [[2, 0, 1, 76], [0, 1, 1, 0], [3, 2, 37, 0], [1, 42, 33, 31], [4, 80, 5, 59], [5, 88, 7, 190]]
    work = prefill_both(case.cache([1, 64, 77, 37, 64, 197], dtype), case, chunks, 96, dtype, slots)
    splits = {tuple(item[:2]): item[7] for item in work.items.tolist() if item[2]}
    assert (splits[5, 88] > 1) == (slots > 0) and splits[2, 0] == splits[3, 2] == 1 and work.merging == (slots > 0)
    assert all(item[4] % PREFILL_TILE.block_n == 0 for item in work.items.tolist())


def test_prefill_splits_of_which_rows_see_nothing() -> None:
    """The causal edge inside of the last split: it begins behind the chunk's first tokens."""
    case = Case(group=2, kv_heads=1)
    work = prefill_both(case.cache([290], torch.float32), case, [[0, 0, 20, 270]], 20, torch.float32, 10)
    assert max(item[4] for item in work.items.tolist()) == 288, "behind position 270"


def test_prefill_of_a_bucket_merges_what_is_there() -> None:
    """A graph's merge runs for steps without splits too, and after a step with more."""
    cache = paged_cache([300, 40], seed=15, dtype=torch.float32, kv_heads=1, head_dim=64)
    config, manner, layer = PREFILL_TILE, Manner(0.1), cache.layer
    work = PrefillWork(4, 20, 32, DEVICE, slots=6, tile=config.block_n, min_split=32)
    bucket = work.head(3, 12, 24, fixed=True)
    q = fused_heads(torch.Generator().manual_seed(1), 24, 2, 64, torch.float32)
    for chunks in ([[0, 2, 20, 280]], [[1, 1, 9, 31]], [[1, 0, 2, 30], [0, 2, 3, 150]]):
        bucket.fill(np.array(chunks, np.int32))
        bucket.buffer.upload()
        assert bucket.merging
        scratch = prefill_scratch(bucket, q)
        actual, expected = torch.full_like(q, NAN), torch.full_like(q, NAN)
        prefill_attention(q, cache.view, bucket, scratch, actual, layer=layer, manner=manner, config=config)
        twin.prefill_attention(q, cache.view, bucket, scratch, expected, layer=layer, manner=manner)
        assert_same(actual, expected, torch.float32)


@pytest.mark.parametrize("seed", range(2))
def test_prefill_of_random_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, sizes = rng.integers(0, 100, 4), rng.integers(1, 50, 4)
    first = np.cumsum(sizes) - sizes
    chunks = [[row, int(first[row]), int(sizes[row]), int(positions[row])] for row in range(4)]
    lengths = [int(n) for n in positions + sizes]
    case = Case(group=int(rng.integers(1, 9)), kv_heads=1)
    prefill_both(case.cache(lengths, torch.float32), case, chunks, int(sizes.sum()) + 1, torch.float32)


@pytest.mark.parametrize(("window", "chunk"), [(1, 0), (70, 0), (0, 70), (0, 1)])
def test_prefill_sees_a_window(window: int, chunk: int) -> None:
    """Rows of a tile that see nothing of its first keys, chunks that begin inside of a window and behind it."""
    chunks = [[0, 0, 1, 76], [1, 1, 37, 0], [2, 38, 60, 131], [3, 98, 5, 59]]
    case = Case(group=2, kv_heads=1, window=window, chunk=chunk)
    prefill_both(case.cache([77, 37, 191, 64], torch.float32), case, chunks, 104, torch.float32)


def test_prefill_of_nothing_writes_nothing() -> None:
    cache = paged_cache([5], seed=1, dtype=torch.float32, kv_heads=1, head_dim=64)
    work = PrefillWork(2, 4, 8, DEVICE)
    work.fill(np.zeros((0, 4), np.int32))
    work.buffer.upload()
    q = torch.zeros((3, 4, 64), device=DEVICE)
    out = torch.full_like(q, NAN)
    prefill_attention(q, cache.view, work, prefill_scratch(work, q), out, layer=1)
    assert out.isnan().all()


def test_prefill_with_the_table_configuration() -> None:
    dtype = torch.float16
    config = prefill_config(device_arch(DEVICE), 64, dtype)
    case = Case(group=4, kv_heads=1)
    prefill_both(case.cache([300], dtype), case, [[0, 0, 60, 240]], 60, dtype, config=config)


def test_prefill_and_decode_refuse_wrong_shapes() -> None:
    cache = paged_cache([5], seed=1, dtype=torch.float32, kv_heads=2, head_dim=64)
    work, q = PrefillWork(2, 4, 8, DEVICE), torch.zeros((3, 4, 64), device=DEVICE)
    pool, scratch = cache.view, prefill_scratch(work, q)
    with pytest.raises(AssertionError, match="3 query heads over 2 KV heads"):
        prefill_attention(q[:, :3], pool, work, scratch, q[:, :3].clone(), layer=1)
    with pytest.raises(AssertionError, match="heads of a token must be contiguous"):
        prefill_attention(q[:, ::2], pool, work, scratch, q[:, ::2], layer=1)
    with pytest.raises(AssertionError, match="float16"):
        prefill_attention(q.half(), pool, work, scratch, q, layer=1)
    with pytest.raises(AssertionError, match="larger than those of the kernel"):
        prefill_attention(q, pool, PrefillWork(2, 4, 99, DEVICE), scratch, q.clone(), layer=1)
    split = PrefillWork(2, 40, 8, DEVICE, slots=4, tile=16)
    with pytest.raises(AssertionError, match="partial"):
        prefill_attention(q, pool, split, scratch, q.clone(), layer=1)
    split = PrefillWork(2, 40, 8, DEVICE, slots=4, tile=8)
    with pytest.raises(AssertionError, match="begin at 8"):
        prefill_attention(q, pool, split, prefill_scratch(split, q), q.clone(), layer=1)
    with pytest.raises(AssertionError, match="int32 or int64"):
        prefill_attention(q, pool._replace(k_table=pool.k_table.float()), work, scratch, q.clone(), layer=1)
    with pytest.raises(AssertionError, match="pass either v_table or pair"):
        prefill_attention(q, pool._replace(pair=3), work, scratch, q.clone(), layer=1)
    decode = DecodeWork(3, 4, 32, DEVICE)
    counters = index([[0, 0]] * 4)
    with pytest.raises(AssertionError, match="partial"):
        decode_attention(q, pool, decode, Scratch(q, index([0]).float(), counters), q.clone(), layer=1)
    partial, lse = torch.zeros((4, 4, 64), device=DEVICE), torch.zeros((4, 4), device=DEVICE)
    for wrong in (counters[:2], counters[:, :1], counters.long()):
        with pytest.raises(AssertionError, match=r"arrived: \(4, 2\)"):
            decode_attention(q, pool, decode, Scratch(partial, lse, wrong), q.clone(), layer=1)
