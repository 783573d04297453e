# ruff: noqa: ARG002 - defaults ignore their arguments
"""Backends: kinds of devices and the runners of models on them. A new one is a folder and a row in `find_backend`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cpu.transformers_device import MakeAttention
from engine.execution.plan import LaunchPlan
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner
from engine.limits import NO_PADDING, Limits, Padding
from engine.models.linear import MakeLinear
from engine.models.packing import Packing
from engine.models.spec import ModelShape
from engine.models.transformers_model import TransformersModel
from engine.models.weights import Gather, ModelWeights, ResidentLayers, Transport


class Backend(Protocol):
    """A kind of device; methods with a body are defaults.

    Attributes:
        name: Name for users and `torch.device`.
        pipeline_depth: Number of steps that the runner takes ahead of the one in execution.
        ahead_seconds: Steps are taken ahead only behind steps that are expected to be shorter than this.
        leaves_workers: Threads that have run a model leave workers behind that slow down the workers of the engine's
            thread (`engine.build.join.build_engine`).
        multiplies_integers: Layers can compute on 8-bit integers, also those of a checkpoint.
        tests_kernels: The self-test runs a native model by the kernels that will serve, else by torch on the CPU.
        locks_pages: The host tier in use is page-locked: the system cannot move it to disk.
    """

    name: str
    pipeline_depth: int
    ahead_seconds: float
    leaves_workers: bool
    multiplies_integers: bool
    tests_kernels: bool
    locks_pages: bool

    def absence(self) -> str | None:
        """Return why this machine has no such device; None if it has one."""
        return None

    def unused_devices(self) -> str | None:
        """Return the devices that this machine has although they cannot be used here; None without any."""
        return None

    def config_refusal(self, config: EngineConfig) -> str | None:
        """Return why the configuration does not run here, and the alternative; None if it does."""
        return None

    def drop_refusal(self, spec: ModelShape, dtype: str) -> str | None:
        """Return why layers of a native model cannot be released here; None if they can."""
        return None

    def resident(self, plan: LaunchPlan) -> Gather:
        """Return the collector of resident layers, which can be released if the plan is `droppable`. Raises
        ConfigError."""
        return ResidentLayers

    def refusal(self, spec: ModelShape, dtype: str) -> str | None:
        """Return why the backend's kernels cannot run this model (torch operators then run it, slower); None if they
        can."""
        return None

    def choose_dtype(self, spec: ModelShape, config: EngineConfig) -> tuple[str, str | None]:
        """Return the type of weights and cache, and a note if it differs from the type of the checkpoint."""

    def cache_bytes(self, plan: LaunchPlan, weights: ModelWeights | TransformersModel | None) -> int:
        """Return the device memory for the cache; an estimate if `weights` is None (not loaded yet)."""

    def weight_room(self, plan: LaunchPlan) -> int:
        """Return the default limit of device memory for weights."""

    def transport(self, plan: LaunchPlan) -> Transport:
        """Return the transport of streamed layers (`plan.offload`) to the device. Raises ConfigError."""

    def swap_bytes(self) -> int:
        """Return the default host memory for the host tier."""
        return 0

    def float8_refusal(self) -> str | None:
        """Return why layers cannot compute on 8-bit floats here; None if they can."""

    def experts_refusal(self, config: EngineConfig) -> str | None:
        """Return what native layers with experts lack, as configured; None if they can run."""
        del config
        return "they need a GPU"

    def keeps_bits(self, packing: Packing, unpacked_bytes: int, memory_utilization: float) -> bool:
        """Return whether layers of a GPU use the 4 bits, or the blocks of 8-bit floats, of a checkpoint.

        `unpacked_bytes`: memory of the unpacked weights.
        """
        del packing, unpacked_bytes, memory_utilization
        return False

    def has_library(self) -> bool:
        """Return whether `engine.models.humming` may multiply the stored bits of a checkpoint here."""
        return False

    def library_fault(self, plan: LaunchPlan, say: Callable[[str], None]) -> str:
        """Return the fault of this library on the device, which then plans without it; empty without one. Raises
        ConfigError."""
        return ""

    def room(self, memory_utilization: float, *, beside: bool = False) -> int:
        """Return the device memory for weights and cache, which allows more requests and tokens per step by default;
        0 if it does not. `beside`: see LaunchPlan."""
        return 0

    def copy_rate(self) -> float:
        """Return an upper bound of the copy rate between device and host in bytes/s."""

    def busy_share(self, plan: LaunchPlan) -> float:
        """Return the share of CPU time that the threads of a step get beside other load of the machine."""
        return 1.0

    def adapted_steps(self, plan: LaunchPlan) -> str | None:
        """Return how steps with LoRA adapters run if slower than others; None if they are not slower."""

    def fingerprint(self, plan: LaunchPlan) -> str:
        """Return the properties of the device that affect step times, for the key of the latency profile."""

    def padding(self, plan: LaunchPlan) -> Padding:
        """Return the sizes to which steps are padded."""
        return NO_PADDING

    def prepare(
        self, config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
    ) -> tuple[LaunchPlan, MakeLinear]:
        """Set up the process before weights are loaded; return the updated plan and the maker of linear layers."""

    def check_kernels(
        self,
        config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
        folder: Path,
        say: Callable[[str], None],
    ) -> LaunchPlan:
        """Return the plan with replacements for kernels that fail on this device. `folder` stores results."""
        return plan

    def make_runner(
        self,
        config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
    ) -> tuple[Runner[Any], LaunchPlan]:
        """Return the runner of the plan, and the plan with measured values. Raises ConfigError."""

    def module_attention(
        self, model: TransformersModel, limits: Limits, *, by_kernels: bool = True
    ) -> tuple[MakeAttention | None, str]:
        """Return the attention for transformers modules (None: their own, or torch), and a name for it."""
        return None, ""

    def make_staged(self, config: EngineConfig, plan: LaunchPlan, runner: Runner[Any]) -> PipelineRunner:
        """Return a runner of a `droppable` plan whose layers can be released. Raises ConfigError."""


def find_backend(name: str) -> Backend:
    """Return the backend of this name; for "auto", the first with a device. Raises ConfigError if it has none here."""
    from engine.execution.cpu.backend import CpuBackend
    from engine.execution.cuda.backend import CudaBackend

    backends: tuple[Backend, ...] = (CudaBackend(), CpuBackend())
    for backend in backends:
        absence = backend.absence()
        if name in (backend.name, "auto") and absence is None:
            return backend
        if name == "auto" and absence is not None and (unused := backend.unused_devices()):
            raise ConfigError(f"{absence}, but {unused}; update the driver, or set --device cpu")
        if name == backend.name:
            raise ConfigError(f"--device {name}: {absence}")
    raise ConfigError(f"--device {name}: no such backend")
