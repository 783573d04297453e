"""A device for transformers modules, with attention over the engine's pool.

If the linear layers are those of the native library, the library also computes attention. Otherwise
attention is the given function, or torch's.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.device import PagedAttention, PoolDevice, arrange, clear_begun_blocks
from engine.execution.cpu.native.attention import NativeAttention
from engine.execution.cpu.native.linear import NativeLinear
from engine.execution.masks import FinishMasks
from engine.execution.plan import LaunchPlan
from engine.execution.pool import StateTable, UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import Layout, RowTable
from engine.execution.sampler import DeviceSamples
from engine.limits import Limits
from engine.models.attention import Manner
from engine.models.transformers_calls import EngineLinear
from engine.models.transformers_model import Attend, TransformersModel


class StepAttention(Protocol):
    """Attention for the layers of a step."""

    def begin(self, chunks: IntArray) -> Layout:
        """Begin a step with these chunks [n, 4]; later calls pass the tokens in the order of the returned layout."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner, /) -> Tensor:
        """Attend q [T, heads, d] to k [T, kv_heads, d], v [T, kv_heads, e] and the past; returns [T, heads * e].

        Writes k and v to the pool, whose cells may be wider than those of this layer.
        """
        ...


MakeAttention = Callable[[UnitPool, RowTable], StepAttention]


class TransformersDevice(PoolDevice):
    """A Device for transformers models, without hidden state.

    `attention` creates the attention from the pool and its rows. `host_units` are units of the host tier. `state_slots`
    and `host_state_slots` are snapshots of recurrent layers on device and host; there are none if a layer cannot
    continue from one.
    """

    def __init__(
        self,
        model: TransformersModel,
        limits: Limits,
        *,
        host_units: int = 0,
        attention: MakeAttention | None = None,
        state_slots: int = 0,
        host_state_slots: int = 0,
    ) -> None:
        super().__init__(UnitPool.of(model.shape, limits, model.like, host_units=host_units), RowTable(limits))
        self._model = model
        states = model.states()
        goes_on = all(each.resumes for each in states.values())
        self.state_slots, self.host_state_slots = (state_slots, host_state_slots) if goes_on else (0, 0)
        self._states = StateTable(states, limits.max_num_seqs, self.state_slots, self.host_state_slots)
        layers = [each.layer for each in model.module.modules() if isinstance(each, EngineLinear)]
        native = next((each.native for each in layers if isinstance(each, NativeLinear)), None)
        self._attend: StepAttention | None = None
        if native is not None:
            self._attend = NativeAttention(native, self.pool, self.rows, limits.max_model_len)
        elif attention is not None:
            self._attend = attention(self.pool, self.rows)
        self._cell_bytes = 2 * model.shape.kv_size * model.like.dtype.itemsize

    @classmethod
    def of(cls, model: TransformersModel, plan: LaunchPlan, attention: MakeAttention | None = None) -> Self:
        """Create the device of a launch plan."""
        return cls(
            model, plan.limits, host_units=plan.host_units, attention=attention, state_slots=plan.state_slots,
            host_state_slots=plan.host_state_slots,
        )  # fmt: skip

    def restore(self, _units: IntArray, _starts: IntArray) -> None:
        """See Device; not used, because this device keeps no hidden state."""
        raise NotImplementedError

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device. The host samples all tokens."""
        assert take is None, "embeddings are not supported for transformers models"
        del masks
        pool, rows = self.pool, self.rows
        layout, attend = self._attention(chunks)
        ids, positions, keep = (
            torch.from_numpy(each).to(pool.device)
            for each in (rows.tokens[layout.token_rows, layout.positions], layout.positions, layout.sampled_tokens)
        )
        recur = self._states.of_step(layout, pool.device, rows.take_state_moves())
        adapt = self.adapters.of_step(rows.adapters[layout.token_rows], pool.device) if self.adapters else None
        long = rows.is_long[layout.token_rows]
        is_long = torch.from_numpy(long).to(pool.device) if long.any() else None
        return self._model.forward(ids, positions, attend, keep, recur, adapt, is_long), None

    def _attention(self, chunks: IntArray) -> tuple[Layout, Attend]:
        """Return the order of a step's tokens, and the attention of its layers."""
        if self._attend is not None:
            return self._attend.begin(chunks), self._attend
        clear_begun_blocks(self.pool, self.rows, chunks)
        batch = arrange(chunks, self.rows, self._cell_bytes)
        return batch.layout, PagedAttention(self.pool, self.rows, batch)
