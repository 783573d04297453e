"""Adds prompts to a step: running ones continue and waiting ones start, in one order.

A policy that orders by urgency (`engine.scheduling.laxity`) puts the prompts first that can still get their first token
in time. The first of the other prompts gets a floor chunk. The chunk is reserved if there is room for both groups;
otherwise that prompt goes first in every BEHIND_EVERY-th such step, so that no prompt starves. Other policies continue
running prompts by arrival and start waiting ones in their own order.
"""

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus
from engine.scheduling.draft import StepDraft
from engine.scheduling.laxity import (
    PrefillPace,
    PromptOrder,
    easy_share,
    floor_chunk,
    order_prompts,
    prefill_pace,
    prompt_slack,
    uses_laxity,
)
from engine.scheduling.output import ReplacedEntry
from engine.scheduling.state import SchedulerState
from engine.scheduling.tenants import order_tenants
from engine.scheduling.victims import spares
from engine.scheduling.waiting import QueueContext, Start, WaitingQueue, by_age
from predictor.features import CacheWork

BEHIND_EVERY = 8
"""If a step has no room for both groups, the less urgent prompt goes first in one of this many such steps.

That is about the share of a floor chunk in a full step.
"""


class _Reserve(NamedTuple):
    """Tokens and seconds that urgent prompts must leave for the floor chunk."""

    tokens: int = 0
    seconds: float = 0.0


class PromptFill:
    """Add online prompts to the step.

    Attributes:
        any_running: Whether any online prompt was in progress before this step.
        has_added: Whether any prompt was added.
        time_limit: Seconds from the start of the step at which it must end for its decodes.
    """

    def __init__(self, draft: StepDraft) -> None:
        self.any_running = self.has_added = False
        self.time_limit = math.inf
        self._draft = draft
        self._state = draft.state
        self._ledger = draft.ledger
        self._allocation = draft.allocation
        self._reserve = _Reserve()

    def add(self, starts: list[Start] | None, first: Sequence[Request] = ()) -> None:
        """Add the prompts.

        Args:
            starts: The requests that may start if a knapsack chose them; None: queue order.
            first: Requests that start before any other, in order, even if they were not chosen.
        """
        prompts = self._state.running_prompts() if self.any_running else []
        if not prompts and not self._state.waiting_online:
            return
        self._allocation.prompts = list(prompts)
        if math.isfinite(self.time_limit) and self._has_time():
            self.time_limit *= easy_share(self._state)
        context = _queue_context(self._state, self._draft.now)
        for request in first:
            may_start = self._ledger.open and self._draft.may_start(request)
            if not (may_start and self._admit(request, CacheKind.KV)):
                if self._state.pool.num_deferred_units:
                    starts = []  # its memory is still deferred: no other request may take it
                break
        if starts:
            starts = [start for start in starts if start.request not in first]
        chosen = None if starts is None else {start.request: start for start in starts}
        order = self._order(prompts, starts, context)
        head = order.behind[0] if order.urgent and order.behind else None
        if head is not None and self._goes_first(head):
            self._add_prompt(head, context, chosen)
        for group in order:
            for request in group:
                if request is head and group is order.urgent:
                    continue  # its floor chunk follows the other urgent prompts
                if not self._ledger.open or not self._add_prompt(request, context, chosen):
                    break  # no further request of this group may start
            self._reserve = _Reserve()
        for request in prompts:
            self._continue(request)

    def restore_compact(self) -> None:
        """Convert HIDDEN blocks of the step's requests back to K and V, oldest first, while memory and time allow."""
        state, ledger, wanted = self._state, self._ledger, self._state.config.max_num_batched_tokens
        if not state.cache.num_compact:
            return
        if ledger.model is not None and (per_token := ledger.model.cache_work(restored_tokens=1)) > 0.0:
            first = ledger.model.cache_work(restored_tokens=1, beside=ledger.features) - per_token
            wanted = int(min(wanted, max(0.0, self.time_limit - ledger.seconds - first) / per_token))
        for request in state.running[RequestClass.ONLINE]:
            if request.cache_map.num_compact and request.last_step == self._draft.step_id:
                found = state.cache.restore(request, wanted, self._draft.step_id, reserve=state.growth_reserve)
                self._allocation.replaced.extend(ReplacedEntry(request.row, index, entry) for index, entry in found)
                restored = len(found) * state.config.block_size
                ledger.charge_cache_work(CacheWork(-restored, restored))
                wanted -= restored

    def _has_time(self) -> bool:
        """Return whether every prompt is on time even at the pace that leaves a share of the TBT limit unused."""
        pace = partial(prefill_pace, self._state, easy_share(self._state))
        return prompt_slack(self._state, pace, self._draft.now) > 0.0

    def _add_prompt(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Continue or start a prompt. Return whether the next prompt in the order may be tried."""
        if request.status is RequestStatus.RUNNING:
            self._continue(request)
            return True
        return self._start_waiting(request, context, chosen)

    def _order(self, prompts: list[Request], starts: list[Start] | None, context: QueueContext) -> PromptOrder:
        state, policy = self._state, self._state.online_policy
        waiting: Sequence[Request] = state.waiting_online if starts is None else [start.request for start in starts]
        if starts is None and not self._num_rows():
            waiting = []
        shared = state.online_share.is_contested
        if not uses_laxity(state) or len(prompts) + len(waiting) < 2:
            ordered = policy.order(waiting, context) if starts is None else waiting
            if not shared:
                return PromptOrder((), [*prompts, *ordered])
            merged = order_tenants(ordered, state.online_share, None, lambda group, _: PromptOrder((), group)).urgent
            return PromptOrder(chain(prompts, merged), ())
        rank = {} if starts is None else {start.request: index for index, start in enumerate(starts)}

        def by_urgency(requests: list[Request], pace: PrefillPace | None) -> PromptOrder:
            order = order_prompts(requests, state.objective, pace, self._draft.now, promised=bool(state.promised))
            if starts is None:
                return order
            return PromptOrder(order.urgent, sorted(order.behind, key=lambda request: rank.get(request, -1)))

        both = (
            waiting.with_others(prompts)
            if isinstance(waiting, WaitingQueue)
            else sorted([*prompts, *waiting], key=by_age)
        )
        pace = self._draft.pace
        if shared:
            return order_tenants(both, state.online_share, pace, by_urgency)
        return by_urgency(both, pace)

    def _num_rows(self) -> int:
        """Return the rows that online requests could get, those of offline requests included."""
        return len(self._state.free_rows) + len(self._state.running[RequestClass.OFFLINE])

    def _goes_first(self, head: Request) -> bool:
        """Reserve the floor chunk of `head`. If there is no room for both groups, return whether `head` goes first."""
        config, ledger, model = self._state.config, self._ledger, self._ledger.model
        missing = head.num_missing_tokens
        floor = min(missing, config.min_prefill_chunk)
        seconds = other = 0.0
        if model is not None and math.isfinite(self.time_limit):
            seconds = model.marginal(ledger.features, len(head.token_ids) - missing, floor)
            other = model.marginal(ledger.features, 0, config.min_prefill_chunk)
        rows = self._num_rows() > 1 or head.status is RequestStatus.RUNNING
        tokens = ledger.tokens_left >= floor + config.min_prefill_chunk and ledger.sequences_left > 1
        if rows and tokens and ledger.seconds + seconds + other <= self.time_limit:
            self._reserve = _Reserve(floor, seconds)
            return False
        self._state.num_contested += 1
        return self._state.num_contested % BEHIND_EVERY == 0

    def _continue(self, request: Request) -> None:
        if (
            request.last_step == self._draft.step_id
            or request.row < 0
            or request.num_pending_tokens <= 1
            or not self._ledger.open
        ):
            return
        start = request.num_computed_tokens
        length = self._length(request, start, len(request.token_ids) - start)
        if length and self._draft.advance(request, length):
            self._added(request)

    def _start_waiting(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Try to start a waiting request. Return whether the next one may be tried."""
        may_start = self._draft.may_start(request)
        if chosen is not None:
            start = chosen.get(request)  # None: a running prompt that was preempted in this step
            if start is not None and may_start and (start.savable or spares(self._state, request)):
                self._admit(request, start.kind)
            return True  # a chosen request that does not fit is skipped
        policy = self._state.online_policy
        if not may_start:
            return False
        if self._state.objective.is_late(request, self._draft.now) and not spares(self._state, request):
            return True  # late requests leave room for those that can still meet the SLO
        if policy.admits(request, context) and self._admit(request, CacheKind.KV):
            return True
        # With several tenants none is skipped: requests of another tenant would take the room again and again.
        passes = policy.scans_past(request, context) and not self._state.online_share.is_contested
        return passes and bool(self._state.free_rows)

    def _admit(self, request: Request, kind: CacheKind) -> bool:
        admitted = self._draft.admit(request, partial(self._length, request), kind)
        if admitted:
            self._added(request)
        return admitted

    def _added(self, request: Request) -> None:
        """Record that a chunk of the request was added.

        If it is the last chunk, the prompts behind it must not make its token late.
        """
        self.has_added = True
        if self._ledger.model is not None and self._draft.chunks[-1].sample:
            slack = self._state.objective.first_due(request, 0.0) - self._draft.now
            if slack >= self._ledger.seconds:
                self.time_limit = min(self.time_limit, slack)

    def _length(self, request: Request, start: int, wanted: int) -> int:
        """Return the chunk length that the decodes beside it and stricter arrivals allow.

        One prompt per step always gets a floor chunk.
        """
        ledger = self._ledger
        length = wanted = min(wanted, max(0, ledger.tokens_left - self._reserve.tokens))
        limit = min(self.time_limit, self._state.objective.prompt_limit(request))
        if ledger.model is not None and not math.isinf(limit):
            room = limit - ledger.seconds - self._reserve.seconds
            length = ledger.model.max_prefill(ledger.features, room, wanted, start) if room > 0.0 else 0
        if not self.has_added:
            length = max(length, min(wanted, self._floor(limit, start)))
        return length

    def _floor(self, limit: float, start: int) -> int:
        """Return the chunk that one prompt per step gets even without time left until `limit`."""
        ledger, config = self._ledger, self._state.config
        if ledger.model is None or math.isinf(limit):
            return config.min_prefill_chunk
        return floor_chunk(ledger.model, ledger.features, limit, config, start)


def _queue_context(state: SchedulerState, now: float) -> QueueContext:
    """Return the facts available to the online policy in a step decided at `now`."""
    return QueueContext(
        now=now,
        num_waiting=len(state.waiting_online),
        running=state.running[RequestClass.ONLINE],
        num_units=state.pool.num_units,
        block_size=state.config.block_size,
        ttft=state.objective.ttft,
        seed=state.config.seed,
        most_blocks=state.config.most_blocks,
    )
