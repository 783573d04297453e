"""Attention of transformers modules by the CUDA kernels: takes q, k and v of a layer and returns the result.

Twin: `engine.execution.cpu.device.PagedAttention`. Layers may differ in heads, widths of K and V, and variants of
attention. Each shape of heads has its own work lists, which a step fills and sends when it meets the first such layer.
Nothing waits for the device.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cuda.buffers import PaddedShape, StepBuffers, StepInputs
from engine.execution.cuda.forward import DeviceTables, attend
from engine.execution.pool import UnitPool
from engine.execution.rows import Layout, RowTable, decodes_first
from engine.limits import Limits
from engine.models.attention import PLAIN, HeadSizes, Manner
from engine.triton_kernels import Kernels

_NO_CHUNKS = np.zeros((0, 4), dtype=np.int64)


class KernelAttention:
    """A StepAttention over a pool in the model's type, on the current stream."""

    def __init__(self, kernels: Kernels, pool: UnitPool, rows: RowTable, limits: Limits) -> None:
        assert pool.bytes is None and not pool.scratch_blocks, "modules need K and V in their own type"
        self._kernels, self._pool, self._rows = kernels, pool, rows
        self._limits = replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))
        self._tables = DeviceTables(rows, pool)
        self._cells = pool.cells.view(-1, pool.block_size, pool.cells.shape[1])
        self._buffers: dict[HeadSizes, StepBuffers] = {}
        self._inputs: dict[HeadSizes, StepInputs] = {}
        self._sinks: dict[int, tuple[Tensor, Tensor]] = {}  # by id: sinks of the module, and their float32 copy
        self._layout: Layout | None = None

    def begin(self, chunks: IntArray) -> Layout:
        self._layout = decodes_first(chunks)
        self._inputs.clear()
        return self._layout

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner = PLAIN) -> Tensor:
        heads = HeadSizes.seen(q, k, v)
        inputs = self._inputs.get(heads)
        if inputs is None:
            assert self._layout is not None, "begin() must precede attention"
            inputs = self._inputs[heads] = self._send(heads, self._layout, len(self._layout.positions))
        return self._attend(inputs, layer, (q, k, v), manner)

    def warm_up(self, heads: HeadSizes, manner: Manner = PLAIN) -> None:
        """Compile the kernels for these heads and this variant, with a decode and a prompt of padding."""

        def zeros(count: int, width: int) -> Tensor:
            return torch.zeros((2, count, width), dtype=self._pool.dtype, device=self._pool.device)

        q, k = (zeros(count, heads.head_dim) for count in heads[:2])
        inputs = self._send(heads, decodes_first(_NO_CHUNKS), 2, 1)
        self._attend(inputs, 0, (q, k, zeros(heads.kv_heads, heads.value_dim)), manner)

    def _attend(self, inputs: StepInputs, layer: int, parts: tuple[Tensor, Tensor, Tensor], manner: Manner) -> Tensor:
        q, k, v = (each.contiguous() for each in parts)
        pool = self._tables.view(torch.unflatten(self._cells[..., : k[0].numel()], 2, k.shape[1:]))
        self._kernels.rope_cache_write(None, k, v, None, inputs.positions, inputs.rows, pool, layer=layer)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        attend(self._kernels, pool, inputs, q, out, layer=layer, manner=self._with_floats(manner))
        return out.flatten(1)

    def _send(self, heads: HeadSizes, layout: Layout, tokens: int, decodes: int | None = None) -> StepInputs:
        """Write and send a step for these heads; the first one also sends the changes of the tables."""
        buffers = self._buffers.get(heads)
        if buffers is None:
            buffers = self._buffers[heads] = StepBuffers(heads, self._limits, self._pool.dtype, self._pool.device)
        decodes = layout.num_decodes if decodes is None else decodes
        shape = PaddedShape(tokens, decodes, tokens > decodes, self._limits.max_num_seqs, exact=True)
        inputs = buffers.fill(shape, layout, self._rows)
        changes = self._tables.take_changes()
        buffers.fill_changes(*changes)
        buffers.upload()
        buffers.write_tables(self._tables.tables, *changes)
        return inputs

    def _with_floats(self, manner: Manner) -> Manner:
        """Return the variant with sinks in float32."""
        if manner.sinks is None:
            return manner
        known = self._sinks.get(id(manner.sinks))
        if known is None:
            known = manner.sinks, manner.sinks.detach().float().contiguous()
            self._sinks[id(manner.sinks)] = known
        return manner._replace(sinks=known[1])
