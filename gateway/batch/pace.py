"""Throughput of batch work, and the share of the machine that online work uses. Pure: no disk, no engine, no clock."""

import math
from dataclasses import dataclass

from engine.api import TokenCosts
from gateway.store.objects import Usage

HALF_LIFE = 600.0
"""Half-life of measurements in seconds."""
HORIZONS = (HALF_LIFE, 3_600.0, 21_600.0, 129_600.0)
"""Half-lives of the averages of the pace in seconds. Work is expected at an average until the average's half-life from
now: the load of the next minutes is that of the last ones, and a day goes through high and low load."""
LEAST_SEEN = 2.0
"""Seconds of batch work before the measured pace is used."""
FIRST_PACE_SECONDS = 10.0
"""Weight in seconds of the expected pace beside the measured one: at first, prompts of running lines are not counted
yet."""
LEAST_LEFT = 0.05
"""Minimum share of the machine assumed for offline work."""
MAX_STEP = 120.0
"""Maximum seconds counted between two measurements: the clock may be set."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Assumptions before the first line has finished."""


@dataclass(slots=True)
class Average:
    """Decaying sums of the seconds with batch work and of the work done in them."""

    half_life: float
    seconds: float = 0.0
    work: float = 0.0

    def advance(self, step: float) -> None:
        decay = 0.5 ** (step / self.half_life)
        self.seconds = self.seconds * decay + step
        self.work *= decay

    @property
    def rate(self) -> float | None:
        """Work per second; None before LEAST_SEEN seconds of batch work."""
        return self.work / self.seconds if self.seconds >= LEAST_SEEN and self.work > 0 else None

    def rate_after(self, first: float) -> float:
        """Work per second, blended with the expected rate `first` for the first seconds."""
        if self.rate is None:
            return first
        return (self.work + FIRST_PACE_SECONDS * first) / (self.seconds + FIRST_PACE_SECONDS)


class Pace:
    """Batch throughput: work and tokens per second of time with batch work present."""

    def __init__(self) -> None:
        self.averages = [Average(half_life) for half_life in HORIZONS]
        self._tokens = self._held = 0.0
        self._lines = self._bytes = self._prompts = self._outputs = 0.0
        self._last: float | None = None

    def advance(self, now: float, busy: bool, held: float = 0.0) -> None:
        """Advance to `now` and decay older measurements; `busy`: batch work was present since the last call; `held`:
        work done for unfinished lines."""
        step = 0.0 if self._last is None else min(max(0.0, now - self._last), MAX_STEP)
        self._last = now
        if busy:
            for average in self.averages:
                average.advance(step)
            self._tokens *= 0.5 ** (step / HALF_LIFE)
        self._add(held - self._held)
        self._held = held

    def line_ended(self, num_bytes: int, usage: Usage, work: float) -> None:
        decay = 0.998  # average over about 500 lines
        computed = usage.input_tokens - usage.cached_tokens
        self._add(work)
        self._tokens += usage.input_tokens + usage.output_tokens
        self._lines = self._lines * decay + 1
        self._bytes = self._bytes * decay + num_bytes
        self._prompts = self._prompts * decay + computed
        self._outputs = self._outputs * decay + usage.output_tokens

    def _add(self, work: float) -> None:
        for average in self.averages:
            average.work += work

    @property
    def rate(self) -> float | None:
        """Recent work per second; None before LEAST_SEEN seconds of batch work."""
        return self.averages[0].rate

    def seconds(self, work: float, first: float | None) -> float:
        """Return the seconds until `work` is done; `first`: expected rate for the first seconds, if known."""
        begin, rate = 0.0, first
        for average in self.averages:
            rate = average.rate if first is None else average.rate_after(first)
            if rate is None or work <= (average.half_life - begin) * rate:
                break
            work -= (average.half_life - begin) * rate
            begin = average.half_life
        return begin + work / rate if rate else math.inf

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of finished lines per second of batch work."""
        seconds = self.averages[0].seconds
        return self._tokens / seconds if seconds > 0 else 0.0

    @property
    def tokens_per_byte(self) -> float:
        """Computed (not cached) prompt tokens per byte of input."""
        return self._prompts / self._bytes if self._bytes else FIRST_PROMPT_TOKENS_PER_BYTE

    @property
    def output_per_line(self) -> float:
        return self._outputs / self._lines if self._lines else FIRST_OUTPUT_TOKENS

    @property
    def bytes_per_line(self) -> float:
        return self._bytes / self._lines if self._lines else FIRST_LINE_BYTES


class OnlineUse:
    """Recent share of the machine used by online work, from cumulative token counters."""

    def __init__(self) -> None:
        self._seconds = self._work = 0.0
        self._last: tuple[float, float, float] | None = None

    def advance(self, now: float, tokens: tuple[float, float], prices: TokenCosts) -> None:
        """Advance to `now`; `tokens`: prompt tokens computed and output tokens of online requests since the start."""
        if self._last is not None:
            step = min(max(0.0, now - self._last[0]), MAX_STEP)
            decay = 0.5 ** (step / HALF_LIFE)
            prompt, output = (max(0.0, new - old) for new, old in zip(tokens, self._last[1:], strict=True))
            self._seconds = self._seconds * decay + step
            self._work = self._work * decay + prices.of(prompt, output)
        self._last = (now, *tokens)

    @property
    def left(self) -> float:
        """Share of the machine left for offline work; 1 before the first measurement."""
        return max(LEAST_LEFT, 1.0 - self._work / self._seconds) if self._seconds > 0.0 else 1.0
