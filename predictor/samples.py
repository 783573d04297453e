"""Measured steps: (features, seconds) pairs in a flat array, so that a fit of 80,000 needs no Python loop."""

import random
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from predictor.features import BatchFeatures, FeatureRow

ROW_WIDTH = len(FeatureRow._fields) + 1


class Sample(NamedTuple):
    """One executed step and its measured time in seconds."""

    features: BatchFeatures
    seconds: float


class SampleLog:
    """Samples as rows of a flat array of doubles: `ROW_WIDTH` values each, the seconds last.

    `values` has shape [len, ROW_WIDTH], flattened. With a `capacity`, new samples overwrite the oldest.
    """

    __slots__ = ("_capacity", "_next", "values")

    def __init__(self, samples: Iterable[Sample] = (), capacity: int | None = None) -> None:
        self.values = array("d")
        self._capacity = capacity
        self._next = 0
        self.extend(samples)

    def append(self, features: BatchFeatures, seconds: float) -> None:
        """Store one step (a copy of its sums)."""
        row = array("d", (*features.row(), seconds))
        if self._capacity is None or len(self) < self._capacity:
            self.values.extend(row)
            return
        offset = self._next * ROW_WIDTH
        self.values[offset : offset + ROW_WIDTH] = row
        self._next = (self._next + 1) % self._capacity

    def extend(self, samples: Iterable[Sample]) -> None:
        """Store several steps."""
        for features, seconds in samples:
            self.append(features, seconds)

    def __len__(self) -> int:
        return len(self.values) // ROW_WIDTH

    def __iter__(self) -> Iterator[Sample]:
        for offset in range(0, len(self.values), ROW_WIDTH):
            *sums, seconds = self.values[offset : offset + ROW_WIDTH]
            yield Sample(BatchFeatures.from_row(FeatureRow(*map(int, sums))), seconds)


def split_samples(samples: Iterable[Sample], held_out: float = 0.2, seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Return (train, held-out), chosen by `seed`, each in original order; both are non-empty from two samples on."""
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out must be between 0 and 1, not {held_out}")
    everything = list(samples)
    order = list(range(len(everything)))
    random.Random(seed).shuffle(order)
    count = min(max(1, round(len(everything) * held_out)), len(everything) - 1)
    chosen = set(order[: max(count, 0)])
    train = [sample for index, sample in enumerate(everything) if index not in chosen]
    return train, [everything[index] for index in sorted(chosen)]
