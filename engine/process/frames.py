"""The messages between the gateway and an engine process: length-prefixed MessagePack frames.

The module does no I/O: it converts bytes to messages and back. It uses no pickle: a frame can only hold the types
defined here, and a frame that does not decode is an error. `docs/develop/process.md` shows the order of the messages.
"""

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
from engine.machine.link import HEADER, framed
from engine.process.causes import START
from engine.process.orders import Order, Past

MAX_FRAME = 1 << 28
"""Maximum bytes of a frame; far above the longest prompts that fit into one HTTP body."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages."""


# gateway to engine


class Launch(Message, frozen=True):
    """The first message to a process: the model to load and the place to run."""

    config: EngineConfig
    log_level: str = "info"
    recorder: int | None = None  # inherited descriptor of the flight recorder's memory
    place: Place = Place()
    held: bool = False  # load nothing before `Begin`
    spare: bool = False  # do not plan either, because the device is in use; send an empty `Planned`
    waiting: str = ""  # `Planned.waiting` of the previous process


class Begin(Message, frozen=True):
    """Make a held process load: the process before it has ended."""


class Submit(Message, frozen=True):
    """Queue all requests or none. Answered by `Answer` or `Refused` with the same `call`."""

    call: int
    requests: tuple[EngineRequest, ...]


class Resume(Message, frozen=True):
    """Continue requests that an ended engine had accepted. No answer; the queue limit does not apply."""

    requests: tuple[EngineRequest, ...]


class CheckRoom(Message, frozen=True):
    """Check whether a request would be accepted. Answered by `Answer` or `Refused`."""

    call: int
    request_class: RequestClass
    prompt_tokens: int
    tenant: str


class Abort(Message, frozen=True):
    """Abort a request that the gateway has already ended. No answer."""

    request_id: str
    reason: FinishReason


class SetLane(Message, frozen=True):
    """Change the lane of a job's offline requests. No answer."""

    job: str
    lane: Lane


class AskStats(Message, frozen=True):
    """Request statistics. Answered by `Answer`."""

    call: int


class Regroup(Message, frozen=True):
    """Carry out an order that forms or dissolves a pipeline (`engine.process.stage`).

    Answered by `Answer` or `Refused`.
    """

    call: int
    order: Order


class Shutdown(Message, frozen=True):
    """End every request and the process."""


ToEngine = (
    Launch | Begin | Submit | Resume | CheckRoom | Abort | SetLane | AskStats | Regroup | Shutdown
)  # fmt: skip


# engine to gateway


class Planned(Message, frozen=True):
    """The start is planned; nothing is loaded yet."""

    folder: str  # folder of the model
    notes: tuple[str, ...]  # notes for the user
    waiting: str = ""  # wait policy of OpenMP threads; empty: the default of OpenMP


class Built(Message, frozen=True):
    """The model is loaded and measured."""

    info: EngineInfo


class Started(Message, frozen=True):
    """The first step has passed, and the process accepts requests."""


class NotStarted(Message, frozen=True):
    """The start failed, and the process ends. Sent in place of `Planned`, `Built` or `Started`."""

    error: ErrorInfo
    cause: str = START  # a name in `engine.process.causes`


class Outputs(Message, frozen=True):
    """The outputs of one or more steps, in order, sometimes with the load after them."""

    outputs: tuple[RequestOutput, ...]
    load: LoadReport | None = None


class Answer(Message, frozen=True):
    """The answer to a call, with the statistics for `AskStats`, and the pasts of its requests for `Regroup`."""

    call: int
    value: EngineStats | tuple[Past, ...] | None = None


class Refused(Message, frozen=True):
    call: int
    error: ErrorInfo


class Pulse(Message, frozen=True):
    """The state of the engine, sent every `PULSE_SECONDS` as a sign that its event loop runs."""

    state: EngineState
    trouble: str | None
    load: LoadReport | None = None


class StepFailed(Message, frozen=True):
    """A step failed and the process continues. The gateway saves the flight recording."""


class Parted(Message, frozen=True):
    """The other engine of the pipeline does not answer. This engine runs no step until the next order."""


class Dying(Message, frozen=True):
    """The process is about to kill itself. `cause`: a name in `engine.process.causes`."""

    cause: str
    message: str


ToGateway = Planned | Built | Started | NotStarted | Outputs | Answer | Refused | Pulse | StepFailed | Parted | Dying

MessageT = TypeVar("MessageT")

_encoder = msgspec.msgpack.Encoder()


class FrameError(Exception):
    """The bytes are not a valid message, or a message is too large. The connection must be closed."""


def encode(message: Message) -> bytes:
    """Encode a message as a frame. Raise FrameError if it is longer than `MAX_FRAME`."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME:
        raise FrameError(f"a message of {len(payload)} bytes")
    return framed(payload)


class FrameReader(Generic[MessageT]):
    """Decodes messages from a byte stream and buffers an incomplete frame."""

    def __init__(self, decoder: "msgspec.msgpack.Decoder[MessageT]") -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Add bytes and return the messages that they complete. Raise FrameError."""
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
    """Return the reader for messages of the gateway."""
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def gateway_reader() -> FrameReader[ToGateway]:
    """Return the reader for messages of the engine process."""
    return FrameReader(msgspec.msgpack.Decoder(ToGateway))
