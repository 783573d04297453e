"""libcuda's virtual memory management over memory of this machine, as strict as its documentation: a call that breaks a
rule is an error of the test, not a code that the caller might handle. What is mapped is really there, and what is not
ends the process.
"""

import ctypes
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from engine.execution.cuda.mapped_layers import Memory

OUT_OF_MEMORY, INVALID_VALUE = 2, 1
NAMES = {OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY", INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE"}
_FIXED, _NORESERVE = 0x10, 0x4000
_NO_ACCESS, _ACCESS = 0, mmap.PROT_READ | mmap.PROT_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RuleBrokenError(AssertionError):
    """A call that the driver would refuse, or would do wrongly."""


def rule(holds: object, what: str) -> None:
    if not holds:
        raise RuleBrokenError(what)


class FakeDriver:
    """Stands for ctypes' library. `capacity`: bytes of the device; `fail`: by a call's name, the code that it returns
    instead of doing anything. `mapped`: by address, (bytes, handle); `allowed`: addresses that may be read and written;
    `busy`: whether launched work may touch mapped memory, until `rest`."""

    def __init__(self, granularity: int = mmap.PAGESIZE, capacity: int = 2**30, supported: int = 1) -> None:
        self.granularity, self.capacity, self.supported = granularity, capacity, supported
        self.fail: Callable[[str], int] = lambda _name: 0
        self.counts: Counter[str] = Counter()
        self.reserved: dict[int, int] = {}
        self.memory: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.allowed: set[int] = set()
        self.busy = False
        self._files: dict[int, int] = {}
        weakref.finalize(self, _give_back, self._files, self.reserved)

    def rest(self, *_: object) -> None:
        self.busy = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)
        do = getattr(self, f"_{name}")

        def call(*arguments: Any) -> int:
            self.counts[name] += 1
            code = self.fail(name)
            return code or do(*arguments) or 0

        return call

    def _cuInit(self, flags: int) -> None:
        rule(flags == 0, "flags must be 0")

    def _cuDeviceGetAttribute(self, found: Any, attribute: int, device: int) -> None:
        rule((attribute, device) == (102, 0), "the attribute of virtual memory management, of the first device")
        found._obj.value = self.supported

    def _cuGetErrorName(self, code: int, text: Any) -> None:
        text._obj.value = NAMES.get(code)

    def _cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> None:
        self._check_properties(properties)
        rule(option in (0, 1), "the least, or the recommended")
        size._obj.value = self.granularity

    def _cuMemAddressReserve(self, base: Any, size: int, alignment: int, address: int, flags: int) -> None:
        rule(size > 0 and size % self.granularity == 0, "addresses come in multiples of the granularity")
        rule(alignment == address == flags == 0, "nothing else is asked for")
        base._obj.value = _map(None, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, -1)
        self.reserved[base._obj.value] = size

    def _cuMemAddressFree(self, base: int, size: int) -> None:
        rule(self.reserved.get(base) == size, "a whole range is freed")
        rule(not any(base <= address < base + size for address in self.mapped), "nothing is mapped there")
        del self.reserved[base]
        _libc.munmap(base, size)

    def _cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        self._check_properties(properties)
        rule(size > 0 and size % self.granularity == 0 and flags == 0, "memory comes in multiples of the granularity")
        if sum(self.memory.values()) + size > self.capacity:
            return OUT_OF_MEMORY
        file = os.memfd_create("piece")
        os.ftruncate(file, size)
        handle._obj.value = file + 1000
        self.memory[file + 1000], self._files[file + 1000] = size, file
        return 0

    def _cuMemRelease(self, handle: int) -> None:
        rule(handle in self.memory, "there is such a piece")
        rule(all(handle != each for _, each in self.mapped.values()), "mapped memory stays, and would be lost")
        os.close(self._files.pop(handle))
        del self.memory[handle]

    def _cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        rule(offset == flags == 0 and handle in self.memory, "a piece from its beginning")
        rule(address % self.granularity == 0 == size % self.granularity, "in multiples of the granularity")
        rule(0 < size <= self.memory[handle], "no more than there is")
        rule(any(b <= address and address + size <= b + n for b, n in self.reserved.items()), "in one range")
        rule(not any(a < address + size and address < a + n for a, (n, _) in self.mapped.items()), "not mapped yet")
        rule(all(handle != each for _, each in self.mapped.values()), "one place for each piece, as we want it")
        _map(address, size, _NO_ACCESS, mmap.MAP_SHARED | _FIXED, self._files[handle])
        self.mapped[address] = size, handle

    def _cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> None:
        where = access._obj.location
        rule(count == 1 and (where.type, where.id, access._obj.flags) == (1, 0, 3), "the first device reads and writes")
        at = address
        while at < address + size:
            rule(at in self.mapped, "all of it is mapped")
            self.allowed.add(at)
            at += self.mapped[at][0]
        rule(at == address + size, "whole pieces")
        _libc.mprotect(address, size, _ACCESS)

    def _cuMemUnmap(self, address: int, size: int) -> None:
        rule(address in self.mapped and self.mapped[address][0] == size, "what one call has mapped")
        rule(not self.busy, "something that was launched may touch it")
        _map(address, size, _NO_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED, -1)
        del self.mapped[address]
        self.allowed.discard(address)

    def _check_properties(self, properties: Any) -> None:
        found = properties._obj
        rule((found.type, found.location.type, found.location.id) == (1, 1, 0), "pinned, on the first device")
        rule((found.handle_types, found.compression, found.remote_access, found.usage) == (0, 0, 0, 0), "plain memory")


def fake_memory(**options: Any) -> tuple[Memory, FakeDriver]:
    driver = FakeDriver(**options)
    return Memory(torch.device("cpu"), driver), driver


def _map(address: int | None, size: int, access: int, flags: int, file: int) -> int:
    found = _libc.mmap(address, size, access, flags, file, 0)
    assert found not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(found)


def _give_back(files: dict[int, int], reserved: dict[int, int]) -> None:
    for base, size in reserved.items():
        _libc.munmap(base, size)
    for file in files.values():
        os.close(file)
