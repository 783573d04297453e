"""Urgency: the order of prompts, the requests whose wait is over, and those that are preempted when memory is short.

**Prompt order.** As many prompts as possible get their first token by their deadline. The Moore-Hodgson rule (Moore
1968) minimises the number of late jobs on one machine: take jobs by deadline, and whenever one would be late, leave out
the longest job so far. Without promises to single requests deadline order is arrival order, and laxity (deadline − now
− predicted remaining work) only decides which prompts are left out. These, and prompts that are already late, follow
the others by arrival; the first gets a floor chunk (see `engine.scheduling.step`). Units are seconds and
tokens; memory is not considered.

**Maximum wait** (`--max-queue-time`) under policies that let younger requests overtake. A request is due the maximum
wait after its arrival, or after its last token if it was preempted; a promise to the request may shorten or lengthen
that wait. A policy is free while every waiting request would start in time behind those that are due earlier. When one
that has waited PATIENCE of the maximum would not, it and all that are due earlier start next, in this order, and no
other request starts. Tenants that compete are not bound by this: fair sharing decides between them.

**Victims.** A step preempts few requests, offline ones first, and none that it contains.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heappop, heappush, merge
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from engine.api import RequestClass
from engine.arrays import FloatArray, IntArray
from engine.cache.blocks import CacheBlock, count_units
from engine.cache.cache import Claim
from engine.limits import UNITS_PER_BLOCK, SchedulerConfig
from engine.request import Request
from engine.scheduling.objective import EASY_SHARE, StepObjective
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import by_age
from predictor.budget import DEFAULT_OUTPUT
from predictor.features import BatchFeatures, LatencyPredictor

FLOOR_SHARE = 0.8
"""Share of the TBT limit that a step with a floor chunk is expected to take.

No latency margin is added for a floor chunk, and half of all steps take longer than expected.
"""

ARRIVALS = 1.1
"""Factor on the time of prompts when a step leaves a part of the TBT limit unused: further prompts may arrive."""

FEW = 64
"""Up to this many waiting requests a plain loop is faster than NumPy columns."""

_by_arrival = attrgetter("times.arrival")


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """Speed of prefill beside the current decodes.

    Attributes:
        beside: Features of the decodes in each step.
        step: Seconds of a step without prompts.
        chunk: Prompt tokens per step.
        per_token: Seconds per prompt token in a full step shared with other prompts.
        stretch: Factor by which a prompt of several chunks is slowed down by other tenants.
    """

    model: LatencyPredictor
    beside: BatchFeatures
    step: float
    chunk: int
    per_token: float
    stretch: float = 1.0

    def seconds(self, start: int, length: int) -> float:
        """Return the seconds for `length` tokens behind `start`.

        The model is linear in the start of a chunk up to a window, so the middle chunk represents all.
        """
        if length <= self.chunk:
            return length * self.per_token
        steps, model, beside = self.stretch * length / self.chunk, self.model, self.beside
        parts = model.reach.middles(start, length, self.chunk)
        return sum([steps * share * (self.step + model.marginal(beside, at, self.chunk)) for share, at in parts])

    def seconds_for(self, request: Request) -> float:
        """Return the seconds for the missing tokens of a request."""
        length = request.num_missing_tokens
        return self.seconds(len(request.token_ids) - length, length)

    def slower(self, factor: float) -> "PrefillPace":
        """Return the pace with 1/`factor` of the machine."""
        return replace(self, per_token=factor * self.per_token, stretch=factor * self.stretch)


def easy_share(state: SchedulerState) -> float:
    """Return the share of the gap limit that the work of a step should take."""
    return state.strict_share if state.gap_limit < state.objective.tbt else EASY_SHARE


def prefill_pace(state: SchedulerState, tbt_share: float = 1.0, *, likely: bool = False) -> PrefillPace | None:
    """Return the prefill pace beside the running decodes, never below the floor chunk, or None without a model.

    Chunks are sized with the safety margin of a single step, and take the time of a step without it: a prompt takes
    many steps. `tbt_share`: share of the TBT limit that a step may take. `likely`: at the likely speed of the machine,
    chunks without the margin.
    """
    model, config = state.model, state.config
    if model is None:
        return None
    if likely:
        model = model.likely()
    beside = BatchFeatures(model.reach)
    decodes = [r for r in state.running[RequestClass.ONLINE] if r.times.first_token is not None]
    beside.add_decodes(len(decodes), model.reach.contexts([len(r.token_ids) for r in decodes]))
    tokens = max(1, config.max_num_batched_tokens - len(decodes))
    chunk = tokens
    if decodes and math.isfinite(gap := state.gap_limit):
        limit = tbt_share * gap
        chunk = model.max_prefill(beside, max(0.0, limit - model.predict(beside)), tokens, 0)
        chunk = max(chunk, min(tokens, floor_chunk(model, beside, limit, config)))
    steady = model.steady()
    step = steady.predict(beside)
    per_token = (step + steady.marginal(beside, 0, chunk)) / chunk
    return PrefillPace(steady, beside, step, chunk, per_token)


def floor_chunk(
    model: LatencyPredictor, beside: BatchFeatures, limit: float, config: SchedulerConfig, start: int = 0
) -> int:
    """Return the prompt tokens that every step may hold, however late its decodes are; at least one block.

    This is `min_prefill_chunk`, or fewer tokens if more would exceed FLOOR_SHARE of `limit` by the expected time of a
    step with `beside`, without the margin.
    """
    fits = model.expected_prefill(beside, FLOOR_SHARE * limit, config.min_prefill_chunk, start)
    return max(fits, min(config.block_size, config.min_prefill_chunk))


def prompt_share(state: SchedulerState, full: PrefillPace | None, now: float) -> float:
    """Return the share of the TBT limit that a step with prompts may take beside decodes.

    It is the least of the easy share, the middle between it and the whole limit, and the whole limit at which as many
    prompts are on time as at the whole limit (`full`): a fuller step risks the gap of each decode beside it, and a
    prompt that is late anyway gains nothing from it. In a long queue only prompts that are all on time are detected.
    """
    easy = easy_share(state)

    def find_pace(share: float) -> PrefillPace | None:
        pace = prefill_pace(state, share)
        return None if pace is None else pace.slower(ARRIVALS)

    if prompt_slack(state, partial(find_pace, easy), now) > 0.0:
        return easy
    if full is None or len(state.waiting_online) > FEW:
        return 1.0
    most = _num_on_time(state, full, now)
    middle = (1.0 + easy) / 2.0
    for share in (easy, middle):
        pace = find_pace(share)
        if pace is not None and _num_on_time(state, pace, now) >= most:
            return share
    return 1.0


def _num_on_time(state: SchedulerState, pace: PrefillPace, now: float) -> int:
    """Return how many prompts without a first token can be on time at this pace, after those that have one."""
    prompts = [*state.running_prompts(), *state.waiting_online]
    begin = pace.step + sum([pace.seconds_for(r) for r in prompts if r.times.first_token is not None])
    jobs = [
        (state.objective.first_due(request, pace.step) - now, pace.seconds_for(request))
        for request in prompts
        if request.times.first_token is None
    ]
    return sum(on_time(sorted(jobs), begin))


def prompt_slack(state: SchedulerState, find_pace: Callable[[], PrefillPace | None], now: float) -> float:
    """Return the seconds, ≥ 0, that the online prompts can be delayed before one is late.

    Prompts are computed one after the other in deadline order.
    """
    ttft, waiting = state.objective.ttft, state.waiting_online
    if state.model is None or (math.isinf(ttft) and not state.promised):
        return math.inf
    oldest = next((request.times for request in waiting if request.times.first_token is None), None)
    if not state.promised and oldest is not None and oldest.arrival + ttft <= now:
        return 0.0
    pace = find_pace()
    assert pace is not None, "there is a model"
    if state.promised:
        every = (r for r in (*state.running_prompts(), *waiting) if r.times.first_token is None)
        dues = [(state.objective.first_due(request, pace.step), request) for request in every]
        return _slack_of(sorted(dues, key=itemgetter(0)), pace, now)
    running = [request for request in state.running_prompts() if request.times.first_token is None]
    if len(waiting) <= FEW:
        prompts = (request for request in merge(running, waiting, key=by_age) if request.times.first_token is None)
        return _slack_of(((request.times.arrival + ttft, request) for request in prompts), pace, now)
    places = [waiting.place(request) for request in running]
    due = np.insert(waiting.columns.arrivals, places, [request.times.arrival for request in running]) + ttft

    def slack(work: FloatArray) -> float:
        """Return the slack for `work` seconds per waiting request; requests with a first token are ignored."""
        spans = np.insert(work, places, [pace.seconds_for(request) for request in running])
        ends = np.concatenate(((now + pace.step,), spans)).cumsum()[1:]
        return float((due - ends).min())

    work: FloatArray = waiting.columns.missing * np.float64(pace.per_token)
    for index in np.flatnonzero(waiting.columns.began).tolist():
        request = waiting[index]
        if request.times.first_token is not None:
            work[index] = 0.0
            due[index + sum([place <= index for place in places])] = math.inf
        else:
            work[index] = pace.seconds_for(request)
    if slack(work) <= 0.0:
        return 0.0  # already late with a lower bound: a prompt of several chunks takes longer than this
    for index in np.flatnonzero((waiting.columns.missing > pace.chunk) & ~waiting.columns.began).tolist():
        work[index] = pace.seconds_for(waiting[index])
    return max(0.0, slack(work))


def urgent_slack(state: SchedulerState, urgent: Iterable[Request], pace: PrefillPace, now: float) -> float:
    """Return the seconds that these prompts, computed in this order, can be delayed before one is late; at least 0.

    A prompt with a first token takes its time, but is not late.
    """
    objective = state.objective
    dues = [math.inf if r.times.first_token is not None else objective.first_due(r, pace.step) for r in urgent]
    return _slack_of(zip(dues, urgent, strict=True), pace, now)


def _slack_of(dues: Iterable[tuple[float, Request]], pace: PrefillPace, now: float) -> float:
    """Return the slack by a plain loop, which is several times faster for a few requests."""
    slack, end = math.inf, now + pace.step
    for due, request in dues:
        end += pace.seconds_for(request)
        slack = min(slack, due - end)
    return max(0.0, slack)


def on_time(jobs: Sequence[tuple[float, float]], begin: float = 0.0) -> list[bool]:
    """Return which jobs one machine completes in time, as many as possible (Moore and Hodgson).

    `jobs` are (seconds until due, seconds of work), ascending by due time. The machine is free from `begin` on. The
    jobs left out run behind the others.
    """
    taken = [True] * len(jobs)
    longest: list[tuple[float, int]] = []
    end = begin
    for index, (due, work) in enumerate(jobs):
        end += work
        heappush(longest, (-work, -index))  # of equal jobs the last one
        if end > due:
            work, last = heappop(longest)
            end += work
            taken[-last] = False
    return taken


class PromptOrder(NamedTuple):
    """`urgent` prompts go first, in this order. The first of `behind` gets a floor chunk."""

    urgent: Iterable[Request]
    behind: Sequence[Request]


def order_prompts(
    requests: list[Request], objective: StepObjective, pace: PrefillPace | None, now: float, *, promised: bool = False
) -> PromptOrder:
    """Order `requests`, ascending by arrival, by urgency.

    A preempted request whose first token was in time goes first. Without a pace, only requests that are already late
    come behind.
    """
    step, ttft = 0.0 if pace is None else pace.step, objective.ttft
    cut = bisect_left(requests, now - ttft, key=_by_arrival)
    late, live = requests[:cut], requests[cut:]
    if promised:
        live = sorted(requests, key=lambda request: objective.first_due(request, step))
        cut = bisect_left(live, now, key=lambda request: objective.first_due(request, step))
        late, live = sorted(live[:cut], key=by_age), live[cut:]
    answering = [request for request in requests if request.times.first_token is not None]
    urgent: list[Request] = []
    if answering:
        late, live = ([r for r in group if r.times.first_token is None] for group in (late, live))
        for request in answering:
            (late if objective.is_late(request, now) else urgent).append(request)
        late.sort(key=by_age)
    if pace is None:
        return PromptOrder(urgent + live, late)
    begin = pace.step + sum(pace.seconds_for(request) for request in urgent)
    if promised:
        jobs = [(objective.first_due(request, step) - now, pace.seconds_for(request)) for request in live]
    else:
        jobs = [(request.times.arrival + ttft - now, pace.seconds_for(request)) for request in live]
    missed: list[Request] = []
    for request, taken in zip(live, on_time(jobs, begin), strict=True):
        (urgent if taken else missed).append(request)
    return PromptOrder(urgent, sorted([*late, *missed], key=by_age) if answering or promised else late + missed)


def uses_laxity(state: SchedulerState) -> bool:
    """Return whether prompts are ordered by urgency: the policy asks for it and a first token has a deadline."""
    return state.online_policy.by_laxity and (math.isfinite(state.objective.ttft) or bool(state.promised))


Counts = IntArray | int
PATIENCE = 0.25
"""Share of the maximum wait for which no request counts as overdue.

A short request may be accepted although a long queue is due before it, because its policy starts it at once.
"""


class QueueWork(NamedTuple):
    """The waiting online requests in arrival order, one element per request.

    Attributes:
        since: Time of the last token, or of the arrival.
        limits: Maximum wait in seconds.
        seconds: Seconds for its missing tokens.
        blocks: Cache blocks that it needs to start.
    """

    since: FloatArray
    limits: FloatArray
    seconds: FloatArray
    blocks: IntArray

    @classmethod
    def of(cls, state: SchedulerState, pace: PrefillPace) -> "QueueWork":
        waiting, size = state.waiting_online, state.config.block_size
        columns = waiting.columns
        since = columns.arrivals.copy()
        limits: FloatArray = np.full(len(since), longest_queue_time(state))
        for index, request in enumerate(waiting) if state.promised else ():
            limits[index] = longest_queue_time(state, request)
        seconds: FloatArray = columns.missing * np.float64(pace.per_token)
        blocks = np.minimum(columns.lengths // size + 1, state.config.most_blocks)
        for index in np.flatnonzero(columns.began | (columns.missing > pace.chunk)).tolist():
            request = waiting[index]
            seconds[index] = pace.seconds_for(request)
            blocks[index] = request.num_blocks(size)
            if request.times.last_token is not None:
                since[index] = request.times.last_token
        return cls(since, limits, seconds, blocks)


def overdue(state: SchedulerState, pace: PrefillPace | None, now: float) -> list[Request]:
    """Return the waiting requests that must start before any other, in order; usually none. Ask `binds` first."""
    if pace is None:
        return []
    work = QueueWork.of(state, pace)
    waited_long = now - work.since >= PATIENCE * work.limits
    if not waited_long.any():
        return []
    order = np.argsort(work.since + work.limits, kind="stable")
    late = np.flatnonzero((waited_long & (slack(state, work, pace, now) <= 0.0))[order])
    return [state.waiting_online[index] for index in order[: late[-1] + 1].tolist()] if len(late) else []


def longest_queue_time(state: SchedulerState, request: Request | None = None) -> float:
    """Return the maximum wait of an online request in seconds; without `request` that of the default class."""
    promise = None if request is None else request.spec.promise
    if promise is None:
        return state.queue_time.longest(state.objective.ttft)
    return min(state.queue_time.longest(promise.ttft), promise.e2e)


def binds(state: SchedulerState) -> bool:
    """Return whether the policy may let a younger request overtake a waiting one that has a maximum wait."""
    policy = state.online_policy
    overtakes = policy.select is not None or policy.by_laxity or policy.order is not None
    limited = math.isfinite(longest_queue_time(state)) or bool(state.promised)
    return overtakes and limited and bool(state.waiting_online) and not state.online_share.is_contested


def slack(state: SchedulerState, work: QueueWork, pace: PrefillPace, now: float) -> FloatArray:
    """Return how long each waiting request can be delayed without exceeding its maximum wait, in arrival order.

    Requests start in the order in which they are due.
    """
    due = work.since + work.limits
    order = np.argsort(due, kind="stable")
    seconds = work.seconds[order].cumsum() - work.seconds[order] + prompt_seconds(state, pace)
    memory = memory_wait(state, pace, work.blocks[order].cumsum(), np.arange(1, len(order) + 1))
    found: FloatArray = np.empty(len(order))
    found[order] = due[order] - now - (pace.step + seconds + memory)
    return found


def prompt_seconds(state: SchedulerState, pace: PrefillPace) -> float:
    """Return the seconds for the prompts in progress."""
    return sum([pace.seconds_for(request) for request in state.running_prompts()])


def memory_wait(state: SchedulerState, pace: PrefillPace, blocks: Counts, requests: Counts) -> FloatArray:
    """Return the seconds until rows and memory are free for `requests` more requests that need `blocks` blocks.

    Both are freed evenly over the time of one answer, in steps as large as memory allows. A request holds half of its
    answer on average.
    """
    config, running = state.config, state.running[RequestClass.ONLINE]
    answer = answer_tokens(state)
    held = sum([request.num_blocks(config.block_size) for request in running])
    needed = blocks + held + requests * (answer / 2.0 / config.block_size)
    units = (UNITS_PER_BLOCK * needed - state.pool.num_units) / state.pool.num_units
    rows = (requests + len(running) - config.max_num_seqs) / config.max_num_seqs
    lack: FloatArray = np.maximum(np.maximum(rows, units), 0.0)
    most = float(np.max(lack))
    if most == 0.0:
        return lack
    decodes = round((int(np.max(requests)) + len(running)) / (1.0 + most))
    step = BatchFeatures(pace.model.reach)
    step.add_decodes(decodes, state.pool.num_units // UNITS_PER_BLOCK * config.block_size)
    return lack * answer * pace.model.predict(step)


def answer_tokens(state: SchedulerState) -> float:
    """Return the mean output tokens of online answers, an assumption before the first one has ended."""
    return state.mean_output if state.num_answers else DEFAULT_OUTPUT


def victims_for_start(
    state: SchedulerState, step_id: int, request: Request, claim: Claim, missing: int, *, online: bool
) -> list[Request]:
    """Return the offline requests that step `step_id` preempts so that `request` gets `missing` more units and a row.

    Empty if all candidates are not enough. Requests preempted `max_offline_preemptions` times are chosen only if the
    others do not suffice. `online`: whether parked blocks of other waiting online requests may be moved, too.
    """
    limit, spared = state.config.max_offline_preemptions, frozenset(claim.hits)
    held = state.cache.parked.references(online=online, but=request)
    movable = (block for block, count in held.items() if count == block.ref_count and block not in spared)
    missing -= count_units(movable)
    victims = [r for r in state.running[RequestClass.OFFLINE] if r.last_step != step_id]
    seldom = [victim for victim in victims if victim.num_preemptions < limit]
    chosen = _smallest_victims(seldom, missing, held, spared)
    if not chosen and len(seldom) < len(victims):
        chosen = _smallest_victims(victims, missing, held, spared)
    return chosen


def victim_for_running(state: SchedulerState, step_id: int, request: Request, now: float) -> Request | None:
    """Return the request to preempt for a running one, possibly the request itself, but none already in step `step_id`.

    Offline requests go first, then the last in order: the newest, or the last by lane and arrival for an offline
    request.
    """
    online = request.request_class is RequestClass.ONLINE
    if online and (victim := offline_victim(state, step_id)) is not None:
        return victim
    offline = state.running[RequestClass.OFFLINE]
    peers = state.running_online(now) if online else sorted(offline, key=lambda r: r.spec.lane)
    return next((each for each in reversed(peers) if each is request or each.last_step != step_id), None)


def offline_victim(state: SchedulerState, step_id: int) -> Request | None:
    """Return the offline request to preempt first, or None if all are in step `step_id`.

    It is of the last lane, then rarely preempted, small and new.
    """
    candidates = (r for r in state.running[RequestClass.OFFLINE] if r.last_step != step_id)
    key = lambda r: (-r.spec.lane, r.num_preemptions, len(r.cache_map.blocks), -r.arrival_order)  # noqa: E731
    return min(candidates, key=key, default=None)


def _smallest_victims(
    candidates: Sequence[Request], units: int, held: Mapping[CacheBlock, int], spared: Collection[CacheBlock]
) -> list[Request]:
    """Return the requests to preempt to free `units` units; empty if all candidates together hold fewer.

    If one request suffices, only one is chosen: of the last lane, then least often preempted, smallest, newest.
    Otherwise the largest go first. A shared block counts when its last holder loses it.

    Args:
        held: References by parked blocks that are given up as well.
        spared: Blocks that are never freed.
    """
    sizes = [(freed_units(request, spared), request) for request in candidates]
    enough = [((-r.spec.lane, r.num_preemptions, freed, -r.arrival_order), r) for freed, r in sizes if freed >= units]
    if enough:
        return [min(enough, key=lambda item: item[0])[1]]
    sizes.sort(key=lambda item: (-item[1].spec.lane, item[1].num_preemptions, -item[0], -item[1].arrival_order))
    lost, chosen = Counter(held), []
    for _, request in sizes:
        chosen.append(request)
        for block in request.cache_map.blocks:
            lost[block] += 1
            if lost[block] == block.ref_count and block not in spared:
                units -= len(block.entry.units)
        if units <= 0:
            return chosen
    return []


def freed_units(request: Request, spared: Collection[CacheBlock] = frozenset()) -> int:
    """Return the units that preempting a running request frees."""
    return count_units(b for b in request.cache_map.blocks if b.ref_count == 1 and b not in spared)
