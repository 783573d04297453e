"""Timeline of a run in steps of a second, as CSV: arrivals, tokens per class, open requests, client CPU."""

import csv
import math
from pathlib import Path

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


def write(columns: dict[str, Floats], path: Path) -> None:
    """Write `timeline.csv`."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        rows = zip(*(columns[name] for name in COLUMNS), strict=True)
        writer.writerows([f"{value:.6g}" for value in row] for row in rows)
