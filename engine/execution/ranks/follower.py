"""A following rank: runs its part of every step that the first rank sends, and samples nothing.

It keeps rows like a runner, without sampling state; tokens arrive with the steps. It takes steps ahead like the first
rank; tokens that only devices know are copied between devices.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.lane import DeviceStream, Mark
from engine.execution.layout import chunk_array, token_places
from engine.execution.operations import CacheMover, run_operations
from engine.execution.ranks.step import RankStep
from engine.execution.rows import RowTable


class RankDevice(CacheMover, Protocol):
    """A device with a part of each layer; see `engine.execution.runner.Device`."""

    rows: RowTable
    lane: DeviceStream
    pipeline_depth: int

    def join(self, share: Callable[[Tensor], None]) -> None:
        """Set `share`, which replaces a tensor by that of the first rank."""

    def follow(self, chunks: IntArray, *, whole: bool) -> None:
        """Run chunks [n, 4] like `forward` on the first rank, which samples.

        `whole`: the first rank reads the hidden states of all tokens.
        """


class Follower:
    """Runs steps on a device of a rank other than the first."""

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._launched: deque[Mark] = deque()

    def run(self, step: RankStep) -> None:
        """Start one step; if the device takes no steps ahead, return when it has ended."""
        device, output = self._device, step.output
        with torch.inference_mode(), device.lane.use():
            while len(self._launched) > device.pipeline_depth:
                self._launched.popleft().synchronize()
            device.rows.apply(output)
            run_operations(device, output.operations)
            if len(chunks := chunk_array(output.chunks)):
                device.rows.tokens[token_places(chunks)] = np.frombuffer(step.token_ids, np.int32)
                device.follow(chunks, whole=step.whole)
            self._launched.append(device.lane.mark())
