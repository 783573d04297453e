"""When each batch will be done, and which may miss its completion window. Arithmetic: no disk, no engine, no clock.

Work is measured in predicted seconds of the machine (`TokenCosts`), so that the pace that was seen with one job's
prompts and answers tells something of another's. What a job has left is told by the bytes of its lines and by the
tokens that its finished ones took; until it has finished some, by those of other jobs, as far as its lines may answer
that much. The pace is what was harvested lately while there was batch work; before that, and a little in its first
seconds, it is what the machine has left beside the online work of now.

A job is at risk if the others and it, served alike, would not let it end in time. That judgement does not look at the
help that jobs at risk get, so it is not undone by it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.api import TokenCosts
from gateway.batch.shares import Load, Shares
from gateway.store.objects import BatchJob, Lengths, Usage

HALF_LIFE = 600.0
"""Seconds after which what was seen counts half."""
LEAST_SEEN = 2.0
"""Seconds of batch work before a pace is believed."""
LEAST_LINES = 8
"""Finished lines of a job before nothing but its own lengths are believed."""
FIRST_PACE_SECONDS = 10.0
"""What the machine has left counts as much as a pace that was seen for so long: the lines of the first steps have not
ended, and what they took is not counted yet."""
LEAST_LEFT = 0.05
"""Of the machine, for offline work beside online work that takes all of it."""
ENTER_MARGIN, LEAVE_MARGIN = 1.1, 1.25
"""A job is at risk when so many times its time would be too long, and until so many times would do."""
MAX_STEP = 120.0
STEP_JOBS = 32
"""Jobs that a step of a judgement looks at."""
HORIZON = 3e9
"""Seconds (about a century) beyond which a job has no expected end."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Guesses of a server that has not finished a line."""


class Pace:
    """What was harvested lately: work and tokens per second of time in which there was batch work."""

    def __init__(self) -> None:
        self._seconds = self._work = self._tokens = 0.0
        self._lines = self._bytes = self._prompts = self._outputs = 0.0
        self._last: float | None = None

    def advance(self, now: float, busy: bool) -> None:
        """Time goes on, with or without batch work; a clock that was set counts for little."""
        step = 0.0 if self._last is None else min(max(0.0, now - self._last), MAX_STEP)
        self._last = now
        if busy:
            decay = 0.5 ** (step / HALF_LIFE)
            self._seconds = self._seconds * decay + step
            self._work *= decay
            self._tokens *= decay

    def line_ended(self, num_bytes: int, usage: Usage, work: float) -> None:
        decay = 0.998  # some 500 lines
        computed = usage.input_tokens - usage.cached_tokens
        self._work += work
        self._tokens += usage.input_tokens + usage.output_tokens
        self._lines = self._lines * decay + 1
        self._bytes = self._bytes * decay + num_bytes
        self._prompts = self._prompts * decay + computed
        self._outputs = self._outputs * decay + usage.output_tokens

    @property
    def rate(self) -> float | None:
        """Work per second; None before enough was seen."""
        return self._work / self._seconds if self._seconds >= LEAST_SEEN and self._work > 0 else None

    def rate_after(self, first: float) -> float:
        """Work per second where `first` was expected before anything was seen."""
        if self.rate is None:
            return first
        return (self._work + FIRST_PACE_SECONDS * first) / (self._seconds + FIRST_PACE_SECONDS)

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens of lines that ended; 0 before any did."""
        return self._tokens / self._seconds if self._seconds > 0 else 0.0

    @property
    def tokens_per_byte(self) -> float:
        """Computed prompt tokens for a byte of input."""
        return self._prompts / self._bytes if self._bytes else FIRST_PROMPT_TOKENS_PER_BYTE

    @property
    def output_per_line(self) -> float:
        return self._outputs / self._lines if self._lines else FIRST_OUTPUT_TOKENS

    @property
    def bytes_per_line(self) -> float:
        return self._bytes / self._lines if self._lines else FIRST_LINE_BYTES


class OnlineUse:
    """Which share of the machine online work takes lately, of counters that grow."""

    def __init__(self) -> None:
        self._seconds = self._work = 0.0
        self._last: tuple[float, float, float] | None = None

    def advance(self, now: float, tokens: tuple[float, float], prices: TokenCosts) -> None:
        """`tokens`: prompt tokens computed and output tokens of online requests, ever."""
        if self._last is not None:
            step = min(max(0.0, now - self._last[0]), MAX_STEP)
            decay = 0.5 ** (step / HALF_LIFE)
            prompt, output = (max(0.0, new - old) for new, old in zip(tokens, self._last[1:], strict=True))
            self._seconds = self._seconds * decay + step
            self._work = self._work * decay + prices.of(prompt, output)
        self._last = (now, *tokens)

    @property
    def left(self) -> float:
        """The share that it leaves; all of it before anything was seen."""
        return max(LEAST_LEFT, 1.0 - self._work / self._seconds) if self._seconds > 0.0 else 1.0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is expected of a job. `eta`: Unix seconds, None while nobody can tell. `misses`: even with the help that
    jobs at risk get it will not be done in its window. `tokens`: prompt and output tokens that it has left."""

    eta: float | None
    at_risk: bool
    misses: bool
    tokens: float

    def notes(self, batch: BatchJob) -> dict[str, str]:
        """What the batch object's metadata says of it."""
        notes = {"tidemill.at_risk": "true" if self.at_risk else "false"}
        if self.eta is not None:
            notes["tidemill.eta"] = str(round(self.eta))
        if self.misses:
            notes["tidemill.warning"] = (
                "At the present pace this batch will not be done when its completion window closes; "
                f"what has no result then ends as expired (window: {batch.completion_window})."
            )
        return notes


class Forecast:
    """The outlook of all jobs. `costs()` are the engine's as of now; None: it has no latency model. `online_tokens()`:
    prompt tokens computed and output tokens of its online requests so far."""

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
        """A line of so many bytes has ended, well or not."""
        work = self._prices().of(usage.input_tokens - usage.cached_tokens, usage.output_tokens)
        self.pace.line_ended(num_bytes, usage, work)

    def update(self, jobs: Sequence[tuple[BatchJob, Lengths]], now: float) -> None:
        """Judge all jobs in progress anew."""
        for _ in self.steps(jobs, now):
            pass

    def steps(self, jobs: Sequence[tuple[BatchJob, Lengths]], now: float) -> Iterator[None]:
        """Do the same in steps of well under a millisecond, in which the old outlooks hold."""
        self.pace.advance(now, bool(jobs))
        self._look(now)
        self._added = {}
        prices, rate = self._prices(), self._rate()
        alike, helped, outlooks = Shares(), Shares(), {}
        loads: list[tuple[BatchJob, Load, float]] = []
        for index, (batch, lengths) in enumerate(jobs):
            left = self._tokens_left(batch, lengths)
            load = Load(batch.id, batch.tenant, prices.of(*left))
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

    def add(self, batch: BatchJob, lengths: Lengths, now: float) -> Outlook:
        """Judge a job that has just begun, beside the jobs of the last update."""
        outlook = self.outlooks[batch.id] = self._added[batch.id] = self._beside(
            batch, self._tokens_left(batch, lengths), now
        )
        return outlook

    def first(self, batch: BatchJob, num_bytes: int, now: float, head: Lengths | None = None) -> Outlook:
        """Judge a batch that was just created, by its size and its first lines, beside the jobs of the last update."""
        if batch.id in self.outlooks:  # the same request, sent again
            return self.outlooks[batch.id]
        self._look(now)
        lines = num_bytes / (self.pace.bytes_per_line if head is None else head.pending_line)
        per_line = self._output_per_line(() if head is None else head.answers)
        return self._beside(batch, (num_bytes * self.pace.tokens_per_byte, lines * per_line), now)

    def _beside(self, batch: BatchJob, left: tuple[float, float], now: float) -> Outlook:
        load, rate = Load(batch.id, batch.tenant, self._prices().of(*left)), self._rate()
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
        """Work per second; None if nobody can tell."""
        return self.pace.rate if self._costs is None else self.pace.rate_after(self._online.left)

    def _look(self, now: float) -> None:
        self._costs = self._ask_costs()
        self._online.advance(now, self._ask_online(), self._prices())

    def _output_per_line(self, answers: Sequence[float]) -> float:
        """Of a job of which nothing is known but what its lines may answer."""
        usual = self.pace.output_per_line
        return sum(min(usual, most) for most in answers) / len(answers) if answers else usual

    def _prices(self) -> TokenCosts:
        return self._costs or TokenCosts()

    def _tokens_left(self, batch: BatchJob, lengths: Lengths) -> tuple[float, float]:
        """Prompt tokens to compute and output tokens that a job has left."""
        pending = lengths.pending_line * batch.remaining
        finished_bytes = lengths.total_bytes - pending
        per_byte, per_line = self.pace.tokens_per_byte, self._output_per_line(lengths.answers)
        if batch.completed > 0 and finished_bytes > 0:
            own = min(1.0, batch.completed / LEAST_LINES)
            computed = batch.usage.input_tokens - batch.usage.cached_tokens
            per_byte += own * (computed / finished_bytes - per_byte)
            per_line += own * (batch.usage.output_tokens / batch.completed - per_line)
        return pending * per_byte, batch.remaining * per_line

    def _is_at_risk(self, batch: BatchJob, seconds: float, now: float) -> bool:
        before = self.outlooks.get(batch.id)
        margin = LEAVE_MARGIN if before is not None and before.at_risk else ENTER_MARGIN
        return now + margin * seconds > batch.expires_at
