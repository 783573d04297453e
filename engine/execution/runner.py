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
from engine.execution.attention import Batch, PagedAttention, arrange, clear_new_blocks
from engine.execution.hidden import HiddenPlan, ScratchPlan, has_hidden
from engine.execution.operations import run_operations
from engine.execution.pool import UnitPool
from engine.execution.rows import IntArray, RowTable
from engine.execution.sampler import SampleInput, sample
from engine.execution.sampling_table import SamplingTable
from engine.models.decoder import Decoder
from engine.models.spec import hidden_offer
from engine.request import TokenLogprobs
from engine.scheduling.output import INVALID_TOKEN, ModelRunnerOutput, SchedulerOutput


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
        if scratch_blocks:
            if refusal := hidden_offer(spec).refusal:
                raise ConfigError(refusal)
            decoder.prepare_project_kv()
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

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. After an exception the rows of the step are undefined and must be written whole again."""
        began = time.perf_counter()
        with torch.inference_mode():
            self._rows.apply(output)
            for new in output.new_requests:
                self._sampling.write(new.row, new.sampling)
            if output.operations:
                run_operations(self._decoder, self._pool, output.operations)
            tokens, logprobs = self._run(output) if output.chunks else ([], None)
        return ModelRunnerOutput(output.step_id, tokens, logprobs, time.perf_counter() - began)

    def _run(self, output: SchedulerOutput) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        chunks = np.array(output.chunks, dtype=np.int64)
        ends = chunks[:, 1] + chunks[:, 2]
        assert (ends <= self._rows.num_blocks[chunks[:, 0]] * self._rows.block_size).all(), "a block table is too short"
        scratch = None
        if has_hidden(self._rows, chunks):
            scratch = ScratchPlan(self._rows, chunks, self.scratch_blocks)
            scratch.enter(self._pool, self._rows, chunks)
        clear_new_blocks(self._pool, self._rows, chunks)
        batch = arrange(chunks, self._rows, self._cell_bytes)
        hidden = self._forward(chunks, batch, scratch)
        samples = np.flatnonzero(chunks[:, 3])
        if not samples.size:
            return [], None
        place = np.empty(len(chunks), dtype=np.int64)
        place[batch.order] = np.arange(len(chunks))
        places = place[samples]
        last_tokens = torch.from_numpy(batch.firsts[places] + batch.lengths[places] - 1).to(self._device)
        logits = self._decoder.logits(hidden.index_select(0, last_tokens))
        return self._sample(logits, batch.rows[places], batch.starts[places] + batch.lengths[places])

    def _forward(self, chunks: IntArray, batch: Batch, scratch: ScratchPlan | None) -> Tensor:
        token_ids = self._rows.tokens[batch.token_rows, batch.positions]
        positions = torch.from_numpy(batch.positions).to(self._device)
        attention = PagedAttention(self._pool, self._rows, batch)
        hidden = self._decoder.embed(torch.from_numpy(token_ids).to(self._device), positions)
        if scratch is None:
            return self._decoder.run_layers(hidden, positions, attention)
        observe = HiddenPlan(self._decoder, self._pool, self._rows, chunks, scratch, batch)
        return self._decoder.run_layers(hidden, positions, attention, observe=observe)

    def _sample(
        self, logits: Tensor, rows: IntArray, ends: IntArray
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        known = [self._rows.tokens[row, :end] for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        tokens, logprobs = sample(logits, self._sampling, SampleInput(rows, self._rows.num_prompt[rows], known))
        # an invalid token ends its request; a step already in flight behind it still needs some id to read
        self._rows.tokens[rows, ends] = np.where(tokens == INVALID_TOKEN, 0, tokens)
        return tokens.tolist(), logprobs
