"""Without chunked prefill a step holds prompts or decodes, never both: whose turn it is (Apt-Serve §5, to compare)."""

import enum
from collections.abc import Iterable

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.selection import has_missed, pending_time
from engine.scheduling.state import SchedulerState


class IterationType(enum.Enum):
    """What one iteration runs when prompts are not chunked into the steps of the decodes."""

    PREFILL = "prefill"
    DECODE = "decode"


def choose_turns(state: SchedulerState, now: float) -> tuple[IterationType, IterationType]:
    """Which iteration comes next, and what is run in its place if nothing can run in it."""
    waiting, running = state.waiting_online, state.running[RequestClass.ONLINE]
    first = IterationType.PREFILL
    if running and (not waiting or state.online_policy.select is not None):
        first = vote((_ballot(state, r, now) for r in waiting), (_ballot(state, r, now) for r in running))
    other = IterationType.DECODE if first is IterationType.PREFILL else IterationType.PREFILL
    return first, other


def vote(waiting: Iterable[tuple[float, bool]], running: Iterable[tuple[float, bool]]) -> IterationType:
    """The queue with the larger sum of pending times decides; equal sums decode. Items: (pending time, savable).

    A request that has missed its SLO has no vote, unless all have missed theirs. An empty queue never wins.
    """
    waiting, running = list(waiting), list(running)
    if not waiting or not running:
        return IterationType.PREFILL if waiting else IterationType.DECODE
    only_savable = any(savable for _, savable in (*waiting, *running))
    urgent_waiting, urgent_running = (
        sum(pending for pending, savable in queue if savable or not only_savable) for queue in (waiting, running)
    )
    return IterationType.PREFILL if urgent_waiting > urgent_running else IterationType.DECODE


def _ballot(state: SchedulerState, request: Request, now: float) -> tuple[float, bool]:
    """(pending time, whether it has kept its SLO so far)."""
    times, objective = request.times, state.objective
    missed = has_missed(now, times.arrival, times.first_token, times.last_token, ttft=objective.ttft, tbt=objective.tbt)
    return pending_time(now, times.arrival, times.last_token), not missed
