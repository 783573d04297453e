"""Measure each engine's rate of offline work, and limit the batch lines that it holds accordingly.

The rate depends on the online requests that the engine serves. It is measured between two load reports if batch lines
were waiting at both.
"""

from collections.abc import Mapping

from engine.api import LoadReport

SPAN_SECONDS = 1.0
WEIGHT = 0.3
"""Weight of a new measurement in the moving average."""
LEAST_SHARE = 0.25
"""Minimum share of lines relative to the mean, so that an engine with many chats is still measured."""


class Harvest:
    """The rate of one engine in offline tokens per second; 0: unknown."""

    def __init__(self) -> None:
        self.rate = 0.0
        self._since: LoadReport | None = None

    def hear(self, report: LoadReport | None) -> None:
        """Update the rate if the report is at least `SPAN_SECONDS` later than the last one used."""
        since = self._since
        if report is None or since is None or report.offline_tokens < since.offline_tokens or report.time < since.time:
            self._since = report  # the first report of a process
            return
        seconds = report.time - since.time
        if seconds < SPAN_SECONDS:
            return
        if since.offline_waits and report.offline_waits:
            rate = (report.offline_tokens - since.offline_tokens) / seconds
            self.rate = rate if not self.rate else self.rate + WEIGHT * (rate - self.rate)
        self._since = report


def shares(rates: Mapping[int, float]) -> dict[int, float]:
    """Return each engine's share of the lines; the sum is 1. An unknown rate counts as the mean of the others."""
    known = [rate for rate in rates.values() if rate > 0.0]
    mean = sum(known) / len(known) if known else 1.0
    filled = {engine: max(rate or mean, LEAST_SHARE * mean) for engine, rate in rates.items()}
    total = sum(filled.values())
    return {engine: rate / total for engine, rate in filled.items()}


def windows(part: Mapping[int, float], lines: int) -> dict[int, int]:
    """Return the maximum lines that each engine holds, by its share of `lines`."""
    return {engine: max(1, round(share * lines)) for engine, share in part.items()}
