"""Build the next step: an ordinary one, a trial of certain requests, or the step of last resort; say when it may start.

Trials and the last resort know no policies, budgets, lanes or back-off. A trial holds suspects of a failed step, or the
canary; they are aside, out of ordinary steps. Online suspects, and all suspects if no other request can run, take all
the memory that they need.

The last resort applies if no step is in flight and no other step has content. Requests in the way of the oldest one,
online before offline, are preempted one by one, and at last all parked blocks are dropped. An accepted request never
needs more than the pool (`max_model_len`, `most_blocks`), so the step is not empty while an ordinary request exists.

Offline steps pause on an idle server (`OfflineRest`), and steps may be scheduled ahead (`may_run_ahead`).
"""

import math
from collections.abc import Sequence

from engine.api import NEVER, RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.draft import StepDraft
from engine.scheduling.in_flight import InFlight
from engine.scheduling.objective import StepObjective
from engine.scheduling.planner import OfflinePlan
from engine.scheduling.recovery import FaultRecovery
from engine.scheduling.state import SchedulerState
from engine.scheduling.step import StepBuilder


def build_next(state: SchedulerState, recovery: FaultRecovery, plan: OfflinePlan | None, now: float) -> InFlight | None:
    """Build the step of the first turn that has work.

    A trial runs without other steps in flight, so that its failure cannot affect them.
    """
    if any(request.aside for flight in state.in_flight for request in flight.requests):
        return None
    turns = recovery.turns(now)
    for turn in turns:
        if turn.requests is None:
            step = StepBuilder(StepDraft(state, now)).build(plan)
        elif state.in_flight:
            return None
        else:
            trial = TrialBuilder(StepDraft(state, now))
            step = trial.build(turn.requests, turn.force)
            if step is None and trial.awaits_units:
                recovery.waits(turn)
                return None
        if step is not None:
            recovery.took(turn)
            return step
    if not turns or state.in_flight:
        return None
    return LastResortBuilder(StepDraft(state, now)).build(with_offline=plan is not None)


class TrialBuilder:
    """Build a trial step.

    `awaits_units`: nothing can run before the step in flight ends, and its freed units are reserved for the trial.
    """

    def __init__(self, draft: StepDraft) -> None:
        self.awaits_units = False
        self._draft = draft
        self._state = draft.state

    def build(self, requests: Sequence[Request], force: bool) -> InFlight | None:
        """Return a step with as much of `requests` as fits, or None if no request can run now.

        `force`: preempt any request in the way of the first one, whatever its class.
        """
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        while running and not self._continue(running):
            self.awaits_units = self._state.pool.num_deferred_units > 0
            victim = next(iter(self._victims(running[0], force)), None)
            if victim is None or self.awaits_units:
                break
            running = [request for request in running if request is not victim]
            self._state.preempt(victim, "step_failure", self._draft.now)
        for request in requests:
            if request.status is not RequestStatus.RUNNING and self._draft.may_start(request):
                self._admit(request, force)
        return self._draft.finish()

    def _continue(self, requests: Sequence[Request]) -> bool:
        """Return whether any of the running `requests` advances or has its next token in flight."""
        moves, ledger = False, self._draft.ledger
        for request in requests:
            if not ledger.open:
                break
            wanted = request.num_pending_tokens
            moves = not wanted or self._draft.advance(request, min(wanted, ledger.tokens_left)) or moves
        return moves

    def _admit(self, request: Request, force: bool) -> None:
        if not self._draft.ledger.open or self._start(request) or self._draft.chunks:
            return
        for victim in self._victims(request, force):
            if self._is_coming(request):
                self.awaits_units = True
                return
            self._state.preempt(victim, "step_failure", self._draft.now)
            if self._start(request):
                return
        self.awaits_units = self.awaits_units or self._is_coming(request)

    def _start(self, request: Request) -> bool:
        return self._draft.admit(request, lambda _, wanted: min(wanted, self._draft.ledger.tokens_left), CacheKind.KV)

    def _victims(self, request: Request, force: bool) -> list[Request]:
        offline = request.request_class is RequestClass.OFFLINE
        return [] if offline and not force else _others(self._state, request)

    def _is_coming(self, request: Request) -> bool:
        """Return whether deferred units would suffice for the request."""
        pool, claim = self._state.pool, self._state.cache.claim(request)
        missing = claim.units + pool.num_idle_units(claim.hits) - pool.num_available_units
        return bool(self._state.free_rows) and 0 < missing <= pool.num_deferred_units


class LastResortBuilder:
    """Build a step with one request's next token, or with a floor chunk of its prompt."""

    def __init__(self, draft: StepDraft) -> None:
        self._draft = draft
        self._state = draft.state

    def build(self, with_offline: bool) -> InFlight | None:
        """Return the step, or None if no request can run. `with_offline`: offline requests may be chosen."""
        request = self._next(with_offline)
        if request is None:
            return None
        victims = iter(_others(self._state, request))
        while not self._run(request):
            victim = next(victims, None)
            if victim is None:
                self._state.cache.parked.forget_all()
                self._run(request)
                break
            self._state.preempt(victim, "stall", self._draft.now)
        return self._draft.finish()

    def _next(self, with_offline: bool) -> Request | None:
        state = self._state
        for online in (state.running[RequestClass.ONLINE], state.waiting_online):
            if online:
                return online[0]
        if not with_offline:
            return None
        running = min(state.running[RequestClass.OFFLINE], key=lambda r: r.spec.lane, default=None)
        return running or next(state.waiting_offline.candidates(), None)

    def _run(self, request: Request) -> bool:
        """Add the request if the free units suffice. Return whether it is in the step."""
        if request.status is not RequestStatus.RUNNING:
            return self._draft.admit(request, self._length)
        start = request.num_computed_tokens
        length = self._draft.allocation.grow_alone(request, self._length(start, request.num_pending_tokens))
        if length:
            self._draft.charge_and_add(request, length)
        return length > 0

    def _length(self, _start: int, wanted: int) -> int:
        return min(wanted, self._draft.ledger.tokens_left, self._state.config.min_prefill_chunk)


def _others(state: SchedulerState, request: Request) -> list[Request]:
    """Return the other running requests: offline before online, newest first, requests set aside at the end."""
    aside = [other for other in state.aside if other.status is RequestStatus.RUNNING]
    groups = (state.running[RequestClass.OFFLINE], state.running[RequestClass.ONLINE], aside)
    return [other for group in groups for other in reversed(group) if other is not request]


class OfflineRest:
    """Pauses between offline steps that run without online work.

    No offline step starts before `until` (None: no pause).
    """

    def __init__(self) -> None:
        self.until: float | None = None
        self._online_at = -math.inf

    def online_came(self, now: float) -> None:
        """Record the arrival of an online request."""
        self._online_at = now

    def online_runs(self, now: float) -> None:
        """Record that online work is present."""
        if not math.isinf(self._online_at):
            self._online_at = now

    def rests(self, objective: StepObjective, now: float, *, in_flight: bool) -> bool:
        """Return whether offline work pauses now.

        It pauses only within `objective.awaited` seconds after online work. The duration of a step in flight determines
        the next pause, so offline work pauses until that step ends.
        """
        if math.isinf(objective.wait) or now - self._online_at >= objective.awaited:
            self.until = None
        elif in_flight:
            return True
        elif self.until is not None and now >= self.until:
            self.until = None
        return self.until is not None

    def stepped(self, objective: StepObjective, seconds: float | None, now: float) -> None:
        """Set the pause after a step of `seconds` with only offline work; None for any other or failed step."""
        rest = 0.0 if seconds is None else objective.rest_after(seconds)
        self.until = now + rest if rest > 0.0 else None


MOST_ROWS = 4
"""Maximum number of running requests with which scheduling ahead pays when host and device share CPU cores."""


def may_run_ahead(state: SchedulerState) -> bool:
    """Return whether the next step may be scheduled before the steps in flight are updated.

    A GPU must not wait for the host. On a CPU both use the same cores, so scheduling ahead pays only with few rows. An
    arrival then waits for one step more, so only short steps of decodes qualify, and only if no other request exists.
    Grammars and thinking budgets need the last token, so their requests cannot be scheduled ahead. A step with drafts
    has no step behind it, because the number of its tokens is unknown; and drafts need the last token.
    """
    if not state.in_flight:
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
