"""Engines whose layers are dropped and restored while requests run: the same tokens as one engine that keeps them."""

import functools
import mmap
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from devices import device_of, linear_of, pool_of
from driver import Driver, make_request
from fake_cuda_driver import fake_memory
from support.tables import mostly_slow
from test_runner import crowd
from tiny_models import llama_config, model_folder

from benchmarks.simulated_fleet.plans import pipeline_units, split_layers
from engine.api import EngineRequest, SamplingParams
from engine.build import build_runner, plan_launch
from engine.cache.blocks import CacheEntry, CacheKind, Tier
from engine.config import EngineConfig
from engine.errors import ConfigError, ModelLoadError
from engine.execution.cpu.backend import CpuBackend
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.mapped_layers import MappedLayers
from engine.execution.plan import LaunchPlan
from engine.execution.pool import UnitPool
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner, StageError
from engine.forms import Pooling
from engine.limits import Limits, SchedulerConfig
from engine.machine.child import Link, LinkLostError
from engine.models.byte_cells import INTEGERS
from engine.models.checkpoint import load_layers
from engine.models.linear import make_linear
from engine.models.spec import ModelSpec, load_spec, spec_from_config
from engine.models.weights import DummyTensors, Gather, ResidentLayers, build_weights, matrices
from engine.request import Request
from engine.scheduling.output import Chunk, NewRequest, SchedulerOutput
from engine.scheduling.state import InFlight
from engine.triton_kernels import twins
from predictor.model import LatencyModel

pytestmark = pytest.mark.timeout(900)  # the first test by native kernels may have to build the library
LAYERS, UNITS, BLOCK = 4, 48, 4
KINDS = ("torch", "native", "cuda")
"""The last is the GPU's runner, on the twins of its kernels, over the memory of a driver that breaks no rule."""
MODEL = LatencyModel(knots=(0,), hinges=(1e-3,), attention=1e-5, decode_context=1e-6, decodes=1e-4)


def limits_of(units: int) -> Limits:
    return Limits(12, 32, 120, units, BLOCK)


def llama(**changes: object) -> ModelSpec:
    return spec_from_config(llama_config(num_hidden_layers=LAYERS, **changes))


def make(spec: ModelSpec, kind: str, dtype: str = "float32", units: int = UNITS, **pool: Any) -> PipelineRunner:
    """A runner of random weights, which it loads again alike."""
    gather: Gather = functools.partial(MappedLayers, fake_memory()[0]) if kind == "cuda" else ResidentLayers
    linear = make_linear if kind == "cuda" else linear_of(kind)
    weights = build_weights(spec, DummyTensors(0, getattr(torch, dtype), torch.device("cpu")), linear, gather)
    layers: Any = weights.layers
    spare = {"spare_bytes": layers.spare_bytes, **pool}
    if kind == "cuda":
        spare = {"reserve": layers.reserve, **spare}
        device: Any = CudaDevice(spec, weights, twins, limits_of(units), graphs=False, **spare)
    else:
        device = device_of(kind, spec, weights, limits_of(units), **spare)
    load = functools.partial(
        load_layers, spec, Path(), dtype=dtype, load_format="dummy", make=linear, keep=layers.refill
    )
    return PipelineRunner(Runner(device), load)


@functools.cache
def demo_plan() -> tuple[EngineConfig, LaunchPlan]:
    config = EngineConfig(
        device="cpu", dtype="float32", kernels="torch", threads=1, profile_seconds=0.0,
        num_gpu_blocks_override=UNITS // 2, max_model_len=80, max_num_seqs=12, max_num_batched_tokens=32,
    )  # fmt: skip
    plan = plan_launch(config)
    return config, replace(plan, droppable=True, limits=replace(plan.limits, block_size=BLOCK))


def make_any(kind: str) -> PipelineRunner:
    """Random weights, or the packaged model as a server has it."""
    if kind != "demo":
        return make(llama(), kind)
    config, plan = demo_plan()
    runner, plan = build_runner(config, plan)
    return CpuBackend().make_staged(config, plan, runner)


def drive(runner: PipelineRunner, units: int, *requests: EngineRequest) -> Driver:
    config = SchedulerConfig(
        num_units=units, max_model_len=120, block_size=BLOCK, max_num_seqs=12, max_num_batched_tokens=32,
        min_prefill_chunk=8, pipeline_depth=runner._device.pipeline_depth,
    )  # fmt: skip
    driver = Driver(runner, config)
    driver.add(*requests)
    return driver


def poolings() -> list[EngineRequest]:
    """A request for a vector of each kind."""
    return [EngineRequest(each.name, tuple(range(9, 49)), SamplingParams(1), pooling=each) for each in Pooling]


def ends_as_alone(kind: str, outputs: dict[str, list[int]], requests: Sequence[EngineRequest]) -> bool:
    """Each request has the tokens of a run alone."""
    alone = drive(make_any(kind), UNITS)
    for request in requests:
        alone.add(request)
        alone.run()
    return alone.outputs == {request.request_id: outputs[request.request_id] for request in requests}


def units_of_group(runner: PipelineRunner, kept: Sequence[range]) -> int:
    held = [float(UNITS * runner.num_layers * runner.unit_layer_bytes)] * len(kept)
    return pipeline_units(kept, held, runner.layer_bytes, runner.unit_layer_bytes)


@contextmanager
def pipeline(
    *runners: PipelineRunner, kind: type[Link] = Link, model: LatencyModel | None = None, kept: Any = None
) -> Iterator[list[Link]]:
    """Each leads the next one, whose part of a step runs in a thread. Gives the links, as the leaders see them.

    `kept`: parts of pasts that followers deliver.
    """
    links = []
    with ExitStack() as stack:
        for leader, follower in pairwise(runners):
            ends = socket.socketpair()
            here, there = stack.enter_context(closing(kind(ends[0]))), stack.enter_context(closing(Link(ends[1])))
            thread = threading.Thread(target=follower.follow, args=(there, kept))
            thread.start()
            stack.callback(thread.join)
            leader.lead(here, model)
            stack.callback(leader.end_lead)
            links.append(here)
        yield links


@pytest.mark.parametrize(("kind", "case"), mostly_slow(
    list(product(KINDS, ["float32", "bfloat16", "int8 cache", "neox", "opt", "three engines"])),
    [
        ("torch", "three engines"),
        ("native", "neox"),
        ("cuda", "bfloat16"),
        ("cuda", "int8 cache"),
        ("cuda", "opt"),
    ],
))  # fmt: skip
def test_a_pipeline_computes_what_one_engine_computes(kind: str, case: str) -> None:
    """To the last bit: sampled tokens agree as well."""
    spec = load_spec(model_folder(case)) if case in ("neox", "opt") else llama()
    dtype = "bfloat16" if case == "bfloat16" else "float32"
    more = {"cell_type": INTEGERS if case == "int8 cache" else None}
    kept = split_layers(spec.num_layers, [1.0] * (3 if case == "three engines" else 2))
    runners = [make(spec, kind, dtype, **more) for _ in kept]
    units = units_of_group(runners[0], kept)
    assert units > len(kept) * UNITS
    for runner, layers in zip(runners, kept, strict=True):
        runner.drop(layers, units)
    requests = crowd(np.random.default_rng(5), 6, temperature=0.8) + poolings()
    driver, alone = drive(runners[0], units, *requests), drive(make(spec, kind, dtype, units, **more), units, *requests)
    with pipeline(*runners):
        driver.run()
    alone.run()
    assert driver.outputs == alone.outputs
    assert all(final.embedding == alone.finals[name].embedding for name, final in driver.finals.items())


class CountingLink(Link):
    """`most`: micro-batches that were under way at once."""

    sent, most = 0, 0

    def send(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data[:1] == b"{" and b"number" in bytes(data[:99])
        self.most = max(self.most, self.sent)
        super().send(data)

    def receive(self) -> bytearray:
        data = super().receive()
        self.sent -= data.startswith(b"{") and b"number" in data
        return data


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_under_way_together_and_change_no_token(kind: str) -> None:
    runners = [make(llama(), kind) for _ in range(3)]
    for runner, layers in zip(runners, split_layers(LAYERS, [1.0, 1.0]), strict=False):
        runner.drop(layers, UNITS)
    requests = [each for each in crowd(np.random.default_rng(8), 8) if each.sampling.max_tokens > 1]
    driver, alone = drive(runners[0], UNITS, *requests), drive(runners[2], UNITS, *requests)
    with pipeline(*runners[:2], kind=CountingLink, model=MODEL) as links:
        driver.run()
    assert isinstance(links[0], CountingLink) and links[0].most > 1 and links[0].sent == 0
    alone.run()
    assert driver.outputs == alone.outputs


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_a_pipeline_overlap_without_a_common_decode_and_change_no_token(kind: str) -> None:
    """Prompts in chunks, pooling, drawn tokens, and a request that ends while its token passes the next stage."""
    runners = [make(llama(), kind) for _ in range(3)]
    for runner, layers in zip(runners, split_layers(LAYERS, [1.0, 1.0]), strict=False):
        runner.drop(layers, UNITS)
    requests = crowd(np.random.default_rng(8), 7, temperature=0.8) + poolings()
    alone = drive(runners[2], UNITS, *requests)
    driver = drive(runners[0], UNITS, make_request("ended", [7, 8, 9], 30), *requests)
    driver.core.config = driver.core.state.config = replace(driver.core.config, pipeline_depth=1)
    driver.core.state.staged = True
    with pipeline(*runners[:2], kind=CountingLink) as links:
        abort_in_flight(driver, "ended")
        left = 0
        while driver.step():
            left = max(left, len(runners[0]._runner._begun))
            first, second = (*driver.core.state.in_flight, None, None)[:2]
            assert not first or not second or not decoded(first) & decoded(second)
    assert left == 1, "a step stays under way when the one before is collected"
    assert isinstance(links[0], CountingLink) and links[0].most == 2 and links[0].sent == 0
    assert driver.most_in_flight == 2 and driver.stats().failed_steps == 0
    alone.run()
    del driver.outputs["ended"]
    assert driver.outputs == alone.outputs
    for each in Pooling:
        mine, other = (np.frombuffer(d.finals[each.name].embedding, dtype=np.float32) for d in (driver, alone))
        assert np.allclose(mine, other, atol=1e-5)  # prompts are cut into other chunks


def abort_in_flight(driver: Driver, name: str) -> None:
    """Abort a request whose next token is in flight, and give its row to another request."""
    request = driver.core.state.requests[name]
    while not (request.num_output_tokens and request.num_placeholders):
        assert driver.step()
    driver.abort(name)


def decoded(flight: InFlight) -> set[Request]:
    """The requests that get a token by a step."""
    return {each for chunk, each in zip(flight.output.chunks, flight.requests, strict=True) if chunk.sample}


class Group:
    """Two engines, driven as by a control plane."""

    def __init__(self, kind: str) -> None:
        self.runners = [make_any(kind) for _ in range(2)]
        self.kept = split_layers(self.runners[0].num_layers, [1.0, 1.0])
        self.drivers = [drive(runner, UNITS) for runner in self.runners]
        self.units = units_of_group(self.runners[0], self.kept)

    def rest(self) -> None:
        """No step is in flight."""
        for driver in self.drivers:
            while driver.in_flight:
                driver.complete()

    def merge(self) -> None:
        self.rest()
        (leader, follower), (first, second) = self.drivers, self.runners
        front, back = self.kept
        own = first.read_past(range(UNITS), back)
        moves = []
        for name in [each.request_id for each in follower.moves.open_requests()]:
            held = units_held(follower, name)
            moves.append((second.read_past(held, front), second.read_past(held, back), follower.moves.detach(name)))
        for runner, layers in zip(self.runners, self.kept, strict=True):
            runner.drop(layers, self.units)
        leader.core.state.pool.grow(self.units - UNITS)
        second.write_past(range(UNITS), back, own)
        for its_front, its_back, moved in moves:
            name = moved.spec.request_id
            assert leader.moves.attach(moved)
            held = units_held(leader, name)[: len(its_front) // (len(front) * first.unit_layer_bytes)]
            first.write_past(held, front, its_front)
            second.write_past(held, back, its_back)
            leader.moves.arrived(name)
            leader.outputs[name] = follower.outputs.pop(name)

    def split(self) -> None:
        self.rest()
        first, second = self.runners
        past = second.read_past(range(UNITS), self.kept[1])
        first.restore(UNITS)
        first.write_past(range(UNITS), self.kept[1], past)
        second.restore(UNITS)
        self.drivers[1] = drive(second, UNITS)  # its cache is gone


def units_held(driver: Driver, name: str) -> list[int]:
    return [unit for block in driver.core.state.requests[name].cache_map.blocks for unit in block.entry.units]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "demo"])
def test_requests_go_on_through_a_drop_and_back(kind: str) -> None:
    """Begun on two whole engines, gone on with in their pipeline, in units that neither had, and ended on one engine
    whole again: always the tokens of a run alone."""
    rng = np.random.default_rng(1)
    requests = [make_request(f"r{i}", rng.integers(3, 90, 9 + i).tolist(), 12 + 9 * (i % 4)) for i in range(12)]
    group = Group(kind)
    leader, follower = group.drivers
    leader.add(*requests[:3])
    follower.add(*requests[3:6])
    for driver in group.drivers:
        for _ in range(6):
            driver.step()
        assert len(driver.moves.open_requests()) == 3
    group.merge()
    with pipeline(*group.runners):
        leader.add(*requests[6:10])
        for _ in range(6):
            leader.step()
        used = {unit for name in leader.core.state.requests for unit in units_held(leader, name)}
        assert len(used) > UNITS and max(used) >= UNITS, "more than one engine had"
        leader.core.state.pool.shrink(group.units - UNITS)
        while leader.core.state.pool.num_retiring_units:
            assert leader.step()
        group.runners[0].prepare_restore(UNITS)
        leader.step()
        assert leader.core.has_requests, "some go on without the pipeline"
        group.rest()
    group.split()
    follower = group.drivers[1]
    leader.add(requests[10])
    follower.add(requests[11])
    leader.run()
    follower.run()
    assert ends_as_alone(kind, {**leader.outputs, **follower.outputs}, requests)


@pytest.mark.parametrize("kind", KINDS)
def test_pasts_are_delivered_between_steps_of_other_requests(kind: str) -> None:
    rng = np.random.default_rng(1)
    requests = [make_request(f"r{i}", rng.integers(3, 90, 9 + i).tolist(), 20) for i in range(6)]
    group = Group(kind)
    (leader, follower), (first, second), (front, back) = group.drivers, group.runners, group.kept
    leader.add(*requests[:2])
    follower.add(*requests[2:4])
    for driver in group.drivers:
        for _ in range(4):
            driver.step()
    group.rest()
    own: dict[str, Any] = {}
    for request in requests[:2]:
        stalled = leader.moves.stall(request.request_id, group.units)
        assert stalled is not None
        own[request.request_id] = stalled[1], first.read_past(stalled[1], back)
    kept, moved = {}, []
    for name in [each.request_id for each in follower.moves.open_requests()]:
        held = units_held(follower, name)
        kept[name] = [(layers, second.read_past(held, layers)) for layers in (front, back)]
        moved.append((follower.moves.detach(name), len(held)))
    for runner, layers in zip(group.runners, group.kept, strict=True):
        runner.drop(layers, group.units)
    leader.core.state.pool.grow(group.units - UNITS)
    attached = {}
    for each, count in moved:
        assert leader.moves.attach(each)
        attached[each.spec.request_id] = units_held(leader, each.spec.request_id)[:count]
        leader.outputs[each.spec.request_id] = follower.outputs.pop(each.spec.request_id)
    leader.core.config = leader.core.state.config = replace(leader.core.config, pipeline_depth=1)
    leader.core.state.staged = True
    leader.add(*requests[4:])
    with pipeline(*group.runners, kept=kept):
        for name, units in [*own.items(), *attached.items()]:
            leader.step()
            assert leader.launch() or leader.in_flight, "the leader delivers while a step passes the follower"
            if name in own:
                first.hand_over(units[0], back, units[1])
            else:
                first.fetch(name, units)
            leader.moves.arrived(name)
        kept["gone"] = [(front, b""), (back, b"")]
        first.fetch("gone", ())
        assert not kept
        leader.run()
        assert leader.stats().failed_steps == 0
    assert ends_as_alone(kind, leader.outputs, requests)


@pytest.mark.parametrize("kind", KINDS)
def test_dropped_weights_are_freed_and_come_back_the_same(kind: str) -> None:
    runner = make(llama(), kind)
    layers = runner._layers
    assert isinstance(layers, ResidentLayers)
    whole = layers.held_bytes
    before = [[matrix.data().clone() for matrix in matrices(layer)] for layer in layers]
    dropped = [weakref.ref(matrix) for layer in layers[2:] for matrix in matrices(layer)]
    runner.drop(range(2), 2 * UNITS)
    assert layers.held_bytes == whole - 2 * runner.layer_bytes and layers.absent == [2, 3]
    assert kind == "cuda" or not any(ref() for ref in dropped), "a reference still holds a weight"
    with pytest.raises(ValueError, match="are not loaded"):
        runner.drop(range(2, 4), UNITS)
    runner.restore(UNITS)
    assert layers.held_bytes == whole and not layers.absent
    for kept, layer in zip(before, layers, strict=True):
        assert all(torch.equal(a, matrix.data()) for a, matrix in zip(kept, matrices(layer), strict=True))
    runner.restore(UNITS)  # of one that is whole: nothing to do
    runner.drop(range(2, 4), 2 * UNITS)
    runner.drop(range(3, 4), 3 * UNITS)
    runner.restore(UNITS)
    driver = drive(runner, UNITS)
    driver.add(make_request("r", [5, 6, 7], 5))
    driver.run()
    assert len(driver.outputs["r"]) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_drop_that_failed_is_undone_and_a_restore_that_failed_is_tried_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, steps = make(llama(), kind), step_of([5, 6, 7], [8, 9])
    whole = runner.launch(steps)().token_ids
    with monkeypatch.context() as patch:
        patch.setattr(type(runner._device), "keep", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            runner.drop(range(2), 2 * UNITS)
    runner.restore(UNITS)
    assert runner.launch(steps)().token_ids == whole
    runner.drop(range(2), 2 * UNITS)
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_load", Mock(side_effect=ModelLoadError("the folder is gone")))
        with pytest.raises(ModelLoadError):
            runner.restore(UNITS)
    assert runner._device.pool.layers == range(2) and runner._device.pool.num_units == 2 * UNITS
    with pytest.raises(ValueError, match="no addresses for"):
        runner.drop(range(1), 100 * UNITS)
    runner.restore(UNITS)
    assert runner.launch(steps)().token_ids == whole


def test_layers_of_a_checkpoint_are_loaded_again() -> None:
    spec = load_spec(model_folder("llama-gqa2"))
    layers = load_layers(spec, model_folder("llama-gqa2"), [2, 0], dtype="float32")
    whole = load_layers(spec, model_folder("llama-gqa2"), range(3), dtype="float32")
    for found, index in zip(layers, (2, 0), strict=True):
        for a, b in zip(matrices(found), matrices(whole[index]), strict=True):
            assert torch.equal(a.data(), b.data())


def make_pool(units: int, spare: int = 2**16) -> UnitPool:
    return pool_of(units, 4, 2, 1, 3, spare_bytes=spare)


@pytest.mark.parametrize("piece", [1, 200, 2**20])
def test_units_keep_their_past_where_the_pool_is_laid_out_anew(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.pool._PIECE", piece)
    pool = make_pool(20)
    every = np.arange(20)
    values = torch.arange(20 * 4 * 6, dtype=torch.float32).view(20, 4, 6)
    pool.put_past(every, range(4), values)
    for layers, units in ((range(1, 3), 45), (range(2, 3), 90), (range(1, 4), 25), (range(4), 20), (range(2, 4), 30)):
        held = pool.layers
        common = range(max(held.start, layers.start), min(held.stop, layers.stop))
        pool.relay(layers, units)
        kept = pool.past(every, common)
        assert torch.equal(kept, values[:, common.start : common.stop])
        assert not pool.units[pool.zero_unit].any() and pool.units.shape == (units + 1, len(layers) * 6)
        pool.put_past(every, layers, values[:, layers.start : layers.stop])
        pool.put_past(np.arange(20, units), layers, torch.full((units - 20, len(layers), 6), torch.nan))


def test_memory_behind_the_units_is_given_back() -> None:
    """Untouched whole pages read as zeros."""
    pool = make_pool(20, spare=2**20)
    pool.relay(range(1), 5000)
    pool.put_past(np.arange(5000), range(1), torch.ones(5000, 1, 6))
    pool.relay(range(4), 20)
    behind = pool.slices.flatten()[-(-21 * 4 * 24 // mmap.PAGESIZE) * mmap.PAGESIZE // 4 :]
    assert behind.numel() > 2**17 and not behind.any()


def step_of(*prompts: Sequence[int]) -> SchedulerOutput:
    entry = [CacheEntry(CacheKind.KV, Tier.DEVICE, (2 * i, 2 * i + 1)) for i in range(12)]
    rows = [(row, tuple(tokens), tuple(entry[3 * row : 3 * row + 3])) for row, tokens in enumerate(prompts)]
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    new = tuple(NewRequest(row, f"r{row}", tokens, len(tokens), greedy, entries) for row, tokens, entries in rows)
    return SchedulerOutput(1, tuple(Chunk(row, 0, len(tokens), True) for row, tokens, _ in rows), new)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_behind_ends_alone(kind: str) -> None:
    """A unit that the follower does not have; the next step is whole, and a lost link is told."""
    runners = [make(llama(), kind) for _ in range(2)]
    whole = make(llama(), kind).launch(step_of([5, 6, 7], [8, 9]))().token_ids
    first, second = runners
    first.drop(range(2), 2 * UNITS)
    second.drop(range(2, 4), 1)
    with pipeline(first, second), pytest.raises(StageError, match="next engine"):
        first.launch(step_of([5, 6, 7], [8, 9]))()
    second.drop(range(2, 4), 2 * UNITS)
    with pipeline(first, second):
        assert first.launch(step_of([5, 6, 7], [8, 9]))().token_ids == whole
    here, there = map(Link, socket.socketpair())
    first.lead(here)
    there.close()
    with pytest.raises(LinkLostError):
        first.launch(step_of([5, 6, 7], [8, 9]))()
    here.close()
    first.restore(UNITS)
    assert first.launch(step_of([5, 6, 7], [8, 9]))().token_ids == whole


@pytest.mark.parametrize("pool", [{"spare_bytes": 0}, {"spare_bytes": 0, "host_units": 4}])
def test_what_cannot_be_dropped_is_refused(pool: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="addresses" if len(pool) == 1 else "all layers"):
        make(llama(), "torch", **pool)
    with pytest.raises(ConfigError, match="one layer"):
        make(spec_from_config(llama_config(num_hidden_layers=1)), "torch")
