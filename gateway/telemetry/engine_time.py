"""Engine time of requests, set once when they end, for bills.

A request is charged the predicted time of its tokens, but all requests together no more than the time that the engines
have had. Later predictions do not change a charge.
"""

import time
from collections.abc import Callable

from engine.api import EngineStats

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
