"""How a layer attends, beyond what every layer does: plain data for whoever computes attention."""

from typing import NamedTuple

from torch import Tensor


class Manner(NamedTuple):
    """What a layer's attention does besides softmax(q · k / sqrt(d)) · v.

    `scale` instead of 1 / sqrt(d). `window`: a query sees itself and the window - 1 tokens before it. `softcap` c: a
    score s becomes c · tanh(s / c), after the scale. `sinks [heads]`: a score that takes part in the softmax and has no
    value.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Manner()
