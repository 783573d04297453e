"""What one choice asked for and got, measured as its outputs come; metrics and the request log are made of it.

Holds token counts and times, never a token or a text. Times of outputs are on the engine's clock; `clock` here only
measures how long a client waited for what never came.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.api import EngineRequest, FinishReason, RequestOutput, RequestTimes

CLIENT_LEFT = 499
"""The status of an answer that nobody waited for."""


@dataclass(slots=True)
class Account:
    """One choice of an answer. `gaps` are seconds between its outputs with tokens; `evicted_gaps` the numbers of those
    in which it was preempted, `evicted_before_token`: it was so before its first token.

    `status`: what HTTP says of it; of a stream that had begun, what it would have said. `beside_offline`: see
    RequestOutput.
    """

    request: EngineRequest
    response_id: str
    index: int
    clock: Callable[[], float] = time.monotonic
    times: RequestTimes | None = None
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    evicted_gaps: list[int] = field(default_factory=list)
    evicted_before_token: bool = False
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    beside_offline: bool = False
    finish: FinishReason | None = None
    status: int = 200
    seconds: float = 0.0
    quiet: float = 0.0
    _begun: float = 0.0
    _last_token: float | None = None
    _last_seen: float = 0.0

    def __post_init__(self) -> None:
        self._begun = self._last_seen = self.clock()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        times = self.times
        return None if times is None or times.first_token is None else times.first_token - times.arrival

    @property
    def queued(self) -> float | None:
        """Seconds from arrival to the first step."""
        times = self.times
        return None if times is None or times.first_scheduled is None else times.first_scheduled - times.arrival

    @property
    def longest_gap(self) -> float | None:
        return max(self.gaps, default=None)

    @property
    def mean_gap(self) -> float | None:
        """Seconds for each token behind the first; known also of an answer that came in one piece."""
        times = self.times
        if times is None or times.first_token is None or times.last_token is None or self.num_tokens < 2:
            return None
        return (times.last_token - times.first_token) / (self.num_tokens - 1)

    def observe(self, output: RequestOutput) -> float | None:
        """Take in an output; returns the gap that it ended, if it did."""
        self.times = times = output.times
        self.num_cached_tokens = output.num_cached_tokens
        self.beside_offline = self.beside_offline or output.beside_offline
        evicted = output.num_preemptions > self.num_preemptions
        self.num_preemptions = output.num_preemptions
        now = times.last_token
        if now is None or not output.token_ids:
            return None
        last, self._last_token, self._last_seen = self._last_token, now, self.clock()
        if last is None:
            self.evicted_before_token = output.num_preemptions > 0
            return None
        if evicted:
            self.evicted_gaps.append(len(self.gaps))
        self.gaps.append(now - last)
        return now - last

    def end(self, finish: FinishReason, status: int) -> None:
        """Nothing more comes. `quiet` becomes what a client that left had waited for its next token."""
        now = self.clock()
        self.finish, self.status = finish, status
        self.seconds, self.quiet = now - self._begun, now - self._last_seen
