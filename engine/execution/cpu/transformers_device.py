"""A device that runs transformers' modules: attention over our pool, everything else theirs (see the model).

If the linear layers are those of the native library, the library computes attention and all known decoder layers as
well. Otherwise attention is the given function, or torch's.
"""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.attention import PagedAttention, arrange, clear_begun_blocks
from engine.execution.cpu.device import PoolDevice
from engine.execution.cpu.native.attention import NativeAttention
from engine.execution.cpu.native.layers import NativeLayers, known_groups
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.layout import Layout
from engine.execution.masks import FinishMasks
from engine.execution.plan import LaunchPlan
from engine.execution.pool import UnitPool
from engine.execution.pooling import TakeHidden
from engine.execution.rows import RowTable
from engine.execution.samples import DeviceSamples
from engine.execution.states import StateTable
from engine.models.manner import Manner
from engine.models.transformers_model import Attend, TransformersModel
from predictor.limits import Limits


class StepAttention(Protocol):
    """Attends for each layer of a step that was begun."""

    def begin(self, chunks: IntArray) -> Layout:
        """From now on calls are of the tokens of these chunks [n, 4], in the order of the layout."""
        ...

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, manner: Manner, /) -> Tensor: ...


MakeAttention = Callable[[UnitPool, RowTable], StepAttention]


class TransformersDevice(PoolDevice):
    """`host_units`: units of the host tier. `attention`: makes what attends, of a pool and its rows. `state_slots`: of
    checkpoints of recurrent layers, none where these cannot go on from one; `host_state_slots`: on the host. There is
    no hidden state to run from."""

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
        super().__init__(UnitPool.of(model.shape, limits, model.like, 0, host_units), RowTable(limits))
        self._model = model
        states = model.states()
        goes_on = all(each.resumes for each in states.values())
        self.state_slots, self.host_state_slots = (state_slots, host_state_slots) if goes_on else (0, 0)
        self._states = StateTable(states, limits.max_num_seqs, self.state_slots, self.host_state_slots)
        native = _native_of(model)
        self._attend: StepAttention | None = None
        self._layers: NativeLayers | None = None
        self.known_layers = 0
        if native is not None:
            length, groups = limits.max_model_len, known_groups(model)
            self._attend = NativeAttention(native, self.pool, self.rows, length)
            self._layers = NativeLayers(native, groups, self.pool, self.rows, self._attend, length)
            self.known_layers = sum(map(len, groups))
        elif attention is not None:
            self._attend = attention(self.pool, self.rows)
        self._cell_bytes = 2 * model.shape.kv_size * model.like.dtype.itemsize

    @classmethod
    def of(cls, model: TransformersModel, plan: LaunchPlan, attention: MakeAttention | None = None) -> Self:
        """The device of a launch."""
        return cls(
            model, plan.limits, host_units=plan.host_units, attention=attention, state_slots=plan.state_slots,
            host_state_slots=plan.host_state_slots,
        )  # fmt: skip

    def restore(self, _units: IntArray, _starts: IntArray) -> None:
        """See CacheMover; nobody keeps hidden state here."""
        raise NotImplementedError

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device. The host chooses all tokens."""
        assert take is None, "a vector is asked of a model that makes none"
        del masks
        pool, rows = self.pool, self.rows
        layout, attend = self._attention(chunks)
        ids, positions, keep = (
            torch.from_numpy(each).to(pool.device)
            for each in (rows.tokens[layout.token_rows, layout.positions], layout.positions, layout.sampled_tokens)
        )
        recur = self._states.of_step(layout, pool.device, rows.take_state_moves())
        adapt = self.adapters.of_step(rows.adapters[layout.token_rows], pool.device) if self.adapters else None
        layers = self._layers if adapt is None else None
        return self._model.forward(ids, positions, attend, keep, recur, adapt, layers), None

    def _attention(self, chunks: IntArray) -> tuple[Layout, Attend]:
        """The order of a step's tokens, and what attends for each layer."""
        if self._attend is not None:
            return self._attend.begin(chunks), self._attend
        clear_begun_blocks(self.pool, self.rows, chunks)
        batch = arrange(chunks, self.rows, self._cell_bytes)
        return batch.layout, PagedAttention(self.pool, self.rows, batch)


def _native_of(model: TransformersModel) -> Native | None:
    """The library that computes the model's linear layers."""
    return next((layer.native for layer in model.linear_layers() if isinstance(layer, NativeLinear)), None)
