"""The two values that cross between the control plane and the data plane.

`SchedulerOutput` is one step's whole decision, frozen; `ModelRunnerOutput` is what the device answered. The runner owns
the per-row state (tokens, block tables, sampling state) and updates it in place from deltas:

1. rows in `released_rows` are forgotten,
2. `new_requests` are written whole into their rows (a preempted request that resumes is new again),
3. `appended` entries extend block tables,
4. the chunks run; for every chunk with `sample` the runner samples the token of position `start + length` and writes
   it into the row's tokens, so that a later chunk of the row may refer to it before the core has seen it.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.cache_map import CacheEntry
from engine.request import SamplingParams, TokenLogprobs

INVALID_TOKEN = -1
"""Stands for a token that could not be sampled (NaN logits)."""


class Chunk(NamedTuple):
    """Tokens [start, start + length) of the request in `row`. A decode is a chunk of length 1 at the end."""

    row: int
    start: int
    length: int
    sample: bool


class NewRequest(NamedTuple):
    """A request whole: `token_ids` = prompt + outputs known so far, `entries` = its cache map with prefix hits."""

    row: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    entries: tuple[CacheEntry, ...]


class AppendedEntries(NamedTuple):
    """Blocks appended to the block table of `row`, in token order."""

    row: int
    entries: tuple[CacheEntry, ...]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: decodes first, then prefill chunks. `predicted_latency` in seconds (None without a predictor)."""

    step_id: int
    chunks: tuple[Chunk, ...]
    new_requests: tuple[NewRequest, ...] = ()
    appended: tuple[AppendedEntries, ...] = ()
    released_rows: tuple[int, ...] = ()
    predicted_latency: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """`token_ids` and `logprobs` follow the order of the step's sampling chunks; INVALID_TOKEN marks NaN logits.

    `logprobs[i]` is None where the request did not ask for them. `latency` is the measured step time in seconds.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    latency: float
