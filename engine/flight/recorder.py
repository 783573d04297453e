"""The flight recorder: the last steps of an engine in memory that outlives it.

The recorder writes each step before it runs, and what became of it, into slots of a buffer: one slot an entry, the
oldest first to be written over. The engine process shares that memory with the gateway, which reads what ran when the
process is gone, whatever ended it. An entry counts once its number stands in its slot, which is written last: one that
was cut off is not read.

Requests are named by their ids; no token of a prompt or an answer is in it.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.scheduling.output import Chunk, ModelRunnerOutput, SchedulerOutput

SLOTS, SLOT_BYTES = 256, 1 << 16
SIZE = SLOTS * SLOT_BYTES
"""Of the buffer, in bytes; pages that no entry reaches are never taken from the system."""
_HEADER = struct.Struct("<QI")


class Entry(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """`at`: seconds on the monotonic clock."""

    at: float


class Launched(Entry, frozen=True):
    """A step is about to run. `request_ids`: of its chunks; `started`: requests that got a row in it, with the tokens
    known of each; `operations`: of the cache. `predicted`: seconds. `adapted`: chunks under a LoRA adapter."""

    step_id: int
    request_ids: list[str]
    chunks: tuple[Chunk, ...]
    started: tuple[tuple[str, int], ...] = ()
    operations: int = 0
    predicted: float | None = None
    adapted: int = 0


class Completed(Entry, frozen=True):
    """What a step gave: so many tokens, in so many seconds."""

    step_id: int
    tokens: int
    latency: float


class Failed(Entry, frozen=True):
    """A step raised, or gave what cannot be."""

    step_id: int
    error: str


class Idle(Entry, frozen=True):
    """No step runs, and none can."""


class Preparing(Entry, frozen=True):
    """Requests whose grammars are being made ready, beside the steps: all of them as of now."""

    request_ids: list[str]


AnyEntry = Launched | Completed | Failed | Idle | Preparing

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEntry)


class FlightRecorder:
    """Writes the entries of one engine; `buffer` has SIZE bytes, all zero. `on_failure` is told of a failed step."""

    def __init__(self, buffer: mmap.mmap | bytearray, on_failure: Callable[[], None] = lambda: None) -> None:
        self._buffer = buffer
        self._on_failure = on_failure
        self._next = 1
        self._request_ids: dict[int, str] = {}
        self._adapted: set[int] = set()
        self._idle = True
        self._preparing: list[str] = []
        self._renew_at = 0

    def launched(self, output: SchedulerOutput, now: float) -> None:
        """Before the step runs."""
        ids = self._request_ids
        for new in output.new_requests:
            ids[new.row] = new.request_id
            (self._adapted.add if new.adapter else self._adapted.discard)(new.row)
        request_ids = [ids[chunk[0]] for chunk in output.chunks]
        adapted = sum([chunk[0] in self._adapted for chunk in output.chunks]) if self._adapted else 0
        started = tuple([(new.request_id, len(new.token_ids)) for new in output.new_requests])
        operations, predicted = len(output.operations), output.predicted_latency
        self._write(Launched(now, output.step_id, request_ids, output.chunks, started, operations, predicted, adapted))
        self._idle = False

    def completed(self, result: ModelRunnerOutput, now: float) -> None:
        self._write(Completed(now, result.step_id, len(result.token_ids), result.latency))

    def failed(self, output: SchedulerOutput, error: BaseException, now: float) -> None:
        self._write(Failed(now, output.step_id, type(error).__name__))
        self._on_failure()

    def idle(self, now: float) -> None:
        """Nothing runs until something happens; said once is enough."""
        if not self._idle:
            self._write(Idle(now))
            self._idle = True

    def preparing(self, request_ids: Iterable[str], now: float) -> None:
        """Before the first of them is begun, and whenever there are others."""
        self._preparing = sorted(request_ids)
        self._renew_at = self._next + SLOTS // 2
        self._write(Preparing(now, self._preparing))

    def _write(self, entry: AnyEntry) -> None:
        if self._preparing and self._next >= self._renew_at:
            self.preparing(self._preparing, entry.at)  # before steps have written over it
        payload = _encoder.encode(entry)
        if len(payload) > SLOT_BYTES - _HEADER.size:
            return  # thousands of requests in one step: nobody is suspected for what is not known
        base = (self._next % SLOTS) * SLOT_BYTES
        _HEADER.pack_into(self._buffer, base, 0, len(payload))
        start = base + _HEADER.size
        self._buffer[start : start + len(payload)] = payload
        _HEADER.pack_into(self._buffer, base, self._next, len(payload))
        self._next += 1


def read(buffer: mmap.mmap | bytearray) -> list[AnyEntry]:
    """What was recorded, the oldest entry first."""
    found: list[tuple[int, AnyEntry]] = []
    for base in range(0, SIZE, SLOT_BYTES):
        number, length = _HEADER.unpack_from(buffer, base)
        if number == 0 or length > SLOT_BYTES - _HEADER.size:
            continue
        start = base + _HEADER.size
        try:
            found.append((number, _decoder.decode(buffer[start : start + length])))
        except msgspec.MsgspecError:
            continue  # whoever wrote it was out of its mind already
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def in_flight(entries: Sequence[AnyEntry]) -> dict[str, int]:
    """The requests that ran at the end of a recording, and how many tokens of each would have been computed then.

    These are of the steps without a result, and of the last one: its engine was still busy with what it gave. A step
    that failed is in question until another one is launched. Of those that were being prepared nothing would have been
    computed.
    """
    open_steps: dict[int, Launched] = {}
    preparing: list[str] = []
    last: Launched | None = None
    for entry in entries:
        match entry:
            case Launched():
                open_steps[entry.step_id] = last = entry
            case Completed():
                open_steps.pop(entry.step_id, None)
            case Failed():
                last = open_steps.pop(entry.step_id, last)
            case Idle():
                open_steps, last = {}, None
            case Preparing(_, request_ids):
                preparing = request_ids
    steps = [*open_steps.values(), *([last] if last is not None else [])]
    reached = dict.fromkeys(preparing, 0)
    for step in steps:
        for request_id, chunk in zip(step.request_ids, step.chunks, strict=False):
            reached[request_id] = max(reached.get(request_id, 0), chunk.start + chunk.length)
    return reached
