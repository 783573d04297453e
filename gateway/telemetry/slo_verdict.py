"""SLO verdict on one online request, with the cause of a miss.

Only objectives that limit single requests (`ttft_p99=1s`) are judged, as in `predictor.judge`; objectives on means
concern many requests.
"""

import functools
from dataclasses import dataclass, field

from engine.api import FinishReason, RequestClass, TokenCosts
from gateway.telemetry.account import Account
from predictor.slo import SLO, Objective

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
    limits = _limits(slo_text)
    left = account.finish is FinishReason.ABORT
    served = _served(account, left)
    missed = {str(o): _cause(o, account, costs) for o in limits if o.value(*served) > (o.limit or 0.0)}
    if account.finish is FinishReason.ERROR:
        return SLOVerdict(False, ENGINE_FAULT, {} if account.ttft is None else missed)
    if missed:
        return SLOVerdict(False, next(iter(missed.values())), missed)
    return SLOVerdict(True if limits and not left else None)


@functools.lru_cache(maxsize=8)
def _limits(slo_text: str) -> tuple[Objective, ...]:
    return tuple(o for o in SLO.parse(slo_text).objectives if o.per_request) if slo_text else ()


def _served(account: Account, left: bool) -> tuple[float | None, list[float]]:
    """Return TTFT and gaps as the client saw them; if it disconnected, including its last wait."""
    gaps = list(account.gaps)
    if left and account.ttft is None:
        return account.seconds, gaps
    return account.ttft, [*gaps, account.quiet] if left else gaps


def _cause(objective: Objective, account: Account, costs: TokenCosts | None) -> str:
    return _late_start(account, costs) if objective.metric == "ttft" else _long_gap(account, objective.limit or 0.0)


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
