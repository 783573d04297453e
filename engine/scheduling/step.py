"""Builds one step: which requests run, how many tokens of each, on which units (HyGen §4.1, Algorithm 1).

The order in which the ledger is spent: running online decodes (mandatory unless memory forces them out); online
prefills (see `engine.scheduling.prompts`), sized by the slack that the decodes beside them have; then the offline plan,
as far as it still fits. Preemption happens only when *memory* (units or rows) binds; a request that merely does not fit
into this step is left out of it and keeps its cache.
"""

import math
from collections.abc import Callable

from engine.api import RequestClass
from engine.request import Request, RequestStatus
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.output import CacheWork, SchedulerOutput
from engine.scheduling.planner import (
    OfflinePlan,
    offline_allowance,
    reserve_bank,
    reserved_allowance,
    reserved_lines,
)
from engine.scheduling.pressure import Start
from engine.scheduling.prompts import PromptChunks
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.turns import choose_turns
from engine.scheduling.values import IterationType


class StepBuilder(PromptChunks):
    """Decides what the step holds."""

    def __init__(self, scheduler: Scheduler, step_id: int, last_completed_step: int, now: float) -> None:
        super().__init__(scheduler, step_id, last_completed_step, now)
        self.num_online_decodes = 0
        self._nothing_in_flight = last_completed_step == step_id - 1

    def build(self, plan: OfflinePlan | None, lookup: Callable[[str], Request | None]) -> SchedulerOutput | None:
        """The step, or None when nothing can run now. Without a plan the step is online-only."""
        self.scheduler.cache.balance()
        if self.scheduler.config.chunked_prefill:
            self._mix(plan, lookup)
        else:
            self._take_turns(plan, lookup)
        return self.output()

    def _mix(self, plan: OfflinePlan | None, lookup: Callable[[str], Request | None]) -> None:
        """Decodes, and chunks of prompts beside them."""
        starts = self._choose_online()
        self._add_online_decodes()
        self.add_prompts(starts)
        if starts is None:
            self._restore_hidden()
        self._fill_reserved()
        if plan is not None:
            self._fill_offline(plan, lookup)

    def _take_turns(self, plan: OfflinePlan | None, lookup: Callable[[str], Request | None]) -> None:
        """Whole prompts or decodes, never both."""
        for turn in choose_turns(self.scheduler, self.now):
            if turn is IterationType.PREFILL:
                self.add_prompts(self._choose_online())
            else:
                self._add_online_decodes()
                if not self.scheduler.waiting_online:
                    self._restore_hidden()
            alone = not self.scheduler.running[RequestClass.ONLINE]
            if plan is not None and (turn is IterationType.DECODE or self.chunks or alone):
                self._fill_offline(plan, lookup, turn)
            if self.chunks:
                return

    def _add_online_decodes(self) -> None:
        """Every running online request whose next token is due; then the time that the tightest of them leaves."""
        block_size, objective = self.block_size, self.scheduler.objective
        timed = self.ledger.model is not None and not math.isinf(objective.tbt)
        slacks: list[float] = []
        context_sum = 0
        for request in self.scheduler.online_order(self.now):
            computed = request.num_computed_tokens
            if request.row < 0 or not request.decode_is_due:
                continue  # (a row below zero: preempted by an earlier decode of this loop)
            if computed >= len(request.cache_map.blocks) * block_size and not self.memory.grow_decode(request):
                continue
            if timed:
                slacks.append(objective.next_token_deadline(request) - self.now)
            context_sum += computed + 1
            self.add_chunk(request, 1)
        self.num_online_decodes = len(self.chunks)
        self.ledger.charge_decodes(self.num_online_decodes, context_sum)
        if timed and slacks:
            # A decode that would be late even in a decode-only step cannot be saved by starving the prompts.
            reachable = [min(slack, objective.tbt) for slack in slacks if slack >= self.ledger.seconds]
            self._time_limit = min(reachable, default=math.inf) * (1.0 - self.memory.reservation.share)

    def _choose_online(self) -> list[Start] | None:
        """Who starts, where memory is short and a knapsack chooses; None: the order of the queue decides."""
        scheduler, select = self.scheduler, self.scheduler.online_policy.select
        if select is None or not scheduler.waiting_online:
            return None
        pressure = scheduler.pressure(self.now)
        if pressure is None:
            return None
        starts = select(scheduler.waiting_online, pressure)
        if scheduler.online_policy.late_last:
            self.memory.evict_late(starts)
        return starts

    def _restore_hidden(self) -> None:
        """Room is back: project K and V once for requests of this step that run from hidden state, oldest first."""
        ledger, wanted = self.ledger, self.scheduler.config.max_num_batched_tokens
        if not self.scheduler.cache.num_compact:
            return
        if ledger.model is not None and (per_token := ledger.model.cache_work(restored_tokens=1)) > 0.0:
            wanted = int(min(wanted, max(0.0, self._time_limit - ledger.seconds) / per_token))
        for request in self.scheduler.running[RequestClass.ONLINE]:
            if request.cache_map.num_compact and request.last_step == self.step_id:
                restored = self.memory.restore(request, wanted)
                ledger.charge_cache_work(CacheWork(-restored, restored))
                wanted -= restored

    def _fill_offline(
        self, plan: OfflinePlan, lookup: Callable[[str], Request | None], turn: IterationType | None = None
    ) -> None:
        """Re-validate the plan against what the online work of this step has left, and take what still fits.

        `turn`: the only type of work that the step may hold.
        """
        scheduler, ledger = self.scheduler, self.ledger
        allowance = offline_allowance(scheduler, ledger, self.num_online_decodes, self.has_online_prefill, self.now)
        before, num_online = ledger.seconds, len(self.requests)
        for planned in plan.chunks:
            if not ledger.open:
                break
            request = lookup(planned.request_id)
            if request is None or (request.status is RequestStatus.RUNNING) != planned.running:
                continue  # it has ended, was preempted for this step's online work, or is in the step already
            if turn is not None and planned.running != (turn is IterationType.DECODE):
                continue
            if planned.running:
                fitted = self._add_offline_running(request, allowance)
            else:
                fitted = self._admit_offline(request, allowance)
            if not fitted:
                break
        self._mark_beside_offline(num_online)
        if scheduler.has_online and not math.isinf(allowance.limit):
            scheduler.counters.leftover_seconds += max(0.0, allowance.limit - before)
            scheduler.counters.leftover_used_seconds += ledger.seconds - before

    def _fill_reserved(self) -> None:
        """Lines at risk, as far as their share goes, whatever the budget says beside online work."""
        scheduler, ledger, reservation = self.scheduler, self.ledger, self.memory.reservation
        if not reservation.share or not self.chunks:
            return  # nothing is reserved, or no online request is in the step
        num_online, online, last = len(self.requests), ledger.seconds, ledger.tokens_left - reservation.tokens
        allowance = reserved_allowance(scheduler, ledger, reservation)
        for request in list(reserved_lines(scheduler, reservation, self.now)):
            if not ledger.open or ledger.tokens_left <= last:
                break
            add = self._add_offline_running if request.status is RequestStatus.RUNNING else self._admit_offline
            if not add(request, allowance.limited(ledger.tokens_left - last)):
                break
        bank = reserve_bank(scheduler, ledger, reservation.seconds_beside(online))
        saved = scheduler.reserve_credit + reservation.seconds_beside(online) - (ledger.seconds - online)
        scheduler.reserve_credit = min(max(0.0, saved), bank)
        self._mark_beside_offline(num_online)

    def _mark_beside_offline(self, num_online: int) -> None:
        """If offline requests came to the first `num_online` of the step: who bears it."""
        if len(self.requests) > num_online:
            for request in (*self.requests[:num_online], *self.scheduler.waiting_online):
                request.beside_offline = True

    def _add_offline_running(self, request: Request, allowance: OfflineAllowance) -> bool:
        """Whether the tail of the plan should still be tried."""
        if request.last_step == self.step_id or not (request.decode_is_due or request.prefill_is_due):
            return True
        start = request.num_computed_tokens
        wanted = request.num_expected_tokens - start
        length = self._offline_length(allowance, start, wanted)
        if length == 0:
            return False
        if wanted == 1:
            if start >= len(request.cache_map.blocks) * self.block_size and not self.memory.grow_decode(request):
                return True
        elif not (length := self.memory.grow_prefill(request, length)):
            return True
        self.charge_and_add(request, length)
        return True

    def _admit_offline(self, request: Request, allowance: OfflineAllowance) -> bool:
        if request.last_step > self.last_completed_step:
            return True
        return self.admit(request, lambda start, wanted: self._offline_length(allowance, start, wanted))

    def _offline_length(self, allowance: OfflineAllowance, start: int, wanted: int) -> int:
        config, whole = self.scheduler.config, wanted
        wanted = min(wanted, self.ledger.tokens_left)
        length = allowance.largest(self.ledger.features, self.ledger.seconds, start, wanted)
        if not self.chunks and (self._nothing_in_flight or not self.scheduler.has_online):
            # Nothing else moves: the first request always does, whatever the budget says (E4). Beside online work that
            # cannot start, it gives back its room in the end.
            length = max(length, min(wanted, config.min_prefill_chunk if config.chunked_prefill else whole))
        return length if config.chunked_prefill or length == whole else 0
