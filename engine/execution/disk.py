"""The disk tier: units of the pool in one file of fixed slots, found again after a restart.

A slot is a header (whose block, which part of it, a checksum) and a unit's bytes. A write goes by a thread of its own
and is in no order with others: what a crash leaves half written, another hand has changed or the disk returns wrongly
does not match its checksum, and counts as lost. What is lost is read as NaN, by which the step's results show that the
block cannot be trusted. The file is made in its full size, so that a full disk is met at the start; one of another
model, type or layout (`key`) begins anew. A lock keeps it to one engine. Knows nothing of requests; runs on the CPU.

A disk may become slow, or hang. No step waits for it longer than `patience` allows: what is not read by then counts as
lost, what finds no room to wait for being written is not kept. `seconds` follows what units take now, so that others
stop asking for what does not pay any more; while it is slow and nobody asks, it is tried again and again.
"""

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from engine.cache.blocks import CacheEntry, CacheKind, CacheOperation, Tier
from engine.execution.pool import UnitPool

log = logging.getLogger("tidemill.engine")

PENDING_BYTES = 64 * 1024**2
"""Of writes that wait for the disk; further ones wait for these."""
PATIENCE_SECONDS, PATIENCE_TIMES = 0.25, 8.0
"""Units are waited for so long, and so many times what they took lately."""
SLOW_TIMES, TRY_SECONDS = 2.0, 5.0
"""A disk that takes so many times what it took at the start is tried so long after it was last used."""
MAGIC = b"tidemill cache 1"
_PAGE = 4096
_HEADER = struct.Struct("<16sBBxxI")  # key of the block, kind, part, checksum of these and of the bytes
_PROBES, _RECENT = 5, 15


class Label(NamedTuple):
    """What a slot holds: a part of a block."""

    key: bytes
    kind: int
    part: int

    def pack(self, data: memoryview) -> bytes:
        return _HEADER.pack(*self, self.checksum(data))

    def checksum(self, data: memoryview) -> int:
        return zlib.crc32(data, zlib.crc32(_HEADER.pack(*self, 0)))


def slot_bytes(unit_bytes: int) -> int:
    """What a unit takes on the disk."""
    return -(-(unit_bytes + _HEADER.size) // _PAGE) * _PAGE


class Pace:
    """What one thread takes for a unit, in seconds: `usual`ly of late, or as long as it already is at one."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._began: float | None = None
        self.last = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        began = self._began = time.monotonic()
        try:
            yield
        finally:
            self.last, self._began = time.monotonic(), None
            self._recent.append(self.last - began)

    @property
    def usual(self) -> float:
        return median(tuple(self._recent)) if self._recent else 0.0

    @property
    def seconds(self) -> float:
        began, usual = self._began, self.usual
        return usual if began is None else max(usual, time.monotonic() - began)


class DiskTier:
    """`num_units` slots in `folder`, in the first of its files that no other engine holds. Raises OSError.

    `failed`: the disk refused a write; nothing is written any more.
    """

    def __init__(self, folder: Path, pool: UnitPool, num_units: int, key: bytes) -> None:
        self.num_units, self.failed = num_units, False
        self._pool, self._unit_bytes = pool, pool.parked.num_bytes
        self._row = self._new_row()
        self._slot = slot_bytes(self._unit_bytes)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = next(_unlocked(folder))
        self._pending: dict[int, tuple[Label, bytes]] = {}
        self._writes: deque[Future[None]] = deque()
        self._lock = threading.Lock()
        self._thread, self._reader = ThreadPoolExecutor(1, "disk-cache"), ThreadPoolExecutor(1, "disk-cache-read")
        self._writing, self._reading, self._at_start = Pace(), Pace(), 0.0
        self._trial: Future[None] | None = None
        try:
            self.found = self._open(MAGIC + key + struct.pack("<Q", self._slot))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Finish what is being written and let another engine have the file."""
        self._thread.shutdown()
        self._reader.shutdown()
        os.close(self._file)

    def write(self, batch: Sequence[CacheOperation]) -> None:
        """Begin to write blocks; their units may be overwritten by what follows."""
        until = self._patience(sum(len(each.source.units) for each in batch), self._writing)
        for source, target, key in ((each.source, each.target, each.key) for each in batch):
            for part, (unit, slot) in enumerate(zip(source.units, target.units, strict=True)):
                label = Label(key, _KINDS.index(source.kind), part)
                if not self.failed and self._has_room(until):
                    self._begin(slot, label, self._parked(source.tier, unit).numpy().tobytes())

    def read(self, batch: Sequence[CacheOperation]) -> None:
        """Fill device units from the disk; with NaN what is not there as it was written, or not there in time."""
        wanted = [
            (unit, self._reader.submit(self._fetch, slot, Label(key, _KINDS.index(source.kind), part)))
            for source, target, key in ((each.source, each.target, each.key) for each in batch)
            for part, (slot, unit) in enumerate(zip(source.units, target.units, strict=True))
        ]
        until, lost, late = self._patience(len(wanted), self._reading), 0, 0
        for unit, fetched in wanted:
            in_time = bool(wait([fetched], max(0.0, until - time.monotonic())).done)
            row = fetched.result() if in_time else None
            if row is not None:
                self._pool.parked.give_back(row, self._pool.units[unit])
            else:
                fetched.cancel()
                self._pool.units[unit].view(torch.uint8).fill_(0xFF)  # NaN in every type of a cache
            lost += row is None
            late += not in_time
        if lost:
            why = f"damaged, {late} of them not read in time" if late else "damaged"
            log.warning("%d units of the disk cache are %s; their tokens are computed again", lost, why)

    def measure(self) -> float:
        """What writing a unit and reading it back takes at the start."""
        self._try()
        self._at_start = self.seconds
        return self._at_start

    @property
    def seconds(self) -> float:
        """What writing a unit and reading it back takes now."""
        taken, now = self._writing.seconds + self._reading.seconds, time.monotonic()
        resting = now - max(self._writing.last, self._reading.last) > TRY_SECONDS
        slow = taken > SLOW_TIMES * self._at_start and not self.failed
        if slow and resting and (self._trial is None or self._trial.done()):
            self._trial = self._thread.submit(self._try)
        return taken

    def _try(self) -> None:
        """Write a unit and read it a few times, in a slot of its own. What the disk says to it is of no interest."""
        data, label = self._new_row().view(torch.uint8).numpy().tobytes(), Label(bytes(16), 0, 0)
        for _ in range(_PROBES):
            with contextlib.suppress(OSError), self._writing.measured():
                self._put(self.num_units, label, data)
            self._reader.submit(self._fetch, self.num_units, label).result()

    def _patience(self, units: int, pace: Pace) -> float:
        """Until when so many units are waited for."""
        return time.monotonic() + PATIENCE_SECONDS + PATIENCE_TIMES * units * max(pace.usual, self._at_start)

    def _new_row(self) -> Tensor:
        return torch.zeros(self._pool.parked.elements, dtype=self._pool.parked.dtype)

    def _open(self, head: bytes) -> list[tuple[CacheEntry, bytes]]:
        """Make the file, or find what an earlier process has left in it."""
        size = (self.num_units + 1) * self._slot + _PAGE
        known = os.pread(self._file, len(head), 0) == head
        if not known:
            os.ftruncate(self._file, 0)
        if os.fstat(self._file).st_size > size:
            os.ftruncate(self._file, size)
        os.posix_fallocate(self._file, 0, size)
        if os.pwrite(self._file, head, 0) != len(head):
            raise OSError("the disk cache cannot be written")
        return list(self._blocks()) if known else []

    def _blocks(self) -> Iterator[tuple[CacheEntry, bytes]]:
        """Blocks all parts of which have a slot."""
        parts: dict[tuple[bytes, int], dict[int, int]] = {}
        for slot in range(self.num_units):
            key, kind, part, checksum = _HEADER.unpack(os.pread(self._file, _HEADER.size, self._at(slot)))
            if checksum and kind < len(_KINDS):
                parts.setdefault((key, kind), {})[part] = slot
        for (key, number), slots in parts.items():
            kind = _KINDS[number]
            units = tuple(slots[part] for part in range(kind.form.units) if part in slots)
            if len(units) == kind.form.units:
                yield CacheEntry(kind, Tier.DISK, units), key

    def _has_room(self, until: float) -> bool:
        """Whether one more write may wait for the disk; those before it are waited for `until` then."""
        while self._writes and (self._writes[0].done() or len(self._writes) * self._unit_bytes > PENDING_BYTES):
            if not wait([self._writes[0]], max(0.0, until - time.monotonic())).done:
                return False
            self._writes.popleft().result()
        return True

    def _begin(self, slot: int, label: Label, data: bytes) -> None:
        with self._lock:
            self._pending[slot] = label, data
        self._writes.append(self._thread.submit(self._finish, slot))

    def _finish(self, slot: int) -> None:
        with self._lock:
            waiting = self._pending.get(slot)
        if waiting is None or self.failed:
            return
        try:
            with self._writing.measured():
                self._put(slot, *waiting)
        except OSError as error:
            log.warning("the disk cache is off: %s", error)
            self.failed = True
        with self._lock:
            if self._pending.get(slot) is waiting:
                del self._pending[slot]

    def _put(self, slot: int, label: Label, data: bytes) -> None:
        whole = label.pack(memoryview(data)) + data
        if os.pwrite(self._file, whole, self._at(slot)) != len(whole):
            raise OSError("a short write")

    def _fetch(self, slot: int, label: Label) -> Tensor | None:
        """What was written there under that label, as the pool keeps it."""
        row, header = self._new_row(), bytearray(_HEADER.size)
        data = row.view(torch.uint8).numpy().data
        with self._lock:
            waiting = self._pending.get(slot)
        if waiting is not None:
            data[:] = waiting[1]
            return row if waiting[0] == label else None
        with contextlib.suppress(OSError), self._reading.measured():
            whole = os.preadv(self._file, [header, data], self._at(slot)) == len(header) + len(data)
            return row if whole and bytes(header) == label.pack(data) else None
        return None

    def _at(self, slot: int) -> int:
        return _PAGE + slot * self._slot

    def _parked(self, tier: Tier, unit: int) -> Tensor:
        """What the disk keeps of a unit, until the next call."""
        row = self._row if tier is Tier.DEVICE else self._pool.host_units[unit]
        if tier is Tier.DEVICE:
            self._pool.parked.keep(self._pool.units[unit], row)
        return row.view(torch.uint8)


_KINDS = tuple(CacheKind)


def _unlocked(folder: Path) -> Iterator[int]:
    """Descriptors of the folder's files, each locked."""
    for number in range(1024):
        file = os.open(folder / f"units-{number}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            continue
        yield file
        return
    raise OSError(f"all files of {folder} are in use")
