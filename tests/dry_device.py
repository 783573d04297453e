"""A CUDA device that runs nothing: the requests of a step are counted, and a wait for the device is refused.

Tensors of the device are meta tensors, so that a look at a value fails by itself; copies to and from them, and whatever
else waits, are seen by a dispatch mode. Streams, events and graphs are stubs. Triton kernels pass Triton's own front
end, which asks a compiler that compiles nothing for each new specialisation: types, multiples of 16, ones, constants,
options. Counts are no times.
"""

import importlib
import pkgutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import engine.triton_kernels
from engine.triton_kernels import configs

META = torch.device("meta")
_WAITS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal", "_local_scalar_dense"}
_MAKES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "alias", "lift_fresh"}


class WouldWaitError(AssertionError):
    """The host would wait for the device."""


class WouldCompileError(AssertionError):
    """A step would wait for the compiler."""


class DryDevice(TorchDispatchMode):
    """`counts` of the phase: `uploads` and `fetches` begun, `waits` for what ended long ago, `pins` of host memory,
    `kernels` of Triton, `operators` of torch, `graphs` replayed, `blocking` (where `strict`, an error instead).
    `launched`: the names of kernels and operators, as they came. `step`: of the launch; a mark may be waited for when
    the step after its own has been launched too. `compiled`: requests to the compiler; once `sealed`, to ask it
    for more is an error."""

    def __init__(self, arch: int = 90) -> None:
        super().__init__()
        self.arch = arch
        self.counts: Counter[str] = Counter()
        self.launched: list[str] = []
        self.strict, self.step = False, 0
        self.capturing = self.sealed = False
        self.compiled: list[str] = []
        self.variants: list[tuple[Any, ...]] = []  # of `compiled`: the kernel, and the arguments of its `_do_compile`
        self.registered: dict[int, int] = {}  # sizes by address
        self._pinned: list[Tensor] = []  # kept, so that nothing else gets their addresses

    def block(self, what: str) -> None:
        self.counts["blocking"] += 1
        if self.strict or self.capturing:
            raise WouldWaitError(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        if kwargs.pop("pin_memory", False):
            return self._pin(func(*args, **kwargs))
        if name in ("pin_memory", "_pin_memory"):
            return self._pin(args[0].clone())
        if name == "copy_" and args[0].device != args[1].device:
            return self._copy(*args, **kwargs)
        if name in ("to", "_to_copy") and (target := _target(args, kwargs)) not in (None, args[0].device):
            return self._move(func, args, kwargs, target)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if tensor.is_meta]
        if here and (name in _WAITS or any(not each.is_meta and each.dim() for each in tensors)):
            self.block(
                f"{func} of {[tuple(each.shape) for each in tensors]} on {[str(each.device) for each in tensors]}"
            )
        if here and name == "_grouped_mm" and self.arch // 10 not in (9, 10):
            self.block("the offsets of groups are read by the host")
        if here and name in ("index", "index_put_") and any(each.dtype == torch.bool for each in tensors[1:]):
            self.block(f"{func} by a mask")
        result = func(*args, **kwargs)
        cast = name == "to" and result is not args[0]  # the rest of what `to` gives is its argument
        if (
            (cast or not func.is_view)
            and name not in _MAKES
            and any(each.is_meta for each in tree_leaves((here, result)) if isinstance(each, Tensor))
        ):
            self.counts["operators"] += 1
            self.launched.append(name)
        return result

    def compile(self, kernel: str, specialisation: str) -> None:
        if self.sealed:
            raise WouldCompileError(f"{kernel} {specialisation}, beside\n" + "\n".join(self._compiled_of(kernel)))
        self.compiled.append(f"{kernel} {specialisation}")

    def _compiled_of(self, kernel: str) -> list[str]:
        return [each for each in self.compiled if each.startswith(f"{kernel} ")]

    def wait(self, step: int) -> None:
        """For a mark of that step."""
        if self.strict and step > self.step - 2:
            self.block(f"a mark of step {step} is waited for in the launch of step {self.step}")
        self.counts["waits"] += 1

    def _pin(self, tensor: Tensor) -> Tensor:
        self.counts["pins"] += 1
        self._pinned.append(tensor)
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        first, last, address = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.untyped_storage().data_ptr()
        if any(begin <= first and last <= begin + size for begin, size in [*self.registered.items()]):
            return True  # as a whole: a copy may not cross two registrations
        return any(each.untyped_storage().data_ptr() == address for each in self._pinned)

    def _transfer(self, host: Tensor, name: str, non_blocking: bool) -> None:
        if self.capturing or not (non_blocking and self._is_pinned(host)):
            self.block(f"{name} of {tuple(host.shape)} {host.dtype}")
        self.counts[name] += 1
        self.counts[f"numbers of {name}"] += host.numel()

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.is_meta:
            self._transfer(source, "uploads", non_blocking)
        else:
            self._transfer(target, "fetches", non_blocking)
        return target

    def _move(self, func: Any, args: Any, kwargs: Any, target: torch.device) -> Tensor:
        (source, *_), flag = args, bool(kwargs.get("non_blocking", any(each is True for each in args[1:])))
        if target.type == "meta":
            self._transfer(source, "uploads", flag)
            return source.new_empty(source.shape, device=META, dtype=kwargs.get("dtype") or source.dtype)
        self._transfer(source.new_empty(source.shape, device="cpu"), "fetches", flag)
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)


def _target(args: Any, kwargs: Any) -> torch.device | None:
    found = kwargs.get("device") or next((each for each in args[1:] if isinstance(each, torch.device)), None)
    return None if found is None else torch.device(found)


class _Pointer:
    """Stands for a meta tensor of a kernel's arguments: an allocation of torch's begins at a multiple of 512."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._address = 2**30 + tensor.storage_offset() * tensor.element_size()

    def data_ptr(self) -> int:
        return self._address


class Driver:
    """Triton's driver of a device that runs nothing."""

    def __init__(self, arch: int = 90) -> None:
        self._arch = arch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


class _Recorder:
    """Stands for a Triton kernel: looks at the call, and hands it to Triton's front end."""

    def __init__(self, kernel: Any, dry: DryDevice, patch: pytest.MonkeyPatch) -> None:
        self._kernel, self._dry = kernel, dry
        patch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
        patch.setattr(kernel, "_do_compile", self._compile)

    def _compile(self, key: str, *asked: Any) -> Any:
        self._dry.compile(self._kernel.__name__, key)
        self._dry.variants.append((self._kernel, *asked))
        compiled = SimpleNamespace(
            run=self._run, function=None, packed_metadata=None, launch_metadata=lambda *_: None
        )  # fmt: skip
        self._kernel.device_caches[0][0][key] = compiled
        return compiled

    def _run(self, *_: Any) -> None:
        self._dry.counts["kernels"] += 1
        self._dry.launched.append(self._kernel.__name__)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**16 for size in grid[1:]) and grid[0] > 0, "beyond the limits of a grid"

        def pointed(value: Any) -> Any:
            if isinstance(value, Tensor) and not value.is_meta:
                raise WouldWaitError(f"{self._kernel.__name__} would read a tensor of the host")
            return _Pointer(value) if isinstance(value, Tensor) else value

        def launch(*args: Any, **kwargs: Any) -> None:
            self._kernel[grid](*map(pointed, args), **kwargs)

        return launch


def _stubs(dry: DryDevice) -> dict[str, Any]:
    """What replaces names of torch.cuda."""

    class Event:
        def __init__(self, **_: Any) -> None:
            self.step = -2  # passed

        def record(self, _stream: Any = None) -> None:
            self.step = dry.step

        def synchronize(self) -> None:
            dry.wait(self.step)

    class Stream:
        def __init__(self, _device: Any = None) -> None: ...

        def wait_event(self, _event: Event) -> None:
            assert not dry.capturing

        def synchronize(self) -> None:
            dry.block("the stream is waited for")

    class CUDAGraph:
        def replay(self) -> None:
            dry.counts["graphs"] += 1

    @contextmanager
    def graph(_graph: CUDAGraph, **_: Any) -> Iterator[None]:
        dry.capturing = True
        try:
            yield
        finally:
            dry.capturing = False

    def register(address: int, size: int, _flags: int) -> int:
        dry.registered[address] = size
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=dry.registered.pop)
    return {
        "cudart": lambda: cudart, "Event": Event, "Stream": Stream, "CUDAGraph": CUDAGraph, "graph": graph,
        "graph_pool_handle": lambda: None, "stream": lambda _stream: nullcontext(),
        "current_stream": Stream, "synchronize": lambda _device=None: None,
    }  # fmt: skip


@contextmanager
def dry_device(arch: int = 90) -> Iterator[DryDevice]:
    """Within it `meta` is a CUDA device of this compute capability."""
    dry = DryDevice(arch)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in _stubs(dry).items():
            patch.setattr(torch.cuda, name, stub)
        patch.setattr(configs, "is_cuda", lambda device: device.type == "meta")
        patch.setattr(configs, "num_multiprocessors", lambda _device: 132)
        patch.setattr(configs, "device_arch", lambda _device: arch)
        patch.setattr(driver, "_active", Driver(arch))
        for found in pkgutil.iter_modules(engine.triton_kernels.__path__, "engine.triton_kernels."):
            module = importlib.import_module(found.name)
            for name, value in vars(module).copy().items():
                if name.endswith("_kernel"):
                    patch.setattr(module, name, _Recorder(value, dry, patch))
        try:
            with dry:
                yield dry
        finally:
            for thread in threading.enumerate():
                if thread.name == "tidemill-page-lock":
                    thread.join()
