"""The machine's own limits, against which everything else is held: copy bandwidth and matmul rate."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.setup import Setup
from benchmarks.gpu.table import Row

_H200_BANDWIDTH = 4.3e12
"""Bytes/s of the device for which targets and floors of the table were worked out."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`bandwidth`: bytes/s read plus written by a large copy; `flops`: of a large matmul; `to_host`: bytes/s of a
    pinned copy from the device."""

    bandwidth: float
    flops: float
    to_host: float

    def scaled(self, rate: float) -> float:
        """A rate that is bound by memory, stated for an H200, on this machine."""
        return rate * self.bandwidth / _H200_BANDWIDTH

    def step_seconds(self, weight_bytes: float, flops: float, kv_bytes: float) -> float:
        """The floor of a step: weights read once or the GEMMs computed, then the cache read."""
        return max(weight_bytes / self.bandwidth, flops / self.flops) + kv_bytes / self.bandwidth


def measure_limits(setup: Setup) -> Limits:
    num_bytes = setup.size(2**32, 2**20)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    copy = setup.seconds(lambda: target.copy_(source))
    host_bytes = setup.size(2**28, 2**16)
    host = torch.zeros(host_bytes, dtype=torch.uint8, pin_memory=setup.device.type == "cuda")
    fetch = setup.seconds(lambda: host.copy_(target[:host_bytes], non_blocking=True))
    width = setup.size(8192, 64)
    a = torch.randn(width, width, device=setup.device, dtype=setup.dtype)
    matmul = setup.seconds(lambda: a @ a)
    return Limits(2 * num_bytes / copy, 2 * width**3 / matmul, host_bytes / fetch)


def check_limits(setup: Setup) -> Iterator[Row]:
    limits = measure_limits(setup)
    yield Row("copy bandwidth", "TB/s", limits.bandwidth / 1e12, anchor="4.3 (H200)")
    yield Row("bf16 matmul 8192", "TFLOP/s", limits.flops / 1e12, anchor="790 (H200)")
    yield Row("pinned copy to the host", "GB/s", limits.to_host / 1e9, anchor="~50 (H100)")
