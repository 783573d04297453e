"""Measurements of one choice, the source of metrics, the request log and traces.

They contain token counts and times, but no tokens or texts. Output times are on the engine's clock; `clock` only
measures how long a client has waited since the last output.

The engine time of a request is set once when it ends, for bills. A request is charged the predicted time of its tokens,
but all requests together no more than the time that the engines have had. Later predictions do not change a charge.
"""

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.api import EngineRequest, FinishReason, RequestOutput, RequestTimes
from engine.client import EngineStats

CLIENT_LEFT = 499
"""Status of a response whose client disconnected."""


@dataclass(slots=True)
class Account:
    """Measurements of one choice. Times are in seconds."""

    request: EngineRequest
    response_id: str
    index: int
    clock: Callable[[], float] = time.monotonic
    times: RequestTimes | None = None
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    """Times between consecutive outputs with tokens."""
    evicted_gaps: list[int] = field(default_factory=list)
    """Indices into `gaps` of the gaps during which the request was preempted."""
    evicted_before_token: bool = False
    """The request was preempted before its first token."""
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    beside_offline: bool = False
    """See RequestOutput."""
    finish: FinishReason | None = None
    status: int = 200
    """HTTP status; for an error within a stream, the status that a non-streamed response would have."""
    seconds: float = 0.0
    """Time from creation to the end."""
    quiet: float = 0.0
    """Time from the last output with tokens, or from creation, to the end."""
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
        """Mean seconds per token after the first, also known for an answer that was emitted at once."""
        times = self.times
        if times is None or times.first_token is None or times.last_token is None or self.num_tokens < 2:
            return None
        return (times.last_token - times.first_token) / (self.num_tokens - 1)

    def observe(self, output: RequestOutput) -> float | None:
        """Record an output; return the gap in seconds since the last output with tokens, if there is one."""
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
        """Record the end of the choice."""
        now = self.clock()
        self.finish, self.status = finish, status
        self.seconds, self.quiet = now - self._begun, now - self._last_seen


CARRY_SECONDS = 600.0
"""Time of an engine that requests may be charged for later, because many end together after a long run."""


class EngineTime:
    """Args:

    stats: current statistics of the engines, with the predicted cost of tokens.
    clock: monotonic, in seconds.
    """

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._looked_at = clock()
        self._uncharged = 0.0

    def charge(self, computed_tokens: int, output_tokens: int) -> int:
        """Return the engine time in microseconds of a request that ended; 0 without a latency model."""
        stats, now = self._stats(), self._clock()
        engines = max(1, len(stats.engines))  # the costs are those of all engines side by side
        passed = engines * (now - self._looked_at)
        self._uncharged, self._looked_at = min(self._uncharged + passed, CARRY_SECONDS * engines), now
        if stats.token_costs is None:
            return 0
        micros = int(min(engines * stats.token_costs.of(computed_tokens, output_tokens), self._uncharged) * 1e6)
        self._uncharged -= micros / 1e6
        return micros
