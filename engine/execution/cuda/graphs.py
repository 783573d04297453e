"""CUDA graphs: one for every step shape, captured at start. Knows nothing of what it captures.

Capture forbids waiting for the device and whatever happens only once (loading a kernel, making a cuBLAS workspace), so
every shape runs once by itself before, and as a graph once behind. All graphs share one memory pool: they run one at a
time, and what they leave behind lies outside of it.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch

from engine.execution.cuda.buffers import StepInputs
from engine.execution.lane import Lane


class Way(Enum):
    """How a step of a shape runs: each has graphs of its own."""

    PLAIN = "plain"
    ADAPTED = "adapted"  # by the LoRA adapters in its rows' slots


class Graphs:
    """Runs `forward` on a step's inputs: from a graph where one was captured for their shape, else as it is."""

    def __init__(self, forward: Callable[[StepInputs, Way], None], lane: Lane) -> None:
        self._forward = forward
        self._lane = lane
        self._graphs: dict[tuple[int, Way], torch.cuda.CUDAGraph] = {}
        self._inputs: list[StepInputs] = []
        self._pool: Any = None

    def capture(self, inputs: StepInputs, way: Way = Way.PLAIN) -> RuntimeError | None:
        """Capture a shape, and give what the device has against it. Its inputs must lie on the device, padding only,
        and keep their addresses. The shape has run twice then, also without a graph: of ranks that divide layers every
        one adds up as often as the others. Raises what keeps it from running."""
        assert self._lane.stream is not None, "graphs need a CUDA device"
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._forward(inputs, way)
        self._lane.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._lane.stream):
                self._forward(inputs, way)
        except RuntimeError as error:
            self._forward(inputs, way)
            return error.with_traceback(None)
        graph.replay()  # the first launch sends it to the device, which no step shall wait for
        self._graphs[id(inputs), way] = graph
        self._inputs.append(inputs)  # keeps its id, and the tensors that the graph reads
        return None

    @property
    def count(self) -> int:
        return len(self._graphs)

    def run(self, inputs: StepInputs, way: Way = Way.PLAIN) -> None:
        graph = self._graphs.get((id(inputs), way))
        if graph is None:
            self._forward(inputs, way)
        else:
            graph.replay()
