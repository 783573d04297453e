"""Steps without chunked prefill: each is an iteration of prompts, whole, or one of decodes (Apt-Serve §5; for
comparison).

A policy that chooses by a knapsack lets the pending times of both queues vote; the others run prompts first while they
fit, as engines did before chunked prefill. Offline prompts share the iterations of online ones as far as the budget
allows, and have their own when no online request runs. Whoever starts counts as a prompt, even when all of its past but
one token is there already.
"""

from engine.api import RequestClass
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.values import IterationType, has_missed, pending_time, vote


def choose_turns(scheduler: Scheduler, now: float) -> tuple[IterationType, IterationType]:
    """Which iteration comes next, and what is run in its place if nothing can run in it."""
    waiting, running = scheduler.waiting_online, scheduler.running[RequestClass.ONLINE]
    first = IterationType.PREFILL
    if running and (not waiting or scheduler.online_policy.select is not None):
        first = vote((_ballot(scheduler, r, now) for r in waiting), (_ballot(scheduler, r, now) for r in running))
    other = IterationType.DECODE if first is IterationType.PREFILL else IterationType.PREFILL
    return first, other


def _ballot(scheduler: Scheduler, request: Request, now: float) -> tuple[float, bool]:
    """(pending time, whether it has kept its SLO so far)."""
    times, objective = request.times, scheduler.objective
    missed = has_missed(now, times.arrival, times.first_token, times.last_token, ttft=objective.ttft, tbt=objective.tbt)
    return pending_time(now, times.arrival, times.last_token), not missed
