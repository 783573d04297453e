"""A step as the first rank sends it to the others. Torch-free, and without the server's libraries."""

from dataclasses import dataclass, replace

import numpy as np

from engine.api import SamplingParams
from engine.execution.layout import chunk_array, token_places
from engine.execution.rows import RowTable
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
