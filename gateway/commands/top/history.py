"""The snapshots behind `tidemill top`, with rates and latencies derived from them.

A rate is the difference of a counter between two snapshots. Counters are interpolated linearly between snapshots.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

WINDOW = 900.0
"""Seconds of history that are stored."""
MAX_CHATS = 4000

Snapshot = Mapping[str, Any]

FIELDS = frozenset(
    [
        "time",
        "running",
        "waiting",
        "steps",
        "step_seconds",
        "predicted_seconds",
        "leftover_seconds",
        "leftover_used_seconds",
        "computed_tokens",
        "offline_tokens",
        "units",
        "refused",
        "chats",
        "slo",
        "attainment",
        "attainment_target",
        "objectives",
        "latency_budget",
        "breaker",
        "mape",
        "ready",
        "reason",
    ]
)
UNITS = frozenset(("total", "owned", "cached", "hidden_blocks", "host_total", "host_used"))
"""Required keys of a snapshot (FIELDS) and of its `units` (UNITS)."""


def is_complete(snapshot: object) -> bool:
    """Return whether a snapshot has all required keys; another version of the server may send fewer."""
    if not isinstance(snapshot, dict) or not snapshot.keys() >= FIELDS:
        return False
    return isinstance(snapshot["units"], dict) and snapshot["units"].keys() >= UNITS


class History:
    """Snapshots of `/dashboard/history` and `/dashboard/events`, ordered by time, and the chats in them."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.chats: deque[Mapping[str, Any]] = deque(maxlen=MAX_CHATS)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot unless it is already known. A counter that decreased means that the server restarted."""
        if self.snapshots and snapshot["time"] <= self.snapshots[-1]["time"]:
            return
        if self.snapshots and snapshot["computed_tokens"] < self.snapshots[-1]["computed_tokens"]:
            self.snapshots.clear()
        self.snapshots.append(snapshot)
        self.chats.extend(snapshot["chats"])
        oldest = snapshot["time"] - WINDOW
        while len(self.snapshots) > 1 and self.snapshots[1]["time"] < oldest:
            del self.snapshots[0]
        while self.chats and self.chats[0]["time"] < oldest:
            self.chats.popleft()

    @property
    def latest(self) -> Snapshot | None:
        return self.snapshots[-1] if self.snapshots else None

    def span(self) -> float:
        """Return the width of the charts, seconds; it grows with the history."""
        known = self.snapshots[-1]["time"] - self.snapshots[0]["time"] if self.snapshots else 0.0
        return next((width for width in (60.0, 120.0, 300.0, 600.0) if known <= width), WINDOW)

    def rates(self, cells: int, span: float) -> tuple[list[float | None], list[float | None]]:
        """Return online and offline tokens/s in `cells` equal parts of the last `span` seconds; None where unknown.

        Prompt and output tokens count when they are computed.
        """
        total, offline = self._growth("computed_tokens", cells, span), self._growth("offline_tokens", cells, span)
        online = [None if a is None or b is None else max(0.0, a - b) for a, b in zip(total, offline, strict=True)]
        return online, offline

    def _growth(self, name: str, cells: int, span: float) -> list[float | None]:
        if len(self.snapshots) < 2:
            return [None] * cells
        times = [snapshot["time"] for snapshot in self.snapshots]
        values = [snapshot[name] for snapshot in self.snapshots]
        edges = [times[-1] - span + span * i / cells for i in range(cells)] + [times[-1]]
        levels = [_between(times, values, edge) for edge in edges]
        return [
            None if before is None or after is None else max(0.0, (after - before) / (span / cells))
            for before, after in pairwise(levels)
        ]

    def worst(self, name: str, cells: int, span: float) -> list[float | None]:
        """Return the largest `name` ("ttft" or "gap") per part, for chats that ended in the last `span` seconds."""
        parts: list[float | None] = [None] * cells
        if self.latest is None:
            return parts
        start = self.latest["time"] - span
        for chat in self.chats:
            value, cell = chat[name], math.floor((chat["time"] - start) / span * cells)
            if value is not None and cell >= 0:
                cell = min(cell, cells - 1)  # a chat's time is rounded and may lie past the end
                parts[cell] = max(value, parts[cell] or 0.0)
        return parts

    def values(self, name: str) -> list[float]:
        """Return the sorted `name` values ("ttft" or "gap") of all stored chats."""
        return sorted(chat[name] for chat in self.chats if chat[name] is not None)

    def change(self, name: str, seconds: float) -> float | None:
        """Return the growth of a counter over the last `seconds`, or None if fewer than two snapshots are in them."""
        recent = list(self._last(seconds))
        return float(recent[-1][name] - recent[0][name]) if len(recent) > 1 else None

    def answer_rates(self, seconds: float) -> tuple[float, float, float] | None:
        """Return offline answers/s, their output tokens/s and prompt tokens/s over the last `seconds`, if known."""
        recent = [snapshot for snapshot in self._last(seconds) if "batch" in snapshot]  # an older server omits the key
        if len(recent) < 2:
            return None
        before, after = recent[0], recent[-1]
        span = after["time"] - before["time"]
        answers, output, prompts = (
            (after["batch"][name] - before["batch"][name]) / span
            for name in ("answers", "output_tokens", "prompt_tokens")
        )
        return answers, output, prompts

    def last_rates(self) -> tuple[float, float]:
        """Return online and offline tokens/s between the two latest snapshots."""
        if len(self.snapshots) < 2:
            return 0.0, 0.0
        before, after = self.snapshots[-2:]
        passed = after["time"] - before["time"]
        offline = max(0, after["offline_tokens"] - before["offline_tokens"])
        total = max(0, after["computed_tokens"] - before["computed_tokens"])
        return max(0, total - offline) / passed, offline / passed

    def engine_rates(self, engine: int, seconds: float) -> tuple[float | None, float | None]:
        """Return online and offline tokens/s of one engine; None if fewer than two snapshots have it."""
        seen = [
            (snapshot["time"], each["computed_tokens"], each["offline_tokens"])
            for snapshot in self._last(seconds)
            for each in snapshot.get("engines", ())
            if each["engine"] == engine and "computed_tokens" in each
        ]
        if len(seen) < 2:
            return None, None
        passed, total, offline = (max(0.0, after - before) for before, after in zip(seen[0], seen[-1], strict=True))
        return max(0.0, total - offline) / passed, offline / passed

    def _last(self, seconds: float) -> Iterator[Snapshot]:
        for snapshot in self.snapshots:
            if snapshot["time"] >= self.snapshots[-1]["time"] - seconds - 0.5:
                yield snapshot


def _between(times: Sequence[float], values: Sequence[float], time: float) -> float | None:
    """Return a counter's value at `time`, interpolated linearly, or None before the first snapshot."""
    after = bisect_right(times, time)
    if after == 0:
        return None
    if after == len(times):
        return values[-1]
    share = (time - times[after - 1]) / (times[after] - times[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])
