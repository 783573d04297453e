"""A rest that offline work, while it is alone, gives whoever may arrive (see `StepObjective.wait`)."""

import math

from engine.scheduling.objective import StepObjective


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
