"""Refit of the latency model on executed steps, with a check whether it is better (HyGen §4.2).

A sweep covers an idle machine and its own choice of steps. A scale corrects a device that is slower as a whole, but not
one whose decodes alone became slower. The refit uses recent steps in regimes that have enough. Other regimes use the
sweep, scaled by the ratio of the nearest recent regime. Errors are measured on held-out steps, weighted by time and
averaged over regimes, because budgets are sums of step times.

Pure. A fit needs numpy and is too slow for a server's event loop.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from predictor.features import BatchFeatures
from predictor.fitting import fit
from predictor.model import CACHE_TERMS, LatencyModel
from predictor.samples import Sample, split_samples

FEWEST = 100
"""Minimum number of recent steps for a refit."""
COVERED = 16
"""Number of recent steps of a regime that replace those of the sweep."""
HELD_OUT = 0.25
BETTER = 0.95
"""Required ratio of new to old error; a smaller improvement may be chance."""
SLOW = 1.5
"""Ratio to the sweep above which the device counts as shared or throttled, a temporary state."""

Regime = tuple[bool, int]
"""(has prompts, bit length of the number of tokens) of a step."""


@dataclass(frozen=True, slots=True)
class Refit:
    """Result of a refit.

    Attributes:
        model: The new model.
        error: Error of `model` on held-out steps.
        error_before: Error of the old model on the same steps, scaled to the training steps.
        level: Measured time of recent steps ÷ prediction by the sweep, or by the old model without a sweep.
    """

    model: LatencyModel
    error: float
    error_before: float
    level: float

    @property
    def better(self) -> bool:
        return self.error < BETTER * self.error_before

    @property
    def is_of_slow_device(self) -> bool:
        """Whether the fit reflects a temporary slowdown and must not be saved: later starts compare with profiles."""
        return self.level >= SLOW


def refit(current: LatencyModel, sweep: Sequence[Sample], recent: Iterable[Sample]) -> Refit | None:
    """Fit a new model; None with too few steps. Coefficients of cache work are kept and steps with it are excluded."""
    steps = [sample for sample in recent if not _has_cache_work(sample.features)]
    if len(steps) < FEWEST:
        return None
    train, held_out = split_samples(steps, HELD_OUT)
    limits = {name: getattr(current, name) for name in ("token_limit", "buckets", "decode_buckets", "reach")}
    base = fit(sweep, **limits) if sweep else current
    aged = _aged(sweep, train, base)
    found = fit([*train, *aged], **limits)
    model = replace(found, **{name: getattr(current, name) for name in CACHE_TERMS})
    took = sum(s for _, s in train)
    scale, level = (took / sum(each.predict(f) for f, _ in train) for each in (current, base))
    return Refit(model, error_of(model, held_out), error_of(current.scaled(scale), held_out), level)


def error_of(model: LatencyModel, samples: Sequence[Sample]) -> float:
    """Return Σ |predicted − measured| ÷ Σ measured per regime, averaged over the regimes."""
    sums: dict[Regime, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for features, seconds in samples:
        off_and_all = sums[_regime(features)]
        off_and_all[0] += abs(model.predict(features) - seconds)
        off_and_all[1] += seconds
    return math.fsum(off / total for off, total in sums.values()) / len(sums)


def _aged(sweep: Sequence[Sample], train: Sequence[Sample], base: LatencyModel) -> list[Sample]:
    """Return the sweep's samples of regimes without enough recent steps, scaled by the ratio of measured time to the
    prediction of `base` (the fit of the sweep) in the nearest regime."""
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
