"""Windows of online work for replays."""

import random

from engine.colocation.replay import ReplayWindow
from predictor.load import Lengths, OnlineArrival


def poisson_window(rate: float, prompt: int, output: int, seconds: float, seed: int) -> ReplayWindow:
    """Poisson arrivals at `rate` requests a second with geometric-like lengths of the given means."""
    generator = random.Random(seed)
    at = 0.0
    arrivals: list[OnlineArrival] = []
    while (at := at + generator.expovariate(rate)) < seconds:
        lengths = [max(1, round(generator.expovariate(1 / mean))) for mean in (prompt, output)]
        arrivals.append(OnlineArrival(at, Lengths(lengths[0], lengths[1])))
    return ReplayWindow(tuple(arrivals), seconds)
