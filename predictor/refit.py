"""A new fit of the latency model from what steps really took, and whether it is better (HyGen §4.2, ours).

A sweep sees an idle machine and the steps that it thought of; a scale puts right a device that is slower as a whole,
but not one whose decodes cost twice as much and whose prompts cost the same. The fit stands on recent steps where there
are enough of their kind and size, and elsewhere on the sweep, by what steps nearest to them show of how it has aged.
Errors are measured on steps that were kept from the fit, all kinds and sizes alike, and by their time: that is what a
budget is made of.

Pure; the fit needs numpy, and time that a server's loop does not have.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from predictor.features import BatchFeatures
from predictor.fitting import fit
from predictor.model import CACHE_TERMS, LatencyModel
from predictor.samples import Sample, split_samples

FEWEST = 100
"""Recent steps that a fit needs."""
COVERED = 16
"""Steps of a kind and size that make those of the sweep superfluous."""
HELD_OUT = 0.25
BETTER = 0.95
"""The error must fall to that share of the old one: less is chance."""
SLOW = 1.5
"""Times what the sweep says: a device that takes so long is shared or throttled, and will not be for ever."""

Regime = tuple[bool, int]
"""Whether there are prompts, and the octave of the step's tokens."""


@dataclass(frozen=True, slots=True)
class Refit:
    """`error`: of `model` on steps that it was not fitted to; `error_before`: of the old model there, scaled to fit.
    `level`: how many times longer recent steps took than the sweep says, or without a sweep the old model."""

    model: LatencyModel
    error: float
    error_before: float
    level: float

    @property
    def better(self) -> bool:
        return self.error < BETTER * self.error_before

    @property
    def is_of_slow_device(self) -> bool:
        """Whether the device is slow for now; the next start must not begin with this model."""
        return self.level >= SLOW


def refit(current: LatencyModel, sweep: Sequence[Sample], recent: Sequence[Sample]) -> Refit | None:
    """None with too few steps. What cache work costs stays as it is: it is measured apart, and such steps are left
    out."""
    steps = [sample for sample in recent if not _has_cache_work(sample.features)]
    if len(steps) < FEWEST:
        return None
    train, held_out = split_samples(steps, HELD_OUT)
    limits = {name: getattr(current, name) for name in ("token_limit", "buckets", "decode_buckets", "reach")}
    base = fit(sweep, **limits) if sweep else current
    aged = _aged(sweep, train, base)
    found = fit([*train, *aged], current.feature_set, **limits)
    model = replace(found, **{name: getattr(current, name) for name in CACHE_TERMS})
    took = sum(s for _, s in train)
    scale, level = (took / sum(each.predict(f) for f, _ in train) for each in (current, base))
    return Refit(model, error_of(model, held_out), error_of(current.scaled(scale), held_out), level)


def error_of(model: LatencyModel, samples: Sequence[Sample]) -> float:
    """Σ |predicted − measured| ÷ Σ measured of each kind and size, on average over them."""
    sums: dict[Regime, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for features, seconds in samples:
        off_and_all = sums[_regime(features)]
        off_and_all[0] += abs(model.predict(features) - seconds)
        off_and_all[1] += seconds
    return math.fsum(off / total for off, total in sums.values()) / len(sums)


def _aged(sweep: Sequence[Sample], train: Sequence[Sample], base: LatencyModel) -> list[Sample]:
    """The samples of the sweep that nothing recent stands for, each by how much the nearest recent steps take longer
    now than `base`, its own fit, says."""
    sums: dict[Regime, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for features, seconds in train:
        took = sums[_regime(features)]
        took[0] += seconds
        took[1] += base.predict(features)
        took[2] += 1
    ratios = {regime: took / predicted for regime, (took, predicted, count) in sums.items() if count >= COVERED}
    if not ratios:
        return list(sweep)

    def distance(left: Regime, right: Regime) -> tuple[bool, int]:
        return left[0] is not right[0], abs(left[1] - right[1])

    found = []
    for features, seconds in sweep:
        regime = _regime(features)
        if regime not in ratios:
            found.append(Sample(features, seconds * ratios[min(ratios, key=lambda r: (distance(regime, r), r))]))
    return found


def _regime(features: BatchFeatures) -> Regime:
    return features.num_prefill_chunks > 0, features.num_tokens.bit_length()


def _has_cache_work(features: BatchFeatures) -> bool:
    return bool(features.compact_tokens or features.restored_tokens or features.transferred_bytes)
