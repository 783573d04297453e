"""Whether the next step is scheduled behind one that is still being computed."""

import math
from collections.abc import Iterable

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.results import InFlight
from engine.scheduling.state import SchedulerState

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
