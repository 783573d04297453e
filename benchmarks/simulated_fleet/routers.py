"""The routers of a simulated fleet: those of the live fleet, and the baselines of LARRY's evaluation."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.fleet.routing import Loads, RoutedPrompt, sal


@dataclass(slots=True)
class Chance:
    """The state of a router."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))
    last: int = -1  # the engine that `round_robin` chose last


Router = Callable[[Loads, RoutedPrompt, Chance], int]
"""Returns the number of the chosen engine; the loads are not empty."""


def p2c(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose two random engines and return the one with fewer requests."""
    two = chance.rng.sample(list(loads), min(2, len(loads)))
    return min(two, key=lambda engine: loads[engine].num_requests)


def round_robin(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    """Choose the engines in turn. An absent engine is skipped."""
    numbers = sorted(loads)
    chance.last = next((number for number in numbers if number > chance.last), numbers[0])
    return chance.last


def at_random(loads: Loads, _prompt: RoutedPrompt, chance: Chance) -> int:
    return chance.rng.choice(list(loads))


ROUTERS: dict[str, Router] = {
    "sal": lambda loads, prompt, _chance: sal(loads, prompt),
    "p2c": p2c,
    "round-robin": round_robin,
    "random": at_random,
}
