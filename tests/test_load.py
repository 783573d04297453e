"""The learned load of a server, and the table of budgets that goes with it."""

import math
import random
from itertools import pairwise
from pathlib import Path

import pytest
from support.tables import for_each

from engine.colocation.tuner import STORE_BYTES, LoadStore
from predictor.budget import BudgetParams, Promise
from predictor.budget_search import (
    HIGHEST_CELL,
    LOWEST_CELL,
    MAX_AGE,
    BudgetEntry,
    BudgetTable,
    Situation,
    cell_of,
    upper_rate,
)
from predictor.load import BUCKET, NUM_BUCKETS, REMEMBERED, WEEK, Lengths, LoadModel, LoadShape, OnlineArrival, resample
from predictor.profile import ProfileKey

SHAPE = LoadShape(100.0, 0.0, 50.0, 500.0, 60.0)
HERE = Situation(SHAPE, 0.02)
USUAL = Lengths(100, 50)


def poisson(rate: float, begin: float, end: float, seed: int = 1) -> list[float]:
    generator, at, found = random.Random(seed), begin, []
    while (at := at + generator.expovariate(rate)) < end:
        found.append(at)
    return found


def served(load: LoadModel, times: list[float], lengths: Lengths = USUAL) -> LoadModel:
    for at in times:
        load.arrive(at)
        load.remember(OnlineArrival(at, lengths))
    return load


# Rates


@pytest.mark.parametrize("rate", [0.05, 0.3, 2.0, 50.0])
def test_the_rate_of_late(rate: float) -> None:
    end = max(200.0, 60 / rate)
    load = served(LoadModel(0.0), poisson(rate, 0.0, end))
    assert load.rate(end) == pytest.approx(rate, rel=0.4)
    assert load.rate(end + 100 * end) < 0.1 * rate, "silence is a rate too"
    assert LoadModel(0.0).rate(1.0) == 0.0


def test_the_week_is_learned_in_buckets_and_forecast_by_day() -> None:
    load = LoadModel(0.0)
    day = 86_400.0
    noon = 12 * 3600.0
    served(load, [*poisson(0.5, noon, noon + 3600.0), *poisson(0.1, day - 600.0, day + 600.0)])
    load.advance(day + 1200.0)
    assert load.forecast(noon + 1800.0) == pytest.approx(0.5, rel=0.3)
    assert load.forecast(3600.0) == 0.0, "the server was up without requests"
    assert load.forecast(noon + 1800.0 + 3 * day) == pytest.approx(0.5, rel=0.3), "another day, the same time"
    assert load.forecast(noon + 1800.0 + WEEK) == load.forecast(noon + 1800.0)
    assert math.isnan(LoadModel(0.0).forecast(5.0))


def test_a_second_week_is_weighed_against_the_first() -> None:
    load = LoadModel(0.0)
    served(load, poisson(1.0, 0.0, BUCKET))
    load.advance(BUCKET)
    first = load.week[0]
    load.advance(WEEK)
    served(load, poisson(3.0, WEEK, WEEK + BUCKET))
    load.advance(WEEK + BUCKET)
    assert first < load.week[0] < 2.0


def test_a_bucket_that_was_hardly_watched_tells_nothing() -> None:
    load = LoadModel(BUCKET * 0.8)
    served(load, poisson(1.0, BUCKET * 0.8, BUCKET))
    load.advance(BUCKET + 1.0)
    assert math.isnan(load.week[0])
    load.advance(2 * BUCKET)
    assert load.week[1] == 0.0


def test_years_of_silence_are_passed_at_once() -> None:
    load = LoadModel(0.0)
    load.advance(100 * 365 * 86_400.0)
    assert load.week == [0.0] * NUM_BUCKETS


# Lengths and windows


def test_the_shape_is_of_the_last_requests() -> None:
    load = LoadModel(0.0)
    assert load.shape() is None
    served(load, [float(i) for i in range(300)], Lengths(10, 10))
    served(load, [300.0 + i for i in range(200)], Lengths(110, 30, 10))
    load.remember(OnlineArrival(500.0, Lengths(100, 0)))
    shape = load.shape([Lengths(64, 8)])
    assert shape is not None
    assert (shape.output, shape.offline_prompt, shape.offline_output) == (30.0, 64.0, 8.0)
    assert shape.prompt == pytest.approx(100.0) and shape.cached == pytest.approx(9.95)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (LoadShape(120.0, 0.0, 50.0, 500.0, 60.0), False),
        (LoadShape(160.0, 0.0, 50.0, 500.0, 60.0), True),
        (LoadShape(100.0, 50.0, 50.0, 500.0, 60.0), True),
        (LoadShape(100.0, 2.0, 50.0, 500.0, 60.0), False),
        (LoadShape(100.0, 0.0, 50.0, 250.0, 60.0), True),
    ],
)
def test_shapes_that_differ(other: LoadShape, differs: bool) -> None:
    assert SHAPE.differs(other, 1.3) is other.differs(SHAPE, 1.3) is differs


def test_offline_lengths_that_nobody_knows_are_no_difference_but_a_guess_is() -> None:
    unknown = LoadShape(100.0, 0.0, 50.0)
    assert not SHAPE.differs(unknown, 1.3), "no job has come yet: the last result serves"
    assert unknown.differs(SHAPE, 1.3), "a result without a job does not serve for one"


def test_windows_keep_bursts_and_are_made_for_any_rate() -> None:
    bursts = [OnlineArrival(60.0 * minute + 0.1 * i, Lengths(10, 5)) for minute in range(30) for i in range(10)]
    window = resample(bursts, 1.0, 2000, seed=3)
    gaps = [b.at - a.at for a, b in pairwise(window)]
    assert sorted(gaps)[len(gaps) // 2] < 0.05, "most requests come in bursts"
    assert len(gaps) / sum(gaps) == pytest.approx(1.0, rel=0.25)
    with pytest.raises(ValueError, match="at least two"):
        resample(bursts[:1], 1.0, 10, seed=3)
    with pytest.raises(ValueError, match="a positive rate"):
        resample(bursts, 0.0, 10, seed=3)


def test_a_night_between_two_days_is_no_gap_of_a_window() -> None:
    record = [OnlineArrival(at, Lengths(1, 1)) for at in (*poisson(2.0, 0.0, 100.0), *poisson(2.0, 40_000.0, 40_100.0))]
    window = resample(record, 2.0, 2000, seed=1)
    assert max(b.at - a.at for a, b in pairwise(window)) < 60.0
    assert len(window) / window[-1].at == pytest.approx(2.0, rel=0.2)


# The table of budgets


def entry(budget: float, situation: Situation = HERE, at: float = 0.0) -> BudgetEntry:
    return BudgetEntry(BudgetParams("tidemill", budget), situation, at)


def test_cells_are_searched_at_their_upper_edge_and_left_with_hysteresis() -> None:
    for rate in (0.002, 0.3, 1.0, 1.01, 7.0, 500.0):
        cell = cell_of(rate)
        assert upper_rate(cell - 1) < rate * (1 + 1e-6) and rate <= upper_rate(cell) * (1 + 1e-6)
    assert cell_of(1.05, current=0) == 0 and cell_of(1.2, current=0) == 1
    assert cell_of(0.95, current=1) == 1 and cell_of(0.8, current=1) == 0
    assert cell_of(0.0) == LOWEST_CELL and cell_of(1e9) == HIGHEST_CELL


def test_a_change_of_load_is_a_look_up() -> None:
    table = BudgetTable()
    assert table.look_up(0, HERE) is None
    table.put(0, entry(0.05))
    table.put(3, entry(0.02))
    assert table.look_up(0, HERE) == (BudgetParams("tidemill", 0.05), 0)
    assert table.look_up(1, HERE) == (BudgetParams("tidemill", 0.02), 3), "the next higher one is on the safe side"
    found = table.look_up(5, HERE)
    assert found is not None and found[1] == 3
    assert found[0].latency_budget == pytest.approx(0.02 / 1.5**2), "what kept the SLO at less may not keep it here"
    longer = Situation(LoadShape(300.0, 0.0, 50.0, 500.0, 60.0), 0.02)
    assert table.look_up(0, longer) is None


def test_what_kept_the_slo_with_steps_of_another_pace_is_better_than_what_nobody_searched_for() -> None:
    table = BudgetTable()
    table.put(0, entry(0.05))
    slower, faster = (Situation(SHAPE, pace) for pace in (0.04, 0.01))
    assert table.look_up(0, slower) == (BudgetParams("tidemill", 0.025), 0), "half, where steps take twice as long"
    assert table.look_up(0, faster) == (BudgetParams("tidemill", 0.05), 0)
    assert table.answers(0, slower) is None and table.needs(0, slower, 0.0), "until a search has ended"
    table.put(1, entry(0.02, slower))
    assert table.look_up(0, slower) == (BudgetParams("tidemill", 0.02), 1), "searched at this pace"
    assert table.answers(1, slower) == entry(0.02, slower)


def test_none_at_all_holds_for_higher_rates_and_steps_that_are_not_clearly_faster() -> None:
    table = BudgetTable()
    table.put(2, entry(0.0))
    for cell, pace in ((2, 0.08), (2, 0.02), (2, 0.0141), (5, HERE.pace)):
        found = table.look_up(cell, Situation(SHAPE, pace))
        assert found is not None and found[0].latency_budget == 0.0
    assert table.look_up(2, Situation(SHAPE, 0.012)) is None and table.look_up(1, HERE) is None


def test_at_a_higher_rate_no_rule_frees_more_steps_from_a_smaller_budget() -> None:
    table = BudgetTable()
    table.put(0, BudgetEntry(BudgetParams("tidemill", 0.05, rule="tbt_p99"), HERE, 0.0))
    found = table.look_up(1, HERE)
    assert found is not None and found[0].rule == "flat"


def test_of_a_tolerance_a_budget_says_less_of_every_other_rate() -> None:
    """Where fewer requests come, an offline second is a larger share of their time alone, and λ lets more of it in."""
    table = BudgetTable()
    table.put(3, BudgetEntry(BudgetParams("tidemill", 0.05, 8.0, 4.0, "tbt_mean"), HERE, 0.0))
    assert table.look_up(3, HERE, relative=True) == table.look_up(3, HERE)
    found = table.look_up(1, HERE, relative=True)
    assert found is not None and found[1] == 3
    assert found[0].latency_budget == pytest.approx(0.05 / 1.5**2) and found[0].lam == pytest.approx(8.0 / 1.5**2)
    assert (found[0].rule, found[0].delta) == ("tbt_mean", 4.0)
    above = table.look_up(5, HERE, relative=True)
    assert above is not None and above[0].latency_budget == pytest.approx(0.05 / 1.5**2) and above[0].lam == 8.0


def test_entries_age() -> None:
    table = BudgetTable()
    table.put(0, entry(0.05, at=100.0))
    assert not table.needs(0, HERE, 100.0 + MAX_AGE - 1)
    assert table.needs(0, HERE, 100.0 + MAX_AGE) and table.needs(1, HERE, 100.0)
    assert table.needs(0, Situation(SHAPE, 0.03), 101.0), "steps take another time now"
    assert table.look_up(0, HERE) is not None, "an old answer is better than none"


# On disk

KEY = ProfileKey("model", "device", "float32", "1")


def refuse(line: str) -> None:
    raise AssertionError(line)


def test_what_was_learned_outlives_the_server(tmp_path: Path) -> None:
    load, table = LoadModel(0.0), BudgetTable()
    times = poisson(0.5, 0.0, 6 * BUCKET)
    served(load, times)
    promises = [None, Promise("premium", 0.3, 0.05), Promise("agent", e2e=20.0)]
    for index, arrival in enumerate(list(load.arrivals)):
        load.arrivals[index] = arrival._replace(promise=promises[index % 3])
    load.remember_offline(Lengths(512, 64))
    load.advance(7 * BUCKET)
    table.put(0, entry(0.05))
    table.put(-3, BudgetEntry(BudgetParams("tidemill", 0.03, 2.5, 4.0, "tbt_mean"), HERE, 77.0))
    store = LoadStore(tmp_path, KEY, "a promise")
    store.write(store.encode(load, table))
    start = WEEK + 1000.0
    again, budgets = store.read(start, refuse)
    assert budgets.entries == table.entries
    assert again.week == pytest.approx([round(rate, 6) for rate in load.week], nan_ok=True)
    assert again.forecast(2 * BUCKET + WEEK) == pytest.approx(0.5, rel=0.4)
    assert list(again.offline) == [Lengths(512, 64)] and again.shape() == load.shape()
    assert len(again.arrivals) == len(load.arrivals) and max(a.at for a in again.arrivals) <= start + 1e-6
    assert [a.promise for a in again.arrivals] == [a.promise for a in load.arrivals]
    assert again.rate(start) == 0.0, "they came to another server"
    window = resample(again.arrivals, 0.5, 1000, seed=1)
    assert len(window) / window[-1].at == pytest.approx(0.5, rel=0.2)
    other, none = LoadStore(tmp_path, KEY, "another promise").read(start, refuse)
    assert other.week == pytest.approx(again.week, nan_ok=True) and not none.entries
    assert {a.promise for a in other.arrivals} == {None} and len(other.arrivals) == len(again.arrivals)


def test_it_is_bounded(tmp_path: Path) -> None:
    load = LoadModel(0.0)
    generator = random.Random(1)
    for index in range(20_000):
        at = index * 7.7
        load.arrive(at)
        load.remember(OnlineArrival(at, Lengths(generator.randrange(10**6), generator.randrange(10**6))))
        load.remember_offline(Lengths(generator.randrange(10**6), 10**6))
    table = BudgetTable()
    for cell in range(LOWEST_CELL, HIGHEST_CELL + 1):
        table.put(cell, entry(0.05))
    store = LoadStore(tmp_path, KEY, "")
    content = store.encode(load, table)
    assert len(load.arrivals) == len(load.offline) == REMEMBERED and len(content) < STORE_BYTES / 10


def record(budgets: bytes = b"", week: bytes = b"null," * 1007 + b"1", arrivals: bytes = b"") -> bytes:
    load = b'{"week": [%b], "arrivals": [%b], "offline": []}' % (week, arrivals)
    return b'{"schema": 1, "promise": "", "budgets": [%b], "load": %b}' % (budgets, load)


@for_each("content", [
    b"", b"{", b"[]", b"null", b'{"schema": 99}', b'{"schema": 1}', record(week=b"1, 2"),
    record(week=b"NaN," * 1007 + b"1"), record(arrivals=b'[1, "x", 2, 3]'), record(budgets=b'{"cell": 0}'),
    b"[" * 100_000, b" " * (STORE_BYTES + 1),
])  # fmt: skip
def test_a_damaged_file_is_ignored_with_one_line(tmp_path: Path, content: bytes) -> None:
    store = LoadStore(tmp_path, KEY, "")
    store.path.write_bytes(content)
    lines: list[str] = []
    load, table = store.read(5.0, lines.append)
    assert len(lines) == 1 and "\n" not in lines[0] and str(store.path) in lines[0]
    assert not load.arrivals and not table.entries
    store.write(store.encode(load, table))
    store.read(5.0, refuse)
