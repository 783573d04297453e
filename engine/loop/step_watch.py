"""Watches the oldest step in flight: one that runs for far longer than it should is hung.

How long it should take is what the latency model predicted. Time in which the event loop itself did not run (a stopped
process, a sleeping machine) is not held against a step: the limit is waited for in two halves, one after the other.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple


class StepLimits(NamedTuple):
    """Seconds until a step is hung: `factor` × its predicted time, at least `floor`; `unknown` without a prediction."""

    floor: float = 2.0
    factor: float = 20.0
    unknown: float = 60.0

    def limit(self, predicted: float | None) -> float:
        return self.unknown if predicted is None else max(self.floor, self.factor * predicted)


class StepWatch:
    """`on_hung` is called once, with the limit that passed, for a step that has not ended in time."""

    def __init__(self, limits: StepLimits, on_hung: Callable[[float], None]) -> None:
        self._limits = limits
        self._on_hung = on_hung
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, predicted: float | None) -> None:
        """A step begins; `predicted` in seconds, None if nobody knows."""
        self.end()
        limit = self._limits.limit(predicted)
        self._timer = asyncio.get_running_loop().call_later(limit / 2, self._half, limit)

    def end(self) -> None:
        """The step has ended, or there is none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _half(self, limit: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(limit / 2, self._hung, limit)

    def _hung(self, limit: float) -> None:
        self._timer = None
        self._on_hung(limit)
