"""Layers whose memory can be lent to the pool and returned (KunServe §4.1).

Each layer has a piece of memory and its own addresses for it. Releasing a layer maps its piece after the pool's memory;
restoring it maps the piece back. The layer then has its old addresses, so CUDA graphs that read it stay valid, and no
other allocation can take the memory in between.

Device memory by CUDA's virtual memory management, which separates addresses from memory, so that memory can move
between address ranges with its contents (KunServe §4.1).

A *piece* is device memory that is allocated once. A *range* is a range of addresses whose front is backed by
consecutive pieces. A piece is in at most one range. After an error of the driver, a piece is where it was, or in no
range. Memory never returns to the driver in between, so other processes cannot take it and mapping it again cannot fail
for lack of memory.

torch cannot do this. Its allocations have a fixed size. Memory freed by its allocator (with or without expandable
segments) is released in unpredictable parts, which another process may take. A custom `torch.cuda.MemPool` needs a
compiled library and cannot move memory between tensors either. This module therefore calls the driver by ctypes.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import (
    POINTER,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from engine.errors import ConfigError, TidemillError
from engine.models.weights import LayerWeights, ResidentLayers, matrices
from engine.triton_kernels import configs

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_DLPACK_UINT = 1


class MappingError(TidemillError):
    """The driver refused to allocate or map memory."""

    def __init__(self, call: str, name: str, *, no_room: bool) -> None:
        super().__init__(f"{call} failed: {name}")
        self.no_room = no_room


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", c_int), ("id", c_int))


class Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", c_int), ("handle_types", c_int), ("location", Location), ("security", c_void_p),
        ("compression", c_ubyte), ("remote_access", c_ubyte), ("usage", c_uint16), ("reserved", c_ubyte * 4),
    )  # fmt: skip


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", c_int))


_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


def load_driver() -> Any:
    """Load the driver library. Raises OSError, or AttributeError if it predates these calls (CUDA 10.2)."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _CALLS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


def refusal(ordinal: int, load: Callable[[], Any] = load_driver) -> str | None:
    """Return why the device does not support virtual memory management; None if it does."""
    try:
        driver, found = load(), c_int()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver does not support virtual memory management: {error}"
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(byref(found), _SUPPORTED, ordinal) or not found.value:
        return "this GPU or its driver does not support virtual memory management"
    return None


@dataclass(slots=True, eq=False)
class Piece:
    """Memory of the device; `range` is the range that it backs, or None."""

    handle: int
    num_bytes: int
    range: "Range | None" = None


class Memory:
    """Memory of one device, held until the process ends."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        self.device = device
        if driver is None:
            torch.empty(1, device=device)  # the first CUDA call of a process: the driver needs torch's context
        self._driver = load_driver() if driver is None else driver
        where = Location(_ON_DEVICE, device.index or 0)
        self._properties = Properties(type=_PINNED, location=where)
        self._access = Access(where, _READ_WRITE)
        size = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), 0)
        self.granularity = size.value

    def create(self, num_bytes: int) -> Piece:
        """Allocate memory, rounded up. Raises MappingError."""
        handle, size = c_uint64(), self._rounded(num_bytes)
        try:
            self.call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        except MappingError as error:
            if not error.no_room:
                raise
            torch.cuda.empty_cache()  # release memory that torch's allocator caches
            self.call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        return Piece(handle.value, size)

    def reserve(self, num_bytes: int) -> "Range":
        """Reserve addresses, rounded up, without memory. Raises MappingError."""
        base, size = c_uint64(), self._rounded(num_bytes)
        self.call("cuMemAddressReserve", byref(base), size, 0, 0, 0)
        return Range(self, base.value, size)

    def view(self, base: int, num_bytes: int) -> Tensor:
        return tensor_over(base, num_bytes, self.device)

    def allow(self, address: int, num_bytes: int) -> None:
        """Enable device access to newly mapped addresses."""
        self.call("cuMemSetAccess", address, num_bytes, byref(self._access), 1)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function. Raises MappingError."""
        if code := getattr(self._driver, name)(*arguments):
            text = c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise MappingError(name, (text.value or f"error {code}".encode()).decode(), no_room=code == _OUT_OF_MEMORY)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity) * self.granularity


class Range:
    """A range of addresses whose first `backed` bytes have memory.

    `tensor [num_bytes]` uint8 covers all addresses; those without memory must not be accessed. Nothing on the device
    may access pieces that are moved.
    """

    def __init__(self, memory: Memory, base: int, num_bytes: int) -> None:
        self.base, self.num_bytes = base, num_bytes
        self.pieces: list[Piece] = []
        self._memory = memory

    @property
    def backed(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def tensor(self) -> Tensor:
        """Tensor over all addresses; the front must have memory."""
        return self._memory.view(self.base, self.num_bytes)

    def push(self, pieces: Sequence[Piece]) -> None:
        """Map unmapped pieces after the existing ones: all, or none with a MappingError."""
        call, begin = self._memory.call, self.base + self.backed
        end = begin + sum(piece.num_bytes for piece in pieces)
        assert all(piece.range is None for piece in pieces), "a piece can be in one range only"
        assert end <= self.base + self.num_bytes, "the range has too few addresses"
        at, put = begin, list[tuple[int, int]]()
        try:
            for piece in pieces:
                call("cuMemMap", at, piece.num_bytes, 0, piece.handle, 0)
                put.append((at, piece.num_bytes))
                at += piece.num_bytes
            if pieces:
                self._memory.allow(begin, end - begin)
        except MappingError:
            for address, size in reversed(put):
                call("cuMemUnmap", address, size)
            raise
        for piece in pieces:
            piece.range = self
        self.pieces += pieces

    def pop(self) -> Piece:
        """Unmap the last piece, which keeps its contents. Raises MappingError, without changes."""
        last = self.pieces[-1]
        self._memory.call("cuMemUnmap", self.base + self.backed - last.num_bytes, last.num_bytes)
        last.range = None
        return self.pieces.pop()


class _DlDevice(ctypes.Structure):
    _fields_ = (("type", c_int32), ("id", c_int32))


class _DlType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _DlManaged(ctypes.Structure):
    """DLManagedTensor: a DLTensor with its owner and deleter."""

    _fields_ = (
        ("data", c_void_p), ("device", _DlDevice), ("ndim", c_int32), ("dtype", _DlType), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("byte_offset", c_uint64), ("context", c_void_p), ("deleter", c_void_p),
    )  # fmt: skip


_NAME = b"dltensor"


def tensor_over(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return a tensor [num_bytes] uint8 over foreign memory, which is not freed with the tensor."""
    where = _DlDevice(_DLPACK_DEVICES[device.type], device.index or 0)
    managed = _DlManaged(address, where, 1, _DlType(_DLPACK_UINT, 8, 1), (c_int64 * 1)(num_bytes))
    # torch accesses it when it releases the tensor, possibly after the end of the interpreter.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
    tensor: Tensor = from_dlpack(make(ctypes.addressof(managed), _NAME, None))
    return tensor


_ALIGNMENT = 512  # bytes, like torch's allocator; kernels may be selected by alignment


class MappedLayers(ResidentLayers):
    """A LayerSource, and from `reserve` on the PoolMemory of one pool. Raises ConfigError if there is no memory.

    Work in flight on the device must not touch layers that are released or restored.
    """

    def __init__(self, memory: Memory, layers: Iterator[LayerWeights]) -> None:
        super().__init__()
        self._memory = memory
        self._pieces: list[Piece] = []
        self._homes: list[Range] = []
        try:
            self.extend(map(self._move_in, layers))
        except MappingError as error:
            raise ConfigError(f"no memory for the weights of layer {len(self)}: {error.message}") from None
        self._whole = list(self)
        self._pool: Range | None = None
        self.tensor: Tensor

    @property
    def spare_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self._pieces)

    def reserve(self, num_bytes: int, spare_bytes: int) -> "MappedLayers":
        assert self._pool is None, "layers can lend memory to one pool only"
        try:
            piece = self._memory.create(num_bytes)
            self._pool = self._memory.reserve(piece.num_bytes + spare_bytes)
            self._pool.push([piece])
        except MappingError as error:
            raise ConfigError(f"no memory for a cache of {num_bytes / 2**30:.2f} GiB: {error.message}") from None
        self.tensor = self._pool.tensor
        self.tensor[:num_bytes].zero_()
        return self

    def give_up(self, indices: Sequence[int], needed: int) -> None:
        """See ResidentLayers. Raises MappingError, without changes except pieces that stay unmapped until the next
        `give_back`."""
        assert self._pool is not None
        absent = {*self.absent, *indices}
        lent = [index for index in sorted(absent) if self._pieces[index].range is not self._pool]
        pieces = [self._pieces[index] for index in lent]
        if (room := self._pool.backed + sum(piece.num_bytes for piece in pieces)) < needed:
            raise ValueError(f"the pool needs {needed} bytes but can have only {room}")
        self._rest()
        try:
            for index in lent:
                if self._pieces[index].range is not None:
                    self._homes[index].pop()
            self._pool.push(pieces)
        except MappingError:
            self._go_home()
            raise
        super().give_up(indices, needed)

    def back(self, num_bytes: int) -> None:
        assert self._pool is not None
        if self._pool.backed < num_bytes:
            raise ValueError(f"the pool needs {num_bytes} bytes but has only {self._pool.backed}")

    def give_back(self, num_bytes: int) -> None:
        """See PoolMemory. Raises MappingError; the next call completes the remaining work."""
        assert self._pool is not None
        pool = self._pool
        self._rest()
        while len(pool.pieces) > 1 and pool.backed - pool.pieces[-1].num_bytes >= num_bytes:
            pool.pop()
        self._go_home()

    def refill(self, index: int, loaded: LayerWeights) -> LayerWeights:
        """See ResidentLayers; copies the loaded weights to the original addresses of the layer."""
        if self._pieces[index].range is not self._homes[index]:
            raise ValueError(f"the memory of layer {index} is still in use by the pool")
        for mine, theirs in zip(matrices(self._whole[index]), matrices(loaded), strict=True):
            mine.data().copy_(theirs.data())
        self._rest()  # steps run in another stream
        return self._whole[index]

    def _move_in(self, layer: LayerWeights) -> LayerWeights:
        """Move the layer to its own piece of memory."""
        data = [matrix.data() for matrix in matrices(layer)]
        at = [0]
        for part in data:
            at.append(at[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        piece = self._memory.create(at[-1])
        home = self._memory.reserve(piece.num_bytes)
        home.push([piece])
        buffer, moved = home.tensor, []
        for first, part, matrix in zip(at, data, matrices(layer), strict=False):
            moved.append(matrix.on(buffer[first : first + part.nbytes].copy_(part)))
        self._pieces.append(piece)
        self._homes.append(home)
        qkv, out, up, down = moved
        return replace(layer, qkv=qkv, out=out, up=up, down=down)

    def _go_home(self) -> None:
        for piece, home in zip(self._pieces, self._homes, strict=True):
            if piece.range is None:
                home.push([piece])

    def _rest(self) -> None:
        """Wait until all launched work has ended."""
        if configs.is_cuda(self._memory.device):
            torch.cuda.synchronize(self._memory.device)
