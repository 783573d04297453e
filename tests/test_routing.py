"""The routers of the live fleet: numbers computed by hand, and the bound of affinity for every fleet."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.client import LoadReport
from engine.fleet.routing import Loads, RoutedPrompt, prefix, sal, sal_load


def load_of(**fields: Any) -> LoadReport:
    return LoadReport(**{"mean_input": 1.0, "mean_output": 1.0, "step_seconds": 1.0, **fields})


def fleet(*loads: LoadReport) -> Loads:
    return dict(enumerate(loads))


IDLE = load_of(available_units=1000, num_units=1000)


def test_the_queue_counts_in_full_steps() -> None:
    load = IDLE._replace(queued_tokens=900, tokens_per_step=512)
    assert sal_load(0, load, RoutedPrompt(124)) == pytest.approx(1024 / 512)
    assert sal_load(0, load._replace(step_seconds=0.25), RoutedPrompt(124)) == pytest.approx(0.5)


def test_memory_that_lacks_is_waited_for_at_the_rate_at_which_running_requests_give_it_back() -> None:
    """The prompt needs 100 / 8 = 12.5, so 13 units; with 27 queued requests 40, and 30 lack: 240 tokens. Four requests
    with a mean input of 30 and a mean output of 10 give back 4 × (beta - 1) = 12 a step: 20 steps."""
    load = load_of(queued_units=27, running=4, available_units=10, num_units=100, mean_input=30.0, mean_output=10.0)
    assert sal_load(0, load, RoutedPrompt(100)) == pytest.approx(20.0)
    assert sal_load(0, load._replace(step_seconds=0.1), RoutedPrompt(100)) == pytest.approx(2.0)
    assert sal_load(0, load._replace(available_units=40), RoutedPrompt(100)) == pytest.approx(100 / 512)
    assert sal_load(0, load._replace(num_units=0), RoutedPrompt(100)) == pytest.approx(100 / 512), (
        "nothing is known of it"
    )
    assert sal_load(0, load._replace(running=0), RoutedPrompt(100)) == pytest.approx(240.0), "at least a token a step"


def test_what_is_in_the_prefix_cache_is_neither_computed_nor_stored_again() -> None:
    load = load_of(queued_units=10, available_units=10, num_units=100, running=1)
    assert sal_load(1, load, RoutedPrompt(800)) == pytest.approx(800.0)
    assert sal_load(1, load, RoutedPrompt(800, {1: 720})) == pytest.approx(80.0)
    assert sal_load(1, IDLE, RoutedPrompt(512, {1: 512})) == pytest.approx(1 / 512), "the last token runs"
    assert sal_load(1, IDLE, RoutedPrompt(512, {0: 512})) == pytest.approx(1.0), "another engine's"


def test_sal_takes_the_least_wait_then_the_least_to_do() -> None:
    busy = IDLE._replace(queued_tokens=600)
    assert sal(fleet(busy, IDLE._replace(queued_tokens=500)), RoutedPrompt(10)) == 1
    assert sal(fleet(busy, IDLE._replace(queued_tokens=500, step_seconds=2.0)), RoutedPrompt(10)) == 0
    assert sal(fleet(busy._replace(running=3), busy._replace(running=2)), RoutedPrompt(10)) == 1
    assert sal(fleet(busy, busy), RoutedPrompt(10)) == 0
    assert sal(fleet(busy, busy), RoutedPrompt(700, {1: 512})) == 1


def test_affinity_ends_where_an_engine_would_hold_a_quarter_more_than_its_part() -> None:
    hits = RoutedPrompt(100, {0: 64})
    assert prefix(fleet(IDLE._replace(running=1), IDLE._replace(running=1)), hits) == 0
    # 11 requests with this one, 5.5 each: 1.25 x 5.5 = 6.9, rounded up 7
    assert prefix(fleet(IDLE._replace(running=6), IDLE._replace(running=4)), hits) == 0
    assert prefix(fleet(IDLE._replace(running=7), IDLE._replace(running=3)), hits) == 1
    # three times as fast: its part is 8.25, and with a quarter more 11
    fast = IDLE._replace(running=7, step_seconds=1 / 3)
    assert prefix(fleet(fast, IDLE._replace(running=3)), hits) == 0
    assert prefix(fleet(IDLE._replace(running=2), IDLE), RoutedPrompt(100)) == 1, "as SAL without"


LOADS = st.dictionaries(
    st.integers(0, 20),
    st.builds(
        LoadReport,
        tokens_per_unit=st.just(8.0),
        tokens_per_step=st.just(512),
        queued_tokens=st.integers(0, 10_000),
        queued_units=st.integers(0, 1000),
        queued_requests=st.integers(0, 50),
        running=st.integers(0, 50),
        available_units=st.integers(0, 1000),
        num_units=st.sampled_from([0, 1000]),
        mean_input=st.floats(0.0, 5000.0),
        mean_output=st.floats(0.0, 5000.0),
        step_seconds=st.floats(1e-4, 10.0),
    ),
    min_size=1,
    max_size=8,
)


@given(LOADS, st.integers(1, 5000))
def test_affinity_keeps_within_its_bound(loads: Loads, tokens: int) -> None:
    most = max(loads, key=lambda engine: loads[engine].num_requests)
    held = loads[prefix(loads, RoutedPrompt(tokens, {most: tokens}))]
    total = sum(load.num_requests for load in loads.values()) + 1
    speed = sum(1 / load.step_seconds for load in loads.values())
    assert held.num_requests < 1.25 * total / held.step_seconds / speed + 1
