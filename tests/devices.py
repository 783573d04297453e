"""Devices of every backend on the CPU: torch's, the native one, and the one for CUDA over its kernels' twins."""

from typing import Any

import torch
from native_build import native

from engine.execution.cpu.device import TorchDevice
from engine.execution.cpu.native.device import NativeDevice
from engine.execution.cuda.device import CudaDevice
from engine.execution.pool import UnitPool
from engine.limits import Limits
from engine.models.decoder import Decoder
from engine.models.linear import MakeLinear, make_linear
from engine.models.spec import ModelSpec
from engine.models.weights import ModelWeights
from engine.triton_kernels import twins

CPU = torch.device("cpu")
BACKENDS = ("torch", "native", "cuda")


def pool_of(
    units: int,
    layers: int,
    block_size: int,
    heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    **options: Any,
) -> UnitPool:
    """Build a pool for so many heads of K and of V in each layer."""
    return UnitPool(
        units, num_layers=layers, block_size=block_size, num_kv_heads=heads, head_dim=dim, dtype=dtype,
        device=device, **options,
    )  # fmt: skip


def linear_of(backend: str) -> MakeLinear:
    """Return the maker of the backend's linear layers."""
    return native().linear if backend == "native" else make_linear


def device_of(backend: str, spec: ModelSpec, weights: ModelWeights, limits: Limits, **options: Any) -> Any:
    """Build the device of a backend; the one for CUDA captures no graphs."""
    if backend == "cuda":
        return CudaDevice(spec, weights, twins, limits, graphs=False, **options)
    decoder = Decoder(spec, weights)
    if backend == "native":
        return NativeDevice(decoder, native(), limits, **options)
    return TorchDevice(decoder, limits, **options)
