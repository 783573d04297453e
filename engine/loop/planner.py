"""Work ahead of the steps: the planner computes the offline fill of step n+1 while step n runs (HyGen §4.3).

If a step is shorter than the planning (a small model on a GPU), the requests of the last plan continue meanwhile. The
plan itself comes from `engine.scheduling.offline`. `may_run_ahead` decides whether step n+1 may be scheduled, too,
before step n ends.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Generator

from engine.api import NEVER, RequestClass
from engine.scheduling.offline import OfflinePlan, PlannedChunk
from engine.scheduling.state import SchedulerState

log = logging.getLogger("tidemill.engine")

SLICE_SECONDS = 0.001
RETRY_SECONDS = 1.0

PlanOffline = Callable[[float], Generator[None, None, OfflinePlan]]


class Planner:
    """Computes the next step's offline fill in slices while the current step runs.

    The planner changes only its own plan. If it fails, the error is logged and it retries after `RETRY_SECONDS`.
    `counts`: plans with requests that were `made`, or `continued` because no newer one was ready, and steps for which
    no plan was ready (`late`).
    """

    def __init__(self, plan_offline: PlanOffline, clock: Callable[[], float], ready: Callable[[], None]) -> None:
        self._plan_offline = plan_offline
        self._clock = clock
        self._ready = ready
        self._wanted = asyncio.Event()
        self._plan: OfflinePlan | None = None
        self._last: OfflinePlan | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_planning = False
        self.counts = {"made": 0, "continued": 0, "late": 0}

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="tidemill-planner")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def restart(self) -> None:
        """Cancel the plan in progress, which may never end, and start another one."""
        if self._task is not None:
            self._task.cancel()
            self._plan = self._last = None
            self._is_planning = False
            self.start()
            self.want()

    def want(self) -> None:
        """Request a new plan, without waiting for it."""
        self._wanted.set()

    def take(self, *, go_on: bool = False) -> OfflinePlan | None:
        """Return the newest plan once.

        If none is ready, return a continuation of the last plan's requests with `go_on`, else None.
        """
        plan, self._plan = self._plan, None
        if plan is not None:
            self._last = plan
        elif go_on and self._last is not None:
            plan = self._last = continued(self._last)
            self.counts["continued"] += bool(plan.chunks)
        elif self._is_planning:
            self.counts["late"] += 1
        return plan

    async def _run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self._is_planning = True
            try:
                self._plan = await self._make()
                self.counts["made"] += bool(self._plan.chunks)
            except Exception:  # online requests run without a plan
                log.exception("the offline planner failed")
                await asyncio.sleep(RETRY_SECONDS)
                self._wanted.set()
            else:
                self._is_planning = False
                self._ready()

    async def _make(self) -> OfflinePlan:
        slices = self._plan_offline(self._clock())
        slice_end = self._clock() + SLICE_SECONDS
        while True:
            try:
                next(slices)
            except StopIteration as end:
                plan: OfflinePlan = end.value
                return plan
            if self._clock() >= slice_end:
                await asyncio.sleep(0)
                slice_end = self._clock() + SLICE_SECONDS


def continued(plan: OfflinePlan) -> OfflinePlan:
    """Return a plan for the step after that of `plan`: the same requests, each as a running decode.

    The step that uses the plan checks how many tokens each request has left.
    """
    if all(chunk.running and chunk.length == 1 for chunk in plan.chunks):
        return plan
    return OfflinePlan(tuple(PlannedChunk(chunk.request_id, 1, True) for chunk in plan.chunks))


MOST_ROWS = 4
"""Maximum number of running requests with which scheduling ahead pays when host and device share CPU cores."""


def may_run_ahead(state: SchedulerState) -> bool:
    """Return whether the next step may be scheduled before the steps in flight are updated.

    A GPU must not wait for the host. On a CPU both use the same cores, so scheduling ahead pays only with few rows. An
    arrival then waits for one step more, so only short steps of decodes qualify, and only if no other request exists.
    Grammars and thinking budgets need the last token, so their requests cannot be scheduled ahead. A step with drafts
    has no step behind it, because the number of its tokens is unknown; and drafts need the last token. Steps of a
    pipeline share no decode, so they always run ahead.
    """
    if not state.in_flight or state.staged:
        return True
    if state.speculation is not None and (any(step.guesses for step in state.in_flight) or _awaits_drafts(state)):
        return False
    longest, running = state.config.ahead_seconds, state.running[RequestClass.ONLINE]
    if longest == math.inf:
        return True
    return (
        len(running) <= MOST_ROWS
        and len(running) == len(state.requests)
        and all(request.num_pending_tokens == 1 and request.spec.sampling.masked_from == NEVER for request in running)
        and all((step.output.predicted_latency or math.inf) <= longest for step in state.in_flight)
    )


def _awaits_drafts(state: SchedulerState) -> bool:
    """Return whether a step that waits for the tokens in flight is likely to have drafts."""
    assert state.speculation is not None
    return state.speculation.is_promising([request for group in state.running.values() for request in group])
