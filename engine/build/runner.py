"""Build the runner of a plan, with weights, adapters, kernels and self-test."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.build.plan import gib, host_bytes, plan_launch, profile_folder, unit_bytes, with_cache
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.execution import backend as backends
from engine.execution.backend import Backend
from engine.execution.cpu.device import TorchDevice
from engine.execution.masks import FOREVER, MAX_FORCED, PATIENCE
from engine.execution.offload import Offload
from engine.execution.plan import INT4, LaunchPlan
from engine.execution.runner import Device, Runner
from engine.execution.self_test import LIMITS as TEST_LIMITS
from engine.execution.self_test import test_family, test_modules
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.hub import OWN
from engine.models.humming import make_experts
from engine.models.linear import MakeLinear, make_linear, make_packed
from engine.models.lora import Delta, Site, load_adapter
from engine.models.quantized import make_quantized
from engine.models.spec import ModelSpec
from engine.models.transformers_model import TransformersModel, load_model
from engine.models.transformers_shape import TransformersShape
from engine.models.weights import Gather, ModelWeights, StreamedLayers
from engine.structured.compiler import GrammarCompiler


def build_runner(
    config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None] = lambda _line: None
) -> tuple[Runner[Any], LaunchPlan]:
    """Load the model. Return the runner and the plan with the actual cache size. Raise ConfigError."""
    backend = backends.find_backend(plan.device)
    plan, make = prepare(config, plan, say)
    say(f"loading {gib(plan.weight_bytes)} of weights")
    _test_family(config, plan, make, backend)
    transport = None if plan.offload is None else backend.transport(plan)
    gather = backend.resident(plan)
    if plan.offload is not None and transport is not None:
        gather = partial(StreamedLayers, streamed=plan.offload.streamed, transport=transport)
    weights = _load(config, plan, make, gather, backend)
    if plan.offload is not None and transport is not None:
        plan = replace(plan, stream_seconds=_tell_floor(plan.offload, transport.seconds(), say))
    adapted = _load_adapters(plan, weights)
    plan = backend.check_kernels(config, plan, weights, profile_folder(config), say)
    plan = with_cache(plan, config, backend.cache_bytes(plan, weights))
    if plan.host_units and config.swap_space is None:
        say(f"{gib(host_bytes(plan))} of host memory extend the cache; set --swap-space to change this")
    if plan.streams_cache:
        say(f"the cache streams, too: {gib(plan.limits.num_units * unit_bytes(plan))} for running requests")
    runner, plan = backend.make_runner(config, plan, weights)
    for number, deltas in enumerate(adapted, 1):
        runner.device.adapt(number, deltas)
    grammars = GrammarCompiler(plan.folder, plan.spec.vocab_size, plan.spec.eos_token_ids)
    patience = FOREVER if plan.spec.state_bytes else PATIENCE
    runner.enforce(grammars, MAX_FORCED, patience)
    return runner, plan


def prepare(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> tuple[LaunchPlan, MakeLinear]:
    """Prepare the backend for loading. Return the plan, made anew if a library fails here, and the maker of linear
    layers. Raise ConfigError."""
    backend = backends.find_backend(plan.device)
    if fault := backend.library_fault(plan, say):
        say(fault)
        plan = replace(plan_launch(config, beside=plan.beside), faults=(fault,))
    return backend.prepare(config, plan, say)


def _load_adapters(plan: LaunchPlan, weights: ModelWeights | TransformersModel) -> list[dict[Site, Delta]]:
    if plan.adapters and isinstance(weights, TransformersModel):
        weights.take_adapters(plan.adapters)
    like = weights.like if isinstance(weights, TransformersModel) else weights.embedding
    return [load_adapter(each, plan.spec, like) for each in plan.adapters]


def _load(
    config: EngineConfig, plan: LaunchPlan, make: MakeLinear, gather: Gather, backend: Backend
) -> ModelWeights | TransformersModel:
    common: dict[str, Any] = {
        "dtype": plan.dtype, "device": plan.device, "load_format": config.load_format, "make": make
    }  # fmt: skip
    if not isinstance(plan.spec, TransformersShape):
        experts = make_experts if plan.library else None
        return load_weights(plan.own, plan.folder, **common, gather=gather, stored=plan.stored, experts=experts)
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
            plan, spec=spec, limits=TEST_LIMITS, scratch_blocks=0, host_units=0, offload=None, streams_cache=False,
            int8_cache=False,
        )  # fmt: skip
        device: Device = backend.make_runner(quick, small, weights)[0].device
        return device

    tested: dict[str, Any] = {}
    if backend.tests_kernels:
        tested = {"make": make, "stored": plan.stored, "rounds": plan.quantization != "none"}
        tested["reference_make"] = _reference(plan)
    _refuse(plan, test_family(plan.own, plan.folder, plan.dtype, device_of, **tested))


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
