"""What the tests of the CUDA runner share: the runner on the CPU, and a driver that launches steps ahead."""

from collections import deque

import torch
from driver import Driver

from engine.config import SchedulerConfig
from engine.execution.cuda.kernels import Kernels, torch_kernels
from engine.execution.cuda.runner import Collect, CudaRunner
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.scheduling.output import ModelRunnerOutput, SchedulerOutput

BLOCK = 4


class Ahead:
    """A runner for `Driver` that launches a step as soon as it is scheduled, before earlier tokens are read."""

    def __init__(self, runner: CudaRunner) -> None:
        self.runner = runner
        self._launched: deque[tuple[SchedulerOutput, Collect | Exception]] = deque()
        self.most_in_flight = 0

    def launch(self, output: SchedulerOutput) -> None:
        try:
            self._launched.append((output, self.runner.launch(output)))
        except RuntimeError as error:
            self._launched.append((output, error))
        self.most_in_flight = max(self.most_in_flight, len(self._launched))

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        launched, collect = self._launched.popleft()
        while launched is not output:  # the driver does not ask for a step that was built on a failed one
            launched, collect = self._launched.popleft()
        if isinstance(collect, Exception):
            raise collect
        return collect()


class AheadDriver(Driver):
    """Launches what it schedules at once, as the engine's loop does on a GPU."""

    runner: Ahead

    def launch(self) -> bool:
        launched = super().launch()
        if launched:
            self.runner.launch(self.in_flight[-1])
        return launched


def make_runner(
    spec: ModelSpec, weights: ModelWeights, config: SchedulerConfig, kernels: Kernels | None = None
) -> CudaRunner:
    return CudaRunner(
        spec,
        weights,
        kernels or torch_kernels(),
        num_units=config.num_units,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        graphs=weights.embedding.device.type == "cuda",
        scratch_blocks=config.scratch_blocks,
        host_units=config.host_units,
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
) -> AheadDriver:
    config = SchedulerConfig(
        num_units=2 * num_blocks,
        max_model_len=min(num_blocks * BLOCK, 200),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        pipeline_depth=depth,
        min_prefill_chunk=8,
        host_units=host_units,
        unit_bytes=1,
        scratch_blocks=scratch_blocks,
    )
    torch.set_num_threads(1)
    return AheadDriver(Ahead(make_runner(spec, weights, config, kernels)), config, online_policy=policy)
