"""Terminal output of the commands: the progress line of a run, and tables of a run, a sweep and a comparison."""

import sys
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from loadgen.compare import Row
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


def number(value: Any) -> str:
    """Format a number with four significant digits; None becomes "-"."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_values(title: str, values: Mapping[str, Any]) -> None:
    """Print a table of names and values."""
    table = Table(title=title, show_header=False)
    for name, value in values.items():
        table.add_row(name, number(value))
    _console().print(table)


def show_run(summary: Mapping[str, Any]) -> None:
    """Print the main figures of a run, in milliseconds and tokens/s."""
    table = Table(title=f"{summary['workload']['name']} on {summary['server'].get('model', '')}")
    for column in ("", "mean", "P50", "P99", "n"):
        table.add_column(column, justify="left" if not column else "right")
    for kind in ("online", "offline"):
        section = summary[kind]
        if not section["requests"]:
            continue
        for title, name in (("TTFT ms", "ttft"), ("TBT ms", "tbt"), ("TPOT ms", "tpot"), ("E2E ms", "e2e")):
            values = [section[f"{name}_{key}"] for key in ("mean", "p50", "p99")]
            cells = [number(None if value is None else value * 1e3) for value in values]
            table.add_row(f"{kind} {title}", *cells, str(section["counts"][name]))
    console = _console()
    if table.row_count:
        console.print(table)
    show_values("result", headline(summary))


def headline(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main figures of a run, by title."""
    online, offline, honest = summary["online"], summary["offline"], summary["honesty"]
    found: dict[str, Any] = {}
    if online["requests"]:
        low, high = online["slo_attainment_interval"]
        name = "SLO attainment" if summary["slo"] else "answered (no SLO set)"
        found[name] = f"{online['slo_attainment']:.4f} [{low:.4f}, {high:.4f}]"
        found["outcomes"] = ", ".join(f"{count} {name}" for name, count in online["outcomes"].items())
        found |= {f"{count} times": message for message, count in online["errors"].items()}
        found["online tokens/s in, out"] = f"{online['input_throughput']:.1f}, {online['output_throughput']:.1f}"
        found["rate achieved / intended"] = (
            f"{number(honest.get('achieved_rate'))} / {number(honest.get('intended_rate'))}"
        )
        lag = honest["send_lag_p99"]
        found["send lag P99 ms"] = None if lag is None else lag * 1e3
    found["offline tokens/s in + out"] = offline["offline_throughput"]
    for job in offline["jobs"]:
        counts = f"{job['completed_lines']} of {job['lines']} lines, {job['failed_lines']} failed"
        counts += f", {job['unexecuted_lines']} not executed" if job["unexecuted_lines"] else ""
        lines = f"{counts}, {job['missing_lines']} missing"
        problem = f" ({job['error']})" if job["error"] else ""
        found[f"job {job['index']}"] = f"{job['status']}: {lines}, makespan {number(job['makespan'])} s{problem}"
    found["client CPU"] = honest["client_cpu"]
    for section in (online, summary["total"]):
        found |= {key: value for key, value in section.items() if key.startswith(("interference_", "harvest"))}
    return found


def show_sweep(summary: Mapping[str, Any]) -> None:
    """Print the points of a sweep and its effective throughputs."""
    table = Table(title="sweep")
    for column in ("rate/s", "attainment", "95 %", "TTFT P99 ms", "TBT P99 ms", "n", "valid"):
        table.add_column(column, justify="right")
    for point in sorted(summary["points"], key=lambda item: item["rate"]):
        low, high = point["slo_attainment_interval"]
        latencies = [number(None if point[name] is None else point[name] * 1e3) for name in ("ttft_p99", "tbt_p99")]
        attained = number(point["slo_attainment"])
        interval = f"{low:.3f}-{high:.3f}"
        table.add_row(
            number(point["rate"]), attained, interval, *latencies, str(point["requests"]), str(point["valid"])
        )
    _console().print(table)
    show_values("effective throughput", {k: v for k, v in summary.items() if k.startswith("effective_throughput_")})


def show_comparison(result: Mapping[str, Any], first: str, second: str) -> None:
    """Print the rows of a comparison, in seconds and tokens/s, and its notes."""
    table = Table(title=f"{first} -> {second}" + (" (paired)" if result["paired"] else ""))
    for column in ("", first, second, "difference", "95 %", ""):
        table.add_column(column, justify="left" if not column else "right")
    for row in result["rows"]:
        table.add_row(*_cells(row))
    console = _console()
    console.print(table)
    if result["interference"]:
        show_values("interference", result["interference"])
    if result["harvest"] is not None:
        show_values("harvest", {"harvest": result["harvest"]})
    for note in result["notes"]:
        console.print(f"  {note}", markup=False)


def _cells(row: Row) -> list[str]:
    interval = "" if row.low is None or row.high is None else f"{row.low:+.4g} to {row.high:+.4g}"
    difference = "-" if row.difference is None else f"{row.difference:+.4g}"
    return [row.metric, number(row.first), number(row.second), difference, interval, "*" if row.decided else ""]
