"""Kernels that read and write the pool: addressing of cached tokens, hidden state, and the write of new K and V.

The pool is `[num_units * layers + scratch_slices, block_size, kv_heads, head_dim]`. An entry t >= 0 is the first slice
of a unit; layer l is slice t + l. An entry t < 0 is scratch slice -t - 1, counted from `scratch_base` = num_units *
layers, and the same for every layer. Offsets are 64 bit because a pool can exceed 2^31 elements.

A paired pool has no scratch. PAIR > 0 slices lie between K and V of a block, and the entry of K locates both.

An 8-bit pool is a view of its values. Bfloat16 scales follow the values of each slice (`engine.models.byte_cells`) and
are read and written as 16-bit integers. SLICE is the length of a slice in bytes.

Hidden state in the pool: store the post-norm input of an attention layer, and gather it to restore K and V. Also
copies of whole units, in the pool or between the pool and a staging buffer.

The state of a token takes the first `hidden_size` elements of its row in the slice (kv_heads * head_dim elements, never
fewer where hidden state is offered). cuBLAS projects the gathered state to K and V, and
`rope_cache_write` stores the result. A unit is contiguous over all layers, so a batch of swaps
needs one launch to the staging buffer and one transfer. Twin: engine.triton_kernels.twins.

RMS norm of the heads of Q and K (if the model has it), rotary embedding, and the write of K and V to the pool.

One pass over the projections of a step: Q is changed in place; rotated K and unchanged V are written to the slices in
their block tables. Without `q`, the kernel is the second half of a restore from hidden state. Half-split ("neox")
layout; the rotary dimensions may be fewer than those of a head, or none. Twin: engine.triton_kernels.twins.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.models.attention import PoolView
from engine.models.byte_cells import is_bytes, slice_elements
from engine.triton_kernels import configs

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"


@triton.jit
def slice_start(entry, layer, scratch_base, SLICE: tl.constexpr):
    """Return the offset of the slice's first element. `entry`: tensor of table entries; SLICE: elements per slice."""
    wide = entry.to(tl.int64)
    return tl.where(wide >= 0, wide + layer, scratch_base - 1 - wide) * SLICE


@triton.jit
def layer_base(pool, layer, SLICE: tl.constexpr, PAIR: tl.constexpr):
    """Return the base pointer for `slice_starts`; in a paired pool it includes the layer, to shorten every address."""
    if PAIR > 0:
        pool += tl.cast(layer, tl.int64) * SLICE
    return pool


@triton.jit
def slice_starts(k_entries, v_entries, layer, scratch_base, SLICE: tl.constexpr, PAIR: tl.constexpr):
    """Return the offsets of the first elements of the slices of K and of V, relative to `layer_base`."""
    if PAIR > 0:
        k_at = k_entries.to(tl.int64) * SLICE
        v_at = k_at + PAIR * SLICE
    else:
        k_at = slice_start(k_entries, layer, scratch_base, SLICE)
        v_at = slice_start(v_entries, layer, scratch_base, SLICE)
    return k_at, v_at


@triton.jit
def token_start(
    table, row, table_stride, position, layer, scratch_base,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Return the offset of one token (all heads, ROW elements) through row `row` of `table`; scalars in and out."""
    entry = tl.load(table + row.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    return slice_start(entry, layer, scratch_base, SLICE) + (position % BLOCK_SIZE) * ROW


@triton.jit
def scale_pointers(pool, starts, tokens, heads, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, KV_HEADS: tl.constexpr):
    """Return pointers to the 16-bit scales of `heads` of `tokens` in 8-bit slices that begin at `starts`."""
    first = (pool + starts + BLOCK_SIZE * ROW).to(tl.pointer_type(tl.int16))
    return first + (tokens % BLOCK_SIZE) * KV_HEADS + heads


@triton.jit
def load_scales(pointers, mask):
    """Return scales as float32; 0 where masked."""
    bits = tl.load(pointers, mask=mask, other=0)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def extent(x):
    """Return the largest finite magnitude of each row of x, and its number of values that are not finite."""
    size = tl.abs(x)
    sound = size < float("inf")
    return tl.max(tl.where(sound, size, 0.0), 1), tl.sum(tl.where(sound, 0, 1), 1)


@triton.jit
def least_scales(highest, unsound):
    """Return the scales of heads, as int16 bits and as float32; NaN if a value is not finite."""
    upwards = ((highest / 127).to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    bits = tl.where(unsound == 0, upwards, 0x7FC0)
    return bits.to(tl.int16), (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def to_steps(x, scales):
    """Return x in steps of `scales`, int8; 0 where a scale is 0 or NaN."""
    steps = tl.where(scales > 0, x, 0.0) * (1 / tl.where(scales > 0, scales, 1.0))
    # Adding 1.5 * 2^23 rounds to the nearest integer.
    whole = (tl.minimum(tl.maximum(steps, -127.0), 127.0) + 12582912.0) - 12582912.0
    return whole.to(tl.int8)


def check_pool(view: PoolView) -> None:
    """Assert the contracts of the pool (four dimensions, 16-byte rows) and of its block tables.

    A pool whose cells are wider than the heads of K (never 8-bit) is a view with the strides of its cells. Heads of V,
    with the width of `v` or `out`, begin at the same offsets as those of K.
    """
    pool, k_table, v_table, _, pair = view
    assert (v_table is None) == (pair > 0), "pass either v_table or pair"
    check_cells(pool, k_table, *([] if v_table is None else [v_table]))


def check_cells(pool: Tensor, *tables: Tensor) -> None:
    """See `check_pool`."""
    assert pool.dim() == 4 and pool.stride(3) == 1 and pool.stride(2) == pool.shape[3], (
        "pool must be [slices, block_size, kv_heads, head_dim] with contiguous heads per token"
    )
    _, block_size, kv_heads, head_dim = pool.shape
    if is_bytes(pool.dtype):
        assert pool.stride(1) == kv_heads * head_dim, "8-bit cells must be as wide as their heads"
        assert pool.stride(0) == slice_elements(block_size, kv_heads, head_dim, pool.dtype), "slices must be adjacent"
    else:
        assert pool.stride(1) >= kv_heads * head_dim, "a cell is narrower than its heads"
        assert pool.stride(0) == block_size * pool.stride(1), "slices must be adjacent"
        assert pool.stride(1) * pool.element_size() % 16 == 0, "a cell must be a multiple of 16 bytes"
    assert block_size & (block_size - 1) == 0, f"block_size {block_size} is not a power of two"
    assert pool.shape[3] * pool.element_size() % 16 == 0, "a head must be a multiple of 16 bytes"
    for table in tables:
        assert table.dim() == 2 and table.stride(1) == 1, "block table must be [rows, max_blocks] with contiguous rows"
        assert table.dtype in (torch.int32, torch.int64), "block table must be int32 or int64"
        assert table.shape == tables[0].shape and table.stride() == tables[0].stride(), "block tables differ in shape"


def check_value_width(pool: Tensor, width: int) -> None:
    """Assert that cells of `pool` have room for heads of V of `width` elements."""
    _, _, kv_heads, head_dim = pool.shape
    assert width * pool.element_size() % 16 == 0, "a head must be a multiple of 16 bytes"
    assert kv_heads * width <= pool.stride(1), f"heads of {width} do not fit in cells of {pool.stride(1)}"
    assert width == head_dim or not is_bytes(pool.dtype), "8-bit cells need K and V of the same width"


def check_queries(q: Tensor, out: Tensor, pool: Tensor) -> None:
    """Assert the contracts of q [n, heads, head_dim] and of out [n, heads, value_dim]."""
    dtype = computed_in(pool, q)
    check_heads("q", q, pool.shape[3], dtype)
    check_heads("out", out, out.shape[2], dtype)
    assert q.shape[:2] == out.shape[:2], f"out {out.shape} differs from q {q.shape}"
    check_value_width(pool, out.shape[2])


def computed_in(pool: Tensor, like: Tensor) -> torch.dtype:
    """Return the type of K and V before storage: the type of `like` for an 8-bit pool."""
    return like.dtype if is_bytes(pool.dtype) else pool.dtype


def check_heads(name: str, value: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    """Assert that `value` is [tokens, heads, head_dim] with contiguous heads, possibly a view of a fused projection."""
    assert value.dim() == 3 and value.shape[2] == head_dim, f"{name}: [tokens, heads, {head_dim}], not {value.shape}"
    assert value.stride(2) == 1 and value.stride(1) == head_dim, f"{name}: the heads of a token must be contiguous"
    assert value.stride(0) * value.element_size() % 16 == 0, f"{name}: rows must start at multiples of 16 bytes"
    assert value.dtype == dtype, f"{name}: {value.dtype}, not {dtype}"


@triton.jit(
    do_not_specialize=["layer", "scratch_base", "table_stride"],
    do_not_specialize_on_alignment=["positions", "rows", "table"],
)
def hidden_kernel(
    x, positions, rows, pool, table, x_stride, table_stride, layer, scratch_base, width,
    BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Program (token, block of columns). Padding is skipped by a write and gathered as zeros."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    row = tl.load(rows + token)
    here = x + token * x_stride + columns
    if row < 0:
        if GATHER:
            tl.store(here, tl.zeros([BLOCK], x.dtype.element_ty), mask=mask)
    else:
        position = tl.load(positions + token)
        SLICE: tl.constexpr = BLOCK_SIZE * ROW
        start = token_start(table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        there = pool + start + columns
        if GATHER:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
        else:
            tl.store(there, tl.load(here, mask=mask), mask=mask)


def hidden_write(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Store x[i] as the hidden state at position positions[i] of table row rows[i]; rows[i] < 0: skip.

    Shapes: x [n, hidden_size]; positions, rows [n] int32 or int64; pool [slices, block_size, kv_heads, head_dim];
    table [rows, max_blocks], entries of hidden units.
    """
    _launch(x, positions, rows, pool, table, layer, scratch_base, gather=False)


def hidden_gather(
    out: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Set out[i] to the hidden state at positions[i] of table row rows[i]; rows[i] < 0: zeros. See `hidden_write`."""
    _launch(out, positions, rows, pool, table, layer, scratch_base, gather=True)


def _launch(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, layer: int, scratch_base: int, gather: bool
) -> None:
    check_cells(pool, table)
    (count, width), row = x.shape, pool.shape[2] * pool.shape[3]
    assert x.stride(1) == 1 and x.dtype == pool.dtype, f"hidden state: contiguous rows of {pool.dtype}, not {x.dtype}"
    assert width <= row, f"hidden size {width} does not fit in {row}, a token's share of a unit"
    for name, index in (("positions", positions), ("rows", rows)):
        assert index.shape == (count,) and index.is_contiguous(), f"{name}: contiguous [{count}], not {index.shape}"
        assert index.dtype in (torch.int32, torch.int64), f"{name}: int32 or int64, not {index.dtype}"
    if count == 0:
        return
    config = configs.FLAT
    hidden_kernel[(count, -(-width // config.block_n))](
        x, positions, rows, pool, table, x.stride(0), table.stride(0), layer, scratch_base, width,
        BLOCK_SIZE=pool.shape[1], ROW=row, BLOCK=config.block_n, GATHER=gather, **config.options,
    )  # fmt: skip


@triton.jit
def unit_copy_kernel(source, target, pairs, source_stride, target_stride, size, BLOCK: tl.constexpr):
    """Program (block of elements, pair)."""
    pair = tl.program_id(1).to(tl.int64)
    origin = tl.load(pairs + pair * 2).to(tl.int64)
    if origin < 0:
        return
    goal = tl.load(pairs + pair * 2 + 1).to(tl.int64)
    elements = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + origin * source_stride + elements, mask=elements < size)
    tl.store(target + goal * target_stride + elements, values, mask=elements < size)


def unit_copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """target[pairs[i, 1]] = source[pairs[i, 0]]; a pair with a negative source is skipped.

    Shapes: source, target [units, elements of a unit], rows contiguous, one dtype; pairs [n, 2] int32 or int64. Source
    and target may be the same memory if no unit is both read and written.
    """
    assert source.dim() == target.dim() == 2 and source.shape[1] == target.shape[1], f"{source.shape}, {target.shape}"
    assert source.stride(1) == target.stride(1) == 1 and source.dtype == target.dtype, "contiguous units of one dtype"
    assert pairs.dim() == 2 and pairs.shape[1] == 2 and pairs.is_contiguous(), f"pairs: [n, 2], not {pairs.shape}"
    assert pairs.dtype in (torch.int32, torch.int64), f"pairs: int32 or int64, not {pairs.dtype}"
    if len(pairs) == 0:
        return
    config, size = configs.COPY, source.shape[1]
    unit_copy_kernel[(-(-size // config.block_n), len(pairs))](
        source, target, pairs, source.stride(0), target.stride(0), size, BLOCK=config.block_n, **config.options
    )


@triton.jit
def normalize(a, b, rest, weight, half, tail, eps, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr):
    """Apply RMS norm over the three parts of each head; elements outside a part are zero."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1) + tl.sum(rest * rest, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    a *= scale * tl.load(weight + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    b *= scale * tl.load(weight + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0).to(tl.float32)
    rest *= scale * tl.load(weight + tail, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
    return a, b, rest


@triton.jit
def transform_heads(
    source, target, scales, weight, cos_sin, block, eps,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    BLOCK_H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Transform heads [block * BLOCK_H, ...) of one token from `source` to `target` (may be the same): norm, rotation,
    and rounding to 8 bits with `scales` if the target has 8 bits."""
    heads = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    half = tl.arange(0, HALF)[None, :]
    tail = ROTARY + tl.arange(0, REST)[None, :]
    turns = (heads < NUM_HEADS) & (half < ROTARY // 2)
    stays = (heads < NUM_HEADS) & (tail < HEAD_DIM)
    first = heads * HEAD_DIM + half
    a = tl.load(source + first, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(source + first + ROTARY // 2, mask=turns, other=0.0).to(tl.float32)
    rest = tl.load(source + heads * HEAD_DIM + tail, mask=stays, other=0.0).to(tl.float32)
    if NORM:
        a, b, rest = normalize(a, b, rest, weight, half, tail, eps, HEAD_DIM, ROTARY)
    kind = source.dtype.element_ty
    x, y = a, b
    if ROTARY > 0:
        cos = tl.load(cos_sin + half, mask=half < ROTARY // 2, other=0.0)
        sin = tl.load(cos_sin + ROTARY // 2 + half, mask=half < ROTARY // 2, other=0.0)
        x, y = a * cos - b * sin, b * cos + a * sin
    x, y, z = x.to(kind), y.to(kind), rest.to(kind)
    cell: tl.constexpr = target.dtype.element_ty
    if cell.primitive_bitwidth == 8:
        wide_x, wide_y, wide_z = x.to(tl.float32), y.to(tl.float32), z.to(tl.float32)
        highest, unsound = extent(wide_x)
        highest_y, unsound_y = extent(wide_y)
        highest_z, unsound_z = extent(wide_z)
        highest = tl.maximum(tl.maximum(highest, highest_y), highest_z)
        bits, step = least_scales(highest, unsound + unsound_y + unsound_z)
        tl.store(scales + heads, bits[:, None], mask=heads < NUM_HEADS)
        x, y = to_steps(wide_x, step[:, None]), to_steps(wide_y, step[:, None])
        z = to_steps(wide_z, step[:, None])
    if ROTARY > 0:
        tl.store(target + first, x, mask=turns)
        tl.store(target + first + ROTARY // 2, y, mask=turns)
    if ROTARY < HEAD_DIM:
        tl.store(target + heads * HEAD_DIM + tail, z, mask=stays)


@triton.jit(
    do_not_specialize=["layer", "scratch_base", "table_stride"],
    do_not_specialize_on_alignment=["positions", "places", "rows", "k_table", "v_table"],
)  # a restore has its own tables and token counts of any size
def rope_cache_kernel(
    q, k, v, cos_sin, positions, places, rows, pool, k_table, v_table, q_weight, k_weight, q_stride, k_stride, v_stride,
    table_stride, layer, scratch_base, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, SLICE: tl.constexpr, Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr, BLOCK_H: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
    PAIR: tl.constexpr,
):  # fmt: skip
    """Program (token, block of heads): blocks of Q first, then of K, then of V."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + BLOCK_H - 1) // BLOCK_H
    KV_BLOCKS: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    row = tl.load(rows + token)
    if row < 0:
        return
    position = tl.load(positions + token)
    angles = cos_sin + tl.load(places + token).to(tl.int64) * ROTARY
    cell: tl.constexpr = pool.dtype.element_ty
    if part < Q_BLOCKS:
        at = q + token * q_stride
        transform_heads(
            at, at, at, q_weight, angles, part, eps, Q_HEADS, HEAD_DIM, ROTARY, Q_NORM, BLOCK_H, HALF, REST
        )  # fmt: skip
    elif part < Q_BLOCKS + KV_BLOCKS:
        to = token_start(k_table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        scales = pool
        if cell.primitive_bitwidth == 8:
            scales = scale_pointers(pool, to - position % BLOCK_SIZE * ROW, position, 0, BLOCK_SIZE, ROW, KV_HEADS)
        transform_heads(
            k + token * k_stride, pool + to, scales, k_weight, angles, part - Q_BLOCKS, eps, KV_HEADS, HEAD_DIM, ROTARY,
            K_NORM, BLOCK_H, HALF, REST,
        )  # fmt: skip
    else:
        to = token_start(v_table, row, table_stride, position, layer, scratch_base, BLOCK_SIZE, ROW, SLICE)
        to += PAIR * SLICE  # a paired pool has only the table of K
        heads = (part - Q_BLOCKS - KV_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        dims = tl.arange(0, WIDE)[None, :]
        mask = (heads < KV_HEADS) & (dims < VALUE_DIM)
        values = tl.load(v + token * v_stride + heads * VALUE_DIM + dims, mask=mask, other=0)
        if cell.primitive_bitwidth == 8:
            wide = values.to(tl.float32)
            highest, unsound = extent(wide)
            bits, step = least_scales(highest, unsound)
            at = scale_pointers(pool, to - position % BLOCK_SIZE * ROW, position, heads, BLOCK_SIZE, ROW, KV_HEADS)
            tl.store(at, bits[:, None], mask=heads < KV_HEADS)
            tl.store(pool + to + heads * HEAD_DIM + dims, to_steps(wide, step[:, None]), mask=mask)
        else:
            tl.store(pool + to + heads * VALUE_DIM + dims, values, mask=mask)


def rope_cache_write(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    positions: Tensor,
    rows: Tensor,
    pool: PoolView,
    *,
    layer: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    angles: Tensor | None = None,
) -> None:
    """Rotate q in place; write rotated k, and v, of token i to position positions[i] of table row rows[i].

    Args:
        q: [n, heads, head_dim], or None.
        k: [n, kv_heads, head_dim].
        v: [n, kv_heads, value_dim].
        cos_sin: [places, rotary_dim] float32, cosines first; None: no rotation.
        positions: [n] int32 or int64.
        rows: [n] int32 or int64; a token with rows[i] < 0 is padding and is skipped.
        pool, layer: As in `decode_attention`.
        q_norm: Weight [head_dim] of the norm of Q, or None.
        k_norm: Weight [head_dim] of the norm of K, or None.
        angles: [n], of the type of `positions`: rows of `cos_sin`. None: `positions`.
    """
    cells, k_table, v_table, scratch_base, pair = pool
    (count, kv_heads, head_dim), block_size = k.shape, cells.shape[1]
    rotary = 0 if cos_sin is None else cos_sin.shape[1]
    check_pool(pool)
    places = positions if angles is None else angles
    _check(q, k, v, cos_sin, (positions, places, rows), cells, (q_norm, k_norm))
    if count == 0:
        return
    config = configs.HEADS
    # Without rotation and norm, Q is unchanged and needs no programs.
    query, q_heads = (k, 0) if q is None or not (rotary or q_norm is not None) else (q, q.shape[1])
    blocks = -(-q_heads // config.block_m) + 2 * -(-kv_heads // config.block_m)
    rope_cache_kernel[(count, blocks)](
        query, k, v, cells if cos_sin is None else cos_sin, positions, places, rows, cells, k_table,
        k_table if v_table is None else v_table,
        cells if q_norm is None else q_norm, cells if k_norm is None else k_norm, query.stride(0), k.stride(0),
        v.stride(0), k_table.stride(0), layer, scratch_base, eps, Q_HEADS=q_heads, KV_HEADS=kv_heads,
        HEAD_DIM=head_dim, VALUE_DIM=v.shape[2], ROW=cells.stride(1), ROTARY=rotary, BLOCK_SIZE=block_size,
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None, SLICE=cells.stride(0),
        BLOCK_H=config.block_m, HALF=configs.next_power_of_two(max(1, rotary // 2)), **config.options,
        REST=configs.next_power_of_two(max(1, head_dim - rotary)), WIDE=configs.next_power_of_two(v.shape[2]),
        PAIR=pair,
    )  # fmt: skip


def _check(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    indices: tuple[Tensor, ...],
    pool: Tensor,
    norms: tuple[Tensor | None, ...],
) -> None:
    head_dim = pool.shape[3]
    for name, value, width in (("k", k, head_dim), ("v", v, v.shape[2])):
        check_heads(name, value, width, computed_in(pool, k))
        assert value.shape[:2] == k.shape[:2] and value.shape[1] == pool.shape[2], (
            f"{name}: {value.shape}, pool {pool.shape}"
        )
    check_value_width(pool, v.shape[2])
    if q is not None:
        check_heads("q", q, head_dim, k.dtype)
        assert len(q) == len(k), f"{len(q)} queries, {len(k)} keys"
    for name, index in zip(("positions", "angles", "rows"), indices, strict=True):
        assert index.shape == (len(k),) and index.is_contiguous(), f"{name}: contiguous [{len(k)}], not {index.shape}"
        assert index.dtype in (torch.int32, torch.int64), f"{name}: int32 or int64, not {index.dtype}"
    if cos_sin is not None:
        assert cos_sin.dim() == 2 and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32, "cos_sin: float32 2-D"
        assert cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= head_dim, f"rotary_dim {cos_sin.shape[1]}"
    for weight in norms:
        assert weight is None or (weight.shape == (head_dim,) and weight.is_contiguous()), "norm weight: [head_dim]"
