"""Builds the next step: which requests run, how many tokens each, on which units (HyGen §4.1, Algorithm 1).

The ledger of an ordinary step (`StepBuilder`) is spent in this order:

1. Running online decodes, mandatory unless memory is short.
2. Online prefills (`PromptFill`), sized by the slack of the decodes beside them.
3. Drafts behind the online decodes, if no prompt waits (see `engine.scheduling.speculation`).
4. Offline work, as far as it still fits (see `engine.scheduling.offline`), and drafts behind its decodes.

docs/concepts/scheduling.md works three steps through in numbers.

Only a shortage of *memory* (units or rows) preempts. A request that does not fit into a step is skipped and keeps its
cache.

A policy that orders by urgency (`engine.scheduling.urgency`) puts the prompts first that can still get their first
token in time. The first of the other prompts gets a floor chunk. The chunk is reserved if there is room for both
groups and the urgent prompts stay on time; otherwise that prompt goes first in every BEHIND_EVERY-th such step, so
that no prompt starves. Other policies continue running prompts by arrival and start waiting ones in their own order.

Trials and the last resort know no policies, budgets, lanes or back-off. A trial holds suspects of a failed step, or the
canary; they are quarantined, out of ordinary steps. Online suspects, and all suspects if no other request can run, take
all the memory that they need.

The last resort applies if no step is in flight and no other step has content. Requests in the way of the oldest one,
online before offline, are preempted one by one, and at last all parked blocks are dropped. An accepted request never
needs more than the pool (`max_model_len`, `most_blocks`), so the step is not empty while an ordinary request exists.

Offline steps pause on an idle server (`OfflineRest`).
"""

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import CacheKind
from engine.request import Request, RequestStatus, due
from engine.scheduling.admission import let_in, order_online
from engine.scheduling.objective import StepObjective
from engine.scheduling.offline import OfflineFill, OfflinePlan
from engine.scheduling.output import ReplacedEntry
from engine.scheduling.plan import StepPlan
from engine.scheduling.recovery import FaultRecovery
from engine.scheduling.state import InFlight, SchedulerState
from engine.scheduling.urgency import (
    PrefillPace,
    PromptOrder,
    binds,
    floor_chunk,
    order_prompts,
    overdue,
    prompt_share,
    urgent_slack,
    uses_laxity,
)
from engine.scheduling.waiting import Start
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

    def __init__(self, step: StepPlan) -> None:
        self.any_running = self.has_added = False
        self.time_limit = math.inf
        self._step = step
        self._state = step.state
        self._ledger = step.ledger
        self._allocation = step.allocation
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
        if math.isfinite(self.time_limit):
            self.time_limit *= prompt_share(self._state, self._step.pace, self._step.now)
        for request in first:
            may_start = self._ledger.open and self._step.may_start(request)
            if not (may_start and self._admit(request, CacheKind.KV)):
                if self._state.pool.num_deferred_units:
                    starts = []  # its memory is still deferred: no other request may take it
                break
        if starts:
            starts = [start for start in starts if start.request not in first]
        chosen = None if starts is None else {start.request: start for start in starts}
        order = self._order(prompts, starts)
        head = order.behind[0] if order.urgent and order.behind else None
        if head is not None and self._goes_first(head, order.urgent):
            self._add_prompt(head, chosen)
        for group in order:
            for request in group:
                if request is head and group is order.urgent:
                    continue  # its floor chunk follows the other urgent prompts
                if not self._ledger.open or not self._add_prompt(request, chosen):
                    break  # no further request of this group may start
            self._reserve = _Reserve()
        for request in prompts:
            self._continue(request)

    def restore_compact(self) -> None:
        """Convert HIDDEN blocks of the step's requests back to K and V, oldest first, while memory and time allow."""
        state, ledger, wanted = self._state, self._ledger, self._state.config.max_num_batched_tokens
        if not state.cache.num_compact or state.config.split is not None:
            return
        if ledger.model is not None and (per_token := ledger.model.cache_work(restored_tokens=1)) > 0.0:
            first = ledger.model.cache_work(restored_tokens=1, beside=ledger.features) - per_token
            wanted = int(min(wanted, max(0.0, self.time_limit - ledger.seconds - first) / per_token))
        for request in state.running[RequestClass.ONLINE]:
            if request.cache_map.num_compact and request.last_step == self._step.step_id:
                found = state.cache.restore(request, wanted, self._step.step_id, reserve=state.growth_reserve)
                self._allocation.replaced.extend(ReplacedEntry(request.row, index, entry) for index, entry in found)
                restored = len(found) * state.config.block_size
                ledger.charge_cache_work(CacheWork(-restored, restored))
                wanted -= restored

    def _add_prompt(self, request: Request, chosen: dict[Request, Start] | None) -> bool:
        """Continue or start a prompt. Return whether the next prompt in the order may be tried."""
        if request.status is RequestStatus.RUNNING:
            self._continue(request)
            return True
        return self._start_waiting(request, chosen)

    def _order(self, prompts: list[Request], starts: list[Start] | None) -> PromptOrder:
        state, policy = self._state, self._state.online_policy
        waiting: Sequence[Request] = state.waiting_online if starts is None else [start.request for start in starts]
        if starts is None and not self._num_rows():
            waiting = []
        if not uses_laxity(state) or len(prompts) + len(waiting) < 2:
            if waiting and starts is None and policy.order is not None:
                waiting = policy.order(state, self._step.now)
            return order_online(prompts, waiting, state.online_share, None, None)
        rank = {} if starts is None else {start.request: index for index, start in enumerate(starts)}

        def by_urgency(requests: list[Request], pace: PrefillPace | None) -> PromptOrder:
            order = order_prompts(requests, state.objective, pace, self._step.now, promised=bool(state.promised))
            if starts is None:
                return order
            return PromptOrder(order.urgent, sorted(order.behind, key=lambda request: rank.get(request, -1)))

        return order_online(prompts, waiting, state.online_share, self._step.pace, by_urgency)

    def _num_rows(self) -> int:
        """Return the rows that online requests could get, those of offline requests included."""
        return len(self._state.free_rows) + len(self._state.running[RequestClass.OFFLINE])

    def _goes_first(self, head: Request, urgent: Iterable[Request]) -> bool:
        """Reserve the floor chunk of `head`, if the urgent prompts are on time beside one in each step.

        If there is no room for both groups, return whether `head` goes first.
        """
        config, ledger, model = self._state.config, self._ledger, self._ledger.model
        missing = head.num_missing_tokens
        floor = min(missing, config.min_prefill_chunk)
        seconds = other = 0.0
        if model is not None and math.isfinite(self.time_limit):
            seconds = model.marginal(ledger.features, len(head.token_ids) - missing, floor)
            other = model.marginal(ledger.features, 0, config.min_prefill_chunk)
        rows = self._num_rows() > 1 or head.status is RequestStatus.RUNNING
        tokens = ledger.tokens_left >= floor + config.min_prefill_chunk and ledger.sequences_left > 1
        has_time = ledger.seconds + seconds + other <= self.time_limit
        if rows and tokens and has_time and self._are_on_time(urgent, floor, seconds):
            self._reserve = _Reserve(floor, seconds)
            return False
        self._state.num_contested += 1
        return self._state.num_contested % BEHIND_EVERY == 0

    def _are_on_time(self, urgent: Iterable[Request], floor: int, seconds: float) -> bool:
        """Return whether the urgent prompts are on time if each step holds `floor` tokens of another, for `seconds`."""
        pace, ledger = self._step.pace, self._ledger
        if pace is None or not isinstance(urgent, list):  # the prompts of several tenants are ordered one by one
            return True
        tokens, time = ledger.tokens_left, self.time_limit - ledger.seconds
        slower = tokens / (tokens - floor) if math.isinf(time) else max(1.0, time / (time - seconds))
        return urgent_slack(self._state, urgent, pace.slower(slower), self._step.now) > 0.0

    def _continue(self, request: Request) -> None:
        if (
            request.last_step == self._step.step_id
            or request.row < 0
            or request.num_pending_tokens <= 1
            or not self._ledger.open
        ):
            return
        start = request.num_computed_tokens
        length = self._length(request, start, len(request.token_ids) - start)
        if length and self._step.advance(request, length):
            self._added(request)

    def _start_waiting(self, request: Request, chosen: dict[Request, Start] | None) -> bool:
        """Try to start a waiting request. Return whether the next one may be tried."""
        may_start, policy = self._step.may_start(request), self._state.online_policy
        if chosen is not None:
            start = chosen.get(request)  # None: a running prompt that was preempted in this step
            if start is not None and may_start and (start.savable or policy.admits_late(self._state, request)):
                self._admit(request, start.kind)
            return True  # a chosen request that does not fit is skipped
        if not may_start:
            return False
        if self._state.objective.is_late(request, self._step.now) and not policy.admits_late(self._state, request):
            return True  # late requests leave room for those that can still meet the SLO
        if policy.admits(self._state, request) and self._admit(request, CacheKind.KV):
            return True
        # With several tenants none is skipped: requests of another tenant would take the room again and again.
        passes = policy.scans_past and not self._state.online_share.is_contested
        return passes and bool(self._state.free_rows)

    def _admit(self, request: Request, kind: CacheKind) -> bool:
        admitted = self._step.admit(request, partial(self._length, request), kind)
        if admitted:
            self._added(request)
        return admitted

    def _added(self, request: Request) -> None:
        """Record that a chunk of the request was added.

        If it is the last chunk, the prompts behind it must not make its token late.
        """
        self.has_added = True
        if self._ledger.model is not None and self._step.chunks[-1].sample:
            slack = self._state.objective.first_due(request, 0.0) - self._step.now
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


class StepBuilder:
    """Build one ordinary step."""

    def __init__(self, step: StepPlan) -> None:
        self._step = step
        self._state = step.state
        self._prompts = PromptFill(step)
        self._offline = OfflineFill(step)
        self._tightest = math.inf
        self._decodes: list[Request] = []

    def build(self, plan: OfflinePlan | None) -> InFlight | None:
        """Return the step, or None if no request can run now. Without a plan the step is online-only."""
        self._state.cache.balance()
        admitted = let_in(self._step)
        late = overdue(self._state, self._step.pace, self._step.now) if binds(self._state) else []
        select = self._state.online_policy.select
        starts = [] if late else None if select is None else select(self._state, self._step.now)
        num_decodes = self._add_online_decodes()
        self._prompts.add(starts, late if admitted is None else [admitted])
        if starts is None:
            self._prompts.restore_compact()
        if self._state.speculation is not None and not (self._prompts.has_added or self._state.waiting_online):
            limit = min(self._tightest, self._state.objective.budget.latency_budget)
            self._state.speculation.add(self._step, self._decodes, limit)
        if plan is not None:
            self._offline.add(plan, num_decodes, beside_prompt=self._prompts.has_added)
        return self._step.finish(self._spare())

    def _spare(self) -> float:
        """Return `SchedulerOutput.spare`; 0 while a prompt in the step or in the queue waits for its first token."""
        state, ledger = self._state, self._step.ledger
        if ledger.model is None or self._prompts.has_added or state.waiting_online:
            return 0.0
        objective = state.objective
        online = state.running[RequestClass.ONLINE]
        limit = min(self._tightest, objective.budget.latency_budget if online else objective.idle_limit)
        return max(0.0, limit - ledger.seconds)

    def _add_online_decodes(self) -> int:
        """Add the online decodes and the short runs of forced tokens that are due. Return their number.

        Also set the time limit for prompts from the earliest token deadline that the decodes can still meet.
        """
        step, ledger, objective = self._step, self._step.ledger, self._state.objective
        decodes, prompts = due(self._state.running_online(step.now))
        if self._state.staged:
            decodes = next_half(decodes)
        self._prompts.any_running = bool(prompts)
        decodes, contexts = step.allocation.grow_decodes(decodes)
        timed = ledger.model is not None and (not math.isinf(objective.tbt) or bool(self._state.promised))
        slacks = [due_at - step.now for due_at in self._state.token_deadlines(decodes, step.now)] if timed else []
        step.add_decodes(decodes, contexts)
        self._decodes = decodes
        ledger.charge_decodes(contexts)
        for request in prompts:
            if request.row < 0 or not request.is_answering or not ledger.open:
                continue
            if step.advance(request, min(request.num_pending_tokens, ledger.tokens_left)) and timed:
                slacks += [due_at - step.now for due_at in self._state.token_deadlines([request], step.now)]
        if slacks:
            self._tightest = min(slacks)
            # A decode that would be late even in a decode-only step cannot be saved by starving the prompts.
            if math.isfinite(limit := ledger.tightest(slacks)):
                self._prompts.time_limit = min(limit, objective.tbt)
        return len(step.chunks)


def next_half(decodes: Sequence[Request]) -> list[Request]:
    """Return the decodes of the next step of a pipeline: at most half of all, none with a token in flight.

    While one half passes a stage, the other half passes the next stage (KunServe §4.3).
    """
    return [request for request in decodes if not request.num_placeholders][: -(-len(decodes) // 2)]


def build_next(state: SchedulerState, recovery: FaultRecovery, plan: OfflinePlan | None, now: float) -> InFlight | None:
    """Build the step of the first turn that has work.

    A trial runs without other steps in flight, so that its failure cannot affect them.
    """
    if any(request.quarantined for flight in state.in_flight for request in flight.requests):
        return None
    turns = recovery.turns(now)
    for turn in turns:
        if turn.requests is None:
            step = StepBuilder(StepPlan(state, now)).build(plan)
        elif state.in_flight:
            return None
        else:
            trial = TrialBuilder(StepPlan(state, now))
            step = trial.build(turn.requests, turn.force)
            if step is None and trial.awaits_units:
                recovery.waits(turn)
                return None
        if step is not None:
            recovery.took(turn)
            return step
    if not turns or state.in_flight:
        return None
    return last_resort(StepPlan(state, now), with_offline=plan is not None)


class TrialBuilder:
    """Build a trial step.

    `awaits_units`: nothing can run before the step in flight ends, and its freed units are reserved for the trial.
    """

    def __init__(self, step: StepPlan) -> None:
        self.awaits_units = False
        self._step = step
        self._state = step.state

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
            self._state.preempt(victim, "step_failure", self._step.now)
        for request in requests:
            if request.status is not RequestStatus.RUNNING and self._step.may_start(request):
                self._admit(request, force)
        return self._step.finish()

    def _continue(self, requests: Sequence[Request]) -> bool:
        """Return whether any of the running `requests` advances or has its next token in flight."""
        moves, ledger = False, self._step.ledger
        for request in requests:
            if not ledger.open:
                break
            wanted = request.num_pending_tokens
            moves = not wanted or self._step.advance(request, min(wanted, ledger.tokens_left)) or moves
        return moves

    def _admit(self, request: Request, force: bool) -> None:
        if not self._step.ledger.open or self._start(request) or self._step.chunks:
            return
        for victim in self._victims(request, force):
            if self._is_coming(request):
                self.awaits_units = True
                return
            self._state.preempt(victim, "step_failure", self._step.now)
            if self._start(request):
                return
        self.awaits_units = self.awaits_units or self._is_coming(request)

    def _start(self, request: Request) -> bool:
        return self._step.admit(request, lambda _, wanted: min(wanted, self._step.ledger.tokens_left), CacheKind.KV)

    def _victims(self, request: Request, force: bool) -> list[Request]:
        offline = request.request_class is RequestClass.OFFLINE
        return [] if offline and not force else _others(self._state, request)

    def _is_coming(self, request: Request) -> bool:
        """Return whether deferred units would suffice for the request."""
        pool, claim = self._state.pool, self._state.cache.claim(request)
        missing = claim.units + pool.num_idle_units(claim.hits) - pool.num_available_units
        return bool(self._state.free_rows) and 0 < missing <= pool.num_deferred_units


def last_resort(step: StepPlan, *, with_offline: bool) -> InFlight | None:
    """Return a step with one request's next token, or with a floor chunk of its prompt; None if no request can run.

    `with_offline`: offline requests may be chosen.
    """
    request = _next_alone(step.state, with_offline)
    if request is None:
        return None
    victims = iter(_others(step.state, request))
    while not _run_alone(step, request):
        victim = next(victims, None)
        if victim is None:
            step.state.cache.parked.forget_all()
            _run_alone(step, request)
            break
        step.state.preempt(victim, "stall", step.now)
    return step.finish()


def _next_alone(state: SchedulerState, with_offline: bool) -> Request | None:
    for online in (state.running[RequestClass.ONLINE], state.waiting_online):
        if online:
            return online[0]
    if not with_offline:
        return None
    running = min(state.running[RequestClass.OFFLINE], key=lambda r: r.spec.lane, default=None)
    return running or next(state.waiting_offline.candidates(), None)


def _run_alone(step: StepPlan, request: Request) -> bool:
    """Add the request if the free units suffice. Return whether it is in the step."""
    most = min(step.ledger.tokens_left, step.state.config.min_prefill_chunk)
    if request.status is not RequestStatus.RUNNING:
        return step.admit(request, lambda _, wanted: min(wanted, most))
    length = step.allocation.grow_alone(request, min(request.num_pending_tokens, most))
    if length:
        step.charge_and_add(request, length)
    return length > 0


def _others(state: SchedulerState, request: Request) -> list[Request]:
    """Return the other running requests: offline before online, newest first, quarantined ones at the end."""
    quarantined = [other for other in state.quarantined if other.status is RequestStatus.RUNNING]
    groups = (state.running[RequestClass.OFFLINE], state.running[RequestClass.ONLINE], quarantined)
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
