"""The order in which prompts get step time: as many as possible get their first token by their deadline.

The Moore-Hodgson rule (Moore 1968) minimises the number of late jobs on one machine: take jobs by deadline, and
whenever one would be late, leave out the longest job so far. Without promises to single requests deadline order is
arrival order, and laxity (deadline − now − predicted remaining work) only decides which prompts are left out. These,
and prompts that are already late, follow the others by arrival; the first of them gets a floor chunk (see
`engine.scheduling.prompts`). Units are seconds and tokens; memory is not considered.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush, merge
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np

from engine.api import RequestClass
from engine.arrays import FloatArray
from engine.limits import SchedulerConfig
from engine.request import Request
from engine.scheduling.objective import EASY_SHARE, StepObjective
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import by_age
from predictor.features import BatchFeatures, LatencyPredictor

FLOOR_SHARE = 0.8
"""Share of the TBT limit that a step with a floor chunk is expected to take.

No latency margin is added for a floor chunk, and half of all steps take longer than expected.
"""

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

    `tbt_share`: share of the TBT limit that a step may take. `likely`: without the safety margins of step times.
    """
    model, config = state.model, state.config
    if model is None:
        return None
    if likely:
        model = model.likely()
    beside = BatchFeatures(model.reach)
    decodes = [r for r in state.running[RequestClass.ONLINE] if r.times.first_token is not None]
    beside.add_decodes(len(decodes), model.reach.contexts([len(r.token_ids) for r in decodes]))
    step = model.predict(beside)
    tokens = max(1, config.max_num_batched_tokens - len(decodes))
    chunk = tokens
    if decodes and math.isfinite(gap := state.gap_limit):
        limit = tbt_share * gap
        chunk = model.max_prefill(beside, max(0.0, limit - step), tokens, 0)
        chunk = max(chunk, min(tokens, floor_chunk(model, beside, limit, config)))
    per_token = (step + model.marginal(beside, 0, chunk)) / chunk
    return PrefillPace(model, beside, step, chunk, per_token)


def floor_chunk(
    model: LatencyPredictor, beside: BatchFeatures, limit: float, config: SchedulerConfig, start: int = 0
) -> int:
    """Return the prompt tokens that every step may hold, however late its decodes are; at least one block.

    This is `min_prefill_chunk`, or fewer tokens if more would exceed FLOOR_SHARE of `limit` by the expected time of a
    step with `beside`, without the margin.
    """
    fits = model.expected_prefill(beside, FLOOR_SHARE * limit, config.min_prefill_chunk, start)
    return max(fits, min(config.block_size, config.min_prefill_chunk))


def prompt_slack(state: SchedulerState, find_pace: Callable[[], PrefillPace | None], now: float) -> float:
    """Return the seconds, ≥ 0, that the online prompts can be delayed before one is late.

    Prompts are computed one after the other in deadline order.
    """
    ttft, waiting = state.objective.ttft, state.waiting_online
    if state.model is None or (math.isinf(ttft) and not state.promised):
        return math.inf
    if state.promised:
        return _promised_slack(state, find_pace(), now)
    oldest = next((request.times for request in waiting if request.times.first_token is None), None)
    if oldest is not None and oldest.arrival + ttft <= now:
        return 0.0
    pace = find_pace()
    assert pace is not None, "there is a model"
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


def _promised_slack(state: SchedulerState, pace: PrefillPace | None, now: float) -> float:
    """Return the slack if the deadlines of requests differ."""
    assert pace is not None, "there is a model"
    prompts = [r for r in (*state.running_prompts(), *state.waiting_online) if r.times.first_token is None]
    dues = [(state.objective.first_due(request, pace.step), request) for request in prompts]
    return _slack_of(sorted(dues, key=itemgetter(0)), pace, now)


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
