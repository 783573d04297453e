"""The prompts of a step: running ones continue and waiting ones start, in one order (see `engine.scheduling.laxity`).

A policy that goes by urgency puts those first that can still have their first token in time. The first of the others
keeps a floor chunk: it is reserved where there is room for both; else it goes first now and then, so that none waits
for ever. Other policies continue what runs by age, and start in their own order.
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
    EASY_SHARE,
    PrefillPace,
    PromptOrder,
    floor_chunk,
    order_prompts,
    prefill_pace,
    prompt_slack,
    uses_laxity,
)
from engine.scheduling.policies import QueueContext
from engine.scheduling.selection import Start
from engine.scheduling.state import SchedulerState
from engine.scheduling.tenants import order_tenants
from engine.scheduling.victims import is_late, spares
from engine.scheduling.waiting import WaitingQueue, by_age

BEHIND_EVERY = 8
"""Where a step has no room for urgent prompts and for those that they leave behind, the latter go first so often: about
the share that the floor chunk has of a full step."""


class _Reserve(NamedTuple):
    """What urgent prompts leave alone."""

    tokens: int = 0
    seconds: float = 0.0


class PromptFill:
    """Adds online prompts to the step. `has_added`: whether it did.

    `time_limit`: when the step must end for the decodes in it, seconds from its start.
    """

    def __init__(self, draft: StepDraft) -> None:
        self.has_added = False
        self.time_limit = math.inf
        self._draft = draft
        self._state = draft.state
        self._ledger = draft.ledger
        self._allocation = draft.allocation
        self._reserve = _Reserve()

    def add(self, starts: list[Start] | None, first: Request | None = None) -> None:
        """`starts`: the requests that may start, where a knapsack chooses. `first`: one that starts before any other,
        whatever is chosen."""
        prompts = self._state.running_prompts()
        if not prompts and not self._state.waiting_online:
            return
        self._allocation.prompts = list(prompts)
        if math.isfinite(self.time_limit) and self._has_time():
            self.time_limit *= EASY_SHARE
        context = _queue_context(self._state, self._draft.now)
        if first is not None:
            if not self._start_first(first) and self._state.pool.num_deferred_units:
                starts = []  # its memory is on its way: none of the others may take it
            elif starts is not None:
                starts = [start for start in starts if start.request is not first]
        chosen = None if starts is None else {start.request: start for start in starts}
        order = self._order(prompts, starts, context)
        head = order.behind[0] if order.urgent and order.behind else None
        if head is not None and self._goes_first(head):
            self._add_prompt(head, context, chosen)
        for group in order:
            for request in group:
                if request is head and group is order.urgent:
                    continue  # its floor chunk comes behind the others
                if not self._ledger.open or not self._add_prompt(request, context, chosen):
                    break  # none of these may start any more
            self._reserve = _Reserve()
        for request in prompts:
            self._continue(request)

    def _has_time(self) -> bool:
        """Whether every prompt is on time at the pace that leaves a share of the TBT limit free."""
        return prompt_slack(self._state, partial(prefill_pace, self._state, EASY_SHARE), self._draft.now) > 0.0

    def _add_prompt(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Whether the next one in the order may be looked at."""
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
            order = order_prompts(requests, state.objective, pace, self._draft.now)
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
        """Rows that an online request could get: offline ones give way."""
        return len(self._state.free_rows) + len(self._state.running[RequestClass.OFFLINE])

    def _goes_first(self, head: Request) -> bool:
        """Reserve the floor chunk of `head`; or, where there is no room for both, whether its turn has come."""
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
        length = self._length(start, len(request.token_ids) - start)
        if length and self._draft.advance(request, length):
            self.has_added = True

    def _start_waiting(self, request: Request, context: QueueContext, chosen: dict[Request, Start] | None) -> bool:
        """Whether the next one that waits may be looked at."""
        may_start = self._draft.may_start(request)
        if chosen is not None:
            start = chosen.get(request)  # none: a running prompt that an older one took the memory of in this step
            if start is not None and may_start and (start.savable or spares(self._state, request)):
                self._admit(request, start.kind)
            return True  # a misfit does not end it
        policy = self._state.online_policy
        if not may_start:
            return False
        if is_late(self._state, request, self._draft.now) and not spares(self._state, request):
            return True  # late ones leave room for those that can be saved
        if policy.admits(request, context) and self._admit(request, CacheKind.KV):
            return True
        # Past a misfit comes the next of the same tenant, not another's: that one would take the room again and again.
        passes = policy.scans_past(request, context) and not self._state.online_share.is_contested
        return passes and bool(self._state.free_rows)

    def _start_first(self, request: Request) -> bool:
        return self._ledger.open and self._draft.may_start(request) and self._admit(request, CacheKind.KV)

    def _admit(self, request: Request, kind: CacheKind) -> bool:
        admitted = self._draft.admit(request, self._length, kind)
        self.has_added = self.has_added or admitted
        return admitted

    def _length(self, start: int, wanted: int) -> int:
        """The chunk that the decodes beside it can bear; one prompt of the step always gets a floor."""
        ledger = self._ledger
        length = wanted = min(wanted, max(0, ledger.tokens_left - self._reserve.tokens))
        if ledger.model is not None and not math.isinf(self.time_limit):
            room = self.time_limit - ledger.seconds - self._reserve.seconds
            length = ledger.model.max_prefill(ledger.features, room, wanted, start) if room > 0.0 else 0
        if not self.has_added:
            length = max(length, min(wanted, self._floor(start)))
        return length

    def _floor(self, start: int) -> int:
        """What one prompt of the step gets although no time may be left for it."""
        ledger, config = self._ledger, self._state.config
        if ledger.model is None or math.isinf(self.time_limit):
            return config.min_prefill_chunk
        return floor_chunk(ledger.model, ledger.features, self.time_limit, config, start)


def _queue_context(state: SchedulerState, now: float) -> QueueContext:
    """Return the facts that the online policy may look at in a step that is decided at `now`."""
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
