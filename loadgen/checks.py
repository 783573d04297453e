"""Validity checks of a run.

A run is INVALID if the client, rather than the server, may have determined the results: send lag, achieved rate, client
CPU, and requested against received lengths.
"""

from collections.abc import Sequence
from typing import Any

from loadgen.metrics import Slo, in_window, spread
from loadgen.records import ClientSample, JobRecord, Records, RequestRecord

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
        **spread([record.lag for record in online], "send_lag"),
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
    """Return the busiest worker's share of a core over the window, or over the run if the window has < 2 samples."""
    shares = []
    for worker in {sample.worker for sample in samples}:
        own = [sample for sample in samples if sample.worker == worker]
        inside = [sample for sample in own if window[0] - 1.0 <= sample.at <= window[1] + 1.0]
        chosen = inside if len(inside) > 1 else own
        elapsed = chosen[-1].at - chosen[0].at
        if elapsed > 0:
            shares.append((chosen[-1].cpu - chosen[0].cpu) / elapsed)
    return max(shares, default=None)


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
    lag, limit = found.get("send_lag_p99"), slo.limit("ttft")
    if lag is not None and lag > MAX_LAG:
        listed.append(f"P99 send lag {lag * 1e3:.1f} ms is over {MAX_LAG * 1e3:g} ms")
    elif lag is not None and limit is not None and lag > MAX_LAG_SHARE * limit:
        listed.append(f"P99 send lag {lag * 1e3:.1f} ms is over 5 % of the TTFT limit of {limit * 1e3:g} ms")
    intended, achieved = found.get("intended_rate"), found.get("achieved_rate")
    if intended and achieved is not None and abs(achieved / intended - 1) > MAX_RATE_ERROR:
        listed.append(f"the achieved rate {achieved:.3g}/s is not the intended {intended:.3g}/s")
    cpu = found.get("client_cpu")
    if cpu is not None and cpu > MAX_CPU:
        listed.append(f"the client's core is {cpu:.0%} busy; increase --workers")
    return listed
