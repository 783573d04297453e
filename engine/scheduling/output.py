"""The contract between the control plane and the data plane.

`SchedulerOutput` is the frozen decision for one step; `ModelRunnerOutput` is its result. A `ModelRunner` turns one into
the other. The runner owns the per-row state (tokens, block tables, sampling state) and updates it in place:

1. Forget the rows in `released_rows`.
2. Write `new_requests` whole into their rows, recurrent state from its slot included. A resumed request is new again.
3. Extend block tables with the `appended` entries.
4. Overwrite block-table entries with the `replaced` ones.
5. Run `operations`, which copy and convert the content of units, in order.
6. Write the drafted tokens of `drafts` to the rows.
7. Run the chunks. For every chunk with `sample`, sample the token at position `start + length` and write it into the
   row's tokens, so that a later chunk may use it before the core has received it.

A draft is verified by one chunk of length 1 per token, behind the row's decode in the same step. A drafted token is
right if the chunk before it samples it. Samples behind a wrong token are ignored; later chunks overwrite their cache.
No step is scheduled ahead of a step with drafts.

Recurrent states: before step 1, `parked_states` are copied from device slots to host slots (both numbered from 0).
While a chunk runs, its `saved_states` are copied; a saved state may lie inside a chunk. In a new request's `state`,
host slots are numbered after the device's.

Rows hold only device entries, any mix of KV and HIDDEN. Items 1-4 change tables and item 5 changes units. An operation
needs no row: a parked request is swapped out of its units. A row may name the target of an operation of the same step.
When a step fails, the targets of its operations are undefined.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.api import SamplingParams, TokenLogprobs
from engine.cache.blocks import CacheEntry, CacheOperation
from engine.forms import Pooling
from predictor.features import BatchFeatures

INVALID_TOKEN = -1
"""Result token: the logits were not finite."""
LATE_TOKEN = -2
"""Result token: the grammar mask was late, so the row sampled no token. The next step samples it."""
UNMASKED_TOKEN = -3
"""Result token: the grammar cannot continue. The request ends with an error."""


class Chunk(NamedTuple):
    """Tokens [start, start + length) of the request in `row`. A decode is a chunk of length 1 at the end."""

    row: int
    start: int
    length: int
    sample: bool


class NewRequest(NamedTuple):
    """A request written whole into a row.

    Attributes:
        token_ids: Prompt and all known output tokens.
        entries: Cache entries of the request's blocks, prefix hits included.
        pooling: If set, no token is sampled; the last chunk returns a vector.
        adapter: See `EngineRequest`.
        state: Slot with the recurrent state before the first chunk; -1 if there is none.
        is_long: See `Request`.
    """

    row: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    entries: tuple[CacheEntry, ...]
    pooling: Pooling | None = None
    adapter: int = 0
    state: int = -1
    is_long: bool = False


class AppendedEntries(NamedTuple):
    """Blocks appended to the block table of `row`, in token order."""

    row: int
    entries: tuple[CacheEntry, ...]


class ReplacedEntry(NamedTuple):
    """Entry that block number `block` of `row` uses from this step on; it holds the same tokens."""

    row: int
    block: int
    entry: CacheEntry


class Draft(NamedTuple):
    """Guessed tokens of `row` from position `start` on, which this step verifies."""

    row: int
    start: int
    token_ids: tuple[int, ...]


class SavedState(NamedTuple):
    """Copy the recurrent state after the first `num_tokens` tokens of `row` to `slot`.

    The last saved token is in the row's chunk of this step.
    """

    row: int
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: decodes first, then prefill chunks.

    The chunks may read or write at most `scratch_blocks` (see the runner) distinct HIDDEN blocks.

    Attributes:
        predicted_latency: Seconds; None without a latency model.
        features: Sums over the chunks and their cache work: the input of the latency model.
        spare: Seconds by which the step may exceed its prediction without breaking an objective.
    """

    step_id: int
    chunks: tuple[Chunk, ...]
    new_requests: tuple[NewRequest, ...] = ()
    appended: tuple[AppendedEntries, ...] = ()
    released_rows: tuple[int, ...] = ()
    predicted_latency: float | None = None
    replaced: tuple[ReplacedEntry, ...] = ()
    operations: tuple[CacheOperation, ...] = ()
    saved_states: tuple[SavedState, ...] = ()
    parked_states: tuple[tuple[int, int], ...] = ()
    drafts: tuple[Draft, ...] = ()
    features: BatchFeatures = field(default_factory=BatchFeatures)
    spare: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of one step.

    Attributes:
        token_ids: One per sampling chunk, in order, or INVALID_TOKEN, LATE_TOKEN or UNMASKED_TOKEN.
        logprobs: One per sampling chunk; None for a request without logprobs.
        latency: Measured step time in seconds.
        forced: Tokens that a grammar or a thinking budget forces after the i-th sampled token, by i. The row already
            contains them. A later step in flight may sample such a token; that sample is ignored.
        pooled: Vector of a pooling request as float32 bytes, by the index of its last chunk; empty if not finite.
        trial: The step ran in an experimental way, so its latency must not be used for predictions.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    latency: float
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    trial: bool = False


Collect = Callable[[], ModelRunnerOutput]
"""Wait for a launched step and return its result."""


class ModelRunner(Protocol):
    """The data plane.

    One thread launches steps in order. Any thread collects the results, in the same order, with at most
    `pipeline_depth` later steps launched.
    """

    def launch(self, output: SchedulerOutput) -> Collect:
        """Start a step; it may complete in this call or only when its result is collected.

        Both calls raise the error that makes the step fail. Its rows are undefined then and must be written whole
        again.
        """
