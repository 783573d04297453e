"""The core's internal request state. Only the core changes it; `engine.api` has the public types."""

import enum
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.api import EngineRequest, RequestClass, RequestTimes
from engine.cache.blocks import CacheMap
from engine.forms import Pooling

MAX_RUN = 33
"""Maximum number of pending tokens of an answer that are scheduled with the urgency of a decode."""


class RequestStatus(enum.Enum):
    """Lifecycle state of a request; `TRANSITIONS` lists every legal change."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the core.

    Attributes:
        num_computed_tokens: Tokens computed or in flight; advances when a chunk is *scheduled*.
        num_confirmed_tokens: Tokens computed by completed steps. A failed step rewinds the request to this count.
        num_placeholders: Sampled tokens still in flight.
        cache_map: Blocks that the request holds.
        num_guessed: Drafted tokens in flight; `num_computed_tokens` includes them.
        row: Row in the model runner; -1 while the request is not running.
        epoch: Increases at each rewind; results of an older epoch are ignored.
        last_step: Newest step that contains the request.
        num_cached_tokens: Prompt tokens found in the cache when the request first started.
        num_expected_hits: Prompt tokens that were in the prefix cache when the request arrived.
        not_before: Earliest time (seconds) to start beside online work after repeated preemptions.
        quarantined: The request is excluded from ordinary steps (see `engine.scheduling.recovery`).
        beside_offline: Offline work ran in a step of the request or while the request waited.
        final_only: The client reads only the complete answer, so tokens are emitted in groups.
        num_emitted: Known tokens, prompt included, when output was last emitted.
        emit_after: With `final_only`, output is emitted once more than this many tokens are known.
        max_total_tokens: Maximum length of prompt and output together.
        masked_from: First token position at which a mask may restrict sampling.
        plain_to: A decode before this token position samples without a mask, an adapter or pooling.
        most_blocks: Maximum number of blocks held at once (see `SchedulerConfig.most_blocks`).
        expected_output: Expected tokens of the answer, for a promise with a deadline.
        is_long: The long factors of longrope apply (see `EngineRequest.is_long`).
    """

    spec: EngineRequest
    times: RequestTimes
    arrival_order: int
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_placeholders: int = 0
    num_guessed: int = 0
    cache_map: CacheMap = field(default_factory=CacheMap)
    row: int = -1
    epoch: int = 0
    last_step: int = -1
    num_cached_tokens: int = 0
    num_expected_hits: int = 0
    num_preemptions: int = 0
    not_before: float = -math.inf
    quarantined: bool = False
    beside_offline: bool = False
    emit_after: int = 0
    num_emitted: int = field(init=False)
    final_only: bool = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    masked_from: int = field(init=False)
    plain_to: int = field(init=False)
    most_blocks: int = sys.maxsize
    expected_output: int = sys.maxsize
    is_long: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.spec.sampling.max_tokens
        self.masked_from = self.num_prompt_tokens + self.spec.sampling.masked_from
        self.plain_to = 0 if self.spec.adapter or self.spec.pooling is not None else self.masked_from
        self.final_only = self.spec.final_only and self.request_class is RequestClass.OFFLINE
        resumed = self.spec.resumed
        if resumed is not None and resumed.token_ids:
            self.token_ids.extend(resumed.token_ids)
            self.num_cached_tokens = resumed.num_cached_tokens
            self.num_preemptions = resumed.num_preemptions
            self.status = RequestStatus.PREEMPTED
        self.num_emitted = len(self.token_ids) - (0 if resumed is None else resumed.num_withheld)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def prefix_root(self) -> bytes:
        return self.spec.prefix_root(is_long=self.is_long)

    @property
    def request_class(self) -> RequestClass:
        return self.spec.request_class

    @property
    def starts_over(self) -> bool:
        """Return whether the request ignores cached tokens, because it needs the hidden states of all tokens."""
        return self.spec.pooling is Pooling.MEAN or self.spec.pooling is Pooling.SCORES

    @property
    def num_output_tokens(self) -> int:
        """Return the number of confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Return the output tokens still expected, at least 1."""
        most = min(self.expected_output + self.num_prompt_tokens, self.max_total_tokens)
        return max(1, most - len(self.token_ids) - self.num_placeholders)

    @property
    def num_expected_tokens(self) -> int:
        """Return the number of known tokens plus those in flight."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_missing_tokens(self) -> int:
        """Return the tokens to compute before the next new token, at least 1, without parked or cached tokens."""
        kept = self.num_computed_tokens or self.cache_map.num_parked_tokens or self.num_expected_hits
        return max(1, len(self.token_ids) - kept)

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks for all known tokens and for the next one if any may follow, at most `most_blocks`."""
        return min(self._all_blocks(block_size), self.most_blocks)

    def num_missing_blocks(self, block_size: int, known: int, gone: int) -> int:
        """Return the blocks still to allocate behind the `known` leading ones, of which `gone` were freed again."""
        return min(self._all_blocks(block_size) - known, self.most_blocks - (known - gone))

    def _all_blocks(self, block_size: int) -> int:
        return (len(self.token_ids) - (self.spec.pooling is not None)) // block_size + 1

    @property
    def num_pending_tokens(self) -> int:
        """Return the known tokens to compute next, tokens in flight included: 1 is a decode, 0 the end.

        0 also while drafted tokens are in flight, because the next position is unknown.
        """
        pending = max(0, len(self.token_ids) + self.num_placeholders - self.num_computed_tokens)
        return pending if pending != 1 or self.num_computed_tokens + 1 < self.max_total_tokens else 0

    @property
    def is_answering(self) -> bool:
        """Return whether the pending tokens are as urgent as a decode: a short run of forced tokens of an answer."""
        return self.times.first_token is not None and self.num_pending_tokens <= MAX_RUN

    def emit(self, together: int = 1) -> tuple[int, ...]:
        """Return the output tokens not yet emitted.

        The next group is emitted after `together` more tokens or at the end of the answer.
        """
        emitted, self.num_emitted = self.num_emitted, len(self.token_ids)
        self.emit_after = min(self.num_emitted + together, self.max_total_tokens) - 1
        return tuple(self.token_ids[emitted:])

    def move_to(self, status: RequestStatus) -> None:
        assert status in TRANSITIONS[self.status], f"illegal transition {self.status} -> {status}"
        self.status = status


def due(requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
    """Split running requests into those whose next token is due and those with more pending tokens, in the given order.

    Equivalent to calling `num_pending_tokens` on each request, but without the call: a step checks hundreds of
    requests.
    """
    decodes = [
        r
        for r in requests
        if len(r.token_ids) + r.num_placeholders - r.num_computed_tokens == 1
        and r.num_computed_tokens + 1 < r.max_total_tokens
    ]
    if len(decodes) == len(requests):
        return decodes, []
    return decodes, [r for r in requests if len(r.token_ids) + r.num_placeholders - r.num_computed_tokens > 1]
