"""When each batch will be done, and which may miss its completion window. Arithmetic: no disk, no engine, no clock.

Work is measured in predicted seconds of the machine (`TokenCosts`), so that the pace that was seen with one job's
prompts and answers tells something of another's. What a job has left is told by the bytes of its lines and by the
tokens that its finished ones took; until it has finished some, by those of other jobs, as far as its lines may answer
that much. The pace is what was harvested lately while there was batch work; before that, and a little in its first
seconds, it is what the machine has left beside the online work of now.

A job is at risk if the others and it, served alike, would not let it end in time. That judgement does not look at the
help that jobs at risk get, so it is not undone by it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.api import TokenCosts
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
URGENT_SHARE = 7 / 8
"""What jobs at risk get together beside others: see the engine's lanes."""
ENTER_MARGIN, LEAVE_MARGIN = 1.1, 1.25
"""A job is at risk when so many times its time would be too long, and until so many times would do."""
MAX_STEP = 120.0
MAX_WORK = 1e15
"""Work of one job at most: sums over all jobs stay finite and exact enough."""
HORIZON = 3e9
"""Seconds (about a century) beyond which a job has no expected end."""
FIRST_PROMPT_TOKENS_PER_BYTE, FIRST_OUTPUT_TOKENS, FIRST_LINE_BYTES = 0.25, 64.0, 400.0
"""Guesses of a server that has not finished a line."""


@dataclass(frozen=True, slots=True)
class Load:
    """One job: `work` it has left, in the unit of the pace's work."""

    batch_id: str
    tenant: str
    work: float
    at_risk: bool = False


def finish_times(loads: Sequence[Load], rate: float) -> dict[str, float]:
    """Return the seconds until each job is done at `rate` (work per second).

    Tenants share the rate equally, the jobs of a tenant share the tenant's part, and jobs at risk get `URGENT_SHARE`
    of the rate beside other jobs. Work that is negative or NaN counts as none, and no work is larger than `MAX_WORK`. A
    rate that is not positive gives infinity. The cost is O(n log n) for n jobs.
    """
    urgent, others = _lane_work([x for x in loads if x.at_risk]), _lane_work([x for x in loads if not x.at_risk])
    share = URGENT_SHARE if urgent and others else 1.0
    rest = 1.0 - share if urgent and others else 1.0
    alone = min(max(urgent.values(), default=0.0) / share, max(others.values(), default=0.0) / rest)
    ends: dict[str, float] = {}
    for lane, part in ((urgent, share), (others, rest)):
        for name, work in lane.items():
            passed = work / part
            seconds = passed if passed <= alone or part == 1.0 else alone + (work - alone * part)
            ends[name] = seconds / rate if rate > 0.0 else math.inf
    return ends


def _lane_work(loads: Sequence[Load]) -> dict[str, float]:
    """Return the work that a lane has done, over all of its tenants, when each of its jobs ends."""
    tenants: dict[str, list[tuple[float, str]]] = {}
    for load in loads:
        work = min(load.work, MAX_WORK) if load.work > 0.0 else 0.0  # NaN is not positive
        tenants.setdefault(load.tenant, []).append((work, load.batch_id))
    marks: list[tuple[float, int, str]] = []  # work of the tenant at the end of a job; 1 for the tenant's last job
    for jobs in tenants.values():
        jobs.sort()
        done = before = 0.0
        for index, (work, name) in enumerate(jobs):
            done += (work - before) * (len(jobs) - index)
            before = work
            marks.append((done, int(index == len(jobs) - 1), name))
    marks.sort()
    total, level, active = 0.0, 0.0, len(tenants)
    ends: dict[str, float] = {}
    for done, is_last, name in marks:
        total += (done - level) * active
        level = done
        active -= is_last
        ends[name] = total
    return ends


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
        self._batches: list[BatchJob] = []
        self._left: dict[str, tuple[float, float]] = {}
        self.pace = Pace()
        self.outlooks: dict[str, Outlook] = {}

    def line_ended(self, num_bytes: int, usage: Usage) -> None:
        """A line of so many bytes has ended, well or not."""
        work = self._prices().of(usage.input_tokens - usage.cached_tokens, usage.output_tokens)
        self.pace.line_ended(num_bytes, usage, work)

    def update(self, jobs: Sequence[tuple[BatchJob, Lengths]], now: float) -> None:
        """Judge all jobs in progress anew."""
        self.pace.advance(now, bool(jobs))
        self._look(now)
        self._batches = [batch for batch, _ in jobs]
        self._left = {batch.id: self._tokens_left(batch, lengths) for batch, lengths in jobs}
        self.outlooks = self._judge(self._batches, self._left, now)

    def first(self, batch: BatchJob, num_bytes: int, now: float, head: Lengths | None = None) -> Outlook:
        """Of a batch that was just created, beside all others, by its size and its first lines."""
        if batch.id in self.outlooks:  # the same request, sent again
            return self.outlooks[batch.id]
        self._look(now)
        lines = num_bytes / (self.pace.bytes_per_line if head is None else head.pending_line)
        per_line = self._output_per_line(() if head is None else head.answers)
        left = dict(self._left)
        left[batch.id] = (num_bytes * self.pace.tokens_per_byte, lines * per_line)
        return self._judge([*self._batches, batch], left, now)[batch.id]

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

    def _judge(
        self, batches: Sequence[BatchJob], left: dict[str, tuple[float, float]], now: float
    ) -> dict[str, Outlook]:
        prices, measured = self._prices(), self.pace.rate
        rate = measured if self._costs is None else self.pace.rate_after(self._online.left)
        if rate is None:
            return {batch.id: Outlook(None, False, False, sum(left[batch.id])) for batch in batches}
        alike = [Load(batch.id, batch.tenant, prices.of(*left[batch.id])) for batch in batches]
        ends = finish_times(alike, rate)
        risks = {batch.id: self._is_at_risk(batch, ends[batch.id], now) for batch in batches}
        helped = finish_times([Load(one.batch_id, one.tenant, one.work, risks[one.batch_id]) for one in alike], rate)
        return {
            batch.id: Outlook(
                eta=now + helped[batch.id] if measured is not None and helped[batch.id] < HORIZON else None,
                at_risk=risks[batch.id],
                misses=now + helped[batch.id] > batch.expires_at,
                tokens=sum(left[batch.id]),
            )
            for batch in batches
        }

    def _is_at_risk(self, batch: BatchJob, seconds: float, now: float) -> bool:
        before = self.outlooks.get(batch.id)
        margin = LEAVE_MARGIN if before is not None and before.at_risk else ENTER_MARGIN
        return now + margin * seconds > batch.expires_at
