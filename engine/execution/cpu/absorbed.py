"""Attention that reads hidden state itself, where K and V, or V alone, are linear in it (`engine.models.absorption`).

The queries of such rows are projected instead of their past: no scratch, no projection. One softmax, in float32, over
the scores of a row's hidden blocks and of its KV blocks, so that a row may mix them in any order.

What it costs, per past token and layer, against projecting it to K and V in every step (heads h, head size D, hidden
size H, KV size V = kv_heads * D; c query tokens of the row in this step):

- multiplications: 2·c·h·H absorbed, 2·H·V + 2·c·h·D projected: for a decode of a model with as many KV heads as heads
  1/D of the work (OPT-1.3B: 1/64, OPT-13B: 1/128), and less up to c ≈ D;
- values moved: H absorbed (half of what attention over KV reads, where V = H), H + 4·V projected (K and V are written
  and read again).

Beside that, once a step and layer, W_k and W_v are read again, and 2·h·D·H multiplications a query. So decodes always
run this way. Chunks of prompts do up to `chunk_limit`, a quarter of D: the products here are narrow and the scores'
float32, and reach a part of the rate of the wide packed ones. Measured in bfloat16 with AVX-512 at D = 64, over 1,024
tokens: a decode takes 1/10 to 1/25 of the time of projecting alone, 16 query tokens half of it, 32 as long or longer.

With rotary embeddings, or norms of K, K is projected to scratch as ever (`engine.execution.cpu.hidden`) and V alone is
not: half of what such a past costs. Where weights are packed their V would be kept once more for it, and is not.

Knows nothing of requests, sampling or layers other than attention.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.arrays import BoolArray, IntArray
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.models.absorption import Absorption
from engine.models.spec import ModelSpec

_PIECE = 4 * 1024**2
"""Hidden values that one product reads: in float32 they stay near the caches."""


def chunk_limit(spec: ModelSpec) -> int:
    """The longest chunk that reads hidden state; longer ones project it."""
    return max(1, spec.head_dim // 4)


def reads_hidden(rows: RowTable, chunks: IntArray, limit: int) -> BoolArray:
    """Which chunks [n, >=3] are short enough and have hidden state among the blocks that they use."""
    members, ends = chunks[:, 0], chunks[:, 1] + chunks[:, 2]
    counts = -(-ends // rows.block_size)
    used = rows.is_hidden[members, : int(counts.max())] & (np.arange(int(counts.max())) < counts[:, None])
    found: BoolArray = used.any(axis=1) & (chunks[:, 2] <= limit)
    return found


@dataclass(frozen=True, slots=True)
class AbsorbedGroup:
    """Chunks of `queries` tokens each that share their calls; `first:last` are their tokens.

    `hidden [layers, n * blocks]`: slices of hidden state; `kv [layers, n * 2 * blocks]`: of every chunk its K slices,
    then its V slices, None where no chunk has any; `keys`: of K of the `hidden` blocks, where it is projected.
    `bias [n, queries, 1, keys]`, float32: 0 or -inf, hidden keys first.
    """

    first: int
    last: int
    queries: int
    hidden: Tensor
    keys: Tensor | None
    kv: Tensor | None
    bias: Tensor


class AbsorbedAttention:
    """One step's chunks that read hidden state. `groups`: (first token, chunks [n, >=3]) of equal lengths."""

    def __init__(
        self, absorption: Absorption, pool: UnitPool, rows: RowTable, groups: list[tuple[int, IntArray]], width: int
    ) -> None:
        self._absorption = absorption
        self._pool = pool
        self._width = width
        keyed = not absorption.absorbs_keys
        self._groups = [group for first, chunks in groups for group in _plan(pool, rows, first, chunks, width, keyed)]
        self._first = groups[0][0]

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [T, heads, D] of all the step's tokens -> [t, heads * D] of those from the first group on. What they attend
        to, their own hidden state, K and V included, is stored."""
        q = q[self._first :]
        absorbed, shift = self._absorption.queries(layer, q) if self._absorption.absorbs_keys else (q, None)
        gathered, mass = q.new_empty(*q.shape[:2], self._width), q.new_ones(q.shape[:2], dtype=torch.float32)
        beside: list[tuple[slice, Tensor]] = []
        for group in self._groups:
            tokens = slice(group.first - self._first, group.last - self._first)
            moved = None if shift is None else shift[tokens]
            values = self._attend(group, layer, q[tokens], absorbed[tokens], moved, gathered[tokens], mass[tokens])
            if values is not None:
                beside.append((tokens, values))
        output = self._absorption.values(layer, gathered, mass)
        for tokens, values in beside:
            output[tokens] += values
        return output.flatten(1)

    def _attend(
        self,
        group: AbsorbedGroup,
        layer: int,
        q: Tensor,
        absorbed: Tensor,
        shift: Tensor | None,
        gathered: Tensor,
        mass: Tensor,
    ) -> Tensor | None:
        """Fill `gathered` and `mass` of the group's tokens; the values [t, heads, D] that its KV blocks add."""
        num_chunks, queries, heads = len(group.bias), group.queries, q.shape[1]
        x = self._pool.slices.index_select(0, group.hidden[layer]).view(num_chunks, -1, self._pool.cells.shape[1])
        x = x[..., : self._width]
        by_head = q.view(num_chunks, queries, heads, -1).float()
        if group.keys is not None:
            (k,) = self._gather(group.keys[layer], num_chunks, 1)
            scores = _by_heads(by_head, k.float())
        else:
            by_chunk = absorbed.reshape(num_chunks, queries * heads, -1)
            scores = torch.bmm(by_chunk.float(), x.float().transpose(1, 2)).view(num_chunks, queries, heads, -1)
        if shift is not None:
            scores += shift.view(num_chunks, queries, heads, 1)
        num_hidden, v = x.shape[1], None
        if group.kv is not None:
            k, v = self._gather(group.kv[layer], num_chunks, 2)
            scores = torch.cat((scores, _by_heads(by_head, k.float())), dim=-1)
        weights = scores.mul_(q.shape[2] ** -0.5).add_(group.bias).softmax(dim=-1)
        to_hidden = weights[..., :num_hidden]
        mass.copy_(to_hidden.sum(-1).flatten(0, 1))
        mixed = torch.bmm(to_hidden.reshape(num_chunks, queries * heads, -1).to(x.dtype), x)
        gathered.copy_(mixed.view_as(gathered))
        if v is None:
            return None
        to_kv = weights[..., num_hidden:].to(v.dtype)
        return _by_heads(to_kv, v.transpose(2, 3)).flatten(0, 1)

    def _gather(self, slices: Tensor, num_chunks: int, parts: int) -> tuple[Tensor, ...]:
        """K, or K and V, [n, kv_heads, keys, D]."""
        pool = self._pool
        gathered = pool.slices.index_select(0, slices).view(num_chunks, parts, -1, pool.num_kv_heads, pool.head_dim)
        return gathered.transpose(2, 3).unbind(1)


def _by_heads(x: Tensor, y: Tensor) -> Tensor:
    """x [n, c, heads, a] times the transpose of y [n, kv_heads, b, a] of each head's KV head -> [n, c, heads, b]."""
    num_chunks, queries, heads, _ = x.shape
    kv_heads = y.shape[1]
    split = x.reshape(num_chunks, queries, kv_heads, heads // kv_heads, -1).transpose(1, 2).flatten(2, 3)
    product = torch.matmul(split, y.transpose(2, 3))
    return product.view(num_chunks, kv_heads, queries, -1, y.shape[2]).transpose(1, 2).flatten(2, 3)


def _plan(pool: UnitPool, rows: RowTable, first: int, chunks: IntArray, width: int, keyed: bool) -> list[AbsorbedGroup]:
    """The chunks of one group, in pieces that read at most `_PIECE` values of hidden state (a chunk at least). `keyed`:
    their K is projected."""
    queries = int(chunks[0, 2])
    counts = -(-(chunks[:, 1] + queries) // pool.block_size)
    num_blocks = int(counts.max())
    used = np.arange(num_blocks) < counts[:, None]
    hidden = rows.is_hidden[chunks[:, 0], :num_blocks] & used
    per_piece = max(1, _PIECE // (int(hidden.sum(axis=1).max()) * pool.block_size * width))
    return [
        _plan_piece(pool, rows, first + begin * queries, chunks[part], hidden[part], used[part], keyed)
        for begin in range(0, len(chunks), per_piece)
        for part in [slice(begin, begin + per_piece)]
    ]


def _plan_piece(
    pool: UnitPool, rows: RowTable, first: int, chunks: IntArray, hidden: BoolArray, used: BoolArray, keyed: bool
) -> AbsorbedGroup:
    members, queries = chunks[:, :1], int(chunks[0, 2])
    hidden_blocks, kv_blocks = _compact(hidden), _compact(used & ~hidden)

    def slices(blocks: IntArray, *tables: IntArray) -> Tensor:
        parts = [np.where(blocks >= 0, table[members, blocks], pool.zero_unit) for table in tables]
        return pool.slice_ids(np.stack(parts, axis=1).reshape(-1))

    query_positions = chunks[:, 1:2] + np.arange(queries)
    blocks = np.concatenate((hidden_blocks, kv_blocks), axis=1)
    keys = (blocks[:, :, None] * pool.block_size + np.arange(pool.block_size)).reshape(len(chunks), -1)
    seen = (keys[:, None, :] >= 0) & (keys[:, None, :] <= query_positions[:, :, None])
    bias = np.where(seen, np.float32(0.0), np.float32(-np.inf))[:, :, None, :]
    return AbsorbedGroup(
        first=first,
        last=first + len(chunks) * queries,
        queries=queries,
        hidden=slices(hidden_blocks, rows.hidden_table),
        keys=slices(hidden_blocks, rows.k_table) if keyed else None,
        kv=slices(kv_blocks, rows.k_table, rows.v_table) if kv_blocks.shape[1] else None,
        bias=torch.from_numpy(bias).to(pool.device),
    )


def _compact(chosen: BoolArray) -> IntArray:
    """[n, blocks] -> [n, most chosen in a row]: the numbers of the chosen blocks in order, then -1."""
    order = np.argsort(~chosen, axis=1, kind="stable")[:, : int(chosen.sum(axis=1).max())]
    return np.where(np.take_along_axis(chosen, order, axis=1), order, -1)
