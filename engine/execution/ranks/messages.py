"""Messages between the first rank and the others, one MessagePack object each. Torch-free.

The first rank sends the load request, then the steps.
"""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from engine.api import SamplingParams
from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.execution.layout import chunk_array, token_places
from engine.execution.rows import RowTable
from engine.limits import Limits
from engine.scheduling.output import SchedulerOutput
from predictor.features import BatchFeatures

_NO_WISHES = SamplingParams(1, temperature=0.0)


@dataclass(frozen=True, slots=True)
class RankStep:
    """Changes of rows and cache, chunks, and tokens, without sampling parameters and features.

    Attributes:
        output: The step, with neutral sampling parameters.
        token_ids: int32 tokens in the order of the chunks; negative if only devices know the token.
        whole: Hidden states of all tokens are wanted.
    """

    output: SchedulerOutput
    token_ids: bytes
    whole: bool

    @classmethod
    def of(cls, output: SchedulerOutput, rows: RowTable) -> "RankStep":
        """Create the message from a step that `rows` already include."""
        plain = tuple(
            each._replace(request_id="", token_ids=(), sampling=_NO_WISHES, pooling=None)
            for each in output.new_requests
        )
        output = replace(output, new_requests=plain, features=BatchFeatures())
        chunks = chunk_array(output.chunks)
        tokens = rows.tokens[token_places(chunks)].astype(np.int32).tobytes()
        return cls(output, tokens, whole=bool(rows.pools[chunks[:, 0]].any()))


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
