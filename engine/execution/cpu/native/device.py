"""CPU device with the forward pass in the C++ library; everything else is inherited from `TorchDevice`.

Steps with hidden state use torch operators with the same weights, because tapes do not support its scratch. So do steps
with adapters if layers are streamed.
"""

from collections.abc import Mapping
from typing import Unpack

import numpy as np
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cpu.attention import clear_begun_blocks
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.linear import Native
from engine.execution.cpu.native.model import NativeModel
from engine.execution.layout import Layout
from engine.execution.masks import FinishMasks
from engine.execution.pool import PoolOptions
from engine.execution.pooling import TakeHidden
from engine.execution.rows import has_hidden
from engine.execution.sampler import DeviceSamples
from engine.limits import Limits
from engine.models.decoder import Decoder
from engine.models.lora import Delta, Site


class NativeDevice(TorchDevice):
    """A `TorchDevice` whose steps run in `native`, the library with its threads."""

    def __init__(self, decoder: Decoder, native: Native, limits: Limits, **pool: Unpack[PoolOptions]) -> None:
        super().__init__(decoder, limits, **pool)
        length = limits.max_model_len
        self._tape_adapts = False
        self._native = NativeModel(native, decoder.spec, decoder.weights, self.pool, self.rows, length)

    def adapt(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        """See Device."""
        self._tape_adapts = not self.decoder.weights.layers.streamed
        if self._tape_adapts:
            dtype = self._native.take_adapters()
            deltas = {site: delta.to(dtype) for site, delta in deltas.items()}
        super().adapt(number, deltas)

    def forward(
        self, chunks: IntArray, masks: FinishMasks | None = None, take: TakeHidden | None = None
    ) -> tuple[Tensor, DeviceSamples | None]:
        """See Device. Unrestricted greedy tokens are chosen here, all others by the host."""
        by_torch = len(self.adapters) > 0 and not self._tape_adapts
        has_adapters = self.rows.adapters[chunks[:, 0]].any()
        if has_hidden(self.rows, chunks) or (has_adapters and by_torch):
            return super().forward(chunks, masks, take)
        if self.pool.scratch_blocks or by_torch:  # a later step with torch reads whole blocks
            clear_begun_blocks(self.pool, self.rows, chunks)
        adapted = None
        if has_adapters:
            numbers = np.repeat(self.rows.adapters[chunks[:, 0]], chunks[:, 2])
            adapted = self.adapters.of_step(numbers, self.pool.device)
        where, table = chunks[chunks[:, 3] > 0, 0], self.rows.sampling
        plain = masks is None and table.plain(where)
        result = self._native.run(
            chunks, logits=not plain, beyond=self.beyond, whole=take is not None, adapters=adapted
        )
        if take is not None:
            hidden = self._native.hidden(int(chunks[:, 2].sum()))
            take(Layout.of(chunks, np.arange(len(chunks))), self.decoder.normed(hidden), self.decoder.head)
        return result.as_given()

    def keep(self, layers: range) -> None:
        """See TorchDevice."""
        super().keep(layers)
        self._native.keep(layers)

    def pass_through(self, chunks: IntArray, hidden: Tensor, wanted: IntArray) -> Tensor:
        """See TorchDevice."""
        return self._native.pass_through(chunks, hidden, wanted, self.beyond)
