"""Forecast the end of each batch and whether it may miss its completion window: remaining work divided by a rate.

Work is tokens weighted by their cost (`TokenCosts`), so that a rate measured with the prompts and answers of one batch
applies to others. Batches are fed by deadline, and tenants share alike (`gateway.batch.run`): a batch ends when its
tenant's batches up to its deadline have ended, and every other tenant has received as much work or has none left.
`LaneUpdater` applies the forecast while batches run; everything else is pure: no disk, no engine, no clock.
"""

import asyncio
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from engine.api import Lane, TokenCosts
from engine.client import EngineStats
from gateway.batch.run import BatchRun, LineSizes, by_deadline
from gateway.http.errors import log_unexpected
from gateway.store.objects import BatchJob, Usage

HALF_LIFE = 7200.0
"""Half-life of the measured rate, in seconds with batch work."""
LEAST_SEEN = 2.0
"""Seconds of batch work before the rate is known."""
MAX_STEP = 120.0
"""Maximum seconds counted between two measurements: the clock may be set."""
LINE_DECAY = 0.998
"""Factor on the sums over finished lines with each line: an average over about 500 lines."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Assumptions before the first line has finished."""
LEAST_LINES = 8
"""Finished lines of a batch from which only its own token counts are used."""
SPREAD, LEAST_SPREAD = 0.115, 15.0
"""Distance of the ends of a new range from the expected end: a share of the time left, and at least these seconds."""
SHRINK = 2.0
"""A range is narrowed when it is wider than a new one by this factor."""
ENTER_MARGIN, LEAVE_MARGIN = 1.1, 1.25
"""Factors on the expected time: a batch is at risk if it would end late at ENTER_MARGIN, until it would not at
LEAVE_MARGIN."""
MAX_WORK = 1e15
"""Maximum work of one batch, so that sums over all batches stay finite and precise."""
HORIZON = 3e9
"""Seconds (about a century) beyond which a batch has no expected end."""
STEP_JOBS = 32
"""Batches per step of an update."""
UPDATE_SECONDS, SLICE_SECONDS = 2.0, 0.0005
"""Minimum time between two updates of all batches, and maximum time for which an update holds the event loop."""


class EndRange:
    """Range of times that contains the expected end, and does not jump.

    It stays while the expected end is within it. If the end leaves the range, the range follows by at most its own
    width in one update, so that it always meets the range before. As the end approaches, the range shrinks within
    itself.
    """

    def __init__(self) -> None:
        self._bounds: tuple[float, float] | None = None

    def update(self, end: float, now: float) -> tuple[float, float]:
        """Return the earliest and the latest end, in seconds like `now`; `end`: the expected end, at least `now`."""
        half = max(LEAST_SPREAD, SPREAD * (end - now))
        if self._bounds is None:
            self._bounds = (end - half, end + half)
        low, high = self._bounds
        width = high - low
        if end > high:
            reached = min(high + width, end + half)
            low, high = min(high, max(low, reached - 2.0 * half)), reached
        elif end < low:
            reached = max(low - width, end - half)
            low, high = reached, max(low, min(high, reached + 2.0 * half))
        elif width > SHRINK * 2.0 * half:
            low, high = max(low, end - half), min(high, end + half)
        self._bounds = (low, high)
        return max(now, low), max(now, high)


class Pace:
    """Measured throughput of batch work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds with batch work, decayed."""
        self._work = self._tokens = self._held = 0.0
        self._lines = self._bytes = self._prompts = self._outputs = 0.0
        self._last: float | None = None

    def advance(self, now: float, busy: bool, held: float = 0.0) -> None:
        """Advance to `now`; `busy`: batch work was present since the last call; `held`: work done so far for unfinished
        lines."""
        step = 0.0 if self._last is None else min(max(0.0, now - self._last), MAX_STEP)
        self._last = now
        if busy:
            decay = 0.5 ** (step / HALF_LIFE)
            self.seconds = self.seconds * decay + step
            self._work, self._tokens = self._work * decay, self._tokens * decay
        self._work += held - self._held
        self._held = held

    def line_ended(self, num_bytes: int, usage: Usage, work: float) -> None:
        """Count a finished line of `num_bytes` bytes, successful or not."""
        self._work += work
        self._tokens += usage.input_tokens + usage.output_tokens
        self._lines = self._lines * LINE_DECAY + 1
        self._bytes = self._bytes * LINE_DECAY + num_bytes
        self._prompts = self._prompts * LINE_DECAY + usage.input_tokens - usage.cached_tokens
        self._outputs = self._outputs * LINE_DECAY + usage.output_tokens

    @property
    def rate(self) -> float | None:
        """Work per second of time with batch work; None before the first measurement."""
        return self._work / self.seconds if self.seconds >= LEAST_SEEN and self._work > 0 else None

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of finished lines per second of batch work."""
        return self._tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def prompt_tokens_per_byte(self) -> float:
        """Computed (not cached) prompt tokens per byte of input."""
        return self._prompts / self._bytes if self._bytes else FIRST_PROMPT_TOKENS_PER_BYTE

    @property
    def output_per_line(self) -> float:
        return self._outputs / self._lines if self._lines else FIRST_OUTPUT_TOKENS

    @property
    def bytes_per_line(self) -> float:
        return self._bytes / self._lines if self._lines else FIRST_LINE_BYTES


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecast of one batch."""

    eta: tuple[float, float] | None
    """Earliest and latest expected end in Unix seconds; None if unknown."""
    at_risk: bool
    """The batch would end after its window in the order of deadlines."""
    misses: bool
    """The batch would end after its window even if it ran alone."""
    tokens: float
    """Estimated prompt and output tokens left."""
    pace: float = 0.0
    """Factor on the current rate at which the batch would end with its window; 0 if unknown."""

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """Return the metadata entries for the batch object."""
        notes = {
            "tidemill.at_risk": "true" if self.at_risk else "false",
            "tidemill.remaining_tokens": str(round(self.tokens)),
        }
        if self.eta is not None:
            notes["tidemill.eta"] = f"{self.eta[0]:.0f}-{self.eta[1]:.0f}"
        if self.misses:
            notes["tidemill.warning"] = (
                f"At the current pace this batch will not finish within its completion window "
                f"({batch.completion_window}); lines without a result by then expire. All lines need "
                f"{self.pace:,.1f} times the pace: another engine, looser limits for chats, or fewer lines."
            )
        return notes


class Forecast:
    """Outlooks of all batches in progress. `stats()` returns the engine's current statistics."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._ask = stats
        self._stats = EngineStats()
        self._ranges: dict[str, EndRange] = {}
        self.pace = Pace()
        self.outlooks: dict[str, Outlook] = {}
        self._levels: dict[str, tuple[list[Any], list[float]]] = {}  # by tenant: deadlines, work until each end
        self.elsewhere = 0.0
        """Work per second of other servers on the same batches."""

    def line_ended(self, num_bytes: int, usage: Usage) -> None:
        """Count a finished line of `num_bytes` bytes, successful or not."""
        work = self._costs.of(usage.input_tokens - usage.cached_tokens, usage.output_tokens)
        self.pace.line_ended(num_bytes, usage, work)

    def update(self, jobs: Sequence[tuple[BatchJob, LineSizes]], now: float) -> Iterator[None]:
        """Recompute the outlooks in steps of well under 1 ms; the old ones stay valid until the last step."""
        self._stats = self._ask()
        self.pace.advance(now, bool(jobs), self._costs.of(0, sum(self._stats.job_tokens.values())))
        totals: defaultdict[str, float] = defaultdict(float)  # work by tenant
        levels: defaultdict[str, tuple[list[Any], list[float]]] = defaultdict(lambda: ([], []))
        loads: list[tuple[BatchJob, float, float, float]] = []  # with tokens, work, and the tenant's work until the end
        for index, (batch, sizes) in enumerate(sorted(jobs, key=lambda job: by_deadline(job[0]))):
            prompt, output = self._tokens_left(batch, sizes)
            work = min(MAX_WORK, self._costs.of(prompt, output))
            totals[batch.tenant] += work
            deadlines, ends = levels[batch.tenant]
            deadlines.append(by_deadline(batch))
            ends.append(totals[batch.tenant])
            loads.append((batch, prompt + output, work, totals[batch.tenant]))
            if index % STEP_JOBS == 0:
                yield
        works = sorted(totals.values())
        sums = list(accumulate(works, initial=0.0))
        outlooks, ranges = {}, {}
        for index, (batch, tokens, work, level) in enumerate(loads):
            above = bisect_right(works, level)
            ranges[batch.id] = self._ranges.get(batch.id) or EndRange()
            done = sums[above] + (len(works) - above) * level
            outlooks[batch.id] = self._outlook(batch, tokens, work, done, now, ranges[batch.id])
            if index % STEP_JOBS == 0:
                yield
        self.outlooks, self._ranges, self._levels = outlooks, ranges, dict(levels)

    def first(self, batch: BatchJob, num_bytes: int, now: float, sizes: LineSizes | None = None) -> Outlook:
        """Return the outlook of a new batch behind those in progress, from the size of its file and its first lines."""
        if batch.id in self.outlooks:  # a repeated request with the same idempotency key
            return self.outlooks[batch.id]
        sizes = sizes or LineSizes(self.pace.bytes_per_line)
        output = num_bytes / sizes.line_bytes * self._output_per_line(sizes)
        prompt = num_bytes * self.pace.prompt_tokens_per_byte
        work = min(MAX_WORK, self._costs.of(prompt, output))
        deadlines, ends = self._levels.get(batch.tenant, ((), ()))
        earlier = bisect_right(deadlines, by_deadline(batch))
        level = work + (ends[earlier - 1] if earlier else 0.0)
        others = sum(min(level, ends[-1]) for tenant, (_, ends) in self._levels.items() if tenant != batch.tenant)
        return self._outlook(batch, prompt + output, work, level + others, now, EndRange())

    def _outlook(self, batch: BatchJob, tokens: float, work: float, done: float, now: float, end: EndRange) -> Outlook:
        """Return the outlook of a batch with `work` left that ends after `done` of all work."""
        if self.pace.rate is None:
            return Outlook(None, False, False, tokens)
        rate, before = self.pace.rate + self.elsewhere, self.outlooks.get(batch.id)
        seconds = done / rate
        margin = LEAVE_MARGIN if before is not None and before.at_risk else ENTER_MARGIN
        at_risk, misses = now + margin * seconds > batch.expires_at, now + work / rate > batch.expires_at
        eta = end.update(now + seconds, now) if seconds < HORIZON else None
        return Outlook(eta, at_risk, misses, tokens, seconds / max(1.0, batch.expires_at - now))

    @property
    def _costs(self) -> TokenCosts:
        return self._stats.token_costs or TokenCosts()

    def _output_per_line(self, sizes: LineSizes) -> float:
        """Return the mean output tokens over all batches, capped by the answer limits of this batch's lines."""
        usual = self.pace.output_per_line
        return sum(min(usual, most) for most in sizes.answers) / len(sizes.answers) if sizes.answers else usual

    def _tokens_left(self, batch: BatchJob, sizes: LineSizes) -> tuple[float, float]:
        """Return the prompt tokens to compute and the output tokens that a batch has left."""
        prompt, output = sizes.line_bytes * self.pace.prompt_tokens_per_byte, self._output_per_line(sizes)
        if batch.completed > 0:
            own = min(1.0, batch.completed / LEAST_LINES)
            computed = batch.usage.input_tokens - batch.usage.cached_tokens
            prompt += own * (computed / batch.completed - prompt)
            output += own * (batch.usage.output_tokens / batch.completed - output)
        held = self._stats.job_tokens.get(batch.id, 0)
        return prompt * batch.remaining, max(0.0, output * batch.remaining - held)


class LaneUpdater:
    """Update the forecast while batches run, and move batches at risk to the engine's urgent lane.

    `set_lane` moves the lines of a batch in the engine to another lane.
    """

    def __init__(self, run: BatchRun, forecast: Forecast, set_lane: Callable[[str, Lane], None]) -> None:
        self._run = run
        self._forecast = forecast
        self._set_lane = set_lane
        self._changed = asyncio.Event()
        self.on_risk: Callable[[BatchJob], None] = lambda _: None
        """Called when a batch becomes at risk."""

    async def run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self.update()
            except BaseException as raised:
                log_unexpected(raised)
            await asyncio.sleep(UPDATE_SECONDS)

    def changed(self) -> None:
        """Schedule an update of all batches: a line has ended, a batch has begun, or time has passed."""
        self._changed.set()

    async def update(self) -> None:
        """Update the forecast of all batches, and apply it."""
        jobs = [job for job in self._run.jobs.values() if not job.settled.is_set()]
        begun = time.perf_counter()
        for _ in self._forecast.update([(job.batch, job.sizes) for job in jobs], self._run.clock.now()):
            if time.perf_counter() - begun >= SLICE_SECONDS:
                await asyncio.sleep(0)
                begun = time.perf_counter()
        for job in jobs:
            outlook = self._forecast.outlooks.get(job.batch.id)
            if outlook is not None and outlook.at_risk is not job.at_risk:
                job.at_risk = outlook.at_risk
                if job.at_risk:
                    self.on_risk(job.batch)
                self._set_lane(job.batch.id, job.lane)
                self._run.offer(job)
