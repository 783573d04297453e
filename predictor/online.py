"""Online refinement: a latency model that follows what executed steps really took, with a margin for what they vary.

Four corrections, each O(1) a step, deterministic, and unable to be broken by an outlier:

- what the host adds to a step (scheduling, delivery, HTTP), which no sweep on an idle runner sees: seconds, not a
  factor, or steps of a small model would make large ones look slow;
- one scale for the device (clock throttling, a busy neighbour), exponentially forgotten over its time, not over
  steps: one of 2 ms says little about one of 80, and a machine that others share changes its speed within a second. A
  step that is far off is heard as if it were less so; when a few in a row are (a profile of another hour), the
  scale moves there at once;
- per regime (octave of the step's tokens) a tracker of a high quantile of the residual in seconds: the safety margin,
  on top of the scale or, where the device is faster now than it usually is, of what it usually is: a phase that is
  slower comes without a sign, and one margin for both would be too small exactly then. It grows with the step's
  tokens, and so keeps costs monotone: more work never costs less;
- per regime a ring of recent steps, so that a new fit (off the loop, then `replace`) sees all regimes alike although
  nearly all steps are small.

Knows nothing of the clock, of fitting, or of who asks.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace

from predictor.features import BatchFeatures
from predictor.model import LatencyModel, largest_chunk
from predictor.profile import Profile
from predictor.reach import Reach
from predictor.samples import Sample, SampleLog

NUM_REGIMES = 16
"""Regime r holds the steps of 2^(r−1) … 2^r − 1 tokens; the last one all larger steps."""
AGREEING, FAR_OFF = 3, 1.6
"""So many steps in a row, off by that factor on the same side, are no chance; one alone is."""
WEIGHTY = 0.5
"""They are heard when they took at least that share of what as many steps usually take."""
USUAL_HALF_LIFE = 10.0
"""What the device usually is, beside what it is now: seconds of its time until a half is forgotten."""
HOST_OUTLIER = 3.0
"""One step teaches at most so many times the usual host time."""


@dataclass(frozen=True, slots=True)
class OnlineSettings:
    """How fast and how far an `OnlineModel` moves.

    forgetting       share of a new step in the means (0.02: about 50 steps)
    half_life        seconds of the device's time in which the scale goes half of the way to what steps take
    max_gain         largest share of that way for one step
    clip             largest relative error that one step can teach a margin
    quantile         of the residual, taken as the margin; a request has as many gaps as output tokens, and
                     each of them must keep a limit on its P99, so this is well above what requests are promised
    initial_margin   relative margin of a regime before its first step (see `with_error`)
    max_margin       the largest relative margin
    max_scale        the scale stays within [1/max_scale, max_scale]: a profile that was measured while all cores were
                     busy is 30 times too slow
    window           steps of the windowed error
    ring             recent steps kept per regime
    """

    forgetting: float = 0.02
    half_life: float = 0.3
    max_gain: float = 0.5
    clip: float = 0.25
    quantile: float = 0.995
    initial_margin: float = 0.05
    max_margin: float = 0.75
    max_scale: float = 64.0
    window: int = 512
    ring: int = 256

    @classmethod
    def with_error(cls, mape: float) -> "OnlineSettings":
        """Settings for a model with that held-out error: until steps tell more, three times it is kept free."""
        usual = cls()
        return cls(initial_margin=min(max(usual.initial_margin, 3.0 * mape), usual.max_margin))


@dataclass(slots=True)
class RegimeStats:
    """What the steps of one regime showed. Residuals are measured − what was counted on, in units of its mean
    (`mean_expected` seconds)."""

    count: int = 0
    spread: float = 0.0
    quantile: float = 0.0
    mean_expected: float = 0.0


class HostTime:
    """What passes on the host between two steps, seconds: a mean that outliers cannot move far."""

    def __init__(self, forgetting: float) -> None:
        self.mean = 0.0
        self._forgetting = forgetting
        self._count = 0

    def record(self, seconds: float) -> None:
        """One step."""
        if self._count:
            seconds = min(seconds, HOST_OUTLIER * self.mean + 1e-3)
        self._count += 1
        self.mean += max(self._forgetting, 1.0 / self._count) * (seconds - self.mean)


class OnlineModel:
    """A `LatencyModel` that learns from executed steps. Times in seconds.

    `predict`, `marginal`, `marginal_decodes` and `max_prefill` include the margin: they bound a step as the chosen
    quantile does. `expected` is without it: what to compare with measurements.
    """

    def __init__(self, model: LatencyModel, settings: OnlineSettings | None = None) -> None:
        self.settings = settings or OnlineSettings()
        self.num_observed = 0
        self._host = HostTime(self.settings.forgetting)
        self._errors = [0.0] * self.settings.window
        self._error_sum = 0.0
        self.replace(model)

    @classmethod
    def of(cls, profile: Profile) -> "OnlineModel":
        """What a profile starts with, live and simulated: its fit, and a margin by its error."""
        return cls(profile.model, OnlineSettings.with_error(profile.held_out_mape))

    def replace(self, model: LatencyModel, settings: OnlineSettings | None = None) -> None:
        """Continue with a new fit: corrections start over, recent steps, the host's time and the windowed error stay.

        `settings`, if given, may change how fast and far it moves, not what is kept of steps.
        """
        if settings is not None:
            self.settings = dataclass_replace(settings, window=self.settings.window, ring=self.settings.ring)
        self.model = model
        self.scale = self._usual_scale = 1.0
        self._odd: deque[tuple[float, float]] = deque(maxlen=AGREEING)
        self._mean_raw, self._num_scaled = 0.0, 0
        self.regimes = [self._prior(regime) for regime in range(NUM_REGIMES)]
        self._margins = [0.0] * (NUM_REGIMES + 1)
        self._raise_margins()
        if not self.num_observed:
            self._recent = [SampleLog(capacity=self.settings.ring) for _ in range(NUM_REGIMES)]
            self._whole = [SampleLog(capacity=self.settings.ring) for _ in range(NUM_REGIMES)]

    def _prior(self, regime: int) -> RegimeStats:
        """A regime before its first step: the initial margin of what a prompt of its smallest size would take."""
        features = BatchFeatures(self.reach)
        features.add_chunk(0, 1 << max(regime - 1, 0))
        return RegimeStats(quantile=self.settings.initial_margin, mean_expected=self.model.predict(features))

    @property
    def reach(self) -> Reach:
        """That of its fit."""
        return self.model.reach

    def observe(self, features: BatchFeatures, measured: float, host: float = 0.0) -> None:
        """Learn from one executed step of `measured` > 0 seconds, `host` of them not the device's; anything else is not
        a measurement and is ignored."""
        if not 0.0 < measured < math.inf:
            return
        host = min(max(host, 0.0), measured)
        device = measured - host
        raw = self.model.predict(features)
        expected, sure = raw * self.scale + self._host.mean, raw * self._sure_scale + self._host.mean
        self._count_error(abs(expected - measured) / measured)
        self._host.record(host)
        if device <= 0.0 or raw <= 0.0:
            return
        index = min(features.num_tokens.bit_length(), NUM_REGIMES - 1)
        self._recent[index].append(features, device)
        self._whole[index].append(features, measured)
        self._follow_device(raw, device)
        self._learn(self.regimes[index], measured, sure)
        self._raise_margins()

    def _follow_device(self, raw: float, device: float) -> None:
        """Move the scale: `raw` seconds by the model took `device` seconds."""
        settings = self.settings
        self._num_scaled += 1
        self._mean_raw += max(settings.forgetting, 1.0 / self._num_scaled) * (raw - self._mean_raw)
        # Of the expected time, not of the measured: one step that took ten times as long is not ten steps.
        gain = min(1.0 - 0.5 ** (raw * self.scale / settings.half_life), settings.max_gain)
        ratio = device / raw
        scale = self.scale * min(max(ratio / self.scale, 1.0 / FAR_OFF), FAR_OFF) ** gain
        self.scale = min(max(self._agreed_scale(ratio, raw, scale), 1.0 / settings.max_scale), settings.max_scale)
        slow = max(1.0 - 0.5 ** (device / USUAL_HALF_LIFE), 1.0 / self._num_scaled)
        self._usual_scale *= (self.scale / self._usual_scale) ** slow

    def _agreed_scale(self, ratio: float, raw: float, scale: float) -> float:
        """`scale`, or the median of the last few ratios when all of them were far off on the same side and weigh
        enough."""
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

    def _learn(self, stats: RegimeStats, measured: float, expected: float) -> None:
        """Move one regime's means towards the step, and its quantile by a step whose size follows the spread."""
        settings = self.settings
        rate = max(settings.forgetting, 1.0 / (stats.count + 1))
        stats.count += 1
        stats.mean_expected += rate * (expected - stats.mean_expected)
        # In seconds, not as a share of this step: a small one that took twice as long is no reason to fear for a large.
        residual = (measured - expected) / stats.mean_expected
        clipped = min(max(residual, -settings.clip), settings.clip)
        # Around zero, not around the mean: a regime that is always late must move its quantile fast.
        stats.spread += rate * (abs(clipped) - stats.spread)
        # Above the quantile it rises by q, below it falls by 1 − q: at rest where a share of q lies below.
        pace = 2.0 * rate**0.5 * max(stats.spread, 0.001)
        above = residual > stats.quantile
        stats.quantile += pace * (settings.quantile if above else settings.quantile - 1.0)
        stats.quantile = min(max(stats.quantile, 0.0), settings.max_margin)

    def _raise_margins(self) -> None:
        """Margins in seconds at 2^(r−1) tokens, never falling with r. Where the profile is far too slow, so is what
        it says of regimes without a step."""
        highest, trust, margins = 0.0, min(1.0, 2.0 * self._usual_scale), self._margins
        for regime, stats in enumerate(self.regimes):
            own = stats.quantile * stats.mean_expected
            if not stats.count:
                own *= trust
            if own > highest:
                highest = own
            margins[regime] = highest
        margins[NUM_REGIMES] = highest

    def _count_error(self, error: float) -> None:
        at = self.num_observed % len(self._errors)
        self._error_sum += error - self._errors[at]
        self._errors[at] = error
        self.num_observed += 1
        if at == 0:
            self._error_sum = math.fsum(self._errors)  # forgets the rounding of a whole window

    @property
    def mape(self) -> float:
        """Mean of |expected − measured| ÷ measured over the last window of steps; 0 before the first."""
        return self._error_sum / max(1, min(self.num_observed, len(self._errors)))

    def margin(self, tokens: int) -> float:
        """Seconds kept free beside the expected time of a step of `tokens` tokens; linear between octaves."""
        if tokens <= 0:
            return 0.0
        regime = min(tokens.bit_length(), NUM_REGIMES - 1)
        low = self._margins[regime]
        base = 1 << (regime - 1)
        return low + (self._margins[regime + 1] - low) * min((tokens - base) / base, 1.0)

    @property
    def host_seconds(self) -> float:
        """What the host adds to a step."""
        return self._host.mean

    @property
    def _sure_scale(self) -> float:
        """What is counted on: a device that is faster than usual now may be as usual in the next step."""
        return max(self.scale, self._usual_scale)

    @property
    def usual_seconds(self) -> float:
        """What steps are expected to take, on average."""
        return self._usual_scale * self._mean_raw + self._host.mean

    def as_fixed(self) -> LatencyModel:
        """What `expected` usually says, as a model that learns no more."""
        scaled = self.model.scaled(self._usual_scale)
        return dataclass_replace(scaled, intercept=scaled.intercept + self._host.mean)

    def usual(self, features: BatchFeatures) -> float:
        """What the step usually takes, without the margin: as `as_fixed` says."""
        return self._usual_scale * self.model.predict(features) + self._host.mean

    def expected(self, features: BatchFeatures) -> float:
        """The step's time without the margin."""
        return self.scale * self.model.predict(features) + self._host.mean

    def predict(self, features: BatchFeatures) -> float:
        """The step's time with the margin."""
        sure = self._sure_scale * self.model.predict(features) + self._host.mean
        return sure + self.margin(features.num_tokens)

    def marginal(self, features: BatchFeatures, start: int, length: int) -> float:
        """What the chunk (start, length) adds, its share of the margin included."""
        tokens = features.num_tokens
        extra = self.margin(tokens + length) - self.margin(tokens)
        return self._sure_scale * self.model.marginal(features, start, length) + extra

    def marginal_decodes(self, features: BatchFeatures, count: int, context_sum: int) -> float:
        """What `count` decodes add, their share of the margin included."""
        tokens = features.num_tokens
        extra = self.margin(tokens + count) - self.margin(tokens)
        return self._sure_scale * self.model.marginal_decodes(features, count, context_sum) + extra

    def max_prefill(self, features: BatchFeatures, seconds: float, max_tokens: int, start: int) -> int:
        """The largest chunk length ≤ `max_tokens` behind `start` that adds at most `seconds`; 0 if none does."""
        return largest_chunk(lambda length: self.marginal(features, start, length), seconds, max_tokens)

    def expected_prefill(self, features: BatchFeatures, limit: float, max_tokens: int, start: int) -> int:
        """The largest chunk with which the step is expected to end within `limit` seconds, no margin kept free; 0 if it
        is not without any."""
        return self.model.expected_prefill(features, (limit - self._host.mean) / self.scale, max_tokens, start)

    def cache_work(
        self,
        compact_tokens: int = 0,
        restored_tokens: int = 0,
        transferred_bytes: int = 0,
        beside: BatchFeatures | None = None,
    ) -> float:
        """What cache work adds; the margin does not depend on it."""
        return self._sure_scale * self.model.cache_work(compact_tokens, restored_tokens, transferred_bytes, beside)

    def adapter_work(self, adapters: int, tokens: int) -> float:
        """What adapters add; the margin does not depend on it."""
        return self._sure_scale * self.model.adapter_work(adapters, tokens)

    def mask_work(self, features: BatchFeatures, rows: int) -> float:
        """What masks add; the margin does not depend on it."""
        return self._sure_scale * self.model.mask_work(features, rows)

    def residuals(self) -> list[float]:
        """measured ÷ what `as_fixed` expects, of the recent steps, as many per regime as its ring holds; empty before
        the first."""
        fixed = self.as_fixed()
        steps = (sample for log in self._whole for sample in log)
        return [seconds / expected for f, seconds in steps if (expected := fixed.predict(f)) > 0.0]

    def recent(self) -> Iterator[Sample]:
        """Recently executed steps with their time on the device, as many per regime as its ring holds: the input of a
        new fit."""
        for log in self._recent:
            yield from log

    def recent_log(self) -> SampleLog:
        """The same in one log, a copy."""
        everything = SampleLog()
        for log in self._recent:
            everything.values.extend(log.values)
        return everything
