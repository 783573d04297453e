"""When the next step may start: offline work pauses while it is alone, and a step may be scheduled behind another."""

import math
from collections.abc import Iterable

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.objective import StepObjective
from engine.scheduling.results import InFlight
from engine.scheduling.state import SchedulerState


class OfflineRest:
    """`until`: nothing offline starts before then; None: there is no rest."""

    def __init__(self) -> None:
        self.until: float | None = None
        self._online_at = -math.inf

    def online_came(self, now: float) -> None:
        """An online request has arrived."""
        self._online_at = now

    def online_runs(self, now: float) -> None:
        """There is online work."""
        if not math.isinf(self._online_at):
            self._online_at = now

    def rests(self, objective: StepObjective, now: float, *, in_flight: bool) -> bool:
        """Whether offline work rests now. What the step in flight takes decides on the next one."""
        if math.isinf(objective.wait) or now - self._online_at >= objective.awaited:
            self.until = None
        elif in_flight:
            return True
        elif self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None

    def stepped(self, objective: StepObjective, seconds: float | None, now: float) -> None:
        """A step has ended that took so long and was offline work alone; None: it was not, or failed."""
        rest = 0.0 if seconds is None else objective.rest_after(seconds)
        self.until = now + rest if rest > 0.0 else None


MOST_ROWS = 4
"""Running requests with which the host's work is hidden behind a step of its own cores."""


def may_run_ahead(state: SchedulerState, num_requests: int, in_flight: Iterable[InFlight]) -> bool:
    """A GPU must not wait for the host. Where both are the same cores, the host's work is worth hiding behind a step
    only while few rows leave cores for it; and since what arrives meanwhile waits for one step more, only behind short
    steps of decodes, with nothing else to be done. What grammars and thinking budgets allow next is made from the last
    token, so nothing is ahead of it. `num_requests`: of the core, whatever they do."""
    longest = state.config.ahead_seconds
    if longest == math.inf:
        return True
    running = state.running[RequestClass.ONLINE]
    return (
        len(running) <= MOST_ROWS
        and len(running) == num_requests
        and all(request.num_pending_tokens == 1 and not _is_masked(request) for request in running)
        and all((step.output.predicted_latency or math.inf) <= longest for step in in_flight)
    )


def _is_masked(request: Request) -> bool:
    sampling = request.spec.sampling
    return sampling.grammar is not None or sampling.thinking is not None
