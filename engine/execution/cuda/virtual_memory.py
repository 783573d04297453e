"""Device memory by CUDA's virtual memory management: addresses and the memory behind them are had apart, so that memory
goes from one range of addresses to another with what it holds (KunServe §4.1).

A *piece* is memory of the device, taken once. A *range* is addresses, of which the front has memory, piece behind
piece. A piece is in one range at most; what the driver refuses leaves all where it was, or in no range. Nothing goes
back to the driver in between, so nobody else can take it: to have memory again cannot fail for want of it.

torch's own means do not do this. An allocation of it is of one size for good. What its allocator frees (expandable
segments or not) it gives back in parts that nobody can tell beforehand, and another process may take them; a
`torch.cuda.MemPool` of one's own wants a compiled library, and moves nothing from one tensor to another either. So the
driver's library is called by ctypes, here alone. Knows nothing of models or of units.
"""

import ctypes
from collections.abc import Callable, Sequence
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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from engine.errors import TidemillError

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_SUPPORTED = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}
_DLPACK_UINT = 1


class MappingError(TidemillError):
    """The driver refused to give memory, or to put it where it was wanted."""

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
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


def load_driver() -> Any:
    """The driver's library. Raises OSError, or AttributeError where it is older than these calls (CUDA 10.2)."""
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _CALLS.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    return library


def refusal(ordinal: int, load: Callable[[], Any] = load_driver) -> str | None:
    """Why a device's memory cannot be had so; None if it can."""
    try:
        driver, found = load(), c_int()
    except (OSError, AttributeError) as error:
        return f"CUDA's driver gives no addresses without memory here: {error}"
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(byref(found), _SUPPORTED, ordinal) or not found.value:
        return "this GPU, or its driver, gives no addresses without memory"
    return None


@dataclass(slots=True, eq=False)
class Piece:
    """`range`: which addresses it is behind; None: none."""

    handle: int
    num_bytes: int
    range: "Range | None" = None


class Memory:
    """Of one device. `view`: a tensor [bytes] uint8 over addresses."""

    def __init__(
        self,
        device: torch.device,
        driver: Any = None,
        view: "Callable[[int, int, torch.device], Tensor] | None" = None,
    ) -> None:
        self.device = device
        if driver is None:
            torch.empty(1, device=device)  # the first CUDA call of a process: the driver needs torch's context
        self._driver = load_driver() if driver is None else driver
        self._view = view or tensor_over
        where = Location(_ON_DEVICE, device.index or 0)
        self._properties = Properties(type=_PINNED, location=where)
        self._access = Access(where, _READ_WRITE)
        size = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(size), byref(self._properties), 0)
        self.granularity = size.value
        self._pieces: list[Piece] = []
        self._ranges: list[Range] = []

    def create(self, num_bytes: int) -> Piece:
        """Take memory, rounded up. Raises MappingError."""
        handle, size = c_uint64(), self._rounded(num_bytes)
        try:
            self.call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        except MappingError as error:
            if not error.no_room:
                raise
            torch.cuda.empty_cache()  # torch's allocator keeps what its tensors have left
            self.call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        self._pieces.append(Piece(handle.value, size))
        return self._pieces[-1]

    def reserve(self, num_bytes: int) -> "Range":
        """Take addresses, rounded up, without memory. Raises MappingError."""
        base, size = c_uint64(), self._rounded(num_bytes)
        self.call("cuMemAddressReserve", byref(base), size, 0, 0, 0)
        found = Range(self, base.value, size)
        self._ranges.append(found)
        return found

    def close(self) -> None:
        """Give all back; nothing may be in use any more."""
        for found in self._ranges:
            while found.pieces:
                found.pop()
            self.call("cuMemAddressFree", found.base, found.num_bytes)
        for piece in self._pieces:
            self.call("cuMemRelease", piece.handle)
        self._ranges, self._pieces = [], []

    def view(self, base: int, num_bytes: int) -> Tensor:
        return self._view(base, num_bytes, self.device)

    def allow(self, address: int, num_bytes: int) -> None:
        """Let the device read and write what was just put behind these addresses."""
        self.call("cuMemSetAccess", address, num_bytes, byref(self._access), 1)

    def call(self, name: str, *arguments: Any) -> None:
        """Raises MappingError."""
        if code := getattr(self._driver, name)(*arguments):
            text = c_char_p()
            self._driver.cuGetErrorName(code, byref(text))
            raise MappingError(name, (text.value or f"error {code}".encode()).decode(), no_room=code == _OUT_OF_MEMORY)

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self.granularity) * self.granularity


class Range:
    """`backed`: bytes at its front that have memory; `tensor [num_bytes]` uint8 is over all of it, and what is behind
    must not be touched. The device must be at rest as far as anything reads or writes what is moved."""

    def __init__(self, memory: Memory, base: int, num_bytes: int) -> None:
        self.base, self.num_bytes = base, num_bytes
        self.pieces: list[Piece] = []
        self._memory = memory

    @property
    def backed(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def tensor(self) -> Tensor:
        """To be asked for while the front has memory."""
        return self._memory.view(self.base, self.num_bytes)

    def push(self, pieces: Sequence[Piece]) -> None:
        """Put pieces, which are nowhere, behind those that are here: all of them, or none with a MappingError."""
        call, begin = self._memory.call, self.base + self.backed
        end = begin + sum(piece.num_bytes for piece in pieces)
        assert all(piece.range is None for piece in pieces), "a piece is in one range"
        assert end <= self.base + self.num_bytes, "there are not so many addresses"
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
        """Take the last piece away, with what it holds. Raises MappingError, with nothing changed."""
        last = self.pieces[-1]
        self._memory.call("cuMemUnmap", self.base + self.backed - last.num_bytes, last.num_bytes)
        last.range = None
        return self.pieces.pop()


class _DlDevice(ctypes.Structure):
    _fields_ = (("type", c_int32), ("id", c_int32))


class _DlType(ctypes.Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _DlManaged(ctypes.Structure):
    """DLManagedTensor: a DLTensor, whose it is, and what frees it."""

    _fields_ = (
        ("data", c_void_p), ("device", _DlDevice), ("ndim", c_int32), ("dtype", _DlType), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("byte_offset", c_uint64), ("context", c_void_p), ("deleter", c_void_p),
    )  # fmt: skip


_NAME = b"dltensor"


def tensor_over(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """[num_bytes] uint8 over memory that is not torch's. Nothing is freed with the tensor."""
    where = _DlDevice(_DLPACK_DEVICES[device.type], device.index or 0)
    managed = _DlManaged(address, where, 1, _DlType(_DLPACK_UINT, 8, 1), (c_int64 * 1)(num_bytes))
    # torch looks at it again when it lets go of the tensor, which may be when Python has ended
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))
    make = ctypes.PYFUNCTYPE(ctypes.py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
    tensor: Tensor = from_dlpack(make(ctypes.addressof(managed), _NAME, None))
    return tensor
