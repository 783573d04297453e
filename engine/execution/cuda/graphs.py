"""CUDA graphs, one for every step shape, captured at start.

A capture must not wait for the device or include one-time work (loading a kernel, creating a cuBLAS workspace), so
every shape first runs once without a graph, and once as a graph afterwards. All graphs share one memory pool, because
they run one at a time and their results are outside of it.
"""

from collections.abc import Callable
from typing import Any

import torch

from engine.execution.cuda.buffers import StepInputs
from engine.execution.lane import DeviceStream


class Graphs:
    """Runs `forward(inputs, adapted=...)` on the inputs of a step, from a graph if there is one for their shape.

    `adapted`: with the LoRA adapters of its rows' slots, which needs graphs of their own.
    """

    def __init__(self, forward: Callable[..., None], lane: DeviceStream) -> None:
        self._forward = forward
        self._lane = lane
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._inputs: list[StepInputs] = []
        self._pool: Any = None

    def capture(self, inputs: StepInputs, *, adapted: bool = False) -> RuntimeError | None:
        """Capture a shape; return the device's error if the capture fails. Raises errors of the run before it.

        The inputs must be on the device, contain only padding, and keep their addresses. CUDA calls of other threads
        do not end the capture.
        """
        assert self._lane.stream is not None, "graphs need a CUDA device"
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._forward(inputs, adapted=adapted)
        self._lane.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            how = "thread_local"
            with torch.cuda.graph(graph, pool=self._pool, stream=self._lane.stream, capture_error_mode=how):
                self._forward(inputs, adapted=adapted)
        except RuntimeError as error:
            return error.with_traceback(None)
        graph.replay()  # the first launch uploads the graph, which would delay a step
        self._graphs[id(inputs), adapted] = graph
        self._inputs.append(inputs)  # keeps the id valid, and the tensors that the graph reads
        return None

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, inputs: StepInputs, *, adapted: bool = False) -> None:
        graph = self._graphs.get((id(inputs), adapted))
        if graph is None:
            self._forward(inputs, adapted=adapted)
        else:
            graph.replay()
