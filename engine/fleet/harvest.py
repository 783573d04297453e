"""How fast each engine of several does offline work beside its online work, and how many lines it may hold for it.

What one harvests depends on the chats that it happens to serve, so it is measured: of each report and an earlier one,
while lines were waiting in between. Pure; time comes with the reports.
"""

from collections.abc import Mapping

from engine.api import LoadReport

SPAN_SECONDS = 1.0
WEIGHT = 0.3
"""Of a new measurement."""
LEAST_SHARE = 0.25
"""Of an equal part: an engine with busy chats gets lines all the same, or nobody would learn when they end."""


class Harvest:
    """Offline tokens a second of one engine; 0: not known."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: LoadReport | None = None

    def hear(self, report: LoadReport | None) -> None:
        """Measure, if the report is far enough from the last one that was measured by."""
        since = self._since
        if report is None or since is None or report.offline_tokens < since.offline_tokens or report.time < since.time:
            self._since = report  # a process of its own
            return
        seconds = report.time - since.time
        if seconds < SPAN_SECONDS:
            return
        if since.offline_waits and report.offline_waits:
            rate = (report.offline_tokens - since.offline_tokens) / seconds
            self.rate = rate if not self.rate else self.rate + WEIGHT * (rate - self.rate)
        self._since = report


def shares(rates: Mapping[int, float]) -> dict[int, float]:
    """What part of all lines each engine gets; together 1. One of unknown rate counts like the others on average."""
    known = [rate for rate in rates.values() if rate > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    filled = {engine: max(rate or mean, LEAST_SHARE * mean) for engine, rate in rates.items()}
    total = sum(filled.values())
    return {engine: rate / total for engine, rate in filled.items()}


def windows(part: Mapping[int, float], lines: int) -> dict[int, int]:
    """How many of `lines` each engine may hold at once, by its share."""
    return {engine: max(1, round(share * lines)) for engine, share in part.items()}
