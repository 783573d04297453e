"""Plans the offline fill of the next step while the current one runs (HyGen §4.3).

A plan is a list of candidates in the order in which they should be taken, cut where the expected leftover ends. It is
derived from the state as it will be when the step in flight has ended (tokens in flight count as known), mutates
nothing, and is only a proposal: the step re-validates every item against what online work really left. The search
yields now and then so that a caller can slice it.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from engine.api import RequestClass
from engine.cache.blocks import count_gone, count_units
from engine.request import Request, due, leading_decodes
from engine.scheduling.laxity import EASY_SHARE, PrefillPace, floor_chunk, prefill_pace, prompt_slack
from engine.scheduling.ledger import StepLedger, num_masked
from engine.scheduling.objective import OfflineAllowance
from engine.scheduling.state import SchedulerState
from predictor.features import BatchFeatures, CacheWork
from predictor.limits import UNITS_PER_BLOCK
from predictor.model import smallest_step

ITEMS_PER_SLICE = 32
_lane = attrgetter("spec.lane")


class PlannedChunk(NamedTuple):
    """`running`: the request held a row when it was planned."""

    request_id: str
    length: int
    running: bool


LOST_BUDGET_STEPS = 4.0
"""Smallest steps that one of offline work may take where nothing is said of TBT, or nothing that any step keeps."""


class OfflinePlan(NamedTuple):
    """Offline chunks in the order in which they should be taken."""

    chunks: tuple[PlannedChunk, ...]

    @property
    def continued(self) -> "OfflinePlan":
        """The same requests once more, those that this plan started among the running, as if all of them decoded: a
        step that takes them looks at what each has left to do."""
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
    """What offline work may add to a step whose online work is in `ledger`.

    L bounds the step, without online work also what an arrival within it can lose; where the smallest step has become
    longer than an absolute TBT limit (weights stream, and the disk has become slow) that is lost anyway, and must not
    cut offline work into steps of one request. An absolute TBT limit, and the
    tightest deadline, end it where they can still be met; of what they and L leave above online work the controller may
    grant a share. The budget's rule does the rest: beside a waiting prompt `ttft_mean` adds nothing and `ttft_p99`
    half of what the prompt can still lose; under `tbt_p99` a step that is over L anyway is in the tail already and may
    be doubled, as far as the share goes.
    """
    objective = state.objective
    rule, limit = objective.budget.rule, objective.budget.latency_budget
    beside_prompt = beside_prompt or bool(state.waiting_online)
    online = bool(num_online_decodes or beside_prompt)
    if not online:
        limit = min(limit, objective.idle)
        if limit > 0.0 and not math.isinf(objective.tbt) and state.model is not None:
            smallest = smallest_step(state.model)
            limit = limit if smallest <= objective.tbt else max(limit, LOST_BUDGET_STEPS * smallest)
    elif rule == "tbt_p99" and ledger.seconds > limit > 0.0:
        limit = 2.0 * ledger.seconds
    if num_online_decodes and not math.isinf(objective.tbt):
        within = objective.tbt if objective.tbt >= ledger.seconds else math.inf  # lost without offline work, too
        limit = min(limit, within, _tightest_slack(state, ledger.seconds, now))
    if online and state.offline_share < 1.0:
        # A share of an L beyond the limits would take nothing away.
        share = state.offline_share
        limit = ledger.seconds + (share * max(0.0, limit - ledger.seconds) if share > 0.0 else 0.0)
    if beside_prompt and rule == "ttft_mean":
        limit = 0.0
    elif beside_prompt:
        limit = min(limit, ledger.seconds + prompt_slack(state, pace, now) / 2)
    saturated = BatchFeatures() if state.model is None else BatchFeatures(state.model.reach)
    saturated.add_decodes(state.config.max_num_batched_tokens, 0)
    return OfflineAllowance(state.model, limit, num_online_decodes, objective.budget, saturated)


def _tightest_slack(state: SchedulerState, reachable_from: float, now: float) -> float:
    """Seconds to the earliest token deadline that a step of `reachable_from` seconds can still meet."""
    decoding = [r for r in state.running[RequestClass.ONLINE] if r.times.first_token is not None]
    slacks = (deadline - now for deadline in state.objective.token_deadlines(decoding))
    return min((slack for slack in slacks if slack >= reachable_from), default=math.inf)


def plan_offline(state: SchedulerState, now: float) -> Generator[None, None, OfflinePlan]:
    """Yields between slices of work; returns the plan. The scheduler may change between slices: items go stale."""
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
        # One item more than fits: online work may turn out smaller, and where nothing else runs the first item does.
        chunks.append(PlannedChunk(request.request_id, length, running=True))
        if length == 0:
            return OfflinePlan(tuple(chunks))
        ledger.charge(request.num_computed_tokens, length)
        ledger.charge_masks(masked and length == remaining)
        # A prompt that is cut has used the budget up: crumbs for the next ones would only hold more half-filled caches.
        cut = cut or length < wanted
        examined += 1
        if examined % ITEMS_PER_SLICE == 0:
            yield
    if not cut:
        yield from _plan_waiting(state, ledger, allowance, chunks, now)
    return OfflinePlan(tuple(chunks))


def whole(slices: Generator[None, None, OfflinePlan]) -> OfflinePlan:
    """The plan of a search that has all the time it wants."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            plan: OfflinePlan = end.value
            return plan


def _plan_decodes(
    running: Sequence[Request], ledger: StepLedger, allowance: OfflineAllowance
) -> tuple[list[PlannedChunk], int]:
    """The decodes before anything else of `running`, at once, if there is room for all of them; and how many of
    `running` need not be looked at any more."""
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
    return [PlannedChunk(request.spec.request_id, 1, running=True) for request in decodes], examined


def _largest(allowance: OfflineAllowance, ledger: StepLedger, start: int, wanted: int, masked: bool) -> int:
    seconds = ledger.seconds + ledger.mask_seconds(masked)
    return allowance.largest(ledger.features, seconds, start, wanted) if ledger.open else 0


def _plan_waiting(
    state: SchedulerState, ledger: StepLedger, allowance: OfflineAllowance, chunks: list[PlannedChunk], now: float
) -> Generator[None, None, None]:
    """Waiting requests in the offline policy's order, while rows, units, tokens and time last."""
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
    """Waiting requests that may be admitted now, looked up one by one: most plans take few.

    One that was evicted often keeps away from online work for a while: it would only be evicted again (E4). Without
    online work nothing else wants the machine, so no timer has to wake anybody when the while is over: either online
    work makes steps, and each looks again, or there is none.
    """
    for request in state.waiting_offline.candidates():
        if now >= request.not_before or not state.has_online:
            yield request


def _may_start(state: SchedulerState, request: Request) -> bool:
    """Return whether the next step has memory for a waiting online request, the blocks of offline work included."""
    held = sum(r.cache_map.num_live for r in state.running[RequestClass.OFFLINE])
    parked = state.cache.parked.num_units(online=False)
    units = state.pool.num_available_units + state.pool.num_deferred_units + parked + UNITS_PER_BLOCK * held
    return request.num_blocks(state.config.block_size) * UNITS_PER_BLOCK <= units


def _expected_online(state: SchedulerState) -> StepLedger:
    """Return the ledger of the next step after the online work that is known now. Prompts end within the time limit of
    the decodes beside them."""
    config = state.config
    ledger = StepLedger(config.max_num_batched_tokens, config.max_num_seqs, state.model)
    decodes, prompts = due(state.running[RequestClass.ONLINE])
    ledger.charge_decodes([request.num_computed_tokens + 1 for request in decodes])
    ledger.charge_masks(num_masked(decodes))
    next_prompt = [request for request in state.waiting_online[:1] if _may_start(state, request)]
    limit = state.objective.tbt * EASY_SHARE if decodes else math.inf
    for request in (*prompts, *next_prompt):
        if ledger.open:
            length = _prompt_length(state, ledger, request, ledger.tokens_left, limit)
            if length > 0:
                ledger.charge(request.num_computed_tokens, length)
                end = request.num_computed_tokens + length
                ledger.charge_masks(end == len(request.token_ids) and end >= request.masked_from)
    return ledger


def _prompt_length(state: SchedulerState, ledger: StepLedger, request: Request, tokens: int, limit: float) -> int:
    """The chunk of an online prompt in a step that should end by `limit`, as `engine.scheduling.prompts` sizes it."""
    start, model = request.num_computed_tokens, state.model
    length = min(len(request.token_ids) - start, tokens)
    if length < 1 or model is None or math.isinf(limit):
        return length
    fits = model.max_prefill(ledger.features, max(0.0, limit - ledger.seconds), length, start)
    if ledger.features.num_prefill_chunks:
        return fits
    return max(fits, min(length, floor_chunk(model, ledger.features, limit, state.config, start)))
