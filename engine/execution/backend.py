"""Backends: kinds of devices, and how a model is made to run on one. A new one is a folder and a line in BACKENDS."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.cpu.backend import CpuBackend
from engine.execution.cpu.transformers_device import MakeAttention
from engine.execution.cuda.backend import CudaBackend
from engine.execution.plan import LaunchPlan
from engine.execution.runner import Runner
from engine.execution.stages import StagedRunner
from engine.models.linear import MakeLinear
from engine.models.spec import ModelShape
from engine.models.streaming import Transport
from engine.models.transformers_model import TransformersModel
from engine.models.weights import Gather, ModelWeights
from predictor.limits import Limits, Padding


class Backend(Protocol):
    """`name`: what users and `torch.device` call it. `pipeline_depth`: steps that its runner takes ahead of the one in
    execution; `ahead_seconds`: only behind steps that are expected to be shorter. `leaves_workers`: threads that have
    run a model here leave workers behind that slow down those of the engine's thread (`engine.machine.passing_thread`).
    `multiplies_integers`: layers run on integers of 8 bits, a checkpoint's own among them. `tests_families`: a model is
    compared with transformers' at load. `locks_pages`: of the host tier, whose memory is taken at once."""

    name: str
    pipeline_depth: int
    ahead_seconds: float
    leaves_workers: bool
    multiplies_integers: bool
    tests_families: bool
    locks_pages: bool

    def absence(self) -> str | None:
        """Why there is no such device here; None if there is one."""

    def devices(self) -> Sequence[str] | None:
        """Of which each rank has one; None: all ranks are on the same."""

    def config_refusal(self, config: EngineConfig) -> str | None:
        """What of the configuration does not run here, and what to say instead; None if all does."""

    def drop_refusal(self, spec: ModelShape, dtype: str) -> str | None:
        """Why no layer of a model of ours can be given up here; None if some can."""

    def resident(self, plan: LaunchPlan) -> Gather:
        """What keeps layers that stay in memory, so that they can be given up where the plan is `droppable`. Raises
        ConfigError."""

    def refusal(self, spec: ModelShape, dtype: str) -> str | None:
        """Why the backend's own kernels cannot run this model, which torch's operators do then, slower."""

    def choose_dtype(self, spec: ModelShape, config: EngineConfig) -> tuple[str, str | None]:
        """The type of weights and cache, and a note where it is not the checkpoint's own."""

    def cache_bytes(self, plan: LaunchPlan, weights: ModelWeights | TransformersModel | None) -> int:
        """Device memory for the cache; None for the weights: an estimate for when they are loaded."""

    def weight_room(self, plan: LaunchPlan) -> int:
        """Device memory that weights may take where nobody says how much."""

    def transport(self, plan: LaunchPlan) -> Transport:
        """What brings the layers that stream (`plan.offload`) to the device. Raises ConfigError."""

    def swap_bytes(self) -> int:
        """Host memory for the host tier where nobody says how much."""

    def float8_refusal(self) -> str | None:
        """Why layers do not compute on floats of 8 bits here; None if they do."""

    def is_wide(self) -> bool:
        """Whether the device is so large that steps hold many requests and tokens where nobody says how many."""

    def copy_rate(self) -> float:
        """Bytes/s that no copy between the device and the host exceeds."""

    def busy_share(self, plan: LaunchPlan) -> float:
        """Of their time, what the threads that steps run by get beside whatever else the machine does."""

    def adapted_steps(self, plan: LaunchPlan) -> str | None:
        """How steps with rows of LoRA adapters run where that is slower; None where they run like others."""

    def fingerprint(self, plan: LaunchPlan) -> str:
        """The device as far as step times depend on it: a part of the latency profile's key."""

    def padding(self, plan: LaunchPlan) -> Padding:
        """What steps are padded to."""

    def prepare(
        self, config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
    ) -> tuple[LaunchPlan, MakeLinear]:
        """Set this process up, before weights are loaded; gives what makes their linear layers."""

    def make_runner(
        self,
        config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
        say: Callable[[str], None],
    ) -> tuple[Runner[Any], LaunchPlan]:
        """The runner that the plan describes, and the plan with what was measured on it. Raises ConfigError."""

    def module_attention(self, model: TransformersModel, limits: Limits) -> tuple[MakeAttention | None, str]:
        """What attends for modules that are not ours (None: what they bring, or torch), and how that is called."""

    def make_staged(self, config: EngineConfig, plan: LaunchPlan, runner: Runner[Any]) -> StagedRunner:
        """The runner of a plan that is `droppable`, whose layers can be given up. Raises ConfigError."""


BACKENDS: tuple[Backend, ...] = (CudaBackend(), CpuBackend())
"""The first one that is here is the default."""


def find_backend(name: str) -> Backend:
    """The backend of this name, or the default for "auto". Raises ConfigError where there is no such device."""
    for backend in BACKENDS:
        absence = backend.absence()
        if name in (backend.name, "auto") and absence is None:
            return backend
        if name == backend.name:
            raise ConfigError(f"--device {name}: {absence}")
    raise ConfigError(f"--device {name}: no such backend")
