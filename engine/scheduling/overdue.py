"""Keeps the maximum wait (`--max-queue-time`) of accepted requests under policies that let younger requests overtake.

A request is due the maximum wait after its arrival, or after its last token if it was preempted; a promise to the
request may shorten or lengthen that wait. A policy is free while
every waiting request would start in time behind those that are due earlier. When one that has waited PATIENCE of the
maximum would not, it and all that are due earlier start next, in this order, and no other request starts. Tenants that
compete are not bound by this: fair sharing decides between them.
"""

import math
from typing import NamedTuple

import numpy as np

from engine.api import RequestClass
from engine.arrays import FloatArray, IntArray
from engine.limits import UNITS_PER_BLOCK
from engine.request import Request
from engine.scheduling.laxity import PrefillPace
from engine.scheduling.state import SchedulerState
from engine.scheduling.waiting import fcfs
from predictor.features import BatchFeatures
from predictor.promise import DEFAULT_OUTPUT

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


def owes(state: SchedulerState, request: Request, now: float) -> bool:
    """Return whether a running request without a token since it started has waited so long that it keeps its memory."""
    times = request.times
    waited = now - (times.arrival if times.last_token is None else times.last_token)
    return waited >= PATIENCE * longest_queue_time(state, request)


def binds(state: SchedulerState) -> bool:
    """Return whether the policy may let a younger request overtake a waiting one that has a maximum wait."""
    policy = state.online_policy
    overtakes = policy.select is not None or policy.by_laxity or policy.order is not fcfs
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
