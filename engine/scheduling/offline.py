"""Plans the offline work of the next step while the current one runs (HyGen §4.3), and adds it to the step.

A plan is an ordered list of candidates, cut where the expected leftover of the step ends. It assumes the state after
the step in flight (tokens in flight count as known) and changes nothing. It is only a proposal: `OfflineFill` checks
every item again against the leftover behind the online work of the step. The search yields regularly so that a caller
can slice it.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice, repeat, takewhile
from operator import attrgetter
from typing import NamedTuple

from engine.api import RequestClass, quick_rows
from engine.cache.blocks import count_gone, count_units
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request, RequestStatus, due
from engine.scheduling.objective import OfflineAllowance, StepLedger, num_masked
from engine.scheduling.plan import StepPlan
from engine.scheduling.state import SchedulerState
from engine.scheduling.urgency import PrefillPace, easy_share, floor_chunk, prefill_pace, prompt_slack
from predictor.features import BatchFeatures, CacheWork, smallest_step

ITEMS_PER_SLICE = 32
_lane = attrgetter("spec.lane")


class PlannedChunk(NamedTuple):
    """A planned chunk of an offline request. `running`: the request had a row when the plan was made."""

    request_id: str
    length: int
    running: bool


LOST_BUDGET_STEPS = 4.0
"""Offline step limit, in smallest steps, if even the smallest step exceeds the TBT limit."""


class OfflinePlan(NamedTuple):
    """Offline chunks, most preferred first."""

    chunks: tuple[PlannedChunk, ...]


def offline_allowance(
    state: SchedulerState,
    ledger: StepLedger,
    num_online_decodes: int,
    beside_prompt: bool,
    now: float,
    pace: Callable[[], PrefillPace | None],
) -> OfflineAllowance:
    """Return the limit on offline work in a step whose online work is in `ledger`.

    - The budget L bounds the step. Without online work `objective.idle_limit` bounds it instead, since an arrival waits
      for its end. If the smallest step exceeds an absolute TBT limit (streamed weights, slow disk), the limit is lost
      anyway, and offline work may take several smallest steps.
    - An absolute TBT limit and the tightest token deadline apply while they can still be met.
    - `offline_share` scales the time left above online work.
    - Beside a waiting prompt the rule `ttft_mean` allows nothing, the other rules half of the prompt's slack. Under
      `tbt_p99` a step that exceeds L anyway may be doubled.
    """
    objective = state.objective
    rule, limit = objective.budget.rule, objective.budget.latency_budget
    beside_prompt = beside_prompt or bool(state.waiting_online)
    online = bool(num_online_decodes or beside_prompt)
    if not online:
        limit = objective.idle_limit
        if limit > 0.0 and not math.isinf(objective.tbt) and state.model is not None:
            smallest = smallest_step(state.model)
            limit = limit if smallest <= objective.tbt else max(limit, LOST_BUDGET_STEPS * smallest)
    elif rule == "tbt_p99" and ledger.seconds > limit > 0.0:
        limit = 2.0 * ledger.seconds
    if num_online_decodes and (state.promised or not math.isinf(objective.tbt)):
        limit = min(limit, _decode_limit(state, ledger, now))
    if online and state.offline_share < 1.0:
        # Scale last: scaling an L that exceeds the other limits would have no effect.
        share = state.offline_share
        limit = ledger.seconds + (share * max(0.0, limit - ledger.seconds) if share > 0.0 else 0.0)
    if beside_prompt and rule == "ttft_mean":
        limit = 0.0
    elif beside_prompt:
        limit = min(limit, ledger.seconds + prompt_slack(state, pace, now) / 2)
    saturated = BatchFeatures() if state.model is None else BatchFeatures(state.model.reach)
    saturated.add_decodes(state.config.max_num_batched_tokens, 0)
    return OfflineAllowance(state.model, limit, num_online_decodes, objective.budget, saturated)


def _decode_limit(state: SchedulerState, ledger: StepLedger, now: float) -> float:
    """Return the predicted end, in seconds, up to which a step leaves the running answers their next token in time."""
    decoding = [r for r in state.running[RequestClass.ONLINE] if r.times.first_token is not None]
    slacks = [deadline - now for deadline in state.token_deadlines(decoding, now)]
    gap = state.gap_limit
    limit = ledger.tightest([gap, *slacks])
    if gap < state.objective.tbt and limit <= max(gap, ledger.seconds):
        # L leaves room below the limit of the default class alone
        limit = min(limit, max(state.strict_share * gap, ledger.seconds))
    return limit


def plan_offline(state: SchedulerState, now: float) -> Generator[None, None, OfflinePlan]:
    """Yield between slices of work and return the plan. The state may change between slices, so items may be stale."""
    ledger = _expected_online(state)
    beside_prompt = ledger.features.num_prefill_chunks > 0
    pace = partial(prefill_pace, state)
    allowance = offline_allowance(state, ledger, ledger.features.num_decodes, beside_prompt, now, pace)
    running = sorted(state.running[RequestClass.OFFLINE], key=_lane)
    chunks, done = _plan_decodes(running, ledger, allowance)
    examined = 0
    cut = False
    for request in running[done:]:
        remaining = request.num_pending_tokens
        if not remaining:
            continue
        wanted = min(remaining, ledger.tokens_left)
        if chunks and (wanted < 1 or (cut and wanted > 1) or not ledger.open):
            continue
        masked = request.num_expected_tokens >= request.masked_from
        length = _largest(allowance, ledger, request.num_computed_tokens, wanted, masked)
        # One item more than fits: online work may turn out smaller, and on an idle engine the first item always runs.
        chunks.append(PlannedChunk(request.request_id, length, running=True))
        if length == 0:
            return OfflinePlan(tuple(chunks))
        ledger.charge(request.num_computed_tokens, length)
        ledger.charge_masks(masked and length == remaining)
        # A cut prompt has used up the budget; tiny chunks of further prompts would only hold half-filled caches.
        cut = cut or length < wanted
        examined += 1
        if examined % ITEMS_PER_SLICE == 0:
            yield
    if not cut:
        yield from _plan_waiting(state, ledger, allowance, chunks, now)
    return OfflinePlan(tuple(chunks))


def whole(slices: Generator[None, None, OfflinePlan]) -> OfflinePlan:
    """Run a plan search to its end and return the plan."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            plan: OfflinePlan = end.value
            return plan


def leading_decodes(requests: Sequence[Request]) -> tuple[list[Request], int]:
    """Return the decodes before the first request with more pending tokens, and the number of requests before it."""
    decodes, prompts = due(requests)
    if not prompts:
        return decodes, len(requests)
    count = requests.index(prompts[0])
    return due(requests[:count])[0], count


def _plan_decodes(
    running: Sequence[Request], ledger: StepLedger, allowance: OfflineAllowance
) -> tuple[list[PlannedChunk], int]:
    """Plan the leading decodes of `running` in bulk if all fit.

    Return their chunks and how many requests were handled.
    """
    decodes, examined = leading_decodes(running)
    contexts = [request.num_computed_tokens + 1 for request in decodes]
    masked = num_masked(decodes)
    count = len(decodes)
    if not count or count > min(ledger.tokens_left, ledger.sequences_left):
        return [], 0
    context_sum = ledger.read(contexts)
    if not allowance.fits_decodes(ledger.features, ledger.seconds + ledger.mask_seconds(masked), count, context_sum):
        return [], 0
    ledger.charge_more_decodes(count, context_sum)
    ledger.charge_masks(masked)
    return [*quick_rows(PlannedChunk, [r.spec.request_id for r in decodes], repeat(1), repeat(True))], examined


def _largest(allowance: OfflineAllowance, ledger: StepLedger, start: int, wanted: int, masked: bool) -> int:
    seconds = ledger.seconds + ledger.mask_seconds(masked)
    return allowance.largest(ledger.features, seconds, start, wanted) if ledger.open else 0


def _plan_waiting(
    state: SchedulerState, ledger: StepLedger, allowance: OfflineAllowance, chunks: list[PlannedChunk], now: float
) -> Generator[None, None, None]:
    """Plan waiting requests in the offline policy's order, while rows, units, tokens and time last."""
    pool = state.pool
    num_offline = len(state.running[RequestClass.OFFLINE]) + 1
    coming, taken = pool.num_deferred_units + state.cache.parked.num_units(online=False), 0
    rows = len(state.free_rows)
    block_size = state.config.block_size
    waiting: Iterator[Request] = islice(_candidates(state, now), rows)
    while (request := next(waiting, None)) is not None:
        if chunks and not ledger.open:
            return
        hits = state.cache.without_gone(state.cache.find_prefix(request))
        start = len(hits) * block_size
        blocks = request.num_missing_blocks(block_size, len(hits), count_gone(hits))
        copied = count_units(block for block in hits if not block.on_device)
        taken += blocks * UNITS_PER_BLOCK + copied + pool.num_idle_units(hits)
        if taken > state.offline_units(request, num_offline) + coming:
            return
        if copied:
            ledger.charge_cache_work(CacheWork(transferred_bytes=state.cache.tiers.copied_bytes(hits)))
        wanted, masked = len(request.token_ids) - start, len(request.token_ids) >= request.masked_from
        length = _largest(allowance, ledger, start, min(wanted, ledger.tokens_left), masked)
        chunks.append(PlannedChunk(request.request_id, length, running=False))
        if length == 0:
            return
        ledger.charge(start, length)
        if length < wanted:
            return
        ledger.charge_masks(masked)
        if len(chunks) % ITEMS_PER_SLICE == 0:
            waiting = iter(list(waiting))  # the queue may change before the next slice
            yield


def _candidates(state: SchedulerState, now: float) -> Iterator[Request]:
    """Yield waiting requests that may start now. The lookup is lazy because most plans take few.

    A request that was preempted often stays away from online work for a while, since it would be preempted again (E4).
    No timer is needed for its return: either online work makes steps, each with a new plan, or there is no online work.
    """
    for request in state.waiting_offline.candidates():
        if now >= request.not_before or not state.has_online:
            yield request


def _may_start(state: SchedulerState, request: Request) -> bool:
    """Return whether a waiting online request fits into memory in the next step if offline work gives its blocks up."""
    held = sum(r.cache_map.num_live for r in state.running[RequestClass.OFFLINE])
    parked = state.cache.parked.num_units(online=False)
    units = state.pool.num_available_units + state.pool.num_deferred_units + parked + UNITS_PER_BLOCK * held
    return request.num_blocks(state.config.block_size) * UNITS_PER_BLOCK <= units


def _expected_online(state: SchedulerState) -> StepLedger:
    """Return the ledger of the next step, charged with the online work known now.

    Prompts are sized to the time limit of the decodes beside them.
    """
    config = state.config
    ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs, state.model)
    decodes, prompts = due(state.running[RequestClass.ONLINE])
    ledger.charge_decodes([request.num_computed_tokens + 1 for request in decodes])
    ledger.charge_masks(num_masked(decodes))
    next_prompt = [request for request in state.waiting_online[:1] if _may_start(state, request)]
    limit = state.gap_limit * easy_share(state) if decodes else math.inf
    for request in (*prompts, *next_prompt):
        if ledger.open:
            length = _prompt_length(state, ledger, request, ledger.tokens_left, limit)
            if length > 0:
                ledger.charge(request.num_computed_tokens, length)
                end = request.num_computed_tokens + length
                ledger.charge_masks(end == len(request.token_ids) and end >= request.masked_from)
    return ledger


def _prompt_length(state: SchedulerState, ledger: StepLedger, request: Request, tokens: int, limit: float) -> int:
    """Return the chunk of an online prompt in a step limited to `limit`, sized as in `engine.scheduling.step`."""
    start, model = request.num_computed_tokens, state.model
    length = min(len(request.token_ids) - start, tokens)
    if length < 1 or model is None or math.isinf(limit):
        return length
    fits = model.max_prefill(ledger.features, max(0.0, limit - ledger.seconds), length, start)
    if ledger.features.num_prefill_chunks:
        return fits
    return max(fits, min(length, floor_chunk(model, ledger.features, limit, state.config, start)))


class OfflineFill:
    """Add offline requests to a step behind its online work."""

    def __init__(self, step: StepPlan) -> None:
        self._step = step
        self._state = step.state
        self._lookup = step.state.requests.get

    def add(self, plan: OfflinePlan, num_online_decodes: int, *, beside_prompt: bool) -> None:
        """Add the items of the plan that still fit beside the online work of this step."""
        state, ledger = self._state, self._step.ledger
        allowance = offline_allowance(
            state, ledger, num_online_decodes, beside_prompt, self._step.now, lambda: self._step.pace
        )
        before, num_online = ledger.seconds, len(self._step.requests)
        for planned in plan.chunks[self._add_decodes(plan, allowance) :]:
            if not ledger.open:
                break
            request = self._lookup(planned.request_id)
            if request is None or (request.status is RequestStatus.RUNNING) != planned.running:
                continue  # the request has ended, was preempted by this step's online work, or has already started
            add = self._continue if planned.running else self._start
            if not add(request, allowance):
                break
        if state.speculation is not None:
            started = zip(self._step.chunks[num_online:], self._step.requests[num_online:], strict=True)
            decodes = [request for chunk, request in started if chunk.length == 1 and chunk.sample]
            state.speculation.add(self._step, decodes, allowance.limit)
        self._mark_beside_offline(num_online)
        if state.has_online and not math.isinf(allowance.limit):
            state.counters.leftover_seconds += max(0.0, allowance.limit - before)
            state.counters.leftover_used_seconds += ledger.seconds - before

    def _add_decodes(self, plan: OfflinePlan, allowance: OfflineAllowance) -> int:
        """Add the leading decodes of the plan in bulk if all fit. Return the number of plan items handled.

        Same as `_continue` per decode, but faster.
        """
        state, step, ledger = self._state, self._step, self._step.ledger
        if state.cache.num_compact or state.not_in_runner or state.staged:
            return 0
        decodes, examined = self._leading_decodes(plan)
        if not decodes or len(decodes) > min(ledger.tokens_left, ledger.sequences_left):
            return 0
        seconds = ledger.seconds + ledger.mask_seconds(num_masked(decodes))
        contexts = ledger.read([request.num_computed_tokens + 1 for request in decodes])
        if not allowance.fits_decodes(ledger.features, seconds, len(decodes), contexts):
            return 0
        granted, lengths = step.allocation.grow_decodes(decodes)
        if granted:
            ledger.charge_more_decodes(len(granted), ledger.read(lengths))
            step.add_decodes(granted, lengths)
        return examined

    def _leading_decodes(self, plan: OfflinePlan) -> tuple[list[Request], int]:
        """Return the decodes at the start of the plan and the number of plan items that they cover.

        Requests that have ended, stopped running or are already in the step are skipped.
        """
        items = takewhile(lambda item: item.running and item.length == 1, plan.chunks)
        found = [self._lookup(item.request_id) for item in items]
        running = [r for r in found if r and r.status is RequestStatus.RUNNING and r.last_step != self._step.step_id]
        decodes, count = leading_decodes(running)
        return decodes, len(found) if count == len(running) else found.index(running[count])

    def _mark_beside_offline(self, num_online: int) -> None:
        """If offline requests joined the step, mark each online request that they delay.

        `num_online`: number of online requests at the start of the step's list.
        """
        if len(self._step.requests) > num_online:
            for request in (*self._step.requests[:num_online], *self._state.waiting_online):
                request.beside_offline = True

    def _continue(self, request: Request, allowance: OfflineAllowance) -> bool:
        """Add a running request. Return whether the rest of the plan should be tried."""
        wanted = request.num_pending_tokens
        awaited = self._state.staged and request.num_placeholders > 0  # by a step in flight, which shares no decode
        if request.last_step == self._step.step_id or not wanted or awaited:
            return True
        length = self._length(request, allowance, request.num_computed_tokens, wanted)
        if length == 0:
            return False
        self._step.advance(request, length)
        return True

    def _start(self, request: Request, allowance: OfflineAllowance) -> bool:
        if not self._step.may_start(request):
            return True
        return self._step.admit(request, lambda start, wanted: self._length(request, allowance, start, wanted))

    def _length(self, request: Request, allowance: OfflineAllowance, start: int, wanted: int) -> int:
        config, ledger, whole = self._state.config, self._step.ledger, wanted
        wanted = min(wanted, ledger.tokens_left)
        # the end of a prompt is useless without time for the masks that sampling its first token needs
        seconds = ledger.seconds + ledger.mask_seconds(start + whole >= request.masked_from)
        seconds += ledger.compact_seconds(request.cache_map.num_compact * config.block_size)
        length = allowance.largest(ledger.features, seconds, start, wanted)
        if not self._step.chunks and (not self._state.in_flight or not self._state.has_online):
            # No other request progresses: the first one always does, even beyond the budget (E4). If online work
            # cannot start, this request ends at last and frees its memory.
            length = max(length, min(wanted, config.min_prefill_chunk))
        return length
