"""What gateway and engine process say to each other: messages of frozen values in frames of length and MessagePack.

Sans I/O: bytes go in, messages come out. No pickle: a frame can hold nothing but what is named here, and what does not
decode is an error. `docs/develop/process.md` shows the order of the messages.
"""

import struct
from typing import Generic, TypeVar

import msgspec

from engine.api import (
    EngineInfo,
    EngineRequest,
    EngineState,
    EngineStats,
    FinishReason,
    Lane,
    LoadReport,
    RequestClass,
    RequestOutput,
)
from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.machine.facts import Place
from engine.process.causes import START
from engine.process.orders import Order, Past

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 28
"""Bytes; the longest prompts that one HTTP body can hold are far below."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that is sent."""


# gateway to engine


class Launch(Message, frozen=True):
    """The first message: what to load, and where to run. `recorder`: the descriptor of the memory for the flight
    recorder, which the process has inherited. `held`: load nothing before `Begin`; `spare`: nor look what will be
    loaded, as the device is in use, and say an empty `Planned`. `waiting`: what the process before it had decided, see
    there."""

    config: EngineConfig
    log_level: str = "info"
    recorder: int | None = None
    place: Place = Place()
    held: bool = False
    spare: bool = False
    waiting: str = ""


class Begin(Message, frozen=True):
    """To a process that was held: the one before it is gone."""


class Submit(Message, frozen=True):
    """Queue all of these or none; answered by `Done` or `Refused` with the same `call`."""

    call: int
    requests: tuple[EngineRequest, ...]


class Resume(Message, frozen=True):
    """Go on with these, which an engine that is gone had accepted: no answer, and none of them is refused for room."""

    requests: tuple[EngineRequest, ...]


class CheckRoom(Message, frozen=True):
    """Answered by `Done` or `Refused`."""

    call: int
    request_class: RequestClass
    prompt_tokens: int
    tenant: str


class Abort(Message, frozen=True):
    """The caller has ended this request already; no answer."""

    request_id: str
    reason: FinishReason


class SetLane(Message, frozen=True):
    """Offline requests of a job go with others from now on; no answer."""

    job: str
    lane: Lane


class AskStats(Message, frozen=True):
    """Answered by `Stats`."""

    call: int


class Regroup(Message, frozen=True):
    """A step on the way into a pipeline of engines, or out of it (`engine.process.stage`); answered by `Regrouped` or
    `Refused`."""

    call: int
    order: Order


class Shutdown(Message, frozen=True):
    """End every request and the process."""


ToEngine = (
    Launch | Begin | Submit | Resume | CheckRoom | Abort | SetLane | AskStats | Regroup | Shutdown
)  # fmt: skip


# engine to gateway


class Planned(Message, frozen=True):
    """What will run is decided, nothing is loaded yet. `folder`: of the model; `notes`: for the user; `waiting`: how
    OpenMP's threads wait for each other, empty: as they do by themselves."""

    folder: str
    notes: tuple[str, ...]
    waiting: str = ""


class Built(Message, frozen=True):
    """The model is loaded and measured."""

    info: EngineInfo


class Started(Message, frozen=True):
    """The first step has passed: requests may come."""


class NotStarted(Message, frozen=True):
    """Instead of one of the three before; the process ends. `cause`: see `engine.process.causes`."""

    error: ErrorInfo
    cause: str = START


class Outputs(Message, frozen=True):
    """What one or more steps gave, in order; now and then with the load after them."""

    outputs: tuple[RequestOutput, ...]
    load: LoadReport | None = None


class Done(Message, frozen=True):
    call: int


class Refused(Message, frozen=True):
    call: int
    error: ErrorInfo


class Stats(Message, frozen=True):
    call: int
    stats: EngineStats


class Pulse(Message, frozen=True):
    """The event loop of the engine turns, and how it is; comes `PULSE_SECONDS` after the last one."""

    state: EngineState
    trouble: str | None
    load: LoadReport | None = None


class StepFailed(Message, frozen=True):
    """A step failed, and the process goes on: what the flight recorder holds is worth keeping."""


class Regrouped(Message, frozen=True):
    """The step is done. `pasts`: of requests that were detached or attached in it."""

    call: int
    pasts: tuple[Past, ...] = ()


class Parted(Message, frozen=True):
    """The other engine of a pipeline does not answer: this one holds still until it is told what to do."""


class Dying(Message, frozen=True):
    """The process is about to kill itself, and why."""

    cause: str
    message: str


ToGateway = (
    Planned | Built | Started | NotStarted | Outputs | Done | Refused | Stats | Pulse | StepFailed | Regrouped | Parted
    | Dying
)  # fmt: skip

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """Bytes that are no message: the other side is not to be trusted any more."""


def encode(message: Message) -> bytes:
    """A message as a frame."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise FrameError(f"a message of {len(payload)} bytes")
    return HEADER.pack(len(payload)) + payload


class FrameReader(Generic[MessageT]):
    """Messages out of a stream of bytes; what is cut off is kept until the rest comes."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[MessageT]") -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """The messages that `data` completes. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise FrameError(f"a frame of {length} bytes")
            end = start + HEADER.size + length
            if len(buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(memoryview(buffer)[start + HEADER.size : end]))
            except msgspec.MsgspecError as error:
                raise FrameError(str(error)) from None
            start = end
        if start:
            del buffer[:start]
        return messages


def engine_reader() -> FrameReader[ToEngine]:
    """Reads what the gateway sends."""
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def gateway_reader() -> FrameReader[ToGateway]:
    """Reads what the engine sends."""
    return FrameReader(msgspec.msgpack.Decoder(ToGateway))
