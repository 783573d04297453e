"""How ranks meet, and what they compute together: sums over all of them, and what the first one knows, by
torch.distributed.

By gloo on a CPU and by NCCL on GPUs. Ranks are on one machine: whatever listens does so on its loopback.
"""

import importlib
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

Store = Any
"""torch.distributed.Store"""
HOST = "127.0.0.1"
WAIT = timedelta(seconds=300)
"""The longest that a rank waits for another: they begin together what they do together. One that ended is known at
once."""


PLANNED, LOADED, MADE = "planned", "loaded", "made"
"""The stages of a start: what will run is decided; a rank's weights are there; its cache and its graphs are."""


@cache
def c10d() -> Any:
    """The parts of torch.distributed. Some builds of torch have none, and serve models on one rank."""
    return importlib.import_module("torch._C._distributed_c10d")


class Meeting:
    """Where ranks find each other: the first one opens it."""

    def __init__(self) -> None:
        sock = socket.create_server((HOST, 0))
        self.port = int(sock.getsockname()[1])
        self.store = c10d().TCPStore(
            HOST, self.port, is_master=True, wait_for_workers=False, timeout=WAIT, master_listen_fd=sock.detach()
        )


def find_meeting(port: int) -> Store:
    """The store of the first rank's `Meeting`."""
    return c10d().TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=WAIT)


class Group:
    """The ranks of one model, whose tensors are of `device`, by NCCL or by gloo. Each makes the same calls, in the same
    order. Where one is gone a call of the others raises RuntimeError, or on a GPU never ends."""

    def __init__(self, store: Store, rank: int, ranks: int, device: torch.device, *, nccl: bool) -> None:
        self._device = device
        self._sum, self._least = c10d().AllreduceOptions(), c10d().AllreduceOptions()
        self._least.reduceOp = c10d().ReduceOp.MIN
        self._ranks, self._from_first, self._from_all = ranks, c10d().BroadcastOptions(), c10d().AllgatherOptions()
        for options in (self._sum, self._least, self._from_first, self._from_all):
            options.asyncOp = False  # in the stream of who calls: a graph that is captured there has it, too
        self._group = (_by_nccl if nccl else _by_gloo)(store, rank, ranks)

    def total(self, part: Tensor) -> None:
        """Replace each rank's `part` by the sum of all."""
        _complete(self._group.allreduce([part], self._sum))

    def gather(self, part: Tensor) -> Tensor:
        """Every rank's part [rows, n], side by side [rows, ranks * n], in the order of the ranks."""
        rows, width = part.shape
        parts = part.new_empty((self._ranks * rows, width))
        _complete(self._group._allgather_base(parts, part.contiguous(), self._from_all))
        return parts.view(self._ranks, rows, width).movedim(0, 1).reshape(rows, -1)

    def share(self, values: Tensor) -> None:
        """Replace each rank's `values` by the first one's."""
        _complete(self._group.broadcast([values], self._from_first))

    def least(self, values: Sequence[int]) -> list[int]:
        """Of each number the least that a rank has. Waits for all."""
        found = torch.tensor(values, dtype=torch.int64, device=self._device)
        _complete(self._group.allreduce([found], self._least))
        return [int(value) for value in found.tolist()]


def _complete(work: Any) -> None:
    """Wait for a collective call. NCCL returns None for a call that runs in the current stream (torch >= 2.11)."""
    if work is not None:
        work.wait()


class Seat(Protocol):
    """Of one of the ranks while they start, stage by stage (PLANNED, LOADED, MADE)."""

    rank: int

    def reached(self, stage: str) -> None:
        """This rank is there. The first one goes on when all others are, and raises what keeps one from it."""

    def join(self, device: torch.device) -> Group:
        """Meet the others, which have planned what they load."""


def _by_gloo(store: Store, rank: int, ranks: int) -> Any:
    options = c10d().ProcessGroupGloo._Options()
    options._timeout, options._threads = WAIT, 1
    options._devices = [c10d().ProcessGroupGloo.create_device(hostname=HOST)]
    return c10d().ProcessGroupGloo(store, rank, ranks, options)


def _by_nccl(store: Store, rank: int, ranks: int) -> Any:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where they meet; data goes from device to device
    options = c10d().ProcessGroupNCCL.Options()
    options._timeout = WAIT
    return c10d().ProcessGroupNCCL(store, rank, ranks, options)
