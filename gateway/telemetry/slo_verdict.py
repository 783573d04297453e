"""SLO verdict on one online request, with the cause of a miss.

Only objectives that limit single requests (`ttft_p99=1s`) are judged, as in `predictor.judge`; objectives on means
concern many requests.
"""

from dataclasses import dataclass, field

from engine.api import FinishReason, RequestClass, TokenCosts
from gateway.telemetry.account import Account
from predictor.slo import Objective, parse_slo

ENGINE_FAULT = "engine_fault"
QUEUE = "queue"
PREEMPTION = "preemption"
PREFILL = "prefill"
OWN_PROMPT = "own_prompt"
BESIDE_OTHERS = "prefill_beside_others"
STEP_TIME = "step_time"


@dataclass(frozen=True, slots=True)
class SLOVerdict:
    """Verdict on one request."""

    met: bool | None = None
    """None if undefined: offline work, no limit on single requests, or the client disconnected before a miss."""
    why: str | None = None
    """First cause in `missed`, or ENGINE_FAULT."""
    missed: dict[str, str] = field(default_factory=dict)
    """Cause by missed objective."""


def judge(account: Account, slo_text: str, costs: TokenCosts | None) -> SLOVerdict:
    """Judge an ended choice. `costs`: seconds per token, or None without a latency model."""
    if account.request.request_class is not RequestClass.ONLINE:
        return SLOVerdict()
    slo, promise = parse_slo(slo_text), account.request.promise
    limits = [o for o in slo.of(promise).objectives if o.per_request]
    left = account.finish is FinishReason.ABORT
    served = _served(account, left)
    values = slo.values(*served, promise)
    missed = {str(o): _cause(o, account, costs) for o in limits if values[o.key] > (o.limit or 0.0)}
    if promise is not None and not missed and not left and not promise.kept(*served):
        missed = {str(promise): STEP_TIME}
    if account.finish is FinishReason.ERROR:
        return SLOVerdict(False, ENGINE_FAULT, {} if account.ttft is None else missed)
    if missed:
        return SLOVerdict(False, next(iter(missed.values())), missed)
    return SLOVerdict(True if (limits or promise) and not left else None)


def _served(account: Account, left: bool) -> tuple[float | None, list[float]]:
    """Return TTFT and gaps as the client saw them; if it disconnected, including its last wait."""
    gaps = list(account.gaps)
    if left and account.ttft is None:
        return account.seconds, gaps
    return account.ttft, [*gaps, account.quiet] if left else gaps


def _cause(objective: Objective, account: Account, costs: TokenCosts | None) -> str:
    limit = objective.limit or 0.0
    if account.request.promise is not None:
        limit = min(limit, account.request.promise.limit(objective.metric))
    if objective.metric == "ttft" or (objective.metric == "e2e" and (account.ttft is None or account.ttft > limit / 2)):
        return _late_start(account, costs)
    return _long_gap(account, limit if objective.metric != "e2e" else 0.0)


def _late_start(account: Account, costs: TokenCosts | None) -> str:
    """Return the longest part of the time to first token: queue, predicted time of its own prompt, or the rest, when
    its prompt shared steps with other requests."""
    if account.evicted_before_token:
        return PREEMPTION
    queued, ttft = account.queued, account.ttft
    if queued is None or (ttft is not None and queued >= ttft - queued):
        return QUEUE
    if costs is None or ttft is None:
        return PREFILL
    prefill = ttft - queued
    own = min(prefill, costs.prefill * (account.num_prompt_tokens - account.num_cached_tokens))
    parts = {QUEUE: queued, OWN_PROMPT: own, BESIDE_OTHERS: prefill - own}
    return max(parts, key=lambda name: parts[name])


def _long_gap(account: Account, limit: float) -> str:
    """Return the cause of most of the time in gaps above the limit."""
    evicted = set(account.evicted_gaps)
    lost, slow = 0.0, account.quiet if account.finish is FinishReason.ABORT else 0.0
    for number, gap in enumerate(account.gaps):
        if gap > limit and number in evicted:
            lost += gap
        elif gap > limit:
            slow += gap
    return PREEMPTION if lost > slow else STEP_TIME
