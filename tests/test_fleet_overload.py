"""When engines drop layers and have them back: by reports alone, on a clock of the test's own."""

import hypothesis.strategies as st
from driver import fake_driver, small_config
from hypothesis import given
from test_fleet_parts import asked

from engine.fleet.overload import EXPECTED, FALLING, Group, Watch
from engine.scheduling.report import peak_growth, report_load


def full(engine: int, queued: int = 20) -> Group:
    return Group((engine,), 100, 98, queued)


def test_two_engines_merge_when_one_is_full_and_more_waits_than_is_free() -> None:
    watch = Watch()
    free = Group((1,), 100, 10, 0)
    assert watch.merges([full(0, queued=2), free], 50, now=0.0) == [], "there is room for the queue"
    assert watch.merges([Group((0,), 100, 80, 60), free], 50, now=0.0) == [], "it is not full"
    assert watch.merges([full(0), free], 50, now=0.0) == [(0, 1)] and not watch.too_little
    assert watch.merges([full(0, queued=90), free], 50, now=0.0) == [(0, 1)] and watch.too_little
    assert watch.merges([full(0)], 50, now=0.0) == [] and watch.too_little, "no engine to merge with"


def test_a_pair_is_the_largest_pipeline() -> None:
    watch = Watch()
    pair = Group((0, 1), 250, 245, 30)
    assert watch.merges([pair, Group((2,), 100, 10, 0)], 50, now=0.0) == [] and watch.too_little
    assert watch.merges([pair, full(2), full(3)], 50, now=0.0) == [(2, 3)]
    four = [full(engine, queued=60) for engine in range(4)]
    assert sorted(sum(watch.merges(four, 50, now=0.0), ())) == [0, 1, 2, 3]


def test_engines_that_have_just_changed_stay_as_they_are() -> None:
    watch = Watch()
    watch.note([0, 1], until=30.0)
    groups = [full(0), full(1)]
    assert watch.merges(groups, 500, now=29.9) == []
    assert watch.merges(groups, 500, now=30.0) == [(0, 1)]


def test_layers_come_back_once_use_falls_and_fits_without_a_drop() -> None:
    watch = Watch()

    def looks(used: int, now: float, queued: int = 0) -> bool:
        return watch.restores(Group((0, 1), 250, used, queued), 200, now)

    watch.note([0, 1], until=5.0)
    assert not looks(90, 0.0) and not looks(90, 4.0), "too soon"
    assert not looks(120, 5.0), "half of their units without a drop is not enough"
    assert not looks(100, 5.0 + FALLING / 2), "use is compared over a while"
    assert not looks(90, 5.0 + FALLING, queued=3), "a request waits"
    assert not looks(95, 5.0 + 2 * FALLING), "use grows"
    assert looks(95, 5.0 + 3 * FALLING)
    assert not watch.restores(Group((0, 1), 250, 90, 0, growth=111), 200, 9.0), "it would not be enough again"
    assert watch.restores(Group((0, 1), 250, 90, 0, growth=110), 200, 10.0)


def test_engines_merge_before_memory_is_full_where_more_demand_is_expected_for_a_while() -> None:
    watch, other = Watch(), Group((1,), 100, 40, 0)
    soon = Group((0,), 100, 75, 0, growth=60)
    assert watch.merges([soon, other], 50, now=0.0) == [] and not watch.too_little
    assert watch.merges([soon._replace(growth=0), other], 50, now=0.3) == []
    assert watch.merges([soon, other], 50, now=0.4) == [], "it was not all the time"
    assert watch.merges([soon, other], 50, now=0.4 + EXPECTED) == [(0, 1)] and not watch.too_little
    for calm in (soon._replace(growth=29), soon._replace(used=60, growth=90)):
        watch = Watch()
        assert not any(watch.merges([calm, other], 50, now=now) for now in (0.0, EXPECTED, 2 * EXPECTED))


@given(
    runs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), max_size=6),
    later=st.integers(0, 3),
    mean=st.integers(1, 20),
)
def test_growth_is_that_of_the_worst_moment(runs: list[tuple[float, int]], later: int, mean: int) -> None:
    def more(step: int) -> float:
        """Units held after so many steps, of two tokens each, beyond those of now."""
        grown = sum(step / 2 if step <= left else -held for left, held in runs)
        return grown + (later * step / 2 if step <= mean else 0.0)

    assert peak_growth(runs, later, mean, 2.0) == max(more(step) for step in range(32))


def test_an_engine_tells_how_much_more_its_chats_will_need() -> None:
    driver = fake_driver(small_config(200, max_model_len=64, max_num_batched_tokens=64), 405)
    for index in range(40):
        driver.add(asked(f"{index:02}", 5, max_tokens=8))
    driver.run()
    mean = report_load(driver.core.state, driver.now).mean_output
    assert report_load(driver.core.state, driver.now).growth_units == 0 and mean > 4
    for name in "abc":
        driver.add(asked(name, 8, max_tokens=40))
    assert report_load(driver.core.state, driver.now).growth_units == round(3 * mean / 2)
    driver.step()
    driver.step()
    assert report_load(driver.core.state, driver.now).growth_units == round(3 * (mean - 2) / 2)
    driver.run()
