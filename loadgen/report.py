"""Tables of a run, which `loadgen.terminal` prints, and the columns of `timeline.csv`.

The timeline has steps of a second: arrivals, tokens per class, open requests, client CPU.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.metrics import job_curve, token_events
from loadgen.records import Records

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
LATENCY_ROWS = (
    ("TTFT", "ttft", 1e3, "ms"),
    ("TTFT from sending", "ttft_sent", 1e3, "ms"),
    ("TTFT per prompt token", "normalized_ttft", 1e3, "ms"),
    ("TBT, all gaps", "tbt", 1e3, "ms"),
    ("TBT P99 of each request", "request_tbt_p99", 1e3, "ms"),
    ("TPOT", "tpot", 1e3, "ms"),
    ("End to end", "e2e", 1.0, "s"),
)


class Table(NamedTuple):
    """A table of the report. `columns` is empty for a table without a header."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Iterable[Any]]


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """Return the tables of a run; those without rows are left out."""
    workload, server = summary["workload"]["name"], summary["server"].get("model", "")
    found = [Table(f"{workload} on {server}", (), _headline(summary)), Table("", (), _failures(summary["online"]))]
    for name in ("online", "offline"):
        if summary[name]["requests"]:
            columns = ("", "mean", "P50", "P99", "n")
            found.append(Table(f"Latency, {name}", columns, _latencies(summary[name])))
    jobs = [_job(job) for job in summary["offline"]["jobs"]]
    keys = dict.fromkeys(key for job in jobs for key in job)
    found.append(Table("Batch jobs", (), [(key, *(job.get(key, "") for job in jobs)) for key in keys]))
    found.append(Table("Validity of the client", (), list(_honesty(summary["honesty"]).items())))
    return [table for table in found if table.rows]


def plain(value: Any) -> str:
    """Format a number with four significant digits; from 1000 on, as a whole number with thousands separators."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    units = {"created_to_in_progress": " (s)", "makespan": " (s)"}
    return {key.replace("_", " ") + units.get(key, ""): value for key, value in job.items() if value != ""}


def _value(value: float | None, factor: float = 1.0, digits: str = ".3g") -> str:
    if value is None:
        return "-"
    return f"{value * factor:,.0f}" if abs(value * factor) >= 100 else f"{value * factor:{digits}}"


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


def _failures(online: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"failed {count} times", message) for message, count in online["errors"].items()]


def _latencies(section: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return title, mean, P50, P99 and number of values of each latency."""
    lines = []
    for title, name, factor, unit in LATENCY_ROWS:
        values = [section[f"{name}_{key}"] for key in ("mean", "p50", "p99")]
        shown = ["-" if value is None else f"{value * factor:.4g}" for value in values]
        lines.append((f"{title} ({unit})", *shown, section["counts"][name]))
    return lines


def _honesty(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the honesty section of the summary with units, for a table."""
    if not found:
        return {}
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


def timeline(records: Records, step: float = 1.0) -> dict[str, Floats]:
    """Return an array per column with a value per `step` seconds. Tokens are input + output."""
    count = max(1, math.ceil(records.ended_at / step))
    edges: Floats = np.arange(count + 1, dtype=np.float64) * step
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
    _client(records, edges, columns)
    return columns


def _histogram(times: Floats, edges: Floats, weights: Floats | None = None) -> Floats:
    # The last bin includes its right edge, and no time is later.
    return np.histogram(times, edges, weights=weights)[0].astype(np.float64)


def _client(records: Records, edges: Floats, columns: dict[str, Floats]) -> None:
    """Fill the columns of open requests, summed over workers, and of CPU, the maximum over workers."""
    for worker in {sample.worker for sample in records.samples}:
        own = sorted((sample for sample in records.samples if sample.worker == worker), key=lambda sample: sample.at)
        at = np.array([sample.at for sample in own])
        columns["online_open"] += np.interp(edges[:-1], at, [sample.online_open for sample in own]).round()
        columns["offline_open"] += np.interp(edges[:-1], at, [sample.offline_open for sample in own]).round()
        used = np.diff(np.interp(edges, at, [sample.cpu for sample in own])) / np.diff(edges)
        columns["client_cpu"] = np.maximum(columns["client_cpu"], used)


def write_timeline(columns: dict[str, Floats], path: Path) -> None:
    """Write `timeline.csv`."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        rows = zip(*(columns[name] for name in COLUMNS), strict=True)
        writer.writerows([f"{value:.6g}" for value in row] for row in rows)
