"""Metrics of a run, from its records. Times are in seconds; percentiles are nearest rank.

Latencies cover requests scheduled in the measure window; throughput covers tokens delivered in it. HTTP runs and
simulations use the same records.

A run is INVALID if the client, rather than the server, may have determined the results: send lag, achieved rate, client
CPU, and requested against received lengths.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen import InputError
from loadgen.records import ClientSample, JobRecord, Records, RequestRecord
from loadgen.stats import spread, wilson

Floats = NDArray[np.float64]
LIMITS = ("ttft", "tbt_p99", "tpot", "e2e", "normalized_ttft")
ON_GAPS = ("tbt_p99", "tpot")
"""Limits on values that a request with fewer than two tokens does not have."""


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

    def good(self, record: RequestRecord) -> bool:
        """Return whether the request succeeded and kept every limit."""
        values = ((name, getattr(record, name), limit) for name, limit in self.limits)
        return record.ok and all(name in ON_GAPS if value is None else value <= limit for name, value, limit in values)


def in_window(records: Sequence[RequestRecord], start: float, end: float) -> list[RequestRecord]:
    """Return the requests scheduled in [start, end]. The end is included because some schedules end with an arrival."""
    return [record for record in records if start <= record.scheduled_at <= end]


def _of(name: str, *, ok: bool = False) -> Callable[[Sequence[RequestRecord]], Sequence[float | None]]:
    """Return a function that reads an attribute of requests; `ok`: of those that succeeded."""
    return lambda chosen: [getattr(record, name) for record in chosen if record.ok or not ok]


class Latency(NamedTuple):
    """A latency of the summary and of the report, which shows it in `unit`. `values`: those of requests, seconds."""

    name: str
    title: str
    unit: Literal["ms", "s"]
    values: Callable[[Sequence[RequestRecord]], Sequence[float | None]]


LATENCIES = (
    Latency("ttft", "TTFT", "ms", _of("ttft")),
    Latency("ttft_sent", "TTFT from sending", "ms", _of("ttft_sent")),
    Latency("normalized_ttft", "TTFT per prompt token", "ms", _of("normalized_ttft")),
    Latency("tbt", "TBT, all gaps", "ms", lambda chosen: [gap for record in chosen for gap in record.gaps().tolist()]),
    Latency("request_tbt_p99", "TBT P99 of each request", "ms", _of("tbt_p99")),
    Latency("tpot", "TPOT", "ms", _of("tpot", ok=True)),
    Latency("e2e", "End to end", "s", _of("e2e", ok=True)),
)


def latencies(chosen: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return latency statistics of a set of requests, and the number of values behind each."""
    values = {each.name: [value for value in each.values(chosen) if value is not None] for each in LATENCIES}
    found: dict[str, Any] = {"counts": {name: len(counted) for name, counted in values.items()}}
    for name, counted in values.items():
        found |= spread(name, counted)
    return found


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


MAX_LAG = 0.010
MAX_LAG_SHARE = 0.05
MAX_RATE_ERROR = 0.02
MAX_CPU = 0.80
MIN_SPAN = 0.1
"""Minimum span of the arrivals for a rate, seconds."""


def honesty(
    records: Records, window: tuple[float, float], slo: Slo, *, closed_loop: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Return the `honesty` section of a summary and the reasons why the run is invalid; none if it is valid."""
    online = in_window([record for record in records.requests if record.service_class == "online"], *window)
    found: dict[str, Any] = {
        **spread("send_lag", [record.lag for record in online if record.lag is not None]),
        **({} if closed_loop else rates(online)),
        "client_cpu": client_cpu(records.samples, window),
        "closed_loop": closed_loop,
        "interrupted": records.interrupted,
        "lengths": lengths(in_window(records.requests, *window), records.jobs),
    }
    return found, reasons(found, slo)


def rates(online: Sequence[RequestRecord]) -> dict[str, float | None]:
    """Return intended and achieved requests/s between the first and the last arrival."""
    scheduled = [record.scheduled_at for record in online]
    sent = [record.sent_at for record in online if record.sent_at is not None]
    intended, achieved = _rate(scheduled), _rate(sent)
    if intended is not None and achieved is None:
        achieved = 0.0
    return {"intended_rate": intended, "achieved_rate": achieved if intended is not None else None}


def _rate(times: Sequence[float]) -> float | None:
    span = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span if span >= MIN_SPAN else None


def client_cpu(samples: Sequence[ClientSample], window: tuple[float, float]) -> float | None:
    """Return the client's share of a core over the window, or over the run if the window has < 2 samples."""
    inside = [sample for sample in samples if window[0] - 1.0 <= sample.at <= window[1] + 1.0]
    chosen = inside if len(inside) > 1 else samples
    elapsed = chosen[-1].at - chosen[0].at if chosen else 0.0
    return (chosen[-1].cpu - chosen[0].cpu) / elapsed if elapsed > 0 else None


def lengths(requests: Sequence[RequestRecord], jobs: Sequence[JobRecord]) -> dict[str, Any]:
    """Return requested and received tokens of successful requests, number of differences, and cached prompt tokens."""
    done = [record for record in requests if record.ok]
    counted = [record for record in done if record.input_tokens is not None]
    cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
    finished_jobs = [job for job in jobs if job.output_lines == job.lines]
    return {
        "input_asked": sum(record.input_asked for record in counted),
        "input_got": sum(record.input_tokens or 0 for record in counted),
        "input_differs": sum(record.input_tokens != record.input_asked for record in counted),
        "output_asked": sum(record.output_asked for record in done),
        "output_got": sum(record.output_tokens for record in done),
        "output_differs": sum(record.output_tokens != record.output_asked for record in done),
        "tokens_without_own_chunk": sum(silent_tokens(record) for record in done),
        "requests": len(done),
        "without_usage": len(done) - len(counted),
        "cached_prompt_tokens": sum(cached) if cached else None,
        "job_output_asked": sum(job.output_asked for job in finished_jobs),
        "job_output_got": sum(job.output_tokens for job in finished_jobs),
        "jobs_counted": len(finished_jobs),
    }


def silent_tokens(record: RequestRecord) -> int:
    """Return the number of tokens without a chunk of their own, e.g. special tokens and parts of a character.

    Many such tokens make the TBT distribution a mix of long gaps and zeros.
    """
    return max(0, record.output_tokens - len(record.chunk_tokens))


def reasons(found: dict[str, Any], slo: Slo) -> list[str]:
    """Return the reasons why the run is invalid."""
    listed = []
    lag, limit = found.get("send_lag_p99"), dict(slo.limits).get("ttft")
    if lag is not None and lag > MAX_LAG:
        listed.append(f"P99 send lag {lag * 1e3:.1f} ms is over {MAX_LAG * 1e3:g} ms")
    elif lag is not None and limit is not None and lag > MAX_LAG_SHARE * limit:
        listed.append(f"P99 send lag {lag * 1e3:.1f} ms is over 5 % of the TTFT limit of {limit * 1e3:g} ms")
    intended, achieved = found.get("intended_rate"), found.get("achieved_rate")
    if intended and achieved is not None and abs(achieved / intended - 1) > MAX_RATE_ERROR:
        listed.append(f"the achieved rate {achieved:.3g}/s is not the intended {intended:.3g}/s")
    cpu = found.get("client_cpu")
    if cpu is not None and cpu > MAX_CPU:
        listed.append(f"the client's core is {cpu:.0%} busy; lower the rate")
    return listed
