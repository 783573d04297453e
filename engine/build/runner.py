"""Build the runner of a plan, with weights, adapters, kernels and self-test, on one rank or several."""

import importlib
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from engine.build.memory import gib, host_bytes, with_cache
from engine.build.plan import plan_launch, profile_folder
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution import backend as backends
from engine.execution.backend import Backend
from engine.execution.cpu.device import TorchDevice
from engine.execution.masks import FOREVER, MAX_FORCED, PATIENCE
from engine.execution.offload import Offload
from engine.execution.plan import INT4, LaunchPlan
from engine.execution.ranks.group import LOADED, MADE, Follower, RankGroup, StartingRank
from engine.execution.runner import Device, Runner
from engine.execution.self_test import LIMITS as TEST_LIMITS
from engine.execution.self_test import test_family, test_modules
from engine.limits import Limits
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.hub import OWN
from engine.models.linear import MakeLinear, make_linear, make_packed
from engine.models.lora import Delta, Site, load_adapter
from engine.models.quantized import make_quantized
from engine.models.sharding import Shard
from engine.models.spec import ModelSpec
from engine.models.streaming import StreamedLayers
from engine.models.transformers_model import TransformersModel, load_model
from engine.models.transformers_shape import TransformersShape
from engine.models.weights import Gather, ModelWeights
from engine.structured.compiler import GrammarCompiler


def build_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None] = lambda _line: None
) -> tuple[Runner[Any], LaunchPlan]:
    """Load the model. Return the runner and the plan with the actual cache size. Raise ConfigError.

    With several ranks this process is the first one, and the runner starts the others as processes (`ranks`).
    """
    if plan.ranks == 1:
        return _make_runner(config, plan, say, None)
    own = replace(config, model=str(plan.folder), revision=None, self_test=False)
    ranks: Any = importlib.import_module("engine.execution.ranks.leader")  # imports msgspec
    leader = ranks.Leader(own, plan.limits, backends.find_backend(plan.device).devices() or ())
    try:
        runner, plan = _make_runner(config, plan, say, leader)
        leader.reached(MADE)
    except BaseException:
        leader.close()
        raise
    leader.listen()
    runner.ranks = leader
    return runner, plan


def build_follower(config: EngineConfig, limits: Limits, seat: StartingRank) -> Follower:
    """Build a rank other than the first one. Raise ConfigError, or the error of joining the group.

    `limits`: the limits of the first rank's plan.
    """
    plan = replace(plan_launch(config), limits=limits)
    runner, _ = _make_runner(config, plan, lambda _line: None, seat)
    seat.reached(MADE)
    return Follower(runner.device)


def _make_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None], seat: StartingRank | None
) -> tuple[Runner[Any], LaunchPlan]:
    backend = backends.find_backend(plan.device)
    plan, make = backend.prepare(config, plan, say)
    say(f"loading {gib(plan.weight_bytes)} of weights")
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
        plan = replace(plan, stream_seconds=_tell_floor(plan.offload, transport.seconds(), say))
    adapted = _load_adapters(plan, weights)
    if seat is not None:
        seat.reached(LOADED)
    plan = backend.check_kernels(config, plan, weights, profile_folder(config), say)
    plan = with_cache(plan, config, backend.cache_bytes(plan, weights), group)
    if plan.host_units and config.swap_space is None:
        say(f"{gib(host_bytes(plan))} of host memory extend the cache; set --swap-space to change this")
    runner, plan = backend.make_runner(config, plan, weights)
    if group is not None:
        runner.device.join(group.share)
    for number, deltas in enumerate(adapted, 1):
        runner.device.adapt(number, deltas)
    grammars = GrammarCompiler(plan.folder, plan.spec.vocab_size, plan.spec.eos_token_ids)
    patience = FOREVER if plan.spec.state_bytes else PATIENCE
    runner.enforce(grammars, MAX_FORCED, patience)
    return runner, plan


def _compare_kernels(plan: LaunchPlan, group: RankGroup) -> None:
    """Raise ConfigError if ranks use different kernels, because the summed tensors would differ in type and stride."""
    own = zlib.crc32(plan.kernels.encode())
    if group.least((own, -own)) != [own, -own]:
        raise ConfigError(f"ranks use different kernels (the first rank: {plan.kernels}); set --kernels torch")


def _load_adapters(plan: LaunchPlan, weights: ModelWeights | TransformersModel) -> list[dict[Site, Delta]]:
    if plan.adapters and isinstance(weights, TransformersModel):
        weights.take_adapters(plan.adapters)
    like = weights.like if isinstance(weights, TransformersModel) else weights.embedding
    return [load_adapter(each, plan.spec, like) for each in plan.adapters]


def _load(
    config: EngineConfig, plan: LaunchPlan, make: MakeLinear, gather: Gather, shard: Shard | None, backend: Backend
) -> ModelWeights | TransformersModel:
    common: dict[str, Any] = {
        "dtype": plan.dtype, "device": plan.device, "load_format": config.load_format, "make": make
    }  # fmt: skip
    if not isinstance(plan.spec, TransformersShape):
        whole = plan.whole or plan.own
        return load_weights(whole, plan.folder, **common, gather=gather, stored=plan.stored, shard=shard)
    model = load_model(plan.spec, plan.folder, **common)
    if config.self_test:
        _refuse(plan, test_modules(model, backend.module_attention(model, TEST_LIMITS, by_kernels=plan.by_kernels)[0]))
    return model


def _test_family(config: EngineConfig, plan: LaunchPlan, make: MakeLinear, backend: Backend) -> None:
    """Raise ModelLoadError if our implementation of a model differs from that of transformers.

    The packaged model and random weights are not tested.
    """
    if not (config.self_test and config.model and plan.implementation == OWN) or config.load_format == "dummy":
        return
    quick = replace(config, profile_seconds=0.0)

    def device_of(spec: ModelSpec, weights: ModelWeights) -> Device:
        if not backend.tests_kernels:
            return TorchDevice(Decoder(spec, weights), TEST_LIMITS)
        small = replace(
            plan, spec=spec, limits=TEST_LIMITS, scratch_blocks=0, host_units=0, offload=None, int8_cache=False
        )
        device: Device = backend.make_runner(quick, small, weights)[0].device
        return device

    tested: dict[str, Any] = {}
    if backend.tests_kernels:
        tested = {"make": make, "stored": plan.stored, "rounds": plan.quantization != "none"}
        tested["reference_make"] = _reference(plan)
    _refuse(plan, test_family(plan.whole or plan.own, plan.folder, plan.dtype, device_of, **tested))


def _reference(plan: LaunchPlan) -> MakeLinear:
    """Return what makes linear layers of transformers' modules from unpacked weights, to compare ours with."""
    if plan.quantization == INT4:
        return make_linear if plan.stored else make_packed
    return make_linear if plan.quantization == "none" else make_quantized


def _refuse(plan: LaunchPlan, wrong: str) -> None:
    if wrong:
        raise ModelLoadError(f"{plan.folder}: self-test: {wrong}; --no-self-test serves it all the same")


def _tell_floor(offload: Offload, seconds: float, say: Callable[[str], None]) -> float:
    """Report the minimum step time with streamed weights.

    `seconds`: transfer time of one layer. Return the transfer time of a step in seconds.
    """
    floor, rate = len(offload.streamed) * seconds, offload.layer_bytes / seconds
    say(f"{offload}, {rate / 1e9:.2g} GB/s: a step takes at least {floor * 1e3:.0f} ms")
    return floor
