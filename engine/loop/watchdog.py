"""Detect and report faults: invalid results, a hung step, a hung process by its pulse, and a stalled engine.

A step is hung if it takes far longer than its limit. A slow step is not hung. Time counts in full only while the
threads of the step sleep. Time on a core or waiting for a disk counts less, and time waiting for a core least. So a
step on a busy machine may take long, and a step that never ends is found on any machine. Time in which the watching
event loop did not run (a stopped process, a suspended machine) does not count.

An engine is stalled if requests exist, no step runs, and no step has completed for some seconds. A stall is always a
defect of the scheduler (`Driver.launch` asserts in every test that none occurs). The watchdog logs it once as critical,
with the state of the queues and the pool, and starts a recovery (`clear_stall`). It repeats the recovery at growing
intervals while the engine stays stalled. Without requests the watchdog sleeps.

Repeated faults of model steps are logged with one traceback per cause.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from traceback import walk_tb
from typing import NamedTuple

from engine.api import FinishReason, RequestClass, RequestOutput
from engine.client import EngineStats
from engine.core import EngineCore
from engine.errors import EngineStepError, EngineUnavailableError
from engine.machine.activity import Activity, ThreadActivity
from engine.panics import as_error
from engine.request import RequestStatus
from engine.scheduling.output import UNMASKED_TOKEN, ModelRunnerOutput, SchedulerOutput
from engine.scheduling.report import report_stats
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import WaitingQueue

LOOKS = 4
"""Number of checks of a step within its limit."""
ON_A_CORE = 0.25
"""Weight of a second in which a thread computes or waits for a disk (state D)."""
WAITING = 0.05
"""Weight of a second in which a runnable thread waits for a core."""
_NEW = ThreadActivity(0.0, 0.0, "")


GROWTH = 4
"""A predicted time is trusted for steps of up to GROWTH times the tokens of the largest step that has succeeded. Larger
steps may take far longer than a model extrapolates: one without large samples predicts that prompts are free."""


class StepLimits(NamedTuple):
    """Seconds after which a step is hung: `factor` x its predicted time, at least `floor`; at least `unknown` if the
    prediction is missing or not trusted."""

    floor: float = 2.0
    factor: float = 20.0
    unknown: float = 60.0

    def limit(self, predicted: float | None, *, trusted: bool = True) -> float:
        least = self.floor if trusted and predicted is not None else self.unknown
        return max(least, self.factor * (predicted or 0.0))


def charged(before: Activity, after: Activity, interval: float) -> float:
    """Return the weighted seconds between two samples, which are taken every `interval` seconds.

    Threads of a step wait for each other, so the longest computing time and the longest waiting time of any thread
    count. The kernel adds a wait when it ends, so the remaining time of a runnable thread (state R) counts as a wait.
    """
    passed = after.at - before.at
    wall = min(passed, 2.0 * interval)
    if wall <= 0.0:
        return 0.0
    on_core = waiting = 0.0
    in_line = on_disk = False
    for number, now in after.threads.items():
        was = before.threads.get(number, _NEW)
        on_core = max(on_core, now.cpu - was.cpu)
        waiting = max(waiting, (now.waited or 0.0) - (was.waited or 0.0))
        in_line = in_line or now.state == "R"
        on_disk = on_disk or now.state == "D"
    share = wall / passed
    waiting = min(waiting * share, wall)
    on_core = min(on_core * share, wall - waiting)
    asleep = wall - waiting - on_core
    rate = WAITING if in_line else ON_A_CORE if on_disk else 1.0
    return asleep * rate + on_core * ON_A_CORE + waiting * WAITING


class StepWatch:
    """The hang timer of a step.

    Args:
        on_hung: Called once, with the limit in seconds, if the step has not ended in time.
        read: Samples the processes that compute the step; if it returns None, all time counts in full.
    """

    def __init__(
        self,
        limits: StepLimits,
        on_hung: Callable[[float], None],
        read: Callable[[], Activity | None] = lambda: None,
    ) -> None:
        self._limits = limits
        self._on_hung = on_hung
        self._read = read
        self._timer: asyncio.TimerHandle | None = None
        self._last: Activity | None = None
        self._charged = 0.0
        self._most_tokens = 0

    def begin(self, predicted: float | None, tokens: int = 0) -> None:
        """Start the timer of a step of `tokens` tokens. `predicted`: its predicted seconds; None if unknown."""
        self.end()
        self._look_after(self._limits.limit(predicted, trusted=tokens <= GROWTH * self._most_tokens))

    def succeeded(self, tokens: int) -> None:
        """Record that a step of `tokens` tokens has succeeded."""
        self._most_tokens = max(self._most_tokens, tokens)

    def end(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._last, self._charged = None, 0.0

    def _look_after(self, limit: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(limit / LOOKS, self._look, limit)

    def _look(self, limit: float) -> None:
        before, self._last = self._last, self._read()
        interval = limit / LOOKS
        if before is None or self._last is None:
            self._charged += interval
        else:
            self._charged += charged(before, self._last, interval)
        if self._charged < 0.999 * limit:
            self._look_after(limit)
            return
        self._timer = None
        self._on_hung(limit)


log = logging.getLogger("tidemill.engine")

STALL_SECONDS = 5.0
MAX_PATIENCE = 12
"""Maximum increase of the interval between two recoveries, in stall times."""


class ProgressWatchdog:
    """Calls `recover(attempt)`, from 1 on, when the engine has been stalled for `seconds`, and later again."""

    def __init__(
        self,
        core: EngineCore,
        clock: Callable[[], float],
        recover: Callable[[int], None],
        seconds: float = STALL_SECONDS,
    ) -> None:
        self._core = core
        self._clock = clock
        self._recover = recover
        self._seconds = seconds
        self._patience = seconds
        self._since = clock()
        self._attempts = 0
        self._suspended = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def trouble(self) -> str | None:
        """Why the engine is not ready; None unless it is stalled."""
        if not self._attempts:
            return None
        return f"requests wait and no step has been completed for {self._clock() - self._since:.0f} s"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-watchdog")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def on_work(self) -> None:
        """Record that a request is about to be queued."""
        if not self._core.has_requests:
            self._reset()
        self._work.set()

    def on_step(self) -> None:
        """Record that a step has completed."""
        if self._attempts:
            log.warning("the engine moves again after %d attempts to recover", self._attempts)
        self._reset()

    def suspend(self, suspended: bool) -> None:
        """Suspend or resume the watchdog, for an engine that is held on purpose."""
        self._suspended = suspended
        self._reset()

    def _reset(self) -> None:
        self._since, self._attempts, self._patience = self._clock(), 0, self._seconds

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._core.has_requests:
                await asyncio.sleep(self._time_left())
                if self._time_left() <= 0.0:
                    self._on_stall()
            self._reset()

    def _time_left(self) -> float:
        """Return the seconds until the next recovery is due if no step completes.

        The time does not run while a step runs, while the watchdog is suspended, or before the core's retry time.
        """
        if self._suspended or self._core.state.in_flight or not self._core.has_requests:
            return self._seconds
        since = self._since if self._core.retry_at is None else max(self._since, self._core.retry_at)
        return since + self._patience - self._clock()

    def _on_stall(self) -> None:
        self._attempts += 1
        level = logging.CRITICAL if self._attempts == 1 else logging.ERROR
        log.log(level, "the engine stands still: %s; %s", self.trouble, describe(report_stats(self._core.state)))
        self._patience += self._seconds * min(2**self._attempts, MAX_PATIENCE)
        try:
            self._recover(self._attempts)
        except BaseException as raised:  # a failed recovery must not end the watchdog, which tries again later
            log.error("the recovery failed", exc_info=as_error(raised))


MAX_QUIET_RECOVERIES = 2
"""Attempts to restart a stalled engine before a request is ended with an error."""


def clear_stall(core: EngineCore, now: float, attempt: int) -> RequestOutput | None:
    """Restart a core that runs no step although requests wait: rebuild its queues and preempt requests.

    Attempt 1 preempts offline requests and quarantined requests, attempt 2 online ones too. From attempt 3 on, the
    oldest waiting online request ends with a retryable error, because it may block the others. Return its last output.
    """
    state = core.state
    assert not state.in_flight, "a step is in flight: the engine does not stand still"
    state.counters.stalls += attempt == 1
    rebuild_queues(state)
    classes = (RequestClass.OFFLINE,) if attempt == 1 else RequestClass
    running = [request for request_class in classes for request in state.running[request_class]]
    for request in [*running, *(r for r in state.quarantined if r.status is RequestStatus.RUNNING)]:
        state.preempt(request, "stall", now)
        state.cache.parked.forget(request)
    if attempt <= MAX_QUIET_RECOVERIES or not state.waiting_online:
        return None
    error = EngineUnavailableError("The engine could not start this request.", retry_after=1.0)
    return core.abort(state.waiting_online[0].request_id, now, FinishReason.ERROR, error)


def rebuild_queues(state: SchedulerState) -> None:
    """Rebuild queues and rows from all unfinished requests."""
    state.running = {request_class: [] for request_class in RequestClass}
    state.waiting_online, state.waiting_offline = WaitingQueue(), state.make_offline_queue()
    state.quarantined = WaitingQueue()
    for request in sorted(state.requests.values(), key=lambda request: request.arrival_order):
        if request.request_class is RequestClass.OFFLINE and request.status is not RequestStatus.WAITING:
            state.waiting_offline.adopt(request)
        if request.status is RequestStatus.RUNNING:
            if request.quarantined:
                state.quarantined.add(request)
            else:
                state.running[request.request_class].append(request)
        else:
            state.add_waiting(request)
    state.cache.recount(
        chain(*state.running.values(), (r for r in state.quarantined if r.status is RequestStatus.RUNNING))
    )
    held = {request.row for group in (*state.running.values(), state.quarantined) for request in group}
    state.free_rows = [row for row in range(state.config.max_num_seqs - 1, -1, -1) if row not in held]


def describe(stats: EngineStats) -> str:
    """Return the state of the queues and the pool in one line."""
    classes = ", ".join(f"{c.value} {stats.running[c]} running and {stats.waiting[c]} waiting" for c in RequestClass)
    return (
        f"{classes}; of {stats.units_total} units {stats.units_owned} are owned, {stats.units_cached} cached, "
        f"{stats.units_free} free; {stats.steps} steps, {stats.failed_steps} failed, preemptions {stats.preemptions}"
    )


QUIET_SECONDS = 60.0
MAX_CAUSES = 64


def check_result(output: SchedulerOutput, result: ModelRunnerOutput, vocab_size: int) -> None:
    """Raise EngineStepError if a result does not match its step, before any of it is applied.

    A result must have the number of tokens that the step samples, and only tokens of the vocabulary.
    """
    expected, tokens = sum(chunk.sample for chunk in output.chunks), result.token_ids
    if result.step_id != output.step_id:
        raise EngineStepError(f"Step {output.step_id} was answered with the result of step {result.step_id}.")
    if len(tokens) != expected or (result.logprobs is not None and len(result.logprobs) != expected):
        raise EngineStepError(f"A step with {expected} samples was answered with {len(tokens)} tokens.")
    if tokens and not (min(tokens) >= UNMASKED_TOKEN and max(tokens) < vocab_size):
        raise EngineStepError("A step was answered with a token outside the vocabulary.")
    if any(not 0 <= number < len(output.chunks) or output.chunks[number].sample for number in result.pooled):
        raise EngineStepError("A step was answered with an embedding that no chunk requests.")
    if any(not 0 <= token < vocab_size for run in result.forced.values() for token in run):
        raise EngineStepError("A step was answered with a forced token outside the vocabulary.")


@dataclass(slots=True)
class _Cause:
    last: float
    last_line: float
    untold: int = 0


class FaultLog:
    """A log that groups faults by cause: the type of the exception and the line that raised it.

    The first fault is logged with its traceback, others as a count at most once a second. A cause that has been quiet
    for `QUIET_SECONDS` is logged with a traceback again.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._causes: dict[tuple[str, ...], _Cause] = {}

    def report(self, what: str, error: BaseException) -> None:
        """Log the fault `what` with its exception, or count it."""
        kind, now = type(error).__name__, self._clock()
        places = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(error.__traceback__)]
        key = (what, kind, *places[-1:])
        cause = self._causes.get(key)
        if cause is None or now - cause.last > QUIET_SECONDS:
            if len(self._causes) >= MAX_CAUSES:
                del self._causes[min(self._causes, key=lambda each: self._causes[each].last)]
            self._causes[key] = _Cause(now, now)
            self._log.error("%s", what, exc_info=error)
            return
        cause.last = now
        cause.untold += 1
        if now - cause.last_line >= 1.0:
            self._log.error("%s %d times more in %.1f s (%s)", what, cause.untold, now - cause.last_line, kind)
            cause.untold, cause.last_line = 0, now
