"""Step times of the target table: the runner a step ahead, as the engine drives it, beside the roofline, and swaps of
the cache."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise

import torch

from benchmarks.gpu.loop import BLOCK, make_runner, scheduler_config
from benchmarks.gpu.setup import Limits, Setup, measure_limits
from benchmarks.gpu.table import Row
from engine.api import SamplingParams
from engine.cache.blocks import CacheAction, CacheEntry, CacheKind, CacheOperation, Tier
from engine.execution.cuda.buffers import StepInputs
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.forward import Graphs
from engine.execution.runner import Runner
from engine.models.spec import ModelSpec
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput

OF_STEP, OF_PREFILL = 0.8, 0.742
"""What steps should reach of their floor: 4.4, 9.4 and 6.9 ms, and 42 k tok/s, on an H200."""
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
RUN = 64
"""Positions by which a decode moves on while its step is timed, at most."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Decodes from a context on (the new token counted), and one prefill chunk of a fresh prompt (0: none)."""

    decodes: int
    context: int
    chunk: int = 0

    @property
    def length(self) -> int:
        """Return the longest context."""
        return max(self.context + RUN, self.chunk)

    @property
    def num_blocks(self) -> int:
        return self.decodes * -(-(self.context + RUN) // BLOCK) + -(-self.chunk // BLOCK)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: `step` from one step's end to the next one's, `device` of the same step without any host work between,
    `launch` of the host to launch one."""

    step: float
    device: float
    launch: float

    @property
    def note(self) -> str:
        return f"device {self.device * 1e3:.3g} ms, launch {self.launch * 1e3:.2g} ms"


class LastStep:
    """Repeats the forward pass of the last step that the device ran, without the work of the host."""

    def __init__(self, device: CudaDevice) -> None:
        self._device, self._run = device, Graphs.run.__get__(device._graphs)
        self._inputs: StepInputs | None = None
        device._graphs.run = self  # type: ignore[method-assign]

    def __call__(self, inputs: StepInputs, *, adapted: bool = False) -> None:
        self._inputs = inputs
        self._run(inputs, adapted=adapted)

    def repeat(self) -> None:
        assert self._inputs is not None, "no step has run"
        with torch.inference_mode(), self._device.stream.use():
            self._run(self._inputs)


def time_shape(
    setup: Setup, runner: Runner[CudaDevice], shape: Shape, steps: int, operations: tuple[CacheOperation, ...] = ()
) -> Timing:
    """Medians over `steps` steps, each launched before the one before it has ended, as a server does: each decode is
    one position behind the one before, of the token sampled there. `operations` (on units behind the shape's own) are
    in each step."""
    assert steps + 2 <= RUN, "the contexts have no room for so many steps"
    chunks, new_requests = [], []
    units = count()
    spans = [(shape.context - 1, 1)] * shape.decodes + ([(0, shape.chunk)] if shape.chunk else [])
    for row, (start, length) in enumerate(spans):
        blocks = -(-(start + length + (RUN if start else 0)) // BLOCK)
        entries = tuple(CacheEntry(CacheKind.KV, Tier.DEVICE, (next(units), next(units))) for _ in range(blocks))
        tokens = tuple((row * 7919 + index * 31) % 100 for index in range(start + length))
        new_requests.append(NewRequest(row, f"step-{row}", tokens, len(tokens), _GREEDY, entries))
        chunks.append(Chunk(row, start, length, True))
    last = LastStep(runner.device)

    def output(number: int) -> SchedulerOutput:
        moved = [each._replace(start=each.start + number) if each.start else each for each in chunks]
        return SchedulerOutput(number, tuple(moved), operations=operations)

    runner.launch(SchedulerOutput(0, tuple(chunks), tuple(new_requests)))()
    ends, launches, before = [], [], runner.launch(output(1))
    for number in range(2, steps + 2):
        step = output(number)
        began = time.perf_counter()
        after = runner.launch(step)
        launches.append(time.perf_counter() - began)
        before()
        ends.append(time.perf_counter())
        before = after
    before()
    gaps = [after - before for before, after in pairwise(ends)]
    device = setup.seconds(last.repeat, repeats=steps, rounds=1)
    runner.launch(SchedulerOutput(steps + 2, (), released_rows=tuple(range(len(spans)))))()
    return Timing(statistics.median(gaps), device, statistics.median(launches))


def floor_of(spec: ModelSpec, shape: Shape, limits: Limits, itemsize: int, body_itemsize: float = 0.0) -> float:
    """Seconds: weights read once or GEMMs computed, and the cache read; activations are not counted. Of experts those
    are read that random tokens need. `body_itemsize`: of the weights beside embedding and head, if it differs."""
    head = spec.vocab_size * spec.hidden_size
    body = spec.num_parameters - (head if spec.tie_word_embeddings else 2 * head)
    tokens, samples = shape.decodes + shape.chunk, shape.decodes + bool(shape.chunk)
    read, used = float(body), float(body)
    if (sizes := spec.experts) is not None:
        all_experts = 3 * spec.num_layers * sizes.total * sizes.width * spec.hidden_size
        read -= all_experts * (1 - sizes.per_token / sizes.total) ** tokens
        used -= all_experts * (1 - sizes.per_token / sizes.total)
    flops = 2 * (used * tokens + head * samples)
    flops += 2 * spec.num_layers * spec.q_size * shape.chunk**2  # causal: half of 4 * chunk²
    cached = shape.decodes * shape.context * spec.kv_bytes_per_token(itemsize)
    return limits.step_seconds(read * (body_itemsize or itemsize) + head * itemsize, flops, cached)


def _shapes(setup: Setup) -> tuple[Shape, Shape, Shape, Shape, Shape, Shape]:
    """Return one stream, long contexts, many decodes, a full step, a mixed step and a prefill."""
    long = Shape(setup.size(64, 3), setup.size(2048, 40))
    return (
        Shape(1, setup.size(512, 20)),
        long,
        Shape(setup.size(128, 4), setup.size(512, 24)),
        Shape(setup.size(256, 5), setup.size(256, 20)),
        Shape(long.decodes, long.context, setup.size(512, 16)),
        Shape(0, 1, setup.size(8192, 48)),
    )


def check_steps(setup: Setup) -> Iterator[Row]:
    limits = measure_limits(setup)
    yield from _small_model(setup, limits)
    setup.release()
    spec = setup.spec("8B")
    one, long, wide, many, mixed, prefill = shapes = _shapes(setup)
    context = max(shape.length for shape in shapes)
    blocks = max(shape.num_blocks for shape in shapes)
    config = scheduler_config(many.decodes, prefill.chunk, context, blocks)
    runner = make_runner(setup, spec, setup.weights(spec), config)
    runs = setup.size(20, 2)
    graphs = runner.device.num_graphs if setup.device.type == "cuda" else runner.device.num_shapes
    yield Row("CUDA graphs captured", "", graphs, runner.device.num_shapes)
    for shape, anchor in ((one, "72 % of bandwidth"), (long, "54-61 %"), (wide, "54-61 %")):
        timing = time_shape(setup, runner, shape, runs)
        floor = floor_of(spec, shape, limits, setup.dtype.itemsize) * 1e3
        yield step_row(f"8B decode step, B{shape.decodes} c{shape.context}", timing, floor / OF_STEP, floor, anchor)
        if shape is long:
            yield _gap_row(shape, timing, 0.2, "0.31 (SGLang)")
    yield _gap_row(many, time_shape(setup, runner, many, runs), 0.5)
    timing = time_shape(setup, runner, mixed, runs)
    ratio = timing.step / floor_of(spec, mixed, limits, setup.dtype.itemsize)
    name = f"mixed step, {mixed.chunk} + {mixed.decodes} decodes, over its floor"
    yield Row(name, "x", ratio, 1.15, 1.0, "peers run it eager", True, timing.note)
    timing = time_shape(setup, runner, prefill, setup.size(5, 2))
    floor = prefill.chunk / floor_of(spec, prefill, limits, setup.dtype.itemsize) / 1e3
    name, rate = f"8B prefill, chunk of {prefill.chunk}", prefill.chunk / timing.step / 1e3
    yield Row(name, "k tok/s", rate, OF_PREFILL * floor, floor, "43.9 (SGLang)", note=timing.note)


def _small_model(setup: Setup, limits: Limits) -> Iterator[Row]:
    spec, shape = setup.spec("Qwen2.5-0.5B"), Shape(1, setup.size(512, 20))
    config = scheduler_config(setup.size(8, 2), setup.size(512, 32), shape.length, shape.num_blocks)
    runner = make_runner(setup, spec, setup.weights(spec), config)
    timing = time_shape(setup, runner, shape, setup.size(50, 2))
    floor = floor_of(spec, shape, limits, setup.dtype.itemsize) * 1e3
    yield step_row("Qwen2.5-0.5B step, B1", timing, 0.8, floor, "~4 (vLLM, A100)")


def step_row(metric: str, timing: Timing, target: float, floor: float, anchor: str = "") -> Row:
    """Return the row of a step time; `target` and `floor` in ms."""
    return Row(metric, "ms", timing.step * 1e3, target, floor, anchor, True, timing.note)


def _gap_row(shape: Shape, timing: Timing, target: float, anchor: str = "") -> Row:
    gap = (timing.step - timing.device) * 1e3
    return Row(f"host gap per step at {shape.decodes}", "ms", gap, target, None, anchor, True, timing.note)


# --- swaps through the host tier: both ways beside a pinned copy of the same size, and their cost for steps beside


def swaps(action: CacheAction, first_unit: int, first_host_unit: int, num_blocks: int) -> tuple[CacheOperation, ...]:
    """Blocks of KV one after the other, on the device from `first_unit` and on the host from `first_host_unit`."""
    operations = []
    for block in range(num_blocks):
        device = CacheEntry(CacheKind.KV, Tier.DEVICE, (first_unit + 2 * block, first_unit + 2 * block + 1))
        host = CacheEntry(CacheKind.KV, Tier.HOST, (first_host_unit + 2 * block, first_host_unit + 2 * block + 1))
        pair = (device, host) if action is CacheAction.SWAP_OUT else (host, device)
        operations.append(CacheOperation(action, *pair))
    return tuple(operations)


def check_swap(setup: Setup) -> Iterator[Row]:
    limits = measure_limits(setup)
    spec = setup.spec("8B")  # a unit of 16 tokens takes 1 MiB
    blocks, few = setup.size(256, 4), setup.size(8, 1)
    shape = Shape(setup.size(64, 3), setup.size(2048, 40))
    config = scheduler_config(shape.decodes, setup.size(512, 32), shape.length, shape.num_blocks + blocks)
    runner = make_runner(setup, spec, setup.weights(spec), config, host_units=2 * blocks)
    first = 2 * shape.num_blocks
    unit_bytes = spec.kv_bytes_per_token(setup.dtype.itemsize) * config.block_size / 2
    for action, way in ((CacheAction.SWAP_OUT, "out"), (CacheAction.SWAP_IN, "in")):
        step = SchedulerOutput(0, (), operations=swaps(action, first, 0, blocks))
        seconds = setup.seconds(lambda step=step: runner.launch(step)(), repeats=4)  # type: ignore[misc]
        rate = 2 * blocks * unit_bytes / seconds / 1e9
        note = f"units of {unit_bytes / 2**20:.2g} MiB"
        pinned = limits.to_host / 1e9
        yield Row(f"swap {way}, {2 * blocks} units", "GB/s", rate, 0.85 * pinned, pinned, "~50 (H100)", note=note)
    runs = setup.size(30, 2)
    plain = time_shape(setup, runner, shape, runs)
    both = swaps(CacheAction.SWAP_OUT, first, 0, few) + swaps(CacheAction.SWAP_IN, first + 2 * few, 2 * few, few)
    beside = time_shape(setup, runner, shape, runs, both)
    name = f"decode step B{shape.decodes} c{shape.context} beside {2 * few} blocks of swaps, over the same without"
    yield Row(name, "x", beside.step / plain.step, 1.05, 1.0, lower=True, note=f"{plain.step * 1e3:.3g} ms without")
