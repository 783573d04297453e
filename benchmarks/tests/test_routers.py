"""The baseline routers: numbers computed by hand, and the choice of every router for every fleet."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from test_routing import LOADS

from benchmarks.simulated_fleet.routers import ROUTERS, Chance
from engine.api import LoadReport
from engine.fleet.routing import Loads, RoutedPrompt


def chance(seed: int = 0) -> Chance:
    return Chance(random.Random(seed))


def choose(name: str, loads: Loads, prompt: RoutedPrompt, draw: Chance | None = None) -> int:
    return ROUTERS[name](loads, prompt, draw or chance())


def test_round_robin_goes_round_past_those_that_are_away() -> None:
    loads, draw = dict.fromkeys(range(3), LoadReport()), chance()
    assert [choose("round-robin", loads, RoutedPrompt(1), draw) for _ in range(4)] == [0, 1, 2, 0]
    away = {0: loads[0], 2: loads[2]}
    assert [choose("round-robin", away, RoutedPrompt(1), draw) for _ in range(3)] == [2, 0, 2]
    assert [choose("round-robin", loads, RoutedPrompt(1), draw) for _ in range(2)] == [0, 1]


def test_p2c_takes_the_one_with_fewer_requests_of_two() -> None:
    loads = {
        0: LoadReport(running=5),
        1: LoadReport(queued_requests=2, running=2),
        2: LoadReport(queued_requests=9),
    }
    draw = chance(3)
    counts = Counter(choose("p2c", loads, RoutedPrompt(1), draw) for _ in range(3000))
    assert counts[2] == 0, "the fullest of three loses to both others"
    assert 1800 < counts[1] < 2200 and 800 < counts[0] < 1200, "two of the three pairs hold engine 1"
    assert choose("p2c", {2: loads[2]}, RoutedPrompt(1)) == 2


def test_random_is_even() -> None:
    draw = chance(5)
    counts = Counter(
        choose("random", dict.fromkeys(range(4), LoadReport()), RoutedPrompt(1), draw) for _ in range(4000)
    )
    assert all(900 < counts[n] < 1100 for n in range(4))


@given(
    LOADS, st.integers(1, 5000), st.dictionaries(st.integers(0, 20), st.integers(0, 5000)), st.sampled_from([*ROUTERS])
)
def test_every_router_names_one_of_the_engines_and_the_same_one_again(
    loads: Loads, tokens: int, hits: dict[int, int], name: str
) -> None:
    prompt = RoutedPrompt(tokens, hits)
    one = choose(name, loads, prompt, chance(7))
    assert one in loads
    assert choose(name, loads, prompt, chance(7)) == one
