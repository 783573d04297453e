"""A device that is computed instead of run: an operator-level roofline behind the runner's interface.

Every operator of a step takes the p-norm of bytes ÷ rate and FLOPs ÷ rate, plus its launch; a step adds host overhead
and seeded noise. This is not the predictor's regression: matrix products have their knee and their
padding, attention its own rates, and nothing is fitted to the features of the latency model. Torch-free.

A model shape is the arithmetic of a decoder-only transformer. A device is a set of peak rates with the share of each
that real kernels reach; the shares are calibrated once per device family on published step times of all linear layers
of Llama-2-7B, and the rest is from data sheets.
"""

import random
from dataclasses import dataclass, field

from engine.limits import UNITS_PER_BLOCK, Limits, SchedulerConfig
from engine.profiling.calibration import StepShape, run_sweep
from engine.scheduling.output import Chunk, Collect, ModelRunnerOutput, SchedulerOutput
from predictor.features import Reach
from predictor.fitting import fit
from predictor.model import LatencyModel, Sample, split_samples
from predictor.profile import FEW_TOKENS, MANY_TOKENS, MEMORY_RATE, CacheCosts, affine

GIB = 1024**3


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder-only model: sizes in elements. `gated`: a SwiGLU-style ffn (three matrices instead of two).

    `windows`: per layer the tokens visible to a query, including itself, or None for all; empty without windows.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    gated: bool
    vocab_size: int
    tied: bool = False
    max_model_len: int = 4096
    bytes_per_value: int = 2
    windows: tuple[int | None, ...] = ()

    @property
    def reach(self) -> Reach:
        """Reach of the layers: how much of a context they read."""
        return Reach.of(self.windows)

    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of the matrices of one layer, as they are launched: QKV, output, ffn up, ffn down."""
        attention = self.num_heads * self.head_dim
        qkv = attention + 2 * self.num_kv_heads * self.head_dim
        up = self.ffn_size * (2 if self.gated else 1)
        hidden = self.hidden_size
        return ((hidden, qkv), (attention, hidden), (hidden, up), (self.ffn_size, hidden))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all matrices, embedding and head included."""
        layers = self.num_layers * sum(rows * columns for rows, columns in self.linears())
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return (layers + embeddings) * self.bytes_per_value

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device: peak rates in bytes/s and FLOP/s (dense 16-bit) and the shares that kernels reach.

    memory_bytes          device memory
    bandwidth, flops      peaks of the data sheet
    pcie                  bytes/s between host and device, one way
    memory_efficiency     share of `bandwidth` that a matrix-vector product reaches
    flops_efficiency      share of `flops` that a large matrix product reaches
    attention_efficiency  share of `flops` that prefill attention reaches
    knee                  exponent p of (memory^p + compute^p)^(1/p): how sharply the two regimes meet
    launch_seconds        launch overhead of one kernel
    host_seconds          host overhead of one step; `sequence_seconds` of each sequence in it
    tile                  tokens to which a matrix product is padded
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    pcie: float
    memory_efficiency: float
    flops_efficiency: float
    attention_efficiency: float = 0.45
    knee: float = 2.2
    launch_seconds: float = 4e-6
    host_seconds: float = 5e-4
    sequence_seconds: float = 4e-6
    tile: int = 16


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, True, 32000),
        ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, True, 32000),
        ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, True, 128256, max_model_len=8192),
        ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, True, 32000, max_model_len=8192),
        ModelShape("opt-6.7b", 32, 4096, 32, 32, 128, 16384, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-30b", 48, 7168, 56, 56, 128, 28672, False, 50272, tied=True, max_model_len=2048),
        ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, False, 50272, tied=True, max_model_len=2048),
        ModelShape("qwen2.5-0.5b", 24, 896, 14, 2, 64, 4864, True, 151936, tied=True, max_model_len=8192),
        ModelShape("qwen2.5-14b", 48, 5120, 40, 8, 128, 13824, True, 152064, max_model_len=8192),
        ModelShape("qwen2.5-7b", 28, 3584, 28, 4, 128, 18944, True, 152064, max_model_len=8192),
    )
}

DEVICES = {
    spec.name: spec
    for spec in (
        DeviceSpec("a100-40gb", 40 * GIB, 1.555e12, 312e12, 25e9, 0.94, 0.655),
        DeviceSpec("a100-80gb", 80 * GIB, 2.039e12, 312e12, 25e9, 0.72, 0.655),
        DeviceSpec("a40", 45 * GIB, 0.696e12, 149.7e12, 25e9, 0.80, 0.67),
        DeviceSpec("h100", 80 * GIB, 3.35e12, 989e12, 50e9, 0.75, 0.68),
        DeviceSpec("h200", 139 * GIB, 4.8e12, 989e12, 50e9, 0.73, 0.68),
        DeviceSpec("rtx-4090", 24 * GIB, 1.008e12, 165e12, 25e9, 0.85, 0.75),
    )
}


SCALE_BYTES = 2
"""Bytes of the scale of each token and head in a cache of 8 bits, for K and for V."""


def int8_share(model: ModelShape) -> float:
    """Return the room of K and V in 8 bits, with their scales, relative to 16 bits."""
    return (1.0 + SCALE_BYTES / model.head_dim) / 2


SIMULATED_TOKEN = 0
"""Token sampled by every simulated step. A request with it as a stop token ends at its `min_tokens`, the true length,
which the scheduler does not see."""

ELEMENTWISE_PASSES = 12
"""Reads and writes of a hidden-size row in one layer outside matrix products and attention (norms, RoPE, residuals)."""
ELEMENTWISE_KERNELS = 4
SWEEP_SECONDS = 60.0
NOISE = 0.02
"""Standard deviation of a step's time, relative."""


@dataclass(slots=True)
class SimulatedDevice:
    """One model on one device; all results in seconds, without noise.

    `utilization`: share of the memory for weights, activations and cache. `cell_share`: room of K and V over that in 16
    bits.
    """

    model: ModelShape
    device: DeviceSpec
    utilization: float = 0.9
    max_num_batched_tokens: int = 512
    cell_share: float = 1.0
    _token_seconds: dict[int, float] = field(default_factory=dict, repr=False)
    _head_seconds: dict[int, float] = field(default_factory=dict, repr=False)
    _bandwidth: float = field(init=False, repr=False)
    _kv_token_seconds: float = field(init=False, repr=False)
    _pair_seconds: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        model, device = self.model, self.device
        self._bandwidth = device.bandwidth * device.memory_efficiency
        self._kv_token_seconds = self.kv_bytes_per_token / self._bandwidth
        flops_per_pair = 4 * model.num_layers * model.num_heads * model.head_dim
        self._pair_seconds = flops_per_pair / (device.flops * device.attention_efficiency)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of K and V of one token in the cache."""
        return self.model.kv_bytes_per_token * self.cell_share

    @classmethod
    def named(cls, model: str, device: str, **options: float) -> "SimulatedDevice":
        """Create by names of `MODELS` and `DEVICES`. Raises KeyError for unknown names."""
        return cls(MODELS[model], DEVICES[device], **options)  # type: ignore[arg-type]

    def product_seconds(self, tokens: int, inputs: int, outputs: int) -> float:
        """Return the time of a matrix product [tokens, inputs] x [inputs, outputs], launch included."""
        device = self.device
        values = inputs * outputs + tokens * (inputs + outputs)
        memory = values * self.model.bytes_per_value / self._bandwidth
        padded = -(-tokens // device.tile) * device.tile
        compute = 2.0 * padded * inputs * outputs / (device.flops * device.flops_efficiency)
        return _norm(memory, compute, device.knee)

    def linear_seconds(self, tokens: int) -> float:
        """Return the time of all matrix products of all layers (no attention, no head)."""
        layer = sum(self.product_seconds(tokens, rows, columns) for rows, columns in self.model.linears())
        launches = len(self.model.linears()) * self.device.launch_seconds
        return self.model.num_layers * (layer + launches)

    def token_seconds(self, tokens: int) -> float:
        """Return the time that depends only on the number of tokens: products, element-wise kernels, launches."""
        found = self._token_seconds.get(tokens)
        if found is None:
            model = self.model
            moved = ELEMENTWISE_PASSES * tokens * model.hidden_size * model.bytes_per_value / self._bandwidth
            extra = moved + (ELEMENTWISE_KERNELS + 1) * self.device.launch_seconds  # (the + 1 is attention's)
            found = self.linear_seconds(tokens) + model.num_layers * extra
            self._token_seconds[tokens] = found
        return found

    def head_seconds(self, samples: int) -> float:
        """Return the time of the output head on the sampled rows."""
        found = self._head_seconds.get(samples)
        if found is None:
            found = self.product_seconds(samples, self.model.hidden_size, self.model.vocab_size) if samples else 0.0
            self._head_seconds[samples] = found
        return found

    def step_seconds(self, tokens: int, sequences: int, samples: int, context: int, pairs: int) -> float:
        """Return the time of a step that reads `context` tokens of K and V and computes `pairs` pairs in prefills.

        The pairs of decodes take no extra time, because reading their context dominates.
        """
        host = self.device.host_seconds + sequences * self.device.sequence_seconds
        attention = context * self._kv_token_seconds + pairs * self._pair_seconds
        return host + self.token_seconds(tokens) + self.head_seconds(samples) + attention

    def num_units(self, block_size: int) -> int:
        """Return the cache units (two per KV block) that fit beside weights and activations; ValueError if none do."""
        model = self.model
        widest = max(model.ffn_size * (2 if model.gated else 1), model.hidden_size * 4)
        activations = self.max_num_batched_tokens * (2 * widest) * model.bytes_per_value + 512 * 1024**2
        free = self.device.memory_bytes * self.utilization - model.weight_bytes - activations
        units = int(free // (block_size * self.kv_bytes_per_token / UNITS_PER_BLOCK))
        if units < UNITS_PER_BLOCK:
            raise ValueError(f"{model.name} does not fit on {self.device.name}")
        return units

    def transfer_seconds(self, num_bytes: int) -> float:
        """Return the time of a copy between host and device."""
        return num_bytes / self.device.pcie

    def cache_work_seconds(
        self, compact_tokens: int = 0, restored_tokens: int = 0, transferred_bytes: int = 0
    ) -> float:
        """Return seconds of cache work: K and V of `compact_tokens` projected in this step and of `restored_tokens`
        projected once, and copies."""
        seconds = self.transfer_seconds(transferred_bytes)
        if projected := compact_tokens + restored_tokens:
            width = 2 * self.model.num_kv_heads * self.model.head_dim
            layer = self.product_seconds(projected, self.model.hidden_size, width) + self.device.launch_seconds
            seconds += self.model.num_layers * layer
        return seconds

    def cache_costs(self) -> CacheCosts:
        """Return the costs of hidden state, computed at the sizes at which a live engine measures them."""
        sizes = FEW_TOKENS, MANY_TOKENS
        floor = self.model.kv_bytes_per_token / UNITS_PER_BLOCK / MEMORY_RATE
        few, many = ((tokens, self.cache_work_seconds(tokens)) for tokens in sizes)
        run = affine(few, many, floor)
        few, many = ((tokens, self.cache_work_seconds(restored_tokens=tokens)) for tokens in sizes)
        restore = affine(few, many, 3 * floor)
        return CacheCosts(run.token, restore.token, run_hidden_step=run.fixed, restore_step=restore.fixed)


class SimulatedRunner:
    """A runner on the virtual clock; deterministic per seed. `noise`: see NOISE."""

    def __init__(self, device: SimulatedDevice, noise: float = NOISE, seed: int = 0) -> None:
        self.device = device
        self._reach = device.model.reach
        self._noise = noise
        self._random = random.Random(seed)

    def launch(self, output: SchedulerOutput) -> Collect:
        """Return the step time and a token per sample. There is no cache, only the accounting of the scheduler."""
        reach = self._reach
        tokens = samples = context = pairs = 0
        for _, start, length, sample in output.chunks:
            tokens += length
            samples += sample
            context += reach.tokens(start, length)
            if length > 1:
                pairs += reach.pairs(start, length)
        exact = self.device.step_seconds(tokens, len(output.chunks), samples, context, pairs)
        if any(work := output.features.cache_work):
            exact += self.device.cache_work_seconds(*work)
        result = ModelRunnerOutput(output.step_id, [SIMULATED_TOKEN] * samples, None, self.noisy(exact))
        return lambda: result

    def noisy(self, seconds: float) -> float:
        """Return `seconds` with noise, at least 0.8 of the exact time."""
        return seconds * max(0.8, 1.0 + self._noise * self._random.gauss(0.0, 1.0)) if self._noise else seconds


def fit_device(device: SimulatedDevice, config: SchedulerConfig, seed: int) -> tuple[LatencyModel, float]:
    """Fit a latency model to a sweep; return it and its error on held-out steps. Deterministic per seed."""
    samples = sweep_device(device, config, seed)
    train, held_out = split_samples(samples, seed=seed)
    tested, model = (
        fit(part, token_limit=config.max_num_batched_tokens, reach=device.model.reach) for part in (train, samples)
    )
    return model, tested.mape(held_out)


def sweep_device(device: SimulatedDevice, config: SchedulerConfig, seed: int) -> list[Sample]:
    """Measure step times under these limits as a server does at its start (HyGen §4.2)."""
    runner, now = SimulatedRunner(device, seed=seed), 0.0
    limits = Limits(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        config.max_model_len,
        config.num_units,
        config.block_size,
        reach=device.model.reach,
    )

    def measure(shape: StepShape) -> float:
        nonlocal now
        decodes = [Chunk(row, shape.decode_context - 1, 1, True) for row in range(shape.num_decodes)]
        prefills = [Chunk(shape.num_decodes + i, *chunk, True) for i, chunk in enumerate(shape.chunks)]
        seconds = runner.launch(SchedulerOutput(0, (*decodes, *prefills)))().latency
        now += seconds
        return seconds

    return run_sweep(measure, limits, SWEEP_SECONDS, lambda: now)


def _norm(one: float, other: float, power: float) -> float:
    high, low = max(one, other), min(one, other)
    return float(high * (1.0 + (low / high) ** power) ** (1.0 / power)) if high > 0.0 else 0.0
