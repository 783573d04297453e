"""Launch plan: the decisions that need no loaded weights. Torch-free but for types."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.execution.offload import Offload
from engine.limits import UNITS_PER_BLOCK, Limits
from engine.models.byte_cells import INTEGERS
from engine.models.hub import OWN
from engine.models.lora import AdapterPlan
from engine.models.quantized import GROUP, GROUPS
from engine.models.spec import ModelShape, ModelSpec

FLOAT8, INT4 = "fp8", "int4"
STORED_INTEGERS, STORED_FLOATS, *COMPACT = STORED = ("w8a8", "stored fp8", "fp8 blocks", "stored int4", "stored fp4")
"""Values of `LaunchPlan.quantization` for layers that compute with the bits of the checkpoint, its head left as it is.
Those in COMPACT (`engine.models.compact`) are of a GPU."""
BLOCKS, NIBBLES, SMALL_FLOATS = COMPACT


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything that a launch decides before it loads weights.

    Attributes:
        spec: The model.
        dtype: Type of weights and cache.
        limits: Limits of a step; units are an estimate if only loaded weights show the remaining memory.
        memory_utilization: Share of a GPU's memory to use.
        notes: Decisions that a user may not expect, one sentence each.
        cache_bytes: Device memory of the cache; possibly an estimate, like the units.
        scratch_blocks: Number of blocks that a step may run from hidden state.
        state_slots: Number of snapshots of recurrent state on the device.
        host_state_slots: Number of snapshots of recurrent state on the host.
        kernels: Implementation of steps on a CPU, once known.
        threads: Threads of a step on a CPU, once known.
        quantization: Of linear layers: "none", "int8", "int4", "fp8", or an element of STORED.
        offload: Selection of streamed layers; None: all weights stay in memory.
        stream_seconds: Measured time of streaming per step.
        streams_cache: Whether the cache of running requests streams beside the weights.
        implementation: "own" or "transformers".
        int8_cache: Whether K and V are stored in 8 bits.
        droppable: Whether layers can be released temporarily for more units (`engine.execution.stages`).
        by_kernels: Whether our GPU kernels may run the model.
        twins: Operations that run by torch twins of their kernels.
        graphs: Whether steps may run from CUDA graphs.
        faults: Why, one line per fault of the check of kernels.
        library: Whether `engine.models.humming` multiplies the stored bits, also those of experts.
        beside: Another engine holds the device's memory and releases it before this one starts.
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
    streams_cache: bool = False
    implementation: str = OWN
    int8_cache: bool = False
    droppable: bool = False
    adapters: tuple[AdapterPlan, ...] = ()
    adapter_bytes: int = 0
    by_kernels: bool = True
    twins: tuple[str, ...] = ()
    graphs: bool = True
    faults: tuple[str, ...] = ()
    library: bool = False
    beside: bool = False

    @property
    def short_context(self) -> int:
        """See `SchedulerConfig`; 0 if no request is longer."""
        return self.spec.short_context if self.spec.short_context < self.limits.max_model_len else 0

    @property
    def own(self) -> ModelSpec:
        """The spec of a native model."""
        assert isinstance(self.spec, ModelSpec), "this model runs transformers modules"
        return self.spec

    @property
    def precision(self) -> str:
        """Types of weights, activations and cache, for reports."""
        layers = [] if self.quantization == "none" else [f"{self.quantization} layers"]
        return ", ".join((self.dtype, *layers, *(["int8 cache"] if self.int8_cache else [])))

    @property
    def cell_type(self) -> torch.dtype | None:
        """Type of an 8-bit cache; None: K and V are stored in their computed type."""
        return INTEGERS if self.int8_cache else None

    @property
    def stored(self) -> bool:
        """Whether layers use the 8 or 4 bits stored in the checkpoint."""
        packing = self.spec.packing
        if packing is None or self.quantization == "none":
            return False
        if self.quantization in COMPACT:
            return True
        if self.quantization == INT4 or packing.nibbles:
            return self.quantization == INT4 and packing.nibbles
        return packing.floats if self.quantization in (FLOAT8, STORED_FLOATS) else packing.integers

    def rounded_group(self, load_format: str) -> int:
        """Return the group in which layers of 4 bits round other weights; 0: they keep them."""
        if not self.stored:
            return GROUP
        assert self.spec.packing is not None
        return 0 if load_format != "dummy" else self.spec.packing.block[1] or GROUPS[0]

    @property
    def held_bytes(self) -> int:
        """Bytes of weights in memory, including adapters, and buffers for streamed layers."""
        return self.adapter_bytes + (self.weight_bytes if self.offload is None else self.offload.held_bytes)

    @property
    def num_blocks(self) -> int:
        """Number of KV blocks of the cache."""
        return self.limits.num_units // UNITS_PER_BLOCK
