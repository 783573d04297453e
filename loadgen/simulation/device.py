"""Machines of a simulated server: a GPU by name, computed as a roofline, or the machine of a measured profile.

Both are set up as by the live engine: limits from the serving flags (`EngineConfig`), a cache sized by memory, and a
latency model that was fitted to a sweep and keeps learning from every step. Torch-free.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine.config import USUAL_STEP, EngineConfig, is_wide, scheduler_settings, step_limits
from engine.errors import ConfigError
from engine.limits import BLOCK_SIZE, UNITS_PER_BLOCK, SchedulerConfig
from engine.models.spec import load_spec
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput
from engine.speculation.trace import DraftTrace, DraftTraces
from engine.virtual import PredictedRunner
from loadgen import InputError
from loadgen.simulation.gpu import (
    DEVICES,
    MODELS,
    NOISE,
    ModelShape,
    SimulatedDevice,
    SimulatedRunner,
    fit_device,
    int8_share,
)
from loadgen.simulation.policies import find_policy
from predictor.model import LatencyModel
from predictor.online import OnlineModel
from predictor.profile import CacheCosts, Profile, ProfileError, ProfileKey

MAX_NOISE = 0.3
PROFILE_BLOCKS, PROFILE_CONTEXT = 4096, 2048
"""KV blocks and context of a measured machine without flags, because its profile contains neither."""
SHARED_CORES = (
    "HTTP and clients on the cores of the model are not simulated: with all cores for the model, a server was measured "
    "at 0.72 to 0.78 of the simulated offline tokens/s (benchmarks sim-vs-live); --host-ms adds such time to each step"
)
"""Note on a machine whose profile was measured on a CPU."""
HIDDEN_SHARE = 2
"""KV blocks in the pool for every block that a step may run from hidden state, as in the live engine."""
FREE_CHAT: dict[str, Any] = {
    "looks": 1156,
    "sources": [
        ["context", 2, 34, [[2, 0, 6], [2, 1, 1], [2, 2, 3], [3, 0, 3], [3, 3, 1], [4, 0, 8], [4, 1, 4], [4, 2, 3],
                            [4, 3, 1], [4, 4, 3]]],
        ["context", 4, 8, [[2, 1, 1], [4, 0, 1], [4, 4, 3]]],
        ["context", 8, 3, [[8, 1, 1], [8, 3, 1], [8, 4, 1]]],
    ],
}  # fmt: skip
"""Outcomes of drafts in 60 chats at temperature 1 with the model of `benchmarks speculation`."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A machine as seen by the engine.

    Attributes:
        model: Latency model before the first step, with the mean error `mape`.
        make_runner: Returns the runner of a seed, which determines the real step times.
        host_seconds: Host time between two steps (HTTP, detokenizing, event loop).
        drafts: Outcomes of drafts; None: nothing is drafted.
        notes: Assumptions that may surprise a user, a sentence each.
    """

    name: str
    model_name: str
    config: SchedulerConfig
    model: LatencyModel
    mape: float
    make_runner: Callable[[int], ModelRunner]
    host_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    drafts: DraftTraces | None = None

    def start(self, seed: int) -> tuple[OnlineModel, ModelRunner]:
        """Return a fresh latency model and a runner whose steps it learns from."""
        model = OnlineModel(self.model, self.mape)
        return model, _Observed(self.make_runner(seed), model, self.host_seconds)


class _Observed:
    """Runner that reports its steps to a latency model, as the live engine does, and adds the host time."""

    def __init__(self, inner: ModelRunner, model: OnlineModel, host_seconds: float) -> None:
        self._inner = inner
        self._model = model
        self._host_seconds = host_seconds

    def launch(self, output: SchedulerOutput) -> Collect:
        result = self._inner.launch(output)()
        self._model.observe(output.features, result.latency)
        if self._host_seconds:
            result = replace(result, latency=result.latency + self._host_seconds)
        return lambda: result


class ProfiledRunner:
    """Runner with the step times of a measured profile and its error as noise. Deterministic per seed."""

    def __init__(self, profile: Profile, seed: int) -> None:
        self._inner = PredictedRunner(profile.model)
        # The mean absolute error of a normal distribution is 0.8 of its standard deviation.
        self._noise = min(profile.held_out_mape, MAX_NOISE) / 0.8
        self._random = random.Random(seed)

    def launch(self, output: SchedulerOutput) -> Collect:
        """Return the output of the step, including its time."""
        result = self._inner.launch(output)()
        taken = replace(result, latency=result.latency * max(0.5, 1.0 + self._noise * self._random.gauss(0.0, 1.0)))
        return lambda: taken


def named_device(model: str, device: str, config: EngineConfig, host_seconds: float = 0.0, seed: int = 0) -> Simulated:
    """Return a device of `DEVICES` with `model` (a name of `MODELS` or a checkpoint folder), after a sweep as at a
    server's start. Raises InputError if either is unknown, and ConfigError if the model does not fit."""
    shape = shape_of(model)
    if device not in DEVICES:
        raise InputError(f"unknown device {device!r}: use {', '.join(sorted(DEVICES))}")
    seqs, tokens = step_limits(config)
    share = int8_share(shape) if config.kv_cache_dtype == "int8" else 1.0
    simulated = SimulatedDevice(shape, DEVICES[device], config.gpu_memory_utilization, tokens, share)
    try:
        units = simulated.num_units(BLOCK_SIZE)
        if is_wide(units // UNITS_PER_BLOCK * BLOCK_SIZE, shape.max_model_len):
            seqs, tokens = step_limits(config, wide=True)
            simulated = replace(simulated, max_num_batched_tokens=tokens)
            units = simulated.num_units(BLOCK_SIZE)
    except ValueError as error:
        raise InputError(str(error)) from None
    config = replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    unit_bytes = int(BLOCK_SIZE * simulated.kv_bytes_per_token) // UNITS_PER_BLOCK
    room = _room(config, units, shape.max_model_len, unit_bytes, seed)
    costs = simulated.cache_costs()
    if config.hidden_cache:
        if shape.hidden_size > shape.num_kv_heads * shape.head_dim:
            raise ConfigError(f"--overload hidden: its state of {shape.name} takes more than half the room of K and V")
        _check_policy(config)
        room = with_hidden(room, costs, shape.num_layers)
    fitted, mape = fit_device(simulated, room, seed)
    known = costs.coefficients() if config.hidden_cache else {}
    believed = replace(fitted, transferred=simulated.transfer_seconds(1), **known)
    notes, make_runner = _notes(room, config, shape.max_model_len), partial(SimulatedRunner, simulated, NOISE)
    return Simulated(device, shape.name, room, believed, mape, make_runner, host_seconds, notes)


def shape_of(model: str) -> ModelShape:
    """Return the sizes of a model by its name, or by config.json in its folder. Raises InputError, ModelLoadError."""
    if model in MODELS:
        return MODELS[model]
    folder = Path(model).expanduser()
    if not folder.is_dir():
        raise InputError(f"unknown model {model!r}: give a checkpoint's folder or one of {', '.join(sorted(MODELS))}")
    spec = load_spec(folder)
    return ModelShape(
        folder.resolve().name,
        spec.num_layers,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.intermediate_size,
        spec.family.gated_mlp,
        spec.vocab_size,
        tied=spec.tie_word_embeddings,
        max_model_len=spec.max_context,
        windows=spec.windows,
    )


def profiled_device(path: Path, config: EngineConfig, host_seconds: float = 0.0, seed: int = 0) -> Simulated:
    """Return the machine on which the profile in `path` was measured, under the serving flags.

    The profile contains neither the cache size nor the context; without flags, both are assumed. Raises InputError, and
    ConfigError for flags that the profile does not cover.
    """
    profile = read_profile(path)
    seqs, tokens = step_limits(config, wide=profile.model.token_limit > USUAL_STEP[1])
    config = replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    costs, moved = profile.cache_costs, profile.model.transferred
    unit_bytes = 0
    if config.swap_space:
        if costs.swap_out is None or costs.swap_in is None or moved <= 0.0:
            raise ConfigError(f"--swap-space: {path} was measured without it (tidemill profile --swap-space ...)")
        unit_bytes = max(1, round((costs.swap_out + costs.swap_in) / 2 / moved))
    room = _room(config, UNITS_PER_BLOCK * PROFILE_BLOCKS, PROFILE_CONTEXT, unit_bytes, seed)
    if config.hidden_cache:
        if costs.run_hidden is None:
            raise ConfigError(f"--overload hidden: {path} was measured without it (tidemill profile --overload hidden)")
        _check_policy(config)
        room = with_hidden(room, costs, None)
    notes = _notes(room, config, PROFILE_CONTEXT)
    if config.num_gpu_blocks_override is None or config.max_model_len is None:
        blocks = room.num_units // UNITS_PER_BLOCK
        assumed = f"{blocks} blocks of cache and a context of {room.max_model_len} tokens: see the server's first lines"
        notes = (*notes, f"a profile says nothing of memory; taken are {assumed}")
    if profile.key.is_cpu and not host_seconds:
        notes = (*notes, SHARED_CORES)
    return measured_device(profile, room, host_seconds, notes)


def with_drafts(device: Simulated, drafts: DraftTraces, origin: str) -> Simulated:
    """Return the machine with drafts, and with a note on their acceptance."""
    chats, jobs = drafts.chats.per_decode, drafts.jobs.per_decode
    note = f"a decode has {chats:.2f} accepted drafted tokens in chats and {jobs:.2f} in batch lines: {origin}"
    return replace(device, drafts=drafts, notes=(*device.notes, note))


def free_chat() -> DraftTraces:
    """Return the outcomes in free chat of the packaged model, for batch lines too, which may repeat each other."""
    trace = DraftTrace.from_document(FREE_CHAT)
    return DraftTraces(trace, trace)


def measured_device(
    profile: Profile, config: SchedulerConfig, host_seconds: float = 0.0, notes: tuple[str, ...] = ()
) -> Simulated:
    """Return the machine of a profile under these limits."""
    key, error, make_runner = profile.key, profile.held_out_mape, partial(ProfiledRunner, profile)
    return Simulated(key.device, key.model, config, profile.model, error, make_runner, host_seconds, notes)


def read_profile(path: Path) -> Profile:
    """Read a profile of any model and machine. Raises InputError if the file is not a profile."""
    try:
        key = ProfileKey(**json.loads(path.read_bytes())["key"])
        return Profile.load(path, key)
    except (OSError, ValueError, KeyError, TypeError, ProfileError) as error:
        raise InputError(f"{path} is no latency profile: {error}") from None


def _room(config: EngineConfig, units: int, longest: int, unit_bytes: int, seed: int) -> SchedulerConfig:
    """Return the limits of a server: `units` of cache unless the configuration sets them, and a context that fits."""
    if config.num_gpu_blocks_override is not None:
        units = UNITS_PER_BLOCK * config.num_gpu_blocks_override
    wanted, room = config.max_model_len or longest, units // UNITS_PER_BLOCK * BLOCK_SIZE
    if config.max_model_len is not None and wanted > room:
        raise ConfigError(f"--max-model-len {wanted} does not fit: the cache holds {room} tokens")
    return scheduler_settings(
        config,
        num_units=units,
        max_model_len=min(wanted, room),
        seed=seed,
        unit_bytes=unit_bytes,
        host_units=int((config.swap_space or 0.0) * 2**30) // unit_bytes if unit_bytes else 0,
    )


def with_hidden(room: SchedulerConfig, costs: CacheCosts, num_layers: int | None) -> SchedulerConfig:
    """Return the limits with hidden state. `num_layers`: layers of a model whose scratch area uses the same memory."""
    units = room.num_units
    if num_layers is not None:
        # Every HIDDEN_SHARE blocks of KV come with the K and V of one more block, for one layer.
        units = int(units / (1 + 1 / (HIDDEN_SHARE * num_layers)))
    room = replace(room, num_units=units, scratch_blocks=units // UNITS_PER_BLOCK // HIDDEN_SHARE)
    return replace(room, rho=costs.rho(room.compact_tokens))


def _check_policy(config: EngineConfig) -> None:
    if find_policy(config.online_policy).select is None:
        raise ConfigError(f"--overload hidden needs the policy apt or goodput, not {config.online_policy}")


def _notes(room: SchedulerConfig, config: EngineConfig, longest: int) -> tuple[str, ...]:
    if room.max_model_len < (config.max_model_len or longest):
        return (f"context limited to the {room.max_model_len} tokens that the cache holds; the model allows {longest}",)
    return ()
