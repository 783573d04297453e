"""Variants of a layer's attention, as plain data."""

from typing import NamedTuple

from torch import Tensor


class Manner(NamedTuple):
    """Deviations of a layer's attention from softmax(q · k / sqrt(d)) · v.

    Attributes:
        scale: Replaces 1 / sqrt(d).
        window: A query sees itself and the window - 1 tokens before it.
        softcap: A score s becomes softcap · tanh(s / softcap), after the scale.
        sinks: [heads], a score per head that takes part in the softmax without a value.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Manner()
