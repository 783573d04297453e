"""EngineCore and a runner in one thread, a step ahead: the engine without its event loop, for figures without noise."""

import time
from collections import deque
from collections.abc import Sequence

from benchmarks.gpu.setup import Setup
from engine.api import EngineRequest, RequestOutput
from engine.core import EngineCore
from engine.errors import EngineStepError
from engine.execution.cuda.device import CudaDevice
from engine.execution.runner import Runner
from engine.limits import SchedulerConfig
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.scheduling.offline import whole
from engine.scheduling.output import Collect, ModelRunner, SchedulerOutput

BLOCK = 16


def scheduler_config(seqs: int, tokens: int, context: int, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_units=2 * num_blocks,
        max_model_len=context,
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        pipeline_depth=1,
    )


def make_runner(
    setup: Setup, spec: ModelSpec, weights: ModelWeights, config: SchedulerConfig, host_units: int = 0
) -> Runner[CudaDevice]:
    """The runner as the server builds it, with graphs on a CUDA device."""
    graphs = setup.device.type == "cuda"
    return Runner(CudaDevice(spec, weights, setup.kernels(), config.limits, graphs=graphs, host_units=host_units))


class Loop:
    """Runs requests to their end. `tokens` of every request, by its id; the first error ends the run with it."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig) -> None:
        self.core = EngineCore(config)
        self.tokens: dict[str, list[int]] = {}
        self._runner = runner
        self._in_flight: deque[tuple[SchedulerOutput, Collect]] = deque()

    def run(self, requests: Sequence[EngineRequest]) -> float:
        """Seconds from the first step to the last token."""
        began = time.perf_counter()
        for request in requests:
            self.core.add_request(request, began)
            self.tokens[request.request_id] = []
        while self.core.has_requests or self._in_flight:
            self._launch()
            if not self._in_flight:
                raise EngineStepError("requests are left but none can run")
            output, collect = self._in_flight.popleft()
            for each in self.core.update(output, collect(), time.perf_counter()):
                self._take(each)
        return time.perf_counter() - began

    def _launch(self) -> None:
        while len(self._in_flight) <= self.core.config.pipeline_depth:
            now = time.perf_counter()
            output = self.core.schedule(now, whole(self.core.plan_offline(now)) if self.core.has_offline else None)
            if output is None:
                return
            self._in_flight.append((output, self._runner.launch(output)))

    def _take(self, output: RequestOutput) -> None:
        if output.error is not None:
            raise output.error.to_error()
        self.tokens[output.request_id].extend(output.token_ids)
