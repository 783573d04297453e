"""Terminal output of the commands: the progress line of a run, and tables of a run, a sweep and a comparison."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from loadgen.compare import Row
from loadgen.report import Part, plain
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


def _console() -> Console:
    # Created at each use, because a test may have replaced the standard output.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)


def show_values(title: str, values: Mapping[str, Any]) -> None:
    """Print a table of names and values."""
    _print(title, (), values.items())


def show(title: str, parts: Sequence[Part]) -> None:
    """Print the parts of a report, as tables; a heading is the title of the next one."""
    for kind, content in parts:
        if kind == "heading":
            title = content
        elif content:
            _print(title, *_table(kind, content))


def _table(kind: str, content: Any) -> tuple[Sequence[str], Iterable[Iterable[Any]]]:
    """Return the titles of the columns, if they have any, and the rows of a part."""
    if kind == "pairs":
        return (), content.items()
    if kind == "jobs":
        return (), [(key, *values) for key, values in content.items()]
    if kind == "latencies":
        return ("", "mean", "P50", "P99", "n"), [(name, *values, count) for name, values, count in content]
    return (tuple(content[0]), [point.values() for point in content]) if kind == "points" else ((), content)


def _print(title: str, columns: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    table = Table(title=title, show_header=bool(columns))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*("-" if value is None else plain(value) for value in row))
    _console().print(table, markup=False)


def show_comparison(result: Mapping[str, Any], first: str, second: str) -> None:
    """Print the rows of a comparison, in seconds and tokens/s, and its notes."""
    title = f"{first} -> {second}" + (" (paired)" if result["paired"] else "")
    _print(title, ("", first, second, "difference", "95 %", ""), map(_cells, result["rows"]))
    if result["interference"]:
        show_values("interference", result["interference"])
    if result["harvest"] is not None:
        show_values("harvest", {"harvest": result["harvest"]})
    for note in result["notes"]:
        _console().print(f"  {note}", markup=False)


def _cells(row: Row) -> list[Any]:
    interval = "" if row.low is None or row.high is None else f"{row.low:+.4g} to {row.high:+.4g}"
    difference = "-" if row.difference is None else f"{row.difference:+.4g}"
    return [row.metric, row.first, row.second, difference, interval, "*" if row.decided else ""]
