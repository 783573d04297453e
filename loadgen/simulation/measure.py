"""The metrics of a run on the virtual clock, by the names of the load generator's reports."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.colocation.virtual import VirtualRecord, VirtualRun
from loadgen.stats import nearest_rank

Floats = NDArray[np.float64]
Metrics = dict[str, float]


def measure(run: VirtualRun, begin: float, measure_end: float) -> Metrics:
    """Latency of the requests scheduled in the measure window (seconds), throughput of the tokens stamped in it.

    A request without a first token counts with the time it has waited so far, so that starving one never pays.
    """
    end = min(measure_end, run.end)
    online = [r for r in run.online if r.arrival.request.request_id.startswith("n")]
    chosen = [r for r in online if begin <= r.arrival.at <= end]
    ttft = np.array([r.token_times[0] - r.arrival.at if r.token_times else run.end - r.arrival.at for r in chosen])
    prompts = np.array([len(r.arrival.request.prompt_token_ids) for r in chosen])
    gaps = np.concatenate([*(np.diff(r.token_times) for r in chosen), np.empty(0)])
    ended = np.array([r.ended - r.arrival.at for r in chosen if r.ended is not None])
    found = {**_spread("ttft", ttft), **_spread("tbt", gaps), **_spread("e2e", ended)}
    found |= _spread("normalized_ttft", ttft / prompts if len(prompts) else ttft)
    seconds = max(end - begin, 1e-9)
    mixed = [r for r in run.online if r.arrival.request.request_id.startswith("f")]
    offline = run.offline_tokens + _tokens(mixed, begin, end)
    found["requests"] = float(len(chosen))
    found["unfinished"] = float(sum(r.ended is None for r in chosen))
    found["offline_throughput"] = offline / seconds
    found["total_throughput"] = (offline + _tokens(online, begin, end)) / seconds
    found["steps"] = float(run.steps)
    found["end"] = run.end
    return found


def _spread(name: str, values: Floats) -> Metrics:
    if not values.size:
        return {f"{name}_{key}": 0.0 for key in ("mean", "p50", "p95", "p99")}
    ordered = np.sort(values)
    found = {f"{name}_p{percent}": nearest_rank(ordered, percent) for percent in (50, 95, 99)}
    return {f"{name}_mean": float(ordered.mean()), **found}


def _tokens(records: Sequence[VirtualRecord], begin: float, end: float) -> int:
    """Output tokens stamped in the window, and the prompts whose first token is."""
    total = 0
    for record in records:
        times = record.token_times
        total += sum(begin <= at <= end for at in times)
        if times and begin <= times[0] <= end:
            total += len(record.arrival.request.prompt_token_ids)
    return total
