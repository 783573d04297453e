"""Twins of the Triton kernels in torch, which check the kernels and replace those that fail on a card.

The module has the functions of `engine.triton_kernels.kernels` with the same parameters. Attention takes one request at
a time, in float32 (float64 stays float64). It reads requests and chunks from a work list, never the kernels' items, so
that a wrong split shows as a difference. The twins in WAITING wait for the device, which a CUDA graph cannot.
"""

import ctypes
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.attention import PLAIN, Manner, PoolView
from engine.models.byte_cells import ByteSlices, dequantize, is_bytes
from engine.models.compact import round_rows, scale_rows
from engine.models.experts import clamped_swiglu, grouped_product, route_experts, sum_experts
from engine.models.torch_ops import (
    add_layer_norm,
    add_rms_norm,
    first_seen,
    gelu_tanh_and_mul,
    silu_and_mul,
    softcap,
)
from engine.triton_kernels import configs
from engine.triton_kernels.work import DecodeWork, PrefillWork, Scratch

__all__ = [
    "accept_tokens", "add_layer_norm", "add_rms_norm", "add_rms_norm_rounded", "begin_step", "clamped_swiglu",
    "count_tokens", "decode_attention", "draw", "embed_tokens", "gelu_tanh_and_mul", "grouped_product",
    "hidden_gather", "hidden_write", "lora_add", "penalise", "prefill_attention", "rope_cache_write", "route_experts",
    "silu_and_mul", "silu_and_mul_rounded", "softcap", "sum_experts", "token_mask", "unit_copy",
]  # fmt: skip

WAITING = frozenset(("decode_attention", "grouped_product", "lora_add", "prefill_attention", "rope_cache_write"))
_QUERIES = 64
"""Queries that attend at once, which limits the memory of their scores."""


def rounded(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Round with `scale`, or with a scale per row if it is None."""
    return round_rows(x) if scale is None else scale_rows(x, scale)


def add_rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: Tensor | None,
    rows: Tensor | None = None,
    inner: Tensor | None = None,
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Like `add_rms_norm`, with the norm as 8-bit floats: values [T, H] e4m3 and scales [T, 1] float32, per row or
    `scale` [1]."""
    normed, total = add_rms_norm(x, residual, weight, eps, rows, inner)
    return rounded(normed, scale), total


def silu_and_mul_rounded(x: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """SwiGLU as 8-bit floats, like `add_rms_norm_rounded`."""
    return rounded(silu_and_mul(x), scale)


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
    """Rotate q in place; write rotated k, and v, to the pool. Shapes as in the kernel's wrapper."""
    real = rows >= 0
    places = (positions if angles is None else angles)[real].long()
    positions, rows = positions[real].long(), rows[real].long()
    turns, cells = None if cos_sin is None else cos_sin[places], pool.cells
    k_slots, v_slots = (
        _token_slots(table, rows, positions, cells, layer, pool.scratch_base) for table in _tables(pool)
    )
    _keep(cells, k_slots, _transform(k[real], turns, k_norm, eps))
    _keep(cells, v_slots, v[real])
    if q is not None:
        q[real] = _transform(q[real], turns, q_norm, eps)


def _transform(x: Tensor, angles: Tensor | None, weight: Tensor | None, eps: float) -> Tensor:
    """Normalise and rotate x [n, heads, head_dim]; angles [n, rotary_dim], cosines first."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if weight is not None:
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(y.dtype)
    if angles is not None:
        half = angles.shape[1] // 2
        cos, sin = angles[:, None, :half], angles[:, None, half:]
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    return y.to(x.dtype)


def decode_attention(
    q: Tensor,
    pool: PoolView,
    work: DecodeWork,
    scratch: Scratch,
    out: Tensor,
    *,
    layer: int,
    manner: Manner = PLAIN,
) -> None:
    """Compute out[i] = softmax(scale * q[i] K^T) V. Shapes as in the kernel's wrapper; scratch is unused."""
    del scratch
    tables, reach = _tables(pool), manner.reach
    for index, (row, length) in enumerate(work.requests.tolist()[: len(q)]):
        if not length:
            continue
        first = max(0, first_seen(length - 1, reach)) if reach else 0
        k, v = _gather(pool, [table[row] for table in tables], first, length, layer, out.shape[2])
        out[index] = _attend(q[index, None], k, v, manner)[0].to(out.dtype)


def prefill_attention(
    q: Tensor,
    pool: PoolView,
    work: PrefillWork,
    scratch: Scratch,
    out: Tensor,
    *,
    layer: int,
    manner: Manner = PLAIN,
) -> None:
    """Compute causal attention of the tokens of every chunk. Shapes as in the kernel's wrapper; scratch is unused."""
    del scratch
    tables, reach = _tables(pool), manner.reach
    for row, first, length, position in work.chunks.tolist():
        oldest, end = max(0, first_seen(position, reach)) if reach else 0, position + length
        k, v = _gather(pool, [table[row] for table in tables], oldest, end, layer, out.shape[2])
        keys = torch.arange(oldest, end, device=q.device)
        for begin in range(0, length, _QUERIES):
            some = slice(first + begin, first + min(begin + _QUERIES, length))
            at = torch.arange(position + begin, position + begin + len(q[some]), device=q.device)[:, None]
            seen = (keys <= at) & (keys >= first_seen(at, reach)) if reach else keys <= at
            out[some] = _attend(q[some], k, v, manner, seen).to(out.dtype)


def _gather(
    pool: PoolView, rows: list[Tensor], first: int, end: int, layer: int, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Return K [n, kv_heads, head_dim] and V [n, kv_heads, value_dim] of tokens [first, end), n = end - first, found
    through `rows`, a row of each block table."""
    cells = pool.cells
    positions = torch.arange(first, end, device=cells.device)
    zeros = torch.zeros_like(positions)
    slots = torch.stack([_token_slots(row[None], zeros, positions, cells, layer, pool.scratch_base) for row in rows])
    if is_bytes(cells.dtype):
        slices, where = ByteSlices.of(cells), (slots // cells.shape[1], slots % cells.shape[1])
        k, v = dequantize(slices.values[where], slices.scales[where], torch.float32)
        return k, v
    return _cells(cells, cells.shape[3])[slots[0]], _cells(cells, value_dim)[slots[1]]


def _keep(pool: Tensor, slots: Tensor, x: Tensor) -> None:
    """Write tokens x [n, kv_heads, head_dim] to slots [n]."""
    if is_bytes(pool.dtype):
        ByteSlices.of(pool).write(slots, x)
    else:
        _cells(pool, x.shape[2])[slots] = x


def _cells(pool: Tensor, width: int) -> Tensor:
    """Return the pool's cells as tokens [n, kv_heads, width], a view."""
    num_slices, block_size, kv_heads, _ = pool.shape
    shape, stride = (num_slices * block_size, kv_heads, width), (pool.stride(1), width, 1)
    return pool.as_strided(shape, stride, pool.storage_offset())


def _attend(q: Tensor, k: Tensor, v: Tensor, manner: Manner, seen: Tensor | None = None) -> Tensor:
    """Attend q [n, heads, head_dim] to k, v [tokens, kv_heads, head_dim], of which `seen [n, tokens]` are visible."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (value.to(wide).repeat_interleave(group, dim=1) for value in (k, v))
    scale = q.shape[2] ** -0.5 if manner.scale is None else manner.scale
    scores = torch.einsum("nhd,thd->nht", q.to(wide), k) * scale
    if manner.softcap:
        scores = manner.softcap * torch.tanh(scores / manner.softcap)
    if seen is not None:
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if manner.sinks is not None:
        scores = torch.cat((scores, manner.sinks.to(wide)[:, None].expand(len(q), -1, 1)), dim=-1)
    return torch.einsum("nht,thd->nhd", scores.softmax(dim=-1)[..., : len(k)], v)


def hidden_write(
    x: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Store x[i] in the pool; rows[i] < 0: skip. Shapes as in the kernel's wrapper."""
    real = rows >= 0
    slots = _token_slots(table, rows[real], positions[real], pool, layer, scratch_base)
    pool.view(-1, pool.shape[2] * pool.shape[3])[slots, : x.shape[1]] = x[real]


def hidden_gather(
    out: Tensor, positions: Tensor, rows: Tensor, pool: Tensor, table: Tensor, *, layer: int, scratch_base: int
) -> None:
    """Set out[i] to the state stored by `hidden_write`; rows[i] < 0: zeros. Shapes as in the kernel's wrapper."""
    real = rows >= 0
    slots = _token_slots(table, rows[real], positions[real], pool, layer, scratch_base)
    out.zero_()
    out[real] = pool.view(-1, pool.shape[2] * pool.shape[3])[slots, : out.shape[1]]


def unit_copy(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Set target[pairs[i, 1]] = source[pairs[i, 0]]; skip negative sources. Shapes as in the kernel's wrapper."""
    real = pairs[pairs[:, 0] >= 0].long()
    target[real[:, 1]] = source[real[:, 0]]


def lora_add(x: Tensor, y: Tensor, slots: Tensor, table: Tensor, _partial: Tensor) -> None:
    """Add b (a x[i]) to y[i]; row slots[i] of the table holds the addresses of the matrices."""
    for slot in set(slots.tolist()):
        at, to, rank = table[slot].tolist()
        if rank:
            places = (slots == slot).nonzero().flatten()
            a, b = _at(at, (rank, x.shape[1]), x), _at(to, (y.shape[1], rank), x)
            y.index_add_(0, places, (x[places] @ a.t()) @ b.t())


def _at(address: int, shape: tuple[int, int], like: Tensor) -> Tensor:
    """Return the tensor at an address, with the type and on the device of `like`."""
    if like.is_cuda:
        memory = {"data": (address, False), "shape": shape, "typestr": f"<i{like.itemsize}", "version": 3}
        return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=memory), device=like.device).view(like.dtype)
    size = shape[0] * shape[1] * like.itemsize
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=like.dtype).view(shape)


def begin_step(
    control: Tensor,
    base: Tensor,
    tables: Tensor,
    ids: Tensor,
    positions: Tensor,
    angles: Tensor,
    uniform: Tensor,
    work: DecodeWork,
) -> None:
    """Write the inputs of one of several steps that decode the same rows. Shapes as in the kernel's wrapper."""
    steps, changes, count, draws = control[:4].long().unbind()
    place, flat, pairs = torch.arange(len(ids), device=ids.device), tables.view(-1), control[4:].view(-1, 2).long()
    pairs = torch.where(torch.arange(len(pairs), device=ids.device)[:, None] < changes, pairs, pairs[:1])
    places = torch.where(changes > 0, pairs[:, 0], 0)  # without a change, the first entry is written as it is
    flat.index_copy_(0, places, torch.where(changes > 0, pairs[:, 1].to(flat.dtype), flat[0]))
    live = place < count
    token, row, start, output = base[:, :4].long().unbind(1)
    length = torch.where(live, start + steps + 1, 0)
    ids.copy_(torch.where(live, torch.where(steps > 0, -1, token), 0))
    positions.copy_((length - 1).clamp(min=0))
    angles.copy_(positions + torch.where(live, base[:, 6], 0))
    work.requests.copy_(torch.stack((torch.where(live, row, 0), length), 1))
    tiles, least = -(-length // work.tile), max(1, -(-work.min_split // work.tile))
    splits = -(-tiles // (-(-tiles.sum() // (len(work.items) - count).clamp(min=1))).clamp(min=least))
    ends = splits.cumsum(0)
    work.ranges[:, :2] = torch.stack((torch.where(live, ends - splits, 0), splits), 1)
    item = torch.arange(len(work.items), device=ids.device)
    request = torch.searchsorted(ends, item, right=True).clamp(max=len(ids) - 1)
    share = (-(-tiles // splits.clamp(min=1)) * work.tile)[request]
    begin = (item - (ends - splits)[request]) * share
    made = torch.stack((request, row[request], begin, torch.minimum(begin + share, length[request])), 1)
    used = item < ends[-1]
    work.items.copy_(torch.where(used[:, None], made, work.items))
    work.items[:, 0].masked_fill_(~used, -1)
    stream = _mix(base.view(torch.int64)[:, 2] + _GOLDEN)
    bits = _mix(stream + (output + steps + 1) * _GOLDEN) >> 12 & 2**52 - 1
    uniform.copy_(torch.where(place < draws, bits.double() * 2.0**-52, uniform))


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _mix(state: Tensor) -> Tensor:
    """Return SplitMix64's mix of 64 bits, whose right shifts fill with zeros."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ (state >> shift & 2 ** (64 - shift) - 1)) * (factor - 2**64)
    return state ^ (state >> 31 & 2**33 - 1)


def embed_tokens(
    ids: Tensor,
    source: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    embedding: Tensor,
    scale: float | None,
    learned: Tensor | None,
    offset: int,
) -> Tensor:
    """Return the hidden state of tokens known to the host, or only to the device. Shapes as in the kernel's wrapper."""
    hidden = functional.embedding(torch.where(ids < 0, last_tokens[source], ids), embedding)
    if scale is not None:
        hidden = hidden * scale
    return hidden if learned is None else hidden + functional.embedding(positions + offset, learned)


def accept_tokens(tokens: Tensor, best: Tensor | None, rows: Tensor, sampled: Tensor, last_tokens: Tensor) -> None:
    """Store sampled tokens, -1 where the best logit is not finite. Shapes as in the kernel's wrapper."""
    sampled.copy_(tokens if best is None else tokens.masked_fill(~best.isfinite(), -1))
    last_tokens.index_copy_(0, rows.long(), sampled.clamp(min=0))


def token_mask(logits: Tensor, places: Tensor, bits: Tensor) -> None:
    """Set logits[places[i], t] to -inf where bit t of bits[i] is not set. Shapes as in the kernel's wrapper."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    forbidden = (bits[:, tokens // 32] >> (tokens % 32)) & 1 == 0
    logits[places.long()] = logits[places.long()].masked_fill(forbidden, -torch.inf)


def penalise(logits: Tensor, places: Tensor, rows: Tensor, history: Tensor, penalties: Tensor) -> None:
    """Penalise logits [samples, vocab] at `places` by their history. Shapes as in the kernel's wrapper."""
    said, values = history[rows.long()], logits[places.long()]
    repetition, frequency, presence = penalties.unsqueeze(2).unbind(1)
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    times = said >> 1
    repeated -= torch.where(times > 0, frequency * times + presence, 0.0)
    logits[places.long()] = torch.where(said > 0, repeated, values)


def count_tokens(history: Tensor, rows: Tensor, places: Tensor, tokens: Tensor) -> None:
    """Count tokens[places] in the history of `rows`, except negative ones. Shapes as in the kernel's wrapper."""
    token_ids = tokens[places.long()].long()
    history[rows.long(), token_ids.clamp(min=0)] += 2 * (token_ids >= 0).to(torch.int32)


def draw(
    logits: Tensor, greedy: Tensor, uniform: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Draw tokens [n] where `temperature` > 0, by sorting. Shapes as in the kernel's wrapper."""
    values, vocab = logits.float(), logits.shape[1]
    best = values.gather(1, greedy.clamp(min=0).long()[:, None])
    weights = ((values - best) / temperature[:, None].clamp(min=1e-30)).exp().nan_to_num(0.0).clamp(max=1.0)
    shares = (weights * configs.SHARE_ONE).long()
    least = (min_p.double() * configs.SHARE_ONE).long().clamp(min=1)[:, None]
    shares = shares * (shares >= least)
    count = (shares > 0).sum(dim=-1, keepdim=True)
    ordered, order = values.masked_fill(shares == 0, -torch.inf).sort(dim=-1, descending=True)
    last = torch.where((top_k[:, None] > 0) & (top_k[:, None] < count), top_k[:, None].long(), count) - 1
    lowest = ordered.gather(1, last.clamp(min=0))
    shares = shares * (values >= lowest)
    goal = (top_p.double()[:, None] * shares.sum(dim=-1, keepdim=True)).ceil().long().clamp(min=1)
    missing = (shares.gather(1, order).cumsum(dim=-1) < goal).sum(dim=-1, keepdim=True).clamp(max=vocab - 1)
    lowest = torch.where(top_p[:, None] < 1, ordered.gather(1, missing), -torch.inf)
    cdf = (shares * (values >= lowest)).cumsum(dim=-1)
    goal = torch.minimum((uniform[:, None] * cdf[:, -1:]).long(), cdf[:, -1:] - 1)
    drawn = torch.searchsorted(cdf, goal, right=True)[:, 0].to(torch.int32)
    return torch.where((greedy < 0) | (temperature <= 0), greedy, drawn)


def _tables(pool: PoolView) -> tuple[Tensor, Tensor]:
    """Return the tables of K and V; in a paired pool V begins `pair` slices after its K."""
    assert (pool.v_table is None) == (pool.pair > 0), "pass either v_table or pair"
    return pool.k_table, pool.k_table + pool.pair if pool.v_table is None else pool.v_table


def _token_slots(table: Tensor, rows: Tensor, positions: Tensor, pool: Tensor, layer: int, scratch_base: int) -> Tensor:
    """Return indices [n] int64 into `pool.flatten(0, 1)` of tokens at `positions` of the requests in `rows` of `table`;
    see engine.triton_kernels.cache for the layout."""
    block_size = pool.shape[1]
    entries = table[rows.long(), positions.long() // block_size].long()
    slices = (entries + layer).where(entries >= 0, scratch_base - 1 - entries)
    return slices * block_size + positions.long() % block_size
