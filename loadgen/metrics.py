"""Metrics of a run, from its records. Times are in seconds; percentiles are nearest rank.

Latencies cover requests scheduled in the measure window; throughput covers tokens delivered in it. HTTP runs and
simulations use the same records.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen import InputError
from loadgen.records import JobRecord, Records, RequestRecord
from loadgen.stats import describe, nearest_rank, wilson

Floats = NDArray[np.float64]
LIMITS = ("ttft", "tbt_p99", "tpot", "e2e", "normalized_ttft")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits on values of single requests, (name, seconds). A request without token gaps keeps limits on gaps."""

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Slo":
        """Parse values of `--goodput`, e.g. `ttft:500 tbt_p99:100`, milliseconds. `e2el` is another name of `e2e`."""
        limits = []
        for word in words:
            name, _, value = word.partition(":")
            name = "e2e" if name == "e2el" else name
            try:
                limit = float(value) / 1000.0
            except ValueError:
                raise InputError(f"invalid goodput limit {word!r}; use NAME:MILLISECONDS") from None
            if name not in LIMITS or not 0 < limit < float("inf"):
                raise InputError(f"invalid goodput limit {word!r}; names are {', '.join(LIMITS)}, values are positive")
            limits.append((name, limit))
        return cls(tuple(limits))

    def limit(self, name: str) -> float | None:
        """Return the limit on `name`, seconds, or None."""
        return dict(self.limits).get(name)

    def good(self, record: RequestRecord) -> bool:
        """Return whether the request succeeded and kept every limit."""
        return record.ok and all(_kept(record, name, limit) for name, limit in self.limits)


def _kept(record: RequestRecord, name: str, limit: float) -> bool:
    if name == "tbt_p99":
        gaps = record.gaps()
        return gaps.size == 0 or nearest_rank(gaps, 99) <= limit
    if name == "tpot":
        return record.tpot is None or record.tpot <= limit
    value = normalized(record) if name == "normalized_ttft" else record.ttft if name == "ttft" else record.e2e
    return value is not None and value <= limit


def normalized(record: RequestRecord) -> float | None:
    """Return the TTFT per prompt token."""
    return None if record.ttft is None else record.ttft / max(1, record.prompt_tokens)


def in_window(records: Sequence[RequestRecord], start: float, end: float) -> list[RequestRecord]:
    """Return the requests scheduled in [start, end]. The end is included because some schedules end with an arrival."""
    return [record for record in records if start <= record.scheduled_at <= end]


def spread(values: Sequence[float | None], name: str) -> dict[str, float | None]:
    """Return `{name_mean, name_p50, name_p99}` of the values that are not None."""
    found = describe([value for value in values if value is not None])
    return {f"{name}_{key}": value for key, value in found.items()}


def latencies(chosen: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return latency statistics of a set of requests, and the number of values behind each."""
    gaps = [record.gaps() for record in chosen]
    pooled = np.concatenate([*gaps, np.empty(0)])
    own = [nearest_rank(item, 99) for item in gaps if item.size]
    columns: dict[str, Sequence[float | None]] = {
        "ttft": [record.ttft for record in chosen],
        "ttft_sent": [record.ttft_sent for record in chosen],
        "normalized_ttft": [normalized(record) for record in chosen],
        "request_tbt_p99": own,
        "tpot": [record.tpot for record in chosen if record.ok],
        "e2e": [record.e2e for record in chosen if record.ok],
    }
    found: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for name, values in columns.items():
        found |= spread(values, name)
        counts[name] = sum(value is not None for value in values)
    found |= {f"tbt_{key}": value for key, value in describe(pooled).items()}
    counts["tbt"] = int(pooled.size)
    return found | {"counts": counts}


def token_events(record: RequestRecord) -> tuple[Floats, Floats, Floats]:
    """Return (times, input tokens, output tokens) of a request. The prompt counts when the first token arrives.

    Tokens that the server counted but no chunk contained, such as an unfinished character, count at the end.
    """
    if not record.chunk_at:
        empty = np.empty(0)
        return empty, empty, empty
    shown = int(sum(record.chunk_tokens))
    end = record.ended_at if record.ended_at is not None else record.chunk_at[-1]
    times = np.array([*record.chunk_at, end])
    outputs = np.array([*record.chunk_tokens, max(0, record.output_tokens - shown)], dtype=np.float64)
    inputs = np.zeros(len(times))
    inputs[0] = record.prompt_tokens
    return times, inputs, outputs


def stamped(records: Sequence[RequestRecord], start: float, end: float) -> tuple[float, float]:
    """Return input and output tokens delivered in [start, end]."""
    inputs = outputs = 0.0
    for record in records:
        times, prompt, answer = token_events(record)
        inside = (times >= start) & (times <= end)
        inputs += float(prompt[inside].sum())
        outputs += float(answer[inside].sum())
    return inputs, outputs


def job_curve(job: JobRecord) -> tuple[Floats, Floats]:
    """Return (times, cumulative tokens) of a job at its polls: its usage, else finished lines × mean tokens."""
    if not job.polls:
        return np.zeros(1), np.zeros(1)
    times = np.array([poll.at for poll in job.polls])
    total = job.input_tokens + job.output_tokens
    running = [poll.tokens for poll in job.polls]
    if reports_tokens(job):
        return times, np.maximum.accumulate(np.array([float(tokens or 0) for tokens in running]))
    done = np.array([float(poll.completed) for poll in job.polls])
    return times, done * (total / job.output_lines if job.output_lines else 0.0)


def reports_tokens(job: JobRecord) -> bool:
    """Return whether the server updated the job's `usage` while it ran, not only at its end."""
    seen = {poll.tokens for poll in job.polls if poll.status == "in_progress" and poll.tokens}
    return len(seen) > 1


def job_tokens(job: JobRecord, start: float, end: float) -> float:
    """Return tokens of a job delivered in [start, end], interpolated linearly between polls."""
    times, tokens = job_curve(job)
    low, high = np.interp([start, end], times, tokens)
    return float(high - low)


def job_metrics(job: JobRecord) -> dict[str, Any]:
    """Return waiting time, makespan, deadline and line counts of a job."""
    created = job.created_at
    started = job.first("in_progress", "finalizing", "completed")
    ended = job.first("completed", "failed", "expired", "cancelled")
    makespan = ended - created if created is not None and ended is not None else None
    return {
        "index": job.index,
        "status": job.status,
        "error": job.error,
        "lines": job.lines,
        "completed_lines": job.output_lines,
        "failed_lines": job.error_lines,
        "unexecuted_lines": job.unexecuted,
        "missing_lines": job.missing,
        "duplicated_lines": job.duplicated,
        "created_to_in_progress": started - created if created is not None and started is not None else None,
        "makespan": makespan,
        "deadline_kept": job.status == "completed" and makespan is not None and makespan <= job.completion_window,
        "input_tokens": job.input_tokens,
        "output_tokens": job.output_tokens,
        "resolution": "tokens at each poll" if reports_tokens(job) else "finished lines at each poll",
    }


def online_metrics(records: Records, window: tuple[float, float], slo: Slo) -> dict[str, Any]:
    """Return metrics of the online class: latency, outcomes, attainment with its Wilson interval, throughput."""
    everything = [record for record in records.requests if record.service_class == "online"]
    found = _class_metrics(everything, window)
    chosen = in_window(everything, *window)
    good = sum(slo.good(record) for record in chosen)
    found["good"] = good
    found["slo_attainment"] = good / len(chosen) if chosen else None
    found["slo_attainment_interval"] = list(wilson(good, len(chosen)))
    found["request_goodput"] = good / _length(window)
    return found


def offline_metrics(records: Records, window: tuple[float, float]) -> dict[str, Any]:
    """Return metrics of the offline class: flex requests and batch jobs."""
    everything = [record for record in records.requests if record.service_class == "offline"]
    found = _class_metrics(everything, window)
    from_jobs = sum(job_tokens(job, *window) for job in records.jobs)
    total = found["input_throughput"] + found["output_throughput"] + from_jobs / _length(window)
    return found | {"offline_throughput": total, "jobs": [job_metrics(job) for job in records.jobs]}


def _class_metrics(everything: Sequence[RequestRecord], window: tuple[float, float]) -> dict[str, Any]:
    chosen = in_window(everything, *window)
    inputs, outputs = stamped(everything, *window)
    return {
        "requests": len(chosen),
        "outcomes": dict(Counter(record.outcome for record in chosen)),
        "errors": dict(Counter(record.error for record in chosen if record.error).most_common(3)),
        "statuses": {str(status): count for status, count in Counter(record.status for record in chosen).items()},
        **latencies(chosen),
        "request_throughput": sum(record.ok for record in chosen) / _length(window),
        "input_throughput": inputs / _length(window),
        "output_throughput": outputs / _length(window),
    }


def _length(window: tuple[float, float]) -> float:
    return max(window[1] - window[0], 1e-9)


def run_metrics(records: Records, window: tuple[float, float], slo: Slo) -> dict[str, Any]:
    """Return `{"window", "slo", "online", "offline", "total"}` of a run."""
    online, offline = online_metrics(records, window, slo), offline_metrics(records, window)
    total = online["input_throughput"] + online["output_throughput"] + offline["offline_throughput"]
    return {
        "window": {"start": window[0], "end": window[1]},
        "slo": dict(slo.limits),
        "online": online,
        "offline": offline,
        "total": {"throughput": total},
    }
