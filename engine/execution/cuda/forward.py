"""Forward pass of a step through the kernels, from token ids on the device to the next tokens on the device, and its
CUDA graphs, one for every step shape, captured at start.

It runs the decoder with fused kernels and a paged cache, and takes the greedy token of every sample. It fits one CUDA
graph, because it never waits for the device and all inputs and outputs have fixed addresses. GEMMs use cuBLAS. A decode
step with a gated MLP has nine kernels per layer, and six outside the layers.

A capture must not wait for the device or include one-time work (loading a kernel, creating a cuBLAS workspace), so
every shape first runs once without a graph, and once as a graph afterwards. All graphs share one memory pool, because
they run one at a time and their results are outside of it.

Hidden state on a GPU: projected to K and V once (restore), or in every layer of a step (Apt-Serve §4).

Kernels address tokens by row and position. A step assigns two scratch slices to each hidden block of its rows and
enters them in the K and V tables (see `ScratchPlan`). Before a layer attends, the input of new tokens is
stored; past tokens are gathered, projected, and written to scratch by the kernel that writes new K and V. A restore
does the same for rows of a temporary table. Such steps run without a graph, because the number of projected tokens
varies.
"""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from engine.arrays import Int32Array, IntArray
from engine.execution.cuda.buffers import StepBuffers, StepInputs, send
from engine.execution.pool import UnitPool
from engine.execution.pooling import Head
from engine.execution.rows import Layout, RowTable, ScratchPlan
from engine.execution.stream import DeviceStream
from engine.limits import Limits
from engine.models import torch_ops
from engine.models.attention import Manner, PoolView, manners_of
from engine.models.decoder import Adapt, Branch, Decoder, product
from engine.models.rope import RopeSpec
from engine.models.spec import ModelSpec
from engine.models.torch_ops import attention_scaling, inverse_frequencies
from engine.models.weights import LayerWeights, ModelWeights, embedding_scale
from engine.triton_kernels import Kernels

_NO_CHANGES = np.zeros(0, dtype=np.int64)
PIECE = 2048
"""Maximum number of tokens per projection, enough for the full rate of matrix products and small beside a step."""


class DeviceTables:
    """Tables on the device.

    Attributes:
        tables: [1 to 3, rows, max_blocks] int32, entries of K, of V unless the pool is paired, and of hidden state if
            there is scratch. An entry is the first slice of a unit, to which kernels add the layer, or negative for
            scratch.
        pair: Slices from K to V of a block in a paired pool; else 0.
        last_tokens: [rows + 1] int32, the last sampled token of each row; padding writes to the additional entry.
    """

    def __init__(self, rows: RowTable, pool: UnitPool) -> None:
        _, num_rows, max_blocks = rows.tables.shape
        shape = (1 if pool.paired else 3 if pool.scratch_blocks else 2, num_rows, max_blocks)
        self.pair = pool.num_layers if pool.paired else 0
        self.tables = torch.zeros(shape, dtype=torch.int32, device=pool.device)
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int32, device=pool.device)
        self._rows, self._num_layers, self._scratch_base = rows, pool.num_layers, pool.scratch_base
        rows.track_changes()

    def view(self, cells: Tensor) -> PoolView:
        """Return the pool with these cells [slices, block_size, kv_heads, head_dim] as kernels take it."""
        return PoolView(cells, self.tables[0], None if self.pair else self.tables[1], self._scratch_base, self.pair)

    def take_changes(self) -> tuple[IntArray, IntArray]:
        """Return changes since the last call: flat indices [n] into `tables`, and their entries [n]."""
        blocks, count = self._rows.take_changes(), len(self.tables)
        if not len(blocks):
            return _NO_CHANGES, _NO_CHANGES
        flat = self._rows.tables.reshape(3, -1)
        if self.pair:
            units = flat[0][blocks]
            assert np.array_equal(flat[1][blocks], units + 1), "in a paired pool V must follow its K"
            return blocks, self._entries_of(units)
        places = blocks + np.arange(count)[:, None] * (self.tables.numel() // count)
        return places.ravel(), self._entries_of(flat[:count, blocks]).ravel()

    def relaid(self, num_layers: int) -> None:
        """Rewrite all entries for units of `num_layers` layers. Waits for the device."""
        self._num_layers = num_layers
        self._rows.take_changes()
        entries = self._entries_of(self._rows.tables[: len(self.tables)]).astype(np.int32)
        self.tables.copy_(torch.from_numpy(entries))

    def _entries_of(self, units: IntArray) -> IntArray:
        entries: IntArray = np.where(units < 0, units, units * self._num_layers)
        return entries


Observe = Callable[[int, Tensor], None]
"""(layer index, x [T, H]): called with the normalised input of a layer's attention, before it attends."""


class Forward:
    """Forward pass; called with the inputs of a step. Callers of its parts call `begin` first.

    Attributes:
        logits: [max_samples, vocab], logits of the step's samples.
        sampled: [max_samples] int32, their greedy tokens; INVALID_TOKEN if logits are not finite.
        tables: See `DeviceTables`; the call also updates `last_tokens` there.
        layers: Layers to run, which are those of the pool.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: ModelWeights,
        kernels: Kernels,
        tables: DeviceTables,
        pool: UnitPool,
        limits: Limits,
    ) -> None:
        self._spec, self._weights, self._kernels = spec, weights, kernels
        self.tables, self._last_tokens = tables.tables, tables.last_tokens
        shape = (-1, pool.block_size, pool.num_kv_heads, pool.head_dim)
        self._pool = tables.view(pool.cells.view(shape) if pool.bytes is None else pool.bytes.values)
        self._units = pool
        self._max_model_len = limits.max_model_len
        self.decoder = Decoder(spec, weights, kernels)
        self.layers = range(spec.num_layers)
        dtype, device = weights.embedding.dtype, weights.embedding.device
        self._embedding_scale = embedding_scale(spec, dtype)
        self._manners = manners_of(spec, weights.layers)
        tables_of = {rope: angle_table(rope, limits.max_model_len, device) for rope in (spec.rope, spec.local_rope)}
        self._cos_sin = [tables_of[spec.rope_of(layer)] for layer in range(spec.num_layers)]
        # For hidden state; on a GPU these are views of the weights.
        self._kv = [layer.qkv.outputs_from(spec.q_size) for layer in weights.layers] if pool.scratch_blocks else []
        # Padding reads results of earlier steps, which must be finite; uninitialised memory may not be.
        self._mixed = torch.zeros(
            (limits.max_num_batched_tokens, spec.num_heads, spec.head_dim), dtype=dtype, device=device
        )
        self.logits = torch.zeros((limits.max_num_seqs, spec.vocab_size), dtype=dtype, device=device)
        self.sampled = torch.zeros(limits.max_num_seqs, dtype=torch.int32, device=device)

    def __call__(
        self,
        inputs: StepInputs,
        observe: Observe | None = None,
        take: Callable[[Tensor, Head], None] | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        self.begin(inputs)
        hidden, delta = self._unsummed(inputs, self.embed(inputs), observe, adapt)
        assert delta is not None, "the model has no layers"
        if take is not None:
            take(self.decoder.normed(self.decoder.summed(hidden, delta)), self.decoder.head)
        self.finish(inputs, hidden, delta, inputs.sample_tokens)

    def begin(self, inputs: StepInputs) -> None:
        """Write the inputs that a kernel writes (`PaddedShape.by_kernel`) and the changes of the tables."""
        if inputs.shape.by_kernel:
            self._kernels.begin_step(
                inputs.control,
                inputs.base,
                self.tables,
                inputs.ids,
                inputs.positions,
                inputs.angles,
                inputs.uniform,
                inputs.decode,
            )

    def embed(self, inputs: StepInputs) -> Tensor:
        """Return the hidden state [T, H] before the first layer."""
        hidden: Tensor = self._kernels.embed_tokens(
            inputs.ids, inputs.source, self._last_tokens, inputs.positions, self._weights.embedding,
            self._embedding_scale, self._weights.positions, self._spec.family.position_offset or 0,
        )  # fmt: skip
        return hidden

    def through(self, inputs: StepInputs, hidden: Tensor) -> Tensor:
        """Run the layers: hidden state [T, H] -> [T, H]."""
        return self.decoder.summed(*self._unsummed(inputs, hidden))

    def _unsummed(
        self,
        inputs: StepInputs,
        hidden: Tensor,
        observe: Observe | None = None,
        adapt: Adapt | None = None,
    ) -> tuple[Tensor, Branch | None]:
        def attend(index: int, layer: LayerWeights, x: Any) -> Tensor:
            with self._units.use(index):
                if observe is not None:
                    if index in self._weights.layers.streamed:
                        self._kv[index] = layer.qkv.outputs_from(self._spec.q_size)
                    observe(index, x)
                return self._attend(index, layer, product(layer.qkv, x), inputs)

        return self.decoder.run_unsummed(hidden, attend, self.layers, adapt, rounds=observe is None)

    def finish(
        self, inputs: StepInputs, hidden: Tensor, delta: Branch | None = None, rows: Tensor | None = None
    ) -> None:
        """Apply the head to the hidden state [samples, H] and sample; `delta`, `rows` as in `Decoder.logits`."""
        # Write to a fixed buffer, so that graphs can share their other memory.
        logits = self.decoder.logits(hidden, delta, rows, self.logits[: inputs.shape.samples])
        best, tokens = logits.max(dim=-1)
        self.accept(inputs, tokens, best)

    def accept(self, inputs: StepInputs, tokens: Tensor, best: Tensor | None = None) -> None:
        """Set the first n samples of the step to `tokens [n]`; a token is invalid if its `best` logit is not finite."""
        count = len(tokens)
        self._kernels.accept_tokens(tokens, best, inputs.sample_rows[:count], self.sampled[:count], self._last_tokens)

    def store(self, layer: int, tables: Tensor, x: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Store x [t, H], attention inputs of tokens at `positions` of `rows`, as hidden state; rows < 0: skip.

        `tables [3, rows, blocks]` as in `DeviceTables`.
        """
        pool = self._pool
        self._kernels.hidden_write(
            x, positions, rows, pool.cells, tables[2], layer=self._units.places[layer], scratch_base=pool.scratch_base
        )

    def project(self, layer: int, tables: Tensor, rows: Tensor, positions: Tensor) -> None:
        """Project tokens at `positions [t]` of `rows [t]` (int32) from their hidden state to their K and V, both found
        in `tables [3, rows, blocks]`."""
        spec, (cells, *_, base, _) = self._spec, self._pool
        place, norm = self._units.places[layer], self._weights.layers[layer].qk_norm
        pool, piece = PoolView(cells, tables[0], tables[1], base), min(PIECE, len(self._mixed))
        for row, position in zip(torch.split(rows, piece), torch.split(positions, piece), strict=True):
            x = self._weights.embedding.new_empty((len(row), spec.hidden_size))
            self._kernels.hidden_gather(x, position, row, cells, tables[2], layer=place, scratch_base=base)
            k, v = self._kv[layer](x).view(len(x), 2, spec.num_kv_heads, spec.head_dim).unbind(1)
            self._kernels.rope_cache_write(
                None, k, v, self._cos_sin[layer], position, row, pool, layer=place,
                k_norm=None if norm is None else norm[spec.num_heads], eps=spec.norm_eps,
            )  # fmt: skip

    def restore(self, units: IntArray, starts: IntArray) -> None:
        """Restore blocks [n] with `units [n, 3]` (hidden state, K, V) and first positions `starts`.

        All cells of a partial block are projected; unused ones are overwritten before they are read.
        """
        pool, device = self._units, self._units.device
        rows, table = _table_of(units * pool.num_layers, starts // pool.block_size)
        positions = (starts[:, None] + np.arange(pool.block_size)).reshape(-1)
        exist = positions < self._max_model_len  # the last block may exceed the longest context
        tokens = np.stack((np.repeat(rows, pool.block_size), positions))[:, exist].astype(np.int32)
        tables, (token_rows, token_positions) = send(table, device), send(tokens, device)
        for layer in range(pool.num_layers):
            self.project(layer, tables, token_rows, token_positions)

    def _attend(self, index: int, layer: LayerWeights, projected: Tensor, inputs: StepInputs) -> Tensor:
        spec, here = self._spec, self._units.places[index - self.layers.start]
        num_heads, kv_heads = spec.num_heads, spec.num_kv_heads
        heads = projected.view(len(projected), num_heads + 2 * kv_heads, spec.head_dim)
        q, k, v = heads.tensor_split((num_heads, num_heads + kv_heads), dim=1)
        norms = (None, None) if layer.qk_norm is None else (layer.qk_norm[0], layer.qk_norm[num_heads])
        self._kernels.rope_cache_write(
            q, k, v, self._cos_sin[index], inputs.positions, inputs.rows, self._pool, layer=here, q_norm=norms[0],
            k_norm=norms[1], eps=spec.norm_eps, angles=inputs.angles,
        )  # fmt: skip
        out = self._mixed[: len(projected)]
        attend(self._kernels, self._pool, inputs, q, out, layer=here, manner=self._manners[index])
        return out.view(len(projected), -1)


def attend(
    kernels: Kernels, pool: PoolView, inputs: StepInputs, q: Tensor, out: Tensor, *, layer: int, manner: Manner
) -> None:
    """Attend q [T, heads, head_dim] of the step's tokens to the pool, which has their K and V; out [T, heads, e]."""
    if count := inputs.shape.decodes:
        kernels.decode_attention(
            q[:count], pool, inputs.decode, inputs.decode_scratch, out[:count], layer=layer, manner=manner
        )
    if inputs.shape.prefill:
        kernels.prefill_attention(q, pool, inputs.prefill, inputs.prefill_scratch, out, layer=layer, manner=manner)


def long_from(rope: RopeSpec | None, max_model_len: int) -> int:
    """Return the place of position 0 of the long factors in `angle_table`; 0: no sequence uses them."""
    return rope.short_context + 1 if rope is not None and 0 < rope.short_context < max_model_len else 0


def angle_table(rope: RopeSpec | None, max_model_len: int, device: torch.device) -> Tensor | None:
    """Return [n, rotary_dim] float32, cosines, then sines: of every position, and from `long_from` on of every position
    with the long factors."""
    if rope is None:
        return None
    second = long_from(rope, max_model_len)
    parts = []
    for is_long, count in ((False, second or max_model_len + 1), *([(True, max_model_len + 1)] if second else [])):
        inv_freq, positions = inverse_frequencies(rope, is_long=is_long).to(device), torch.arange(count, device=device)
        parts.append(torch.cat(torch_ops.rotary_tables(positions, inv_freq, attention_scaling(rope)), dim=-1))
    return torch.cat(parts)


class Graphs:
    """Runs `forward(inputs, adapted=...)` on the inputs of a step, from a graph if there is one for their shape.

    `adapted`: with the LoRA adapters of its rows' slots, which needs graphs of their own.
    """

    def __init__(self, forward: Callable[..., None], stream: DeviceStream) -> None:
        self._forward = forward
        self._stream = stream
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._inputs: list[StepInputs] = []
        self._pool: Any = None

    def capture(self, inputs: StepInputs, *, adapted: bool = False) -> RuntimeError | None:
        """Capture a shape; return the device's error if the capture fails. Raises errors of the run before it.

        The inputs must be on the device, contain only padding, and keep their addresses. CUDA calls of other threads
        do not end the capture.
        """
        assert self._stream.stream is not None, "graphs need a CUDA device"
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._forward(inputs, adapted=adapted)
        self._stream.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            how = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream.stream, capture_error_mode=how):
                self._forward(inputs, adapted=adapted)
        except RuntimeError as error:
            return error.with_traceback(None)
        graph.replay()  # the first launch uploads the graph, which would delay a step
        self._graphs[id(inputs), adapted] = graph
        self._inputs.append(inputs)  # keeps the id valid, and the tensors that the graph reads
        return None

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, inputs: StepInputs, *, adapted: bool = False) -> None:
        graph = self._graphs.get((id(inputs), adapted))
        if graph is None:
            self._forward(inputs, adapted=adapted)
        else:
            graph.replay()


class StepHidden:
    """Hidden state of one step; called with the attention input of each layer, before attention.

    `inputs.stored`: rows of new tokens stored as hidden state, -1 for others. `past [2, t]`: rows and positions of the
    tokens to project.
    """

    def __init__(self, forward: Forward, inputs: StepInputs, past: Int32Array) -> None:
        self._forward, self._inputs = forward, inputs
        self._past = send(past, inputs.positions.device) if past.size else None

    @classmethod
    def of(
        cls, forward: Forward, buffers: StepBuffers, inputs: StepInputs, rows: RowTable, layout: Layout, scratch: int
    ) -> Self:
        """Plan the step: write `buffers` and point the tables of `rows` at scratch of so many blocks, before their
        changes are sent."""
        chunks, block_size = layout.chunks, rows.block_size
        is_hidden = rows.is_hidden[layout.token_rows, layout.positions // block_size]
        buffers.fill_stored(np.where(is_hidden, layout.token_rows, -1))
        plan = ScratchPlan(rows, chunks, scratch)
        plan.enter(rows)
        index, offsets = plan.past_tokens(chunks, block_size)
        members, blocks = plan.rows[plan.first][index], plan.blocks[plan.first][index]
        past = np.stack((members, blocks * block_size + offsets)).astype(np.int32)
        return cls(forward, inputs, past)

    @classmethod
    def padding(cls, forward: Forward, inputs: StepInputs) -> Self:
        """Return a plan that runs all operations without a request."""
        return cls(forward, inputs, np.array([[-1], [0]], dtype=np.int32))

    def __call__(self, layer: int, x: Tensor) -> None:
        """Store x [T, H] of new tokens in hidden blocks, and project the stored past."""
        tables, inputs = self._forward.tables, self._inputs
        self._forward.store(layer, tables, x, inputs.stored, inputs.positions)
        if self._past is not None:
            self._forward.project(layer, tables, *self._past)


def _table_of(entries: IntArray, blocks: IntArray) -> tuple[IntArray, Int32Array]:
    """Return a table [3, rows, blocks] (K, V, hidden state) and the row of each block.

    `entries [n, 3]` (hidden state, K, V) are placed in columns `blocks`; there are as many rows as the most frequent
    column has entries.
    """
    order = np.argsort(blocks, kind="stable")
    rows = np.empty_like(blocks)
    rows[order] = np.arange(len(blocks)) - np.searchsorted(blocks[order], blocks[order])
    table = np.zeros((3, int(rows.max()) + 1, int(blocks.max()) + 1), dtype=np.int32)
    table[:, rows, blocks] = entries[:, (1, 2, 0)].T
    return rows, table
