"""Weights that stream: the same tokens as with all weights in memory, in no more memory than was stated."""

import functools
import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import Mock

import cuda_engine
import numpy as np
import pytest
import torch
from driver import Driver, outputs_of
from hypothesis import given
from hypothesis import strategies as st
from native_build import native
from support.tables import mostly_slow
from test_build import DEMO, answer
from test_native_model import in_turn
from test_runner import BLOCK, CPU, crowd, run_in_waves
from tiny_models import FAMILY_CASES, FEW_FAMILIES, llama_config, model_folder

from engine.api import EngineRequest, SamplingParams
from engine.arrays import IntArray
from engine.build import build_engine, build_runner, plan_launch, profile_key, scheduler_config
from engine.config import EngineConfig
from engine.errors import ConfigError, StreamingError
from engine.execution import offload as offloading
from engine.execution.cpu import weight_file
from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cpu.weight_file import CacheFile, WeightFile
from engine.execution.cuda import backend as cuda_backend
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.swap import PinnedCache, PinnedWeights
from engine.execution.offload import FEWEST_STREAMED, Offload, plan_offload, spread
from engine.execution.pool import PoolOptions
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.execution.streamed_cache import StreamedCache, step_units
from engine.limits import Limits, SchedulerConfig
from engine.models.checkpoint import load_weights
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, PlainLinear, make_linear
from engine.models.quantized import make_quantized
from engine.models.spec import ModelSpec, load_spec, spec_from_config
from engine.models.weights import (
    DummyTensors,
    LayerWeights,
    ModelWeights,
    Norm,
    StreamedLayers,
    build_weights,
    matrices,
)
from engine.profiling.calibration import measure_split
from engine.triton_kernels import twins

pytestmark = pytest.mark.timeout(900)  # the first test may have to build the library


# ---- what streams


@given(
    layers=st.integers(1, 40),
    budget=st.integers(0, 4_000_000),
    tied=st.booleans(),
    quantization=st.sampled_from(["none", "int8"]),
)
def test_as_many_layers_stay_as_the_budget_allows(layers: int, budget: int, tied: bool, quantization: str) -> None:
    spec = spec_from_config(llama_config(num_hidden_layers=layers, tie_word_embeddings=tied))
    try:
        plan = plan_offload(spec, 4, quantization, budget)
    except ConfigError as error:
        assert "--offload-weights" in str(error)
        assert budget < 2_000_000
        return
    everything = offloading.fixed_bytes(spec, 4, quantization)
    everything += layers * sum(
        offloading.matrix_bytes(n, k, 4, quantization) for n, k in ((128, 64), (64, 64), (176, 64), (64, 88))
    )
    if plan is None:
        assert everything <= budget
        return
    assert everything > budget >= plan.held_bytes
    assert len(plan.streamed) >= FEWEST_STREAMED
    if len(plan.streamed) > FEWEST_STREAMED:  # one more would not fit
        assert plan.held_bytes + plan.layer_bytes > budget


@given(st.integers(1, 80), st.data())
def test_layers_that_stream_are_spread_evenly(count: int, data: st.DataObject) -> None:
    streamed = spread(count, data.draw(st.integers(1, count)))
    assert len(set(streamed)) == len(streamed) and streamed[-1] == count - 1 and min(streamed) >= 0
    gaps = np.diff((-1, *streamed))
    assert gaps.max() - gaps.min() <= 1


@pytest.mark.parametrize("text", ["", "0", "-1", "much", "nan", "inf", "1e9"])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--offload-weights must be off, auto or a number of GiB"):
        EngineConfig(offload_weights=text)


# ---- the order of reads


class FakeTransport:
    """Moves bytes at once, and notes its calls; `broken` places cannot be read."""

    def __init__(self, size: int, buffers: int = 2) -> None:
        self.buffers = [torch.zeros(size, dtype=torch.uint8) for _ in range(buffers)]
        self.kept: dict[int, torch.Tensor] = {}
        self.asked: list[tuple[str, int]] = []
        self.broken: set[int] = set()
        self._begun: dict[int, int] = {}

    def keep(self, place: int, parts: Sequence[tuple[int, torch.Tensor]]) -> None:
        self.kept[place] = torch.zeros_like(self.buffers[0])
        for at, part in parts:
            self.kept[place][at : at + part.nbytes] = part

    def begin(self, place: int, buffer: int) -> None:
        assert buffer not in self._begun, "the buffer is in use"
        self._begun[buffer] = place
        self.asked.append(("begin", place))
        self.buffers[buffer].fill_(255)

    def wait(self, buffer: int) -> None:
        place = self._begun.pop(buffer)
        self.asked.append(("wait", place))
        if place in self.broken:
            raise StreamingError(f"layer {place} is gone")
        self.buffers[buffer].copy_(self.kept[place])

    def release(self, buffer: int) -> None:
        self.buffers[buffer].fill_(255)

    def seconds(self) -> float:
        return 1.0


def small_layers(count: int) -> list[LayerWeights]:
    """Layers whose every value is their number."""

    def layer(index: int) -> LayerWeights:
        matrix = PlainLinear(torch.full((3, 5), float(index)), None)
        norm = Norm(torch.ones(5), None)
        return LayerWeights(norm, matrix, None, matrix, norm, matrix, matrix)

    return [layer(index) for index in range(count)]


def values_of(layer: LayerWeights) -> set[float]:
    return {float(x) for matrix in matrices(layer) for x in matrix.dense_from(0)[0].unique()}


def streamed_layers(count: int, streamed: tuple[int, ...]) -> tuple[StreamedLayers, FakeTransport]:
    transport = FakeTransport(4 * 64)
    return StreamedLayers(iter(small_layers(count)), streamed, transport), transport


@pytest.mark.parametrize("streamed", [(0, 1, 2, 3, 4), (1, 2, 4), (0, 2, 3, 4)], ids=str)
def test_each_layer_is_itself_in_every_pass(streamed: tuple[int, ...]) -> None:
    layers, _ = streamed_layers(5, streamed)
    for index in (0, 1, 2, 3, 4) * 3:
        with layers.use(index) as layer:
            assert values_of(layer) == {float(index)}


def test_the_next_layer_comes_while_one_computes_and_the_first_behind_the_last() -> None:
    layers, transport = streamed_layers(3, (0, 1, 2))
    for index in (0, 1, 2, 0):
        with layers.use(index):
            transport.asked.append(("run", index))
    runs = transport.asked
    assert runs == [
        ("begin", 0), ("begin", 1), ("wait", 0), ("run", 0), ("begin", 2), ("wait", 1), ("run", 1), ("begin", 0),
        ("wait", 2), ("run", 2), ("begin", 1), ("wait", 0), ("run", 0), ("begin", 2),
    ]  # fmt: skip


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sets(st.integers(0, 3)))
def test_any_order_and_any_failure_gives_a_layer_itself_or_an_error(order: list[int], broken: set[int]) -> None:
    layers, transport = streamed_layers(6, (0, 2, 3, 5))
    transport.broken = broken
    for index in order:
        place = layers.streamed.index(index) if index in layers.streamed else None
        if place in broken:
            with pytest.raises(StreamingError, match=f"layer {place}"), layers.use(index):
                pytest.fail("a layer that could not be read was used")
        else:
            with layers.use(index) as layer:
                assert values_of(layer) == {float(index)}


# ---- the file


def filled_file(folder: Path, count: int = 4, size: int = 5000) -> tuple[WeightFile, list[torch.Tensor]]:
    file = WeightFile(folder, size, count)
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for _ in range(count)]
    for place, each in enumerate(data):
        file.keep(place, [(0, each[:64]), (64, each[64:])])
    return file, data


def read(file: WeightFile, place: int, buffer: int = 0) -> torch.Tensor:
    file.begin(place, buffer)
    file.wait(buffer)
    return file.buffers[buffer].clone()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_gives_what_was_kept_whatever_the_file_system_allows(
    tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[int] = []
    if not direct:
        monkeypatch.setattr(weight_file, "_past_the_cache", lambda _name: None)
        monkeypatch.setattr(os, "posix_fadvise", lambda _fd, first, _size, _advice: dropped.append(first))
    file, data = filled_file(tmp_path)
    assert not list(tmp_path.iterdir()), "the file has a name"
    for place in (0, 3, 1, 2, 0):
        assert torch.equal(read(file, place, place % 2)[:5000], data[place])
    assert file.seconds() > 0
    if not direct:
        assert not file._file.direct and set(dropped) == {0, 8192, 16384, 24576}


def test_an_unclosed_file_is_freed_without_a_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_read, read_on = threading.Event(), os.preadv

    def slow(*given: Any) -> int:
        may_read.wait()
        return read_on(*given)

    file, _ = filled_file(tmp_path)
    monkeypatch.setattr(os, "preadv", slow)
    number = file._file.number
    file.begin(2, 1)
    result = file._reads[1]
    del file
    gc.collect()
    assert result is not None and not result.done()
    os.fstat(number)  # the read still needs it
    may_read.set()
    assert result.result() is None
    threads = [each for each in threading.enumerate() if each.name.startswith("tidemill-weights")]
    for each in threads:
        each.join()  # the last holder of the file is the thread that read it
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_file_that_ends_early_is_an_error_and_never_old_weights(tmp_path: Path) -> None:
    file, data = filled_file(tmp_path)
    os.ftruncate(file._file.number, 2 * 8192 + 4096)
    assert torch.equal(read(file, 1)[:5000], data[1])
    for place in (2, 3):
        with pytest.raises(StreamingError, match="the file of streamed layers ends"):
            read(file, place)


def test_folders_that_cannot_serve_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--offload-weights: .*file has no room .* set XDG_CACHE_HOME"):
        WeightFile(tmp_path / "file", 4096, 3)
    with pytest.raises(ConfigError, match="has no room for"):
        WeightFile(tmp_path, 2**40, 2**15)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    monkeypatch.setattr(weight_file, "file_system", lambda _folder: "tmpfs")
    with pytest.raises(ConfigError, match="is on tmpfs, which is memory"):
        WeightFile(tmp_path, 4096, 3)


# ---- models


def maker(name: str) -> MakeLinear:
    if name.startswith("native"):
        return native(2).int8_linear if name.endswith("int8") else native(2).linear
    return make_quantized if name.endswith("int8") else make_linear


pinned_cache = functools.partial(PinnedCache, CPU)


def plan_for(spec: ModelSpec, kind: str, num_streamed: int) -> Offload:
    """Just enough for all layers but so many."""
    quantization = "int8" if kind.endswith("int8") else "none"
    least = next(
        budget
        for budget in range(1000, 10**8, 1000)
        if _streams(spec, quantization, budget) in (num_streamed, *range(num_streamed))
    )
    plan = plan_offload(spec, 4, quantization, least)
    assert plan is not None and len(plan.streamed) == num_streamed
    return plan


def _streams(spec: ModelSpec, quantization: str, budget: int) -> int:
    try:
        plan = plan_offload(spec, 4, quantization, budget)
    except ConfigError:
        return 10**9
    return 0 if plan is None else len(plan.streamed)


def held(weights: ModelWeights) -> int:
    """All bytes of weights in memory, but for what norms take beside the tensors of torch."""
    total = weights.embedding.nbytes + weights.head.data().nbytes + weights.layers.held_bytes
    total += 0 if weights.positions is None else weights.positions.nbytes
    for layer in weights.layers:
        for norm in (layer.input_norm, layer.post_norm):
            total += norm.weight.nbytes + (0 if norm.bias is None else norm.bias.nbytes)
    return total


def make_driver(
    spec: ModelSpec, weights: ModelWeights, kind: str, pool: PoolOptions | None = None, **limits: int
) -> Driver:
    config = SchedulerConfig(
        num_units=2 * limits.get("num_blocks", 22), max_model_len=80, block_size=BLOCK, max_num_seqs=12,
        max_num_batched_tokens=24, min_prefill_chunk=8,
    )  # fmt: skip
    decoder, pool = Decoder(spec, weights), pool or {}
    if kind.startswith("native"):
        return Driver(Runner(NativeDevice(decoder, native(2), config.limits, **pool)), config)
    return Driver(Runner(TorchDevice(decoder, config.limits, **pool)), config)


@pytest.mark.parametrize(("case", "kind"), mostly_slow(
    in_turn(FAMILY_CASES, ["torch", "native int8"], ["torch int8", "native"]),
    in_turn(FEW_FAMILIES, ["torch"], ["native int8"]),
))  # fmt: skip
def test_tokens_are_those_of_a_resident_model(case: str, kind: str, tmp_path: Path) -> None:
    """In a pool that is always full: preemptions, prefix hits, mixed steps; also if the cache streams beside them."""
    folder = model_folder(case)
    spec = load_spec(folder)
    plan = plan_for(spec, kind, 3)
    file = WeightFile(tmp_path, plan.layer_bytes, 3)
    gather = functools.partial(StreamedLayers, streamed=plan.streamed, transport=file)
    streaming = load_weights(spec, folder, dtype="float32", make=maker(kind), gather=gather)
    assert held(streaming) <= plan.held_bytes <= plan.budget_bytes
    found = []
    resident = load_weights(spec, folder, dtype="float32", make=maker(kind))
    pools: list[PoolOptions] = [{}, {}, {"store": functools.partial(CacheFile, tmp_path)}]
    for weights, pool in zip((resident, streaming, streaming), pools, strict=True):
        driver = make_driver(spec, weights, kind, pool)
        run_in_waves(driver, crowd(np.random.default_rng(11), 10))
        stats = driver.stats()
        assert sum(stats.preemptions.values()) > 0 and stats.prefix_hit_tokens > 0
        found.append(driver.outputs)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_failed_read_is_one_failed_step(kind: str) -> None:
    """Its requests go back to the confirmed tokens; every token is that of a model in memory."""
    spec = spec_from_config(llama_config(num_hidden_layers=5))
    transport = FakeTransport(plan_for(spec, kind, 4).layer_bytes)
    failures = deque([3, 1, 2, 0])
    wait = transport.wait

    def fragile(buffer: int) -> None:
        wait(buffer)
        if failures and len(transport.asked) % 23 == 22:
            failures.popleft()
            raise StreamingError("a bad sector")

    transport.wait = fragile  # type: ignore[method-assign]
    gather = functools.partial(StreamedLayers, streamed=(0, 1, 3, 4), transport=transport)
    found = []
    for options in ((), (gather,)):
        weights = build_weights(spec, DummyTensors(0, torch.float32, CPU), maker(kind), *options)
        driver = make_driver(spec, weights, kind, num_blocks=60)
        run_in_waves(driver, crowd(np.random.default_rng(7), 6))
        found.append(driver.outputs)
    assert not failures, "no read failed"
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["torch", "cuda"])
@pytest.mark.parametrize("case", mostly_slow(["llama-mha-tied", "opt"], ["opt"]))
def test_a_streamed_cache_of_both_kinds_gives_the_same_tokens(case: str, kind: str, tmp_path: Path) -> None:
    """New blocks have the proportion of the split (HybridServe, Eq. 11), those of prompts too; none is restored."""
    folder = model_folder(case)
    spec = load_spec(folder)
    plan, found = plan_for(spec, "torch", 3), list[dict[str, list[int]]]()
    for split in (None, (1, 0), (3, 1), (0, 1)):
        file = WeightFile(tmp_path, plan.layer_bytes, 3)
        gather = functools.partial(StreamedLayers, streamed=plan.streamed, transport=file)
        weights = load_weights(spec, folder, dtype="float32", **({} if split is None else {"gather": gather}))
        config = SchedulerConfig(
            num_units=44, max_model_len=80, block_size=BLOCK, max_num_seqs=12, max_num_batched_tokens=24,
            min_prefill_chunk=8, pipeline_depth=int(kind == "cuda"), scratch_blocks=44 if split else 0, split=split,
        )  # fmt: skip
        pool: PoolOptions = {"scratch_blocks": config.scratch_blocks}
        if split is not None:
            pool["store"] = pinned_cache
        device: TorchDevice | CudaDevice
        if kind == "cuda":
            device = CudaDevice(spec, weights, twins, config.limits, graphs=False, **pool)
        else:
            device = TorchDevice(Decoder(spec, weights), config.limits, **pool)
        driver, shares = Driver(Runner(device), config), list[tuple[int, int]]()
        driver.add(*crowd(np.random.default_rng(11), 10))
        while driver.step():
            running = driver.core.state.running.values()
            maps = [request.cache_map for group in running for request in group]
            shares += [(each.num_compact, len(each.blocks)) for each in maps]
        found.append(driver.outputs)
        assert all(act * sum(split) == round(split[1] * blocks) or 0 < split[1] < 4 for act, blocks in shares if split)
        if split == (3, 1):
            assert {act for act, blocks in shares if blocks == 8} == {2}
    assert found[0] == found[1] == found[2] == found[3]


def test_a_split_is_measured_while_nothing_streams() -> None:
    """By the time of the device alone, from which the link's is known to be longer or shorter."""
    spec = spec_from_config(llama_config(num_hidden_layers=5, num_key_value_heads=4))
    transport, store = FakeTransport(plan_for(spec, "torch", 4).layer_bytes), Mock(alignment=1)
    gather = functools.partial(StreamedLayers, streamed=(0, 1, 3, 4), transport=transport)
    weights = build_weights(spec, DummyTensors(0, torch.float32, CPU), make_linear, gather)
    limits = Limits(8, 64, 80, num_units=120, block_size=BLOCK)
    device = TorchDevice(Decoder(spec, weights), limits, scratch_blocks=120, store=lambda: store)
    assert device.pool.stream is not None and isinstance(weights.layers, StreamedLayers)
    device.pool.stream.paused = weights.layers.paused = True
    for load_kv, kinds in ((1e-12, (60, 0)), (100.0, (0, 120))):
        split, costs = measure_split(Runner(device), limits, 60, 0.0, load_kv)
        assert split == kinds and costs.forward_fixed > 0.0 and costs.ratio == 0.5
    assert not transport.asked and not store.load.called and not store.save.called


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_cache_that_cannot_be_read_fails_a_step_and_one_that_cannot_be_written_all(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, store = spec_from_config(llama_config(num_hidden_layers=5)), CacheFile(tmp_path)
    weights = build_weights(spec, DummyTensors(0, torch.float32, CPU), maker(kind))
    driver = make_driver(spec, weights, kind, {"store": lambda: store})
    run_in_waves(driver, crowd(np.random.default_rng(7), 4))
    forward, chunks = driver.runner.device.forward, np.array([[0, 5, 1, 1]])
    os.ftruncate(store._file.number, 0)
    with pytest.raises(StreamingError, match="the file of streamed layers ends"):
        forward(chunks)
    os.ftruncate(store._file.number, 5 * store._size)
    forward(chunks)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", Mock(side_effect=OSError(5, "Input/output error")))
        with pytest.raises(StreamingError, match="writing the streamed cache failed: Input/output error"):
            forward(chunks)
    with pytest.raises(StreamingError, match="writing the streamed cache failed"):
        forward(chunks)


def test_a_step_loads_and_saves_the_units_of_its_blocks() -> None:
    rows = RowTable(Limits(2, 64, 80, num_units=60, block_size=4, window=16), hidden=True)
    rows.k_table[0, :10], rows.v_table[0, :10] = np.arange(0, 20, 2), np.arange(1, 20, 2)
    rows.k_table[1, :3], rows.v_table[1, :3], rows.hidden_table[1, :3] = -1, -1, (30, 31, 32)
    rows.is_hidden[1, :3] = True
    read, written = step_units(rows, np.array([[0, 30, 7, 1], [1, 8, 1, 1]]))
    assert sorted(read) == [*range(6, 16), 30, 31]  # the first three blocks lie before the window
    assert sorted(written) == [*range(14, 20), 32]
    cache = StreamedCache(CacheFile(Path()), 60, 2048, 2)
    assert cache.slots == 62 and cache._spans(np.array([3, 8, 9, 40]), 0) == [(2, 4), (8, 10), (40, 42)]
    assert cache._spans(np.array([3, 8, 9, 40]), 6) == [(2, 10), (40, 42)]


# ---- page-locked memory, beside the steps


class LateLane:
    """A lane whose work is done when `finish` says so, in any order that marks allow: work that waits for no mark may
    read and write at any moment."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], bool]] = deque()
        self._passed: set[int] = set()
        self._marks = 0

    def push(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: (work(), True)[1])

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.push(lambda: target.copy_(source))

    def mark(self) -> "LateMark":
        self._marks += 1
        number = self._marks
        self.push(lambda: self._passed.add(number))
        return LateMark(self, number)

    def wait(self, mark: "LateMark") -> None:
        self.queue.append(lambda: mark.passed)

    def has_passed(self, number: int) -> bool:
        return number in self._passed

    def run_one(self) -> bool:
        if not self.queue or not self.queue[0]():
            return False
        self.queue.popleft()
        return True


class LateMark:
    def __init__(self, lane: LateLane, number: int) -> None:
        self._lane, self._number = lane, number

    @property
    def passed(self) -> bool:
        return self._lane.has_passed(self._number)

    def synchronize(self) -> None:
        raise AssertionError("the host waits for the device in a step")


@pytest.mark.parametrize("seed", range(20))
def test_copies_and_kernels_in_any_order_that_events_allow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four passes, and some layers out of order, are launched at once; kernels find their own layer's bytes."""
    random = Random(seed)
    odd = random.choices(range(5), k=random.randrange(6))
    steps, transfers = LateLane(), LateLane()
    streams = Mock(return_value=transfers, current=lambda _device: steps)
    monkeypatch.setattr("engine.execution.cuda.swap.DeviceStream", streams)
    transport = PinnedWeights(4 * 64, 4, CPU)
    layers = StreamedLayers(iter(small_layers(5)), (0, 1, 3, 4), transport)
    found: list[tuple[int, set[float]]] = []
    for index in (*range(5), *odd, *(list(range(5)) * 3)):
        with layers.use(index) as layer:
            steps.push(lambda index=index, layer=layer: found.append((index, values_of(layer))))
    while steps.queue or transfers.queue:
        first, second = random.sample((steps, transfers), 2)
        assert first.run_one() or second.run_one(), "each lane waits for the other"
    assert len(found) == 20 + len(odd)
    assert all(values == {float(index)} for index, values in found)


@pytest.mark.parametrize("seed", range(20))
def test_a_streamed_cache_in_any_order_that_events_allow(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are launched at once, one fails half-way; each adds 1 to its units, from the result of the step before."""
    random = Random(seed)
    steps, back, out = LateLane(), LateLane(), LateLane()
    streams = Mock(side_effect=[back, out], current=lambda _device: steps)
    monkeypatch.setattr("engine.execution.cuda.swap.DeviceStream", streams)
    cache, num_layers, wrong = StreamedCache(pinned_cache(), 40, 8, 5), 5, list[int]()
    slices = torch.zeros(3 * cache.slots, 2)
    cache.attach(slices)
    sums = np.zeros((num_layers, 40))

    def add(place: int, units: list[int], before: IntArray) -> None:
        cells = slices[place:][units, 0]
        wrong.extend(np.flatnonzero(cells.numpy() != before).tolist())
        slices[place:][units, 0] = cells + 1
        slices[place:][[unit for unit in range(40) if unit not in units]] = torch.nan

    for step in range(6):
        units = sorted(random.sample(range(40), 7))
        cache._loads = cache._saves = cache._spans(np.array(units), 0)
        cache._runs = True
        for layer in range(3):
            cache._store.load(layer, cache._loads)
        for layer in range(num_layers if step != 3 else 2):
            with cache.use(layer):
                before = sums[layer, units].copy()
                steps.push(functools.partial(add, cache.place(layer), units, before))
                sums[layer, units] += 1
    lanes = [steps, back, out]
    while any(lane.queue for lane in lanes):
        random.shuffle(lanes)
        assert any(lane.run_one() for lane in lanes), "all lanes wait for each other"
    assert not wrong
    host = torch.stack(cast(PinnedCache, cache._store)._host).view(torch.float32)
    assert np.array_equal(host[:, :40, 0].numpy(), sums)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("case", mostly_slow(["llama-gqa2", "opt", "neox"], ["opt"]))
def test_the_runner_for_cuda_gives_the_same_tokens(case: str, depth: int) -> None:
    folder = model_folder(case)
    spec = load_spec(folder)
    plan = plan_for(spec, "torch", 3)
    transport = PinnedWeights(plan.layer_bytes, 3, CPU)
    gather = functools.partial(StreamedLayers, streamed=plan.streamed, transport=transport)
    found = []
    for options, store in (({}, None), ({"gather": gather}, None), ({"gather": gather}, pinned_cache)):
        weights = load_weights(spec, folder, dtype="float32", **options)
        driver = cuda_engine.make_driver(spec, weights, depth=depth, num_blocks=20, tokens=24, store=store)
        run_in_waves(driver, crowd(np.random.default_rng(21), 10))
        assert sum(driver.stats().preemptions.values()) > 0
        found.append(driver.outputs)
    assert found[0] == found[1] == found[2]
    assert transport.seconds() > 0


def test_no_graphs_are_made_of_steps_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama-gqa2")
    spec = load_spec(folder)
    plan = plan_for(spec, "torch", 3)
    gather = functools.partial(
        StreamedLayers, streamed=plan.streamed, transport=PinnedWeights(plan.layer_bytes, 3, CPU)
    )
    captured: list[CudaDevice] = []
    monkeypatch.setattr(CudaDevice, "_capture", lambda self: captured.append(self))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_backend, "triton_kernels", lambda: twins)
    monkeypatch.setattr(cuda_backend, "launch_refusal", lambda: None)
    launch = plan_launch(EngineConfig(model=str(folder), device="cpu", num_gpu_blocks_override=40))
    for options, graphs in (({}, 1), ({"gather": gather}, 0)):
        weights = load_weights(spec, folder, dtype="float32", **options)
        captured.clear()
        cuda_backend.CudaBackend().make_runner(EngineConfig(), launch, weights)
        assert len(captured) == graphs


def test_a_host_without_room_for_what_streams_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder("llama-gqa2")
    launch = plan_launch(EngineConfig(model=str(folder), device="cpu", num_gpu_blocks_override=40))
    launch = replace(launch, offload=plan_for(load_spec(folder), "torch", 3))
    monkeypatch.setattr("engine.execution.memory.available_memory", lambda: 1000)
    with pytest.raises(ConfigError, match="GiB of host memory"):
        cuda_backend.CudaBackend().transport(launch)


# ---- the whole launch


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def offloading_config(**changes: object) -> EngineConfig:
    """The demo model with two thirds of its weights in memory."""
    spec = plan_launch(DEMO).spec
    everything = offloading.fixed_bytes(spec, 4, "none") + spec.num_parameters * 4
    gib = round(everything * 0.6 / 2**30, 6)
    return replace(DEMO, offload_weights=str(gib), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_a_launch_streams_what_does_not_fit_and_says_so(tmp_path: Path, kernels: str) -> None:
    config = offloading_config(kernels=kernels)
    plan = plan_launch(config)
    assert plan.offload is not None and plan.offload.held_bytes <= plan.offload.budget_bytes
    (note,) = [note for note in plan.notes if "pass through" in note]
    assert "up to 256 requests and 2048 tokens" in note
    assert (plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens) == (256, 2048)
    assert scheduler_config(config, plan).limits.max_num_seqs == 256
    assert profile_key(plan) != profile_key(plan_launch(DEMO))
    lines: list[str] = []
    slow = replace(config, slo="tbt_p99=1us,ttft_p99=1000s")
    build_runner(slow, plan_launch(slow), lines.append)
    assert any(f"{plan.offload}, " in line and "a step takes at least" in line for line in lines)
    prompt = (5, 6, 7)
    resident = await answer(replace(DEMO, kernels=kernels), prompt, 30)
    assert await answer(config, prompt, 30) == resident


async def test_hidden_state_is_offered_while_weights_stream(tmp_path: Path) -> None:
    """On a CPU, in no more memory, and the cache streams: its blocks are divided by measured costs."""
    config = offloading_config(overload="hidden", online_policy="goodput", swap_space=0.01)
    plan = plan_launch(config)
    assert plan.offload is not None and plan.scratch_blocks > 0
    gpu = cuda_backend.CudaBackend()
    assert "needs --swap-space on a GPU" in str(gpu.config_refusal(replace(config, swap_space=None)))
    assert gpu.config_refusal(config) is None
    lines: list[str] = []
    runner, made = build_runner(config, plan, lines.append)
    assert made.streams_cache and made.scratch_blocks == made.limits.num_units, "every block may be hidden state"
    assert any("steps run by torch operators, because projections of hidden state" in line for line in lines)
    weights = cast(TorchDevice, runner.device).decoder.weights
    assert held(weights) <= plan.offload.held_bytes <= plan.offload.budget_bytes
    prompt = (5, 6, 7)
    assert await answer(config, prompt, 30) == await answer(replace(DEMO, kernels="torch"), prompt, 30)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
async def test_a_cache_beyond_memory_streams_beside_the_weights(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.memory.CPU_LIMIT", 2**21)
    config = offloading_config(kernels=kernels, swap_space=0.0028, num_gpu_blocks_override=None, max_model_len=160)
    plan, resident = plan_launch(config), plan_launch(replace(config, swap_space=None))
    assert plan.streams_cache and not plan.host_units and not resident.streams_cache
    assert 1.2 < plan.limits.num_units / resident.limits.num_units < 1.6
    more = plan_launch(replace(config, swap_space=1.0)).limits.num_units
    assert more / resident.limits.num_units == pytest.approx(plan.spec.num_layers / 3, rel=0.2), "buffers of a layer"
    assert profile_key(plan) != profile_key(resident)
    prompt = tuple(5 + place % 50 for place in range(100))
    assert await answer(config, prompt, 30) == await answer(replace(DEMO, kernels=kernels), prompt, 30)


def test_explicit_limits_of_a_step_stay(tmp_path: Path) -> None:
    plan = plan_launch(offloading_config(max_num_seqs=7, max_num_batched_tokens=100))
    assert (plan.limits.max_num_seqs, plan.limits.max_num_batched_tokens) == (7, 100)
    said = plan_launch(offloading_config(max_num_seqs=64))
    assert (said.limits.max_num_seqs, said.limits.max_num_batched_tokens) == (64, 2048), "64 is said, and kept"


async def test_a_file_that_ends_early_fails_steps_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests end with an error: no token is made from the old content of a buffer."""
    engine = build_engine(offloading_config())
    await engine.start()
    try:
        layers = cast(TorchDevice, cast(Runner[TorchDevice], engine.runner).device).decoder.weights.layers
        assert isinstance(layers, StreamedLayers)
        os.ftruncate(cast(WeightFile, layers._transport)._file.number, 0)
        sampling = SamplingParams(max_tokens=8, temperature=0.0)
        request = EngineRequest("r", (5, 6, 7), sampling, final_only=True)
        (output,) = [out async for out in outputs_of(engine, request)]
        assert output.error is not None and not output.token_ids
    finally:
        await engine.stop()
    assert "the file of streamed layers ends after" in caplog.text
