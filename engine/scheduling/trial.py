"""A step for some requests alone, whatever policies and budgets say: suspects of a failed step, or the canary.

Its requests are kept aside (`SchedulerState.aside`): no ordinary step sees them. They may take memory from others as
such requests always may; online ones, and others where nothing else can run, take whatever they need.
"""

from collections.abc import Sequence

from engine.api import RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.draft import Step, StepDraft

CAUSE = "step_failure"


class TrialBuilder:
    """`awaits_units`: there is nothing to run before the step in flight has ended, and no other request may take the
    units that it gives back."""

    def __init__(self, draft: StepDraft) -> None:
        self.awaits_units = False
        self._draft = draft
        self._state = draft.state

    def build(self, requests: Sequence[Request], force: bool) -> Step | None:
        """As much of these requests as fits in one step, or None when nothing of them can run now.

        `force`: what is in the way of the first of them loses its place, whatever its class.
        """
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        while running and not self._continue(running):
            self.awaits_units = self._state.pool.num_deferred_units > 0
            victim = next(iter(self._victims(running[0], force)), None)
            if victim is None or self.awaits_units:
                break
            running = [request for request in running if request is not victim]
            self._preempt(victim)
        for request in requests:
            if request.status is not RequestStatus.RUNNING and self._draft.may_start(request):
                self._admit(request, force)
        return self._draft.finish()

    def _continue(self, requests: Sequence[Request]) -> bool:
        """Whether any of these running requests moves on, or has its next token in flight."""
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
            self._preempt(victim)
            if self._start(request):
                return
        self.awaits_units = self.awaits_units or self._is_coming(request)

    def _start(self, request: Request) -> bool:
        return self._draft.admit(request, lambda _, wanted: min(wanted, self._draft.ledger.tokens_left), CacheKind.KV)

    def _victims(self, request: Request, force: bool) -> list[Request]:
        """The others that run: offline before online, the last to arrive first, and those aside at the end."""
        running = self._state.running
        aside = [r for r in self._state.aside if r.status is RequestStatus.RUNNING and r is not request]
        if not force and request.request_class is RequestClass.OFFLINE:
            return []
        return [*reversed(running[RequestClass.OFFLINE]), *reversed(running[RequestClass.ONLINE]), *reversed(aside)]

    def _is_coming(self, request: Request) -> bool:
        """Whether units that are still in flight would do."""
        pool, claim = self._state.pool, self._state.cache.claim(request)
        missing = claim.units + pool.num_idle_units(claim.hits) - pool.num_available_units
        return bool(self._state.free_rows) and 0 < missing <= pool.num_deferred_units

    def _preempt(self, victim: Request) -> None:
        self._state.preempt(victim, CAUSE, self._draft.now)
