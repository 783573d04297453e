"""Attention kernels against their twins in float64. Run by test_kernels.py, in a process of its own."""

from copy import copy
from itertools import permutations

import numpy as np
import pytest
import torch
from kernel_pool import DEVICE, DTYPES, NAN, PagedCache, assert_same, fused_heads, index, paged_cache, typed
from torch import Tensor

from engine.models.attention import Manner
from engine.triton_kernels import configs
from engine.triton_kernels import twins as twin
from engine.triton_kernels.configs import LaunchConfig, device_arch, prefill_config
from engine.triton_kernels.decode_attention import decode_attention
from engine.triton_kernels.prefill_attention import prefill_attention
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

DECODE_TILE = LaunchConfig(16, 32, 4, 2)
PREFILL_TILE = LaunchConfig(64, 32, 8, 2)
SHAPES = [
    # head_dim, group, kv_heads, block_size, table
    (64, 5, 2, 16, torch.int32),
    (80, 7, 1, 4, torch.int64),
    (96, 2, 2, 32, torch.int32),
    (128, 1, 2, 16, torch.int32),
    (128, 3, 1, 64, torch.int64),
    (256, 8, 1, 8, torch.int32),
]


def case_id(value: object) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    return "-".join(str(part).removeprefix("torch.") for part in parts)


def decode_both(
    cache: PagedCache,
    lengths: list[int],
    rows: list[int],
    group: int,
    dtype: torch.dtype,
    seed: int,
    max_items: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_dim: int = 0,
) -> DecodeWork:
    """Decode request i with lengths[i] tokens of table row rows[i], in a batch with two padded requests."""
    generator = torch.Generator().manual_seed(seed + 1)
    _, _, kv_heads, head_dim = cache.pool.shape
    count, heads = len(rows) + 2, kv_heads * group
    work = DecodeWork(count + 1, max_items, DECODE_TILE.block_n, DEVICE, min_split=DECODE_TILE.block_n)
    work.fill(np.array(rows, np.int32), np.array(lengths, np.int32))
    work.buffer.upload()
    q = fused_heads(generator, count, heads, head_dim, dtype)
    shape = (count, heads, value_dim or head_dim)
    partial = torch.full((max_items, *shape[1:]), NAN, device=DEVICE)
    partial_lse = torch.full((max_items, heads), NAN, device=DEVICE)
    manner = Manner(1.3 * head_dim**-0.5, window, softcap, sinks)
    actual = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
    arrived = torch.zeros((max_items, kv_heads), dtype=torch.int32, device=DEVICE)
    scratch, layer = Scratch(partial, partial_lse, arrived), cache.layer
    decode_attention(q, cache.view, work, scratch, actual, layer=layer, manner=manner, config=DECODE_TILE)
    expected = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
    twin.decode_attention(q.double(), cache.double().twin_view, work, scratch, expected, layer=layer, manner=manner)
    assert expected.isnan().all(-1).all(-1).tolist() == [not length for length in (*lengths, 0, 0)]
    assert_same(actual, expected, dtype)
    assert not arrived.any(), "the next layer counts from zero"
    return work


@pytest.mark.parametrize(("shape", "dtype"), typed(SHAPES), ids=case_id)
def test_decode(shape: tuple[int, int, int, int, torch.dtype], dtype: torch.dtype) -> None:
    head_dim, group, kv_heads, block_size, table_dtype = shape
    seed = DTYPES.index(dtype)
    rng = np.random.default_rng(seed)
    lengths = [int(n) for n in rng.permutation([1, 15, 33, 64, int(rng.integers(70, 140))])]
    cache = paged_cache(
        lengths, seed=seed, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        table_dtype=table_dtype,
    )  # fmt: skip
    rows = [int(n) for n in rng.permutation(len(lengths))]
    batch = [*rows[:3], rows[3], rows[4], rows[0]]  # one context read twice
    contexts = [lengths[row] for row in batch]
    contexts[2] = 0  # an empty context in the middle of the batch
    work = decode_both(cache, contexts, batch, group, dtype, seed, max_items=14)
    counts = work.ranges[:, 1].tolist()
    assert max(counts) > 1 and 1 in counts and 0 in counts, "splits, whole contexts and empty ones are all tested"


PAIRED = [
    # head_dim, value_dim, group, kv_heads, block_size, table, window
    (64, 64, 3, 2, 16, torch.int32, 0),
    (80, 80, 7, 1, 4, torch.int64, 95),
    (24, 16, 4, 2, 16, torch.int32, 0),
    (40, 64, 2, 2, 32, torch.int32, 95),
]


@pytest.mark.parametrize(("shape", "dtype"), typed(PAIRED, 1), ids=case_id)
def test_decode_with_one_table(shape: tuple[int, int, int, int, int, torch.dtype, int], dtype: torch.dtype) -> None:
    """V in the unit behind K: contexts that are split, whole and empty ones."""
    head_dim, value_dim, group, kv_heads, block_size, table_dtype, window = shape
    cache = paged_cache(
        [300, 40], seed=31, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        block_size=block_size, table_dtype=table_dtype, paired=True,
    )  # fmt: skip
    work = decode_both(cache, [300, 40, 0], [0, 1, 0], group, dtype, 31, 64, window, value_dim=value_dim)
    assert work.ranges[0, 1].item() > 4


@pytest.mark.parametrize("slots", [0, 10])
@pytest.mark.parametrize(("shape", "dtype"), typed(PAIRED), ids=case_id)
def test_prefill_with_one_table(
    shape: tuple[int, int, int, int, int, torch.dtype, int], slots: int, dtype: torch.dtype
) -> None:
    """A decode, a whole prompt, and a chunk behind a past that is split or not."""
    head_dim, value_dim, group, kv_heads, block_size, table_dtype, window = shape
    cache = paged_cache(
        [20, 577, 301], seed=32, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        block_size=block_size, table_dtype=table_dtype, paired=True,
    )  # fmt: skip
    chunks = [[2, 0, 1, 300], [0, 1, 20, 0], [1, 23, 7, 570]]
    prefill_both(cache, chunks, 30, group, dtype, PREFILL_TILE, window, slots, value_dim=value_dim)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_merges_more_splits_than_one_tile(dtype: torch.dtype) -> None:
    cache = paged_cache([1300, 40], seed=3, dtype=dtype, kv_heads=1, head_dim=64)
    work = decode_both(cache, [1300, 40], [0, 1], 4, dtype, 3, max_items=64)
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


FEATURES = [
    # softcap, window, sinks
    (0.7, 0, False),
    (0.0, 0, True),
    (0.7, 95, True),
    (30.0, 32, False),
    (0.0, 1, True),
]


@pytest.mark.parametrize(("features", "dtype"), typed(FEATURES), ids=case_id)
def test_decode_caps_scores_and_counts_sinks_once(features: tuple[float, int, bool], dtype: torch.dtype) -> None:
    """Contexts that are split, whole and empty ones."""
    softcap, window, sinks = features
    cache = paged_cache([640, 40], seed=6, dtype=dtype, kv_heads=2, head_dim=64)
    learned = sinks_of(6) if sinks else None
    work = decode_both(cache, [640, 40, 0], [0, 1, 0], 3, dtype, 6, 64, window, softcap, learned)
    assert work.ranges[:3, 1].tolist()[1:] == [2, 0] and work.ranges[0, 1].item() > 16


def test_decode_with_no_room_to_split() -> None:
    cache = paged_cache([90, 40], seed=4, dtype=torch.float32, kv_heads=2, head_dim=64)
    work = decode_both(cache, [90, 40], [1, 0][::-1], 2, torch.float32, 4, max_items=5)
    assert work.ranges[:2, 1].tolist() <= [2, 1]


def test_decode_of_large_scores_does_not_overflow() -> None:
    cache = paged_cache([100], seed=5, dtype=torch.float32, kv_heads=1, head_dim=64)
    cache.pool.mul_(40.0)
    decode_both(cache, [100], [0], 4, torch.float32, 5, max_items=8)


def prefill_both(
    cache: PagedCache,
    chunks: list[list[int]],
    count: int,
    group: int,
    dtype: torch.dtype,
    config: LaunchConfig,
    window: int = 0,
    slots: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_dim: int = 0,
) -> PrefillWork:
    """Compare the kernel with its twin and return the work list; with `slots` contexts of 128 tokens are split."""
    generator = torch.Generator().manual_seed(7)
    _, _, kv_heads, head_dim = cache.pool.shape
    tile = config.block_n
    work = PrefillWork(len(chunks) + 2, 40, config.block_m // group, DEVICE, slots=slots, tile=tile, min_split=32)
    work.fill(np.array(chunks, np.int32))
    work.buffer.upload()
    q = fused_heads(generator, count, kv_heads * group, head_dim, dtype)
    manner, layer = Manner(1.3 * head_dim**-0.5, window, softcap, sinks), cache.layer
    actual = torch.full((*q.shape[:2], value_dim or head_dim), NAN, dtype=dtype, device=DEVICE)
    expected, scratch = actual.double(), prefill_scratch(work, actual)
    prefill_attention(q, cache.view, work, scratch, actual, layer=layer, manner=manner, config=config)
    twin.prefill_attention(q.double(), cache.double().twin_view, work, scratch, expected, layer=layer, manner=manner)
    covered = torch.zeros(count, dtype=torch.bool)
    for _, first, length, _ in chunks:
        covered[first : first + length] = True
    assert (~expected.isnan()).all(dim=-1).all(dim=-1).tolist() == covered.tolist()
    assert_same(actual, expected, dtype)
    return work


def prefill_scratch(work: PrefillWork, out: Tensor) -> Scratch:
    shape = (work.partials, *out.shape[1:])
    return Scratch(torch.full(shape, NAN, device=DEVICE), torch.full(shape[:2], NAN, device=DEVICE), index([]))


@pytest.mark.parametrize(("shape", "dtype"), typed(SHAPES, 1), ids=case_id)
def test_prefill_with_splits(shape: tuple[int, int, int, int, torch.dtype], dtype: torch.dtype) -> None:
    """Chunks behind long pasts are split; a decode and a short prompt beside them stay whole."""
    head_dim, group, kv_heads, block_size, table_dtype = shape
    chunks = [[2, 0, 1, 300], [0, 1, 20, 0], [1, 23, 7, 570], [3, 30, 4, 190]]
    cache = paged_cache(
        [20, 577, 301, 194], seed=12, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        table_dtype=table_dtype,
    )  # fmt: skip
    work = prefill_both(cache, chunks, 36, group, dtype, PREFILL_TILE, slots=10)
    splits = {tuple(item[:2]): item[7] for item in work.items.tolist() if item[2]}
    assert splits[0, 1] == 1 and splits[1, 23] > 4 and splits[3, 30] > 1
    assert all(item[4] % PREFILL_TILE.block_n == 0 for item in work.items.tolist())


def test_prefill_splits_of_which_rows_see_nothing() -> None:
    """The causal edge inside of the last split: it begins behind the chunk's first tokens."""
    cache = paged_cache([290], seed=13, dtype=torch.float32, kv_heads=1, head_dim=64)
    work = prefill_both(cache, [[0, 0, 20, 270]], 20, 2, torch.float32, PREFILL_TILE, slots=10)
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


@pytest.mark.parametrize(("shape", "dtype"), typed(SHAPES), ids=case_id)
def test_prefill(shape: tuple[int, int, int, int, torch.dtype], dtype: torch.dtype) -> None:
    """A mixed step: decodes, a whole prompt, a chunk in the middle and one that ends at a tile's edge; gaps in q."""
    head_dim, group, kv_heads, block_size, table_dtype = shape
    chunks = [[2, 0, 1, 76], [0, 1, 1, 0], [3, 2, 37, 0], [1, 42, 33, 31], [4, 80, 5, 59]]
    lengths = [1, 64, 77, 37, 64]
    cache = paged_cache(
        lengths, seed=11, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        table_dtype=table_dtype,
    )  # fmt: skip
    prefill_both(cache, chunks, 88, group, dtype, PREFILL_TILE)


@pytest.mark.parametrize("seed", range(4))
def test_prefill_of_random_chunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    positions, sizes = rng.integers(0, 100, 4), rng.integers(1, 50, 4)
    first = np.cumsum(sizes) - sizes
    chunks = [[row, int(first[row]), int(sizes[row]), int(positions[row])] for row in range(4)]
    lengths = [int(n) for n in positions + sizes]
    group = int(rng.integers(1, 9))
    cache = paged_cache(lengths, seed=seed, dtype=torch.float32, kv_heads=1, head_dim=64)
    prefill_both(cache, chunks, int(sizes.sum()) + 1, group, torch.float32, PREFILL_TILE)


@pytest.mark.parametrize("slots", [0, 10])
@pytest.mark.parametrize(("features", "dtype"), typed(FEATURES, 1), ids=case_id)
def test_prefill_caps_scores_and_counts_sinks_once(
    features: tuple[float, int, bool], slots: int, dtype: torch.dtype
) -> None:
    """Chunks behind long pasts, which are split or not, beside a short prompt."""
    softcap, window, sinks = features
    cache = paged_cache([20, 300], seed=14, dtype=dtype, kv_heads=2, head_dim=64)
    learned = sinks_of(6) if sinks else None
    chunks = [[0, 0, 20, 0], [1, 20, 7, 293]]
    work = prefill_both(cache, chunks, 27, 3, dtype, PREFILL_TILE, window, slots, softcap, learned)
    assert bool((work.items[:, 7] > 1).any()) == (slots > 0)


@pytest.mark.parametrize("window", [1, 32, 70])
def test_prefill_sees_a_window(window: int) -> None:
    """Rows of a tile that see nothing of its first keys, chunks that begin inside of a window and behind it."""
    chunks = [[0, 0, 1, 76], [1, 1, 37, 0], [2, 38, 60, 131], [3, 98, 5, 59]]
    cache = paged_cache([77, 37, 191, 64], seed=8, dtype=torch.float32, kv_heads=1, head_dim=64)
    prefill_both(cache, chunks, 104, 2, torch.float32, PREFILL_TILE, window)


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
    cache = paged_cache([300], seed=2, dtype=dtype, kv_heads=1, head_dim=64)
    prefill_both(cache, [[0, 0, 60, 240]], 60, 4, dtype, config)


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


WIDTHS = [
    # head_dim, value_dim, group, kv_heads, spare
    (192, 128, 1, 2, 0),  # DeepSeek-V2 and -V3
    (24, 16, 4, 2, 0),
    (40, 64, 3, 1, 8),  # V is the wider one, and cells are wider than both
    (64, 64, 2, 2, 16),
]


@pytest.mark.parametrize(("widths", "dtype"), typed(WIDTHS, 1), ids=case_id)
def test_decode_of_unlike_widths(widths: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Contexts that are split, whole and empty ones, in wide cells, with and without a window and sinks."""
    head_dim, value_dim, group, kv_heads, spare = widths
    cache = paged_cache(
        [300, 40], seed=21, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, spare=spare
    )
    for window, sinks in ((0, None), (95, sinks_of(kv_heads * group))):
        work = decode_both(
            cache, [300, 40, 0], [0, 1, 0], group, dtype, 21, 64, window, sinks=sinks, value_dim=value_dim
        )
        assert work.ranges[0, 1].item() > 4


@pytest.mark.parametrize(("widths", "dtype"), typed(WIDTHS), ids=case_id)
def test_prefill_of_unlike_widths(widths: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Chunks whole and split, with and without a window and sinks."""
    head_dim, value_dim, group, kv_heads, spare = widths
    cache = paged_cache(
        [20, 577], seed=22, dtype=dtype, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, spare=spare
    )
    chunks = [[0, 0, 20, 0], [1, 20, 7, 570]]
    for window, sinks in ((0, None), (95, sinks_of(kv_heads * group))):
        work = prefill_both(cache, chunks, 27, group, dtype, PREFILL_TILE, window, 10, sinks=sinks, value_dim=value_dim)
        assert work.merging
