"""Terminal output of the commands: the progress line of a run, and tables."""

import sys
import time
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.table import Table

from loadgen import report
from loadgen.runner import Progress

PLAIN_EVERY = 5.0
"""Interval of progress lines where the output is not a terminal, seconds."""


class LiveLine:
    """Progress line of a run, rewritten in place on a terminal. `show` limits its own rate; `close` ends the line."""

    def __init__(self, horizon: float | None, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._horizon = horizon
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._quiet = quiet
        self._last = float("-inf")
        self._width = 0

    def show(self, progress: Progress) -> None:
        """Print the line if it is due."""
        if self._quiet:
            return
        if self._terminal:
            line = self.line(progress)
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        elif time.monotonic() - self._last >= PLAIN_EVERY:
            self._last = time.monotonic()
            self._stream.write(self.line(progress) + "\n")
        self._stream.flush()

    def line(self, progress: Progress) -> str:
        """Return the text of the line."""
        total = f"/{self._horizon:.0f}" if self._horizon else ""
        parts = [f"{max(0.0, progress.at):.0f}{total} s"]
        if progress.scheduled:
            parts.append(f"online {progress.finished}/{progress.sent} of {progress.scheduled}")
        if progress.offline_lines:
            parts.append(f"offline {progress.offline_finished}/{progress.offline_lines}")
        if progress.failed:
            parts.append(f"{progress.failed} failed")
        return " | ".join(parts)

    def close(self) -> None:
        """End the line on a terminal."""
        if self._terminal and not self._quiet and self._width:
            self._stream.write("\n")
            self._stream.flush()


def show(tables: Iterable[report.Table]) -> None:
    """Print tables. A value of None is shown as `-`."""
    # Created at each use, because a test may have replaced the standard output.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    for each in tables:
        table = Table(title=each.title, show_header=bool(each.columns))
        for column in each.columns:
            table.add_column(column, justify="right" if column else "left")
        for row in each.rows:
            table.add_row(*("-" if value is None else report.plain(value) for value in row))
        console.print(table, markup=False)
