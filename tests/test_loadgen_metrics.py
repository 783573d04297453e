"""Metrics, intervals and validity against numbers worked out by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import InputError, metrics, report, stats
from loadgen.metrics import Slo, honesty
from loadgen.records import ClientSample, JobPoll, JobRecord, Records, RequestRecord


def request(index: int, scheduled: float, times: list[float], tokens: list[int] | None = None, **more) -> RequestRecord:
    """A request of 10 prompt tokens whose chunks arrive at `times`."""
    fields = {
        "service_class": "online", "input_asked": 10, "output_asked": len(times), "sent_at": scheduled, "lag": 0.0,
        "first_token_at": times[0] if times else None, "ended_at": times[-1] if times else scheduled, "outcome": "ok",
        "status": 200, "input_tokens": 10, "output_tokens": sum(tokens or [1] * len(times)), "chunk_at": times,
        "chunk_tokens": tokens or [1] * len(times),
    }  # fmt: skip
    return RequestRecord(index=index, scheduled_at=scheduled, **(fields | more))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=80), st.floats(0.1, 100))
def test_nearest_rank_is_the_smallest_value_that_covers_the_share(values, percent) -> None:
    found = stats.nearest_rank(values, percent)
    share = sum(value <= found for value in values) / len(values) * 100
    below = sum(value < found for value in values) / len(values) * 100
    assert found in values and share >= percent - 1e-6 and below < percent + 1e-6
    with pytest.raises(ValueError):
        stats.nearest_rank([], percent)


def test_wilson_against_published_values() -> None:
    assert stats.wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert stats.wilson(0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert stats.wilson(20, 20)[1] == 1.0 and stats.wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError):
        stats.wilson(3, 2)


def test_latencies_by_hand() -> None:
    chosen = [request(0, 1.0, [1.5, 1.7, 2.0]), request(1, 2.0, [3.0, 3.0], [1, 3]), request(2, 3.0, [3.1])]
    found = metrics.latencies(chosen)
    assert found["ttft_mean"] == pytest.approx((0.5 + 1.0 + 0.1) / 3)
    assert found["ttft_p50"] == pytest.approx(0.5) and found["ttft_p99"] == pytest.approx(1.0)
    assert found["normalized_ttft_p50"] == pytest.approx(0.05)
    # Gaps: 0.2, 0.3 | 0 (the second chunk came at once), 0, 0 | none.
    assert found["tbt_mean"] == pytest.approx(0.5 / 5) and found["tbt_p99"] == pytest.approx(0.3)
    assert found["tbt_p50"] == 0.0 and found["request_tbt_p99_mean"] == pytest.approx(0.15)
    assert found["tpot_mean"] == pytest.approx((0.25 + 0.0) / 2)
    assert found["e2e_p99"] == pytest.approx(1.0)
    counts = {"ttft": 3, "ttft_sent": 3, "normalized_ttft": 3, "request_tbt_p99": 2, "tpot": 2, "e2e": 3, "tbt": 5}
    assert found["counts"] == counts


def test_no_value_is_none_and_not_zero() -> None:
    found = metrics.latencies([])
    assert found["ttft_p99"] is None and found["tbt_mean"] is None and found["counts"]["tbt"] == 0


def test_good_needs_success_and_every_limit() -> None:
    slo = Slo.parse(["ttft:500", "tbt_p99:100"])
    assert dict(slo.limits) == {"ttft": 0.5, "tbt_p99": 0.1}
    assert slo.good(request(0, 0.0, [0.5, 0.55, 0.65]))
    assert not slo.good(request(0, 0.0, [0.51, 0.55]))
    assert not slo.good(request(0, 0.0, [0.1, 0.25]))
    assert slo.good(request(0, 0.0, [0.4])), "no gap: the TBT limit holds"
    assert not slo.good(request(0, 0.0, [0.1, 0.2], outcome="cut"))
    assert not slo.good(request(0, 0.0, [], outcome="ok")), "no token: no TTFT to keep"
    assert Slo.parse(["e2el:1000"]).good(request(0, 0.0, [0.1, 0.9]))
    assert not Slo.parse(["tpot:100"]).good(request(0, 0.0, [0.1, 0.9]))
    # 100 gaps: nearest-rank P99 is the 99th, so one bad gap of a hundred is forgiven and two are not.
    smooth = np.arange(101) * 0.01
    assert slo.good(request(0, 0.0, [*smooth[:-1], smooth[-1] + 0.3]))
    assert not slo.good(request(0, 0.0, [*smooth[:-2], smooth[-2] + 0.3, smooth[-1] + 0.6]))
    for bad in ("ttft", "ttft:x", "speed:5", "ttft:-1", "ttft:nan"):
        with pytest.raises(InputError):
            Slo.parse([bad])


def test_attainment_counts_every_request_scheduled_in_the_window() -> None:
    slo = Slo.parse(["ttft:500"])
    requests = [
        request(0, 0.5, [0.6]),  # before the window
        request(1, 1.0, [1.2]),
        request(2, 2.0, [2.9]),  # late
        request(3, 3.0, [], outcome="http_error", status=429, output_tokens=0),
        request(4, 4.0, [], outcome="timeout", output_tokens=0),
        request(5, 4.5, [4.6], outcome="unfinished"),
        request(6, 4.9, [5.1]),  # answered after the window: counts for latency, not for throughput
        request(7, 5.5, [5.6]),
    ]
    found = metrics.online_metrics(Records(requests=requests), (1.0, 5.0), slo)
    assert found["requests"] == 6 and found["good"] == 2
    assert found["slo_attainment"] == pytest.approx(2 / 6)
    assert found["slo_attainment_interval"] == pytest.approx(list(stats.wilson(2, 6)))
    assert found["outcomes"] == {"ok": 3, "http_error": 1, "timeout": 1, "unfinished": 1}
    assert found["statuses"]["429"] == 1
    # First tokens inside [1, 5]: requests 1, 2 and 5.
    assert found["input_throughput"] == pytest.approx(30 / 4) and found["output_throughput"] == pytest.approx(3 / 4)


def test_offline_throughput_counts_tokens_stamped_in_the_window() -> None:
    flex = request(0, 0.0, [1.0, 2.0, 3.0, 9.0], service_class="offline")
    job = JobRecord(0, 10, created_at=0.0, status="completed", output_lines=10, input_tokens=300, output_tokens=100)
    job.polls = [JobPoll(0.0, "validating", 0, 0), JobPoll(4.0, "in_progress", 5, 0), JobPoll(8.0, "completed", 10, 0)]
    found = metrics.offline_metrics(Records(requests=[flex], jobs=[job]), (1.5, 6.0))
    # Flex: two output tokens. Job: 200 tokens in [0, 4], 200 in [4, 8]: 125 + 100.
    assert found["offline_throughput"] == pytest.approx((2 + 125 + 100) / 4.5)
    assert found["jobs"][0]["resolution"] == "finished lines at each poll"
    assert found["jobs"][0]["created_to_in_progress"] == 4.0 and found["jobs"][0]["makespan"] == 8.0


def test_a_job_with_running_usage_is_credited_by_it() -> None:
    job = JobRecord(0, 2, created_at=0.0, status="completed", output_lines=2, input_tokens=60, output_tokens=40)
    states = [("in_progress", 0, 20), ("in_progress", 1, 60), ("completed", 2, 100)]
    job.polls = [JobPoll(float(n), status, done, 0, tokens) for n, (status, done, tokens) in enumerate(states)]
    assert metrics.job_tokens(job, 0.5, 1.5) == pytest.approx(20 + 20)
    assert metrics.job_metrics(job)["resolution"] == "tokens at each poll"


def test_job_deadline_and_failure() -> None:
    job = JobRecord(0, 2, created_at=1.0, completion_window=5.0, status="completed")
    job.polls = [JobPoll(1.0, "validating", 0, 0), JobPoll(7.0, "completed", 2, 0)]
    assert metrics.job_metrics(job)["deadline_kept"] is False
    job.completion_window = 6.0
    assert metrics.job_metrics(job)["deadline_kept"] is True
    assert metrics.job_metrics(JobRecord(0, 2, error="no"))["makespan"] is None


def samples(cpu: float) -> list[ClientSample]:
    return [ClientSample(float(at), at * cpu, 0, 0) for at in range(11)]


def verdict(requests: list[RequestRecord], cpu: float = 0.1, slo: tuple[str, ...] = ()) -> list[str]:
    records = Records(requests=requests, samples=samples(cpu), ended_at=10.0)
    return honesty(records, (0.0, 10.0), Slo.parse(slo))[1]


def test_validity_checks() -> None:
    good = [request(n, n * 0.1, [n * 0.1 + 0.05]) for n in range(100)]
    assert verdict(good) == []
    assert any("busy" in reason for reason in verdict(good, cpu=0.81))
    lagging = [request(n, n * 0.1, [n * 0.1 + 0.05], lag=0.012 if n < 2 else 0.0) for n in range(100)]
    assert any("10 ms" in reason for reason in verdict(lagging))
    slight = [request(n, n * 0.1, [n * 0.1 + 0.05], lag=0.006) for n in range(100)]
    assert verdict(slight) == [] and any("5 %" in reason for reason in verdict(slight, slo=("ttft:100",)))
    slow = [request(n, n * 0.1, [n * 0.1 + 0.05], sent_at=n * 0.1 * 1.03) for n in range(100)]
    assert any("rate" in reason for reason in verdict(slow))
    unsent = [request(n, n * 0.1, [], sent_at=None if n % 2 else n * 0.1) for n in range(100)]
    assert any("rate" in reason for reason in verdict(unsent))


def test_honesty_reports_lengths_asked_and_got() -> None:
    requests = [
        request(0, 0.0, [1.0, 2.0], [3, 1], input_tokens=9, cached_tokens=4, output_tokens=5),
        request(1, 1.0, [2.0], input_tokens=None),
    ]
    found, _ = honesty(Records(requests=requests), (0.0, 5.0), Slo())
    assert found["lengths"]["input_asked"] == 10 and found["lengths"]["input_got"] == 9
    assert found["lengths"]["input_differs"] == 1 and found["lengths"]["without_usage"] == 1
    assert found["lengths"]["tokens_without_own_chunk"] == 3
    assert found["lengths"]["cached_prompt_tokens"] == 4 and found["client_cpu"] is None


def test_timeline_loses_no_token() -> None:
    requests = [request(n, n * 0.37, [n * 0.37 + 0.1, n * 0.37 + 0.9]) for n in range(20)]
    records = Records(requests=requests, samples=samples(0.5), ended_at=10.0)
    columns = report.timeline(records)
    assert columns["online_tokens"].sum() == 20 * 12 and columns["online_arrivals"].sum() == 20
    assert columns["client_cpu"] == pytest.approx(np.full(10, 0.5))
    assert columns["online_arrivals"][0] == 3 and math.isclose(columns["t"][3], 3.0)
