"""The contract between the control plane and the data plane: two values and one call.

`SchedulerOutput` is one step's whole decision, frozen; `ModelRunnerOutput` is what the device answered; a `ModelRunner`
turns one into the other. It owns the per-row state (tokens, block tables, sampling state) and updates it in place from
deltas:

1. rows in `released_rows` are forgotten,
2. `new_requests` are written whole into their rows (a preempted request that resumes is new again), with the state of
   recurrent layers from its slot,
3. `appended` entries extend block tables,
4. `replaced` entries take the place of others in block tables,
5. `operations` move and convert what lies in units, in their order,
6. the chunks run; for every chunk with `sample` the runner samples the token of position `start + length` and writes
   it into the row's tokens, so that a later chunk of the row may refer to it before the core has seen it. On the way
   `saved_states` are copied: a chunk need not end where a state is kept. Before all, `parked_states` go from slots of
   the device to slots of the host, which are numbered from 0; a new request's `state` counts them behind the device's.

Rows hold device entries only, KV and HIDDEN in any mix. Steps 1-4 touch tables and step 5 touches units: an operation
needs no row (a parked request is swapped out of its units), and a row may name the target of an operation of its own
step. When a step fails, the targets of its operations are in doubt, whatever became of its rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.api import SamplingParams, TokenLogprobs
from engine.cache.blocks import CacheEntry, CacheOperation
from engine.pooling import Pooling
from predictor.features import BatchFeatures

INVALID_TOKEN = -1
"""Stands for a token that could not be sampled (NaN logits)."""
LATE_TOKEN = -2
"""The row sits this step out: its grammar's mask was not there in time. The same token is sampled in its next step."""
UNMASKED_TOKEN = -3
"""The row's grammar cannot go on: its request ends with an error."""


class Chunk(NamedTuple):
    """Tokens [start, start + length) of the request in `row`. A decode is a chunk of length 1 at the end."""

    row: int
    start: int
    length: int
    sample: bool


class NewRequest(NamedTuple):
    """A request whole: `token_ids` = prompt + outputs known so far, `entries` = its cache map with prefix hits.
    With `pooling` no token is sampled: its vector comes with its last chunk. `adapter`: see `EngineRequest`. `state`:
    the slot with what recurrent layers keep of the tokens before its first chunk; -1: it begins, or there are none."""

    row: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    entries: tuple[CacheEntry, ...]
    pooling: Pooling | None = None
    adapter: int = 0
    state: int = -1


class AppendedEntries(NamedTuple):
    """Blocks appended to the block table of `row`, in token order."""

    row: int
    entries: tuple[CacheEntry, ...]


class ReplacedEntry(NamedTuple):
    """Block number `block` of the block table of `row` lies in `entry` from this step on; its tokens are the same."""

    row: int
    block: int
    entry: CacheEntry


class SavedState(NamedTuple):
    """What recurrent layers keep of the first `num_tokens` tokens of `row` goes to `slot`, too. The last of these is in
    the row's chunk of the step."""

    row: int
    num_tokens: int
    slot: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step: decodes first, then prefill chunks.

    `features`: sums over the chunks and their cache work, the input of the latency model. `predicted_latency`: seconds,
    None without a model. `spare`: seconds by which the step may exceed its prediction without breaking the SLO.
    The distinct HIDDEN blocks that the step's chunks read or write must not be more than the runner's `scratch_blocks`.
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
    features: BatchFeatures = field(default_factory=BatchFeatures)
    spare: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """`token_ids` and `logprobs` follow the order of the step's sampling chunks; INVALID_TOKEN marks NaN logits, and
    LATE_TOKEN and UNMASKED_TOKEN say that a grammar gave no mask.

    `logprobs[i]` is None where the request did not ask for them. `latency` is the measured step time in seconds.
    `forced[i]`: the tokens that must follow the i-th, by its grammar or its thinking budget; they stand in the row's
    tokens already, and where a later step in flight samples one of them, what that gives means nothing. `pooled`: by
    the index of the chunk that ends its prompt, the vector of a request with `pooling`, as float32 numbers; empty where
    one is not finite. `trial`: the step was not run as steps are, to see what
    that gives: its latency says nothing about others.
    """

    step_id: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None
    latency: float
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    pooled: Mapping[int, bytes] = field(default_factory=dict)
    trial: bool = False


Collect = Callable[[], ModelRunnerOutput]
"""Waits for a launched step and gives its result."""


class ModelRunner(Protocol):
    """The data plane. Steps are launched one after another from one thread; their results are asked for in the same
    order, from any thread, when at most `pipeline_depth` later steps have been launched."""

    def launch(self, output: SchedulerOutput) -> Collect:
        """Start a step. It may have ended when this returns, or not before the result is asked for.

        Either call raises what makes the step fail; its rows are undefined then, and must be written whole again.
        """
