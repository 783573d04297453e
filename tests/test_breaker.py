"""The circuit breaker and its sequential tests: quick with a broken promise at any rate, silent with a kept one."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.breaker import (
    ALONE_SECONDS,
    DOUBLING_SECONDS,
    FALSE_ALARMS,
    FEWEST_SAMPLES,
    FIRST_SHARE,
    LONGEST_OPEN,
    OPEN_SECONDS,
    REGROW_SECONDS,
    RETURN_SECONDS,
    SMALLEST_SHARE,
    BreakerState,
    CircuitBreaker,
    ExcessTest,
    MissTest,
)

ATTAINMENT = 0.99
SEEDS = 8
OPEN, HALF_OPEN, CLOSED = BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED


def run_requests(breaker: CircuitBreaker, start: float, outcomes: str, every: float = 0.1) -> float:
    """Requests one after the other: `.` good, `x` missed beside offline work, `o` missed without any. Ends when?"""
    now = start
    for outcome in outcomes:
        breaker.record_request(now, now - 0.05, outcome == ".", outcome != "o")
        now += every
    return now - every


# The sequential tests


@pytest.mark.parametrize("good", [0, 10_000])
@pytest.mark.parametrize(("allowed", "misses"), [(0.01, 4), (0.05, 5), (0.1, 7), (0.5, 19)])
def test_misses_in_a_row_are_an_alarm_and_old_good_requests_buy_nothing(allowed: float, misses: int, good: int) -> None:
    test = MissTest(allowed)
    for missed in [False] * good + [True] * misses:
        test.record(missed)
    assert test.alarm


Draw = Callable[[random.Random], float]


def alarms(test: MissTest | ExcessTest, draw: Draw, requests: int, seed: int) -> int:
    generator, found = random.Random(seed), 0
    for _ in range(requests):
        test.record(draw(generator))  # type: ignore[arg-type]
        if test.alarm:
            found += 1
            test.restart()
    return found


def misses(share: float) -> Draw:
    return lambda generator: generator.random() < share


@pytest.mark.parametrize("allowed", [0.01, 0.05, 0.1, 0.5])
def test_false_alarms_are_bounded_at_the_very_edge_of_the_promise(allowed: float) -> None:
    requests = 5_000
    found = sum(alarms(MissTest(allowed), misses(allowed), requests, seed) for seed in range(SEEDS))
    assert found <= 2 * FALSE_ALARMS * requests * SEEDS, "the bound, twice over for chance"


@pytest.mark.parametrize(("share", "within"), [(1.0, 4), (0.5, 40), (0.1, 400), (0.05, 2000)])
def test_more_misses_than_promised_are_found(share: float, within: int) -> None:
    assert all(alarms(MissTest(0.01), misses(share), within, seed) for seed in range(SEEDS))


@pytest.mark.parametrize(
    "draw",
    [
        lambda g: g.gauss(0.0, 0.3),
        lambda g: g.expovariate(1.0) - 1.0,
        lambda g: g.lognormvariate(0.0, 1.0) - math.exp(0.5),
        lambda g: (g.random() < 0.01) - 0.01,
    ],
    ids=["normal", "exponential", "lognormal", "percentile"],
)
def test_a_mean_on_its_bound_gives_next_to_no_alarm(draw: Draw) -> None:
    assert sum(alarms(ExcessTest(), draw, 2_000, seed) for seed in range(5)) <= 2


@pytest.mark.parametrize(
    ("draw", "within"),
    [(lambda g: 0.5, FEWEST_SAMPLES), (lambda g: g.gauss(1.0, 0.5), 20), (lambda g: g.expovariate(1.0) - 0.6, 2000)],
    ids=["all late", "twice", "two fifths over, exponential"],
)
def test_a_mean_over_its_bound_is_found(draw: Draw, within: int) -> None:
    assert all(alarms(ExcessTest(), draw, within, seed) for seed in range(5))


# The breaker


@pytest.mark.parametrize("rate", [0.01, 0.5, 10.0])
def test_it_opens_at_any_rate(rate: float) -> None:
    """Every request late beside offline work: it must not take a crowd to see it."""
    breaker = CircuitBreaker(ATTAINMENT)
    run_requests(breaker, 0.0, "xxxx", every=1.0 / rate)
    assert breaker.num_openings == 1 and breaker.cause == "slo"


@pytest.mark.parametrize("rate", [0.3, 1.0])
def test_it_stays_open_for_most_of_a_time_in_which_every_request_would_be_late(rate: float) -> None:
    """Only requests that offline work may touch are late: those that come while it is open are good."""
    breaker, now, exposed = CircuitBreaker(ATTAINMENT), 0.0, 0
    for _ in range(round(1800 * rate)):
        now += 1.0 / rate
        beside = breaker.share(now) > 0.0
        exposed += beside
        breaker.record_request(now, now - 0.5, not beside, beside)
    assert exposed / (1800 * rate) < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_stream_never_opens_it(seed: int) -> None:
    """Two hours at 2 requests/s, half as many misses as the SLO allows, means below their bounds, noisy steps."""
    generator, breaker = random.Random(seed), CircuitBreaker(ATTAINMENT)
    for index in range(14_400):
        now = index / 2.0
        excesses = {"tbt_mean": generator.gauss(-0.1, 0.3), "ttft_mean": generator.expovariate(1.0) - 1.1}
        breaker.record_request(now, now - 0.5, generator.random() >= 0.005, True, excesses)
        breaker.record_step(now, generator.gauss(-0.3, 0.2))
    assert breaker.num_openings == 0 and breaker.share(8000.0) == 1.0


def test_the_bound_of_the_share_is_named() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    assert breaker.limit(0.0) == "evidence", "the budget is unproven"
    breaker.renew()
    assert breaker.limit(0.0) == "none" and breaker.share(0.0) == 1.0
    breaker.record_request(1.0, 0.5, False, True, {})
    assert breaker.limit(1.0) == "brake" and 0.0 < breaker.share(1.0) < 1.0
    for index in range(FEWEST_SAMPLES):
        breaker.record_request(2.0 + index, 1.5 + index, False, True, {})
    assert breaker.limit(2.0 + FEWEST_SAMPLES) == "breaker"


def test_an_aggregate_over_its_bound_opens_it_and_is_named() -> None:
    breaker = CircuitBreaker(None)
    for index in range(FEWEST_SAMPLES):
        assert breaker.state(index) is CLOSED
        breaker.record_request(index, index - 0.5, False, True, {"tbt_mean": 0.5, "ttft_mean": -0.5})
    assert breaker.state(8.0) is OPEN and breaker.cause == "tbt_mean"


def test_what_becomes_known_late_counts_unless_it_came_before_the_opening() -> None:
    breaker = CircuitBreaker(None)
    for index in range(FEWEST_SAMPLES):
        breaker.record_excesses(100.0 + index, index, {"tbt_p99": 1.0})
    assert breaker.num_openings == 1 and breaker.opened_at == 100.0 + FEWEST_SAMPLES - 1
    for index in range(100):
        breaker.record_excesses(300.0 + index, 50.0, {"tbt_p99": 1.0})
    assert breaker.num_openings == 1


def test_one_hiccup_is_one_miss_however_many_it_hits() -> None:
    """A step that takes a second makes every running request miss; ten such steps are another matter."""
    breaker = CircuitBreaker(ATTAINMENT)
    for index in range(50):
        breaker.record_request(1.0 + index / 10, 0.5, False, True, moment=0.7)
    assert breaker.num_openings == 0
    for index in range(4):
        breaker.record_request(7.0, 6.0, False, True, moment=6.1 + index)
    assert breaker.num_openings == 1


def test_it_decays_by_itself_through_half_open() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    breaker.renew()
    opened = run_requests(breaker, 0.0, "xxxx")
    returns = opened + OPEN_SECONDS
    assert breaker.share(opened) == 0.0
    assert breaker.state(returns - 0.01) is OPEN
    assert breaker.state(returns) is HALF_OPEN
    assert breaker.share(returns) == pytest.approx(SMALLEST_SHARE)
    assert breaker.share(returns + DOUBLING_SECONDS) == pytest.approx(2 * SMALLEST_SHARE)
    assert breaker.state(returns + RETURN_SECONDS - 0.01) is HALF_OPEN and breaker.cause == "slo"
    assert breaker.state(returns + RETURN_SECONDS) is CLOSED
    assert breaker.cause is None and breaker.num_openings == 1


def test_a_miss_while_half_open_opens_it_again_and_for_longer() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    now = run_requests(breaker, 0.0, "xxxx")
    for doublings in range(1, 12):
        now += min(OPEN_SECONDS * 2 ** (doublings - 1), LONGEST_OPEN) + 1.0
        assert breaker.state(now) is HALF_OPEN
        run_requests(breaker, now, "x")
        open_for = min(OPEN_SECONDS * 2**doublings, LONGEST_OPEN)
        assert breaker.num_openings == 1 + doublings
        assert breaker.state(now + open_for - 0.01) is OPEN and breaker.state(now + open_for) is HALF_OPEN
    assert open_for == LONGEST_OPEN


def test_good_requests_beside_offline_work_end_a_series_of_openings() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    opened = run_requests(breaker, 0.0, "xxxx")
    again = run_requests(breaker, opened + OPEN_SECONDS + 1.0, "." * 50 + "xxxx")
    assert breaker.num_openings == 2
    assert breaker.state(again + OPEN_SECONDS) is HALF_OPEN


def test_requests_from_before_the_opening_are_not_held_against_the_probe() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    opened = run_requests(breaker, 0.0, "xxxx")
    returns = opened + OPEN_SECONDS
    for index in range(20):
        breaker.record_request(returns + index / 10, opened - 1.0, False, True)
    for index in range(20):
        breaker.record_request(returns + index / 10, opened + 0.1, False, True, moment=returns - 0.01 * index - 0.01)
    assert breaker.num_openings == 1, "the others missed before offline work returned"


def test_a_late_judgement_does_not_prolong_the_opening() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    for moment in (1.0, 1.1, 1.2, 1.3):
        breaker.record_request(3.0, 0.5, False, True, moment=moment)
    assert breaker.num_openings == 1
    assert breaker.state(1.3 + OPEN_SECONDS - 0.01) is OPEN and breaker.state(1.3 + OPEN_SECONDS) is HALF_OPEN


def test_what_is_granted_follows_the_evidence() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    assert breaker.share(0.0) == 0.25, "no request has proven anything"
    proven = run_requests(breaker, 0.0, "." * 35)
    assert breaker.share(proven) == pytest.approx(1.0)
    spoiled = CircuitBreaker(ATTAINMENT)
    assert spoiled.share(run_requests(spoiled, 0.0, "x" + "." * 35) + 60.0) < 0.5, "growth is slow after a spell"
    missed = run_requests(breaker, proven, "x")
    assert breaker.share(missed) == pytest.approx(0.5) and breaker.state(missed) is CLOSED
    assert 0.8 < breaker.share(missed + DOUBLING_SECONDS) < 0.9, "a spell costs little"
    opened = run_requests(breaker, missed, "xxxx")
    assert breaker.share(opened) == 0.0
    closed = opened + OPEN_SECONDS + RETURN_SECONDS
    assert 0.8 < breaker.share(closed) < 0.9
    assert breaker.share(closed + REGROW_SECONDS) == 1.0, "it grows back while nothing happens"
    assert CircuitBreaker(None).share(0.0) == 1.0, "single requests prove nothing there"


def test_spells_that_come_again_and_again_lower_the_share_for_long() -> None:
    breaker, now = CircuitBreaker(ATTAINMENT), 0.0
    breaker.renew()
    for _ in range(12):
        now = run_requests(breaker, now + 1.0, "x" + "." * 49, every=1.0)
    assert breaker.share(now) < 0.3 and breaker.num_openings < 12
    assert breaker.share(now + 10.0 + 4 * REGROW_SECONDS) == 1.0


@pytest.mark.parametrize("cost", [0.03, 0.1, 0.4])
def test_it_comes_to_rest_near_what_is_allowed_whatever_the_budget_costs(cost: float) -> None:
    """`cost`: the share of requests that miss beside the whole budget."""
    generator, breaker, misses, count = random.Random(2), CircuitBreaker(ATTAINMENT), 0, 20_000
    for now in range(count):
        share = breaker.share(float(now))
        missed = generator.random() < cost * share
        misses += missed
        breaker.record_request(now, now - 0.1, not missed, share > 0.0, moment=now)
    assert 0.002 < misses / count < 0.018


def test_who_comes_close_to_a_limit_leaves_half_before_anybody_misses() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    proven = run_requests(breaker, 0.0, "." * 140)
    breaker.record_request(proven, proven - 0.1, True, True, used=0.79)
    assert breaker.share(proven) == pytest.approx(1.0)
    for moment in (proven, proven, proven):
        breaker.record_request(proven, proven - 0.1, True, True, moment=moment, used=0.81)
    assert breaker.share(proven) == pytest.approx(0.25), "by the same step two at most"
    for index in range(20):
        breaker.record_request(proven, proven - 0.1, True, True, moment=proven + index, used=0.95)
    assert breaker.share(proven) == SMALLEST_SHARE and breaker.num_openings == 0, "they kept the promise"
    breaker.record_request(proven, proven - 0.1, False, True, moment=proven, used=1.2)
    assert breaker.share(proven) == SMALLEST_SHARE, "the smallest share is left"


def test_while_requests_alone_miss_the_slo_nothing_is_tried_beside_them() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    opened = run_requests(breaker, 0.0, "xxxx")
    last = run_requests(breaker, opened + 1.0, "o" * 100, every=2.0)
    assert breaker.state(last + ALONE_SECONDS - 0.1) is OPEN and breaker.num_openings == 1
    for _ in range(3):  # the load falls: those alone keep it again
        breaker.record_request(last + 1.0, last + 0.9, True, False)
    assert breaker.state(last + ALONE_SECONDS) is HALF_OPEN


def test_a_wrong_predictor_opens_it_at_any_pace_but_a_hiccup_does_not() -> None:
    breaker = CircuitBreaker(ATTAINMENT)
    for step in range(20):
        breaker.record_step(step / 100, 100.0 if step == 10 else -0.6)
    assert breaker.state(1.0) is CLOSED
    for step in range(40):
        breaker.record_step(1 + 60.0 * step, 0.2)
        if breaker.num_openings:
            break
    assert breaker.state(1 + 60.0 * step) is OPEN and breaker.cause == "predictor"
    assert breaker.share(1e6) == FIRST_SHARE, "the budget is not to blame"


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from(".xoea")), max_size=200))
@settings(deadline=None)
def test_it_never_gives_more_than_its_state_allows(events: list[tuple[float, str]]) -> None:
    breaker, now = CircuitBreaker(ATTAINMENT), 0.0
    legal = {CLOSED: {CLOSED, OPEN}, OPEN: set(BreakerState), HALF_OPEN: set(BreakerState)}
    before = breaker.state(now)
    for gap, event in events:
        now += gap
        if event == "e":
            breaker.record_step(now, 1.0)
        elif event == "a":
            breaker.record_excesses(now, now, {"tbt_mean": 1.0})
        else:
            breaker.record_request(now, now, event == ".", event != "o")
        state = breaker.state(now)
        assert state in legal[before]
        allowed = {CLOSED: 1.0, HALF_OPEN: 1.0, OPEN: 0.0}[state]
        assert 0.0 <= breaker.share(now) <= allowed
        assert state is OPEN or breaker.share(now) >= SMALLEST_SHARE
        before = state
    assert breaker.state(now + 1000.0) is CLOSED


@pytest.mark.parametrize("start", [0.0, 3.0, 1e6])
def test_what_nobody_has_proven_does_not_grow_with_the_clock(start: float) -> None:
    """A machine's clock has run for days when a server starts, and no request may come for hours."""
    breaker = CircuitBreaker(ATTAINMENT)
    first = FIRST_SHARE
    assert [breaker.share(start + seconds) for seconds in (0.0, 60.0, 36_000.0)] == [first] * 3
    breaker.record_request(start + 36_001.0, start + 36_000.0, good=True, offline_contributed=True)
    proven = breaker.share(start + 36_001.0)
    assert first < proven < 2 * first and breaker.share(start + 36_001.0 + 10.0 + 600.0) == 1.0


def test_what_an_aggregate_has_cost_grows_back_where_no_request_is_judged_by_itself() -> None:
    breaker, now = CircuitBreaker(None), 5e5
    while not breaker.num_openings:
        now += 1.0
        breaker.record_request(now, now - 0.1, good=True, offline_contributed=True, excesses={"tbt_mean": 0.5})
        assert now < 5e5 + 1000.0
    later = now + 1000.0
    assert breaker.state(later) is CLOSED and breaker.share(later) == 1.0
