"""Forecast the end of each batch and whether it may miss its completion window. Pure: no disk, no engine, no clock.

Work is measured in predicted engine seconds (`TokenCosts`), so that a pace measured with one job's prompts and answers
applies to other jobs. The remaining work of a job follows from the bytes of its pending lines and the tokens of its
finished lines; before enough lines have finished, from the averages of all jobs, capped by the lines' answer limits.
The pace is the recent work per second while batch work was present; at first it is the share of the machine that
current online work leaves free.

A job is at risk if it would end too late with all jobs served equally. The priority given to jobs at risk does not
enter this decision, so it cannot reverse it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.api import TokenCosts
from gateway.batch.lengths import LineLengths
from gateway.batch.shares import JobLoad, Shares
from gateway.store.objects import BatchJob, Usage

HALF_LIFE = 600.0
"""Half-life of measurements in seconds."""
LEAST_SEEN = 2.0
"""Seconds of batch work before the measured pace is used."""
LEAST_LINES = 8
"""Finished lines of a job from which only its own token counts are used."""
FIRST_PACE_SECONDS = 10.0
"""Weight in seconds of the expected pace beside the measured one: at first, running lines are not counted yet."""
LEAST_LEFT = 0.05
"""Minimum share of the machine assumed for offline work."""
ENTER_MARGIN, LEAVE_MARGIN = 1.1, 1.25
"""Factors on the expected time: a job is at risk if it would end late at ENTER_MARGIN, until it would not at
LEAVE_MARGIN."""
MAX_STEP = 120.0
"""Maximum seconds counted between two measurements: the clock may be set."""
STEP_JOBS = 32
"""Jobs per step of an update."""
HORIZON = 3e9
"""Seconds (about a century) beyond which a job has no expected end."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Assumptions before the first line has finished."""


class Pace:
    """Recent batch throughput: work and tokens per second of time with batch work present."""

    def __init__(self) -> None:
        self._seconds = self._work = self._tokens = 0.0
        self._lines = self._bytes = self._prompts = self._outputs = 0.0
        self._last: float | None = None

    def advance(self, now: float, busy: bool) -> None:
        """Advance to `now` and decay older measurements; `busy`: batch work was present since the last call."""
        step = 0.0 if self._last is None else min(max(0.0, now - self._last), MAX_STEP)
        self._last = now
        if busy:
            decay = 0.5 ** (step / HALF_LIFE)
            self._seconds = self._seconds * decay + step
            self._work *= decay
            self._tokens *= decay

    def line_ended(self, num_bytes: int, usage: Usage, work: float) -> None:
        decay = 0.998  # average over about 500 lines
        computed = usage.input_tokens - usage.cached_tokens
        self._work += work
        self._tokens += usage.input_tokens + usage.output_tokens
        self._lines = self._lines * decay + 1
        self._bytes = self._bytes * decay + num_bytes
        self._prompts = self._prompts * decay + computed
        self._outputs = self._outputs * decay + usage.output_tokens

    @property
    def rate(self) -> float | None:
        """Work per second; None before LEAST_SEEN seconds of batch work."""
        return self._work / self._seconds if self._seconds >= LEAST_SEEN and self._work > 0 else None

    def rate_after(self, first: float) -> float:
        """Work per second, blended with the expected rate `first` for the first seconds."""
        if self.rate is None:
            return first
        return (self._work + FIRST_PACE_SECONDS * first) / (self._seconds + FIRST_PACE_SECONDS)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of finished lines per second of batch work."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

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
    """Outlooks of all jobs. `costs()` returns the engine's current token costs, or None without a latency model;
    `online_tokens()` the prompt tokens computed and output tokens of online requests since the start."""

    def __init__(
        self,
        costs: Callable[[], TokenCosts | None],
        online_tokens: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
    ) -> None:
        self._ask_costs = costs
        self._ask_online = online_tokens
        self._online = OnlineUse()
        self._costs: TokenCosts | None = None
        self._alike = Shares()
        self._helped = Shares()
        self._added: dict[str, Outlook] = {}
        self.pace = Pace()
        self.outlooks: dict[str, Outlook] = {}

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
        self.pace.advance(now, bool(jobs))
        self._look(now)
        self._added = {}
        prices, rate = self._prices(), self._rate()
        alike, helped, outlooks = Shares(), Shares(), {}
        loads: list[tuple[BatchJob, JobLoad, float]] = []
        for index, (batch, lengths) in enumerate(jobs):
            left = self._tokens_left(batch, lengths)
            load = JobLoad(batch.id, batch.tenant, prices.of(*left))
            loads.append((batch, load, sum(left)))
            alike.add(load)
            if index % STEP_JOBS == 0:
                yield
        alike.seal()
        yield
        for index, (batch, load, tokens) in enumerate(loads):
            at_risk = rate is not None and self._is_at_risk(batch, alike.seconds(load, rate), now)
            loads[index] = (batch, replace(load, at_risk=at_risk), tokens)
            helped.add(loads[index][1])
            if index % STEP_JOBS == 0:
                yield
        helped.seal()
        yield
        for index, (batch, load, tokens) in enumerate(loads):
            outlooks[batch.id] = self._outlook(batch, load.at_risk, helped.seconds(load, rate or 0.0), tokens, now)
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
        return self._beside(batch, (num_bytes * self.pace.tokens_per_byte, lines * per_line), now)

    def _beside(self, batch: BatchJob, left: tuple[float, float], now: float) -> Outlook:
        load, rate = JobLoad(batch.id, batch.tenant, self._prices().of(*left)), self._rate()
        if rate is None:
            return Outlook(None, False, False, sum(left))
        at_risk = self._is_at_risk(batch, self._alike.seconds(load, rate, is_new=True), now)
        seconds = self._helped.seconds(replace(load, at_risk=at_risk), rate, is_new=True)
        return self._outlook(batch, at_risk, seconds, sum(left), now)

    def _outlook(self, batch: BatchJob, at_risk: bool, seconds: float, tokens: float, now: float) -> Outlook:
        if self._rate() is None:
            return Outlook(None, False, False, tokens)
        known = self.pace.rate is not None and seconds < HORIZON
        return Outlook(now + seconds if known else None, at_risk, now + seconds > batch.expires_at, tokens)

    def _rate(self) -> float | None:
        """Work per second; None if unknown."""
        return self.pace.rate if self._costs is None else self.pace.rate_after(self._online.left)

    def _look(self, now: float) -> None:
        self._costs = self._ask_costs()
        self._online.advance(now, self._ask_online(), self._prices())

    def _output_per_line(self, answers: Sequence[float]) -> float:
        """Return the mean output tokens over all jobs, capped by the answer limits of this job's lines."""
        usual = self.pace.output_per_line
        return sum(min(usual, most) for most in answers) / len(answers) if answers else usual

    def _prices(self) -> TokenCosts:
        return self._costs or TokenCosts()

    def _tokens_left(self, batch: BatchJob, lengths: LineLengths) -> tuple[float, float]:
        """Estimate the prompt tokens to compute and the output tokens that a job has left."""
        learned, line = lengths.learned, lengths.pending_line
        if learned is not None and 0 < learned.ended < learned.num_lines:
            line = (lengths.total_bytes - learned.bytes) / (learned.num_lines - learned.ended)
        pending = line * batch.remaining
        finished_bytes = lengths.total_bytes - pending
        per_byte, per_line = self.pace.tokens_per_byte, self._output_per_line(lengths.answers)
        if batch.completed > 0 and finished_bytes > 0:
            own = min(1.0, batch.completed / LEAST_LINES)
            computed = batch.usage.input_tokens - batch.usage.cached_tokens
            per_byte += own * (computed / finished_bytes - per_byte)
            mean = batch.usage.output_tokens / batch.completed
            if learned is not None and learned.is_known:
                mean = learned.left(line)
            per_line += own * (mean - per_line)
        return pending * per_byte, batch.remaining * per_line

    def _is_at_risk(self, batch: BatchJob, seconds: float, now: float) -> bool:
        before = self.outlooks.get(batch.id)
        margin = LEAVE_MARGIN if before is not None and before.at_risk else ENTER_MARGIN
        return now + margin * seconds > batch.expires_at
