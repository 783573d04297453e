"""A simulated machine as the engine would find it: a device, the scheduler's limits, and a latency model fitted by the
same start-up sweep as on a real one (HyGen §4.2). The scheduler never sees the device's own formula.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.scheduling.output import Chunk, SchedulerOutput
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner
from predictor.fitting import fit
from predictor.limits import Limits
from predictor.model import LatencyModel
from predictor.samples import split_samples
from predictor.sweep import StepShape, run_sweep

SWEEP_SECONDS = 60.0
NOISE = 0.02


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """Names of a model and a device, and the scheduler's limits."""

    model: str
    device: str
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    block_size: int = 16
    prefix_caching: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """`predictor` is fitted to noisy steps of `device`; `mape` is its error on steps held out of the fit, and
    `mape_hygen` that of the paper's features. `profiles`: other latency models by name,
    that with the paper's features as `hygen`."""

    spec: MachineSpec
    device: SimulatedDevice
    config: SchedulerConfig
    predictor: LatencyModel
    mape: float
    mape_hygen: float = 0.0
    profiles: dict[str, LatencyModel] = field(default_factory=dict)

    def profile(self, name: str) -> LatencyModel:
        """Return the latency model called `name`, or the machine's own for "". Raise KeyError for an unknown name."""
        return self.profiles[name] if name else self.predictor

    def runner(self, seed: int) -> SimulatedRunner:
        """Return a new runner whose noise follows `seed`."""
        return SimulatedRunner(self.device, noise=NOISE, seed=seed)


def build_machine(spec: MachineSpec, seed: int = 0) -> Machine:
    """Size the cache, sweep the device and fit the latency model; deterministic per seed."""
    device = SimulatedDevice.named(spec.model, spec.device, max_num_batched_tokens=spec.max_num_batched_tokens)
    config = SchedulerConfig(
        num_units=device.num_units(spec.block_size),
        max_model_len=spec.max_model_len,
        block_size=spec.block_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_num_waiting=1_000_000,
        enable_prefix_caching=spec.prefix_caching,
        seed=seed,
    )
    found = fit_device(device, config, seed)
    return Machine(spec, device, config, found.predictor, found.mape, found.mape_hygen, {"hygen": found.hygen})


class Fitted(NamedTuple):
    """A latency model of a device and one with the paper's features, each with its error on held-out steps."""

    predictor: LatencyModel
    mape: float
    hygen: LatencyModel
    mape_hygen: float


def fit_device(device: SimulatedDevice, config: SchedulerConfig, seed: int) -> Fitted:
    """Sweep a device under these limits, as a server does at its start, and fit; deterministic per seed."""
    sweep = _Sweep(SimulatedRunner(device, noise=NOISE, seed=seed))
    limit = config.max_num_batched_tokens
    limits = Limits(config.max_num_seqs, limit, config.max_model_len, config.num_units, config.block_size)
    limits = replace(limits, reach=device.model.reach)
    samples = run_sweep(sweep.measure, limits, SWEEP_SECONDS, sweep.clock)
    train, held_out = split_samples(samples, seed=seed)
    reach = limits.reach
    mape = {name: fit(train, name, token_limit=limit, reach=reach).mape(held_out) for name in ("full", "hygen")}
    full, hygen = (fit(samples, name, token_limit=limit, reach=reach) for name in mape)
    return Fitted(full, mape["full"], hygen, mape["hygen"])


class _Sweep:
    """Runs step shapes on a virtual clock."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._now = 0.0

    def clock(self) -> float:
        return self._now

    def measure(self, shape: StepShape) -> float:
        decodes = [Chunk(row, shape.decode_context - 1, 1, True) for row in range(shape.num_decodes)]
        prefills = [Chunk(shape.num_decodes + i, *chunk, True) for i, chunk in enumerate(shape.chunks)]
        seconds = self._runner.launch(SchedulerOutput(0, (*decodes, *prefills)))().latency
        self._now += seconds
        return seconds
