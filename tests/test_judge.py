"""Every form of an SLO is judged as it was promised: single requests, aggregates of the last ones, tolerances."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fuzz import examples

from predictor.judge import MAX_AGE, SLACK, WINDOW, Judge, Served, aggregate, excess, excess_over
from predictor.slo import SLO

FAR = Served(0.0, 999.0, [9.0] * 50)
FINE = Served(0.0, 0.1, [0.01] * 50)


def judge_all(slo: str, served: list[Served]) -> Judge:
    judge = Judge(SLO.parse(slo))
    for index, each in enumerate(served):
        judge.judge(float(index) / 10, each)
    return judge


@pytest.mark.parametrize("slo", ["tbt_mean=50ms", "ttft_mean=1s", "tpot_mean=40ms", "ttft_p99=1s,tbt_mean=50ms"])
def test_a_mean_that_is_far_off_is_no_good_answer(slo: str) -> None:
    judge = Judge(SLO.parse(slo))
    assert judge.judge(0.0, FINE).good
    verdict = judge.judge(1.0, FAR)
    assert not verdict.good and any(excess > 0 for excess in verdict.excesses.values())
    assert judge.attainment(1.0) == 0.5 and (judge.good, judge.bad) == (1, 1)


def test_a_tolerance_is_judged_once_there_is_something_to_compare_with() -> None:
    judge = Judge(SLO.parse("5%"))
    unknown = judge.judge(0.0, FINE)
    assert unknown.excesses == {} and unknown.good is None and math.isnan(judge.attainment(0.0))
    assert all(math.isnan(s.bound) and math.isnan(s.attainment) for s in judge.standings(0.0))
    judge.set_baseline({"ttft_mean": 0.1, "ttft_p99": 0.1, "tbt_mean": 0.01, "tbt_p99": 0.01})
    assert judge.judge(1.0, FINE).good
    assert not judge.judge(2.0, FAR).good
    shown = {s.objective: s for s in judge.standings(2.0)}
    assert shown["ttft_mean=5%"].bound == pytest.approx(0.105) and shown["ttft_mean=5%"].attainment == 0.5
    assert shown["tbt_p99=5%"].value == 9.0


def test_limits_of_single_requests_are_kept_or_missed_by_each() -> None:
    judge = judge_all("ttft_p90=1s,tbt_p99=100ms", [FINE] * 7 + [FAR, Served(0.0, 0.2, [0.01, 0.2]), FINE])
    shown = {s.objective: s for s in judge.standings(1.0)}
    assert shown["ttft_p90=1s"].attainment == 0.9 and shown["tbt_p99=100ms"].attainment == 0.8
    assert shown["ttft_p90=1s"].value == 0.2, "nine in ten took at most that"
    assert judge.attainment(1.0) == 0.8


def test_a_failed_request_is_bad_under_every_slo() -> None:
    for slo in ("ttft_p99=1s", "tbt_mean=50ms", "5%"):
        verdict = Judge(SLO.parse(slo)).judge(0.0, Served(0.0, None, [], failed=True))
        assert not verdict.good and not verdict.limits_kept


def test_a_verdict_says_how_close_a_request_came_to_its_nearest_limit() -> None:
    judge = Judge(SLO.parse("ttft_p99=1s,tbt_p99=100ms,tbt_mean=1ms"))
    assert judge.judge(0.0, Served(0.0, 0.5, [0.01] * 50)).used == pytest.approx(0.5)
    assert judge.judge(0.0, Served(0.0, 0.5, [0.01] * 50 + [0.09])).used == pytest.approx(0.9)
    assert judge.judge(0.0, Served(0.0, 0.5, [0.01] * 200 + [0.09])).used == 0.5, "one gap of 200 may be any"
    assert judge.judge(0.0, Served(0.0, None, [])).used == math.inf
    assert Judge(SLO.parse("5%,tbt_mean=50ms")).judge(0.0, FAR).used == 0.0, "no limit is one of single requests"


def test_the_window_is_bounded_and_forgets() -> None:
    judge = judge_all("ttft_mean=1s", [FAR] * 50 + [FINE] * WINDOW)
    assert judge.standings(25.0)[0].value == pytest.approx(0.1)
    assert judge.judge(25.0, FINE).good, "the far ones are forgotten"
    assert math.isnan(judge.attainment(25.1 + MAX_AGE)) and judge.good + judge.bad == WINDOW + 51


def test_a_request_that_gave_up_is_held_to_what_it_broke() -> None:
    judge = Judge(SLO.parse("ttft_p99=1s,tbt_p99=100ms"))
    assert not judge.breaks_a_limit(Served(0.0, 0.9, []))
    assert judge.breaks_a_limit(Served(0.0, 1.1, []))
    assert judge.breaks_a_limit(Served(0.0, 0.5, [0.01, 0.3]))
    assert not Judge(SLO.parse("5%")).breaks_a_limit(FAR)


requests = st.lists(
    st.tuples(st.floats(0.001, 5.0), st.lists(st.floats(0.001, 1.0), max_size=8)), min_size=1, max_size=40
)


@given(requests, st.sampled_from(["ttft_mean", "ttft_p95", "tbt_mean", "tbt_p90", "tpot_mean", "tpot_p50"]))
@settings(deadline=None, max_examples=examples(200))
def test_the_sum_of_excesses_says_what_the_aggregate_says(spans: list[tuple[float, list[float]]], key: str) -> None:
    """O(1) sums against the definition, on both sides of every value that occurs."""
    objective = SLO.parse(f"{key}=10%").objectives[0]
    value = aggregate(spans, [key])[key]
    for bound in (value * 0.999, value * 1.001, 0.5):
        if bound <= 0.0:
            continue
        over = sum(excess(objective, Served(0.0, ttft, gaps), bound) for ttft, gaps in spans)
        assert (over > 1e-9) == (value > bound), (value, bound, over)


def test_running_sums_agree_with_a_fresh_look_after_many_requests() -> None:
    generator = random.Random(3)
    judge = Judge(SLO.parse("tbt_mean=50ms,ttft_p99=10%"))
    judge.set_baseline({"ttft_p99": 0.5})
    served = []
    for index in range(1000):
        served.append(Served(0.0, generator.expovariate(8.0), [generator.expovariate(20.0) for _ in range(10)]))
        judge.judge(index / 10, served[-1])
        found = aggregate([(s.ttft or 0.0, s.gaps) for s in served[-WINDOW:]], ["tbt_mean", "ttft_p99"])
        kept = judge._window[-1].kept
        assert kept == {"tbt_mean": found["tbt_mean"] <= 0.05, "ttft_p99": found["ttft_p99"] <= 0.55}


def test_means_are_compared_request_by_request() -> None:
    """A request that is slow alone as well proves nothing."""
    objectives = {o.key: o for o in SLO.parse("5%").objectives}
    alone = {"ttft_mean": 0.2, "ttft_p99": 1.0, "tbt_mean": 0.02, "tbt_p99": 0.05}
    long = Served(0.0, 1.0, [0.04] * 10)
    over = excess_over(objectives["ttft_mean"], long, alone, (1.0, 0.04))
    assert over == pytest.approx(-(1.05 * (1 + SLACK) - 1) * 5)
    assert excess_over(objectives["tbt_mean"], long, alone, (1.0, 0.02)) > 0.0  # type: ignore[operator]
    assert excess_over(objectives["tbt_p99"], long, alone, (1.0, 0.02)) == pytest.approx(-0.1)
    assert excess_over(objectives["ttft_mean"], Served(0.0, None, []), alone, (1.0, 0.02)) is None
    assert excess_over(objectives["ttft_mean"], long, {"ttft_mean": 0.0}, (0.0, 0.0)) is None
