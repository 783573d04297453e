"""The composition root: a configuration becomes a model, a runner and an Engine.

`plan_launch` decides everything that can be known without loading the weights (type, device, context, cache);
`build_engine` loads and joins. The only module besides engine.engine that knows both control and data plane.
"""

import importlib
import math
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine.models.demo
from engine import __version__
from engine.adapters import parse_adapters
from engine.api import DroppableLayers, EngineInfo
from engine.colocation.controller import make_controller
from engine.config import (
    EngineConfig,
    SchedulerConfig,
    most_blocks,
    most_unconfirmed,
    parse_offload,
    step_limits,
)
from engine.engine import Engine
from engine.errors import ConfigError, ModelLoadError
from engine.execution import memory
from engine.execution.backend import Backend, find_backend
from engine.execution.masks import FOREVER, MAX_FORCED, PATIENCE
from engine.execution.offload import Offload, plan_offload
from engine.execution.plan import FLOAT8, STORED_FLOATS, STORED_INTEGERS, LaunchPlan
from engine.execution.ranks.follower import Follower
from engine.execution.ranks.group import LOADED, MADE, Group, Seat
from engine.execution.runner import Device, Runner
from engine.execution.self_test import LIMITS as TEST_LIMITS
from engine.execution.self_test import test_family, test_modules
from engine.execution.stages import StagedRunner
from engine.machine.facts import BUS_RATE, host_engines
from engine.machine.passing_thread import in_passing_thread
from engine.models.checkpoint import load_weights, stored_bytes
from engine.models.hub import cached_folder, is_hub_id, resolve_model_folder
from engine.models.implementation import OWN, TRANSFORMERS, Choice, choose
from engine.models.linear import MakeLinear
from engine.models.lora import Delta, Site, load_adapter, plan_adapter
from engine.models.packing import Packing
from engine.models.sharding import Shard, divide
from engine.models.spec import ModelShape, ModelSpec, hidden_offer, resolve_max_model_len
from engine.models.streaming import StreamedLayers
from engine.models.transformers_model import TransformersModel, TransformersShape, load_model
from engine.models.weights import Gather, ModelWeights, torch_dtype
from engine.pooling import EmbeddingSpec, read_embedding_spec
from engine.profiling.cache_costs import CacheTiers
from engine.profiling.calibration import INSIDE_STRING, load_or_measure, load_profile
from engine.refusals import unsupported
from engine.scheduling.policies import find_policy
from engine.structured.compiler import GrammarCompiler
from engine.structured.prover_client import Prover
from engine.structured.ready import Grammars
from predictor.limits import UNITS_PER_BLOCK, Limits
from predictor.profile import Profile, ProfileError, ProfileKey
from predictor.reach import Reach
from predictor.slo import SLO

HIDDEN_SHARE = 2  # at most a block of hidden state for every so many blocks of KV that fit: a quarter of the units;
# all of them where weights stream, for batch lines
READ_TOGETHER = 64
"""Keys that a kernel reads at once: the first of them may lie that far before the window (`kernels.h`, TILE_KEYS)."""
MIN_CONTEXT = 8  # tokens; the warm-up step alone takes most of it


def resolve_model(config: EngineConfig) -> Path:
    """The folder of the checkpoint, the packaged demo model's if none is named. Raises ModelLoadError."""
    if config.model:
        return resolve_model_folder(config.model, config.revision)
    assert engine.models.demo.__file__ is not None
    return Path(engine.models.demo.__file__).parent / "weights"


def local_config(config: EngineConfig) -> EngineConfig | None:
    """The configuration with a model that is on this machine; None where it would have to be fetched."""
    if not config.model or Path(config.model).expanduser().is_dir() or not is_hub_id(config.model):
        return config
    folder = cached_folder(config.model, config.revision)
    return None if folder is None else replace(config, model=str(folder), revision=None)


def plan_launch(config: EngineConfig) -> LaunchPlan:
    """Decide how a configuration runs on this machine. Raises ConfigError for what cannot run."""
    folder = resolve_model(config)
    choice = choose(folder, config.model_impl)
    spec = choice.shape
    backend = find_backend(config.device)
    if refusal := backend.config_refusal(config):
        raise ConfigError(refusal)
    dtype, note = (config.dtype, None) if config.dtype != "auto" else backend.choose_dtype(spec, config)
    foreign = choice.implementation == TRANSFORMERS
    whole, spec = _divided(config, choice, backend)
    by_modules = f"transformers' modules run {spec.architecture}"
    if foreign and config.kv_cache_dtype != "auto":
        raise unsupported(f"--kv-cache-dtype {config.kv_cache_dtype}", by_modules)
    if foreign and config.quantization != "none":
        raise unsupported(f"--quantization {config.quantization}", by_modules)
    if spec.state_bytes and not config.enable_prefix_caching and (config.swap_space or config.overload == "swap"):
        raise unsupported(
            "--swap-space", f"{spec.architecture} has recurrent layers", "remove --no-enable-prefix-caching"
        )
    if config.overload == "drop" and (refusal := _drop_refusal(choice, backend, dtype)):
        raise unsupported("--overload drop", refusal)
    by = f"transformers' modules run {spec.architecture}: {choice.why}" if foreign else None
    refusal = backend.refusal(spec, dtype)
    slow = f"slow attention by torch's own operators: {refusal}" if refusal else None
    quantization, unrounded = _quantization(config, choice, backend), None
    if quantization == STORED_FLOATS:
        dtype = "bfloat16"
    if quantization == FLOAT8:
        quantization, dtype, unrounded = _float8(dtype, backend.float8_refusal())
    plan = LaunchPlan(
        folder=folder,
        spec=spec,
        device=backend.name,
        dtype=dtype,
        limits=Limits(
            *step_limits(config, wide=backend.is_wide()),
            resolve_max_model_len(spec, config.max_model_len),
            num_units=0,
            block_size=config.block_size,
            reach=Reach.of((whole or spec).windows),
        ),
        weight_bytes=memory.weight_bytes(spec, torch_dtype(dtype), quantization, config.tensor_parallel_size),
        quantization=quantization,
        implementation=choice.implementation,
        int8_cache=config.kv_cache_dtype == "int8",
        memory_utilization=config.gpu_memory_utilization,
        droppable=config.overload == "drop",
        ranks=config.tensor_parallel_size,
        whole=whole,
        notes=tuple(each for each in (by, note, slow, unrounded, _state_note(spec)) if each),
    )
    if plan.ranks > 1:
        note = f"each layer is divided among {plan.ranks} ranks, of which each has {_gib(plan.weight_bytes)} of weights"
        plan = replace(plan, notes=(*plan.notes, note))
    plan = _with_adapters(_with_offload(_with_storage(plan, config), config), config)
    plan = replace(plan, limits=replace(plan.limits, padding=backend.padding(plan)))
    return _with_cache(plan, config, backend.cache_bytes(plan, None))


def _divided(config: EngineConfig, choice: Choice, backend: Backend) -> tuple[ModelSpec | None, ModelShape]:
    """What is divided among ranks, and the part that each has; None, and the model, where all of it is on one. Raises
    ConfigError, or ModelLoadError for sizes that cannot be divided."""
    ranks, spec = config.tensor_parallel_size, choice.shape
    if ranks == 1:
        return None, spec
    flag = f"--tensor-parallel-size {ranks}"
    if not isinstance(spec, ModelSpec):
        raise unsupported(flag, f"transformers' modules run {spec.architecture}")
    if (devices := backend.devices()) is not None and len(devices) < ranks:
        raise ConfigError(f"{flag} needs as many {backend.name.upper()} devices; {len(devices)} can be seen")
    return spec, divide(spec, ranks)


def _drop_refusal(choice: Choice, backend: Backend, dtype: str) -> str | None:
    """Why no engine of this model can give up layers on this machine; None if it can."""
    spec = choice.shape
    if choice.implementation == TRANSFORMERS:
        return f"transformers' modules run {spec.architecture}"
    if spec.num_layers < 2:
        return f"{spec.architecture} has one layer"
    return backend.drop_refusal(spec, dtype)


def _state_note(spec: ModelShape) -> str | None:
    """What recurrent layers cost a user; None without any."""
    if not spec.state_bytes:
        return None
    return (
        f"recurrent layers keep up to {spec.state_bytes / 2**20:.3g} MiB of each running request, and as much of each "
        "prefix that others may start behind"
    )


def _quantization(config: EngineConfig, choice: Choice, backend: Backend) -> str:
    """Of the linear layers: what is asked for, or else the integers, or the floats of 8 bits, that the checkpoint
    stores, where the backend runs them as they are. Layers that stream, and K and V restored from hidden state beside
    integers, are of unpacked weights."""
    packing, streams = choice.shape.packing, parse_offload(config.offload_weights) is not None
    if config.quantization != "none" or packing is None or config.load_format == "dummy":
        return config.quantization
    if config.tensor_parallel_size > 1:
        return "none"  # scales are of whole outputs or blocks
    if choice.implementation != OWN or streams:
        return "none"
    if packing.floats and _floats_refusal(config, packing, backend) is None:
        return STORED_FLOATS
    return STORED_INTEGERS if packing.integers and backend.multiplies_integers and not config.hidden_cache else "none"


def _floats_refusal(config: EngineConfig, packing: Packing, backend: Backend) -> str | None:
    """Why no layer of ours computes with the floats of 8 bits that a checkpoint stores; None if they do."""
    if not packing.floats:
        return "products have a scale for an output, not for a block" if packing.block[0] > 1 else ""
    if config.dtype not in ("auto", "bfloat16"):
        return f"products are of bfloat16, not of {config.dtype}"
    return backend.float8_refusal()


def _float8(dtype: str, refusal: str | None) -> tuple[str, str, str | None]:
    """Quantization and type of what was asked to run in floats of 8 bits, and a line where it does not."""
    if refusal is not None:
        return "none", dtype, f"--quantization fp8: {refusal}; weights stay in {dtype}"
    return FLOAT8, "bfloat16", None


def _with_storage(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """The plan with a line on what a checkpoint of few bits takes. Raises ModelLoadError if its files are missing."""
    packing = plan.spec.packing
    if packing is None or config.load_format == "dummy":
        return plan
    note = f"{packing.name}: {_gib(stored_bytes(plan.folder))} on disk, {_gib(plan.weight_bytes)} in memory"
    if plan.quantization == FLOAT8:
        note += ", as they are stored" if packing.floats else ", unpacked at load and rounded again"
    if plan.quantization == STORED_FLOATS:
        note += f", {'with the scales of inputs that are stored' if packing.static else 'a scale for each token'}"
    if plan.quantization == "none":
        note += f", unpacked to {plan.dtype} at load" + (", as layers are divided" if plan.ranks > 1 else "")
        backend = find_backend(plan.device)
        rounds = backend.multiplies_integers
        if plan.ranks == 1 and not rounds and (why := _floats_refusal(config, packing, backend)):
            note += f": {why}"
        if rounds and plan.implementation == OWN and not config.hidden_cache:
            smaller = memory.weight_bytes(plan.spec, torch_dtype(plan.dtype), "int8")
            note += f" ({_gib(smaller)} with --quantization int8)"
    return replace(plan, notes=(*plan.notes, note))


def _hidden_refusal(config: EngineConfig, spec: ModelShape) -> str | None:
    """Why no request will be run from hidden state; None if some may be, empty if nobody asked."""
    if not config.hidden_cache:
        return ""
    if not isinstance(spec, ModelSpec):
        return "transformers' modules keep the hidden state of their layers to themselves"
    return hidden_offer(spec).refusal or None


def build_engine(
    config: EngineConfig, plan: LaunchPlan | None = None, say: Callable[[str], None] = lambda _line: None
) -> Engine:
    """Load the model and join it with a scheduler; `start` the result in an event loop. Raises ConfigError.

    `say` is told, a line each, what is measured and decided on the way.
    """
    plan = plan or plan_launch(config)
    (
        SLO.parse(config.slo),
        find_policy(config.online_policy),
    )  # what is wrong with them is said before the model is loaded
    work = partial(_build, config, plan, say)
    return in_passing_thread(work) if find_backend(plan.device).leaves_workers else work()


def _build(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> Engine:
    runner, plan = build_runner(config, plan, say)
    try:
        return _join(config, plan, runner, say)
    except BaseException:
        if runner.ranks is not None:
            runner.ranks.close()
        raise


def build_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None] = lambda _line: None
) -> tuple[Runner[Any], LaunchPlan]:
    """Load the model; the plan comes back with the cache size that the device really has. Raises ConfigError.

    Where its layers are divided this is the first rank, and the others are processes that the runner has (`ranks`).
    """
    if plan.ranks == 1:
        return _make_runner(config, plan, say, None)
    own = replace(config, model=str(plan.folder), revision=None, self_test=False)
    ranks: Any = importlib.import_module("engine.execution.ranks.leader")  # msgspec comes with it
    leader = ranks.Leader(own, plan.limits, find_backend(plan.device).devices() or ())
    try:
        runner, plan = _make_runner(config, plan, say, leader)
        leader.reached(MADE)
    except BaseException:
        leader.close()
        raise
    leader.listen()
    runner.ranks = leader
    return runner, plan


def build_follower(config: EngineConfig, limits: Limits, seat: Seat) -> Follower:
    """Another rank than the first, whose plan had these limits. Raises ConfigError, or what keeps it from others."""
    plan = replace(plan_launch(config), limits=limits)
    runner, _ = _make_runner(config, plan, lambda _line: None, seat)
    seat.reached(MADE)
    return Follower(runner.device)


def _make_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None], seat: Seat | None
) -> tuple[Runner[Any], LaunchPlan]:
    backend = find_backend(plan.device)
    plan, make = backend.prepare(config, plan, say)
    _test_family(config, plan, make, backend)
    group = None if seat is None else seat.join(torch.device(plan.device))
    if group is not None:
        _compare_kernels(plan, group)
    transport = None if plan.offload is None else backend.transport(plan)
    gather = backend.resident(plan)
    if plan.offload is not None and transport is not None:
        gather = partial(StreamedLayers, streamed=plan.offload.streamed, transport=transport)
    shard = None if seat is None or group is None else Shard(seat.rank, plan.ranks, group.total, group.gather)
    weights = _load(config, plan, make, gather, shard, backend)
    if plan.offload is not None and transport is not None:
        plan = replace(plan, stream_seconds=_tell_floor(config, plan.offload, transport.seconds(), say))
    adapted = _load_adapters(plan, weights)
    if seat is not None:
        seat.reached(LOADED)
    plan = _with_cache(plan, config, backend.cache_bytes(plan, weights), group)
    if plan.host_units and config.swap_space is None:
        say(f"{_gib(host_bytes(plan))} of host memory keep what the cache has no room for; --swap-space says how much")
    runner, plan = backend.make_runner(config, plan, weights, say)
    if group is not None:
        runner.device.join(group.share)
    for number, deltas in enumerate(adapted, 1):
        runner.device.adapt(number, deltas)
    grammars = GrammarCompiler(plan.folder, plan.spec.vocab_size, plan.spec.eos_token_ids)
    patience = FOREVER if plan.spec.state_bytes else PATIENCE
    runner.enforce(grammars, MAX_FORCED, patience)
    return runner, plan


def _compare_kernels(plan: LaunchPlan, group: Group) -> None:
    """Raises ConfigError where ranks run by different kernels: what they add has another type and stride then."""
    own = zlib.crc32(plan.kernels.encode())
    if group.least((own, -own)) != [own, -own]:
        raise ConfigError(f"ranks run by different kernels, the first one by {plan.kernels}: say --cpu-kernels torch")


def _with_adapters(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """The plan with its LoRA adapters. Raises ConfigError, or ModelLoadError for one that is not supported."""
    if not config.lora:
        return plan
    if isinstance(plan.spec, TransformersShape) and plan.spec.recurrent:
        raise unsupported("--lora", f"{plan.spec.architecture} has recurrent layers")
    adapters = tuple(plan_adapter(each, plan.spec) for each in parse_adapters(config.lora))
    size = 4 * sum(each.num_parameters for each in adapters)  # native kernels may want them in float32
    how = None if plan.implementation == TRANSFORMERS else find_backend(plan.device).adapted_steps(plan)
    plan = replace(plan, adapters=adapters, adapter_bytes=size)
    if how is None:
        return plan
    return replace(plan, notes=(*plan.notes, f"steps with rows of adapters run {how}"))


def _load_adapters(plan: LaunchPlan, weights: ModelWeights | TransformersModel) -> list[dict[Site, Delta]]:
    if plan.adapters and isinstance(weights, TransformersModel):
        weights.take_adapters(plan.adapters)
    return [load_adapter(each, plan.spec, _like(weights)) for each in plan.adapters]


def _like(weights: ModelWeights | TransformersModel) -> Tensor:
    return weights.like if isinstance(weights, TransformersModel) else weights.embedding


def _load(
    config: EngineConfig, plan: LaunchPlan, make: MakeLinear, gather: Gather, shard: Shard | None, backend: Backend
) -> ModelWeights | TransformersModel:
    common: dict[str, Any] = {
        "dtype": plan.dtype, "device": plan.device, "load_format": config.load_format, "seed": config.seed, "make": make
    }  # fmt: skip
    if not isinstance(plan.spec, TransformersShape):
        whole = plan.whole or plan.own
        return load_weights(whole, plan.folder, **common, gather=gather, stored=plan.stored, shard=shard)
    model = load_model(plan.spec, plan.folder, **common)
    if config.self_test:
        _refuse(plan, test_modules(model, backend.module_attention(model, TEST_LIMITS)[0]))
    return model


def _test_family(config: EngineConfig, plan: LaunchPlan, make: MakeLinear, backend: Backend) -> None:
    """Refuse a model of ours that does not answer as transformers does. The packaged model, random weights and layers
    that round their inputs are not tested, nor are all backends. Raises ModelLoadError."""
    rounded, invented = "none" not in (config.quantization, plan.quantization), config.load_format == "dummy"
    if not (config.self_test and config.model and backend.tests_families and plan.implementation == OWN):
        return
    if rounded or invented:
        return
    quick = replace(config, profile_seconds=0.0)

    def device_of(spec: ModelSpec, weights: ModelWeights) -> Device:
        small = replace(
            plan,
            spec=spec,
            limits=TEST_LIMITS,
            scratch_blocks=0,
            host_units=0,
            offload=None,
            int8_cache=False,
        )
        device: Device = backend.make_runner(quick, small, weights, lambda _line: None)[0].device
        return device

    _refuse(plan, test_family(plan.whole or plan.own, plan.folder, plan.dtype, device_of, make))


def _refuse(plan: LaunchPlan, wrong: str) -> None:
    if wrong:
        raise ModelLoadError(f"{plan.folder}: self-test: {wrong}; --no-self-test serves it all the same")


def _with_offload(plan: LaunchPlan, config: EngineConfig) -> LaunchPlan:
    """The plan with the layers that stream. Then steps may be large, unless the configuration says how large: who takes
    part in one shares the cost of the stream. Raises ConfigError."""
    gib = parse_offload(config.offload_weights)
    if gib is None:
        return plan
    if plan.implementation == TRANSFORMERS:
        raise unsupported("--offload-weights", f"transformers' modules run {plan.spec.architecture}")
    budget = find_backend(plan.device).weight_room(plan) if math.isinf(gib) else int(gib * 2**30)
    offload = plan_offload(plan.own, torch_dtype(plan.dtype).itemsize, plan.quantization, budget)
    if offload is None:
        return plan
    seqs, tokens = step_limits(config, wide=True)
    limits = replace(plan.limits, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    note = (
        f"{offload}: {_gib(offload.held_bytes)} of weights stay, {_gib(offload.streamed_bytes)} pass through in every "
        f"step, which holds up to {limits.max_num_seqs} requests and {limits.max_num_batched_tokens} tokens"
    )
    return replace(plan, offload=offload, limits=limits, notes=(*plan.notes, note))


def _tell_floor(config: EngineConfig, offload: Offload, seconds: float, say: Callable[[str], None]) -> float:
    """Say what streaming costs a step, and which objectives are out of reach for it; `seconds` of a layer. Gives those
    of a step."""
    floor, rate = len(offload.streamed) * seconds, offload.layer_bytes / seconds
    say(f"{offload}, {rate / 1e9:.2g} GB/s: a step takes at least {floor * 1e3:.0f} ms")
    lost = [str(each) for each in SLO.parse(config.slo).objectives if each.limit is not None and each.limit < floor]
    if lost:
        say(f"{', '.join(lost)} cannot be met: one step takes longer; batch work is not affected")
    return floor


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def stored_profile(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
) -> tuple[LaunchPlan, Profile | None]:
    """The plan with the kernels that steps would run by, and the latency profile that a start would find; None where
    it would measure one. Sets this process up as a start does. Raises ConfigError."""
    plan, _ = find_backend(plan.device).prepare(config, plan, say)
    try:
        return plan, load_profile(profile_folder(config), profile_key(plan), plan.limits.held)
    except ProfileError as error:
        say(f"{error}; a start measures again")
        return plan, None


def profile_key(plan: LaunchPlan) -> ProfileKey:
    """What a latency profile of this launch holds for."""
    name = f"{plan.folder.name}, {plan.model.num_parameters} parameters"
    if plan.ranks > 1:
        name += f" on {plan.ranks} ranks"
    if plan.implementation == TRANSFORMERS:
        name += ", by transformers"
    if plan.adapters:
        name += f", adapters of rank {', '.join(str(each.rank) for each in plan.adapters)}"
    return ProfileKey(
        name,
        ", ".join((find_backend(plan.device).fingerprint(plan), *([str(plan.offload)] if plan.offload else ()))),
        plan.precision,
        __version__,
        str(plan.limits.padding),
        str(plan.limits.reach),
    )


def profile_folder(config: EngineConfig) -> Path:
    if config.profile_dir:
        return Path(config.profile_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill" / "profiles"


def _join(config: EngineConfig, plan: LaunchPlan, runner: Runner[Any], say: Callable[[str], None]) -> Engine:
    """Profile, SLO, budget and grammars around the runner."""
    slo = SLO.parse(config.slo)
    scheduler = scheduler_config(config, plan)
    backend = find_backend(plan.device)
    copy_rate = backend.copy_rate() if plan.host_units else BUS_RATE
    tiers = CacheTiers(scheduler.scratch_blocks, scheduler.host_units, scheduler.unit_bytes, copy_rate)
    profile = load_or_measure(
        profile_folder(config),
        runner,
        plan.limits.held,
        plan.spec.vocab_size,
        profile_key(plan),
        config.profile_seconds,
        say,
        tiers,
        len(plan.adapters),
        partial(runner.can_enforce, INSIDE_STRING),
        partial(backend.busy_share, plan),
    )
    core, colocation, tuner = make_controller(config, scheduler, profile, slo, profile_folder(config), say)
    info = _info(plan, scheduler)
    if plan.spec.state_bytes:
        say(_tell_checkpoints(plan, scheduler))
    steps = backend.make_staged(config, plan, runner) if plan.droppable else runner
    if isinstance(steps, StagedRunner):
        sizes = DroppableLayers(steps.num_layers, steps.layer_bytes, steps.unit_layer_bytes, plan.limits.num_units)
        info = replace(info, droppable=sizes)
    say(str(info.embedding))
    return Engine(
        core,
        steps,
        info,
        device_lost=runner.lost,
        colocation=colocation,
        tuner=tuner,
        grammars=None if runner.grammars is None else _make_grammars(runner.grammars),
        ranks=runner.ranks,
    )


def _make_grammars(compiler: GrammarCompiler) -> Grammars:
    """Load the tokenizer before the first request comes, since that holds the interpreter's lock."""
    with suppress(OSError, ValueError):  # a request with a grammar is refused then
        compiler.load()
    return Grammars(compiler, Prover(compiler))


def _tell_checkpoints(plan: LaunchPlan, scheduler: SchedulerConfig) -> str:
    """From where prompts with recurrent layers go on."""
    if not scheduler.state_slots:
        return "no checkpoints of recurrent layers: prompts are computed from their first token on"
    taken = _gib(scheduler.state_slots * plan.spec.state_bytes)
    host = f", {scheduler.host_state_slots} more on the host" if scheduler.host_state_slots else ""
    return f"{scheduler.state_slots} checkpoints of recurrent layers, {taken} of the cache's memory{host}"


def _with_cache(plan: LaunchPlan, config: EngineConfig, cache_bytes: int, group: Group | None = None) -> LaunchPlan:
    """The plan with its blocks and the context that they hold: of all ranks that `group` joins, as much as the one has
    that has least. Raises ConfigError."""
    host_units, host_states = _host_room(config, plan)
    if group is not None:
        cache_bytes, host_units = group.least([cache_bytes, host_units])
    unit = _unit_bytes(plan)
    plan = _with_checkpoints(_with_states(plan, config, cache_bytes), config, cache_bytes, unit)
    states = (plan.limits.max_num_seqs + plan.state_slots) * plan.spec.state_bytes
    spec, limits, dtype = plan.spec, plan.limits, torch_dtype(plan.dtype)
    refusal = _hidden_refusal(config, spec)
    note = f"requests run from KV alone: {refusal}"
    if refusal and note not in plan.notes:  # a plan of the device's real memory follows one of an estimate
        plan = replace(plan, notes=(*plan.notes, note))
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    else:
        blocks = memory.num_units(cache_bytes, unit, limits.block_size, 1, states) // UNITS_PER_BLOCK
        if refusal is None:
            device, streams = torch.device(plan.device), plan.offload is not None
            extra = memory.hidden_cache_bytes(
                plan.own, limits.block_size, dtype, blocks // HIDDEN_SHARE, device, streams=streams
            )
            blocks = memory.num_units(cache_bytes, unit, limits.block_size, 1, extra) // UNITS_PER_BLOCK
    plan = replace(
        plan,
        cache_bytes=cache_bytes,
        scratch_blocks=blocks // HIDDEN_SHARE if refusal is None else 0,
        host_units=host_units,
        host_state_slots=host_states,
        limits=replace(limits, num_units=blocks * UNITS_PER_BLOCK),
    )
    plan = replace(plan, limits=replace(plan.limits, window=_window(plan)))
    room = blocks * limits.block_size
    if limits.max_model_len <= room or _most_blocks(plan) <= blocks:
        return plan
    if config.max_model_len is not None:
        raise ConfigError(f"--max-model-len {limits.max_model_len} does not fit: the cache holds {room} tokens")
    if room < MIN_CONTEXT:
        raise ConfigError(f"the cache holds {room} tokens, too few for any request: raise --num-gpu-blocks-override")
    note = f"context limited to the {room} tokens that the cache holds; the model allows {limits.max_model_len}"
    return replace(plan, limits=replace(plan.limits, max_model_len=room), notes=(*plan.notes, note))


def _window(plan: LaunchPlan) -> int:
    """Tokens that a request's blocks are kept for, where every layer has a window; 0: for all. Blocks that are not K
    and V, or that a pipeline of two engines counts whole, are kept."""
    spec = plan.whole or plan.spec
    if not isinstance(spec, ModelSpec) or plan.scratch_blocks or plan.droppable:
        return 0
    windows = list(filter(None, spec.windows))
    return max(windows) + READ_TOGETHER if windows and len(windows) == spec.num_layers else 0


def _most_blocks(plan: LaunchPlan) -> float:
    """What a request holds at once; infinite where that is all of its context."""
    limits, backend = plan.limits, find_backend(plan.device)
    tokens = most_unconfirmed(limits.max_num_batched_tokens, backend.pipeline_depth, backend.ahead_seconds)
    return most_blocks(limits.window, limits.block_size, tokens) if limits.window else math.inf


def _with_states(plan: LaunchPlan, config: EngineConfig, cache_bytes: int) -> LaunchPlan:
    """The plan with as many rows as half of the cache's memory holds states for. Raises ConfigError where that is fewer
    than were asked for."""
    each, rows = plan.spec.state_bytes, plan.limits.max_num_seqs
    if config.num_gpu_blocks_override is not None or rows * each <= max(cache_bytes // 2, each):
        return plan
    rows = max(1, cache_bytes // 2 // each)
    if config.max_num_seqs is not None:
        raise ConfigError(f"--max-num-seqs {config.max_num_seqs} does not fit: memory holds the states of {rows}")
    note = f"at most {rows} requests run at once: memory holds the states of no more"
    return replace(plan, limits=replace(plan.limits, max_num_seqs=rows), notes=(*plan.notes, note))


def _host_room(config: EngineConfig, plan: LaunchPlan) -> tuple[int, int]:
    """Units of the host tier, and slots for states there; with these only where a tier was asked for."""
    each, unit, limits = plan.spec.state_bytes, _unit_bytes(plan), plan.limits
    if not each:
        return memory.host_units(_swap_bytes(config, plan), unit), 0
    if config.swap_space is None and config.overload != "swap":
        return 0, 0
    units = -(-memory.HOST_CHECKPOINT_TOKENS // limits.block_size) * UNITS_PER_BLOCK
    slots = memory.host_units(_swap_bytes(config, plan), each + units * unit)
    return slots * units, slots


def _with_checkpoints(plan: LaunchPlan, config: EngineConfig, cache_bytes: int, unit: int) -> LaunchPlan:
    """The plan with slots for checkpoints of states, in a part of what the rows' states leave of the cache's memory.
    Prefixes cannot be shared without any."""
    each, limits = plan.spec.state_bytes, plan.limits
    if not each or not config.enable_prefix_caching:
        return plan
    left = max(0, cache_bytes - limits.max_num_seqs * each)
    if config.num_gpu_blocks_override is not None:
        return replace(plan, state_slots=memory.useful_slots(limits, config.num_gpu_blocks_override))
    wanted = memory.useful_slots(limits, left // unit // UNITS_PER_BLOCK)
    slots = min(wanted, left // memory.CHECKPOINT_PART // each)
    return replace(plan, state_slots=slots if slots >= memory.LEAST_SLOTS else 0)


def host_bytes(plan: LaunchPlan) -> int:
    """Host memory that the host tier takes, all ranks' together."""
    return plan.ranks * plan.host_units * _unit_bytes(plan) + plan.host_state_slots * plan.spec.state_bytes


def _unit_bytes(plan: LaunchPlan) -> int:
    """Return the bytes of a unit, on any tier."""
    return memory.unit_bytes(plan.spec, plan.limits.block_size, _cache_dtype(plan))


def _cache_dtype(plan: LaunchPlan) -> torch.dtype:
    return plan.cell_type or torch_dtype(plan.dtype)


def _swap_bytes(config: EngineConfig, plan: LaunchPlan) -> int:
    """Host memory for the host tier of a rank."""
    return _all_swap_bytes(config, plan) // plan.ranks


def _all_swap_bytes(config: EngineConfig, plan: LaunchPlan) -> int:
    backend = find_backend(plan.device)
    if config.overload == "drop":
        return 0  # units of the host tier are of all layers
    if config.swap_space is None:
        if config.overload == "swap":
            return memory.swap_bytes(memory.available_memory() // host_engines())
        return backend.swap_bytes()
    wanted, free = int(config.swap_space * 2**30), memory.available_memory()
    if backend.locks_pages and wanted > free:  # it would be taken at once
        raise ConfigError(f"--swap-space {config.swap_space:g}: {_gib(free)} of host memory are free")
    return wanted


def scheduler_config(config: EngineConfig, plan: LaunchPlan) -> SchedulerConfig:
    prefixes = bool(plan.state_slots) or not plan.spec.state_bytes
    return SchedulerConfig.of(
        config,
        num_units=plan.limits.num_units,
        max_model_len=plan.limits.max_model_len,
        host_units=plan.host_units if prefixes else 0,
        unit_bytes=_unit_bytes(plan),
        max_num_seqs=plan.limits.max_num_seqs,
        max_num_batched_tokens=plan.limits.max_num_batched_tokens,
        scratch_blocks=plan.scratch_blocks,
        stream_seconds=plan.stream_seconds,
        window=plan.limits.window,
        pipeline_depth=find_backend(plan.device).pipeline_depth,
        ahead_seconds=find_backend(plan.device).ahead_seconds,
        state_slots=plan.state_slots,
        host_state_slots=plan.host_state_slots if prefixes else 0,
        state_bytes=plan.spec.state_bytes,
        enable_prefix_caching=config.enable_prefix_caching and prefixes,
    )


def _embedding(plan: LaunchPlan) -> EmbeddingSpec:
    if plan.implementation == OWN:
        return read_embedding_spec(plan.folder, plan.spec.hidden_size)
    return EmbeddingSpec(None, plan.spec.hidden_size, False, "transformers' modules run this model")


def _info(plan: LaunchPlan, scheduler: SchedulerConfig) -> EngineInfo:
    return EngineInfo(
        max_model_len=plan.limits.max_model_len,
        vocab_size=plan.spec.vocab_size,
        eos_token_ids=plan.spec.eos_token_ids,
        architecture=plan.spec.architecture,
        dtype=plan.precision,
        device=plan.device,
        num_parameters=plan.model.num_parameters,
        cache_tokens=plan.limits.num_units // UNITS_PER_BLOCK * plan.limits.block_size,
        block_size=plan.limits.block_size,
        max_num_seqs=plan.limits.max_num_seqs,
        embedding=_embedding(plan),
        adapters=tuple(each.name for each in plan.adapters),
        shares_prefixes=scheduler.enable_prefix_caching,
    )
