"""Helpers of the tests of the CUDA runner: the runner on the CPU, and a driver for it."""

import torch
from driver import Driver, small_config

from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.execution.streamed_cache import OpenStore
from engine.limits import SchedulerConfig
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.triton_kernels import Kernels, twins


class CudaDriver(Driver):
    runner: Runner[CudaDevice]


def make_runner(
    spec: ModelSpec,
    weights: ModelWeights,
    config: SchedulerConfig,
    kernels: Kernels | None = None,
    *,
    graphs: bool = True,
    adapted: bool = False,
    store: OpenStore | None = None,
) -> Runner[CudaDevice]:
    """`graphs`: where there is a GPU."""
    return Runner(
        CudaDevice(
            spec,
            weights,
            kernels or twins,
            config.limits,
            graphs=graphs and weights.embedding.device.type == "cuda",
            scratch_blocks=config.scratch_blocks,
            host_units=config.host_units,
            adapted=adapted,
            **({} if store is None else {"store": store}),
        )
    )


def make_driver(
    spec: ModelSpec,
    weights: ModelWeights,
    *,
    kernels: Kernels | None = None,
    depth: int = 1,
    num_blocks: int = 200,
    seqs: int = 12,
    tokens: int = 32,
    host_units: int = 0,
    scratch_blocks: int = 0,
    policy: str = "fcfs",
    graphs: bool = True,
    adapted: bool = False,
    store: OpenStore | None = None,
) -> CudaDriver:
    config = small_config(
        num_blocks, max_model_len=min(4 * num_blocks, 200), max_num_seqs=seqs, max_num_batched_tokens=tokens,
        pipeline_depth=depth, min_prefill_chunk=8, host_units=host_units, scratch_blocks=scratch_blocks,
    )  # fmt: skip
    torch.set_num_threads(1)
    runner = make_runner(spec, weights, config, kernels, graphs=graphs, adapted=adapted, store=store)
    return CudaDriver(runner, config, online_policy=policy)
