"""Whether an online request got what was promised, and if not, which measured part of it took the time.

Judged by the limits on single requests (`ttft_p99=1s`), as `predictor.judge` does; means and tolerances are promises
about many requests and say nothing of one.
"""

import functools
from dataclasses import dataclass, field

from engine.api import FinishReason, RequestClass, TokenCosts
from gateway.telemetry.account import Account
from predictor.judge import Served, own_value
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
    """`met` None: nobody can tell (offline work, no limit on single requests, or the client left in time). `missed`
    names a cause by the objective that it broke; `why` is the first of them, or an engine fault."""

    met: bool | None = None
    why: str | None = None
    missed: dict[str, str] = field(default_factory=dict)


def judge(account: Account, slo_text: str, costs: TokenCosts | None) -> SLOVerdict:
    """The verdict on a choice that ended. `costs`: seconds a token, None where no latency model is known."""
    if account.request.request_class is not RequestClass.ONLINE:
        return SLOVerdict()
    limits = _limits(slo_text)
    left = account.finish is FinishReason.ABORT
    served = _served(account, left)
    missed = {str(o): _cause(o, account, costs) for o in limits if own_value(o, served) > (o.limit or 0.0)}
    if account.finish is FinishReason.ERROR:
        return SLOVerdict(False, ENGINE_FAULT, {} if account.ttft is None else missed)
    if missed:
        return SLOVerdict(False, next(iter(missed.values())), missed)
    return SLOVerdict(True if limits and not left else None)


@functools.lru_cache(maxsize=8)
def _limits(slo_text: str) -> tuple[Objective, ...]:
    return tuple(o for o in SLO.parse(slo_text).objectives if o.per_request) if slo_text else ()


def _served(account: Account, left: bool) -> Served:
    """As the client saw it; who left counts with what it had waited until then."""
    gaps = list(account.gaps)
    if left and account.ttft is None:
        return Served(0.0, account.seconds, gaps)
    return Served(0.0, account.ttft, [*gaps, account.quiet] if left else gaps)


def _cause(objective: Objective, account: Account, costs: TokenCosts | None) -> str:
    return _late_start(account, costs) if objective.metric == "ttft" else _long_gap(account, objective.limit or 0.0)


def _late_start(account: Account, costs: TokenCosts | None) -> str:
    """The longest part of the wait for the first token: in the queue, its own prompt alone (as predicted), or the rest,
    in which its prompt ran beside others."""
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
    """Where most of the time of the gaps beyond the limit went."""
    evicted = set(account.evicted_gaps)
    lost, slow = 0.0, account.quiet if account.finish is FinishReason.ABORT else 0.0
    for number, gap in enumerate(account.gaps):
        if gap > limit and number in evicted:
            lost += gap
        elif gap > limit:
            slow += gap
    return PREEMPTION if lost > slow else STEP_TIME
