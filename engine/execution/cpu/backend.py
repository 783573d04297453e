"""CPU backend: native kernels if they were built and pass their test, else torch operators."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import openmp
from engine.config import EngineConfig
from engine.execution import memory
from engine.execution.backend import Backend
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.crew import NativeRunner, ThreadWatch, candidates, choose_threads
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.native.library import load
from engine.execution.cpu.native.linear import Native, NativeLinear
from engine.execution.cpu.native.start import start
from engine.execution.cpu.transformers_device import TransformersDevice
from engine.execution.cpu.weight_file import CacheFile, WeightFile
from engine.execution.plan import INT4, LaunchPlan
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner
from engine.machine.activity import processor_share, wait_for_quiet
from engine.machine.facts import host_engines, memcpy_rate, read_processor
from engine.machine.folders import user_folder
from engine.models.checkpoint import load_layers
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear, make_packed
from engine.models.quantized import make_quantized
from engine.models.spec import ModelShape
from engine.models.transformers_model import TransformersModel
from engine.models.weights import ModelWeights, torch_dtype

log = logging.getLogger("tidemill.engine")


class CpuBackend(Backend):
    """Backend of the CPU: the library of the linear layers also attends, else torch."""

    name = "cpu"
    pipeline_depth = 1
    ahead_seconds = 0.02
    leaves_workers = True
    multiplies_integers = True
    tests_kernels = True
    locks_pages = False

    def choose_dtype(self, spec: ModelShape, config: EngineConfig) -> tuple[str, str | None]:
        if read_processor().is_fast(spec.dtype) or _runs_natively(config):
            return spec.dtype, None
        return "float32", f"float32 instead of {spec.dtype}, for which this processor has no fast instructions"

    def cache_bytes(self, plan: LaunchPlan, weights: ModelWeights | TransformersModel | None) -> int:
        if weights is not None:
            return plan.cache_bytes
        return memory.cpu_cache_bytes(max(0, _own_memory() - plan.held_bytes))

    def weight_room(self, _plan: LaunchPlan) -> int:
        return int(_own_memory() * memory.WEIGHT_SHARE)

    def transport(self, plan: LaunchPlan) -> WeightFile:
        assert plan.offload is not None
        return WeightFile(_offload_folder(), plan.offload.layer_bytes, len(plan.offload.streamed))

    def float8_refusal(self) -> str | None:
        return "8-bit floats are not supported on a CPU (8-bit integers are: int8)"

    def copy_rate(self) -> float:
        return memcpy_rate()

    def busy_share(self, plan: LaunchPlan) -> float:
        return processor_share(plan.threads or torch.get_num_threads())

    def adapted_steps(self, plan: LaunchPlan) -> str | None:
        return None if plan.offload is None else "by torch operators, because weights are streamed"

    def fingerprint(self, plan: LaunchPlan) -> str:
        kernels = "" if plan.kernels == "torch" else f", {plan.kernels}"
        return f"{read_processor().name}, {plan.threads or torch.get_num_threads()} threads{kernels}"

    def prepare(
        self, config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
    ) -> tuple[LaunchPlan, MakeLinear]:
        _use_cores(config.threads)
        if plan.offload is not None and config.hidden_cache:
            say("steps run by torch operators, because projections of hidden state are parts of streamed weights")
            return plan, make_linear
        if config.kernels == "torch":
            return plan, _layers(plan, config)
        int8 = plan.quantization != "none"
        native = start(
            torch.get_num_threads(), torch_dtype(plan.dtype), int8=int8, int8_cache=plan.cell_type is not None
        )
        if isinstance(native, str):
            say(f"steps run by torch operators: {native}{openmp.after_all(config, os.environ)}")
            return plan, _layers(plan, config)
        log.debug("steps run by native kernels (%s)", native.level.name)
        return replace(plan, kernels=f"native {native.level.name}"), _layers(plan, config, native)

    def make_runner(
        self,
        config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
    ) -> tuple[Runner[Any], LaunchPlan]:
        if isinstance(weights, TransformersModel):
            foreign = TransformersDevice.of(weights, plan)
            return Runner(foreign), replace(plan, threads=torch.get_num_threads(), state_slots=foreign.state_slots)
        decoder, hidden, host = Decoder(plan.own, weights), plan.scratch_blocks, plan.host_units
        spare = weights.layers.held_bytes if plan.droppable else 0
        pool: dict[str, Any] = {
            "scratch_blocks": hidden, "host_units": host, "cell_type": plan.cell_type, "spare_bytes": spare,
        }  # fmt: skip
        if plan.streams_cache:
            pool["store"] = partial(CacheFile, _offload_folder())
        if not isinstance(weights.head, NativeLinear):
            return Runner(TorchDevice(decoder, plan.limits, **pool)), plan
        native = weights.head.native
        runner = NativeRunner(NativeDevice(decoder, native, plan.limits, **pool))
        most = native.team.threads
        if config.threads is not None or most == 1 or config.profile_seconds <= 0:
            return runner, replace(plan, threads=most)
        wait_for_quiet(most)  # the gateway's process starts at the same time and computes for about a second
        threads, line = choose_threads(runner, plan.limits, plan.spec.vocab_size, most, native.team.resize)
        log.debug(line)
        runner.watch = ThreadWatch(candidates(most), threads, native.team.resize)
        return runner, replace(plan, threads=threads)

    def make_staged(self, config: EngineConfig, plan: LaunchPlan, runner: Runner[Any]) -> PipelineRunner:
        head = runner.device.decoder.weights.head
        make = _layers(plan, config, head.native if isinstance(head, NativeLinear) else None)
        load = partial(
            load_layers, plan.own, plan.folder, dtype=plan.dtype, load_format=config.load_format,
            make=make, stored=plan.stored,
        )  # fmt: skip
        return PipelineRunner(runner, load)


def _offload_folder() -> Path:
    return user_folder("cache", "XDG_CACHE_HOME") / "offload"


def _own_memory() -> int:
    """Return the memory available to this engine; engines on the same host share it equally."""
    return memory.available_memory() // host_engines()


def _layers(plan: LaunchPlan, config: EngineConfig, native: Native | None = None) -> MakeLinear:
    """Return the maker of layers on the native library, or else of torch."""
    make, rounded = (make_linear, make_quantized) if native is None else (native.linear, native.int8_linear)
    if plan.quantization == INT4:
        return partial(make_packed, make=make, group=plan.rounded_group(config.load_format))
    return rounded if plan.quantization == "int8" else make


def _runs_natively(config: EngineConfig) -> bool:
    """Return whether the native kernels will run every step.

    They read half the bytes and compute in float32, so that half precision is the faster type on any processor. Steps
    from hidden state use torch, which is slow in half precision.
    """
    if config.kernels == "torch":
        return False
    return not config.hidden_cache and not isinstance(load(), str)


def _use_cores(threads: int | None) -> None:
    """Use one thread per physical core, because two threads on a core share its vector units.
    OMP_NUM_THREADS takes precedence."""
    if threads is not None:
        torch.set_num_threads(threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(read_processor().cores)
