"""The flight recorder: the last steps of an engine, in memory that outlives the engine process, and on disk.

The recorder writes an entry before each step and another with its result into a ring of slots. The engine process
shares this memory with the gateway, which reads it after the process has died from any cause. An entry's number is
written last; without it, the slot is not read, so an incomplete entry is ignored.

Entries contain request ids, but no tokens of prompts or answers. Recordings on disk are JSON Lines, one of facts, then
one per entry. A folder holds the last KEEP recordings.
"""

import asyncio
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from engine.client import EngineInfo
from engine.errors import ConfigError
from engine.scheduling.output import Chunk, ModelRunnerOutput, SchedulerOutput

SLOTS, SLOT_BYTES = 256, 1 << 16
SIZE = SLOTS * SLOT_BYTES
"""Size of the buffer, bytes. The system allocates only pages that entries have reached."""
_HEADER = struct.Struct("<QI")


class FlightEntry(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all entries."""

    at: float  # seconds on the monotonic clock


class Launched(FlightEntry, frozen=True):
    """A step is about to run."""

    step_id: int
    request_ids: list[str]  # one per chunk
    chunks: tuple[Chunk, ...]
    started: tuple[tuple[str, int], ...] = ()  # (id, known tokens) of requests that got a row in this step
    operations: int = 0  # number of cache operations
    predicted: float | None = None  # seconds
    adapted: int = 0  # number of chunks with a LoRA adapter


class Completed(FlightEntry, frozen=True):
    """A step has completed."""

    step_id: int
    tokens: int
    latency: float  # seconds


class FailedStep(FlightEntry, frozen=True, tag="Failed"):
    """A step raised an error or returned an invalid result."""

    step_id: int
    error: str


class Idle(FlightEntry, frozen=True):
    """No step runs and none can be scheduled."""


class Preparing(FlightEntry, frozen=True):
    """All requests whose grammars are being compiled now, concurrently with the steps."""

    request_ids: list[str]


AnyEntry = Launched | Completed | FailedStep | Idle | Preparing

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEntry)


class FlightRecorder:
    """Writes the entries of an engine into `buffer`, which has SIZE zero bytes. Calls `on_failure` for failed steps."""

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
        """Record a step; call this before the step runs."""
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
        self._write(FailedStep(now, output.step_id, type(error).__name__))
        self._on_failure()

    def idle(self, now: float) -> None:
        """Record that the engine is idle; repeated calls are ignored."""
        if not self._idle:
            self._write(Idle(now))
            self._idle = True

    def preparing(self, request_ids: Iterable[str], now: float) -> None:
        """Record the requests in preparation; call this before one starts and whenever the set changes."""
        self._preparing = sorted(request_ids)
        self._renew_at = self._next + SLOTS // 2
        self._write(Preparing(now, self._preparing))

    def _write(self, entry: AnyEntry) -> None:
        if self._preparing and self._next >= self._renew_at:
            self.preparing(self._preparing, entry.at)  # before the ring overwrites the entry
        payload = _encoder.encode(entry)
        if len(payload) > SLOT_BYTES - _HEADER.size:
            return  # a step of thousands of requests does not fit; none of its requests is suspected
        base = (self._next % SLOTS) * SLOT_BYTES
        _HEADER.pack_into(self._buffer, base, 0, len(payload))
        start = base + _HEADER.size
        self._buffer[start : start + len(payload)] = payload
        _HEADER.pack_into(self._buffer, base, self._next, len(payload))
        self._next += 1


def read(buffer: mmap.mmap | bytearray) -> list[AnyEntry]:
    """Return the recorded entries, oldest first."""
    found: list[tuple[int, AnyEntry]] = []
    for base in range(0, SIZE, SLOT_BYTES):
        number, length = _HEADER.unpack_from(buffer, base)
        if number == 0 or length > SLOT_BYTES - _HEADER.size:
            continue
        start = base + _HEADER.size
        try:
            found.append((number, _decoder.decode(buffer[start : start + length])))
        except msgspec.MsgspecError:
            continue  # written by a process with corrupted memory
    return [entry for _, entry in sorted(found, key=lambda pair: pair[0])]


def in_flight(entries: Sequence[AnyEntry]) -> dict[str, int]:
    """Return the requests that ran at the end of a recording, with the number of tokens that each would have computed.

    They are the requests of steps without a result, and of the last step, whose result the engine was still processing.
    A failed step counts until another one is launched. Requests in preparation have 0 tokens.
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
            case FailedStep():
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


log = logging.getLogger("tidemill.engine")

KEEP = 8
SUFFIX = ".flight.jsonl"
FAILED_STEP = "failed_step"
QUIET_SECONDS = 10.0
"""Seconds after a recording in which failed steps are not recorded; the next recording includes them."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Header of a recording."""

    cause: str
    at: float  # wall-clock time, seconds
    clock: float  # the same moment on the monotonic clock of the entries
    model: str
    dtype: str
    device: str
    version: int = 1


class Recording(msgspec.Struct, frozen=True):
    """Content of a recording."""

    facts: Facts
    entries: list[AnyEntry]


_json = msgspec.json.Encoder()
_facts = msgspec.json.Decoder(Facts)
_entries = msgspec.json.Decoder(AnyEntry)


def save(folder: Path, facts: Facts, entries: Sequence[AnyEntry]) -> Path:
    """Write a recording and remove the oldest ones beyond KEEP; return its path. Raise OSError on failure."""
    folder.mkdir(mode=0o700, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(facts.at))
    path = folder / f"{stamp}-{int(facts.at * 1000) % 1000:03d}-{facts.cause}{SUFFIX}"
    temporary = path.with_suffix(".new")
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(_json.encode_lines([facts, *entries]))
    temporary.replace(path)
    for old in sorted(folder.glob(f"*{SUFFIX}"))[:-KEEP]:
        old.unlink(missing_ok=True)
    return path


def load(path: Path) -> Recording:
    """Read a recording. Raise ConfigError if the file cannot be read or is not a recording."""
    try:
        first, *lines = path.read_bytes().splitlines()
        return Recording(_facts.decode(first), [_entries.decode(line) for line in lines if line.startswith(b"[")])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is not a flight recording: {error}") from None


class Flights:
    """The flight recordings of one model in a folder."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder = folder
        self._model = model
        self._not_before = 0.0

    def keep(self, cause: str, info: EngineInfo, entries: Sequence[AnyEntry]) -> None:
        """Write the entries in a thread. An error is logged and loses only the recording."""
        clock = time.monotonic()
        if not entries or (cause == FAILED_STEP and clock < self._not_before):
            return
        self._not_before = clock + QUIET_SECONDS
        facts = Facts(cause, time.time(), clock, self._model, info.dtype, info.device)
        try:
            asyncio.get_running_loop().run_in_executor(None, self._save, facts, entries)
        except RuntimeError as error:
            log.error("the last steps could not be written: %s", error)

    def _save(self, facts: Facts, entries: Sequence[AnyEntry]) -> None:
        try:
            path = save(self._folder, facts, entries)
        except OSError as error:
            log.error("the last steps could not be written: %s", error)
        else:
            log.warning("the last %d entries of the engine are in %s", len(entries), path)
