"""An engine process whose backend is the GPU's, on a machine without one: our kernels' twins, no graphs, and memory of
a stand-in for CUDA's driver. Run as `engine.process.child` is."""

import sys
from pathlib import Path

import torch
from fake_cuda_driver import fake_memory

from engine import engine as served
from engine.execution import backend as backends
from engine.execution.cuda import backend
from engine.execution.cuda.device import CudaDevice
from engine.loop.watchdog import StepLimits
from engine.process import child


class HostBackend(backend.CudaBackend):
    """See Backend."""

    name = "cpu"


def pretend() -> None:
    """Have this process take the CPU for a GPU."""
    sys.path.append(str(Path(__file__).parents[1]))  # the benchmarks are not installed
    from engine.triton_kernels import twins

    backends.find_backend = lambda _name: HostBackend()  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment, misc]
    torch.cuda.mem_get_info = lambda *_: (2**34, 2**34)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *_: "a stand-in"  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    backend.launch_refusal = lambda: None  # type: ignore[assignment]
    backend.mapping_refusal = lambda _ordinal: None  # type: ignore[assignment, attr-defined]
    backend.triton_kernels = lambda: twins  # type: ignore[assignment, attr-defined, return-value]
    backend.Memory = lambda _device: fake_memory()[0]  # type: ignore[assignment, misc, attr-defined]
    backend._room_beside_graphs = lambda *_: 2**30
    served.StepLimits = lambda: StepLimits(floor=60.0)  # type: ignore[assignment, misc, attr-defined]  # twins are slow
    CudaDevice._capture = lambda _self: None  # type: ignore[method-assign]


if __name__ == "__main__":
    pretend()
    child.main(sys.argv[1:])
