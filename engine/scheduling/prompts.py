"""The prompts of a step: running ones continue and waiting ones start, in one order (see `engine.scheduling.laxity`).

A policy that goes by urgency puts those first that can still have their first token in time. The first of the others
keeps a floor chunk: it is reserved where there is room for both; else it goes first now and then, so that nobody waits
for ever. Other policies continue what runs by age, and start in their own order.
"""

import math
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.chunks import StepChunks
from engine.scheduling.laxity import (
    PromptOrder,
    by_age,
    missing_tokens,
    order_prompts,
    prefill_pace,
    uses_laxity,
)
from engine.scheduling.policies import QueueContext
from engine.scheduling.pressure import Start
from engine.scheduling.scheduler import Scheduler

BEHIND_EVERY = 8
"""Where a step has no room for urgent prompts and for those that they leave behind, the latter go first so often: about
the share that the floor chunk has of a full step."""


class _Reserve(NamedTuple):
    """What urgent prompts leave alone."""

    tokens: int = 0
    seconds: float = 0.0


class PromptChunks(StepChunks):
    """Adds prompts to the step. `last_completed_step`: requests with a newer step in flight are not started.

    `_time_limit`: when the step must end for the decodes in it, seconds from its start.
    """

    def __init__(self, scheduler: Scheduler, step_id: int, last_completed_step: int, now: float) -> None:
        super().__init__(scheduler, step_id, now)
        self.last_completed_step = last_completed_step
        self.has_online_prefill = False
        self._floor_given = False
        self._time_limit = math.inf
        self._reserve = _Reserve()

    def add_prompts(self, starts: list[Start] | None) -> None:
        """`starts`: who may start, where a knapsack chooses."""
        prompts = self.scheduler.running_prompts()
        if not prompts and not self.scheduler.waiting_online:
            return
        self.memory.prompts = list(prompts)
        context = self.scheduler.queue_context(self.now)
        chosen = None if starts is None else {start.request: start for start in starts}
        order = self._order(prompts, starts, context)
        head = order.behind[0] if order.urgent and order.behind else None
        if head is not None and self._goes_first(head):
            self._add_prompt(head, context, chosen)
        for group in order:
            for request in group:
                if not self.ledger.open or not self._add_prompt(request, context, chosen):
                    break  # nobody else of these may start
            self._reserve = _Reserve()
        for request in prompts:
            self._continue(request)

    def _add_prompt(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Whether the next one in the order may be looked at."""
        if request.status is RequestStatus.RUNNING:
            self._continue(request)
            return True
        return self._start_waiting(request, context, chosen)

    def _order(self, prompts: list[Request], starts: list[Start] | None, context: QueueContext) -> PromptOrder:
        scheduler, policy = self.scheduler, self.scheduler.online_policy
        waiting = scheduler.waiting_online if starts is None else [start.request for start in starts]
        if starts is None and not self._num_rows():
            waiting = []
        if not uses_laxity(scheduler) or len(prompts) + len(waiting) < 2:
            return PromptOrder((), [*prompts, *(policy.order(waiting, context) if starts is None else waiting)])
        both = sorted([*prompts, *waiting], key=by_age)
        order = order_prompts(both, scheduler.objective, prefill_pace(scheduler), self.now)
        if starts is None:
            return order
        rank = {start.request: index for index, start in enumerate(starts)}
        return PromptOrder(order.urgent, sorted(order.behind, key=lambda request: rank.get(request, -1)))

    def _num_rows(self) -> int:
        """Rows that an online request could get: offline ones give way."""
        reservation = self.memory.reservation
        offline = len(self.scheduler.running[RequestClass.OFFLINE]) - len(reservation.protected)
        return max(0, len(self.scheduler.free_rows) - reservation.rows) + offline

    def _goes_first(self, head: Request) -> bool:
        """Reserve the floor chunk of `head`; or, where there is no room for both, whether its turn has come."""
        config, ledger, model = self.scheduler.config, self.ledger, self.ledger.model
        missing = missing_tokens(head)
        floor = min(missing, config.min_prefill_chunk)
        seconds = other = 0.0
        if model is not None and math.isfinite(self._time_limit):
            seconds = model.marginal(ledger.features, len(head.token_ids) - missing, floor)
            other = model.marginal(ledger.features, 0, config.min_prefill_chunk)
        rows = self._num_rows() > 1 or head.status is RequestStatus.RUNNING
        tokens = ledger.tokens_left >= floor + config.min_prefill_chunk and ledger.sequences_left > 1
        if config.chunked_prefill and rows and tokens and ledger.seconds + seconds + other <= self._time_limit:
            self._reserve = _Reserve(floor, seconds)
            return False
        self.scheduler.num_contested += 1
        return self.scheduler.num_contested % BEHIND_EVERY == 0

    def _continue(self, request: Request) -> None:
        if request.last_step == self.step_id or request.row < 0 or not request.prefill_is_due or not self.ledger.open:
            return
        start = request.num_computed_tokens
        length = self._online_length(start, len(request.token_ids) - start)
        if length and (length := self.memory.grow_prefill(request, length)):
            self.charge_and_add(request, length)
            self.has_online_prefill = self._floor_given = True

    def _start_waiting(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Whether the next one that waits may be looked at."""
        # Its last chunk may still be in flight: its token is unknown and its old units are not yet released.
        in_flight = request.last_step > self.last_completed_step
        if chosen is not None:
            start = chosen[request]
            if not in_flight and (start.savable or self.memory.spares(request)):
                self._admit_online(request, start.kind)
            return True  # a misfit does not end it
        policy = self.scheduler.online_policy
        if in_flight:
            return False
        if self.scheduler.is_late(request, self.now) and not self.memory.spares(request):
            return True  # late ones leave room for those that can be saved
        if policy.admits(request, context) and self._admit_online(request, CacheKind.KV):
            return True
        return policy.scans_past(request, context) and bool(self.scheduler.free_rows)

    def _admit_online(self, request: Request, kind: CacheKind) -> bool:
        if not request.cache_map.blocks:
            request.cache_map.kind = kind
        if not self.admit(request, self._online_length):
            return False
        self.has_online_prefill = self._floor_given = True
        return True

    def _online_length(self, start: int, wanted: int) -> int:
        """The chunk that the decodes beside it can bear; one prompt of the step always gets a floor."""
        config, ledger = self.scheduler.config, self.ledger
        available = max(0, ledger.tokens_left - self._reserve.tokens)
        tokens = max(0, available - self.memory.reservation.tokens)
        if not self._floor_given and available:
            tokens = max(tokens, min(config.min_prefill_chunk, max(1, available - 1)))
        if not config.chunked_prefill:
            return wanted if wanted <= tokens else 0
        length = wanted = min(wanted, tokens)
        if ledger.model is not None and not math.isinf(self._time_limit):
            room = self._time_limit - ledger.seconds - self._reserve.seconds
            length = ledger.model.max_prefill(ledger.features, room, wanted, start) if room > 0.0 else 0
        if not self._floor_given:
            length = max(length, min(wanted, config.min_prefill_chunk))
        return length
