"""Learns step times: a sweep at the first start, corrections while serving, refits in a thread, a saved fit.

Without a sweep (a request arrived first) the model is a guess. Steps with offline work then start small and double
while they are short, until a fit replaces the guess. A fit from noisy steps is taken, too, if it is not far worse than
the guess: margins and the scale of `OnlineModel` follow the machine, but only a fit knows that a step has a fixed cost.
"""

import logging
import math
import random
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from predictor.features import BatchFeatures
from predictor.fitting import FEWEST, Refit, error_of, fit, refit
from predictor.model import LatencyModel, Sample, split_samples
from predictor.online import OnlineModel
from predictor.profile import Profile, ProfileError, ProfileKey

log = logging.getLogger("vllm.tidemill")

FIRST_TOKENS = 32
"""Slow start: tokens of a step with offline work before the first fit."""
SWEPT = 40
"""Steps of a sweep that suffice for a fit: they cover all sizes, unlike those of traffic."""
FLAT = 1.5
"""A step of at most this many times the time of the fastest one is short, too: its cost is mostly fixed."""
REFIT_STEPS = 1_000
"""Executed steps between two refits."""
TOLERATED = 1.5
"""A first fit replaces the guess if its error is at most this many times that of the guess."""
ENDURED = 400
"""Steps after which a first fit replaces the guess in any case."""
GUESS = {"intercept": 5e-3, "hinges": (2e-4,)}


class Learner:
    """The latency model of one engine.

    Args:
        token_limit: Maximum tokens of a step.
        buckets: Token counts to which CUDA graphs pad a step, ascending; empty: no padding.
        path: File of the fit; None: it is not kept.
        key: Identity of the fit.
    """

    def __init__(self, token_limit: int, buckets: tuple[int, ...], path: Path | None, key: ProfileKey) -> None:
        self._path, self._key = path, key
        self._limits = {"token_limit": token_limit, "decode_buckets": buckets}
        self.sweep: list[Sample] = []
        self.is_fitted, self._cap, self.num_steps = False, FIRST_TOKENS, 0
        self._fastest = math.inf
        self._worker = ThreadPoolExecutor(1, "tidemill-fit")
        self._fitting: Future[Refit | None] | None = None
        guess = LatencyModel(knots=(0,), **GUESS, **self._limits)  # type: ignore[arg-type]
        self.model = OnlineModel(guess, 0.3)
        self._load()

    def _load(self) -> None:
        if self._path is None or not self._path.exists():
            return
        try:
            profile = Profile.load(self._path, self._key)
        except ProfileError as error:
            log.warning("tidemill: %s", error)
            return
        self._adopt(profile.model, profile.held_out_mape)
        self.sweep = list(profile.sweep)
        log.info("tidemill: step times of %s, error %.1f %%", profile.created_at, 100 * profile.held_out_mape)

    def _adopt(self, model: LatencyModel, error: float) -> None:
        self.model.replace(model, error)
        self.is_fitted = True

    def cap(self, most: int) -> int:
        """Return the tokens that a step with offline work may have."""
        return most if self.is_fitted else min(most, self._cap)

    # ---- the sweep

    def measured(self, features: BatchFeatures, seconds: float) -> None:
        """Add a step of the sweep."""
        if seconds > 0.0:
            self.sweep.append(Sample(features, seconds))

    def end_sweep(self) -> None:
        """Fit the sweep, and save the fit. With fewer than `SWEPT` steps, keep the guess."""
        if len(self.sweep) < SWEPT:
            log.info("tidemill: %d steps measured, too few; offline work starts small", len(self.sweep))
            self.sweep = []
            return
        train, held_out = split_samples(self.sweep)
        error = error_of(fit(train, **self._limits), held_out)  # type: ignore[arg-type]
        self._adopt(fit(self.sweep, **self._limits), error)  # type: ignore[arg-type]
        log.info("tidemill: %d steps measured, error %.1f %%", len(self.sweep), 100 * error)
        self._save(error)

    def _save(self, error: float) -> None:
        if self._path is None:
            return
        created = datetime.now(UTC).isoformat(timespec="seconds")
        profile = Profile(self._key, created, self.model.model, error, len(self.sweep), sweep=tuple(self.sweep))
        try:
            profile.save(self._path)
        except OSError as failure:
            log.warning("tidemill: step times cannot be saved to %s (%s)", self._path, failure.strerror or failure)

    # ---- while serving

    def observe(self, features: BatchFeatures, seconds: float, host: float, easy: float) -> float:
        """Learn from an executed step; return the seconds beyond its prediction.

        Args:
            features: The step.
            seconds: Time from the end of the previous step, or from its launch on an idle engine.
            host: Part of it that passed before the launch.
            easy: Seconds; a step below half of it is short for the slow start.
        """
        over = seconds - self.model.predict(features)
        self.model.observe(features, seconds, host)
        self.num_steps += 1
        self._fastest = min(self._fastest, seconds)
        is_short = seconds < max(easy / 2, FLAT * self._fastest)
        if not self.is_fitted and features.num_tokens >= self._cap / 2 and is_short:
            self._cap = 2 * self._cap
        due = self.num_steps % REFIT_STEPS == 0 or (not self.is_fitted and self.num_steps % FEWEST == 0)
        if due and self._fitting is None:
            current, recent = self.model.model, list(self.model.recent())
            self._fitting = self._worker.submit(refit, current, self.sweep, recent)
        return over

    def adopt(self) -> None:
        """Take the result of a refit that has ended."""
        if self._fitting is None or not self._fitting.done():
            return
        future, self._fitting = self._fitting, None
        if (failure := future.exception()) is not None:
            log.warning("tidemill: step times could not be fitted (%s)", failure)
            return
        found = future.result()
        if found is None:
            return
        bearable = found.error <= TOLERATED * found.error_before or self.num_steps >= ENDURED
        taken = found.better or (not self.is_fitted and bearable)
        log.info("tidemill: fit of %d steps, error %.1f %% (before %.1f %%): %s", self.num_steps, 100 * found.error,
                 100 * found.error_before, "taken" if taken else "not better")  # fmt: skip
        if taken:
            self._adopt(found.model, found.error)
            if found.better and not found.is_of_slow_device:
                self._save(found.error)

    def close(self) -> None:
        """End the thread."""
        self._worker.shutdown(wait=False, cancel_futures=True)


class Script(list[tuple[int, int, int]]):
    """Groups of probe requests: (number of requests, prompt tokens, output tokens), one group after the other."""

    @classmethod
    def of(cls, rows: int, tokens: int, context: int) -> "Script":
        """Return groups that cover steps of up to `rows` decodes, `tokens` tokens, and contexts of `context` tokens.

        The first pass is short, so that a start that is cut early knows all regimes roughly.
        """
        counts = [1 << power for power in range(max(1, rows).bit_length()) if 1 << power <= rows]
        longest = max(32, min(context - 16, 4 * tokens, 8192))
        lengths = sorted({min(longest, length) for length in (32, 256, 1024, longest)})
        groups = [(count, 32, 8) for count in counts]
        groups += [(1, length, 4) for length in lengths]
        groups += [(max(1, min(count, 4096 // length)), length, 12) for count in counts for length in lengths[1:]]
        return cls(groups)


def chunk_limit(most: int, rng: random.Random) -> int:
    """Return a random limit on the tokens of a probe step, uniform in its logarithm."""
    return min(most, round(math.exp(rng.uniform(math.log(16), math.log(max(17, most))))))
