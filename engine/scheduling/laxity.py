"""In which order prompts get the time of the steps: as many as possible have their first token by their deadline.

The prompts that run or wait share one machine. Moore and Hodgson's rule (Moore 1968) leaves out as few of them as
possible: take them by deadline, and whenever one would be late, leave out the longest so far. All objectives are equal,
so the order of deadlines is that of arrival, and laxity (deadline − now − predicted rest) only decides who is left out:
one prompt of many thousand tokens does not make the short ones behind it late. One that is left out, or late already,
comes behind the others, by age; the first of them keeps a floor chunk (see `engine.scheduling.prompts`).

Where several tenants have prompts, this order holds within each tenant (`engine.scheduling.tenants`).

Pure but for reading the scheduler; seconds and tokens. Knows nothing of memory.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, merge
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from engine.api import RequestClass
from engine.config import SchedulerConfig
from engine.request import Request
from engine.scheduling.knapsack import Floats
from engine.scheduling.objective import StepObjective
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import by_age
from predictor.features import BatchFeatures
from predictor.model import LatencyPredictor

EASY_SHARE = 0.8
"""What prompts use of the TBT limit while all of them are on time: steps vary, and a gap that is missed is worth more
than a first token that comes long before its limit."""

FLOOR_SHARE = 0.8
"""What of the TBT limit a step with a floor chunk is expected to take: no margin is kept free for it, and half of all
steps take longer than expected."""

FEW = 64
"""Waiting requests up to which columns do not pay."""

_by_arrival = attrgetter("times.arrival")


@dataclass(frozen=True, slots=True)
class PrefillPace:
    """How fast prompts are computed beside the decodes of now, `chunk` tokens of them in a step.

    `step`: seconds of a step without them; `per_token`: of a prompt's token that shares a full step with others.
    `stretch`: factor by which a prompt of several chunks takes longer, because others share the machine.
    """

    model: LatencyPredictor
    beside: BatchFeatures
    step: float
    chunk: int
    per_token: float
    stretch: float = 1.0

    def seconds(self, start: int, length: int) -> float:
        """For `length` tokens behind `start`. A long prompt attends to its past: the model is linear in the start of a
        chunk up to a window, so the middle one counts for all."""
        if length <= self.chunk:
            return length * self.per_token
        steps, model, beside = self.stretch * length / self.chunk, self.model, self.beside
        parts = model.reach.middles(start, length, self.chunk)
        return sum([steps * share * (self.step + model.marginal(beside, at, self.chunk)) for share, at in parts])

    def seconds_for(self, request: Request) -> float:
        """For what is missing of a request."""
        length = request.num_missing_tokens
        return self.seconds(len(request.token_ids) - length, length)

    def slower(self, factor: float) -> "PrefillPace":
        """The pace on one part in `factor` of the machine."""
        return replace(self, per_token=factor * self.per_token, stretch=factor * self.stretch)


def prefill_pace(state: SchedulerState, tbt_share: float = 1.0) -> PrefillPace | None:
    """The pace of now: the decodes that run leave room for it, and the floor chunk is always given. None: no model.
    `tbt_share`: what of the TBT limit a step may take."""
    model, config = state.model, state.config
    if model is None:
        return None
    beside = BatchFeatures(model.reach)
    decodes = [r for r in state.running[RequestClass.ONLINE] if r.times.first_token is not None]
    beside.add_decodes(len(decodes), model.reach.contexts([len(r.token_ids) for r in decodes]))
    step = model.predict(beside)
    tokens = max(1, config.max_num_batched_tokens - len(decodes))
    chunk = tokens
    if decodes and math.isfinite(state.objective.tbt):
        limit = tbt_share * state.objective.tbt
        chunk = model.max_prefill(beside, max(0.0, limit - step), tokens, 0)
        chunk = max(chunk, min(tokens, floor_chunk(model, beside, limit, config)))
    per_token = (step + model.marginal(beside, 0, chunk)) / chunk
    return PrefillPace(model, beside, step, chunk, per_token)


def floor_chunk(
    model: LatencyPredictor, beside: BatchFeatures, limit: float, config: SchedulerConfig, start: int = 0
) -> int:
    """Tokens that a prompt gets of every step: the least chunk, or what of it fits before `limit` by the time that a
    step with `beside` is expected to take, without the margin; a block at least, however late decodes are."""
    fits = model.expected_prefill(beside, FLOOR_SHARE * limit, config.min_prefill_chunk, start)
    return max(fits, min(config.block_size, config.min_prefill_chunk))


def prompt_slack(state: SchedulerState, find_pace: Callable[[], PrefillPace | None], now: float) -> float:
    """Seconds that the online prompts can still lose before one of them is late, what they and those before them need
    taken off; ≥ 0. They are computed one after the other, in the order of their deadlines, which is that of age."""
    ttft, waiting = state.objective.ttft, state.waiting_online
    if math.isinf(ttft) or state.model is None:
        return math.inf
    oldest = next((request.times for request in waiting if request.times.first_token is None), None)
    if oldest is not None and oldest.arrival + ttft <= now:
        return 0.0
    pace = find_pace()
    assert pace is not None, "there is a model"
    running = [request for request in state.running_prompts() if request.times.first_token is None]
    if len(waiting) <= FEW:
        return _slack_of(merge(running, waiting, key=by_age), pace, ttft, now)
    places = [waiting.place(request) for request in running]
    due = np.insert(waiting.columns.arrivals, places, [request.times.arrival for request in running]) + ttft

    def slack(work: Floats) -> float:
        """With so many seconds for each that waits. Who was preempted in the middle of its answer does not count."""
        spans = np.insert(work, places, [pace.seconds_for(request) for request in running])
        ends = np.concatenate(((now + pace.step,), spans)).cumsum()[1:]
        return float((due - ends).min())

    work: Floats = waiting.columns.missing * np.float64(pace.per_token)
    for index in np.flatnonzero(waiting.columns.began).tolist():
        request = waiting[index]
        if request.times.first_token is not None:
            work[index] = 0.0
            due[index + sum([place <= index for place in places])] = math.inf
        else:
            work[index] = pace.seconds_for(request)
    if slack(work) <= 0.0:
        return 0.0  # (a prompt of several chunks takes longer than so: its past grows)
    for index in np.flatnonzero((waiting.columns.missing > pace.chunk) & ~waiting.columns.began).tolist():
        work[index] = pace.seconds_for(waiting[index])
    return max(0.0, slack(work))


def _slack_of(requests: Iterable[Request], pace: PrefillPace, ttft: float, now: float) -> float:
    """The same, one by one: of a few that is several times faster."""
    slack, end = math.inf, now + pace.step
    for request in requests:
        if request.times.first_token is None:
            end += pace.seconds_for(request)
            slack = min(slack, request.times.arrival + ttft - end)
    return max(0.0, slack)


def on_time(jobs: Sequence[tuple[float, float]], begin: float = 0.0) -> list[bool]:
    """Which of the jobs (seconds until due, seconds of work), ascending by the former, one machine does in time from
    `begin` on: as many as possible (Moore and Hodgson). Those that are left out are done behind the others."""
    taken = [True] * len(jobs)
    longest: list[tuple[float, int]] = []
    end = begin
    for index, (due, work) in enumerate(jobs):
        end += work
        heappush(longest, (-work, -index))  # of equals the one that came last
        if end > due:
            work, last = heappop(longest)
            end += work
            taken[-last] = False
    return taken


class PromptOrder(NamedTuple):
    """`urgent` go first, in this order; of `behind` the first keeps a floor chunk."""

    urgent: Iterable[Request]
    behind: Sequence[Request]


def order_prompts(
    requests: list[Request], objective: StepObjective, pace: PrefillPace | None, now: float
) -> PromptOrder:
    """`requests`, ascending by age, by urgency. A preempted one, in the middle of an answer whose first token was in
    time, goes first. Without a pace, only those that are late already come behind."""
    ttft = objective.ttft
    cut = bisect_left(requests, now - ttft, key=_by_arrival)
    late, live = requests[:cut], requests[cut:]
    answering = [request for request in requests if request.times.first_token is not None]
    urgent: list[Request] = []
    if answering:
        late, live = ([r for r in group if r.times.first_token is None] for group in (late, live))
        for request in answering:
            assert request.times.first_token is not None
            (late if request.times.first_token - request.times.arrival > ttft else urgent).append(request)
        late.sort(key=by_age)
    if pace is None:
        return PromptOrder(urgent + live, late)
    begin = pace.step + sum(pace.seconds_for(request) for request in urgent)
    jobs = [(request.times.arrival + ttft - now, pace.seconds_for(request)) for request in live]
    missed: list[Request] = []
    for request, taken in zip(live, on_time(jobs, begin), strict=True):
        (urgent if taken else missed).append(request)
    return PromptOrder(urgent, sorted([*late, *missed], key=by_age) if answering else late + missed)


def uses_laxity(state: SchedulerState) -> bool:
    """Whether prompts go by urgency: the policy says so, and there is something to be late for."""
    return state.online_policy.by_laxity and math.isfinite(state.objective.ttft)
