"""Plans the offline fill of the next step while the current one runs (HyGen §4.3).

A plan is an ordered list of candidates, cut where the expected leftover of the step ends. It assumes the state after
the step in flight (tokens in flight count as known) and changes nothing. It is only a proposal: the step checks every
item again against the actual leftover. The search yields regularly so that a caller can slice it.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice, repeat
from operator import attrgetter
from typing import NamedTuple

from engine.api import RequestClass, quick_rows
from engine.cache.blocks import count_gone, count_units
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request, due
from engine.scheduling.laxity import PrefillPace, easy_share, floor_chunk, prefill_pace, prompt_slack
from engine.scheduling.ledger import StepLedger, num_masked
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.state import SchedulerState
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

    @property
    def continued(self) -> "OfflinePlan":
        """Return a plan for the step after this one: the same requests, each as a running decode.

        The step that uses the plan checks how many tokens each request has left.
        """
        if all(chunk.running and chunk.length == 1 for chunk in self.chunks):
            return self
        return OfflinePlan(tuple(PlannedChunk(chunk.request_id, 1, True) for chunk in self.chunks))


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
    """Return the chunk of an online prompt in a step limited to `limit`, sized as in `engine.scheduling.prompts`."""
    start, model = request.num_computed_tokens, state.model
    length = min(len(request.token_ids) - start, tokens)
    if length < 1 or model is None or math.isinf(limit):
        return length
    fits = model.max_prefill(ledger.features, max(0.0, limit - ledger.seconds), length, start)
    if ledger.features.num_prefill_chunks:
        return fits
    return max(fits, min(length, floor_chunk(model, ledger.features, limit, state.config, start)))
