"""Layers given up and had again on one device (KunServe): two engines, each a process, become a pipeline whose pools
have the memory of the layers that each gave up, and two whole engines again."""

import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.loop import Loop, scheduler_config
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from benchmarks.simulated_fleet.plans import pipeline_units, split_layers
from engine.api import EngineRequest, SamplingParams
from engine.execution.cuda.device import CudaDevice
from engine.execution.cuda.mapped_layers import MappedLayers, Memory
from engine.execution.pool import HostMemory
from engine.execution.runner import Runner
from engine.execution.stages import PipelineRunner
from engine.limits import SchedulerConfig
from engine.machine.child import Link
from engine.models.checkpoint import load_layers
from engine.models.linear import make_linear
from engine.models.weights import DummyTensors, Gather, ResidentLayers, build_weights

_MODEL = "Qwen3-0.6B"


def check_drop(setup: Setup) -> Iterator[Row]:
    """Compare tokens before, in and after a pipeline; in float32, where the shape of a step changes no token."""
    setup = replace(setup, dtype=torch.float32)
    config = scheduler_config(8, 64, setup.size(512, 96), setup.size(64, 12))
    here, there = socket.socketpair()
    mine, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_follow, args=(setup, config, there, theirs), daemon=True)
    other.start()
    there.close()
    theirs.close()
    runner, requests = _make(setup, config), _requests(setup)
    link = Link(here)
    mine.recv()  # it is there
    before = _tokens(runner, config, requests)
    units = _units(runner, config)
    mine.send("drop")
    dropped = _seconds(setup, partial(_drop, runner, config, 0))
    mine.recv()
    runner.lead(link)
    between = _tokens(runner, replace(config, num_units=units), requests)
    runner.end_lead()
    mine.send("restore")
    restored = _seconds(setup, partial(runner.restore, config.num_units))
    mine.recv()
    after = _tokens(runner, config, requests)
    link.close()
    other.join(30)
    yield from _rows(runner, config, units, (dropped, restored), before, between, after)


def _rows(
    runner: PipelineRunner,
    config: SchedulerConfig,
    units: int,
    seconds: tuple[float, float],
    before: list[list[int]],
    *others: list[list[int]],
) -> Iterator[Row]:
    count, note = sum(map(len, before)), f"{units} units instead of {config.num_units}"
    for name, found in zip(("in a pipeline of two processes", "whole again"), others, strict=True):
        same = sum(a == b for one, two in zip(before, found, strict=True) for a, b in zip(one, two, strict=True))
        yield Row(f"KunServe: tokens as before the drop, {name}", "of all", same / count, 1.0, 1.0, note=note)
    size = len(split_layers(runner.num_layers, (1.0, 1.0))[1]) * runner.layer_bytes
    note = f"{size / 2**20:.3g} MiB of weights; {seconds[1] * 1e3:.3g} ms to have them again"
    yield Row("KunServe: a drop, without what is held", "ms", seconds[0] * 1e3, None, lower=True, note=note)


def _follow(setup: Setup, config: SchedulerConfig, end: socket.socket, orders: Connection) -> None:
    """The other process."""
    runner, link = _make(setup, config), Link(end)
    orders.send("made")
    assert orders.recv() == "drop"
    _drop(runner, config, 1)
    orders.send("dropped")
    runner.follow(link)
    assert orders.recv() == "restore"
    runner.restore(config.num_units)
    orders.send("restored")


def _make(setup: Setup, config: SchedulerConfig) -> PipelineRunner:
    """As the server builds it. In tiny sizes the memory is the system's."""
    spec, on_gpu = setup.spec(_MODEL), setup.device.type == "cuda"
    gather: Gather = partial(MappedLayers, Memory(setup.device)) if on_gpu else ResidentLayers
    with torch.inference_mode():
        weights = build_weights(spec, DummyTensors(0, setup.dtype, setup.device), make_linear, gather)
    layers = weights.layers
    assert isinstance(layers, ResidentLayers)
    reserve = layers.reserve if isinstance(layers, MappedLayers) else HostMemory
    device = CudaDevice(
        spec, weights, setup.kernels(), config.limits, graphs=on_gpu, spare_bytes=layers.spare_bytes, reserve=reserve
    )
    kind = str(setup.dtype).removeprefix("torch.")
    load = partial(
        load_layers, spec, Path(), dtype=kind, device=setup.device, load_format="dummy", make=make_linear,
        keep=layers.refill,
    )  # fmt: skip
    return PipelineRunner(Runner(device), load)


def _units(runner: PipelineRunner, config: SchedulerConfig) -> int:
    kept = split_layers(runner.num_layers, (1.0, 1.0))
    held = float(config.num_units * runner.num_layers * runner.unit_layer_bytes)
    return pipeline_units(kept, (held, held), runner.layer_bytes, runner.unit_layer_bytes)


def _drop(runner: PipelineRunner, config: SchedulerConfig, stage: int) -> None:
    runner.drop(split_layers(runner.num_layers, (1.0, 1.0))[stage], _units(runner, config))


def _seconds(setup: Setup, work: Callable[[], object]) -> float:
    setup.synchronize()
    began = time.perf_counter()
    work()
    setup.synchronize()
    return time.perf_counter() - began


def _tokens(runner: PipelineRunner, config: SchedulerConfig, requests: list[EngineRequest]) -> list[list[int]]:
    loop = Loop(runner, config)
    loop.run(requests)
    return [loop.tokens[request.request_id] for request in requests]


def _requests(setup: Setup) -> list[EngineRequest]:
    rng, sampling = np.random.default_rng(3), SamplingParams(max_tokens=setup.size(48, 6), temperature=0.0)
    lengths = rng.integers(1, setup.size(300, 40), setup.size(12, 4))
    return [
        EngineRequest(f"r{index}", tuple(rng.integers(3, 100, int(length)).tolist()), sampling)
        for index, length in enumerate(lengths)
    ]
