"""Whether a request can run at all, and whether an online one that arrives now is queued or refused (429).

An arrival is put into the order in which prompts get the time of steps (see `engine.scheduling.laxity`); what comes
before it there is what it waits for: prompt tokens, and rows and memory, which come free as running requests end. An
estimate from the latency model; without one nobody can tell and it is zero.
"""

import math

from engine.api import EngineRequest, RequestClass
from engine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from engine.request import Request
from engine.scheduling.laxity import by_age, order_prompts, prefill_pace, uses_laxity
from engine.scheduling.scheduler import Scheduler
from predictor.limits import UNITS_PER_BLOCK


def check_length(spec: EngineRequest, max_model_len: int) -> None:
    """Refuse what can never run. Raises InvalidRequestError, ContextLengthError."""
    prompt, output = len(spec.prompt_token_ids), spec.sampling.max_tokens
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt", code="invalid_value")
    if prompt + output > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens; the prompt has {prompt} and {output} more were asked for."
        )


def check_room(scheduler: Scheduler, request: Request, mean_output_tokens: float, now: float) -> None:
    """Refuse early what would only wait: the queue is full, or it could not start within the longest time to wait.

    What counts is the work that goes before the request, not its own prompt: an idle server refuses nothing. Raises
    QueueFullError, which says when it would fit.
    """
    waiting = len(scheduler.waiting_online)
    if waiting >= scheduler.config.max_num_waiting:
        raise QueueFullError(f"{waiting} requests are waiting already.")
    limit = scheduler.queue_time.longest(scheduler.objective.ttft)
    if math.isinf(limit):
        return
    wait = expected_wait(scheduler, request, mean_output_tokens, now)
    if wait > limit:
        raise QueueFullError(
            f"It could start in about {wait:.2g} s, and the longest time to wait is {limit:.4g} s.",
            retry_after=wait - limit,
        )


def expected_wait(scheduler: Scheduler, request: Request, mean_output_tokens: float, now: float) -> float:
    """Seconds until `request`, which arrives now, could start. `mean_output_tokens`: how long recent online answers
    were, to guess when rows and memory come free."""
    pace, config = prefill_pace(scheduler), scheduler.config
    running = scheduler.running[RequestClass.ONLINE]
    if pace is None or not (running or scheduler.waiting_online):
        return 0.0
    ahead = _ahead(scheduler, request, now)
    work = sum(pace.seconds_for(other) for other in ahead)
    waiting = [other for other in ahead if other.row < 0]
    # Rows and units come free as answers end, all of them in the time of one answer.
    reservation = scheduler.reservation()
    units = sum(_units(r, config.block_size) for r in (*running, *waiting, request)) - scheduler.pool.num_units
    units += reservation.held
    rows = len(running) + len(waiting) + 1 + len(reservation.protected) + reservation.rows
    lack = max((rows - config.max_num_seqs) / config.max_num_seqs, 0.0)
    lack = max(lack, units / scheduler.pool.num_units)
    step = pace.per_token * pace.chunk if work else pace.step
    return max(pace.step + work if work else 0.0, lack * mean_output_tokens * step)


def _ahead(scheduler: Scheduler, request: Request, now: float) -> list[Request]:
    """The prompts, running or waiting, that go before a request that arrives now."""
    others = [*scheduler.running_prompts(), *scheduler.waiting_online]
    if not uses_laxity(scheduler):
        return others
    both = [*sorted(others, key=by_age), request]
    urgent, _ = order_prompts(both, scheduler.objective, prefill_pace(scheduler), now)
    return list(urgent[:-1]) if urgent and urgent[-1] is request else others


def _units(request: Request, block_size: int) -> int:
    return (len(request.token_ids) // block_size + 1) * UNITS_PER_BLOCK
