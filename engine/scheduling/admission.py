"""Admission control: whether a request can run at all, and whether an online arrival is queued or refused (429).

The expected wait of an arrival is the work ahead of it in prompt order (see `engine.scheduling.laxity`). Where several
tenants have requests, fair sharing decides which of their prompts are ahead. The work ahead consists of prompt tokens,
and of rows and memory that become free as running requests end. The latency model supplies the times; without a model
the expected wait is zero.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np

from engine.api import EngineRequest, Lane, RequestClass, RequestTimes, SamplingParams
from engine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.laxity import (
    PrefillPace,
    PromptOrder,
    order_prompts,
    prefill_pace,
    uses_laxity,
)
from engine.scheduling.state import SchedulerState
from engine.scheduling.tenants import order_tenants

FORGETTING = 0.05
FLEX_RETRY_SECONDS = 5.0
DEFAULT_RETRY_SECONDS = 1.0
SMALLEST = EngineRequest("", (0,), SamplingParams(max_tokens=1))
"""The smallest possible request: if it is refused, so is every other."""


def check_length(spec: EngineRequest, max_model_len: int) -> None:
    """Validate the length of a request.

    Raises:
        InvalidRequestError: The prompt is empty.
        ContextLengthError: Prompt and output together exceed `max_model_len`.
    """
    prompt = len(spec.prompt_token_ids)
    output = spec.sampling.max_tokens if spec.pooling is None else 0
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt", code="invalid_value")
    if prompt + output > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens; the prompt has {prompt} and {output} more were asked for."
        )


class Admission:
    """Decides which requests are queued."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def check(self, request: Request, now: float) -> None:
        """Raise an error if the request must not be queued.

        Raises:
            InvalidRequestError, ContextLengthError: The request can never run.
            QueueFullError: The queue is full or the expected wait is too long.
        """
        check_length(request.spec, self._state.config.max_model_len)
        if request.request_class is RequestClass.ONLINE:
            request.num_expected_hits = len(self._state.cache.find_prefix(request)) * self._state.config.block_size
            self._check_online(request, now)
        elif request.spec.lane is Lane.FLEX:
            self._check_flex(request.spec)

    def check_any(self, request_class: RequestClass, tenant: str, now: float) -> None:
        """Raise QueueFullError if even the smallest request of this class and tenant would be refused now."""
        if request_class is RequestClass.ONLINE:
            self._check_online(Request(replace(SMALLEST, tenant=tenant), RequestTimes(arrival=now), sys.maxsize), now)

    def note_end(self, request: Request) -> None:
        """Update the mean lengths of online prompts and answers."""
        if request.request_class is not RequestClass.ONLINE or request.spec.probe:
            return
        state = self._state
        state.mean_prompt += FORGETTING * (request.num_prompt_tokens - state.mean_prompt)
        if request.spec.pooling is None:
            state.mean_output += FORGETTING * (request.num_output_tokens - state.mean_output)

    def _check_online(self, request: Request, now: float) -> None:
        try:
            check_room(self._state, request, now)
        except QueueFullError:
            self._state.counters.refused_requests += 1
            raise

    def _check_flex(self, spec: EngineRequest) -> None:
        """Refuse a flex request if `max_num_waiting` requests wait and its tenant has its equal share.

        Batch lines are not limited here: a batch bounds its own lines.
        """
        limit = self._state.config.max_num_waiting
        if self._state.waiting_offline.is_full(spec.lane, spec.tenant, limit):
            raise QueueFullError(f"{limit} flex requests are waiting already.", retry_after=FLEX_RETRY_SECONDS)


def check_room(state: SchedulerState, request: Request, now: float) -> None:
    """Refuse an online request if the queue is full or the expected wait exceeds `max_queue_time`.

    The expected wait is the work ahead of the request, without its own prompt, so an idle server refuses no request.

    Raises:
        QueueFullError: With the time after which the request would fit.
    """
    waiting = len(state.waiting_online)
    if waiting >= state.config.max_num_waiting and not _has_part(state, request.spec.tenant):
        raise QueueFullError(f"{waiting} requests are waiting already.", retry_after=next_start(state))
    limit = state.queue_time.longest(state.objective.ttft)
    if math.isinf(limit) or longest_wait(state, request) <= limit:
        return
    wait = expected_wait(state, request, now)
    if wait > limit:
        raise QueueFullError(
            f"It could start in about {wait:.2g} s, and the longest time to wait is {limit:.4g} s.",
            retry_after=wait - limit,
        )


def _has_part(state: SchedulerState, tenant: str) -> bool:
    """Return whether a tenant has less than its equal share of a full queue."""
    waiting = Counter(request.spec.tenant for request in state.waiting_online)
    others = len(waiting.keys() - {tenant})
    return others > 0 and waiting[tenant] < state.config.max_num_waiting // (others + 1)


def next_start(state: SchedulerState) -> float:
    """Return the seconds until the first waiting request starts.

    The prompts in progress must be done. If a row or memory is missing, a running answer must also end.
    """
    pace, running = prefill_pace(state), state.running[RequestClass.ONLINE]
    if pace is None or not state.waiting_online:
        return DEFAULT_RETRY_SECONDS
    prompts = sum(pace.seconds_for(request) for request in state.running_prompts())
    has_room = (
        state.free_rows and _units(state.waiting_online[0], state.config.block_size) <= state.pool.num_available_units
    )
    if has_room or not running:
        return prompts + pace.step
    return max(prompts, state.mean_output * pace.step / len(running)) + pace.step


def expected_wait(state: SchedulerState, request: Request, now: float) -> float:
    """Return the seconds until a request that arrives now could start.

    The mean length of recent online answers gives an estimate of the release of rows and memory.
    """
    pace = _pace_of_crowd(state)
    if pace is None:
        return 0.0
    ahead = _ahead(state, request, pace, now)
    waiting = [other for other in ahead if other.row < 0]
    blocks = sum(other.num_blocks(state.config.block_size) for other in waiting)
    crowd = _Crowd(sum(pace.seconds_for(other) for other in ahead), len(waiting), blocks)
    return _wait_behind(state, request, crowd, pace)


def longest_wait(state: SchedulerState, request: Request) -> float:
    """Return an upper bound of `expected_wait` without computing the prompt order."""
    pace = _pace_of_crowd(state)
    if pace is None:
        return 0.0
    waiting, block_size = state.waiting_online, state.config.block_size
    columns = waiting.columns
    asked = columns.began | (columns.missing > pace.chunk)
    others = [*state.running_prompts(), *[waiting[index] for index in np.flatnonzero(asked).tolist()]]
    work = float(columns.missing[~asked].sum()) * pace.per_token + sum(pace.seconds_for(other) for other in others)
    blocks = int(np.minimum(columns.lengths // block_size + 1, state.config.most_blocks)[~columns.began].sum())
    blocks += sum(waiting[index].num_blocks(block_size) for index in np.flatnonzero(columns.began).tolist())
    return _wait_behind(state, request, _Crowd(work, len(waiting), blocks), pace)


class _Crowd(NamedTuple):
    """The requests ahead of an arrival: seconds of work, number of waiting requests and the blocks that these need."""

    work: float
    num_waiting: int
    blocks: int


def _pace_of_crowd(state: SchedulerState) -> PrefillPace | None:
    """Return the prefill pace, or None if no online request is present or there is no latency model."""
    return prefill_pace(state) if state.running[RequestClass.ONLINE] or state.waiting_online else None


def _wait_behind(state: SchedulerState, request: Request, crowd: _Crowd, pace: PrefillPace) -> float:
    """Return the seconds until `request` starts behind `crowd`.

    Rows and units are freed evenly over the time of one answer.
    """
    config, running = state.config, state.running[RequestClass.ONLINE]
    blocks = crowd.blocks + sum(other.num_blocks(config.block_size) for other in (*running, request))
    units = UNITS_PER_BLOCK * blocks - state.pool.num_units
    rows = len(running) + crowd.num_waiting + 1
    lack = max((rows - config.max_num_seqs) / config.max_num_seqs, 0.0)
    lack = max(lack, units / state.pool.num_units)
    step = pace.per_token * pace.chunk if crowd.work else pace.step
    return max(pace.step + crowd.work if crowd.work else 0.0, lack * state.mean_output * step)


def _ahead(state: SchedulerState, request: Request, pace: PrefillPace, now: float) -> list[Request]:
    """Return the prompts, running or waiting, that precede a request that arrives now."""
    running, waiting = state.running_prompts(), state.waiting_online
    share = state.online_share.with_arrival(request.spec.tenant)
    laxity = uses_laxity(state)
    if not laxity and not share.is_contested:
        return [*running, *waiting]
    if not laxity:
        order = order_tenants([*waiting, request], share, None, lambda group, _: PromptOrder((), group))
        return [*running, *_before(order.urgent, request)]
    both = [*waiting.with_others(running), request]

    def by_urgency(requests: list[Request], pace: PrefillPace | None) -> PromptOrder:
        return order_prompts(requests, state.objective, pace, now)

    order = order_tenants(both, share, pace, by_urgency) if share.is_contested else by_urgency(both, pace)
    return _before(chain(order.urgent, order.behind), request)


def _before(requests: Iterable[Request], request: Request) -> list[Request]:
    return list(takewhile(lambda other: other is not request, requests))


def _units(request: Request, block_size: int) -> int:
    return request.num_blocks(block_size) * UNITS_PER_BLOCK
