"""LoRA adapters for CUDA graphs: a table of addresses by slot, to which the rows of a step refer.

A graph reads the slots of rows in every step, so that one graph serves rows of any adapters. Adapters without a free
slot, or with too high a rank, get no slot; steps with such rows run without a graph.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.cuda.buffers import send
from engine.models.lora import Adapters, Delta, Site, StepAdapters
from engine.models.spec import ModelSpec
from engine.triton_kernels import Kernels, configs

NUM_SLOTS = 63  # plus slot 0 for no adapter, so that parts of the table start at multiples of 16 bytes
LARGEST_RANK = 192
"""Maximum rank of a site, for example rank 64 for each of q, k and v."""
SLOTS = ("qkv", "out", "up", "down")
"""Adapted matrices of a layer, in the order of `matrices`."""


class SlottedAdapters(Adapters):
    """Adapters with slots. Slot 0 is no adapter. Without `taken` there are no adapters and no table."""

    def __init__(self, spec: ModelSpec, max_rows: int, device: torch.device, *, taken: bool) -> None:
        super().__init__()
        self.taken = taken
        sites = [Site(layer, name) for layer in range(spec.num_layers) for name in SLOTS]
        self._places = {site: place for place, site in enumerate(sites)}
        self._slots: dict[int, int] = {}
        self._free = list(range(NUM_SLOTS, 0, -1)) if taken else []
        widest = max(spec.hidden_size, spec.q_size, spec.intermediate_size)
        count, rows = (len(sites), max_rows) if taken else (0, 0)
        self.table = torch.zeros((count, NUM_SLOTS + 1, 3), dtype=torch.int64, device=device)
        parts = -(-widest // configs.LORA_SPLIT), rows, LARGEST_RANK
        self.partial = torch.zeros(parts, dtype=torch.float32, device=device)

    def put(self, number: int, deltas: Mapping[Site, Delta]) -> None:
        super().put(number, deltas)
        if not self._free or max((len(delta.a) for delta in deltas.values()), default=0) > LARGEST_RANK:
            return
        entries = np.zeros((len(self._places), 3), dtype=np.int64)
        for site, delta in deltas.items():
            assert delta.a.is_contiguous() and delta.b.is_contiguous(), "kernels need contiguous matrices"
            entries[self._places[site]] = delta.a.data_ptr(), delta.b.data_ptr(), len(delta.a)
        slot = self._slots[number] = self._free.pop()
        self.table[:, slot].copy_(send(entries, self.table.device))

    def slots_of(self, numbers: IntArray) -> IntArray | None:
        """Return the slots of the adapters [T]; None if one has no slot."""
        found = [self._slots.get(number, -1) if number else 0 for number in numbers.tolist()]
        return None if -1 in found else np.array(found, dtype=np.int64)

    def table_of(self, site: Site) -> Tensor:
        """Return addresses and ranks [slots, 3] of the adapters of a site."""
        return self.table[self._places[site]]


class StepSlots(StepAdapters):
    """Adapters of a step by table; they apply to all layers, because the host does not know the rows."""

    def __init__(self, adapters: SlottedAdapters, slots: Tensor, kernels: Kernels) -> None:
        """Use the slots [T] of rows in the device tensor `slots`."""
        super().__init__((), len(slots))
        self._adapters, self._slots, self._kernels = adapters, slots, kernels

    def has(self, site: Site) -> bool:  # noqa: ARG002
        return True

    def add(self, site: Site, x: Tensor, y: Tensor) -> None:
        self._kernels.lora_add(x, y, self._slots, self._adapters.table_of(site), self._adapters.partial)
