"""Whether a request can run at all, and whether an online one that arrives now is queued or refused (429).

The time to wait is that of two queues in a row: the prompt tokens ahead of it, at the rate that the decodes beside them
allow, and the rows, which come free as running requests end. An estimate from the latency model; without one nobody can
tell and it is zero.
"""

import math

from engine.errors import ContextLengthError, InvalidRequestError, QueueFullError
from engine.request import EngineRequest, RequestClass
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import prefill_is_due
from predictor.features import BatchFeatures


def check_length(spec: EngineRequest, max_model_len: int) -> None:
    """Refuse what can never run. Raises InvalidRequestError, ContextLengthError."""
    prompt, output = len(spec.prompt_token_ids), spec.sampling.max_tokens
    if not prompt:
        raise InvalidRequestError("The prompt is empty.", param="prompt", code="invalid_value")
    if prompt + output > max_model_len:
        raise ContextLengthError(
            f"This model's context is {max_model_len} tokens; the prompt has {prompt} and {output} more were asked for."
        )


def check_room(scheduler: Scheduler, mean_output_tokens: float) -> None:
    """Refuse early what would only wait: the queue is full, or its TTFT objective is already out of reach.

    What counts is the work ahead of the request, not its own prompt: an idle server refuses nothing. Raises
    QueueFullError.
    """
    waiting = len(scheduler.waiting_online)
    if waiting >= scheduler.config.max_num_waiting:
        raise QueueFullError(f"{waiting} requests are waiting already.")
    limit = scheduler.objective.ttft
    if not scheduler.config.refuse_late:
        return
    wait = expected_wait(scheduler, mean_output_tokens)
    if wait > limit:
        raise QueueFullError(
            f"About {wait:.2g} s of work is waiting already, beyond the TTFT objective of {limit:g} s.",
            retry_after=wait - limit,
        )


def expected_wait(scheduler: Scheduler, mean_output_tokens: float) -> float:
    """Seconds. `mean_output_tokens`: how long recent online answers were, to guess when rows come free."""
    model, config = scheduler.model, scheduler.config
    running, waiting = scheduler.running[RequestClass.ONLINE], scheduler.waiting_online
    if model is None or not (running or waiting):
        return 0.0
    ahead = sum(len(r.token_ids) for r in waiting)
    ahead += sum(len(r.token_ids) - r.num_computed_tokens for r in running if prefill_is_due(r))
    excess = len(running) + len(waiting) + 1 - config.max_num_seqs
    if ahead == 0 and excess <= 0:
        return 0.0
    features = BatchFeatures()
    decodes = [r for r in running if r.times.first_token is not None]
    features.add_decodes(len(decodes), sum(len(r.token_ids) for r in decodes))
    room = max(0.0, scheduler.objective.tbt - model.predict(features)) if decodes else math.inf
    tokens = max(1, min(ahead, config.max_num_batched_tokens - len(decodes)))
    chunk = tokens if math.isinf(room) else model.max_prefill(features, room, tokens, 0)
    chunk = max(chunk, min(tokens, config.min_prefill_chunk))
    step = model.predict(features) + model.marginal(features, 0, chunk)
    wait = step * ahead / chunk
    if excess > 0:
        # Rows come free at the rate at which answers end: one every (mean length · step) ÷ rows seconds.
        wait = max(wait, excess * mean_output_tokens * step / config.max_num_seqs)
    return wait
