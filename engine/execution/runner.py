"""ModelRunner: a SchedulerOutput becomes index tensors, a forward pass and a ModelRunnerOutput.

It owns the pool on device and host and all per-row state, and applies the deltas in the order that
`engine.scheduling.output` documents. Synchronous: call it in a worker thread, one step at a time. Correct on every
torch device, tuned for the CPU.
Knows nothing of scheduling, prefix sharing or text.
"""

import time

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.execution.absorbed import AbsorbedAttention, chunk_limit, clear_begun_blocks, reads_hidden
from engine.execution.attention import Batch, PagedAttention, arrange, clear_new_blocks
from engine.execution.hidden import HiddenPlan, ScratchPlan, has_hidden
from engine.execution.operations import run_operations
from engine.execution.pool import UnitPool
from engine.execution.rows import IntArray, RowTable
from engine.execution.sampler import SampleInput, sample
from engine.execution.sampling_table import SamplingTable
from engine.models.absorption import Absorption
from engine.models.decoder import Decoder
from engine.models.heads import Heads
from engine.models.spec import hidden_offer
from engine.models.weights import LayerWeights
from engine.request import TokenLogprobs
from engine.scheduling.output import INVALID_TOKEN, Collect, ModelRunnerOutput, SchedulerOutput


class ModelRunner:
    """Executes steps on one device. `num_units`: units of the pool (a KV block takes two).

    `scratch_blocks`: blocks of hidden state that one step may read or write; 0 refuses them altogether. `host_units`:
    units of the host tier. Raises ConfigError for scratch where the model's hidden state is no use as a cache.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_units: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        dtype: torch.dtype,
        scratch_blocks: int = 0,
        host_units: int = 0,
    ) -> None:
        spec = decoder.spec
        if scratch_blocks and (refusal := hidden_offer(spec).refusal):
            raise ConfigError(refusal)
        self._heads = Heads(spec, decoder.weights, max_model_len, hidden=scratch_blocks > 0)
        reads = scratch_blocks > 0 and spec.absorbs_kv
        self._absorption = Absorption(spec, decoder.weights) if reads else None
        self.scratch_blocks = scratch_blocks
        self.host_units = host_units
        self._decoder = decoder
        self._device = device
        self._rows = RowTable(max_num_seqs, max_model_len, block_size)
        self._sampling = SamplingTable(max_num_seqs)
        self._pool = UnitPool(
            num_units,
            num_layers=spec.num_layers,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
            scratch_blocks=scratch_blocks,
            num_host_units=host_units,
        )
        self._cell_bytes = 2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize

    def launch(self, output: SchedulerOutput) -> Collect:
        """Run one step; it has ended when this returns."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._rows.apply(output)
            for new in output.new_requests:
                self._sampling.write(new.row, new.sampling)
            if output.operations:
                run_operations(self._heads, self._pool, output.operations)
            tokens, logprobs = self._run(output) if output.chunks else ([], None)
        result = ModelRunnerOutput(output.step_id, tokens, logprobs, time.perf_counter() - began)
        return lambda: result

    def _run(self, output: SchedulerOutput) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        chunks = np.array(output.chunks, dtype=np.int64)
        ends = chunks[:, 1] + chunks[:, 2]
        assert (ends <= self._rows.num_blocks[chunks[:, 0]] * self._rows.block_size).all(), "a block table is too short"
        batch, attention, observe = self._plan(chunks)
        hidden = self._forward(batch, attention, observe)
        samples = np.flatnonzero(chunks[:, 3])
        if not samples.size:
            return [], None
        place = np.empty(len(chunks), dtype=np.int64)
        place[batch.order] = np.arange(len(chunks))
        places = place[samples]
        last_tokens = torch.from_numpy(batch.firsts[places] + batch.lengths[places] - 1).to(self._device)
        logits = self._decoder.logits(hidden.index_select(0, last_tokens))
        return self._sample(logits, batch.rows[places], batch.starts[places] + batch.lengths[places])

    def _plan(self, chunks: IntArray) -> tuple[Batch, PagedAttention, HiddenPlan | None]:
        """Who attends to what, and where. Hidden state is read as it is where the model allows it and the chunk is
        short; the past of other chunks passes through scratch."""
        pool, rows = self._pool, self._rows
        hidden = has_hidden(rows, chunks)
        if not hidden or self._absorption is None:
            absorbed = np.zeros(len(chunks), dtype=np.bool_)
        else:
            absorbed = reads_hidden(rows, chunks, chunk_limit(self._decoder.spec))
        others, scratch = chunks[~absorbed], None
        if hidden and len(others):
            scratch = ScratchPlan(rows, others, self.scratch_blocks)
            scratch.enter(pool, rows, others)
        clear_new_blocks(pool, rows, others)
        if absorbed.any():
            clear_begun_blocks(pool, rows, chunks[absorbed])
        batch = arrange(chunks, rows, self._cell_bytes, np.flatnonzero(absorbed))
        attention = PagedAttention(pool, rows, batch, self._absorb(chunks, batch))
        return batch, attention, HiddenPlan(self._heads, pool, rows, others, scratch, batch) if hidden else None

    def _absorb(self, chunks: IntArray, batch: Batch) -> AbsorbedAttention | None:
        if self._absorption is None or not batch.absorbed:
            return None
        groups = [(int(batch.firsts[first]), chunks[batch.order[first:last]]) for first, last in batch.absorbed]
        return AbsorbedAttention(self._absorption, self._pool, self._rows, groups, self._decoder.spec.hidden_size)

    def _forward(self, batch: Batch, attention: PagedAttention, observe: HiddenPlan | None) -> Tensor:
        token_ids = self._rows.tokens[batch.token_rows, batch.positions]
        positions = torch.from_numpy(batch.positions).to(self._device)
        rotary = self._heads.rotary(positions)

        def attend(index: int, layer: LayerWeights, x: Tensor) -> Tensor:
            if observe is not None:
                observe(index, x)
            return attention(index, *self._heads.qkv(layer, x, rotary))

        hidden = self._decoder.embed(torch.from_numpy(token_ids).to(self._device), positions)
        return self._decoder.run(hidden, attend)

    def _sample(
        self, logits: Tensor, rows: IntArray, ends: IntArray
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        known = [self._rows.tokens[row, :end] for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        tokens, logprobs = sample(logits, self._sampling, SampleInput(rows, self._rows.num_prompt[rows], known))
        # an invalid token ends its request; a step already in flight behind it still needs some id to read
        self._rows.tokens[rows, ends] = np.where(tokens == INVALID_TOKEN, 0, tokens)
        return tokens.tolist(), logprobs
