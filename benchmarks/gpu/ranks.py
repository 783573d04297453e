"""Layers divided among ranks, as far as one device shows it: NCCL with one rank, whose sums are in the graphs, and two
ranks of one device, which add up by gloo through the host, without graphs. Each against transformers, as `equality`."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from benchmarks.gpu.equality import compare
from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row
from engine.execution.cuda.device import CudaDevice
from engine.execution.layout import RankStep
from engine.execution.ranks.group import Follower, RankGroup, c10d
from engine.execution.rows import RowTable
from engine.execution.runner import Runner
from engine.limits import SchedulerConfig
from engine.models.sharding import Shard
from engine.models.spec import ModelSpec
from engine.models.weights import TensorSource, build_weights
from engine.scheduling.output import SchedulerOutput

_MODEL = "Llama"


def check_ranks(setup: Setup) -> Iterator[Row]:
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = replace(setup, dtype=torch.float32)
    yield compare(exact, _MODEL, _one_by_nccl, ", one rank by NCCL")
    with ThreadPoolExecutor(1) as thread:
        yield compare(exact, _MODEL, partial(_two_by_gloo, thread), ", two ranks of one device by gloo")


class _FollowerHere:
    """See Leader: the second rank is a thread."""

    pids: ClassVar[list[int]] = []

    def __init__(self, thread: ThreadPoolExecutor, follower: "Future[Follower]") -> None:
        self._thread, self._follower = thread, follower
        self._last: Future[None] | None = None

    def begin(self, output: SchedulerOutput, rows: RowTable) -> None:
        """See Leader. Raises the error of the previous step, if it had one."""
        if self._last is not None:
            self._last.result()
        step = RankStep.of(output, rows)
        self._last = self._thread.submit(lambda: self._follower.result().run(step))

    def end(self) -> None: ...

    def lost(self) -> None: ...

    def watch(self, lost: Callable[[str], None]) -> None: ...

    def close(self) -> None: ...


def _one_by_nccl(setup: Setup, spec: ModelSpec, source: TensorSource, config: SchedulerConfig) -> Runner[CudaDevice]:
    on_gpu = setup.device.type == "cuda"
    group = RankGroup(c10d().HashStore(), 0, 1, setup.device, nccl=on_gpu)
    device = _device(setup, spec, source, config, Shard(0, 1, group.total, group.gather), graphs=on_gpu)
    assert device.num_graphs == (device.num_shapes if on_gpu else 0), "a graph was not captured"
    device.join(group.share)
    return Runner(device)


def _two_by_gloo(
    thread: ThreadPoolExecutor, setup: Setup, spec: ModelSpec, source: TensorSource, config: SchedulerConfig
) -> Runner[CudaDevice]:
    store = c10d().HashStore()

    def make(rank: int) -> CudaDevice:
        group = RankGroup(store, rank, 2, setup.device, nccl=False)
        with torch.inference_mode():
            device = _device(setup, spec, source, config, Shard(rank, 2, group.total, group.gather), graphs=False)
        device.join(group.share)
        return device

    follower = thread.submit(lambda: Follower(make(1)))
    runner = Runner(make(0))
    runner.ranks = _FollowerHere(thread, follower)  # type: ignore[assignment]
    return runner


def _device(
    setup: Setup, spec: ModelSpec, source: TensorSource, config: SchedulerConfig, shard: Shard, *, graphs: bool
) -> CudaDevice:
    weights = build_weights(spec, source, shard=shard)
    return CudaDevice(shard.spec_of(spec), weights, setup.kernels(), config.limits, graphs=graphs)
