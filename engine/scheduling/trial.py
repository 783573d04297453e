"""A step for some requests alone, whatever policies and budgets say: suspects of a failed step, or the canary.

Its requests are kept aside (`Scheduler.aside`): no ordinary step sees them. They may take memory from others as such
requests always may; online ones, and others where nothing else can run, take whatever they need.
"""

from collections.abc import Sequence

from engine.api import RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.chunks import StepChunks
from engine.scheduling.output import SchedulerOutput
from engine.scheduling.scheduler import Scheduler

CAUSE = "step_failure"


class TrialBuilder(StepChunks):
    """`last_completed_step`: requests with a newer step in flight are not admitted. `awaits_units`: there is nothing to
    run before the step in flight has ended, and nobody else may take the units that it gives back."""

    def __init__(self, scheduler: Scheduler, step_id: int, last_completed_step: int, now: float) -> None:
        super().__init__(scheduler, step_id, now)
        self._last_completed_step = last_completed_step
        self.awaits_units = False
        self.ignore_reservation()

    def build(self, requests: Sequence[Request], force: bool) -> SchedulerOutput | None:
        """As much of these requests as fits in one step, or None when nothing of them can run now.

        `force`: whoever is in the way of the first of them loses its place, whatever its class.
        """
        running = [request for request in requests if request.status is RequestStatus.RUNNING]
        while running and not self._continue(running):
            self.awaits_units = self.scheduler.pool.num_deferred_units > 0
            victim = next(iter(self._victims(running[0], force)), None)
            if victim is None or self.awaits_units:
                break
            running = [request for request in running if request is not victim]
            self._preempt(victim)
        for request in requests:
            if request.status is not RequestStatus.RUNNING and request.last_step <= self._last_completed_step:
                self._admit(request, force)
        return self.output()

    def _continue(self, requests: Sequence[Request]) -> bool:
        """Whether any of these running requests moves on, or has its next token in flight."""
        moves = False
        for request in requests:
            if not self.ledger.open:
                break
            decode = request.decode_is_due
            if not decode and not request.prefill_is_due:
                moves = True
                continue
            start = request.num_computed_tokens
            length = min(request.num_expected_tokens - start, self.ledger.tokens_left)
            if decode:
                has_room = start < len(request.cache_map.blocks) * self.block_size or self.memory.grow_decode(request)
                length = length if has_room else 0
            else:
                length = self.memory.grow_prefill(request, length)
            if length:
                self.charge_and_add(request, length)
                moves = True
        return moves

    def _admit(self, request: Request, force: bool) -> None:
        if not self.ledger.open:
            return
        if not request.cache_map.blocks:
            request.cache_map.kind = CacheKind.KV
        if self.admit(request, self._length) or self.chunks:
            return
        for victim in self._victims(request, force):
            if self._is_coming(request):
                self.awaits_units = True
                return
            self._preempt(victim)
            if self.admit(request, self._length):
                return
        self.awaits_units = self.awaits_units or self._is_coming(request)

    def _length(self, _start: int, wanted: int) -> int:
        return min(wanted, self.ledger.tokens_left)

    def _victims(self, request: Request, force: bool) -> list[Request]:
        """Everybody else who runs: offline before online, the last to arrive first, and those aside at the end."""
        running = self.scheduler.running
        aside = [r for r in self.scheduler.aside if r.status is RequestStatus.RUNNING and r is not request]
        if not force and request.request_class is RequestClass.OFFLINE:
            return []
        return [*reversed(running[RequestClass.OFFLINE]), *reversed(running[RequestClass.ONLINE]), *reversed(aside)]

    def _is_coming(self, request: Request) -> bool:
        """Whether units that are still in flight would do."""
        pool, claim = self.scheduler.pool, self.scheduler.cache.claim(request)
        missing = claim.units + pool.num_idle_units(claim.hits) - pool.num_available_units
        return bool(self.scheduler.free_rows) and 0 < missing <= pool.num_deferred_units

    def _preempt(self, victim: Request) -> None:
        self.scheduler.preempt(victim, CAUSE, self.now, self.step_id)
