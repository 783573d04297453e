"""TorchDevice: memory and forward pass in torch operators, also of steps from hidden state (see `ScratchPlan`).

Tuned for the CPU, correct on every torch device. It takes no steps ahead: calls complete in order, and the host
samples.

Paged attention over the unified pool in torch operations.

A step is planned once: which decodes share a batched call, where new K and V go, which slices each call reads, and
which cells it masks. Every layer then uses its row of the index tensors. Decodes are grouped by context length, so that
one long context does not pad many short ones. Prefill chunks run alone, in pieces whose keys end where causality ends.
Whole blocks are gathered with `index_select`.

Decodes use SDPA too: with the query heads of a KV head packed as its query rows, K and V are not repeated, and torch's
flash kernel was faster than batched matmuls. Padding reads the pool's zero unit. Cells after the end of a request are
masked; `clear_begun_blocks` ensures that they hold finite numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.arrays import IntArray
from engine.execution.masks import FinishMasks
from engine.execution.pool import PoolOptions, UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import SLICES_PER_SCRATCH_BLOCK, Layout, RowTable, ScratchPlan, has_hidden
from engine.execution.sampler import DeviceSamples
from engine.execution.stream import DeviceStream
from engine.limits import Limits
from engine.models.attention import PLAIN, HeadProjection, Manner, manners_of
from engine.models.decoder import Attend, Decoder
from engine.models.lora import Adapters, Delta, Site
from engine.models.torch_ops import Rotary, first_seen
from engine.models.weights import LayerSource, LayerWeights

if TYPE_CHECKING:
    from engine.execution.runner import FinishForward
    from engine.execution.stages import NextStage


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
        biases: [n, 1, queries, keys] of 0 or -inf by `Manner.reach`, created on demand.
    """

    first: int
    last: int
    queries: int
    num_keys: int
    slices: Tensor
    positions: Tensor
    biases: dict[int, Tensor] = field(default_factory=dict)


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
        """See StepAttention."""
        self._pool.write(self._k_cells[layer], k)
        self._pool.write(self._v_cells[layer], v)
        outputs = [self._attend(group, layer, q, k, v, manner) for group in self._groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, group: _Group, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner) -> Tensor:
        gathered = self._pool.read(group.slices[layer])
        cells = gathered.view(len(group.positions), 2, group.num_keys, -1)
        keys, values = (_heads_of(cells[:, index], x.shape[1:]) for index, x in enumerate((k, v)))
        attend = _attend_decodes if group.queries == 1 else _attend_chunk
        return attend(q[group.first : group.last], keys, values, self._bias(group, manner.reach), manner)

    def _bias(self, group: _Group, reach: int) -> Tensor:
        if reach not in group.biases:
            group.biases[reach] = _bias(self._pool, group, reach)
        return group.biases[reach]


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


def _bias(pool: UnitPool, group: _Group, reach: int) -> Tensor:
    """Return [n, 1, queries, keys] with -inf where the key comes after the query or before its window or chunk."""
    query = group.positions[:, None, :, None]
    keys = torch.arange(group.num_keys, device=pool.device)
    unseen = keys > query
    if reach:
        unseen |= keys < first_seen(query, reach)
    return torch.zeros(unseen.shape, dtype=pool.dtype, device=pool.device).masked_fill_(unseen, float("-inf"))


PIECE = 1024
"""Tokens projected per call, enough for the full rate of matrix products and few compared with the scratch."""


class HiddenPlan:
    """Hidden state of one step; called with the attention input of each layer, before attention.

    `scratch` is the plan of the step's `chunks [n, >=3]`.
    """

    def __init__(
        self,
        heads: HeadProjection,
        pool: UnitPool,
        rows: RowTable,
        chunks: IntArray,
        scratch: ScratchPlan,
        layout: Layout,
    ) -> None:
        self._heads = heads
        self._cells = pool.cells[:, : heads.hidden_size]
        self._pool = pool
        block_size = pool.block_size
        block, offset = layout.positions // block_size, layout.positions % block_size
        new = np.flatnonzero(rows.is_hidden[layout.token_rows, block])
        self._new = torch.from_numpy(new).to(pool.device)
        self._all_new = len(new) == len(layout.positions)
        self._new_cells = pool.cell_ids(rows.hidden_table[layout.token_rows[new], block[new]], offset[new])
        index, offsets = scratch.past_tokens(chunks, block_size)
        self._past_cells = pool.cell_ids(scratch.units[index], offsets)
        self._k_cells = pool.scratch_cell_ids(-1 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        self._v_cells = pool.scratch_cell_ids(-2 - SLICES_PER_SCRATCH_BLOCK * index, offsets)
        begins = scratch.blocks[scratch.first] * pool.block_size
        positions = torch.from_numpy(begins[index] + offsets).to(pool.device)
        pieces = (slice(first, first + PIECE) for first in range(0, len(index), PIECE))
        self._pieces = [(piece, heads.rotary(positions[piece])) for piece in pieces]

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] of new tokens in hidden blocks, and project the stored past."""
        if self._new.shape[0]:
            fresh = x if self._all_new else x.index_select(0, self._new)
            self._cells.index_copy_(0, self._new_cells[layer], fresh)
        for piece, rotary in self._pieces:
            self._project(layer, piece, rotary[layer])

    def _project(self, layer: int, piece: slice, rotary: Rotary | None) -> None:
        past = self._cells.index_select(0, self._past_cells[layer, piece])
        k, v = self._heads.kv(layer, past, rotary)
        self._pool.cells.index_copy_(0, self._v_cells[piece], v.reshape(len(v), -1))
        self._pool.cells.index_copy_(0, self._k_cells[piece], k.reshape(len(k), -1))


def restore(heads: HeadProjection, pool: UnitPool, layers: LayerSource, units: IntArray, starts: IntArray) -> None:
    """Project blocks [n] once; `units [n, 3]` and `starts [n]` as in Device.

    Unused cells of a partial block hold zeros, whose K and V are finite. There is one pass over the layers, so that
    streamed layers are read once.
    """
    assert pool.stream is None, "blocks of a streamed cache are not restored"
    per_call = max(1, PIECE // pool.block_size)
    parts = []
    for first in range(0, len(units), per_call):
        part = units[first : first + per_call]
        positions = (starts[first : first + per_call, None] + np.arange(pool.block_size)).reshape(-1)
        rotary = heads.rotary(torch.from_numpy(positions).to(pool.device))
        parts.append(([pool.slice_ids(part[:, column]) for column in range(3)], rotary, len(part)))
    for layer in range(pool.num_layers):
        with layers.use(layer) as stored:
            if layer in layers.streamed:
                heads.hold(layer, stored)
            for (sources, k_targets, v_targets), rotary, count in parts:
                cells = pool.slices.index_select(0, sources[layer]).view(count * pool.block_size, -1)
                k, v = heads.kv(layer, cells[:, : heads.hidden_size], rotary[layer])
                pool.slices.index_copy_(0, k_targets[layer], k.reshape(count, -1))
                pool.slices.index_copy_(0, v_targets[layer], v.reshape(count, -1))


class PoolDevice:
    """Common base of devices in torch operators: a pool, its rows, and copies to and from the host tier."""

    pipeline_depth = 0

    def __init__(self, pool: UnitPool, rows: RowTable) -> None:
        self.pool, self.rows, self.adapters = pool, rows, Adapters()
        self.stream = DeviceStream(torch.device("cpu"))  # a no-op stream on any device: work uses the current stream

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        self.adapters.put(number, deltas)

    def swap_out(self, pairs: IntArray) -> None:
        for source, target in pairs.tolist():
            self.pool.host_units[target].copy_(self.pool.units[source])

    def swap_in(self, pairs: IntArray) -> None:
        for source, target in pairs.tolist():
            self.pool.units[target].copy_(self.pool.host_units[source])


class TorchDevice(PoolDevice):
    """A StagedDevice for native models. Raises ConfigError like `UnitPool.of`."""

    def __init__(self, decoder: Decoder, limits: Limits, **pool: Unpack[PoolOptions]) -> None:
        spec, weights = decoder.spec, decoder.weights
        hidden = pool.get("scratch_blocks", 0) > 0
        super().__init__(UnitPool.of(spec, limits, weights.embedding, **pool), RowTable(limits, hidden=hidden))
        self.decoder = decoder
        self.layers = range(spec.num_layers)
        self.beyond: NextStage | None = None
        self._heads = HeadProjection(spec, weights, hidden=hidden)
        self._cell_bytes = 2 * spec.kv_size * weights.embedding.dtype.itemsize

    def restore(self, units: IntArray, starts: IntArray) -> None:
        restore(self._heads, self.pool, self.decoder.weights.layers, units, starts)

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device; the host samples."""
        if self.beyond is not None and take is None:
            return self.begin_forward(chunks, masks)()
        if self.beyond is not None:
            (chunks,) = self.beyond.cut(chunks, whole=True)
        layout, x = self._begin(chunks)
        if self.beyond is not None:
            self.beyond.send(layout.chunks, x[None], np.arange(len(x)))
            ((x,),) = self.beyond.answers()()
        if take is not None:
            take(layout, self.decoder.normed(x), self.decoder.head)
        return self._logits(layout, x), None

    def _logits(self, layout: Layout, x: Tensor) -> Tensor:
        """Return the logits of samples [S, vocab] from hidden state [T, H]."""
        if not layout.sampled.size:
            return x[:0]
        return self.decoder.logits(x.index_select(0, torch.from_numpy(layout.sampled_tokens).to(x.device)))

    def _begin(self, chunks: IntArray) -> tuple[Layout, Tensor]:
        """Run embedding and local layers; return the hidden state [T, H]."""
        batch, hidden = self._plan(chunks)
        layout, device = batch.layout, self.pool.device
        attend = self._attend(batch, hidden)
        token_ids = torch.from_numpy(self.rows.tokens[layout.token_rows, layout.positions]).to(device)
        x = self.decoder.embed(token_ids, torch.from_numpy(layout.positions).to(device))
        adapt = self.adapters.of_step(self.rows.adapters[layout.token_rows], device) if self.adapters else None
        return layout, self.decoder.run(x, attend, self.layers, adapt)

    def begin_forward(self, chunks: IntArray, masks: FinishMasks | None) -> "FinishForward":
        del masks
        assert self.beyond is not None, "no stage follows"
        for part in self.beyond.cut(chunks, whole=False):
            layout, x = self._begin(part)
            self.beyond.send(layout.chunks, x[None], layout.sampled_tokens)
        answers = self.beyond.answers()

        def finish() -> tuple[Tensor, None]:
            x = torch.cat([x for (x,) in answers()])
            return self.decoder.logits(x) if len(x) else x, None

        return finish

    def keep(self, layers: range) -> None:
        self.layers = layers

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        batch, _ = self._plan(chunks)
        layout, chunk = batch.layout, batch.layout.token_rows
        firsts = np.cumsum(chunks[:, 2]) - chunks[:, 2]
        # Reorder tokens for attention, and back.
        came = torch.from_numpy(firsts[chunk] + layout.positions - chunks[chunk, 1])
        x = self.decoder.run(hidden[0].index_select(0, came), self._attend(batch, None), self.layers)
        x = torch.empty_like(x).index_copy_(0, came, x)[None]
        if self.beyond is not None:
            self.beyond.send(chunks, x, wanted)
            return self.beyond.answers()()[0]
        return x.index_select(1, torch.from_numpy(wanted))

    def _plan(self, chunks: IntArray) -> tuple[ChunkGroups, HiddenPlan | None]:
        """Return the layout of the step, and the projection of hidden state of its rows (None: there is none)."""
        pool, rows = self.pool, self.rows
        pool.begin(rows, chunks)
        scratch = ScratchPlan(rows, chunks, pool.scratch_blocks) if has_hidden(rows, chunks) else None
        if scratch is not None:
            scratch.enter(rows)
            pool.clear(scratch.beyond(rows, chunks))
        clear_begun_blocks(pool, rows, chunks)
        batch = arrange(chunks, rows, self._cell_bytes)
        if scratch is None:
            return batch, None
        return batch, HiddenPlan(self._heads, pool, rows, chunks, scratch, batch.layout)

    def _attend(self, batch: ChunkGroups, hidden: HiddenPlan | None) -> Attend:
        layout = batch.layout
        paged = PagedAttention(self.pool, self.rows, batch)
        positions, is_long = (
            torch.from_numpy(each).to(self.pool.device)
            for each in (layout.positions, self.rows.is_long[layout.token_rows])
        )
        rotary = self._heads.rotary(positions, is_long)
        first, spec, streamed = self.layers.start, self.decoder.spec, self.decoder.weights.layers.streamed
        manners = manners_of(spec, self.decoder.weights.layers)

        def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
            with self.pool.use(index):
                if hidden is not None:
                    if index in streamed:
                        self._heads.hold(index, layer)
                    hidden(index, x)
                return paged(index - first, *self._heads.qkv(layer, x, rotary[index]), manners[index])

        return attend
