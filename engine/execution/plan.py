"""What will run, as far as it can be decided without loading the weights. Torch-free."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.execution.offload import Offload
from engine.models.byte_cells import INTEGERS
from engine.models.implementation import OWN
from engine.models.lora import AdapterPlan
from engine.models.spec import ModelShape, ModelSpec
from predictor.limits import UNITS_PER_BLOCK, Limits

FLOAT8 = "fp8"
STORED_INTEGERS, STORED_FLOATS = STORED = ("w8a8", "stored fp8")
"""`LaunchPlan.quantization` of layers that compute with the integers, or the floats of 8 bits, of the checkpoint."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`device`: the name of the backend; `dtype`: type of weights and cache. `cache_bytes` of device memory for the
    cache and the units in `limits` are estimates where only the loaded weights show what is left.

    `quantization` of the linear layers: "none", "int8", "fp8", or "w8a8" and "stored fp8" for the integers, or floats
    of 8 bits, of the checkpoint.
    `memory_utilization`: share of a GPU's memory to use. `host_units` of the host tier; `scratch_blocks`: how many
    blocks a step may run from hidden state; `state_slots`: checkpoints of what recurrent layers keep, and
    `host_state_slots` on the host. `int8_cache`: K and V are kept in 8 bits. `kernels`: what steps on a CPU run by, and
    `threads` how many work on one, once known. `offload`: which layers stream; None: all weights stay.
    `stream_seconds`: the part of a step that streaming takes, once measured.
    `droppable`: layers may be given up for a while, for more units (`engine.execution.stages`).
    `adapters`: LoRA beside the weights, which take `adapter_bytes`.
    `implementation` of the layers: "own" or "transformers". `whole`: the model of which `spec` is the part that each of
    `ranks` has; None where all of it is on one. Bytes are of one rank. `notes`: decisions that a user may not expect,
    one sentence each.
    """

    folder: Path
    spec: ModelShape
    device: str
    dtype: str
    limits: Limits
    weight_bytes: int
    memory_utilization: float
    notes: tuple[str, ...]
    cache_bytes: int = 0
    host_units: int = 0
    scratch_blocks: int = 0
    state_slots: int = 0
    host_state_slots: int = 0
    kernels: str = "torch"
    threads: int = 0
    quantization: str = "none"
    offload: Offload | None = None
    stream_seconds: float = 0.0
    implementation: str = OWN
    int8_cache: bool = False
    droppable: bool = False
    adapters: tuple[AdapterPlan, ...] = ()
    adapter_bytes: int = 0
    ranks: int = 1
    whole: ModelSpec | None = None

    @property
    def model(self) -> ModelShape:
        """The model, whatever part of it is on a rank."""
        return self.whole or self.spec

    @property
    def own(self) -> ModelSpec:
        """The spec of a model of ours."""
        assert isinstance(self.spec, ModelSpec), "transformers' modules run this model"
        return self.spec

    @property
    def precision(self) -> str:
        """What weights, activations and cache are kept in, to tell."""
        layers = [] if self.quantization == "none" else [f"{self.quantization} layers"]
        return ", ".join((self.dtype, *layers, *(["int8 cache"] if self.int8_cache else [])))

    @property
    def cell_type(self) -> torch.dtype | None:
        """The type of a cache of 8 bits; None: K and V are kept in the type that they are computed in."""
        return INTEGERS if self.int8_cache else None

    @property
    def stored(self) -> bool:
        """Whether layers are made of the 8 bits that the checkpoint stores, as they are."""
        packing = self.spec.packing
        if packing is None or self.quantization == "none":
            return False
        return packing.floats if self.quantization in (FLOAT8, STORED_FLOATS) else packing.integers

    @property
    def held_bytes(self) -> int:
        """Bytes of weights that stay in memory, with adapters, and with buffers for those that do not stay."""
        return self.adapter_bytes + (self.weight_bytes if self.offload is None else self.offload.held_bytes)

    @property
    def num_blocks(self) -> int:
        """Blocks of KV that the cache holds."""
        return self.limits.num_units // UNITS_PER_BLOCK
