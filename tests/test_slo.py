"""From an SLO to the offline fill: parsing and judging, the circuit breaker, the budget search."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tables import for_each

from predictor.budget import BudgetParams
from predictor.budget_search import SearchResult, protecting_rules, search_budget
from predictor.judge import aggregate
from predictor.slo import ALLOWED, SLO, Objective, SLOError, nearest_rank

# Parsing


@for_each(
    ("text", "limits", "tolerances"),
    [
        ("ttft_p99=1s,tbt_p99=100ms", {"ttft_p99": 1.0, "tbt_p99": 0.1}, {}),
        ("tbt_mean=50ms", {"tbt_mean": 0.05}, {}),
        (" TTFT_P50 = 1.5 s , tpot_mean=.5ms", {"ttft_p50": 1.5, "tpot_mean": 0.0005}, {}),
        ("tbt_p90=250us", {"tbt_p90": 0.00025}, {}),
        ("5%", {}, {"ttft_mean": 0.05, "ttft_p99": 0.05, "tbt_mean": 0.05, "tbt_p99": 0.05}),
        ("ttft_p99=5%", {}, {"ttft_p99": 0.05}),
        ("tbt_mean=12.5%,ttft_p99=2s", {"ttft_p99": 2.0}, {"tbt_mean": 0.125}),
        ("5%,tbt_p99=50%", {}, {"ttft_mean": 0.05, "ttft_p99": 0.05, "tbt_mean": 0.05, "tbt_p99": 0.5}),
        ("ttft_p99=1s,5%", {"ttft_p99": 1.0}, {"ttft_mean": 0.05, "tbt_mean": 0.05, "tbt_p99": 0.05}),
    ],
)
def test_parse(text: str, limits: dict[str, float], tolerances: dict[str, float]) -> None:
    for slo in (SLO.parse(text), SLO.parse(str(SLO.parse(text)))):
        assert {o.key: o.limit for o in slo.objectives if o.limit} == pytest.approx(limits)
        assert slo.tolerances() == pytest.approx(tolerances)


@for_each(
    ("text", "part", "reason"),
    [
        ("", "", "empty"),
        ("ttft_p99=1s,", "", "empty"),
        ("fast", "fast", "neither a time nor a percentage"),
        ("100ms", "100ms", "a time needs a metric"),
        ("5%,10%", "10%", "second percentage"),
        ("ttft_p99=1s,ttft_p99=2s", "ttft_p99=2s", "second objective for ttft_p99"),
        ("ttft_p99=1s,latency_p99=2s", "latency_p99=2s", "unknown metric 'latency'"),
        ("ttft=1s", "ttft=1s", "unknown statistic ''"),
        ("ttft_max=1s", "ttft_max=1s", "unknown statistic 'max'"),
        ("ttft_p49=1s", "ttft_p49=1s", "unknown statistic 'p49'"),
        ("ttft_p100=1s", "ttft_p100=1s", "unknown statistic 'p100'"),
        ("ttft_p9=1s", "ttft_p9=1s", "unknown statistic 'p9'"),
        ("ttft_p٩٩=1s", "ttft_p٩٩=1s", "unknown statistic"),
        ("ttft_p99=1", "ttft_p99=1", "has no unit"),
        ("ttft_p99=", "ttft_p99=", "neither a time nor a percentage"),
        ("ttft_p99=1m", "ttft_p99=1m", "neither a time nor a percentage"),
        ("ttft_p99=-1s", "ttft_p99=-1s", "neither a time nor a percentage"),
        ("ttft_p99=nans", "ttft_p99=nans", "neither a time nor a percentage"),
        ("ttft_p99=0s", "ttft_p99=0s", "not a positive number"),
        ("0%", "0%", "not a positive number"),
        ("ttft_p99=" + "9" * 400 + "s", "ttft_p99=" + "9" * 400 + "s", "not a positive number"),
        ("ttft_p99=1s=2s", "ttft_p99=1s=2s", "neither a time nor a percentage"),
    ],
)
def test_parse_errors_name_the_part_and_what_is_allowed(text: str, part: str, reason: str) -> None:
    with pytest.raises(SLOError, match=reason) as caught:
        SLO.parse(text)
    assert isinstance(caught.value, ValueError)
    assert caught.value.part == part and f"'{part}'" in str(caught.value)
    assert ("; " in str(caught.value)) or str(caught.value).count(ALLOWED) == 1
    assert "\n" not in str(caught.value)


@for_each(
    ("text", "told"),
    [
        ("ttft_p99=1", "SLO 'ttft_p99=1': '1' has no unit; did you mean ttft_p99=1s or ttft_p99=1ms?"),
        (
            "ttft_p99=1s tbt_p99=100ms",
            "SLO 'ttft_p99=1s tbt_p99=100ms': white space between objectives; separate objectives with commas",
        ),
        ("ttft_p9=1s", "SLO 'ttft_p9=1s': unknown statistic 'p9'; did you mean p90 or p99?"),
        ("tttf_p99=1s", "SLO 'tttf_p99=1s': unknown metric 'tttf'; did you mean ttft?"),
    ],
)
def test_parse_errors_suggest_the_likely_meaning(text: str, told: str) -> None:
    with pytest.raises(SLOError) as caught:
        SLO.parse(text)
    assert str(caught.value) == told


@given(st.text(max_size=30))
@settings(deadline=None)
def test_parse_raises_nothing_but_its_error(text: str) -> None:
    try:
        slo = SLO.parse(text)
    except SLOError:
        return
    assert slo.objectives


def test_properties() -> None:
    slo = SLO.parse("ttft_p90=1s,ttft_mean=500ms,tbt_p99=100ms,tbt_mean=10%")
    assert slo.attainment_target == 0.99
    assert slo.limit_of("ttft") == 0.5 and slo.limit_of("tbt") == 0.1 and slo.limit_of("tpot") is None
    assert slo.gap_limited and not SLO.parse("tbt_mean=50ms,ttft_p99=1s").gap_limited
    assert SLO.parse("5%,ttft_mean=1s").attainment_target is None


# Judging


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(1, 99))
@settings(deadline=None)
def test_nearest_rank_is_the_smallest_that_covers(values: list[int], percentile: int) -> None:
    found = nearest_rank(values, percentile)
    covering = [v for v in values if 100 * sum(other <= v for other in values) >= percentile * len(values)]
    assert found == min(covering)


@for_each(
    ("text", "ttft", "gaps", "good"),
    [
        ("ttft_p99=1s,tbt_p99=100ms", 1.0, [0.1] * 5, True),
        ("ttft_p99=1s,tbt_p99=100ms", 1.01, [0.1] * 5, False),
        ("ttft_p99=1s,tbt_p99=100ms", 0.5, [0.05] * 99 + [9.0], True),
        ("ttft_p99=1s,tbt_p99=100ms", 0.5, [0.05] * 98 + [9.0], False),
        ("ttft_p99=1s,tbt_p99=100ms", 0.5, [], True),
        ("ttft_p99=1s,tbt_p99=100ms", None, [], False),
        ("tbt_p50=100ms", 9.0, [0.1, 0.1, 5.0, 5.0], True),
        ("tbt_p50=100ms", 9.0, [0.1, 5.0, 5.0], False),
        ("tpot_p99=100ms", 9.0, [0.0, 0.0, 0.3], True),
        ("tpot_p99=100ms", 9.0, [0.0, 0.0, 0.31], False),
        ("ttft_mean=1s", 9.0, [9.0], True),
        ("5%", None, [], True),
    ],
)
def test_one_request(text: str, ttft: float | None, gaps: list[float], good: bool) -> None:
    assert SLO.parse(text).good(ttft, gaps) is good


def test_aggregates_pool_the_gaps() -> None:
    requests = [(1.0, [0.1] * 9), (3.0, [0.9]), (2.0, [])]
    found = aggregate(requests, ("ttft_mean", "ttft_p50", "tbt_mean", "tbt_p50", "tbt_p99", "tpot_mean"))
    assert found == pytest.approx(
        {"ttft_mean": 2.0, "ttft_p50": 2.0, "tbt_mean": 0.18, "tbt_p50": 0.1, "tbt_p99": 0.9, "tpot_mean": 0.5}
    )
    assert aggregate([], ("tbt_p99",)) == {"tbt_p99": 0.0}
    with pytest.raises(SLOError):
        aggregate(requests, ("e3e_mean",))


def test_violations_of_a_window() -> None:
    slo = SLO.parse("ttft_p99=1s,tbt_mean=100ms,tbt_p99=10%")
    base = {"tbt_mean": 0.05, "tbt_p99": 0.2, "slo_attainment": 1.0}
    assert slo.bounds(base, 0.8) == pytest.approx({"tbt_p99": 0.216, "tbt_mean": 0.09, "slo_attainment": 0.008})
    window = {"tbt_mean": 0.09, "tbt_p99": 0.216, "slo_attainment": 0.992}
    assert slo.violations(window, base, 0.8) == {}
    worse = {"tbt_mean": 0.1, "tbt_p99": 0.22, "slo_attainment": 0.99}
    assert slo.violations(worse, base) == {}
    assert set(slo.violations(worse, base, 0.8)) == {"tbt_mean", "tbt_p99", "slo_attainment"}
    assert slo.violations({**window, "tbt_mean": math.nan}, base).keys() == {"tbt_mean"}
    with pytest.raises(ValueError, match="online-only"):
        slo.violations(window)
    with pytest.raises(KeyError):
        slo.violations({}, base)


def test_a_limit_that_the_base_line_breaks_gives_way_to_the_base_line() -> None:
    slo = SLO.parse("tbt_mean=100ms")
    assert slo.violations({"tbt_mean": 0.15}, {"tbt_mean": 0.15}, 0.8) == {}
    assert slo.violations({"tbt_mean": 0.16}, {"tbt_mean": 0.15}, 0.8).keys() == {"tbt_mean"}
    assert slo.violations({"tbt_mean": 0.15}).keys() == {"tbt_mean"}


# The budget search

RANGE = (0.005, 0.5)


class Replay:
    """A workload whose offline throughput is not monotone in L: a ridge, then a lower plateau, as measured.

    Under the `tbt_mean` rule, λ decides how much a step beside decodes may grow, so more throughput comes at the same
    interference; δ has its best value at 4.
    """

    def __init__(self, harm: float = 1.0, peak: float = 0.024) -> None:
        self.calls: list[BudgetParams] = []
        self._harm = harm
        self._peak = peak

    def __call__(self, params: BudgetParams) -> dict[str, float]:
        self.calls.append(params)
        budget = params.latency_budget
        if params.rule == "tbt_mean":
            extent = min(budget / 0.02, 5.0) * (1 - math.exp(-params.lam / 3))
            throughput = 3600.0 * extent**0.7 * (1.1 - 0.1 * abs(math.log2(params.delta / 4)))
            extra = 0.004 * extent**2 * self._harm
        else:
            throughput = self.flat_throughput(budget)
            extra = 0.4 * budget * self._harm
        return {
            "offline_throughput": throughput,
            "tbt_mean": 0.02 + 0.1 * extra,
            "tbt_p99": 0.03 + extra,
            "ttft_mean": 0.2 + extra,
            "ttft_p99": 0.8 + 2 * extra,
            "slo_attainment": 0.999 - 0.1 * extra,
        }

    def flat_throughput(self, budget: float) -> float:
        ridge = 3181.0 * math.exp(-(math.log(budget / self._peak) ** 2) / 0.3) if budget > 0 else 0.0
        return ridge + 2706.0 * budget / (budget + 0.1)

    def best_flat(self, feasible: Callable[[dict[str, float]], bool]) -> float:
        """By brute force over a grid far finer than a search may use."""
        ratio = RANGE[1] / RANGE[0]
        budgets = [RANGE[0] * ratio ** (i / 5000) for i in range(5001)]
        outcomes = [self(BudgetParams("hygen", budget)) for budget in budgets]
        return max((m["offline_throughput"] for m in outcomes if feasible(m)), default=0.0)


def search(
    text: str, policy: str = "hygen", replay: Replay | None = None, **options: int
) -> tuple[SearchResult, Replay]:
    replay = replay or Replay()
    return search_budget(replay, SLO.parse(text), RANGE, policy, **options), replay


@pytest.mark.parametrize("peak", [0.008, 0.024, 0.11, 0.3])
@pytest.mark.parametrize("tolerance", [1, 5, 20, 50, 500])
def test_the_best_flat_budget_is_found_though_throughput_is_not_monotone(peak: float, tolerance: int) -> None:
    result, replay = search(f"tbt_p99={tolerance}%", replay=Replay(peak=peak))
    bound = 0.03 * (1 + 0.8 * tolerance / 100)
    best = replay.best_flat(lambda metrics: metrics["tbt_p99"] <= bound)
    assert result.best.throughput >= 0.97 * best
    assert result.best.feasible and result.best.metrics["tbt_p99"] <= bound + 1e-9


def test_a_search_is_bounded_deterministic_and_replays_nothing_twice() -> None:
    for policy in ("hygen", "tidemill"):
        first, replay = search("5%", policy)
        assert len(replay.calls) == len(set(replay.calls)) == first.num_evaluations <= 60
        assert first.surface[0] is first.baseline and first.baseline.params.latency_budget == 0.0
        assert search("5%", policy)[0] == first
        assert all(RANGE[0] <= e.params.latency_budget <= RANGE[1] for e in first.surface[1:])


def test_the_weighted_rule_beats_the_flat_budget_on_the_mean() -> None:
    flat, _ = search("tbt_mean=5%")
    ours, _ = search("tbt_mean=5%", "tidemill")
    assert ours.best.throughput > 1.1 * flat.best.throughput
    assert ours.params.rule == "tbt_mean" and ours.params.delta == 4.0 and math.isfinite(ours.params.lam)
    # By hand: 0.1 · extra = 0.8 · 5 % · 0.02 s, extent = sqrt(extra / 0.004), δ = 4.
    assert ours.best.throughput >= 0.95 * 1.1 * 3600.0 * math.sqrt(0.008 / 0.004) ** 0.7


def test_what_is_no_safer_than_a_failure_is_not_confirmed_next() -> None:
    """Where memory bounds offline work, many budgets give as much in one window; small ones keep the others."""

    def window(largest: float) -> Callable[[BudgetParams], dict[str, float]]:
        def replay(params: BudgetParams) -> dict[str, float]:
            late = 0.5 if params.latency_budget > largest else 0.05
            rate = 4000.0 * min(params.latency_budget / 0.02, 1.0) + params.latency_budget
            kept = float(late < 0.1)
            return {"ttft_p99": late, "tbt_p99": late, "slo_attainment": kept, "offline_throughput": rate}

        return replay

    slo = SLO.parse("ttft_p99=1s,tbt_p99=100ms")
    for largest in (0.03, 0.1):
        found = search_budget(window(math.inf), slo, RANGE, confirm=[window(largest)])
        assert found.confirmed and 0.0 < found.params.latency_budget <= largest
        assert found.best.throughput >= 1000.0


@pytest.mark.parametrize("edge", [0.012, 0.03, 0.06, 0.12])
def test_a_failed_budget_is_bisected_down_to_one_that_is_confirmed(edge: float) -> None:
    """A coarse grid has few budgets below the edge; one miss of the searched window's 25 requests is chance."""

    def window(keeps: Callable[[float], bool], miss: float = 1.0) -> Callable[[BudgetParams], dict[str, float]]:
        def replay(params: BudgetParams) -> dict[str, float]:
            budget = params.latency_budget
            tail = {"ttft_p99": 0.05, "tbt_p99": 0.05, "requests": 25.0}
            return {**tail, "slo_attainment": 1.0 if keeps(budget) else 1.0 - miss, "offline_throughput": budget}

        return replay

    slo, rest = SLO.parse("ttft_p99=1s,tbt_p99=100ms"), [window(lambda budget: budget <= edge)]
    for unlucky in (lambda _: False, lambda budget: budget > 0.02, lambda budget: budget < 0.1):
        first = window(lambda budget, unlucky=unlucky: not budget or unlucky(budget), miss=1 / 25)
        found = search_budget(first, slo, RANGE, "hygen", confirm=rest, max_evaluations=12)
        assert found.confirmed and found.num_evaluations <= 12
        assert edge / 3 <= found.params.latency_budget <= edge
    two = window(lambda budget: budget <= 0.02, miss=2 / 25)
    assert search_budget(two, slo, RANGE, confirm=rest).params.latency_budget <= 0.02


@pytest.mark.parametrize("edge", [0.006, 0.13, 5.0])
def test_a_live_search_finds_the_largest_price_that_keeps_the_mean(edge: float) -> None:
    """18 replays; under the L of a flat budget no λ has an effect, and any λ above `edge` breaks the tolerance."""

    def replay(params: BudgetParams) -> dict[str, float]:
        flat = 0.4 * min(params.lam, params.latency_budget / 0.05)
        excess = flat if math.isinf(params.lam) else 0.04 * min(params.lam / edge, params.latency_budget / 0.02)
        return {"tbt_mean": 0.01 * (1.0 + excess), "offline_throughput": 1e5 * excess * (1 if flat == excess else 9)}

    found = search_budget(replay, SLO.parse("tbt_mean=5%"), RANGE, max_evaluations=18).best
    assert found.feasible and found.params.rule == "tbt_mean" and edge / 2 < found.params.lam <= edge


def test_the_search_never_makes_an_unreachable_slo_worse() -> None:
    result, _ = search("ttft_mean=100ms")
    assert not result.slo_in_reach
    assert result.params.latency_budget == 0.0, "any offline work would make late requests later"


def test_every_further_window_has_a_say() -> None:
    slo = SLO.parse("tbt_p99=20%")
    calm, busy = Replay(), Replay(harm=1.4)
    assert slo.violations(busy(search("tbt_p99=20%")[0].params), busy(BudgetParams("hygen", 0.0))) != {}
    for windows in ([busy], [calm, busy], [busy, calm]):
        result = search_budget(Replay(), slo, RANGE, "hygen", confirm=windows)
        assert result.confirmed is True and result.num_evaluations <= 60
        assert slo.violations(busy(result.params), busy(BudgetParams("hygen", 0.0))) == {}
    for windows in ([Replay(harm=1000.0)], [calm, Replay(harm=1000.0)]):
        hopeless = search_budget(Replay(), slo, RANGE, "hygen", confirm=windows)
        assert hopeless.confirmed is False and hopeless.params.latency_budget == 0.0
        assert hopeless.num_evaluations <= 60


def test_a_missing_metric_is_an_error_not_a_pass() -> None:
    with pytest.raises(KeyError):
        search_budget(lambda params: {"offline_throughput": 1.0}, SLO.parse("5%"), RANGE)


@pytest.mark.parametrize("latency_range", [(0.0, 1.0), (0.2, 0.1), (0.1, math.inf)])
def test_an_impossible_range_is_refused(latency_range: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="latency_range"):
        search_budget(Replay(), SLO.parse("5%"), latency_range)


def test_too_few_evaluations_are_refused() -> None:
    with pytest.raises(ValueError, match="max_evaluations"):
        search("5%", max_evaluations=3)


@pytest.mark.parametrize("max_evaluations", [4, 5, 10, 23, 41])
def test_fewer_evaluations_still_give_a_feasible_answer(max_evaluations: int) -> None:
    result, replay = search("5%", "tidemill", max_evaluations=max_evaluations)
    assert len(replay.calls) <= max_evaluations and result.best.feasible


def test_rules_follow_the_metrics() -> None:
    assert protecting_rules(SLO.parse("5%")) == ("ttft_mean", "ttft_p99", "tbt_mean", "tbt_p99")
    assert protecting_rules(SLO.parse("ttft_p90=1s,tpot_p99=50ms,tbt_p50=1s,tbt_p99=1s")) == (
        "ttft_p99",
        "tbt_mean",
        "tbt_p99",
    )
    assert protecting_rules(SLO((Objective("tbt", None, limit=1.0),))) == ("tbt_mean",)


@for_each(
    "bad", [("x", 1.0, 1.0, 1.0), ("hygen", -1.0, 1.0, 1.0), ("hygen", 1.0, math.nan, 1.0), ("hygen", 1.0, 1.0, 0.0)]
)
def test_budget_params_are_checked(bad: tuple[str, float, float, float]) -> None:
    with pytest.raises(ValueError):
        BudgetParams(*bad)
