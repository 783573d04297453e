"""What the first rank and the others say to each other: one message of MessagePack for each of a link's. Torch-free."""

from dataclasses import replace

import msgspec
import numpy as np

from engine.api import SamplingParams
from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.execution.layout import chunk_array, token_places
from engine.execution.rows import RowTable
from engine.scheduling.output import SchedulerOutput
from predictor.limits import Limits

PLANNED, LOADED, MADE = "planned", "loaded", "made"
"""The stages of a start: what will run is decided; a rank's weights are there; its cache and its graphs are."""
_NO_WISHES = SamplingParams(1, temperature=0.0)


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Base of everything that is sent."""


# from the first rank


class Join(Message, frozen=True):
    """The first message: what to load, as which of how many ranks, and where the store is that they meet at. `limits`:
    those of the first rank before anything was loaded."""

    config: EngineConfig
    limits: Limits
    rank: int
    port: int
    log_level: str


class Step(Message, frozen=True):
    """One step: what changes in rows and cache, its chunks, and their tokens (int32, in the order of the chunks), a
    negative one where only devices know it yet. Nobody else's business: what is sampled, and how."""

    output: SchedulerOutput
    token_ids: bytes

    @classmethod
    def of(cls, output: SchedulerOutput, rows: RowTable) -> "Step":
        """`rows` know the step already."""
        if output.new_requests:
            plain = tuple(
                each._replace(request_id="", token_ids=(), sampling=_NO_WISHES, pooling=None)
                for each in output.new_requests
            )
            output = replace(output, new_requests=plain)
        where = token_places(chunk_array(output.chunks))
        return cls(output, rows.tokens[where].astype(np.int32).tobytes())


ToRank = Join | Step


# to the first rank


class Reached(Message, frozen=True):
    """A stage of the start is done; the next one begins when all have said so."""

    stage: str


class Failed(Message, frozen=True):
    """This rank cannot go on, and ends."""

    error: ErrorInfo


FromRank = Reached | Failed

encode = msgspec.msgpack.Encoder().encode
decode_for_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
