"""Backend for NVIDIA GPUs: Triton kernels and CUDA graphs, or torch operators for models that the kernels refuse."""

import importlib
import logging
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig, parse_offload
from engine.errors import ConfigError, first_line
from engine.execution import memory
from engine.execution.backend import Backend
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.transformers_device import MakeAttention, TransformersDevice
from engine.execution.cuda.buffers import Buckets, decode_buckets, graph_bytes, mixed_buckets
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.kernel_check import check_kernels, remembered, with_twins
from engine.execution.cuda.mapped_layers import MappedLayers, Memory
from engine.execution.cuda.mapped_layers import refusal as mapping_refusal
from engine.execution.cuda.modules import KernelAttention
from engine.execution.cuda.swap import PinnedCache, PinnedWeights, staging_units
from engine.execution.plan import BLOCKS, COMPACT, NIBBLES, STORED_FLOATS, LaunchPlan
from engine.execution.pool import UnitPool
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner
from engine.limits import NO_PADDING, UNITS_PER_BLOCK, Limits, Padding
from engine.machine.facts import BUS_RATE, cuda_devices, cuda_driver, host_engines
from engine.models import compact, humming
from engine.models.attention import HeadSizes
from engine.models.checkpoint import load_layers
from engine.models.compact import BLOCK, Blocks, Tiles, check, make_compact
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear
from engine.models.packing import Packing
from engine.models.spec import ModelShape, ModelSpec
from engine.models.transformers_model import TransformersModel
from engine.models.transformers_shape import probe
from engine.models.weights import Gather, ModelWeights, ResidentLayers, torch_dtype
from engine.triton_kernels import Kernels, triton_kernels

log = logging.getLogger("tidemill.engine")

_STEP_BYTES = 2**30  # estimate of a step's memory besides weights and cache
_OLDEST_ARCH = (8, 0)
_BLOCKS_ARCH = (9, 0)
"""Compute capability for which cuBLAS multiplies 8-bit floats with a scale per block."""
_SMALLEST_HEAD, _LARGEST_GROUP = 16, 64  # limits of a tensor core product, and of decode tiles without spills


class CudaBackend(Backend):
    """Backend of CUDA devices."""

    name = "cuda"
    pipeline_depth = 1
    ahead_seconds = math.inf
    leaves_workers = False
    multiplies_integers = False
    tests_kernels = False
    locks_pages = True

    def absence(self) -> str | None:
        if torch.version.hip is not None:
            return "this torch is built for ROCm; only NVIDIA GPUs are supported"
        return None if torch.cuda.is_available() else "torch finds no CUDA device here"

    def unused_devices(self) -> str | None:
        """See Backend. A build of torch for CPUs is a choice for the CPU."""
        count, driver = len(cuda_devices()), cuda_driver()
        if torch.version.cuda is None or not count or driver is None:
            return None
        return f"this machine has {count} with driver {driver}, and torch is built for CUDA {torch.version.cuda}"

    def config_refusal(self, config: EngineConfig) -> str | None:
        if config.quantization in ("int8", "int4"):
            kind = config.quantization
            return f"--quantization {kind} is not supported on a GPU; set --device cpu, or --quantization fp8"
        if config.kernels == "torch" and config.overload == "drop":
            return "--kernels torch cannot be combined with --overload drop on a GPU; remove one"
        if config.hidden_cache and parse_offload(config.offload_weights) is not None and not config.swap_space:
            return "--offload-weights with --overload hidden needs --swap-space on a GPU: the cache must stream, too"
        return None

    def drop_refusal(self, spec: ModelShape, dtype: str) -> str | None:
        by = self.refusal(spec, dtype)
        return f"the CUDA kernels do not run this model: {by}" if by else mapping_refusal(torch.cuda.current_device())

    def resident(self, plan: LaunchPlan) -> Gather:
        if not plan.droppable:
            return ResidentLayers
        return partial(MappedLayers, Memory(torch.device(plan.device, torch.cuda.current_device())))

    def refusal(self, spec: ModelShape, dtype: str) -> str | None:
        refusal = kernel_refusal(HeadSizes.of(spec), torch_dtype(dtype), torch.cuda.get_device_capability())
        return refusal or launch_refusal()

    def _refusal_of(self, plan: LaunchPlan) -> str | None:
        """Return why torch operators run the model of this plan; None if kernels do."""
        return self.refusal(plan.spec, plan.dtype) if plan.by_kernels else "--kernels torch"

    def float8_refusal(self) -> str | None:
        found = torch.cuda.get_device_capability()
        return None if found >= compact.OLDEST_ARCH else f"compute capability {found[0]}.{found[1]} is older than 8.9"

    def experts_refusal(self, config: EngineConfig) -> str | None:
        """See Backend. Features that adapt, stream or release the matrices of a layer know MLPs only."""
        flags = {
            f"--quantization {config.quantization}": config.quantization != "none",
            f"--dtype {config.dtype}": config.dtype == "float32",
            "--lora": bool(config.lora),
            "--offload-weights": parse_offload(config.offload_weights) is not None,
            f"--overload {config.overload}": config.overload != "recompute",
        }
        if found := next((flag for flag, given in flags.items() if given), None):
            return f"they run without {found}"
        return "they need compute capability 8.0" if torch.cuda.get_device_capability() < _OLDEST_ARCH else None

    def keeps_bits(self, packing: Packing, unpacked_bytes: int, memory_utilization: float) -> bool:
        """See Backend. Without products of blocks, a step would unpack all of them: only if the weights fit no other
        way, on cards that do not multiply 8-bit floats at all."""
        capability = torch.cuda.get_device_capability()
        if packing.nibbles:
            return capability >= _OLDEST_ARCH
        if capability == _BLOCKS_ARCH and packing.block == (BLOCK, BLOCK):
            return packing.blocks
        needed = self.float8_refusal() is not None and unpacked_bytes > (
            self.room(memory_utilization) * memory.WEIGHT_SHARE
        )
        return packing.blocks and needed

    def has_library(self) -> bool:
        return humming.is_usable() and torch.cuda.get_device_capability() >= _OLDEST_ARCH

    def library_fault(self, plan: LaunchPlan, say: Callable[[str], None]) -> str:
        packing = plan.spec.packing
        if not plan.library or packing is None:
            return ""
        say("checking products of humming-kernels; the first time they are compiled, for up to some minutes")
        shapes = memory.stored_shapes(plan.own, library=True)
        fault = humming.trial(packing, shapes, torch.device(plan.device))
        return fault and f"the product of {plan.quantization} layers by humming-kernels {fault}"

    def choose_dtype(self, spec: ModelShape, _config: EngineConfig) -> tuple[str, str | None]:
        if spec.dtype == "bfloat16" and torch.cuda.get_device_capability() < _OLDEST_ARCH:
            return "float16", "float16 instead of bfloat16, for which this GPU has no fast instructions"
        return spec.dtype, None

    def cache_bytes(self, plan: LaunchPlan, weights: ModelWeights | TransformersModel | None) -> int:
        if weights is None:
            return self.room(plan.memory_utilization, beside=plan.beside) - plan.held_bytes
        if isinstance(weights, TransformersModel):
            model, limits = weights, plan.limits
            return memory.cuda_cache_bytes(
                model.like.device,
                plan.memory_utilization,
                lambda: model.rehearse(limits.max_num_batched_tokens, limits.max_num_seqs),
            )
        if self._refusal_of(plan) is None:
            return _room_beside_graphs(plan, weights)
        device, decoder = weights.embedding.device, Decoder(plan.own, weights)
        return memory.cuda_cache_bytes(
            device, plan.memory_utilization, lambda: memory.run_largest_step(decoder, plan.limits)
        )

    def weight_room(self, plan: LaunchPlan) -> int:
        return int(self.room(plan.memory_utilization, beside=plan.beside) * memory.WEIGHT_SHARE)

    def transport(self, plan: LaunchPlan) -> PinnedWeights:
        assert plan.offload is not None
        if plan.offload.streamed_bytes > (free := memory.available_memory()):
            raise ConfigError(
                f"streamed weights take {plan.offload.streamed_bytes / 2**30:.1f} GiB of host memory, "
                f"but only {free / 2**30:.1f} GiB are free"
            )
        device = torch.device(plan.device)
        return PinnedWeights(plan.offload.layer_bytes, len(plan.offload.streamed), device)

    def swap_bytes(self) -> int:
        return memory.swap_bytes(memory.available_memory() // host_engines())

    def room(self, memory_utilization: float, *, beside: bool = False) -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total * memory_utilization) - (0 if beside else total - free) - _STEP_BYTES

    def copy_rate(self) -> float:
        return BUS_RATE

    def adapted_steps(self, _plan: LaunchPlan) -> str:
        return "without CUDA graphs in steps with a prompt"

    def fingerprint(self, plan: LaunchPlan) -> str:
        how = ("" if plan.graphs else ", without graphs") + "".join(f", torch's {name}" for name in plan.twins)
        how += ", humming-kernels" if plan.library else ""
        return torch.cuda.get_device_name() + (how if plan.by_kernels else ", torch operators")

    def padding(self, plan: LaunchPlan) -> Padding:
        if not isinstance(plan.spec, ModelSpec) or self._refusal_of(plan) is not None:
            return NO_PADDING  # transformers modules and torch operators run every step unpadded
        limits = plan.limits
        decode, mixed = decode_buckets(limits.max_num_seqs), mixed_buckets(limits.max_num_batched_tokens)
        jump = compact.FEW_ROWS if plan.quantization == NIBBLES and not plan.library else 0
        return Padding(tuple(decode), tuple(mixed), jump)

    def prepare(
        self, config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]
    ) -> tuple[LaunchPlan, MakeLinear]:
        if plan.quantization == "none":
            return plan, make_linear
        if plan.quantization in COMPACT:
            return _compact(config, plan, say)
        keeps = plan.quantization == STORED_FLOATS  # only weights that are stored in 8-bit floats are of 8 bits
        make = partial(compact.make_float8, rounding=_rounding(by_kernels=plan.by_kernels), keeps_floats=keeps)
        fault = check(torch.device(plan.device), shapes=_shapes(plan), make=partial(make, keeps_floats=False))
        if not fault:
            return plan, make
        line = f"the product of 8-bit floats {fault}; each call unpacks the weights, which is slower"
        say(line)
        return replace(plan, faults=(*plan.faults, line)), partial(make, product=compact.unpacked_product)

    def check_kernels(
        self,
        config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
        folder: Path,
        say: Callable[[str], None],
    ) -> LaunchPlan:
        skips = not config.self_test or isinstance(weights, TransformersModel)
        if skips or self._refusal_of(plan) is not None:
            return plan
        assert isinstance(weights, ModelWeights)
        graphs = plan.graphs and not weights.layers.streamed
        host, scratch = min(plan.host_units, 2), min(plan.scratch_blocks, 2)

        def make(spec: ModelSpec, limits: Limits, kernels: Kernels, graphs: bool) -> CudaDevice:
            small = replace(plan, spec=spec, limits=limits)
            return _device(small, weights, graphs=graphs, kernels=kernels, host_units=host, scratch_blocks=scratch)

        faults = remembered(
            folder, (plan.own, plan.precision, plan.limits, graphs, host, scratch, bool(plan.adapters)),
            lambda: check_kernels(plan.own, plan.limits, triton_kernels(), make, graphs=graphs), say,
        )  # fmt: skip
        for line in faults.lines:
            say(line)
        lines, graphs = (*plan.faults, *faults.lines), plan.graphs and not faults.graphs
        return replace(plan, twins=tuple(faults.kernels), graphs=graphs, faults=lines)

    def make_runner(
        self,
        _config: EngineConfig,
        plan: LaunchPlan,
        weights: ModelWeights | TransformersModel,
    ) -> tuple[Runner[Any], LaunchPlan]:
        # Torch's remaining work on the host is small. With a thread per core, each operation would wait for all
        # threads, which then spin beside the event loop and the gateway.
        torch.set_num_threads(1)
        hidden, host = plan.scratch_blocks, plan.host_units
        store: dict[str, Any] = {"store": partial(PinnedCache, torch.device(plan.device))} if plan.streams_cache else {}
        if isinstance(weights, TransformersModel):
            attention, how = self.module_attention(weights, plan.limits, by_kernels=plan.by_kernels)
            log.debug("attention of transformers modules by %s, without CUDA graphs", how)
            foreign = TransformersDevice.of(weights, plan, attention)
            return Runner(foreign), replace(plan, state_slots=foreign.state_slots)
        if self._refusal_of(plan) is None:
            graphs = plan.graphs and not weights.layers.streamed  # a graph would have to include the copies of weights
            pool: dict[str, Any] = {"scratch_blocks": hidden, "host_units": host}
            if isinstance(layers := weights.layers, MappedLayers):
                pool |= {"spare_bytes": layers.spare_bytes, "reserve": layers.reserve}
            return Runner(_device(plan, weights, graphs=graphs, **pool, **store)), plan
        pool = {"scratch_blocks": hidden, "host_units": host, "cell_type": plan.cell_type}
        return Runner(TorchDevice(Decoder(plan.own, weights), plan.limits, **pool, **store)), plan

    def module_attention(
        self, model: TransformersModel, limits: Limits, *, by_kernels: bool = True
    ) -> tuple[MakeAttention | None, str]:
        if not by_kernels:
            return None, "torch operators"
        seen, _ = probe(model.module)
        calls = [(each.sizes, each.manner) for each in seen]
        dtype, capability = model.like.dtype, torch.cuda.get_device_capability()
        refusals = (kernel_refusal(heads, dtype, capability) for heads, _ in calls)
        if model.shape.kv_size * dtype.itemsize % 16:
            return None, "torch operators: the keys of a token are not a multiple of 16 bytes"
        if refusal := next(filter(None, refusals), None) or launch_refusal():
            return None, f"torch operators: {refusal}"

        def make(pool: UnitPool, rows: RowTable) -> KernelAttention:
            attention = KernelAttention(triton_kernels(), pool, rows, limits)
            for heads, manner in calls:  # compile now: it takes seconds, during which no token would be produced
                attention.warm_up(heads, manner)
            return attention

        return make, "Triton kernels"

    def make_staged(self, config: EngineConfig, plan: LaunchPlan, runner: Runner[Any]) -> PipelineRunner:
        _, make = self.prepare(config, plan, lambda _line: None)
        layers = runner.device.decoder.weights.layers
        load = partial(
            load_layers, plan.own, plan.folder, dtype=plan.dtype, device=runner.device.pool.device,
            load_format=config.load_format, make=make, stored=plan.stored, keep=layers.refill,
        )  # fmt: skip
        return PipelineRunner(runner, load)


def _shapes(plan: LaunchPlan) -> list[tuple[int, int]]:
    """Return outputs and inputs of the matrices of a layer in few bits."""
    return [(n, k) for n, k, _ in memory.stored_shapes(plan.own, library=False)]


def _compact(config: EngineConfig, plan: LaunchPlan, say: Callable[[str], None]) -> tuple[LaunchPlan, MakeLinear]:
    """Return the plan, and a maker of layers on the stored bits whose operators have been compared on this device."""
    rounding = _rounding(by_kernels=plan.by_kernels)
    group = plan.rounded_group(config.load_format) if config.load_format == "dummy" else 0
    if plan.library:
        return plan, partial(make_compact, rounding=rounding, group=group, library=humming.make_kept)
    unpack = None
    if plan.by_kernels and launch_refusal() is None:
        unpack = importlib.import_module("engine.triton_kernels.norms").unpack_tiles
    tiles = {"tiles": Tiles(unpack=unpack)}
    given: dict[str, Any] = {"blocks": Blocks(rounding)} if plan.quantization == BLOCKS else tiles
    fault = "is not used (--kernels torch)"
    if plan.by_kernels:
        packing = plan.spec.packing
        scaled = group or (packing.block[1] if packing is not None and packing.nibbles else 0)
        fault = check(torch.device(plan.device), shapes=_shapes(plan), group=scaled, **given)
    if fault:
        line = f"the product of {plan.quantization} layers {fault}; each call unpacks their weights"
        say(line)
        plan, given = replace(plan, faults=(*plan.faults, line)), {}
    return plan, partial(make_compact, rounding=rounding, group=group, **given)


def kernel_refusal(heads: HeadSizes, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return why the kernels cannot run these heads on this compute capability; None if they can."""
    if capability < _OLDEST_ARCH:
        return f"compute capability {capability[0]}.{capability[1]} is older than 8.0"
    for width in (heads.head_dim, heads.value_dim):
        if not _SMALLEST_HEAD <= width <= 256 or width * dtype.itemsize % 16:
            return f"heads of {width} are not supported ({_SMALLEST_HEAD} up to 256, a multiple of 16 bytes)"
    largest = _LARGEST_GROUP // 2 if dtype == torch.float32 else _LARGEST_GROUP
    if heads.heads // heads.kv_heads > largest:
        return f"more than {largest} query heads share a KV head in {str(dtype).removeprefix('torch.')}"
    return None


def _rounding(*, by_kernels: bool) -> compact.Rounding:
    """Return the functions that round inputs to 8-bit floats: kernels if Triton works."""
    if not by_kernels or launch_refusal() is not None:
        return compact.BY_TORCH
    kernels = importlib.import_module("engine.triton_kernels.norms")
    return compact.Rounding(kernels.round_rows, kernels.scale_rows)


@cache
def launch_refusal() -> str | None:
    """Return why Triton cannot launch kernels on this machine; None if it can. Triton compiles its launcher."""
    try:
        driver = importlib.import_module("triton.runtime.driver").driver
    except ImportError:
        return "Triton is not installed"
    if not os.environ.get("CC") and not shutil.which("gcc") and not shutil.which("clang"):
        return "Triton needs a C compiler; install gcc or clang, or set CC"
    try:
        driver.active.get_current_target()
    except Exception as error:  # third-party errors of the compiler, its output, or the driver library
        return f"Triton cannot compile its launcher (are Python's headers installed?): {first_line(error)[:300]}"
    return None


def _device(
    plan: LaunchPlan, weights: ModelWeights, *, graphs: bool, kernels: Kernels | None = None, **pool: Any
) -> CudaDevice:
    kernels = kernels or with_twins(triton_kernels(), plan.twins)
    return CudaDevice(
        plan.own, weights, kernels, plan.limits, graphs=graphs, cell_type=plan.cell_type,
        adapted=bool(plan.adapters), **pool,
    )  # fmt: skip


def _room_beside_graphs(plan: LaunchPlan, weights: ModelWeights) -> int:
    """Return the memory left by the largest step (run once as padding), the graphs, and the staging area of the host
    tier."""
    device, limits, step_bytes = weights.embedding.device, plan.limits, 0

    def profile() -> None:
        nonlocal step_bytes
        smallest = replace(plan, limits=replace(limits, num_units=UNITS_PER_BLOCK))
        rehearsed = _device(smallest, weights, graphs=False)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        rehearsed.run_padding(limits.max_num_batched_tokens, limits.max_num_seqs)
        step_bytes = torch.cuda.max_memory_allocated(device) - before

    room = memory.cuda_cache_bytes(device, plan.memory_utilization, profile)
    num_shapes = len(Buckets(limits.max_num_seqs, limits.max_num_batched_tokens).all_shapes())
    if plan.adapters:
        num_shapes += len(decode_buckets(limits.max_num_seqs))
    stored = plan.cell_type or weights.embedding.dtype
    unit = memory.unit_bytes(plan.spec, limits.block_size, stored)
    staging = staging_units(plan.host_units, unit) * unit
    if weights.layers.streamed or not plan.graphs:
        return room - staging  # eager steps
    return room - staging - graph_bytes(num_shapes, step_bytes, limits.max_num_batched_tokens)
