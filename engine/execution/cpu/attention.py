"""Paged attention over the unified pool in torch operations.

A step is planned once: which decodes share a batched call, where new K and V go, which slices each call reads, and
which cells it masks. Every layer then uses its row of the index tensors. Decodes are grouped by context length, so that
one long context does not pad many short ones. Prefill chunks run alone, in pieces whose keys end where causality ends.
Whole blocks are gathered with `index_select`.

Decodes use SDPA too: with the query heads of a KV head packed as its query rows, K and V are not repeated, and torch's
flash kernel was faster than batched matmuls. Padding reads the pool's zero unit. Cells after the end of a request are
masked; `clear_begun_blocks` ensures that they hold finite numbers.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.arrays import IntArray
from engine.execution.layout import Layout
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.attention import PLAIN, Manner

_PIECE = 128  # query rows of a chunk per call, a compromise between skipped keys and matmul size
_GROUP_COST = 512 * 1024  # bytes of K and V that can be read in the time of the calls of one more group


@dataclass(frozen=True, slots=True)
class ChunkGroups:
    """Layout of a step in groups of chunks; `groups` are ranges of places that attention handles together."""

    layout: Layout
    groups: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that share calls.

    Attributes:
        first: First token of the group.
        last: End of its tokens.
        queries: Length of each chunk.
        num_keys: Padded length of a context.
        slices: [layers, n * 2 * blocks], the K slices of each chunk followed by its V slices, so that threads that
            divide the chunks find gathered data in their own caches.
        positions: [n, queries].
        biases: [n, 1, queries, keys] of 0 or -inf by window (None: no window), created on demand.
    """

    first: int
    last: int
    queries: int
    num_keys: int
    slices: Tensor
    positions: Tensor
    biases: dict[int | None, Tensor] = field(default_factory=dict)


def arrange(chunks: IntArray, rows: RowTable, cell_bytes: int) -> ChunkGroups:
    """Group the chunks [n, 4] (row, start, length, sample) of a step. `cell_bytes`: K and V of a token in one layer."""
    starts, lengths = chunks[:, 1], chunks[:, 2]
    blocks = -(-(starts + lengths) // rows.block_size)
    decodes = np.flatnonzero(lengths == 1)
    decodes = decodes[np.argsort(-blocks[decodes], kind="stable")]
    places = _split(decodes, blocks, max(1, _GROUP_COST // (cell_bytes * rows.block_size))) if decodes.size else []
    places.extend(np.flatnonzero(lengths > 1)[:, None])
    ends = np.cumsum([len(members) for members in places]).tolist()
    return ChunkGroups(Layout.of(chunks, np.concatenate(places)), tuple(zip([0, *ends[:-1]], ends, strict=True)))


def _split(members: IntArray, blocks: IntArray, threshold: int) -> list[IntArray]:
    """Split members (longest context first) where a shorter table for the rest saves more than a group costs."""
    counts = blocks[members]
    saved = (counts[0] - counts) * np.arange(len(members), 0, -1)
    cut = int(saved.argmax())
    if saved[cut] <= threshold:
        return [members]
    return _split(members[:cut], blocks, threshold) + _split(members[cut:], blocks, threshold)


def clear_begun_blocks(pool: UnitPool, rows: RowTable, chunks: IntArray) -> None:
    """Zero the blocks that chunks [n, >=3] begin but do not fill: they are read whole, and masks do not hide a NaN."""
    members, starts, ends = chunks[:, 0], chunks[:, 1], chunks[:, 1] + chunks[:, 2]
    last = ends // rows.block_size
    begun = np.flatnonzero((ends % rows.block_size > 0) & (starts <= last * rows.block_size))
    where = (members[begun], last[begun])
    hidden = rows.is_hidden[where]
    kv_units = (rows.k_table[where][~hidden], rows.v_table[where][~hidden])
    pool.clear(np.concatenate((rows.hidden_table[where][hidden], *kv_units)))


class PagedAttention:
    """Attention of one step, planned for all layers on creation; called with q, k and v of each layer."""

    def __init__(self, pool: UnitPool, rows: RowTable, batch: ChunkGroups) -> None:
        self._pool = pool
        layout = batch.layout
        token_rows, block, offset = (
            layout.token_rows,
            layout.positions // pool.block_size,
            layout.positions % pool.block_size,
        )
        self._k_cells = pool.cell_ids(rows.k_table[token_rows, block], offset)
        self._v_cells = pool.cell_ids(rows.v_table[token_rows, block], offset)
        self._groups = [_plan_group(pool, rows, layout, first, last) for first, last in batch.groups]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner = PLAIN) -> Tensor:
        """Attend q [T, heads, d] to k [T, kv_heads, d], v [T, kv_heads, e] and the past; returns [T, heads * e].

        Writes k and v to the pool, whose cells may be wider than those of this layer.
        """
        self._pool.write(self._k_cells[layer], k)
        self._pool.write(self._v_cells[layer], v)
        outputs = [self._attend(group, layer, q, k, v, manner) for group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, group: _Group, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
        gathered = self._pool.read(group.slices[layer])
        cells = gathered.view(len(group.positions), 2, group.num_keys, -1)
        keys, values = (_heads_of(cells[:, index], x.shape[1:]) for index, x in enumerate((k, v)))
        attend = _attend_decodes if group.queries == 1 else _attend_chunk
        return attend(q[group.first : group.last], keys, values, self._bias(group, manner.window), manner)

    def _bias(self, group: _Group, window: int | None) -> Tensor:
        if window not in group.biases:
            group.biases[window] = _bias(self._pool, group, window)
        return group.biases[window]


def _heads_of(cells: Tensor, shape: torch.Size) -> Tensor:
    """View cells [n, keys, width] as [n, heads, keys, d] of their first heads · d elements; `shape`: heads, d."""
    return torch.unflatten(cells[..., : shape.numel()], -1, shape).transpose(1, 2)


def mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, manner: Manner) -> Tensor:
    """Attend q [n, heads, c, d] to k [n, kv_heads, keys, d], v [n, kv_heads, keys, e] with bias [n, 1, c, keys].

    Returns [n, heads, c, e].
    """
    if manner.softcap is None and manner.sinks is None:
        gqa = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=gqa, scale=manner.scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = torch.unflatten(q, 1, (k.shape[1], -1))  # [n, kv_heads, g, c, d]
    scale = q.shape[-1] ** -0.5 if manner.scale is None else manner.scale
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)).to(wide) * scale
    if manner.softcap is not None:
        scores = torch.tanh(scores / manner.softcap) * manner.softcap
    scores = scores + bias.unsqueeze(1)
    if manner.sinks is not None:
        sinks = manner.sinks.to(wide).view(1, k.shape[1], -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights.to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2)


def _attend_decodes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, manner: Manner) -> Tensor:
    """Attend q [n, heads, d] to k, v [n, kv_heads, keys, d]: [n, heads * d]. Heads of a KV head are its query rows."""
    if manner.softcap is not None or manner.sinks is not None:
        return mix(q.unsqueeze(2), k, v, bias, manner).flatten(1)
    packed = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    return functional.scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=manner.scale).flatten(1)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, manner: Manner) -> Tensor:
    """Attend a chunk, q [c, heads, d], to k, v [1, kv_heads, keys, d] in pieces of `_PIECE` queries: [c, heads * d]."""
    num_queries, num_keys = bias.shape[2:]
    queries, outputs = q.unsqueeze(0).transpose(1, 2), []
    for first in range(0, num_queries, _PIECE):
        last = min(first + _PIECE, num_queries)
        end = num_keys - (num_queries - last)  # later keys are masked for all queries of this piece
        part = mix(queries[:, :, first:last], k[:, :, :end], v[:, :, :end], bias[:, :, first:last, :end], manner)
        outputs.append(part.transpose(1, 2).flatten(2)[0])
    return torch.cat(outputs)


def _plan_group(pool: UnitPool, rows: RowTable, layout: Layout, first: int, last: int) -> _Group:
    starts, lengths, members = layout.starts[first:last], layout.lengths[first:last], layout.rows[first:last]
    blocks = -(-(starts + lengths) // pool.block_size)
    num_blocks, queries = int(blocks.max()), int(lengths[0])
    tables = np.stack((rows.k_table[members, :num_blocks], rows.v_table[members, :num_blocks]), axis=1)
    tables.swapaxes(1, 2)[np.arange(num_blocks) >= blocks[:, None]] = pool.zero_unit
    tables.swapaxes(1, 2)[np.arange(num_blocks) < rows.num_unseen(starts)[:, None]] = pool.zero_unit
    group_first = int(layout.firsts[first])
    return _Group(
        first=group_first,
        last=group_first + int(lengths.sum()),
        queries=queries,
        num_keys=num_blocks * pool.block_size,
        slices=pool.slice_ids(tables.reshape(-1)),
        positions=torch.from_numpy(starts[:, None] + np.arange(queries)).to(pool.device),
    )


def _bias(pool: UnitPool, group: _Group, window: int | None) -> Tensor:
    """Return [n, 1, queries, keys] with -inf where the key comes after the query or before its window."""
    query = group.positions[:, None, :, None]
    keys = torch.arange(group.num_keys, device=pool.device)
    unseen = keys > query
    if window is not None:
        unseen |= keys <= query - window
    return torch.zeros(unseen.shape, dtype=pool.dtype, device=pool.device).masked_fill_(unseen, float("-inf"))
