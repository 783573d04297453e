"""What the first rank and the others say to each other: one message of MessagePack for each of a link's. Torch-free.

The first one says what to load, and then step after step (`engine.execution.ranks.step`).
"""

import msgspec

from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.execution.ranks.step import Step
from predictor.limits import Limits


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything else that is sent."""


class Join(Message, frozen=True):
    """The first message: what to load, as which of how many ranks, and where the store is that they meet at. `limits`:
    those of the first rank before anything was loaded."""

    config: EngineConfig
    limits: Limits
    rank: int
    port: int
    log_level: str


class Reached(Message, frozen=True):
    """To the first rank: a stage of the start is done; the next one begins when all have said so."""

    stage: str


class Failed(Message, frozen=True):
    """To the first rank: this one cannot go on, and ends."""

    error: ErrorInfo


FromRank = Reached | Failed

encode = msgspec.msgpack.Encoder().encode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_step = msgspec.msgpack.Decoder(Step).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
