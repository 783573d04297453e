"""Rendezvous of ranks, their collective operations (sum, gather, broadcast) by torch.distributed, and a following rank.

Uses gloo on CPUs and NCCL on GPUs. All ranks are on one machine and listen on the loopback interface only. A following
rank keeps rows like a runner, without sampling state; tokens arrive with the steps. It takes steps ahead like the first
rank; tokens that only devices know are copied between devices.
"""

import importlib
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.arrays import IntArray
from engine.execution.layout import RankStep, chunk_array, token_places
from engine.execution.rows import RowTable
from engine.execution.runner import CacheMover, run_operations
from engine.execution.stream import DeviceStream, Mark

Store = Any
"""torch.distributed.Store"""
HOST = "127.0.0.1"
WAIT = timedelta(seconds=300)
"""Maximum wait for another rank; ranks start collective work together. A rank that ends is noticed at once."""


PLANNED, LOADED, MADE = "planned", "loaded", "made"
"""Stages of a start: the plan is made; the weights of a rank are loaded; its cache and graphs are created."""


@cache
def c10d() -> Any:
    """Return the C++ parts of torch.distributed. Some builds of torch lack them and support a single rank only."""
    return importlib.import_module("torch._C._distributed_c10d")


class Meeting:
    """Rendezvous of ranks, opened by the first rank."""

    def __init__(self) -> None:
        sock = socket.create_server((HOST, 0))
        self.port = int(sock.getsockname()[1])
        self.store = c10d().TCPStore(
            HOST, self.port, is_master=True, wait_for_workers=False, timeout=WAIT, master_listen_fd=sock.detach()
        )


def find_meeting(port: int) -> Store:
    """Return the store of the first rank's `Meeting`."""
    return c10d().TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=WAIT)


class RankGroup:
    """Ranks of one model with tensors on `device`, joined by NCCL or gloo. All must make the same calls in order.

    If a rank has ended, calls of the others raise RuntimeError, or never return on a GPU.
    """

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device, *, nccl: bool) -> None:
        self._device = device
        self._sum, self._least = c10d().AllreduceOptions(), c10d().AllreduceOptions()
        self._least.reduceOp = c10d().ReduceOp.MIN
        self._ranks, self._from_first, self._from_all = ranks, c10d().BroadcastOptions(), c10d().AllgatherOptions()
        for options in (self._sum, self._least, self._from_first, self._from_all):
            options.asyncOp = False  # run in the caller's stream, so that graph captures include it
        self._group = (_by_nccl if nccl else _by_gloo)(store, rank, ranks)

    def total(self, part: Tensor) -> None:
        """Replace each rank's `part` by the sum of all."""
        _complete(self._group.allreduce([part], self._sum))

    def gather(self, part: Tensor) -> Tensor:
        """Join the parts [rows, n] of all ranks to [rows, ranks * n], in the order of the ranks."""
        rows, width = part.shape
        parts = part.new_empty((self._ranks * rows, width))
        _complete(self._group._allgather_base(parts, part.contiguous(), self._from_all))
        return parts.view(self._ranks, rows, width).movedim(0, 1).reshape(rows, -1)

    def share(self, values: Tensor) -> None:
        """Replace each rank's `values` by those of the first."""
        _complete(self._group.broadcast([values], self._from_first))

    def least(self, values: Sequence[int]) -> list[int]:
        """Return the element-wise minimum over all ranks. Waits for all."""
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        _complete(self._group.allreduce([found], self._least))
        return [int(value) for value in found.tolist()]


def _complete(work: Any) -> None:
    """Wait for a collective call. NCCL returns None for a call that runs in the current stream (torch >= 2.11)."""
    if work is not None:
        work.wait()


class StartingRank(Protocol):
    """A rank during the start, stage by stage (PLANNED, LOADED, MADE)."""

    rank: int

    def reached(self, stage: str) -> None:
        """Report a stage. The first rank waits for all others and raises the error of a rank that failed."""

    def join(self, device: torch.device) -> RankGroup:
        """Join the other ranks, which have made their plans."""


def _by_gloo(store: Store, rank: int, ranks: int) -> Any:
    options = c10d().ProcessGroupGloo._Options()
    options._timeout, options._threads = WAIT, 1
    options._devices = [c10d().ProcessGroupGloo.create_device(hostname=HOST)]
    return c10d().ProcessGroupGloo(store, rank, ranks, options)


def _by_nccl(store: Store, rank: int, ranks: int) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # only for the rendezvous; data goes between devices
    options = c10d().ProcessGroupNCCL.Options()
    options._timeout = WAIT
    return c10d().ProcessGroupNCCL(store, rank, ranks, options)


class RankDevice(CacheMover, Protocol):
    """A device with a part of each layer; see `engine.execution.runner.Device`."""

    rows: RowTable
    stream: DeviceStream
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
        with torch.inference_mode(), device.stream.use():
            while len(self._launched) > device.pipeline_depth:
                self._launched.popleft().synchronize()
            device.rows.apply(output)
            run_operations(device, output.operations)
            if len(chunks := chunk_array(output.chunks)):
                device.rows.tokens[token_places(chunks)] = np.frombuffer(step.token_ids, np.int32)
                device.follow(chunks, whole=step.whole)
            self._launched.append(device.stream.mark())
