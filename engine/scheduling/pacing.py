"""Decides when the next step may start: offline steps pause on an idle server, and steps may be scheduled ahead."""

import math

from engine.api import NEVER, RequestClass
from engine.scheduling.objective import StepObjective
from engine.scheduling.state import SchedulerState


class OfflineRest:
    """Pauses between offline steps that run without online work.

    No offline step starts before `until` (None: no pause).
    """

    def __init__(self) -> None:
        self.until: float | None = None
        self._online_at = -math.inf

    def online_came(self, now: float) -> None:
        """Record the arrival of an online request."""
        self._online_at = now

    def online_runs(self, now: float) -> None:
        """Record that online work is present."""
        if not math.isinf(self._online_at):
            self._online_at = now

    def rests(self, objective: StepObjective, now: float, *, in_flight: bool) -> bool:
        """Return whether offline work pauses now.

        It pauses only within `objective.awaited` seconds after online work. The duration of a step in flight determines
        the next pause, so offline work pauses until that step ends.
        """
        if math.isinf(objective.wait) or now - self._online_at >= objective.awaited:
            self.until = None
        elif in_flight:
            return True
        elif self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None

    def stepped(self, objective: StepObjective, seconds: float | None, now: float) -> None:
        """Set the pause after a step of `seconds` with only offline work; None for any other or failed step."""
        rest = 0.0 if seconds is None else objective.rest_after(seconds)
        self.until = now + rest if rest > 0.0 else None


MOST_ROWS = 4
"""Maximum number of running requests with which scheduling ahead pays when host and device share CPU cores."""


def may_run_ahead(state: SchedulerState) -> bool:
    """Return whether the next step may be scheduled before the steps in flight are updated.

    A GPU must not wait for the host. On a CPU both use the same cores, so scheduling ahead pays only with few rows. An
    arrival then waits for one step more, so only short steps of decodes qualify, and only if no other request exists.
    Grammars and thinking budgets need the last token, so their requests cannot be scheduled ahead. A step with drafts
    has no step behind it, because the number of its tokens is unknown; and drafts need the last token.
    """
    if not state.in_flight:
        return True
    if state.speculation is not None and (any(step.guesses for step in state.in_flight) or _awaits_drafts(state)):
        return False
    longest, running = state.config.ahead_seconds, state.running[RequestClass.ONLINE]
    if longest == math.inf:
        return True
    return (
        len(running) <= MOST_ROWS
        and len(running) == len(state.requests)
        and all(request.num_pending_tokens == 1 and request.spec.sampling.masked_from == NEVER for request in running)
        and all((step.output.predicted_latency or math.inf) <= longest for step in state.in_flight)
    )


def _awaits_drafts(state: SchedulerState) -> bool:
    """Return whether a step that waits for the tokens in flight is likely to have drafts."""
    assert state.speculation is not None
    return state.speculation.is_promising([request for group in state.running.values() for request in group])
