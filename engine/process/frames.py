"""The messages between the gateway and an engine process: length-prefixed MessagePack frames.

The module does no I/O: it converts bytes to messages and back. It uses no pickle: a frame can only hold the types
defined here, and a frame that does not decode is an error. `docs/develop/process.md` shows the order of the messages.

By orders (`Order`), two engine processes form a pipeline and dissolve it (KunServe §4). An order is sent when the
previous one is done on either engine; only `Reset` may come at any time. Layers are a range (first, end). A request's
"past" is its K and V. See docs/develop/process.md.
"""

from typing import Generic, NamedTuple, TypeVar

import msgspec

from engine.api import EngineRequest, FinishReason, Lane, RequestOutput
from engine.client import EngineInfo, EngineState, EngineStats, LoadReport
from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.machine.child import HEADER, framed
from engine.machine.facts import Resources
from engine.process.suspects import START

Layers = tuple[int, int]
WHOLE, LEADER, FOLLOWER = "whole", "leader", "follower"
"""The roles of an engine. The leader schedules the steps of a pipeline and computes its first layers."""


class Past(NamedTuple):
    """The K and V of a request's first `num_tokens` tokens, in `units` in the order of its block table."""

    request_id: str
    num_tokens: int
    units: tuple[int, ...]


class Part(NamedTuple):
    """Some layers of a past. `units`: their units on the engine that holds them."""

    request_id: str
    units: tuple[int, ...]
    layers: Layers


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages, and of the orders that a message holds."""


class Hold(Message, frozen=True):
    """Run no step from the answer until `Go`."""

    closes: bool  # also refuse new requests, because the engine becomes the follower


class Meet(Message, frozen=True):
    """Connect to the other engine through the socket at `path`."""

    path: str
    listens: bool  # whether this engine listens; the other engine connects


class Stall(Message, frozen=True):
    """Stop all requests with their pasts in place. The answer holds the pasts in the first `num_units` units.

    Requests without such a past start over.
    """

    num_units: int


class Detach(Message, frozen=True):
    """Remove all requests. The answer holds their pasts, which stay intact until `Reform`."""


class Reform(Message, frozen=True):
    """Exchange parts of pasts with the other engine, then resize to some layers and units.

    Stopped requests keep their units.
    """

    keeps: tuple[Part, ...]  # parts that move to other units of this engine
    gives: tuple[Part, ...]  # parts to send to the other engine
    gets: tuple[Part, ...]  # parts to receive
    first: bool  # whether this engine sends before it receives
    layers: Layers | None  # layers to keep; None: load all layers
    num_units: int
    schedules: bool = True  # whether the core of this engine allocates the units


class Attach(Message, frozen=True):
    """Add requests in this order. The answer holds the units for their pasts."""

    requests: tuple[tuple[EngineRequest, int], ...]  # with the tokens of the past to come; ignored for stopped requests


class Deliver(Message, frozen=True):
    """Make a running leader complete the stalled requests, one after another, while other requests run."""

    own: tuple[Past, ...]  # pasts of its own, whose kept parts go to the follower
    attached: tuple[Past, ...]  # pasts that the follower has kept


class Go(Message, frozen=True):
    """Run steps again. A whole engine first writes the exchanged parts of `pasts` into their units."""

    role: str
    pasts: tuple[Past, ...] = ()


class Retire(Message, frozen=True):
    """Make a running leader allocate only the first `num_units` units.

    The answer comes once the other units are free, or after a timeout with the pasts that still use them.
    """

    num_units: int


class Prepare(Message, frozen=True):
    """Load the absent layers into the memory behind the first `num_units` units, which is free, while steps run."""

    num_units: int


class Dissolve(Message, frozen=True):
    """Make a held leader end the pipeline, and make the follower wait for that."""


class Reset(Message, frozen=True):
    """Become a whole engine again from any state, and compute the open requests again."""

    num_units: int
    known: tuple[str, ...]  # ids of the gateway's open requests; others are dropped
    requests: tuple[EngineRequest, ...]  # requests to resume if they are not here


Order = (
    Hold | Meet | Stall | Detach | Reform | Attach | Deliver | Go | Retire | Prepare | Dissolve | Reset
)  # fmt: skip


MAX_FRAME = 1 << 28
"""Maximum bytes of a frame; far above the longest prompts that fit into one HTTP body."""


# gateway to engine


class Launch(Message, frozen=True):
    """The first message to a process: the model to load and the place to run."""

    config: EngineConfig
    log_level: str = "info"
    recorder: int | None = None  # inherited descriptor of the flight recorder's memory
    place: Resources = Resources()
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
    Launch | Begin | Submit | Resume | Abort | SetLane | AskStats | Regroup | Shutdown
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
    cause: str = START  # a name in `engine.process.suspects`


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
    """The process is about to kill itself. `cause`: a name in `engine.process.suspects`."""

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
