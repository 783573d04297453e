"""A request inside the core, which owns it; nobody else changes it. What a caller sees of one is in `engine.api`."""

import enum
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.api import EngineRequest, RequestClass, RequestTimes
from engine.cache.blocks import CacheMap
from engine.pooling import Pooling

MAX_RUN = 33
"""Known tokens of an answer that are computed at once like a decode."""


class RequestStatus(enum.Enum):
    """Where a request stands; `TRANSITIONS` is the whole table of legal changes."""

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

    `num_computed_tokens` is the one progress counter: it advances when a chunk is *scheduled*; `num_confirmed_tokens`
    follows in `update`, and a failed step rewinds to it. `num_placeholders` counts sampled tokens still in flight.
    `not_before`: until then it does not start beside online work, which would only evict
    it again (seconds). `aside`: it is kept out of ordinary steps (see `engine.scheduling.recovery`).
    `masked_from`: a mask may limit what is sampled at this position and behind it.
    `num_expected_hits`: tokens of its prompt that were in the prefix cache when it came. `withholds`: its client reads
    the whole answer at once, so tokens are told in groups: `num_told` were told, the next ones once there are more than
    `quiet_until`.
    `most_blocks`: the most blocks that it holds at once (see `SchedulerConfig`).
    """

    spec: EngineRequest
    times: RequestTimes
    arrival_order: int
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_confirmed_tokens: int = 0
    num_placeholders: int = 0
    cache_map: CacheMap = field(default_factory=CacheMap)
    row: int = -1
    epoch: int = 0
    last_step: int = -1
    num_cached_tokens: int = 0
    num_expected_hits: int = 0
    num_preemptions: int = 0
    not_before: float = -math.inf
    aside: bool = False
    beside_offline: bool = False
    quiet_until: int = 0
    num_told: int = field(init=False)
    withholds: bool = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_total_tokens: int = field(init=False)
    masked_from: int = field(init=False)
    most_blocks: int = sys.maxsize

    def __post_init__(self) -> None:
        self.token_ids = list(self.spec.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = self.num_prompt_tokens + self.spec.sampling.max_tokens
        self.masked_from = self.num_prompt_tokens + self.spec.sampling.masked_from
        self.withholds = self.spec.final_only and self.request_class is RequestClass.OFFLINE
        resumed = self.spec.resumed
        if resumed is not None and resumed.token_ids:
            self.token_ids.extend(resumed.token_ids)
            self.num_cached_tokens = resumed.num_cached_tokens
            self.num_preemptions = resumed.num_preemptions
            self.status = RequestStatus.PREEMPTED
        self.num_told = len(self.token_ids) - (0 if resumed is None else resumed.num_withheld)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def request_class(self) -> RequestClass:
        return self.spec.request_class

    @property
    def starts_over(self) -> bool:
        """Whether it is computed from its first token on, whatever is stored: a mean is of all hidden states."""
        return self.spec.pooling is Pooling.MEAN

    @property
    def num_output_tokens(self) -> int:
        """Confirmed output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Known tokens plus those in flight."""
        return len(self.token_ids) + self.num_placeholders

    @property
    def num_left_tokens(self) -> int:
        """Output that it may still give."""
        return self.max_total_tokens - len(self.token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens to compute up to the next new one; what is kept of it, or was in the prefix cache when it came, is
        not."""
        kept = self.num_computed_tokens or self.cache_map.num_parked_tokens or self.num_expected_hits
        return max(1, len(self.token_ids) - kept)

    def num_blocks(self, block_size: int) -> int:
        """Blocks of all its known tokens, and of the next one if any may follow; as many of them as it holds at once
        (`SchedulerConfig.most_blocks`)."""
        return min(self._all_blocks(block_size), self.most_blocks)

    def num_missing_blocks(self, block_size: int, known: int, gone: int) -> int:
        """What it has still to get of them where it has the first `known`, of which `gone` were given back."""
        return min(self._all_blocks(block_size) - known, self.most_blocks - (known - gone))

    def _all_blocks(self, block_size: int) -> int:
        return (len(self.token_ids) - (self.spec.pooling is not None)) // block_size + 1

    @property
    def num_pending_tokens(self) -> int:
        """Return the known tokens to compute next, those in flight included: 1 for a decode, more for a prompt or for a
        run of forced tokens, 0 where no further token may follow."""
        pending = len(self.token_ids) + self.num_placeholders - self.num_computed_tokens
        return pending if pending != 1 or self.num_computed_tokens + 1 < self.max_total_tokens else 0

    @property
    def is_answering(self) -> bool:
        """Return whether pending tokens are as urgent as a decode: a few tokens of the answer that its grammar or its
        thinking budget forced."""
        return self.times.first_token is not None and self.num_pending_tokens <= MAX_RUN

    def tell(self, together: int = 1) -> tuple[int, ...]:
        """Output tokens that were not told yet; the next ones wait until there are so many, or no more may follow."""
        told, self.num_told = self.num_told, len(self.token_ids)
        self.quiet_until = min(self.num_told + together, self.max_total_tokens) - 1
        return tuple(self.token_ids[told:])

    def move_to(self, status: RequestStatus) -> None:
        assert status in TRANSITIONS[self.status], f"illegal transition {self.status} -> {status}"
        self.status = status


def due(requests: Iterable[Request]) -> tuple[list[Request], list[Request]]:
    """Return the running requests whose next token is to be computed, and those with more pending tokens, each in the
    given order. The same as `num_pending_tokens` of each, without a call: a step looks at hundreds."""
    decodes: list[Request] = []
    prompts: list[Request] = []
    for request in requests:
        computed = request.num_computed_tokens
        pending = len(request.token_ids) + request.num_placeholders - computed
        if pending > 1:
            prompts.append(request)
        elif pending == 1 and computed + 1 < request.max_total_tokens:
            decodes.append(request)
    return decodes, prompts


def leading_decodes(requests: Sequence[Request]) -> tuple[list[Request], int]:
    """Return the decodes before the first request with more pending tokens, and how many requests precede it."""
    decodes, prompts = due(requests)
    if not prompts:
        return decodes, len(requests)
    count = requests.index(prompts[0])
    return due(requests[:count])[0], count
