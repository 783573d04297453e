"""A simulated machine as the engine would find it: a device, the scheduler's limits, and a latency model fitted by the
same start-up sweep as on a real one (HyGen §4.2). The scheduler never sees the device's own formula.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.limits import SchedulerConfig
from loadgen.simulation.gpu import SimulatedDevice, SimulatedRunner, fit_device, sweep_device
from predictor.features import BatchFeatures, LatencyPredictor
from predictor.fitting import RESIDUAL_FLOOR
from predictor.model import LatencyModel, Sample, split_samples

Floats = NDArray[np.float64]


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
    `mape_hygen` that of `hygen`, a fit of the paper's features. `profiles`: other latency models by name."""

    spec: MachineSpec
    device: SimulatedDevice
    config: SchedulerConfig
    predictor: LatencyModel
    mape: float
    mape_hygen: float
    hygen: "HygenLatency"
    profiles: dict[str, LatencyPredictor] = field(default_factory=dict)

    def profile(self, name: str) -> LatencyPredictor:
        """Return the latency model called `name`, or the machine's own for "". Raise KeyError for an unknown name."""
        return self.profiles[name] if name else self.predictor

    def runner(self, seed: int) -> SimulatedRunner:
        """Return a new runner whose noise follows `seed`."""
        return SimulatedRunner(self.device, seed=seed)


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
    predictor, mape = fit_device(device, config, seed)
    samples = sweep_device(device, config, seed)
    train, held_out = split_samples(samples, seed=seed)
    tested, hygen = (fit_hygen(part) for part in (train, samples))
    return Machine(spec, device, config, predictor, mape, mean_error(tested.predict, held_out), hygen)


def mean_error(predict: Callable[[BatchFeatures], float], samples: Sequence[Sample]) -> float:
    """Return the mean of |predicted − measured| ÷ measured."""
    return sum(abs(predict(features) - seconds) / seconds for features, seconds in samples) / len(samples)


@dataclass(frozen=True)
class HygenLatency:
    """Latency model with the features of HyGen §4.2: intercept, N_d, S_d, N_p, S_p, S_d², S_p².

    S_d is the sum of decode contexts: as printed it equals N_d, which makes the fit singular. The squares are squares
    of the sums, as printed. `coefficients` are in this order, in seconds per unit. There is no margin, and no cost of
    cache work, adapters and masks.
    """

    coefficients: tuple[float, ...]

    def predict(self, features: BatchFeatures) -> float:
        """Return the seconds of the step."""
        return math.fsum(a * b for a, b in zip(self.coefficients, _terms(features), strict=True))


def true_seconds(device: SimulatedDevice, features: BatchFeatures) -> float:
    """Return the exact seconds of the device for a step in which every sequence samples, without noise."""
    sequences = features.num_decodes + features.num_prefill_chunks
    context = features.decode_context_sum + features.prefill_context_sum
    seconds = device.step_seconds(features.num_tokens, sequences, sequences, context, features.attention_work)
    return seconds + device.cache_work_seconds(*features.cache_work)


def _terms(features: BatchFeatures) -> tuple[int, ...]:
    contexts, tokens = features.decode_context_sum, features.prefill_token_sum
    return 1, features.num_decodes, contexts, features.num_prefill_chunks, tokens, contexts**2, tokens**2


def fit_hygen(samples: Sequence[Sample]) -> HygenLatency:
    """Fit by non-negative least squares of the relative error, as `predictor.fitting.fit`."""
    matrix = np.array([_terms(features) for features, _ in samples], dtype=np.float64)
    seconds = np.array([seconds for _, seconds in samples])
    coefficients = _solve(matrix, seconds, 1.0 / seconds)
    residuals = np.abs(matrix @ coefficients / seconds - 1.0)
    sharper = 1.0 / (seconds * np.sqrt(np.maximum(residuals, RESIDUAL_FLOOR)))
    return HygenLatency(tuple(_solve(matrix, seconds, sharper).tolist()))


def _solve(matrix: Floats, seconds: Floats, weights: Floats) -> Floats:
    scaled = matrix * weights[:, None]
    norms = np.linalg.norm(scaled, axis=0)
    norms[norms == 0.0] = 1.0
    from scipy.optimize import nnls  # a second of processor time

    found: Floats = nnls(scaled / norms, seconds * weights)[0] / norms
    return found
