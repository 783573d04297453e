"""Texts about a batch: progress, rates and the expected end; the progress bar of `tidemill batch`."""

import math
import re
import shutil
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich.cells import cell_len, set_cell_size

from tidemill.client import TERMINAL

RATE_SECONDS = 30.0
LINE_SECONDS = 30.0
"""Longest time between two lines of the progress on an output that is no terminal."""
RANGE_UNITS = ((60.0, "min"), (3600.0, "h"), (86_400.0, "d"))
"""Units of `range_text`, with their seconds."""


def shortened(text: str, cells: int) -> str:
    """Return untrusted text as one line of at most `cells` terminal columns.

    Control, escape and direction characters become '?'.
    """
    safe = "".join("?" if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in text)
    return safe if cell_len(safe) <= cells else set_cell_size(safe, cells - 2).rstrip() + ".."


def progress_text(batch: dict[str, Any]) -> str:
    """Return finished, total and failed lines, e.g. "3/10 lines, 1 failed"."""
    done, total, num_failed = _counts(batch)
    failed = f", {num_failed:,} failed" if num_failed else ""
    return f"{done:,}/{total:,} lines{failed}" if total else "no lines yet"


def _counts(batch: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the ended, all, and failed lines."""
    counts = batch.get("request_counts") or {"total": 0, "completed": 0, "failed": 0}
    return counts["completed"] + counts["failed"], counts["total"], counts["failed"]


def expected_end(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the earliest and latest end in Unix seconds that the server expects; None if it does not know."""
    found = re.fullmatch("([0-9]+)-([0-9]+)", str((batch.get("metadata") or {}).get("tidemill.eta", "")))
    return None if found is None else (int(found[1]), int(found[2]))


def eta_text(batch: Mapping[str, Any], now: float | None = None) -> str:
    """Return when the server expects the batch to end and the tokens until then, e.g. "done in about 10 to
    14 min (13:36), 81,000 tokens left"; empty if it does not know. The time of day is the latest end."""
    end = expected_end(batch)
    if end is None:
        return ""
    now = time.time() if now is None else now
    late = ", may miss its window" if batch["metadata"].get("tidemill.at_risk") == "true" else ""
    tokens = str(batch["metadata"].get("tidemill.remaining_tokens", ""))
    more = f", {int(tokens):,} tokens left" if tokens.isascii() and tokens.isdigit() else ""
    clock = time.strftime("%H:%M", time.localtime(end[1]))
    return f"done in {range_text(end[0] - now, end[1] - now)} ({clock}){more}{late}"


def range_text(least: float, most: float) -> str:
    """Format a range of durations in seconds as "about 10 to 14 min", in minutes, hours or days."""
    unit, name = next(each for each in RANGE_UNITS if most <= 100.0 * each[0] or each is RANGE_UNITS[-1])
    low, high = max(0, math.floor(least / unit)), max(1, math.ceil(most / unit))
    if low == 0:
        return f"less than {high} {name}"
    return f"about {high} {name}" if low == high else f"about {low} to {high} {name}"


def duration_text(seconds: float) -> str:
    """Format a duration as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@dataclass(slots=True)
class BatchProgress:
    """Show batch progress: a bar redrawn in place on a terminal, else a line per state, percent or LINE_SECONDS."""

    out: TextIO = field(default_factory=lambda: sys.stderr)
    clock: Callable[[], float] = time.monotonic
    width: int = 24
    _samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    _last: tuple[str, int] = ("", 0)
    _last_time: float = 0.0

    def show(self, batch: dict[str, Any]) -> None:
        text = self.text(batch)
        if self.out.isatty():
            columns = shutil.get_terminal_size().columns
            self.out.write(f"\r\x1b[K{text[: columns - 1]}")
        else:
            self._show_line(batch)
        self.out.flush()

    def _show_line(self, batch: dict[str, Any]) -> None:
        done, total, _ = _counts(batch)
        reached = batch["status"], 100 * done // max(1, total)
        now = self.clock()
        if reached != self._last or now - self._last_time >= LINE_SECONDS:
            self._last, self._last_time = reached, now
            end = eta_text(batch) if batch["status"] not in TERMINAL else ""
            self.out.write(f"{batch['status']}: {progress_text(batch)}{end and '  '}{end}\n")

    def end(self) -> None:
        if self.out.isatty():
            self.out.write("\n")

    def text(self, batch: dict[str, Any]) -> str:
        """Return the bar, the lines, the rates of the last RATE_SECONDS and the estimated remaining time."""
        done, total, _ = _counts(batch)
        tokens = (batch.get("usage") or {}).get("output_tokens", 0)
        line_rate, token_rate = self._rates(done, tokens)
        filled = self.width * done // total if total else 0
        bar = "#" * filled + "-" * (self.width - filled)
        text = f"{batch['status']} [{bar}] {progress_text(batch)}"
        if token_rate:
            text += f"  {line_rate:,.1f} lines/s, {token_rate:,.0f} output tokens/s"
        if done < total and batch["status"] not in TERMINAL and (end := eta_text(batch)):
            text += f"  {end}"
        return text

    def _rates(self, done: int, tokens: int) -> tuple[float, float]:
        now = self.clock()
        self._samples.append((now, done, tokens))
        while len(self._samples) > 2 and self._samples[0][0] < now - RATE_SECONDS:
            self._samples.popleft()
        first, first_done, first_tokens = self._samples[0]
        seconds = now - first
        return ((done - first_done) / seconds, (tokens - first_tokens) / seconds) if seconds > 0 else (0.0, 0.0)
