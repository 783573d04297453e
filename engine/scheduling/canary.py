"""Whether the engine works at all: a short greedy prompt of ours that runs, alone, after every failed step.

While it fails it is tried again, ever less often; after `SICK_AFTER` failures in a row the engine counts as sick and
should take no work. A state machine with its clock as an argument; it does not know how or where the prompt is run.
"""

from engine.api import EngineRequest, SamplingParams

CANARY_ID = "canary"
SICK_AFTER = 2
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0
"""Seconds between two tries: it doubles from the first to the longest."""


def canary_request(max_model_len: int) -> EngineRequest:
    """A prefill and a decode; on a model of its own tenant, so that no cached block takes the work away."""
    length = max(1, min(8, max_model_len - 2))
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return EngineRequest(CANARY_ID, tuple(range(length)), sampling, cache_salt=b"canary", probe=True)


class Canary:
    """`wanted`: something failed, and nothing else may run before the canary has passed. `due`: when it may run next.
    `sick_since`: since when the engine has been failing at anything; None while it is not known to."""

    def __init__(self) -> None:
        self.wanted = False
        self.due = 0.0
        self.sick_since: float | None = None
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._first_failure = 0.0

    def ask(self, now: float) -> None:
        """A step failed at `now`."""
        self.wanted = True
        self.due = self._first_failure = now

    def failed(self, now: float) -> None:
        """It failed, too."""
        self._failures += 1
        if self._failures >= SICK_AFTER:
            self.sick_since = self._first_failure
            self.due = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def passed(self) -> None:
        self.wanted = False
        self.sick_since = None
        self._failures, self._pause = 0, FIRST_PAUSE
