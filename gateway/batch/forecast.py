"""Forecast the end of each batch and whether it may miss its completion window. Pure: no disk, no engine, no clock.

Work is measured in predicted engine seconds (`TokenCosts`), so that a pace measured with one job's prompts and answers
applies to other jobs. The remaining work of a job follows from the bytes of its pending lines and the tokens of its
finished lines; before enough lines have finished, from the averages of all jobs, capped by the lines' answer limits.
Output of unfinished lines counts as done, less the price of computing it again as a prompt, since a preemption may cost
that. The pace is the work per second while batch work was present: for the next minutes that of the last minutes, for
later work that of a longer time. At first it is the share of the machine that current online work leaves free. After
two days the pace is that per second which online work leaves, and online work is expected by time of day.

A job is at risk if it would end too late with all jobs served equally. The priority given to jobs at risk does not
enter this decision, so it cannot reverse it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine.api import EngineStats, RequestClass, TokenCosts
from gateway.batch.lengths import LineLengths
from gateway.batch.pace import OnlineUse, Pace, Room
from gateway.batch.shares import JobLoad, Shares
from gateway.store.objects import BatchJob, Usage

LEAST_LINES = 8
"""Finished lines of a job from which only its own token counts are used."""
RESIDUE = 0.4
"""Output that a line has left on average once it is longer than expected, as a share of its output so far."""
EULER = 0.5772
"""Euler's constant: the expected maximum of n exponential variables of mean 1 is about ln n + EULER."""
ENTER_MARGIN, LEAVE_MARGIN = 1.1, 1.25
"""Factors on the expected time: a job is at risk if it would end late at ENTER_MARGIN, until it would not at
LEAVE_MARGIN."""
STEP_JOBS = 32
"""Jobs per step of an update."""
HORIZON = 3e9
"""Seconds (about a century) beyond which a job has no expected end."""


class TokensLeft(NamedTuple):
    """Estimate of what a job has left."""

    prompt: float
    """Prompt tokens to compute."""
    output: float
    longest: float = 0.0
    """Output tokens of the line with the most left; they take a step each, however much room there is."""

    held: int = 0
    """Output tokens of unfinished lines so far."""

    @property
    def total(self) -> float:
        return self.prompt + self.output

    def work(self, prices: TokenCosts) -> float:
        return prices.of(self.prompt, self.output) + min(prices) * self.held


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecast of one job."""

    eta: float | None
    """Expected end in Unix seconds; None if unknown."""
    at_risk: bool
    """The job would end after its window if all jobs were served equally."""
    misses: bool
    """The job is expected to end after its window even with the priority of jobs at risk."""
    tokens: float
    """Estimated prompt and output tokens left."""

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """Return the metadata entries for the batch object."""
        notes = {
            "tidemill.at_risk": "true" if self.at_risk else "false",
            "tidemill.remaining_tokens": str(round(self.tokens)),
        }
        if self.eta is not None:
            notes["tidemill.eta"] = str(round(self.eta))
        if self.misses:
            notes["tidemill.warning"] = (
                f"At the current pace this batch will not finish within its completion window "
                f"({batch.completion_window}); lines without a result by then expire."
            )
        return notes


class Forecast:
    """Outlooks of all jobs. `stats()` returns the engine's current statistics."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._ask = stats
        self._stats = EngineStats()
        self._step_seconds = 0.0
        self._online = OnlineUse()
        self._room: Room | None = None
        self._alike = Shares()
        self._helped = Shares()
        self._added: dict[str, Outlook] = {}
        self.pace = Pace()
        self.outlooks: dict[str, Outlook] = {}
        self.elsewhere = 0.0
        """Work per second of other servers on the same jobs."""

    def line_ended(self, num_bytes: int, usage: Usage) -> None:
        """Count a finished line of `num_bytes` bytes, successful or not."""
        work = self._prices().of(usage.input_tokens - usage.cached_tokens, usage.output_tokens)
        self.pace.line_ended(num_bytes, usage, work)

    def update(self, jobs: Sequence[tuple[BatchJob, LineLengths]], now: float) -> None:
        """Recompute the outlooks of all jobs in progress."""
        for _ in self.steps(jobs, now):
            pass

    def steps(self, jobs: Sequence[tuple[BatchJob, LineLengths]], now: float) -> Iterator[None]:
        """Do the work of `update` in steps of well under 1 ms; the old outlooks stay valid until the last step."""
        self._look(now)
        prices = self._prices()
        held = (prices.decode - min(prices)) * sum(self._stats.job_tokens.values())
        self.pace.advance(now, bool(jobs), held, self._online.left_last)
        self._added = {}
        alike, helped, outlooks = Shares(), Shares(), {}
        loads: list[tuple[BatchJob, JobLoad, TokensLeft]] = []
        for index, (batch, lengths) in enumerate(jobs):
            left = self._tokens_left(batch, lengths)
            load = JobLoad(batch.id, batch.tenant, left.work(prices))
            loads.append((batch, load, left))
            alike.add(load)
            if index % STEP_JOBS == 0:
                yield
        alike.seal()
        yield
        for index, (batch, load, left) in enumerate(loads):
            at_risk = self._is_known and self._is_at_risk(batch, self._seconds(alike, load, left), now)
            loads[index] = (batch, replace(load, at_risk=at_risk), left)
            helped.add(loads[index][1])
            if index % STEP_JOBS == 0:
                yield
        helped.seal()
        yield
        for index, (batch, load, left) in enumerate(loads):
            seconds = self._seconds(helped, load, left)
            outlooks[batch.id] = self._outlook(batch, load.at_risk, seconds, left.total, now)
            if index % STEP_JOBS == 0:
                yield
        self._alike, self._helped = alike, helped
        self.outlooks = {**outlooks, **self._added}

    def add(self, batch: BatchJob, lengths: LineLengths, now: float) -> Outlook:
        """Return the outlook of a job that has just begun, given the jobs of the last update."""
        outlook = self.outlooks[batch.id] = self._added[batch.id] = self._beside(
            batch, self._tokens_left(batch, lengths), now
        )
        return outlook

    def first(self, batch: BatchJob, num_bytes: int, now: float, head: LineLengths | None = None) -> Outlook:
        """Return the outlook of a new batch from its size and first lines, given the jobs of the last update."""
        if batch.id in self.outlooks:  # a repeated request with the same idempotency key
            return self.outlooks[batch.id]
        self._look(now)
        lines = num_bytes / (self.pace.bytes_per_line if head is None else head.pending_line)
        per_line = self._output_per_line(() if head is None else head.answers)
        return self._beside(batch, TokensLeft(num_bytes * self.pace.tokens_per_byte, lines * per_line), now)

    def _beside(self, batch: BatchJob, left: TokensLeft, now: float) -> Outlook:
        load = JobLoad(batch.id, batch.tenant, left.work(self._prices()))
        at_risk = self._is_known and self._is_at_risk(batch, self._seconds(self._alike, load, left, is_new=True), now)
        seconds = self._seconds(self._helped, replace(load, at_risk=at_risk), left, is_new=True)
        return self._outlook(batch, at_risk, seconds, left.total, now)

    def _outlook(self, batch: BatchJob, at_risk: bool, seconds: float, tokens: float, now: float) -> Outlook:
        if not self._is_known:
            return Outlook(None, False, False, tokens)
        known = self.pace.rate is not None and seconds < HORIZON
        return Outlook(now + seconds if known else None, at_risk, now + seconds > batch.expires_at, tokens)

    @property
    def _is_known(self) -> bool:
        """Whether the pace is known, from a latency model or from finished lines."""
        return self._stats.token_costs is not None or self.pace.rate is not None

    def _seconds(self, shares: Shares, load: JobLoad, left: TokensLeft, *, is_new: bool = False) -> float:
        """Return the time until a job ends among the jobs of `shares`."""
        first = None if self._stats.token_costs is None else self._online.left
        own = self.pace.rate
        share = 1.0 if own is None else own / (own + self.elsewhere)
        seconds = self.pace.seconds(share * shares.seconds(load, 1.0, is_new=is_new), first, self._room)
        return max(seconds, left.longest * self._step_seconds)

    def _look(self, now: float) -> None:
        before, self._stats = self._stats, self._ask()
        if (steps := self._stats.steps - before.steps) > 0:
            self._step_seconds = (self._stats.step_seconds - before.step_seconds) / steps
        self._online.advance(now, self._stats.online_tokens, self._prices())
        self._room = None if self._stats.token_costs is None else self._online.room()

    def _output_per_line(self, answers: Sequence[float]) -> float:
        """Return the mean output tokens over all jobs, capped by the answer limits of this job's lines."""
        usual = self.pace.output_per_line
        return sum(min(usual, most) for most in answers) / len(answers) if answers else usual

    def _prices(self) -> TokenCosts:
        return self._stats.token_costs or TokenCosts()

    def _tokens_left(self, batch: BatchJob, lengths: LineLengths) -> TokensLeft:
        learned, line, held = lengths.learned, lengths.pending_line, self._stats.job_tokens.get(batch.id, 0)
        if learned is not None and 0 < learned.ended < learned.num_lines:
            line = (lengths.total_bytes - learned.bytes) / (learned.num_lines - learned.ended)
        pending = line * batch.remaining
        finished_bytes = lengths.total_bytes - pending
        per_byte, per_line = self.pace.tokens_per_byte, self._output_per_line(lengths.answers)
        running = max(1, min(batch.remaining, self._stats.running.get(RequestClass.OFFLINE, 0)))
        longest = RESIDUE * held / running
        if batch.completed > 0 and finished_bytes > 0:
            own = min(1.0, batch.completed / LEAST_LINES)
            computed = batch.usage.input_tokens - batch.usage.cached_tokens
            per_byte += own * (computed / finished_bytes - per_byte)
            mean = (batch.usage.output_tokens + held) / batch.completed  # running lines have longer answers
            if learned is not None and learned.is_known:
                mean, longest = learned.left(line), max(longest, learned.longest_left - held / running)
            else:  # the expected maximum of exponential lengths
                longest = mean * (math.log(running) + EULER)
            per_line += own * (mean - per_line)
        expected = batch.remaining * per_line - held
        output = expected / 2 + math.hypot(expected / 2, RESIDUE * held)  # a smooth maximum
        return TokensLeft(pending * per_byte, output, min(longest, max(lengths.answers, default=math.inf)), held)

    def _is_at_risk(self, batch: BatchJob, seconds: float, now: float) -> bool:
        before = self.outlooks.get(batch.id)
        margin = LEAVE_MARGIN if before is not None and before.at_risk else ENTER_MARGIN
        return now + margin * seconds > batch.expires_at
