"""`report.html`, a self-contained page of a run or a sweep with inline SVG and CSS and without scripts; `timeline.csv`.

A page is a list of parts (kind, content); the template `report.html` has the HTML of each kind, and `loadgen.terminal`
prints the parts that are no charts. The timeline has steps of a second: arrivals, tokens per class, open requests,
client CPU.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from loadgen.metrics import in_window, job_curve, token_events
from loadgen.records import Records, RequestRecord
from loadgen.stats import nearest_rank
from loadgen.svg import Mark, Series, cdf, chart

Floats = NDArray[np.float64]
Part = tuple[str, Any]

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
TILES = 60
"""Maximum number of bins in the charts over time."""


def run_page(summary: Mapping[str, Any], requests: Sequence[RequestRecord], columns: Mapping[str, Floats]) -> str:
    """Return the page of a run."""
    parts: list[Part] = [("verdict", summary), *_headline(summary)]
    parts += [("heading", "Over time"), *_over_time(summary, columns)]
    parts += [("heading", "Distributions"), *_distributions(summary, requests), *_tables(summary)]
    parts += [("heading", "The run"), ("pairs", _facts(summary))]
    return _page(f"tidemill bench: {summary['workload']['name']}", parts)


def run_tables(summary: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a run that are no charts."""
    return [*_headline(summary), *_tables(summary)]


def _tables(summary: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = []
    for name in ("online", "offline"):
        if summary[name]["requests"]:
            parts += [("heading", f"Latency, {name}"), ("latencies", _latencies(summary[name]))]
    if jobs := [_job(job) for job in summary["offline"]["jobs"]]:
        keys = dict.fromkeys(key for job in jobs for key in job)
        parts += [("heading", "Batch jobs"), ("jobs", {key: [job.get(key, "") for job in jobs] for key in keys})]
    return [*parts, ("heading", "Validity of the client"), ("pairs", _honesty(summary["honesty"]))]


def _page(title: str, parts: Sequence[Part]) -> str:
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["plain"] = plain
    return environment.get_template("report.html").render(title=title, parts=parts)


def plain(value: Any) -> str:
    """Format a number with four significant digits; from 1000 on, as a whole number with thousands separators."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def sweep_page(summary: Mapping[str, Any]) -> str:
    """Return the page of a sweep: attainment and latency over rate, and the effective throughput."""
    points = sorted(summary["points"], key=lambda point: point["rate"])
    rates = [point["rate"] for point in points]
    levels = [Mark(level / 100, f"{level} %", horizontal=True) for level in (60, 90, 99)]
    spans = [point["slo_attainment_interval"] for point in points]
    attained = Series(
        "attainment, 95 % interval",
        rates,
        [_number(point["slo_attainment"]) for point in points],
        points=True,
        low=[low for low, _ in spans],
        high=[high for _, high in spans],
    )
    title = "SLO attainment against rate"
    charts = [chart(title, [attained], x="requests/s", y="share of requests", marks=levels, top=1.0)]
    for name, title in (("ttft_p99", "TTFT P99"), ("tbt_p99", "TBT P99")):
        values = [_number(point[name]) * 1e3 for point in points]
        limit = summary["slo"].get("ttft" if name == "ttft_p99" else "tbt_p99")
        marks = [_limit(limit, horizontal=True)] if limit else []
        drawn = Series(title, rates, values, points=True)
        charts.append(chart(f"{title} against rate", [drawn], x="requests/s", y="ms", marks=marks))
    found, *points_of = sweep_tables(summary)
    parts: list[Part] = [("verdict", summary), found, *(("chart", each) for each in charts), *points_of]
    return _page("tidemill bench: sweep", [*parts, ("heading", "The sweep"), ("pairs", _facts(summary))])


def sweep_tables(summary: Mapping[str, Any]) -> list[Part]:
    """Return the parts of a sweep that are no charts: the effective throughputs, then the points."""
    found = [
        (f"effective throughput at {key.removeprefix('effective_throughput_')} %", _value(value), "requests/s")
        for key, value in summary.items()
        if key.startswith("effective_throughput_")
    ]
    points = sorted(summary["points"], key=lambda point: point["rate"])
    return [("tiles", found), ("heading", "Points"), ("points", [_point(point) for point in points])]


def _point(point: Mapping[str, Any]) -> dict[str, Any]:
    low, high = point["slo_attainment_interval"]
    return {
        "requests/s": point["rate"],
        "attainment": point["slo_attainment"],
        "95 %": f"{low:.3f} to {high:.3f}",
        "TTFT P99 ms": _number(point["ttft_p99"]) * 1e3,
        "TBT P99 ms": _number(point["tbt_p99"]) * 1e3,
        "all tokens/s": point["throughput"],
        "requests": point["requests"],
        "valid": point["valid"],
    }


def _job(job: Mapping[str, Any]) -> dict[str, Any]:
    units = {"created_to_in_progress": " (s)", "makespan": " (s)"}
    return {key.replace("_", " ") + units.get(key, ""): value for key, value in job.items() if value != ""}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _value(value: float | None, factor: float = 1.0, digits: str = ".3g") -> str:
    if value is None:
        return "-"
    return f"{value * factor:,.0f}" if abs(value * factor) >= 100 else f"{value * factor:{digits}}"


def _facts(summary: Mapping[str, Any]) -> dict[str, Any]:
    server, workload, version = summary["server"], summary["workload"], summary["server"].get("version")
    return {
        "server": f"{server.get('base_url', '')}{server.get('endpoint', '')}",
        "model": server.get("model", ""),
        "version": version.get("version") if isinstance(version, dict) else version,
        "device": summary.get("device"),
        "seed, salt": f"{summary['seeds']['seed']}, {summary['seeds']['salt']}",
        "workload": "; ".join([workload["name"], *workload["notes"]]),
        "made": summary.get("created_at"),
        "command": summary["command"],
    }


def _headline(summary: Mapping[str, Any]) -> list[Part]:
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
    extra = {**online, **summary["total"]}
    compared = {key: value for key, value in extra.items() if key.startswith(("interference_", "harvest"))}
    failed = {f"failed {count} times": message for message, count in online["errors"].items()}
    return [("tiles", found), ("pairs", {**failed, **compared})]


def _latencies(section: Mapping[str, Any]) -> list[tuple[str, list[str], int]]:
    """Return title, (mean, P50, P99) and number of values of each latency."""
    lines = []
    for title, name, factor, unit in LATENCY_ROWS:
        values = [section[f"{name}_{key}"] for key in ("mean", "p50", "p99")]
        shown = ["-" if value is None else f"{value * factor:.4g}" for value in values]
        lines.append((f"{title} ({unit})", shown, section["counts"][name]))
    return lines


def _over_time(summary: Mapping[str, Any], columns: Mapping[str, Floats]) -> list[Part]:
    window = summary["window"]["start"], summary["window"]["end"]
    t, arrivals = _binned(columns["t"], columns["online_arrivals"])
    series = {name: _binned(columns["t"], columns[name])[1] for name in ("online_tokens", "offline_tokens")}
    opened = [
        Series(name, t, _binned(columns["t"], columns[f"{name}_open"])[1], steps=True)
        for name in ("online", "offline")
        if name == "online" or columns["offline_open"].any()
    ]
    tokens = [
        Series("online", t, series["online_tokens"], steps=True),
        Series("offline (harvested)", t, series["offline_tokens"], steps=True, fill=True),
    ]
    arrived = [Series("online", t, arrivals, steps=True, fill=True)]
    return [
        ("chart", chart("Arrivals", arrived, x="seconds", y="requests/s", window=window)),
        ("chart", chart("Tokens delivered", tokens, x="seconds", y="tokens/s", window=window)),
        ("chart", chart("Open requests", opened, x="seconds", y="requests", window=window)),
    ]


def _binned(t: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Return edges and means of at most TILES equal bins; the last edge ends the last bin."""
    step = float(t[1] - t[0]) if len(t) > 1 else 1.0
    width = max(1, -(-len(t) // TILES))
    starts = np.arange(0, len(t), width)
    means = np.array([values[start : start + width].mean() for start in starts])
    return np.append(t[starts], t[-1] + step), np.append(means, means[-1])


def _distributions(summary: Mapping[str, Any], requests: Sequence[RequestRecord]) -> list[Part]:
    chosen = in_window(requests, summary["window"]["start"], summary["window"]["end"])
    slo = summary["slo"]
    ttft, tbt = [], []
    for kind in ("online", "offline"):
        own = [record for record in chosen if record.service_class == kind]
        gaps = [record.gaps() for record in own]
        ttft.append(_curve(kind, np.array([record.ttft for record in own if record.ttft is not None])))
        tbt.append(_curve(f"{kind}, all gaps", np.concatenate([*gaps, np.empty(0)])))
        if kind == "online":  # the value that an SLO on tbt_p99 limits
            worst = [nearest_rank(values, 99) for values in gaps if values.size]
            tbt.append(_curve("P99 of each request", np.array(worst)))
    charts: list[Part] = []
    for title, series, limit in (("TTFT", ttft, slo.get("ttft")), ("TBT", tbt, slo.get("tbt_p99"))):
        marks = [_limit(limit)] if limit else []
        charts.append(("chart", chart(f"{title}, cumulative", series, x="ms", y="share", marks=marks, log_x=True)))
    return charts


def _curve(name: str, seconds: Floats) -> Series:
    if not seconds.size:
        return Series(name, [], [])
    values = seconds * 1e3
    return cdf(f"{name}: P50 {nearest_rank(values, 50):.3g}, P99 {nearest_rank(values, 99):.3g}", values)


def _limit(seconds: float, *, horizontal: bool = False) -> Mark:
    return Mark(seconds * 1e3, f"SLO {seconds * 1e3:g} ms", horizontal=horizontal)


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
