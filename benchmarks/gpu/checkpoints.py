"""Checkpoints at their sizes, with random weights: what the check of the start finds, and steps beside their floor."""

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu.loop import make_runner, scheduler_config
from benchmarks.gpu.setup import Setup, measure_limits
from benchmarks.gpu.steps import OF_STEP, Shape, floor_of, step_row, time_shape
from benchmarks.gpu.table import Row
from engine.config import EngineConfig
from engine.execution.backend import find_backend
from engine.execution.plan import BLOCKS, FLOAT8, NIBBLES
from engine.models.compact import block_weight, make_compact
from engine.models.quantized import StoredWeight, pack_weight
from engine.models.spec import ModelSpec
from engine.models.weights import DummyTensors, ModelWeights, build_weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A shape of SHAPES whose layers run by `quantization`, a value of `LaunchPlan`.

    Attributes:
        store: Rounds a matrix as the checkpoint stores it; None: it is stored in bfloat16.
        itemsize: Bytes of a value of these layers.
    """

    shape: str
    quantization: str = "none"
    store: Callable[[Tensor], StoredWeight] | None = None
    itemsize: float = 2.0

    @property
    def name(self) -> str:
        return self.shape if self.quantization == "none" else f"{self.shape}, {self.quantization}"


class _Stored(DummyTensors):
    """Random tensors; `store` rounds those of layers."""

    store: Callable[[Tensor], StoredWeight] | None = None

    def fetch_bytes(self, name: str, shape: tuple[int, int]) -> StoredWeight | None:  # type: ignore[override]
        if self.store is None or "embed" in name or "lm_head" in name or any(size % 128 for size in shape):
            return None
        return self.store(self.fetch(name, shape))


def _check(checkpoint: Checkpoint, setup: Setup) -> Iterator[Row]:
    """Time decodes of one to many rows, and prompts of as many tokens as rows and of thousands."""
    began, limits = time.perf_counter(), measure_limits(setup)
    if checkpoint.quantization in (BLOCKS, FLOAT8):
        limits = replace(limits, flops=2 * limits.flops)  # of products of 8-bit floats
    rows = setup.size(64, 3)
    decodes = [Shape(count, setup.size(512, 20)) for count in (1, rows // 2, rows)]
    shapes = [*decodes, *(Shape(0, 1, setup.size(chunk, chunk // 64)) for chunk in (256, 2048))]
    config = scheduler_config(
        rows, shapes[-1].chunk, max(each.length for each in shapes), max(each.num_blocks for each in shapes)
    )
    spec, weights, faults = _load(checkpoint, setup)
    setup.synchronize()
    note = f"{'; '.join(faults) or 'none'}; {time.perf_counter() - began:.0f} s"
    yield Row(f"{checkpoint.name}: faults at the start", "", len(faults), 0, lower=True, note=note)
    runner = make_runner(setup, spec, weights, config)
    graphs = runner.device.num_graphs if setup.device.type == "cuda" else runner.device.num_shapes
    yield Row(f"{checkpoint.name}: graphs captured", "", graphs, runner.device.num_shapes)
    for shape in shapes:
        timing = time_shape(setup, runner, shape, setup.size(12, 2))
        floor = floor_of(spec, shape, limits, setup.dtype.itemsize, checkpoint.itemsize) * 1e3
        kind = f"prompt of {shape.chunk}" if shape.chunk else f"decode step, B{shape.decodes} c{shape.context}"
        yield step_row(f"{checkpoint.name}: {kind}", timing, floor / OF_STEP, floor)


def _load(checkpoint: Checkpoint, setup: Setup) -> tuple[ModelSpec, ModelWeights, tuple[str, ...]]:
    """Return the model as a start of the server makes it, and the faults that the start would report."""
    source = _Stored(0, setup.dtype, setup.device)
    source.store = checkpoint.store
    if setup.device.type != "cuda":
        return (spec := setup.spec(checkpoint.shape)), build_weights(spec, source, make_compact), ()
    backend, said = find_backend("cuda"), list[str]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        (Path(folder) / "config.json").write_text(json.dumps(setup.config(checkpoint.shape)))
        config = EngineConfig(model=folder, device="cuda", load_format="dummy", profile_dir=folder)
        plan = importlib.import_module("engine.build").plan_launch(config)
        plan = replace(plan, quantization=checkpoint.quantization)
        plan, make = backend.prepare(replace(config, load_format="auto"), plan, said.append)
        weights = build_weights(plan.own, source, make)
        plan = backend.check_kernels(config, plan, weights, Path(folder), said.append)
    return plan.own, weights, plan.faults


check_int4 = partial(_check, Checkpoint("8B", NIBBLES, partial(pack_weight, group=128), 0.53))
check_blocks = partial(_check, Checkpoint("8B", BLOCKS, block_weight, 1.0))
check_float8 = partial(_check, Checkpoint("8B", FLOAT8, itemsize=1.0))
check_experts = partial(_check, Checkpoint("Qwen3-30B-A3B"))
check_gpt_oss = partial(_check, Checkpoint("gpt-oss-20b"))
