"""The report of a run: its folder (`summary.json`, `requests.jsonl.gz`, `timeline.csv`), tables and progress line.

The timeline has steps of a second: arrivals, tokens per class, open requests, client CPU.
"""

import csv
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable

from loadgen.metrics import LATENCIES, Slo, honesty, job_curve, run_metrics, token_events
from loadgen.plan import Plan
from loadgen.records import Records, save
from loadgen.runner import Progress

SCHEMA_VERSION = 1
UNITS = "seconds, tokens, tokens/s, requests/s; shares are 0 to 1"
SECRETS = ("--api-key", "--header")


def summarise(found: Records, plan: Plan, slo: Slo, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the summary of a run. `about` has the sections that the records and the plan do not determine."""
    window = plan.windows.measured(found.ended_at if plan.windows.horizon is not None else found.last_event)
    honest, invalid = honesty(found, window, slo, closed_loop=plan.closed_loop)
    return {
        "schema_version": SCHEMA_VERSION,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **about,
        "seeds": {"seed": plan.seed, "salt": plan.salt},
        "client": {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()},
        "units": UNITS,
        **run_metrics(found, window, slo),
        "honesty": honest,
        "valid": not invalid,
        "invalid": invalid,
        "interrupted": found.interrupted,
    }


def command_line(arguments: Sequence[str]) -> str:
    """Return the command line with the values of SECRETS replaced by `***`."""
    shown, hide = ["tidemill", "bench"], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hide or (equals and name in SECRETS):
            argument = f"{name}=***" if equals and name in SECRETS else "***"
        hide = argument in SECRETS
        shown.append(argument)
    return shlex.join(shown)


def write(path: Path, summary: dict[str, Any], found: Records) -> None:
    """Write the three files into `path`, which is created if missing."""
    path.mkdir(parents=True, exist_ok=True)
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
    (path / "summary.json").write_bytes(orjson.dumps(summary, option=options))
    save(found.requests, path / "requests.jsonl.gz")
    write_timeline(timeline(found), path / "timeline.csv")


def default_folder(root: Path, name: str) -> Path:
    """Return an unused folder name under `root`, made of the time and the workload's name."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    path, number = root / f"{stamp}-{name}", 1
    while path.exists():
        number += 1
        path = root / f"{stamp}-{name}-{number}"
    return path


Floats = NDArray[np.float64]

COLUMNS = (
    "t",
    "online_arrivals",
    "online_sent",
    "online_tokens",
    "offline_tokens",
    "online_open",
    "offline_open",
    "client_cpu",
)


Table = tuple[str, Sequence[str], Sequence[Iterable[Any]]]
"""(title, columns, rows) of a table. The columns are empty for a table without a header."""


def tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """Yield the tables of a run; some may have no rows."""
    yield f"{summary['workload']['name']} on {summary['server'].get('model', '')}", (), _headline(summary)
    yield "", (), [(f"failed {count} times", message) for message, count in summary["online"]["errors"].items()]
    for name in ("online", "offline"):
        if summary[name]["requests"]:
            yield f"Latency, {name}", ("", "mean", "P50", "P99", "n"), _latencies(summary[name])
    jobs = [_job(job) for job in summary["offline"]["jobs"]]
    keys = dict.fromkeys(key for job in jobs for key in job)
    yield "Batch jobs", (), [(key, *(job.get(key, "") for job in jobs)) for key in keys]
    yield "Validity of the client", (), list(_honesty(summary["honesty"]).items())


def plain(value: Any) -> str:
    """Format a number with four significant digits; from 1000 on, as a whole number with thousands separators."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    units = {"created_to_in_progress": " (s)", "makespan": " (s)"}
    return {key.replace("_", " ") + units.get(key, ""): value for key, value in job.items() if value != ""}


def _value(value: float | None, factor: float = 1.0) -> str:
    if value is None:
        return "-"
    return f"{value * factor:,.0f}" if abs(value * factor) >= 100 else f"{value * factor:.3g}"


def _headline(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    online, offline, slo = summary["online"], summary["offline"], summary.get("slo", {})
    found: list[tuple[str, str, str]] = []
    if online["requests"]:
        low, high = online["slo_attainment_interval"]
        interval = f"95 %: {low:.1%} to {high:.1%}, {online['requests']} requests"
        name = "SLO attainment" if slo else "answered (no SLO set)"
        found.append((name, f"{online['slo_attainment']:.1%}", interval))
        for title, name, key in (("TTFT", "ttft", "ttft"), ("TBT", "tbt", "tbt_p99")):
            limit = f", SLO {slo[key] * 1e3:g}" if slo.get(key) else ""
            more = f"ms; P50 {_value(online[f'{name}_p50'], 1e3)}{limit}"
            found.append((f"{title} P99", _value(online[f"{name}_p99"], 1e3), more))
        more = f"tokens/s: {_value(online['input_throughput'])} in, {_value(online['output_throughput'])} out"
        found.append(("online", _value(online["input_throughput"] + online["output_throughput"]), more))
    if offline["requests"] or offline["jobs"]:
        found.append(("offline (harvested)", _value(offline["offline_throughput"]), "tokens/s, in and out"))
    return found


def _latencies(section: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return title, mean, P50, P99 and number of values of each latency."""
    lines = []
    for each in LATENCIES:
        values = [section[f"{each.name}_{key}"] for key in ("mean", "p50", "p99")]
        factor = 1e3 if each.unit == "ms" else 1.0
        shown = ["-" if value is None else f"{value * factor:.4g}" for value in values]
        lines.append((f"{each.title} ({each.unit})", *shown, section["counts"][each.name]))
    return lines


def _honesty(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the honesty section of the summary with units, for a table."""
    lengths = found["lengths"]
    lag = ", ".join(f"{key} {_value(found[f'send_lag_{key}'], 1e3)}" for key in ("p50", "p99"))
    rate = {"requests/s achieved, intended": f"{_value(found['achieved_rate'])}, {_value(found['intended_rate'])}"}
    return {
        "send lag, ms": lag,
        **({} if found["closed_loop"] else rate),
        "client CPU, share of a core": "-" if found["client_cpu"] is None else f"{found['client_cpu']:.1%}",
        "prompt tokens requested, received": f"{lengths['input_asked']:,}, {lengths['input_got']:,}",
        "output tokens requested, received": f"{lengths['output_asked']:,}, {lengths['output_got']:,}",
        "requests with another length": f"prompt {lengths['input_differs']}, output {lengths['output_differs']}",
        "cached prompt tokens": lengths["cached_prompt_tokens"],
        "tokens without a chunk of their own": lengths["tokens_without_own_chunk"],
    }


def timeline(records: Records) -> dict[str, Floats]:
    """Return an array per column with a value per second. Tokens are input + output."""
    count = max(1, math.ceil(records.ended_at))
    edges: Floats = np.arange(count + 1, dtype=np.float64)
    columns: dict[str, Floats] = {name: np.zeros(count) for name in COLUMNS}
    columns["t"] = edges[:-1]
    online = [record for record in records.requests if record.service_class == "online"]
    columns["online_arrivals"] = _histogram(np.array([record.scheduled_at for record in online]), edges)
    columns["online_sent"] = _histogram(np.array([r.sent_at for r in online if r.sent_at is not None]), edges)
    for record in records.requests:
        times, inputs, outputs = token_events(record)
        if times.size:
            columns[f"{record.service_class}_tokens"] += _histogram(times, edges, inputs + outputs)
    for job in records.jobs:
        times, tokens = job_curve(job)
        columns["offline_tokens"] += np.diff(np.interp(edges, times, tokens))
    if samples := records.samples:
        at = np.array([sample.at for sample in samples])
        columns["online_open"] = np.interp(edges[:-1], at, [sample.online_open for sample in samples]).round()
        columns["offline_open"] = np.interp(edges[:-1], at, [sample.offline_open for sample in samples]).round()
        columns["client_cpu"] = np.diff(np.interp(edges, at, [sample.cpu for sample in samples])) / np.diff(edges)
    return columns


def _histogram(times: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    # The last bin includes its right edge, and no time is later.
    return np.histogram(times, edges, weights=weights)[0].astype(np.float64)


def write_timeline(columns: dict[str, Floats], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        rows = zip(*(columns[name] for name in COLUMNS), strict=True)
        writer.writerows([f"{value:.6g}" for value in row] for row in rows)


PLAIN_EVERY = 5.0
"""Interval of progress lines where the output is not a terminal, seconds."""


class LiveLine:
    """Progress line of a run, rewritten in place on a terminal. `show` limits its own rate; `close` ends the line."""

    def __init__(self, horizon: float | None, *, quiet: bool) -> None:
        self._horizon = horizon
        self._stream = sys.stderr
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


def show(tables: Iterable[Table]) -> None:
    """Print tables. A value of None is shown as `-`."""
    # Created at each use, because a test may have replaced the standard output.
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    for title, columns, rows in tables:
        table = RichTable(title=title, show_header=bool(columns))
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        for row in rows:
            table.add_row(*("-" if value is None else plain(value) for value in row))
        if rows:
            console.print(table, markup=False)
