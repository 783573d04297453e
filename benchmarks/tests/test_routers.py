"""The baseline routers: numbers computed by hand, and the choice of every router for every fleet."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulated_fleet.routers import ROUTERS, Chance
from engine.fleet.routing import EngineLoad, RoutedPrompt


def chance(seed: int = 0) -> Chance:
    return Chance(random.Random(seed))


def choose(name: str, loads: list[EngineLoad], prompt: RoutedPrompt, draw: Chance | None = None) -> int:
    return ROUTERS[name](loads, prompt, draw or chance())


def test_round_robin_goes_round_past_those_that_are_away() -> None:
    loads, draw = [EngineLoad(0), EngineLoad(1), EngineLoad(2)], chance()
    assert [choose("round-robin", loads, RoutedPrompt(1), draw) for _ in range(4)] == [0, 1, 2, 0]
    away = [loads[0], loads[2]]
    assert [choose("round-robin", away, RoutedPrompt(1), draw) for _ in range(3)] == [2, 0, 2]
    assert [choose("round-robin", loads, RoutedPrompt(1), draw) for _ in range(2)] == [0, 1]


def test_p2c_takes_the_one_with_fewer_requests_of_two() -> None:
    loads = [EngineLoad(0, running=5), EngineLoad(1, queued_requests=2, running=2), EngineLoad(2, queued_requests=9)]
    draw = chance(3)
    counts = Counter(choose("p2c", loads, RoutedPrompt(1), draw) for _ in range(3000))
    assert counts[2] == 0, "the fullest of three loses to both others"
    assert 1800 < counts[1] < 2200 and 800 < counts[0] < 1200, "two of the three pairs hold engine 1"
    assert choose("p2c", loads[2:], RoutedPrompt(1)) == 2


def test_random_is_even() -> None:
    draw = chance(5)
    counts = Counter(choose("random", [EngineLoad(n) for n in range(4)], RoutedPrompt(1), draw) for _ in range(4000))
    assert all(900 < counts[n] < 1100 for n in range(4))


LOADS = st.lists(
    st.builds(
        EngineLoad,
        engine=st.integers(0, 20),
        queued_tokens=st.integers(0, 10_000),
        queued_units=st.integers(0, 1000).map(float),
        queued_requests=st.integers(0, 50),
        running=st.integers(0, 50),
        free_units=st.integers(0, 1000),
        pool_units=st.sampled_from([0, 1000]),
        mean_input=st.floats(0.0, 5000.0),
        mean_output=st.floats(0.0, 5000.0),
        step_seconds=st.floats(1e-4, 10.0),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda load: load.engine,
)


@given(
    LOADS, st.integers(1, 5000), st.dictionaries(st.integers(0, 20), st.integers(0, 5000)), st.sampled_from([*ROUTERS])
)
def test_every_router_names_one_of_the_engines_and_the_same_one_again(
    loads: list[EngineLoad], tokens: int, hits: dict[int, int], name: str
) -> None:
    prompt = RoutedPrompt(tokens, hits)
    one = choose(name, loads, prompt, chance(7))
    assert one in {load.engine for load in loads}
    assert choose(name, loads, prompt, chance(7)) == one
