"""Messages between the first rank and the others, one MessagePack object each. Torch-free.

The first rank sends the load request, then the steps.
"""

import msgspec

from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.execution.layout import RankStep
from engine.limits import Limits


class RankMessage(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of all messages except steps."""


class Join(RankMessage, frozen=True):
    """First message: what to load, as which rank, and the port of the rendezvous store.

    `limits` are those of the first rank before anything was loaded.
    """

    config: EngineConfig
    limits: Limits
    rank: int
    port: int
    log_level: str


class Reached(RankMessage, frozen=True):
    """To the first rank: a stage of the start is done; the next begins when all ranks have reported it."""

    stage: str


class RankFailed(RankMessage, frozen=True):
    """To the first rank: this rank cannot continue and ends."""

    error: ErrorInfo


FromRank = Reached | RankFailed


encode = msgspec.msgpack.Encoder().encode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_step = msgspec.msgpack.Decoder(RankStep).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
