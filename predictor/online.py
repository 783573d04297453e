"""Online refinement: a latency model that follows executed steps, with a safety margin.

Four corrections, each deterministic, O(1) per step and robust against outliers:

- Host time per step (scheduling, delivery, HTTP), which a sweep on an idle runner does not see. It is additive: as a
  factor, short steps of a small model would make long steps look slow.
- One scale factor for the device (clock throttling, a busy neighbour), with exponential forgetting over device time
  instead of steps: a step of 2 ms says little about one of 80 ms, and a shared machine changes its speed within a
  second. A single outlier is clipped. AGREEING outliers in a row move the scale at once.
- A safety margin per regime (power of two of the step's tokens): a high quantile of measured ÷ predicted of the
  regime's last MEMORY seconds. A regime without enough recent steps takes the margin of the nearest one that has them.
  The bound is at least the usual speed, because slow phases start without warning. The margin in seconds never
  decreases with the step's tokens, so that more work never costs less.
- A ring of recent steps per regime, so that a refit sees all regimes although nearly all steps are small.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import cache
from statistics import NormalDist

from predictor.features import BatchFeatures, Reach
from predictor.model import LatencyModel, Sample, SampleLog, largest_chunk

NUM_REGIMES = 16
"""Regime r holds the steps of 2^(r−1) … 2^r − 1 tokens; the last one all larger steps."""
AGREEING, FAR_OFF = 3, 1.6
"""The scale is reset after AGREEING consecutive steps that are all at least FAR_OFF times too slow (or too fast)."""
WEIGHTY = 0.5
"""Minimum weight for such a reset: share of the usual predicted time of AGREEING steps."""
USUAL_HALF_LIFE = 5.0
"""Half-life in seconds of device time of the estimate of the device's usual speed."""
HOST_OUTLIER = 3.0
"""Host times are clipped to this multiple of their mean."""
FORGETTING = 0.02
"""Weight of a new step in the means: about 50 steps."""
HALF_LIFE, MAX_GAIN = 0.3, 0.5
"""Device time in seconds in which the scale moves half of the way to the measured ratio, and the largest share of that
way for one step."""
QUANTILE = 0.995
"""Quantile of measured ÷ predicted that serves as the bound. A request has as many gaps as output tokens, and each gap
must meet a limit on the request's P99, so the quantile exceeds the promised percentile."""
MEMORY, ENOUGH = 10.0, 8
"""Seconds of step time for which a step counts in a margin, and the number of such steps that a regime needs for a
margin of its own."""
LEAST_FIRST_MARGIN, MAX_MARGIN = 0.05, 0.75
"""Smallest relative margin before the first steps, and the largest margin of all."""
TAIL_STEPS, TAIL_PEAKS = 5_000, 50
"""Number of steps and of peaks over which the tail of the step times is averaged."""
MAX_SCALE = 64.0
"""The scale stays within [1/MAX_SCALE, MAX_SCALE]. A profile measured on a busy machine can be 30 times too slow."""
UNSURE, SURE_SECONDS = 4.0, 3.0
"""A profile measured on a busy machine may be UNSURE times too slow; the speed is known after SURE_SECONDS of steps."""
WINDOW = 512
"""Number of steps of the windowed error."""
RING = 256
"""Number of recent steps kept per regime."""
KEPT_SECONDS = 60.0
"""Step time that a full ring of ratios spans, so that it shows the speeds of a minute."""


StepNoise = tuple[tuple[float, ...], ...]
"""Measured ÷ predicted times of steps by regime; a single entry holds for all regimes."""


class RegimeStats:
    """Recent steps of one regime. Ratios are measured ÷ predicted time, without the host time.

    Attributes:
        mean_raw: Mean predicted seconds of the regime's steps at scale 1.
    """

    __slots__ = ("_bound", "_ordered", "_recent", "count", "mean_raw")

    def __init__(self, mean_raw: float) -> None:
        self.count = 0
        self.mean_raw = mean_raw
        self._recent: deque[tuple[float, float]] = deque()
        self._ordered: list[float] = []
        self._bound: float | None = None  # None: to be computed

    def add(self, clock: float, raw: float, ratio: float) -> None:
        """Add a step that ended at `clock` seconds of step time; the oldest one goes if there are RING."""
        self.count += 1
        self.mean_raw += max(FORGETTING, 1.0 / self.count) * (raw - self.mean_raw)
        self._recent.append((clock, ratio))
        insort(self._ordered, ratio)
        self._bound = None
        if len(self._recent) > RING:
            self._drop()

    def forget(self, before: float) -> bool:
        """Drop the steps that ended earlier than `before`; return whether any step is left."""
        recent = self._recent
        while recent and recent[0][0] < before:
            self._drop()
        return bool(recent)

    def bound(self) -> float | None:
        """Return the ratio that a share QUANTILE of the steps does not exceed; None with fewer than ENOUGH steps.

        The largest ratio is never used, because a single hiccup would set it. If few steps are known, the distance
        from the median to the second largest is extended as for a normal distribution.
        """
        number, ordered = len(self._ordered), self._ordered
        if number < ENOUGH:
            return None
        if self._bound is None:
            (rank, factor), median = _rank(number, QUANTILE), ordered[number // 2]
            self._bound = median + factor * (ordered[rank - 1] - median)
        return self._bound

    def _drop(self) -> None:
        _, ratio = self._recent.popleft()
        del self._ordered[bisect_left(self._ordered, ratio)]
        self._bound = None


@cache
def _nearest(known: tuple[int, ...]) -> tuple[int, ...]:
    """Return for each regime the nearest one of `known`, the larger one of two; nothing if `known` is empty."""
    return known and tuple(min(known, key=lambda other: (abs(other - regime), -other)) for regime in range(NUM_REGIMES))


@cache
def _rank(number: int, quantile: float) -> tuple[int, float]:
    """Return the rank of a quantile among `number` values, from 1 and below `number`, and the factor of its distance
    from the median if the rank is too low."""
    rank = min(math.ceil(quantile * number), number - 1)
    normal = NormalDist()
    reached = normal.inv_cdf((rank - 0.375) / (number + 0.25))
    return rank, max(1.0, normal.inv_cdf(quantile) / reached)


class Tail:
    """Rare slow steps: an exponential tail of the seconds beyond the bound (peaks over threshold).

    A run of slow steps is one peak, since a disturbance of the machine says little about single steps.
    """

    def __init__(self) -> None:
        self._share, self._excess, self._above = 1.0 - QUANTILE, 0.0, False

    def add(self, excess: float) -> None:
        """Add a step: its measured seconds minus the time that QUANTILE of the steps should not exceed."""
        peak = excess > 0.0 and not self._above
        self._above = excess > 0.0
        self._share += (peak - self._share) / TAIL_STEPS
        if peak:
            self._excess += (excess - self._excess) / TAIL_PEAKS

    def excess(self, share: float) -> float:
        """Return the seconds beyond the bound that only `share` of the steps exceed, at least 0."""
        return self._excess * max(0.0, math.log(self._share / share))


class HostTime:
    """Outlier-resistant mean of the host time between two steps, in seconds."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._count = 0

    def record(self, seconds: float) -> None:
        """Add one step."""
        if self._count:
            seconds = min(seconds, HOST_OUTLIER * self.mean + 1e-3)
        self._count += 1
        self.mean += max(FORGETTING, 1.0 / self._count) * (seconds - self.mean)


class OnlineModel:
    """A `LatencyModel` that learns from executed steps. Times are in seconds. Implements `LatencyPredictor`.

    `predict`, `marginal`, `marginal_decodes` and `max_prefill` include the margin and bound a step at
    QUANTILE. `expected` excludes it and is comparable with measurements.
    Cache work, adapters and masks do not change the margin.
    """

    def __init__(self, model: LatencyModel, mape: float = 0.0) -> None:
        self.num_observed = 0
        self._host = HostTime()
        self._clock = 0.0  # seconds of step time
        self._errors = [0.0] * WINDOW
        self._error_sum = 0.0
        self._recent = [SampleLog(capacity=RING) for _ in range(NUM_REGIMES)]
        self._whole = [SampleLog(capacity=RING) for _ in range(NUM_REGIMES)]
        self._kept_at = [0.0] * NUM_REGIMES
        self.replace(model, mape)

    def replace(self, model: LatencyModel, mape: float) -> None:
        """Continue with a new fit with the held-out error `mape`; the first margins are three times as large.

        Corrections restart; recent steps, host time and windowed error are kept.
        """
        self._first_margin = min(max(LEAST_FIRST_MARGIN, 3.0 * mape), MAX_MARGIN)
        self.model = model
        self.scale = self._usual_scale = 1.0
        self._odd: deque[tuple[float, float]] = deque(maxlen=AGREEING)
        self._mean_raw, self._num_scaled = 0.0, 0
        self.regimes = [self._prior(regime) for regime in range(NUM_REGIMES)]
        self._filled: list[int] = []  # the regimes with recent steps, ascending
        self._margins = [0.0] * (NUM_REGIMES + 1)
        self._raise_margins()

    def _prior(self, regime: int) -> RegimeStats:
        """Return the statistics of a regime before its first step: the time of a smallest prompt."""
        features = BatchFeatures(self.reach)
        features.add_chunk(0, 1 << max(regime - 1, 0))
        return RegimeStats(self.model.predict(features))

    @property
    def reach(self) -> Reach:
        """Reach of the fit."""
        return self.model.reach

    def observe(self, features: BatchFeatures, measured: float, host: float = 0.0) -> None:
        """Learn from one executed step of `measured` > 0 seconds, of which `host` seconds were host time.

        Values of `measured` that are not positive and finite are ignored.
        """
        if not 0.0 < measured < math.inf:
            return
        host = min(max(host, 0.0), measured)
        device = measured - host
        raw = self.model.predict(features)
        host_mean = self._host.mean
        self._clock += measured
        self._count_error(abs(raw * self.scale + host_mean - measured) / measured)
        self._host.record(host)
        if device <= 0.0 or raw <= 0.0:
            return
        index = min(features.num_tokens.bit_length(), NUM_REGIMES - 1)
        self._recent[index].append(features, device)
        if len(self._whole[index]) < RING or self._clock >= self._kept_at[index] + KEPT_SECONDS / RING:
            self._whole[index].append(features, measured)
            self._kept_at[index] = self._clock
        self._follow_device(raw, device)
        self.regimes[index].add(self._clock, raw, (measured - host_mean) / raw)
        if index not in self._filled:
            insort(self._filled, index)
        self._raise_margins()

    def _follow_device(self, raw: float, device: float) -> None:
        """Move the scale after a step that took `device` seconds and was predicted as `raw` seconds."""
        self._num_scaled += 1
        self._mean_raw += max(FORGETTING, 1.0 / self._num_scaled) * (raw - self._mean_raw)
        # Weight by expected, not measured, time: a step that took ten times too long must not count as ten steps.
        gain = min(1.0 - 0.5 ** (raw * self.scale / HALF_LIFE), MAX_GAIN)
        ratio = device / raw
        scale = self.scale * min(max(ratio / self.scale, 1.0 / FAR_OFF), FAR_OFF) ** gain
        self.scale = min(max(self._agreed_scale(ratio, raw, scale), 1.0 / MAX_SCALE), MAX_SCALE)
        slow = max(1.0 - 0.5 ** (device / USUAL_HALF_LIFE), 1.0 / self._num_scaled)
        self._usual_scale *= (self.scale / self._usual_scale) ** slow

    def _agreed_scale(self, ratio: float, raw: float, scale: float) -> float:
        """Return the median of the last AGREEING ratios if all are FAR_OFF times too slow (or too fast) and long enough
        to count; else return `scale`."""
        odd, low, high = self._odd, self.scale / FAR_OFF, self.scale * FAR_OFF
        if low < ratio < high or (odd and (odd[-1][0] > self.scale) is not (ratio > self.scale)):
            odd.clear()
        if low < ratio < high:
            return scale
        odd.append((ratio, raw))
        if len(odd) < AGREEING or sum(raw for _, raw in odd) < WEIGHTY * AGREEING * self._mean_raw:
            return scale
        agreed = sorted(ratio for ratio, _ in odd)[AGREEING // 2]
        odd.clear()
        return agreed

    def _raise_margins(self) -> None:
        """Recompute the margins in seconds at 2^(r−1) tokens, never decreasing with r."""
        level, host, highest = self._sure_scale, self._host.mean, 0.0
        own, margins = self._own_margins(level), self._margins
        nearest = _nearest(tuple(own))
        for regime, stats in enumerate(self.regimes):
            relative = own[nearest[regime]] if own else self._first_margin
            margin = relative * (level * stats.mean_raw + host)
            if margin > highest:
                highest = margin
            margins[regime] = highest
        margins[NUM_REGIMES] = highest

    def _own_margins(self, level: float) -> dict[int, float]:
        """Return for each regime with enough recent steps its margin as a share of its time at the scale `level`."""
        own, oldest = {}, self._clock - MEMORY
        for regime in tuple(self._filled):
            stats = self.regimes[regime]
            if not stats.forget(oldest):
                self._filled.remove(regime)
            elif (bound := stats.bound()) is not None:
                own[regime] = min(max(bound / level - 1.0, 0.0), MAX_MARGIN)
        return own

    def _count_error(self, error: float) -> None:
        at = self.num_observed % len(self._errors)
        self._error_sum += error - self._errors[at]
        self._errors[at] = error
        self.num_observed += 1
        if at == 0:
            self._error_sum = math.fsum(self._errors)  # discard accumulated rounding errors

    @property
    def mape(self) -> float:
        """Mean of |expected − measured| ÷ measured over the last window of steps; 0 before the first."""
        return self._error_sum / max(1, min(self.num_observed, len(self._errors)))

    def margins(self) -> dict[int, float]:
        """Return the margins in seconds of steps of 1, 2, 4, ... tokens."""
        return {2 ** (regime - 1): margin for regime, margin in enumerate(self._margins) if regime}

    def margin(self, tokens: int) -> float:
        """Return the margin in seconds for a step of `tokens` tokens; linear between powers of two."""
        if tokens <= 0:
            return 0.0
        regime = min(tokens.bit_length(), NUM_REGIMES - 1)
        low = self._margins[regime]
        base = 1 << (regime - 1)
        return low + (self._margins[regime + 1] - low) * min((tokens - base) / base, 1.0)

    @property
    def host_seconds(self) -> float:
        """Mean host time per step."""
        return self._host.mean

    @property
    def _sure_scale(self) -> float:
        """Conservative scale: a device that is temporarily faster may return to its usual speed in the next step."""
        return max(self.scale, self._usual_scale)

    @property
    def usual_seconds(self) -> float:
        """Mean expected time of a step."""
        return self._usual_scale * self._mean_raw + self._host.mean

    def likely(self) -> "OnlineModel":
        """Return a view without margins at the faster of current and usual speed, valid until the next step.

        In the first SURE_SECONDS the machine may be up to UNSURE times as fast as its profile says.
        """
        unsure = UNSURE ** max(0.0, 1.0 - self._clock / SURE_SECONDS)
        return self._without_margins(min(self.scale, self._usual_scale) / unsure)

    def steady(self) -> "OnlineModel":
        """Return a view without margins at the slower of current and usual speed, valid until the next step."""
        return self._without_margins(self._sure_scale)

    def _without_margins(self, scale: float) -> "OnlineModel":
        view = copy(self)
        view.scale = view._usual_scale = scale
        view._margins = [0.0] * len(self._margins)
        return view

    def as_fixed(self) -> LatencyModel:
        """Return the usual expectation as a model that does not learn."""
        scaled = self.model.scaled(self._usual_scale)
        return replace(scaled, intercept=scaled.intercept + self._host.mean)

    def usual(self, features: BatchFeatures) -> float:
        """Return the usual time of the step without the margin, equal to the prediction of `as_fixed`."""
        return self._usual_scale * self.model.predict(features) + self._host.mean

    def expected(self, features: BatchFeatures) -> float:
        """Return the time of the step without the margin."""
        return self.scale * self.model.predict(features) + self._host.mean

    def predict(self, features: BatchFeatures) -> float:
        """Return the time of the step with the margin."""
        sure = self._sure_scale * self.model.predict(features) + self._host.mean
        return sure + self.margin(features.num_tokens)

    def marginal(self, features: BatchFeatures, start: int, length: int) -> float:
        tokens = features.num_tokens
        extra = self.margin(tokens + length) - self.margin(tokens)
        return self._sure_scale * self.model.marginal(features, start, length) + extra

    def marginal_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        tokens = features.num_tokens
        extra = self.margin(tokens + count) - self.margin(tokens)
        return self._sure_scale * self.model.marginal_decodes(features, count, context_sum) + extra

    def usual_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        return self._usual_scale * self.model.marginal_decodes(features, count, context_sum)

    def max_prefill(self, features: BatchFeatures, seconds: float, max_tokens: int, start: int) -> int:
        return largest_chunk(lambda length: self.marginal(features, start, length), seconds, max_tokens)

    def expected_prefill(self, features: BatchFeatures, limit: float, max_tokens: int, start: int) -> int:
        return self.model.expected_prefill(features, (limit - self._host.mean) / self.scale, max_tokens, start)

    def cache_work(
        self,
        compact_tokens: int = 0,
        restored_tokens: int = 0,
        transferred_bytes: int = 0,
        beside: BatchFeatures | None = None,
    ) -> float:
        return self._sure_scale * self.model.cache_work(compact_tokens, restored_tokens, transferred_bytes, beside)

    def adapter_work(self, adapters: int, tokens: int) -> float:
        return self._sure_scale * self.model.adapter_work(adapters, tokens)

    def mask_work(self, features: BatchFeatures, rows: int) -> float:
        return self._sure_scale * self.model.mask_work(features, rows)

    def residuals(self) -> StepNoise:
        """Return measured ÷ usual time of the recent steps, up to RING per regime; empty before the first step.

        A regime without recent steps gets the ratios of the nearest one that has them.
        """
        fixed = self.as_fixed()
        own = {
            regime: tuple(seconds / expected for f, seconds in log if (expected := fixed.predict(f)) > 0.0)
            for regime, log in enumerate(self._whole)
        }
        return tuple(own[regime] for regime in _nearest(tuple(regime for regime, ratios in own.items() if ratios)))

    def recent(self) -> Iterator[Sample]:
        """Yield the recent steps with their device time, up to RING per regime, as input of a new fit."""
        for log in self._recent:
            yield from log

    def recent_log(self) -> SampleLog:
        """Return the recent steps as a copy in one log."""
        everything = SampleLog()
        for log in self._recent:
            everything.values.extend(log.values)
        return everything
